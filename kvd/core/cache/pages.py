"""The free pages of one component: who may have them is decided elsewhere.

The free list is one ``bytearray`` of little-endian int32 page ids used as a stack, so taking and
giving are each one slice: no Python object exists per page. A fresh pool lies in ascending order,
and a slice keeps that order, so what is taken in one piece forms long runs.

Beside it one byte for each page says whether it is out. So a page that was never out, that is free
already, that is given twice or is none of this pool is found as it is given, and not by the audit
after two had it: nothing of that call is taken, and ``misgiven`` tells of it. Somebody else is told
(``containment``), because whoever gives pages back is in the middle of something. A page that is
*condemned* never comes back into the free list: whoever gives it is not told, and it is nobody's.

What a call takes more than without that byte, in pairs on one busy core: 0.1 us for one page, up to
0.3 for a run of any length, 0.5 for 8 scattered pages, 2.4 for 64 and 5.7 for 1000 scattered ones,
which no slice can hold against each other.

What must not live here: owners, eviction, headroom. The caller has made room before it takes.

Invariants (the rest of I1 is the lease table's):
    0 <= free_pages <= total_pages - 1, and the null page is never in the list;
    a page in the list is not out, and no page that is out or condemned is in the list.
"""

from __future__ import annotations

import numpy as np
from mypy_extensions import mypyc_attr

from kvd.core.cache.moved_pages import MovedPages
from kvd.types import ID_BYTES, NO_PAGES, Pages

FEW_PAGES = 8
"""So many pages, the tail of a prompt say, are looked at faster one by one than by numpy."""

NEVER, OUT, CONDEMNED, FREE = 0, 1, 2, 3
"""What the byte of a page says: the null page, somebody's, nobody's for good, free."""

RAMP = bytes(range(FREE, 256))
"""Written side by side for a moment: a page that is named twice keeps one of these bytes."""

_RAMP = np.frombuffer(RAMP, dtype=np.uint8)

_BYTE, _ID, _INDEX = np.dtype(np.uint8), np.dtype("<u4"), np.dtype(np.intp)
"""Made once: numpy takes longer to understand a name than to look at twenty pages."""

_ascending = b""
"""The ids of all pages in order, up to the largest pool of this process: no pool keeps its own.

A process that has built no pool, because it thawed one, has fewer: what a pool knows afterwards
must not depend on it.
"""

_places = np.zeros(0, _ID)
"""By page, its place in the call that is looked at: whoever is named twice has lost the first.

Its pages of memory are not there before they are written, and nothing in it outlives a call.
"""


def _have_ascending(total_pages: int) -> None:
    global _ascending  # noqa: PLW0603 - a constant that grows
    if len(_ascending) < total_pages * ID_BYTES:
        _ascending = np.arange(total_pages, dtype="<i4").tobytes()


def _places_of(total_pages: int) -> np.ndarray:
    global _places  # noqa: PLW0603 - as large as the largest pool that needed it
    if _places.size < total_pages:
        _places = np.empty(total_pages, _ID)
    return _places


