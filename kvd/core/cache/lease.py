"""One owner's claim on one sequence: a lock on its cached prefix, and held pages for the rest.

The page table of a lease has the page of every ``page_size`` tokens, in order::

    pages   | cached: the path to ``anchor``        | held: this lease's own                |
            0                                     owned                     count(page_table)
    tokens    0 .. anchor.end_tokens                  known tokens .. room_tokens

A retracted lease has neither lock nor pages; ``saved`` are the bytes that it will want back.

Plain records: read them; only the lease table and its saved area write them.

Invariants: anchor.end_tokens == owned * page_size; owned <= count(page_table).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.core.cache.lease_state import LeaseStage
from kvd.types import NO_PAGES, Pages, Tokens, count, slice_pages

if TYPE_CHECKING:
    from kvd.core.cache.radix_node import RadixNode
    from kvd.errors import Refusal

ENGINE = "engine"
"""The holder that is the session itself; a send is held by ``send N``."""

ARRIVAL = "arrival"
"""The holder while a remote writes the pages: no request of an engine may touch them."""


SAVE = "save"
"""The holder while its pages are copied out: the copy reads them and writes the saved area."""

RESTORE = "restore"
"""The holder while its saved pages are copied back: the copy writes its pages."""

FETCH = "fetch"
"""The holder while pages are copied to its device buffer: it reads the lease's, writes those."""

UNPROVEN = "unproven"
"""The holder of pages that only leases of before a restart may still read."""


class Claim(msgspec.Struct, frozen=True):
    """What a lease is asked for, and for whom.

    ``reason`` is ``lease`` or ``receive from PEER``; ``holder`` is ``ENGINE`` or ``ARRIVAL``.
    ``resumes`` is the retracted lease that takes pages again, 0 for a new one; ``match_tokens`` is
    the longest prefix that it may take from the tree. ``fresh_tokens``: pages of the components
    beside the first are written from this token on by somebody else, a remote or a restore; None:
    the engine computes them, and goes on from what the tree has. ``step_tokens``: so many at once.
    """

    session: int
    call: int
    """The request of that session which it answers."""
    reason: str
    room: int
    namespace: str
    tokens: Tokens
    reserve_tokens: int
    priority: int
    cache: bool
    holder: str = ENGINE
    resumes: int = 0
    match_tokens: int | None = None
    fresh_tokens: int | None = None
    step_tokens: int = 0

    @property
    def room_tokens(self) -> int:
        """Tokens that must have a slot."""
        return count(self.tokens) + self.reserve_tokens


Demand = tuple[int, ...]
"""Pages of each component that has pages of its own, the first one first."""


class Claimed:
    """A claim whose prefix is locked and whose pages are promised, but not taken yet."""

    __slots__ = ("anchor", "claim", "demand")

    def __init__(self, claim: Claim, anchor: RadixNode, demand: Demand) -> None:
        self.claim = claim
        self.anchor = anchor
        self.demand = demand


class Shortage(msgspec.Struct, frozen=True):
    """Not enough pages of the component ``budget``, and nothing was changed."""

    needed_pages: int
    headroom_pages: int
    budget: str


class Writer(msgspec.Struct, frozen=True):
    """A remote that may write: one process lifetime of a peer."""

    peer: str
    incarnation: str


class Quarantine(msgspec.Struct, frozen=True):
    """Which remotes may still write the pages (I7), since when, and why it is so."""

    writers: tuple[Writer, ...]
    since_s: float
    why: str

    @property
    def peers(self) -> str:
        """Their names."""
        return ", ".join([writer.peer for writer in self.writers])


class PageSpan(msgspec.Struct, frozen=True):
    """Pages of one component from index ``first`` of its page table on."""

    first: int
    pages: Pages


class SavedPart(msgspec.Struct, frozen=True):
    """One component of what is saved: page ``first + i`` is in ``slots[i]`` of the area."""

    component: str
    first: int
    slots: Pages


