"""The free pages of one component: who may have them is decided elsewhere.

The free list is one ``bytearray`` of little-endian int32 page ids used as a stack, so taking and
giving are each one slice: no Python object exists per page. A fresh pool lies in ascending order,
and a slice keeps that order, so what is taken in one piece forms long runs.

What must not live here: owners, eviction, headroom. The caller has made room before it takes.

Invariants (the rest of I1 is the lease table's):
    0 <= free_pages <= total_pages - 1, and the null page is never in the list.
"""

from __future__ import annotations

import numpy as np

from kvd.core.moves import Moves
from kvd.types import ID_BYTES, NULL_PAGE, Pages

FEW_PAGES = 8
"""So many pages, the tail of a prompt say, are looked at faster one by one than by numpy."""


class OutOfPages(Exception):
    """More pages were asked for than are free; nothing was taken."""

    def __init__(self, pool: str, wanted_pages: int, free_pages: int, total_pages: int) -> None:
        super().__init__(
            f"pool {pool}: {wanted_pages} pages wanted, {free_pages} free of {total_pages}: "
            "nothing was taken; evict or refuse before taking"
        )
        self.pool = pool
        self.wanted_pages = wanted_pages
        self.free_pages = free_pages
        self.total_pages = total_pages


class BadPages(Exception):
    """Pages came back that were never out: the null page, or more than the pool has."""


class PagePool:
    """A stack of free pages; page 0, the null page, is never handed out and never comes back."""

    __slots__ = ("_free", "moves", "name", "total_pages")

    def __init__(self, name: str, total_pages: int, moves: Moves | None = None) -> None:
        if total_pages < 1:
            raise ValueError(f"pool {name}: {total_pages} pages; the null page alone needs one")
        self.name = name
        self.total_pages = total_pages
        self.moves = moves or Moves()
        """Whoever moves pages of this pool in another way than by it says so here."""
        self._free = bytearray(np.arange(1, total_pages, dtype="<i4").tobytes())

    @property
    def free_pages(self) -> int:
        """Pages that can be taken now."""
        return len(self._free) // ID_BYTES

    def take(self, n_pages: int) -> Pages:
        """Takes ``n_pages`` from the top of the stack, all or none.

        Raises:
            OutOfPages: fewer are free; nothing was taken.
        """
        free = self._free
        start = len(free) - n_pages * ID_BYTES
        if start < 0 or n_pages < 0:
            raise OutOfPages(self.name, n_pages, self.free_pages, self.total_pages)
        taken = Pages(bytes(memoryview(free)[start:]))
        del free[start:]
        self.moves.log.append(taken)
        return taken

    def give(self, pages: Pages) -> None:
        """Puts ``pages`` back on top of the stack, in their order.

        That each of them was out is the caller's promise; the audit compares the whole list.

        Raises:
            BadPages: the null page is among them, or the pool would hold more than it has.
        """
        n_pages = len(pages) // ID_BYTES
        if n_pages <= FEW_PAGES:
            has_null = NULL_PAGE in memoryview(pages).cast("i")
        else:
            has_null = np.count_nonzero(np.frombuffer(pages, dtype="<i4")) != n_pages
        if has_null:
            raise BadPages(f"pool {self.name}: the null page {NULL_PAGE} was given back")
        if len(self._free) // ID_BYTES + n_pages >= self.total_pages:
            raise BadPages(
                f"pool {self.name}: {n_pages} pages given back, {self.free_pages} were free "
                f"already of {self.total_pages} (one is the null page): some were never out"
            )
        self._free += pages
        self.moves.log.append(pages)

    def set_apart(self, pages: Pages) -> None:
        """Takes exactly these, wherever in the stack they are, all or none.

        Raises:
            BadPages: not each of them is free, once; nothing was taken.
        """
        free = np.frombuffer(bytes(self._free), dtype="<i4")
        left = free[~np.isin(free, np.frombuffer(pages, dtype="<i4"))]
        n_pages = len(pages) // ID_BYTES
        if free.size - left.size != n_pages:
            raise BadPages(
                f"pool {self.name}: {free.size - left.size} of {n_pages} pages to be set apart are "
                "free: nothing was taken"
            )
        self._free = bytearray(left.tobytes())
        self.moves.log.append(pages)

    def free_ids(self) -> Pages:
        """Every free page, in stack order; for audits and snapshots."""
        return Pages(bytes(self._free))

    def free_slice(self, first: int, n_pages: int) -> Pages:
        """At most ``n_pages`` free pages from the ``first`` one on, counted from the bottom.

        A page that nobody took or gave back meanwhile is where it was.
        """
        return Pages(bytes(memoryview(self._free)[first * ID_BYTES : (first + n_pages) * ID_BYTES]))
