"""Which page of a lease is in which slot of its device buffer. Pure: it moves no page and no byte.

Pages are logical: page ``n`` of a sequence has its tokens from ``n * page_size`` on, wherever its
bytes lie in host memory at the moment. So a commit that swaps a page of it for an equal cached
one leaves what is here right: equal tokens behind an equal prefix are the same KV to the cache, and
the copy was made from one of the two.

    slots    0 | 1 | 2 | 3 | 4 | 5        their device pages are the lease's, in this order
    pages    7 | 0 |   | 12| 3 |          order of use, longest ago first: 0, 12, 7, 3
                         ^ being copied

A slot is given to another page when its own is the one used longest ago, is not wanted by whoever
asks, and is under no copy. A page with a copy under way is pinned: the copy may still write its
slot.

**Unfinished pages.** Host memory is the truth, and the engine writes there. A page whose tokens
are not all committed will be written again, so what was copied of it counts for one fetch: the next
one copies it again, into the same slot. A page that was whole when it was copied never changes.

Invariants: a page has at most one slot and a slot at most one page; free + taken = all slots; what
is being copied, or is unfinished, has a slot.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


@mypyc_attr(allow_interpreted_subclasses=True)
class Residency:
    """The slots of one lease."""

    __slots__ = ("_copying", "_free", "_unfinished", "hits", "misses", "n_slots", "slots")

    def __init__(self, n_slots: int) -> None:
        self.hits = self.misses = 0
        """Of the pages that its engine wanted; for eyes only."""
        self.n_slots = 0
        self.slots: OrderedDict[int, int] = OrderedDict()
        """By page; the one used longest ago first."""
        self._free: list[int] = []
        """The one that is taken next is the last."""
        self._copying: dict[int, int] = {}
        """By page, the ticket of the copy that writes its slot."""
        self._unfinished: set[int] = set()
        """Pages that were not whole when they were last copied."""
        self.grow(n_slots)

    @property
    def n_copying(self) -> int:
        """Pages whose copies are under way."""
        return len(self._copying)

    def grow(self, n_slots: int) -> None:
        """There are so many slots now."""
        # Below those that are free, highest first: the last is taken first, so slots go out in
        # ascending order and a preloaded prompt has its page ``n`` in slot ``n``.
        self._free[:0] = range(n_slots - 1, self.n_slots - 1, -1)
        self.n_slots = n_slots

    # ---- asking ------------------------------------------------------------------------------

    def want(self, pages: Collection[int], whole_pages: int) -> list[int] | None:
        """Have a slot for each of ``pages``, all different and not more than there are slots.

        Pages below ``whole_pages`` are whole. Returns those to be copied now, in their order; None
        where a copy under way has a slot that is needed: ask again when it is over, nothing has
        changed.
        """
        kept = set(pages)
        stale = self._unfinished & kept
        # A second copy into the same slot beside the first: whichever ended last would win.
        if self._copying.keys() & stale:
            return None
        new = [page for page in pages if page not in self.slots]
        if not self._make_free(len(new), kept):
            return None
        for page in new:
            self.slots[page] = self._free.pop()
        for page in pages:
            self.slots.move_to_end(page)
        copied = {*stale, *new}
        missing = [page for page in pages if page in copied]
        # Marked by what is whole now: bytes that are written after this are not in the copy.
        self._unfinished.difference_update(missing)
        self._unfinished.update(page for page in missing if page >= whole_pages)
        return missing

    def want_ahead(
        self, pages: Iterable[int], whole_pages: int, kept: Collection[int]
    ) -> list[int]:
        """Have slots for as many of ``pages`` as there is place beside ``kept``.

        Returns those to be copied. A page that is not whole is left out: it would be copied again.
        """
        # What is hoped for does not push out something else that is hoped for.
        kept = {*kept, *pages}
        missing = []
        for page in pages:
            if page in self.slots:
                self.slots.move_to_end(page)
            elif page < whole_pages and self._make_free(1, kept):
                self.slots[page] = self._free.pop()
                missing.append(page)
        return missing

    def is_there(self, pages: Iterable[int]) -> bool:
        """Whether each of them has a slot and no copy writes it any more."""
        if self._copying.keys() & pages:
            return False
        return self.slots.keys() >= set(pages)

    def needs_no_copy(self, pages: Iterable[int]) -> bool:
        """Whether each of them has been copied for good, or is being copied so."""
        return self.slots.keys() >= set(pages) and self._unfinished.isdisjoint(pages)

    def _make_free(self, n_slots: int, kept: Collection[int]) -> bool:
        """Have so many free slots, none of them taken from ``kept``; or change nothing."""
        short = n_slots - len(self._free)
        if short <= 0:
            return True
        idle: list[int] = []
        for page in self.slots:
            if len(idle) == short:
                break
            if page not in kept and page not in self._copying:
                idle.append(page)
        if len(idle) < short:
            return False
        self._drop(idle)
        return True

    def _drop(self, pages: Iterable[int]) -> None:
        # The slot that was idle for longest is the next to be taken.
        self._free += reversed([self.slots.pop(page) for page in pages])
        self._unfinished.difference_update(pages)

    # ---- copies ------------------------------------------------------------------------------

    def copying(self, pages: Sequence[int], ticket: int) -> None:
        """That copy writes the slots of ``pages`` from now on."""
        for page in pages:
            self._copying[page] = ticket

    def copied(self, ticket: int) -> None:
        """That copy is over: its pages are there."""
        for page in self._under(ticket):
            del self._copying[page]

    def not_copied(self, ticket: int) -> None:
        """That copy is over, and what is in its slots is anything: they are free."""
        pages = self._under(ticket)
        for page in pages:
            del self._copying[page]
        self._drop(pages)

    # ---- audit -------------------------------------------------------------------------------

    @property
    def tickets(self) -> set[int]:
        """Of the copies that are said to be under way."""
        return set(self._copying.values())

    def broken(self) -> str:
        """Which of the invariants does not hold; empty where all of them do."""
        if sorted([*self.slots.values(), *self._free]) != list(range(self.n_slots)):
            return (
                f"has {len(self.slots)} slots taken and {len(self._free)} free, of {self.n_slots}"
            )
        if not (self._copying.keys() | self._unfinished) <= self.slots.keys():
            return "copies pages that have no slot"
        return ""

    def _under(self, ticket: int) -> list[int]:
        return [page for page, by in self._copying.items() if by == ticket]