class Saved(msgspec.Struct, frozen=True):
    """The bytes of a lease outside the pool; ``tokens`` are those whose KV is there.

    ``fresh_tokens``: from this token on something beside the first component is saved. The amounts
    count all components, those in lockstep with another too.
    """

    tokens: Tokens
    parts: tuple[SavedPart, ...]
    fresh_tokens: int
    n_pages: int
    n_bytes: int


class LeaseRecord:
    """One claim. Read it; only ``LeaseTable`` and its saved area write it."""

    __slots__ = (
        "anchor",
        "awaited_tokens",
        "cache",
        "deferred",
        "holders",
        "id",
        "is_whole",
        "lost",
        "namespace",
        "owned",
        "page_table",
        "prefix_tokens",
        "priority",
        "quarantine",
        "reads",
        "reason",
        "retracted_s",
        "room",
        "room_tokens",
        "said",
        "saved",
        "sent_from",
        "session",
        "since_s",
        "state",
        "step_tokens",
        "tokens",
        "touched_s",
        "unswapped_from",
        "written_tokens",
    )

    def __init__(self, lease_id: int, claim: Claim, anchor: RadixNode, page_table: Pages) -> None:
        self.id = lease_id
        self.session = claim.session
        self.reason = claim.reason
        self.room = claim.room
        self.namespace = claim.namespace
        self.priority = claim.priority
        self.cache = claim.cache
        self.step_tokens = claim.step_tokens
        self.tokens = claim.tokens
        self.room_tokens = claim.room_tokens
        self.anchor: RadixNode | None = anchor
        self.page_table = page_table
        self.owned = 0
        """Pages of the table that are the tree's; the lock on ``anchor`` keeps them."""
        self.prefix_tokens = anchor.end_tokens
        self.written_tokens = anchor.end_tokens
        """So many tokens' KV is in its pages, as far as its engine has said so."""
        self.said: tuple[int, ...] = ()
        """By rank, how far it has said to have written (``leases.written``); none: nobody has."""
        self.awaited_tokens = 0
        """So many are written once an event has come that a send was told of."""
        self.since_s = 0.0
        self.touched_s = 0.0
        """When it was opened, extended or committed last."""
        self.holders = {claim.holder}
        self.reads = 0
        """Posts and copies that read its pages now."""
        self.deferred = NO_PAGES
        """Its pages that a commit replaced by equal cached ones; kept until nobody reads them."""
        self.unswapped_from: int | None = None
        """First page of which its engine still uses its own, which is among ``deferred``."""
        self.is_whole = False
        """Whether nothing was computed beyond what is committed; said with the last commit."""
        self.sent_from: int | None = None
        """First token whose window pages a send of its prompt may still need."""
        self.quarantine: Quarantine | None = None
        self.lost: Refusal | None = None
        """Why it can only be released: it was found broken (``containment``)."""
        self.state = LeaseStage.RUNNING
        self.saved: Saved | None = None
        self.retracted_s = 0.0
        """When it was last retracted."""

    @property
    def held(self) -> Pages:
        """The pages that are this lease's own, duplicates not yet given back included."""
        own = slice_pages(self.page_table, self.owned)
        return Pages(own + self.deferred if self.deferred else own)

    @property
    def saved_tokens(self) -> int:
        """Tokens whose KV is in the saved area."""
        return count(self.saved.tokens) if self.saved is not None else 0

    @property
    def saved_pages(self) -> int:
        """Pages of the saved area that it has, of all components."""
        return self.saved.n_pages if self.saved is not None else 0

    @property
    def saved_bytes(self) -> int:
        """What they hold."""
        return self.saved.n_bytes if self.saved is not None else 0

    @property
    def is_blank(self) -> bool:
        """Whether its own pages do not hold yet what they stand for: it is still to be restored."""
        return self.state is LeaseStage.RESUMING or self.state is LeaseStage.RESTORING

    @property
    def held_pages(self) -> int:
        """How many they are."""
        return count(self.page_table) + count(self.deferred) - self.owned
