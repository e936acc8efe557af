"""How bytes of a device's memory come to the host's and back within this process: by copy engine.

    Copy: a slice --> its pieces --> in registered memory: as they lie ---------> a stream
                                '--> not (yet) registered: by way of the stage --> a stream
    sums: pages ----> in their order, a stretch of a few megabytes at a time ----> the stage

A ``StagedStream`` is a stream and some registered memory of its own. They come in pairs, of which
one moves bytes while the other is told what is next: for each device one pair for copies, and one
for each thread that sums. All are made before a pool is pinned, which may take what can be.

What the host's side of a copy is made of is registered with CUDA in the background, a part at a
time (``mapping.Collapser``); until then, and where CUDA refuses, its bytes pass the stage.

Invariants: no address of a device is read or written by the processor; what is given to CUDA lies
in one allocation or registration; a stage is overwritten only when nothing is under way through it;
no wait for a device is without an end.
"""

from __future__ import annotations

import ctypes
import time
from itertools import pairwise
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from typing_extensions import override

from kvd.device.copies import CopyStream, Pieces, cut_rows
from kvd.transfer.copies import CopyJob, Reach
from kvd.transfer.mapping import map_scratch
from kvd.transfer.sums import SUMMERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvd.core.effects import Copy
    from kvd.device.copies import KnownMemory, Words
    from kvd.device.cuda import Runtime
    from kvd.transfer.copies import Bytes, Scattered

    Ids = NDArray[np.int32]

STAGE_BYTES: Final = 4 * 2**20
"""Of a stage: 80 us at 50 GB/s, which is about what it takes to be told of the next."""
SLICE_BYTES: Final = 16 * 2**20
"""Of a copy at a time: 0.3 ms at 50 GB/s, of which others wait for two."""
READERS: Final = SUMMERS + 1
"""Threads that sum: the loop's too, while it has nothing to post."""
WITHIN_S: Final = 30.0
"""A device that has not done by then what takes a millisecond is lost."""
_SPINS: Final = 200
_NAP_S: Final = 50e-6


class DeviceStuck(Exception):
    """A copy has no end; the message says on which device, and how long it was waited for."""


class StagedStream:
    """A stream of one device, and its stage. Used by one thread at a time."""

    def __init__(self, runtime: Runtime, device: int, memory: KnownMemory) -> None:
        """Make both.

        Raises:
            CudaError: the device refuses, or the stage cannot be registered.
        """
        self._device = device
        self._memory = memory
        self._stream = CopyStream(runtime, device, memory)
        self._at = map_scratch(STAGE_BYTES)
        memory.register(self._at, STAGE_BYTES)
        self._stage = np.ctypeslib.as_array((ctypes.c_ubyte * STAGE_BYTES).from_address(self._at))
        self._read_bytes = 0
        self._lands: list[tuple[int, int, int]] = []
        """From the stage into host memory, once it is there: where to, where from, how much."""

    def begin(self, pieces: Pieces) -> None:
        """Begin to copy between the device and any host memory; ``end`` it before the next.

        Raises:
            CudaError: the device refuses.
            DeviceStuck: what passes the stage first has no end.
        """
        rows = self._memory.cut(pieces)
        here, there = (self._memory.has(side, rows.sizes) for side in (rows.source, rows.to))
        is_known = here & there
        # First: what passes the stage may have to be waited for.
        self._stream.begin(Pieces(*(column[is_known] for column in rows)))
        if not is_known.all():
            left = Pieces(*(column[~is_known] for column in rows))
            self._by_stage(left, here[~is_known])

    def read(self, source: Words, sizes: Words) -> None:
        """Begin to bring pieces of the device into the stage, one behind the other.

        Raises:
            CudaError: the device refuses.
        """
        offsets = np.cumsum(sizes) - sizes
        self._stream.begin(Pieces(offsets + np.uint64(self._at), source, sizes))
        self._read_bytes = int(sizes.sum())

    def seen(self) -> Bytes:
        """What ``read`` has brought, until the next call.

        Raises:
            CudaError: it has failed.
            DeviceStuck: it has no end.
        """
        self.end()
        return self._stage[: self._read_bytes]

    def end(self) -> None:
        """Return when all that was begun is in its place.

        Raises:
            CudaError: some of it has failed.
            DeviceStuck: it has no end.
        """
        until_s = time.monotonic() + WITHIN_S
        looks = 0
        # Mostly it is over within some microseconds, or a fraction of a millisecond: sleeping at
        # once would take longer than that.
        while not self._stream.is_over():
            looks += 1
            if looks > _SPINS:
                if time.monotonic() > until_s:
                    raise DeviceStuck(
                        f"copies on cuda:{self._device} have not ended within {WITHIN_S:.0f} s"
                    )
                time.sleep(_NAP_S)
        for onto, at, size in self._lands:
            ctypes.memmove(onto, at, size)
        self._lands.clear()

    def _by_stage(self, pieces: Pieces, is_from_device: NDArray[np.bool_]) -> None:
        """Of each piece the host's side is not registered."""
        to: list[int] = []
        source: list[int] = []
        sizes: list[int] = []
        at = 0
        columns = (*pieces, is_from_device)
        for onto, of, size, is_out in zip(*(column.tolist() for column in columns), strict=True):
            done = 0
            while done < size:
                if at == STAGE_BYTES:
                    self._stream.begin(_pieces(to, source, sizes))
                    self.end()
                    to, source, sizes, at = [], [], [], 0
                part = min(size - done, STAGE_BYTES - at)
                if is_out:
                    self._lands.append((onto + done, self._at + at, part))
                    to.append(self._at + at)
                    source.append(of + done)
                else:
                    ctypes.memmove(self._at + at, of + done, part)
                    to.append(onto + done)
                    source.append(self._at + at)
                sizes.append(part)
                done, at = done + part, at + part
        self._stream.begin(_pieces(to, source, sizes))


