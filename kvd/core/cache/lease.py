"""What a lease is asked for, and the records of what it may have beside its pages.

The record of a lease itself is ``lease_record``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.types import NO_PAGES, Pages, Tokens, count

if TYPE_CHECKING:
    from kvd.core.cache.radix_node import RadixNode

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

COPY = "copy"
"""The holder while its engine copies between pages and blocks of its own (``engine_copies``)."""

FORMER_COPY = "copies of before"
"""The holder while a process of before a restart may still copy, which has not come back yet."""

COPIES = frozenset({SAVE, RESTORE, FETCH, COPY})
"""Those that read or write pages for a copy."""

LASTING = frozenset({COPY, FORMER_COPY})
"""Copies that go on when this process ends: what they hold is nobody else's over a restart."""

OUTLIVING = LASTING | {ENGINE}
"""Holders for whose sake pages stay noted as somebody's."""

DEMOTION = "demotion"
"""The holder while a storage process reads cached pages that will leave the pool (``tiers``)."""

PROMOTION = "promotion"
"""The holder while a storage process writes pages that somebody waits for, or waited for."""

MOVING = frozenset({DEMOTION, PROMOTION})
"""Those of a move between the pool and a tier: it ends by its answer, or with that process."""

PIN = "pin"
"""The holder that wants a cached prefix found again, and gives way (``leases.pins``)."""

UNPROVEN = "unproven"
"""The holder of pages that only leases of before a restart may still read."""


class Lent(msgspec.Struct, frozen=True, gc=False):
    """Pages of an arena while a receive fills them: whose they are, for whom, and from where on.

    ``first_page`` is the page of the prompt that the first of them holds.
    """

    arena: int
    receive: int
    first_page: int


class Claim(msgspec.Struct, frozen=True, gc=False):
    """What a lease is asked for, and for whom.

    ``reason`` is ``lease`` or ``receive from PEER``; ``holder`` is ``ENGINE`` or ``ARRIVAL``.
    ``resumes`` is the retracted lease that takes pages again, 0 for a new one; ``match_tokens`` is
    the longest prefix that it may take from the tree. ``fresh_tokens``: pages of the components
    beside the first are written from this token on by somebody else, a remote or a restore; None:
    the engine computes them, and goes on from what the tree has. ``step_tokens``: so many at once.
    ``promise_tokens``: so many more are promised behind the reserve; no page is taken for them.
    ``goes_on``: tokens follow that it does not name, so all that it names may be cached. ``lent``:
    it takes these ``pages`` of an arena, and neither looks into the tree nor takes any other.
    ``only_cached``: what is cached of its tokens is all that it wants, and it takes no page.
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
    promise_tokens: int = 0
    goes_on: bool = False
    lent: Lent | None = None
    pages: Pages = NO_PAGES
    only_cached: bool = False

    @property
    def room_tokens(self) -> int:
        """Tokens that must have a slot."""
        return count(self.tokens) + self.reserve_tokens

    @property
    def whole(self) -> Claim:
        """What it would be if it took pages for what is promised too."""
        if not self.promise_tokens:
            return self
        reserve_tokens = self.reserve_tokens + self.promise_tokens
        return msgspec.structs.replace(self, reserve_tokens=reserve_tokens, promise_tokens=0)


Demand = tuple[int, ...]
"""Pages of each component that has pages of its own, the first one first."""


class Claimed:
    """A claim whose prefix is locked and whose pages are there for it, but not taken yet.

    It takes ``demand``; it keeps ``kept`` from others, which is that and what it is promised.
    """

    __slots__ = ("anchor", "claim", "demand", "kept")

    def __init__(self, claim: Claim, anchor: RadixNode, demand: Demand, kept: Demand) -> None:
        self.claim = claim
        self.anchor = anchor
        self.demand = demand
        self.kept = kept


class Shortage(msgspec.Struct, frozen=True):
    """Not enough pages of the component ``budget``, and nothing was changed.

    ``headroom_pages`` is read with the cached prefix locked: less than none is obtainable where
    that locks pages that are promised to others.
    """

    needed_pages: int
    headroom_pages: int
    budget: str

    @property
    def missing_pages(self) -> int:
        """What is short."""
        return self.needed_pages - self.headroom_pages

    @property
    def words(self) -> str:
        """For whoever is refused what is cached, because it is promised to leases."""
        return f"{self.missing_pages} pages of {self.budget} are short"

    @property
    def obtainable_pages(self) -> int:
        """The headroom, for whoever is told of it."""
        return max(0, self.headroom_pages)


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
