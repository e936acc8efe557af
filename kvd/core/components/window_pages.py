"""The window pages of one lease, and those beside one node. Plain records of ``windows``.

A lease has window pages for one stretch of its row, and the null page everywhere else::

    row      | 0 0 0 0 | tree | own own own own | 0 0 0 |      one id per page of tokens
             0       floor   start            top      room
    spare    pages of its own that stand nowhere in the row now

The window behind its prefix is the tree's and locked (``fence`` to ``start``); the rest is its own.

Invariant: fence <= start, floor <= top <= room; ``pages`` has an id, and never the null page, for
each page of ``[floor, top)``.
"""

from __future__ import annotations

from kvd.types import ID_BYTES, NO_PAGES, Pages, count


class NodeWindow:
    """The window pages beside one node, and the leases that need them."""

    __slots__ = ("locks", "pages")

    def __init__(self, pages: Pages, locks: int) -> None:
        self.pages = pages
        self.locks = locks


class LeaseWindow:
    """What one lease has, counted in pages of its row; see the picture above."""

    __slots__ = ("fence", "floor", "pages", "room", "spare", "start", "step", "top", "upto")

    def __init__(self, start: int, fence: int, room: int, step: int, upto: int) -> None:
        self.floor = fence
        """First page that is mapped."""
        self.fence = fence
        """First page of the tree that it locks; equal to ``start`` where it locks none."""
        self.start = start
        """First page that is its own."""
        self.top = start
        """End of what is mapped."""
        self.room = room
        """Pages of the row."""
        self.step = step
        """Tokens that are computed between two slides; 0: no limit."""
        self.upto = upto
        """Token that is computed next."""
        self.pages = bytearray()
        """Those of ``[floor, top)``."""
        self.spare = NO_PAGES

    @property
    def n_own_pages(self) -> int:
        """How many pages are its own."""
        return self.top - max(self.floor, self.start) + count(self.spare)

    def page_table(self) -> Pages:
        """One id per page of the row, the null page where there is none."""
        before, after = bytes(self.floor * ID_BYTES), bytes((self.room - self.top) * ID_BYTES)
        return Pages(before + self.pages + after)

    def mapped(self, first: int, last: int) -> Pages:
        """Those of ``[first, last)``, which is mapped."""
        skip = self.floor
        return Pages(bytes(self.pages[(first - skip) * ID_BYTES : (last - skip) * ID_BYTES]))

    def own_mapped(self) -> Pages:
        """Its own that are mapped."""
        return self.mapped(max(self.floor, self.start), self.top)

    def map_up_to(self, top: int) -> None:
        """Put spare pages behind what is mapped; there are as many."""
        size = (top - self.top) * ID_BYTES
        self.pages += self.spare[:size]
        self.spare = Pages(self.spare[size:])
        self.top = top

    def unmap_below(self, floor: int) -> None:
        """Begin at ``floor``; what was its own below is spare now."""
        first_own = max(self.floor, self.start)
        if floor > first_own:
            self.spare = Pages(self.spare + self.mapped(first_own, floor))
        del self.pages[: (floor - self.floor) * ID_BYTES]
        self.floor = floor