Pair = tuple[StagedStream, StagedStream]


class DeviceReach(Reach):
    """Memory of a device, of which nobody here has more than addresses."""

    is_direct = False

    def __init__(self, runtime: Runtime, device: int, memory: KnownMemory) -> None:
        """Make all streams.

        Raises:
            CudaError: the device refuses, or memory of the host cannot be registered.
        """
        self._runtime = runtime
        self._device = device

        def pair() -> Pair:
            return (
                StagedStream(runtime, device, memory),
                StagedStream(runtime, device, memory),
            )

        self.copying = pair()
        """Of the thread that copies."""
        self._reading: SimpleQueue[Pair] = SimpleQueue()
        """Of whoever sums; there are as many as threads that do."""
        for _ in range(READERS):
            self._reading.put(pair())

    @override
    def settle(self) -> None:
        self._runtime.use(self._device)
        self._runtime.synchronize()

    @override
    def stretches(self, scattered: Scattered, page_bytes: int) -> Iterator[Bytes]:
        """As ``Reach``: each is one of two stages, which the next but one overwrites."""
        source, sizes = scattered
        total = int(sizes.sum())
        offsets = np.cumsum(sizes) - sizes
        edges = _edges(total, page_bytes)
        row, skip, size = cut_rows(offsets, sizes, edges)
        source, offsets = source[row] + skip, offsets[row] + skip
        firsts = np.searchsorted(offsets, np.concatenate([[np.uint64(0)], edges]))
        bounds = [*firsts.tolist(), size.size]
        streams = self._reading.get()
        try:
            before: StagedStream | None = None
            for number, (low, high) in enumerate(pairwise(bounds)):
                stream = streams[number % 2]
                stream.read(source[low:high], size[low:high])
                if before is not None:
                    yield before.seen()
                before = stream
            if before is not None:
                yield before.seen()
        finally:
            self._reading.put(streams)

    @override
    def job(self, order: Copy, reads: list[Bytes], stores: list[Bytes]) -> CopyJob:
        return StreamedJob(order, reads, stores, self.copying)


class StreamedJob(CopyJob):
    """A copy from or to a device: slices in turns by two streams, none waited for at once."""

    slice_bytes = SLICE_BYTES

    def __init__(self, order: Copy, reads: list[Bytes], stores: list[Bytes], streams: Pair) -> None:
        super().__init__(order, reads, stores)
        self._streams = streams
        self._turn = 0
        self._here, self._there = _Columns.of(reads), _Columns.of(stores)

    @override
    def step(self) -> int:
        """Begin the next slice; with the last, all of them are waited for.

        Raises:
            CudaError: the device refuses, or some of it has failed.
            DeviceStuck: it has no end.
        """
        of, to = self._next()
        stream, self._turn = self._streams[self._turn], 1 - self._turn
        stream.end()
        stream.begin(self._pieces(of, to))
        begun_bytes: int = of.size * self._page_bytes
        if self._done == self._of.size:
            for each in self._streams:
                each.end()
        # So far it is begun; with the last slice, done.
        self.left_bytes -= begun_bytes
        return begun_bytes

    def _pieces(self, of: Ids, to: Ids) -> Pieces:
        """Array by array: neighbouring pages of one are neighbours in memory, if any are."""
        return Pieces(self._there.at(to), self._here.at(of), self._here.size.repeat(of.size))


class _Columns(NamedTuple):
    """Where the pages of arrays lie: the first of each, the step to the next, and the bytes."""

    begin: Words
    step: Words
    size: Words

    @classmethod
    def of(cls, arrays: list[Bytes]) -> _Columns:
        """Of arrays ``(pages, 1, bytes)``."""
        rows = [(array.ctypes.data, array.strides[0], array.shape[2]) for array in arrays]
        return cls(*np.array(rows, np.uint64).reshape(-1, 3).T)

    def at(self, ids: Ids) -> Words:
        """Where these pages of each array begin, array by array."""
        found: Words = (
            self.begin[:, np.newaxis] + np.outer(self.step, ids.astype(np.uint64))
        ).ravel()
        return found


def _edges(total: int, page_bytes: int) -> Words:
    """Where stretches end: with a page, of which as many are in one as fit, or it is in several."""
    if page_bytes <= STAGE_BYTES:
        stride = STAGE_BYTES // page_bytes * page_bytes
        return np.arange(stride, max(total, stride), stride, dtype=np.uint64)
    pages = np.arange(0, total, page_bytes, dtype=np.uint64)[:, np.newaxis]
    inside = np.arange(0, page_bytes, STAGE_BYTES, dtype=np.uint64)
    return np.add(pages, inside, dtype=np.uint64).ravel()[1:]


def _pieces(to: list[int], source: list[int], sizes: list[int]) -> Pieces:
    return Pieces(*(np.array(column, np.uint64) for column in (to, source, sizes)))
