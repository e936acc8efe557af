"""One owner's claim on one sequence: a lock on its cached prefix, and held pages for the rest.

The page table of a lease has the page of every ``page_size`` tokens, in order::

    pages   | cached: the path to ``anchor``        | held: this lease's own                |
            0                                     owned                     count(page_table)
    tokens    0 .. anchor.end_tokens                  known tokens .. room_tokens

A retracted lease has neither lock nor pages; ``saved`` are the bytes that it will want back.

Plain records: read them; only the parts of the lease table and its saved area write them.

Invariants: anchor.end_tokens == owned * page_size; owned <= count(page_table).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.cache.lease_state import LeaseStage
from kvd.types import ID_BYTES, NO_PAGES, Pages, count, slice_pages

if TYPE_CHECKING:
    from kvd.core.cache.engine_copy import LeaseCopying
    from kvd.core.cache.lease import Claim, Demand, Lent, Quarantine, Saved
    from kvd.core.cache.radix_node import RadixNode
    from kvd.errors import Refusal


@mypyc_attr(allow_interpreted_subclasses=True)
class LeaseSends:
    """What the sends of a lease need, all together."""

    __slots__ = ("gives_way", "upto_tokens", "window_from")

    def __init__(self) -> None:
        self.window_from: int | None = None
        """First token whose window pages a send may still need."""
        self.upto_tokens = 0
        """So many of its first tokens are sent, by the longest of them."""
        self.gives_way: tuple[str, ...] = ()
        """Sends for whose sake the lease stays only while nobody needs its pages."""


@mypyc_attr(allow_interpreted_subclasses=True)
class LeasePromise:
    """Pages that a lease is sure of and does not have yet (``leases.promises``)."""

    __slots__ = ("pages", "upto_tokens")

    def __init__(self, upto_tokens: int) -> None:
        self.upto_tokens = upto_tokens
        """They are for so many first tokens."""
        self.pages: Demand = ()
        """Of each component, what is promised now; none: the promise has ended."""


@mypyc_attr(allow_interpreted_subclasses=True)
class LeaseRecord:
    """One claim. Read it; only the parts of ``LeaseTable`` and its saved area write it."""

    __slots__ = (
        "anchor",
        "awaited",
        "cache",
        "copying",
        "deferred",
        "events",
        "holders",
        "id",
        "is_arena",
        "is_whole",
        "lent",
        "lost",
        "namespace",
        "owned",
        "page_table",
        "prefix_tokens",
        "priority",
        "promise",
        "quarantine",
        "reads",
        "reason",
        "retracted_s",
        "room",
        "room_tokens",
        "said",
        "saved",
        "sends",
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
        self.session, self.reason, self.room = claim.session, claim.reason, claim.room
        self.namespace, self.priority = claim.namespace, claim.priority
        self.cache = claim.cache
        self.step_tokens = claim.step_tokens
        self.tokens = claim.tokens
        self.room_tokens = len(claim.tokens) // ID_BYTES + claim.reserve_tokens
        self.anchor: RadixNode | None = anchor
        self.page_table = page_table
        self.owned = 0
        """Pages of the table that are the tree's; the lock on ``anchor`` keeps them."""
        self.prefix_tokens = anchor.end_tokens
        self.written_tokens = anchor.end_tokens
        """So many tokens' KV is in its pages, as far as its engine has said so."""
        self.said: tuple[int, ...] = ()
        """By rank, how far it has said to have written (``leases.written``); none: nobody has."""
        self.awaited: tuple[int, ...] = ()
        """By rank, how far it has written once its event has come; none: no event was named."""
        self.events: tuple[bytes, ...] = ()
        """By rank, that event; empty where it named none."""
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
        self.sends: LeaseSends | None = None
        """What its sends need of it; None: there is none."""
        self.quarantine: Quarantine | None = None
        self.is_arena = False
        """Whether an engine alone says what is in its pages (``arenas``)."""
        self.copying: LeaseCopying | None = None
        """What its engine copies of it; None: it never did."""
        self.lent: Lent | None = None
        """Of pages that an arena lends to one receive: which, and where its row begins."""
        self.lost: Refusal | None = None
        """Why it can only be released: it was found broken (``containment``)."""
        self.state = LeaseStage.RUNNING
        self.promise: LeasePromise | None = None
        """None: nothing beyond its pages was ever promised to it."""
        self.saved: Saved | None = None
        self.retracted_s = 0.0
        """When it was last retracted."""

    @property
    def held(self) -> Pages:
        """The pages that are this lease's own, duplicates not yet given back included."""
        own = slice_pages(self.page_table, self.owned)
        return Pages(own + self.deferred if self.deferred else own)

    @property
    def promised_pages(self) -> int:
        """Pages of the first component that are promised to it."""
        return self.promised_of(0)

    def promised_of(self, index: int) -> int:
        """The same of one component, by its place in a demand."""
        promise = self.promise
        return promise.pages[index] if promise is not None and promise.pages else 0

    @property
    def promised_tokens(self) -> int:
        """Tokens that it was promised beyond those with a slot; a resume asks for them again."""
        promise = self.promise
        return 0 if promise is None else max(0, promise.upto_tokens - self.room_tokens)

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
