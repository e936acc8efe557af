"""Copies between two regions of this process: to the saved area, to the buffer, and back.

    Copy -> queue -> turns -> copier thread: a slice of some megabytes -> ... -> Copied

The loop never waits for one: a thread does them, one slice after the other. What is much smaller
goes first, so the few pages that a decode step waits for pass a lease of a gigabyte that is being
saved, within one slice; other copies are done in the order in which they came. Where the pages step
by one on both sides they are copied in one piece per row, which for page-first memory is one piece
in all; numpy lets go of the interpreter meanwhile, so posts go on beside it. What concerns a device
is copied by its copy engine, see ``device_streams``.

Invariants: each ``Copy`` is answered by one ``Copied`` or ``CopyFailed``; one that is refused has
written nothing; no byte outside the destination pages is written. Copies under way together are in
no order: whoever orders one that needs what another writes awaits that one's ``Copied`` first.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import reduce
from itertools import accumulate, pairwise
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvd.core.inputs import Copied, CopyFailed
from kvd.transfer.descriptors import objection
from kvd.transfer.metadata import strips
from kvd.transfer.orders import UNSTAMPED
from kvd.transfer.page_split import matched
from kvd.transfer.window_layout import window_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from kvd.core.effects import Copy
    from kvd.core.layout.geometry import PieceRow
    from kvd.core.layout.shards import PageWindow
    from kvd.transfer.metadata import RegionNote

    Bytes = NDArray[np.uint8]
    Words = NDArray[np.uint64]

COPIER: Final = "copier"
"""The name of its thread."""
SLICE_BYTES: Final = 2 * 2**20
"""What others wait for; larger slices are hardly faster."""
PASSING_PART: Final = 4
PASSING_BYTES: Final = 4 * SLICE_BYTES
"""The oldest copy gets a fifth of the time at least."""


class Scattered(NamedTuple):
    """Pieces of memory, and in which order their bytes belong together."""

    addresses: Words
    sizes: Words


class Reach:
    """How this process gets at the bytes of a region: those of host memory are mapped here."""

    is_direct = True
    """Whether the processor reads and writes them where they lie."""

    def settle(self) -> None:
        """Return when everything that was copied is there."""

    def stretches(self, scattered: Scattered, page_bytes: int) -> Iterator[Bytes]:
        """These bytes, some at a time in the order in which they belong together.

        Each is to be used before the next is asked for. Where ``page_bytes`` are few, pages are
        whole in each.
        """
        del page_bytes
        for address, size in zip(*(column.tolist() for column in scattered), strict=True):
            yield np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))

    def job(self, order: Copy, reads: list[Bytes], stores: list[Bytes]) -> CopyJob:
        """How a copy is done of which this memory is one side, or both."""
        return CopyJob(order, reads, stores)


MAPPED: Final = Reach()


class Area:
    """One region as arrays of uint8: of a device's memory they are addresses, and nothing else."""

    def __init__(self, note: RegionNote, memory: Bytes, reach: Reach = MAPPED) -> None:
        """``memory`` is the whole region from its byte 0."""
        self.note = note
        self.reach = reach
        self._memory = memory
        self._known: dict[tuple[int, bool], list[Bytes]] = {}

    @property
    def is_readable(self) -> bool:
        """Whether the arrays may be looked into; otherwise ``gather`` what is to be read."""
        return self.reach.is_direct

    def pieces(self, split: int = 1, *, by_tensor: bool = False) -> list[Bytes]:
        """The pages as arrays ``(pages, split, bytes)``, in the order of a page's bytes.

        One for each row, or for each tensor: those are what a page is cut into pieces by.
        """
        views = self._known.get((split, by_tensor))
        if views is None:
            rows = strips(self.note) if by_tensor else self.note.rows
            views = self._known[split, by_tensor] = [self._cut(row, split) for row in rows]
        return views

    def gather(self, split: int, ids: NDArray[np.int32], into: Bytes) -> None:
        """Bring pieces together: the bytes of ``ids[i]`` become row ``i`` of ``into``."""
        if not self.is_readable:
            flat, at = into.reshape(-1), 0
            for stretch in self.stretches(split, ids):
                flat[at : at + stretch.size] = stretch
                at += stretch.size
            return
        arrays = self.pieces(split, by_tensor=split > 1)
        bounds = list(pairwise(accumulate((array.shape[2] for array in arrays), initial=0)))
        whole, parts = np.divmod(ids, split)
        cuts = np.flatnonzero((np.diff(ids) != 1) | (np.diff(whole) != 0)) + 1
        for first, last in pairwise([0, *cuts.tolist(), ids.size]):
            page, part = int(whole[first]), int(parts[first])
            for array, (start, end) in zip(arrays, bounds, strict=True):
                into[first:last, start:end] = array[page, part : part + last - first]

    def stretches(self, split: int, ids: NDArray[np.int32]) -> Iterator[Bytes]:
        """The bytes of these pieces, one after the other, some at a time; as ``Reach`` has them."""
        if not ids.size:
            return iter(())
        arrays = self.pieces(split, by_tensor=split > 1)
        size = np.array([array.shape[2] for array in arrays], np.uint64)
        begin = np.array([array.ctypes.data for array in arrays], np.uint64)
        step = np.array([array.strides[:2] for array in arrays], np.uint64)
        whole, part = np.divmod(ids.astype(np.uint64), np.uint64(split))
        addresses = begin + np.outer(whole, step[:, 0]) + np.outer(part, step[:, 1])
        pieces = Scattered(addresses.ravel(), np.tile(size, ids.size))
        return self.reach.stretches(pieces, int(size.sum()))

    def window(self, window: PageWindow) -> list[Bytes]:
        """A window of all heads as arrays ``(pages, 1, bytes)``, in the order of its bytes."""
        return [self._cut(row, 1) for row in window_rows(self.note, window)]

    def array(
        self, offset: int, shape: tuple[int, int, int], steps: tuple[int, int, int, int]
    ) -> Bytes:
        """An array ``(pages, *shape)`` of its bytes that begins ``offset`` bytes into it."""
        sizes = (self.note.pages, *shape)
        return np.lib.stride_tricks.as_strided(self._memory[offset:], sizes, steps)

    def _cut(self, row: PieceRow, split: int) -> Bytes:
        size = row.piece_bytes // split
        shape, steps = (self.note.pages, split, size), (row.stride_bytes, size, 1)
        return np.lib.stride_tricks.as_strided(self._memory[row.offset_bytes :], shape, steps)