def _indices(pages: Pages) -> np.ndarray:
    """The ids, unsigned, as numpy wants them: it would convert them for each use otherwise."""
    return np.frombuffer(pages, _ID).astype(_INDEX)


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
    """Pages that are not free were to be set apart."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Misgiven:
    """Pages that came back and were not out, or not once: none of that call was taken.

    Attributes:
        pool: The name of the pool.
        pages: All of the call.
        why: What was wrong with them.
        giver: Whoever gave them back said who it is: the lease, mostly; None: nobody in particular.
    """

    __slots__ = ("giver", "pages", "pool", "why")

    def __init__(self, *, pool: str, pages: Pages, why: str, giver: object) -> None:
        self.pool = pool
        self.pages = pages
        self.why = why
        self.giver = giver


@mypyc_attr(allow_interpreted_subclasses=True)
class PagePool:
    """A stack of free pages; page 0, the null page, is never handed out and never comes back."""

    def __init__(self, name: str, total_pages: int, moved: MovedPages | None = None) -> None:
        if total_pages < 1:
            raise ValueError(f"pool {name}: {total_pages} pages; the null page alone needs one")
        self.name = name
        self.total_pages = total_pages
        self.moved = moved or MovedPages()
        """Whoever moves pages of this pool in another way than by it says so here."""
        self.misgiven: list[Misgiven] = []
        """Not looked into yet; whoever does so empties it. Pools of one node share it."""
        self.condemned_pages = 0
        """Nobody's until the next process."""
        self.doomed_pages = 0
        """Of these, in the tree still: who evicts them has won nothing."""
        self._free = bytearray(np.arange(1, total_pages, dtype="<i4").tobytes())
        self._state = bytearray([NEVER]) + bytes([FREE]) * (total_pages - 1)
        _have_ascending(total_pages)

    @property
    def free_pages(self) -> int:
        """Pages that can be taken now."""
        return len(self._free) // ID_BYTES

    def short_of(self, n_pages: int) -> int:
        """How many of so many are lacking; 0 or less: none."""
        return n_pages - len(self._free) // ID_BYTES

    def take_pages(self, n_pages: int) -> Pages:
        """Takes ``n_pages`` from the top of the stack, all or none.

        Raises:
            OutOfPages: fewer are free; nothing was taken.
        """
        free = self._free
        start = len(free) - n_pages * ID_BYTES
        if start < 0 or n_pages < 0:
            raise OutOfPages(self.name, n_pages, self.free_pages, self.total_pages)
        taken: Pages = bytes(free[start:])  # type: ignore[assignment]  # see RadixNode
        del free[start:]
        if n_pages <= FEW_PAGES:
            state = self._state
            for page in memoryview(taken).cast("I"):
                state[page] = OUT
        else:
            self._mark_out(taken, n_pages)
        self.moved.log.append(taken)
        return taken

    def _mark_out(self, pages: Pages, n_pages: int) -> None:
        first = int.from_bytes(pages[:ID_BYTES], "little")
        # A run is known by one comparison of bytes, and marked by one slice, however long it is.
        if _ascending.startswith(pages, first * ID_BYTES):
            self._state[first : first + n_pages] = b"\1" * n_pages
        else:
            np.frombuffer(self._state, _BYTE)[_indices(pages)] = OUT

    def return_pages(self, pages: Pages, giver: object = None) -> None:
        """Puts ``pages`` back on top of the stack, in their order.

        Nothing is put back of pages that were not all out, each once: ``misgiven`` tells of them.
        """
        # Ids are read unsigned: a negative one of a broken row is above every page, and so refused.
        state, n_pages = self._state, len(pages) // ID_BYTES
        first = int.from_bytes(pages[:ID_BYTES], "little")
        if n_pages == 1:
            is_good = first < self.total_pages and state[first] == OUT
            if is_good:
                state[first] = FREE
        elif _ascending.startswith(pages, first * ID_BYTES):
            # The null page is refused by this too: it was never out.
            is_good = state.startswith(b"\1" * n_pages, first)
            if is_good:
                state[first : first + n_pages] = b"\3" * n_pages
        elif n_pages <= FEW_PAGES:
            is_good = self._mark_few(pages)
        else:
            is_good = self._mark_scattered(pages, n_pages)
        # Marked before they are in the list: what is in it is never out (the invariant above).
        if is_good:
            self._free += pages
            self.moved.log.append(pages)
        else:
            self._refuse(pages, giver)

    def _mark_few(self, pages: Pages) -> bool:
        """Whether each of them was out, once; if not, nothing is changed."""
        state, total = self._state, self.total_pages
        marked: list[int] = []
        for page in memoryview(pages).cast("I"):
            if page >= total or state[page] != OUT:
                # All or nothing: half a call given back would be neither free nor anybody's.
                for before in marked:
                    state[before] = OUT
                return False
            state[page] = FREE
            marked.append(page)
        return True

    def _mark_scattered(self, pages: Pages, n_pages: int) -> bool:
        """The same of many."""
        ids = _indices(pages)
        state = np.frombuffer(self._state, _BYTE)
        try:
            were = state.take(ids)
        except IndexError:
            return False
        if were.tobytes() != b"\1" * n_pages:
            return False
        if n_pages <= len(RAMP):
            state[ids] = _RAMP[:n_pages]
            is_good = state.take(ids).tobytes() == RAMP[:n_pages]
        else:
            # More pages than there are different bytes to mark them by.
            places, ramp = _places_of(self.total_pages), np.arange(n_pages, dtype=_ID)
            places[ids] = ramp
            is_good = bool((places.take(ids) == ramp).all())
        # One byte says free, however that was found out: a replay may have found it another way.
        state[ids] = FREE if is_good else OUT
        return is_good

    def _refuse(self, pages: Pages, giver: object) -> None:
        """Some were not out, or twice among them: tell, unless they are only condemned."""
        # Page by page: that some are condemned is no reason to lose the others of the call.
        ids = np.frombuffer(pages, "<u4")
        known = ids[ids < self.total_pages]
        state = np.frombuffer(self._state, np.uint8)
        condemned = known[state[known] == CONDEMNED]
        rest = ids[~np.isin(ids, condemned)]
        if condemned.size:
            # Dropped without a word: whoever gave them back did nothing wrong.
            self.doomed_pages = max(0, self.doomed_pages - condemned.size)
            if rest.size:
                self.return_pages(Pages(rest.tobytes()), giver)
            return
        self.misgiven.append(
            Misgiven(pool=self.name, pages=pages, why=self._told(ids), giver=giver)
        )

    def _told(self, ids: np.ndarray) -> str:
        """What is wrong with the first wrong one."""
        seen: set[int] = set()
        for page in ids.tolist():
            if not 0 < page < self.total_pages:
                null = ", the null page" if not page else ""
                return f"page {page}{null}: this pool hands out 1 to {self.total_pages - 1}"
            if self._state[page] != OUT:
                return f"page {page}, which is free already"
            if page in seen:
                return f"page {page}, twice in one call"
            seen.add(page)
        return "pages that cannot be told"  # not reached: one of them was wrong

    def condemn(self, pages: Pages) -> int:
        """Nobody gets these any more, wherever they are now; returns how many are new to that.

        A free one leaves the free list; one that is out is dropped as it is given back.
        """
        # As unsigned numbers: a negative id of a broken table is a large one, and falls out below.
        ids = np.unique(np.frombuffer(pages, "<u4"))
        ids = ids[(ids > 0) & (ids < self.total_pages)]
        state = np.frombuffer(self._state, np.uint8)
        ids = ids[state[ids] != CONDEMNED]
        free = np.frombuffer(bytes(self._free), "<u4")
        left = free[~np.isin(free, ids)]
        state[ids] = CONDEMNED
        if left.size != free.size:
            self._free = bytearray(left.tobytes())
        self.condemned_pages += ids.size
        self.moved.log.append(Pages(ids.tobytes()))
        return int(ids.size)

    def withdraw(self, pages: Pages) -> int:
        """Takes them out of the free list, as somebody has them; returns how many were there."""
        # Over a copy: an array over the list itself would forbid to shorten it.
        free, ids = np.frombuffer(bytes(self._free), "<u4"), np.frombuffer(pages, "<u4")
        left = free[~np.isin(free, ids)]
        np.frombuffer(self._state, np.uint8)[ids] = OUT
        self._free = bytearray(left.tobytes())
        self.moved.log.append(pages)
        return int(free.size - left.size)

    def is_condemned(self, page: int) -> bool:
        """Whether nobody ever gets this page again."""
        return 0 < page < self.total_pages and self._state[page] == CONDEMNED

    def condemned_ids(self) -> Pages:
        """All of them; for audits."""
        if not self.condemned_pages:
            return NO_PAGES
        state = np.frombuffer(bytes(self._state), np.uint8)
        return Pages(np.flatnonzero(state == CONDEMNED).astype("<i4").tobytes())

    def take_these(self, pages: Pages) -> None:
        """Takes exactly these, wherever in the stack they are, all or none.

        Raises:
            BadPages: not each of them is free, once; nothing was taken.
        """
        free = np.frombuffer(bytes(self._free), dtype="<i4")
        left = free[~np.isin(free, np.frombuffer(pages, dtype="<i4"))]
        n_pages = len(pages) // ID_BYTES
        # One number finds both: a page that is not free, and one that is named twice.
        if free.size - left.size != n_pages:
            raise BadPages(
                f"pool {self.name}: {free.size - left.size} of {n_pages} pages to be set apart are "
                "free: nothing was taken"
            )
        self._free = bytearray(left.tobytes())
        np.frombuffer(self._state, np.uint8)[np.frombuffer(pages, "<u4")] = OUT
        self.moved.log.append(pages)

    def take_run(self, n_pages: int) -> Pages | None:
        """Takes the lowest ``n_pages`` free ones in a row; None: no run of them is so long."""
        for first, length in self._free_runs():
            if length >= n_pages:
                run = Pages(np.arange(first, first + n_pages, dtype="<i4").tobytes())
                self.take_these(run)
                return run
        return None

    def longest_run(self) -> int:
        """Free pages that follow each other, at most."""
        return max([length for _, length in self._free_runs()], default=0)

    def _free_runs(self) -> list[tuple[int, int]]:
        """First page and length of each, from the lowest on."""
        ids = np.sort(np.frombuffer(bytes(self._free), "<u4"))
        begins = np.flatnonzero(np.diff(ids, prepend=ids[:1]) != 1)
        lengths = np.diff(begins, append=ids.size)
        return list(zip(ids[begins].tolist(), lengths.tolist(), strict=True))

    def free_ids(self) -> Pages:
        """Every free page, in stack order; for audits and snapshots."""
        return Pages(bytes(self._free))

    def free_slice(self, first: int, n_pages: int) -> Pages:
        """At most ``n_pages`` free pages from the ``first`` one on, counted from the bottom.

        A page that nobody took or gave back meanwhile is where it was.
        """
        return Pages(bytes(memoryview(self._free)[first * ID_BYTES : (first + n_pages) * ID_BYTES]))