def mapped_area(note: RegionNote) -> Area:
    """The area of a region that is mapped at its address for the life of the process."""
    memory = (ctypes.c_ubyte * note.region_bytes).from_address(note.address)
    return Area(note, np.ctypeslib.as_array(memory))


class CopyJob:
    """One copy under way, carried out in slices; ``left_bytes`` of it are still to do."""

    slice_bytes = SLICE_BYTES

    def __init__(self, order: Copy, reads: list[Bytes], stores: list[Bytes]) -> None:
        """``reads`` and ``stores``: the pages of both regions, in arrays that correspond."""
        self.ticket = order.ticket
        self._of, self._to = (
            np.frombuffer(ids, "<i4") for ids in (order.source, order.destination)
        )
        self._reads, self._stores = reads, stores
        self._page_bytes: int = sum(array.shape[2] for array in reads)
        self._stride = max(1, self.slice_bytes // self._page_bytes)
        self._done = 0
        self.n_bytes: int = self._of.size * self._page_bytes
        self.left_bytes = self.n_bytes

    def step(self) -> int:
        """Copy the next slice; its bytes.

        One copy per row and per run of pages that steps by one on both sides.
        """
        of, to = self._next()
        cuts = np.flatnonzero((np.diff(of) != 1) | (np.diff(to) != 1)) + 1
        bounds = [0, *cuts.tolist(), of.size]
        runs = [(int(of[at]), int(to[at]), end - at) for at, end in pairwise(bounds)]
        for read, store in zip(self._reads, self._stores, strict=True):
            for first, onto, n_pages in runs:
                store[onto : onto + n_pages, 0] = read[first : first + n_pages, 0]
        copied_bytes: int = of.size * self._page_bytes
        self.left_bytes -= copied_bytes
        return copied_bytes

    def _next(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The pages of the next slice, on both sides."""
        low, self._done = self._done, min(self._done + self._stride, self._of.size)
        return self._of[low : self._done], self._to[low : self._done]


def copy_job(order: Copy, areas: Mapping[str, Area]) -> CopyJob | CopyFailed:
    """The job of an order, or why it is refused whole."""
    source = areas.get(order.source_region)
    destination = areas.get(order.destination_region)
    if source is None or destination is None:
        missing = order.source_region if source is None else order.destination_region
        return CopyFailed(UNSTAMPED, order.ticket, f"there is no region {missing!r} here")
    # Whole, before the first slice: a copy that is refused must not have written anything.
    why = objection(order.source, order.destination, source.note, destination.note)
    if why:
        return CopyFailed(UNSTAMPED, order.ticket, why)
    ours, theirs = matched(source.note, destination.note, 1)
    reach = destination.reach if source.is_readable else source.reach
    return reach.job(
        order,
        source.pieces(by_tensor=ours != source.note.rows),
        destination.pieces(by_tensor=theirs != destination.note.rows),
    )


class CopyTurns:
    """Whose slice is next: the oldest's, unless a much smaller copy passes it.

    Much smaller is a ``PASSING_PART`` of what is left of the other: what a decode step waits for
    passes a lease that is saved, and what is fetched ahead does not pass what it waits for. So that
    a stream of small copies cannot hold up a large one for ever, the oldest gets a slice whenever
    ``PASSING_BYTES`` of others have gone past it.
    """

    def __init__(self) -> None:
        self.jobs: list[CopyJob] = []
        """In the order in which they came."""
        self._passed_bytes = 0

    def step(self) -> CopyJob | None:
        """Copy one slice; the job, if that was its last."""
        # Looked for anew at every slice: what has come since may pass at once.
        oldest = self.jobs[0]
        job = reduce(_smaller, self.jobs)
        # Smaller ones have had their share: a stream of them must not hold up the oldest for ever.
        if job is oldest or self._passed_bytes >= PASSING_BYTES:
            job, self._passed_bytes = oldest, 0
            job.step()
        else:
            self._passed_bytes += job.step()
        if job.left_bytes:
            return None
        self.jobs.remove(job)
        return job


def _smaller(older: CopyJob, newer: CopyJob) -> CopyJob:
    """The newer one if it may pass."""
    return newer if newer.left_bytes * PASSING_PART <= older.left_bytes else older


class Copier:
    """Carries out copies on a thread of its own, a slice at a time."""

    def __init__(
        self, areas: Mapping[str, Area], on_over: Callable[[Copied | CopyFailed], None]
    ) -> None:
        """``on_over`` takes each outcome, on the copier's thread."""
        self._areas = areas
        self._on_over = on_over
        self._wanted: SimpleQueue[Copy] = SimpleQueue()
        self._turns = CopyTurns()
        threading.Thread(target=self._run, name=COPIER, daemon=True).start()

    def want(self, order: Copy) -> None:
        """Queue one copy."""
        self._wanted.put(order)

    def _run(self) -> None:
        """Copy for ever. An exception is a bug; the worker's hook ends the process then."""
        # As the loop's own: a copy that was just ordered does not preempt whoever ordered it.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        turns = self._turns
        while True:
            # It blocks only where there is nothing to do, and takes in all that waits before the
            # next slice.
            while not turns.jobs or not self._wanted.empty():
                self._take(self._wanted.get())
            job = turns.step()
            # The loop's thread may wait for this core: woken as batch, it preempts nobody.
            os.sched_yield()
            if job is not None:
                self._on_over(Copied(UNSTAMPED, job.ticket, job.n_bytes))

    def _take(self, order: Copy) -> None:
        job = copy_job(order, self._areas)
        if isinstance(job, CopyFailed):
            self._on_over(job)
        # It has no slice, so no turn would ever end it.
        elif not job.left_bytes:
            self._on_over(Copied(UNSTAMPED, job.ticket, 0))
        else:
            self._turns.jobs.append(job)
