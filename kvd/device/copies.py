"""Scattered pieces of memory between a device and the host, by the copy engine, beside computation.

    pieces -> each lies in one stretch of known memory -> merged -> cut into calls -> the stream

What CUDA is given is checked before it sees it: a piece that leaves its allocation may poison the
process for good, and one over two registrations is refused there without saying which. So memory is
made known first, and a refusal here names the piece and begins nothing.

Invariants: no call has more than ``PIECES_PER_CALL`` pieces, none is empty, none lies in two
stretches, also not after merging; the stream is one of its own and never the legacy one; sources
are read in the order of the stream.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvd.device.cuda import CopyColumns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvd.device.cuda import Runtime

    Words = NDArray[np.uint64]

PIECES_PER_CALL: Final = 2048
"""A call holds its thread for 0.42 us a piece, and a driver was seen to crash above 51,000."""


class OutOfReach(Exception):
    """A piece was refused before CUDA saw any; the message says which, with its numbers."""


class Pieces(NamedTuple):
    """What is copied where: addresses and bytes, row by row. No row may depend on another."""

    to: Words
    source: Words
    sizes: Words


class Stretch(NamedTuple):
    """Memory that CUDA takes as one: an allocation of a device, or one registration of the host."""

    address: int
    size_bytes: int
    what: str


class CutRows(NamedTuple):
    """Parts of rows that were cut: which row each is of, how far into it, and its bytes."""

    row: NDArray[np.intp]
    skip: Words
    size: Words


class KnownMemory:
    """What pieces may lie in. Several threads may add to it, and look into it meanwhile."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._stretches: list[Stretch] = []
        self._registered: set[int] = set()
        self._know()

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """All of it, by address."""
        return tuple(self._stretches)

    def register(self, address: int, size_bytes: int) -> None:
        """Pin memory of the host for the devices of this process; it takes 20 to 60 ms a GiB.

        Raises:
            CudaError: it is pinned already, in part or whole, or is no memory; none is known then.
        """
        self._runtime.register(address, size_bytes)
        with self._lock:
            self._registered.add(address)
        self.add(Stretch(address, size_bytes, "registered host memory"))

    def add(self, stretch: Stretch) -> None:
        """Memory that others allocated on a device or registered.

        Raises:
            ValueError: some of it is known already; no piece would lie in one stretch.
        """
        end = stretch.address + stretch.size_bytes
        with self._lock:
            for one in self._stretches:
                if one.address < end and stretch.address < one.address + one.size_bytes:
                    raise ValueError(f"{stretch} meets {one}, which is known already")
            self._stretches = sorted([*self._stretches, stretch])
            self._know()

    def forget(self, address: int) -> None:
        """Let go of what begins there. No copy of it may be under way.

        Raises:
            CudaError: it could not be unpinned; it is not known any more.
        """
        with self._lock:
            self._stretches = [one for one in self._stretches if one.address != address]
            self._know()
            is_registered = address in self._registered
            self._registered.discard(address)
        if is_registered:
            self._runtime.unregister(address)

    def places(self, addresses: Words, sizes: Words, side: str) -> NDArray[np.intp]:
        """By its number, the stretch that each piece lies in.

        Raises:
            OutOfReach: one lies in none, or not wholly.
        """
        found, is_inside = self._find(addresses, sizes)
        outside = np.flatnonzero(~is_inside | (sizes == 0))
        if outside.size:
            number = int(outside[0])
            raise OutOfReach(self._why(number, int(addresses[number]), int(sizes[number]), side))
        return found

    def has(self, addresses: Words, sizes: Words) -> NDArray[np.bool_]:
        """Whether each piece lies in one stretch."""
        return self._find(addresses, sizes)[1]

    def cut(self, pieces: Pieces) -> Pieces:
        """The same, cut where a stretch begins or ends: each piece lies in one, or in none."""
        for side in (pieces.to, pieces.source):
            row, skip, size = cut_rows(side, pieces.sizes, self._edges)
            if row.size > side.size:
                # The other side is looked at in what is left of them.
                return self.cut(Pieces(pieces.to[row] + skip, pieces.source[row] + skip, size))
        return pieces

    def _find(self, addresses: Words, sizes: Words) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Of each piece a stretch, and whether it lies wholly in that."""
        # At once: whoever registers a pool bit by bit does it on a thread of its own.
        begins, ends = self._bounds
        found = np.searchsorted(begins, addresses, "right") - 1
        # What begins before every stretch gets the last one's end, which is not its own.
        is_inside = found >= 0
        if ends.size:
            is_inside &= (addresses < ends[found]) & (sizes <= ends[found] - addresses)
        return found, is_inside

    def _know(self) -> None:
        begins = [one.address for one in self._stretches]
        ends = [one.address + one.size_bytes for one in self._stretches]
        self._bounds = np.array(begins, np.uint64), np.array(ends, np.uint64)
        self._edges = np.unique(np.concatenate(self._bounds))

    def _why(self, number: int, address: int, size: int, side: str) -> str:
        piece = f"piece {number}: {size:,} bytes {side} {address:#x}"
        if not size:
            return f"{piece}: an empty piece is an error of CUDA, leave it out"
        for one in self._stretches:
            end = one.address + one.size_bytes
            if one.address < address + size and address < end:
                return (
                    f"{piece} leave {one.what} from {one.address:#x} to {end:#x}: cut pieces where "
                    "a registration or an allocation ends"
                )
        return f"{piece} lie in no memory that was registered or is known of a device"


def cut_rows(starts: Words, sizes: Words, edges: Words) -> CutRows:
    """Rows that begin at ``starts``, cut at those of the ascending ``edges`` that lie inside."""
    low = np.searchsorted(edges, starts, "right")
    inside = np.maximum(np.searchsorted(edges, starts + sizes, "left") - low, 0)
    if not inside.any():
        return CutRows(np.arange(sizes.size), np.zeros(sizes.size, np.uint64), sizes)
    parts = inside + 1
    row = np.arange(sizes.size).repeat(parts)
    # Counted within its row: the first part begins with it, each other one at an edge.
    part = np.arange(row.size) - (parts.cumsum() - parts)[row]
    skip = np.zeros(row.size, np.uint64)
    later = part > 0
    skip[later] = edges[(low[row] + part - 1)[later]] - starts[row][later]
    end = sizes[row]
    end[:-1][later[1:]] = skip[1:][later[1:]]
    return CutRows(row, skip, end - skip)


class CopyStream:
    """A stream of a device's copy engine. Its calls make that device the one of their thread."""

    def __init__(self, runtime: Runtime, device: int, memory: KnownMemory) -> None:
        """Make the stream.

        Raises:
            CudaError: the device refuses.
        """
        self._runtime = runtime
        self._memory = memory
        self.device = device
        self._stream = runtime.stream(device)

    def begin(self, pieces: Pieces) -> int:
        """Begin all of these; the number of calls to CUDA that this took.

        Nothing may be read of them, and no source be overwritten, before they are over.

        Raises:
            OutOfReach: a piece lies in no known memory, or in two; nothing has begun.
            CudaError: the device refuses; what earlier calls have begun is under way.
        """
        rows = merged(pieces, self._memory)
        self._runtime.use(self.device)
        if not self._runtime.has_batches:
            for to, source, size in zip(*(column.tolist() for column in rows), strict=True):
                self._runtime.begin_copy(self._stream, to, source, size)
            return rows.sizes.size
        cuts = range(0, rows.sizes.size, PIECES_PER_CALL)
        for first in cuts:
            columns = CopyColumns(*(column[first:].ctypes.data for column in rows))
            count = min(PIECES_PER_CALL, rows.sizes.size - first)
            self._runtime.begin_copies(self._stream, columns, count)
        return len(cuts)

    def record(self, event: int) -> None:
        """Let an event come when everything that was begun by now is there.

        Raises:
            CudaError: as ``is_over``.
        """
        self._runtime.record(event, self._stream)

    def is_over(self) -> bool:
        """Whether everything that was begun is there.

        Raises:
            CudaError: some of it has failed, and the device may be lost to this process.
        """
        return self._runtime.is_over(self._stream)

    def wait(self) -> None:
        """Return when everything that was begun is there.

        Raises:
            CudaError: as ``is_over``.
        """
        self._runtime.wait(self._stream)

    def close(self) -> None:
        """Let go of the stream; what was begun goes on to its end.

        Raises:
            CudaError: the device has failed.
        """
        self._runtime.end_stream(self._stream)


def merged(pieces: Pieces, memory: KnownMemory) -> Pieces:
    """As few rows: those that go on where the one before ends, on both sides, in one stretch.

    Raises:
        OutOfReach: a piece lies in no known memory, or in two.
        ValueError: the columns are of different lengths.
    """
    if len({len(column) for column in pieces}) > 1:
        raise ValueError(f"columns of {', '.join(str(len(column)) for column in pieces)} rows")
    # Words, one behind the other: CUDA takes no strides, to which a view of a table would be other
    # numbers, and in numpy a sum of words and signed numbers is a float, which loses the last bits.
    to, source, sizes = (np.ascontiguousarray(column, np.uint64) for column in pieces)
    there = memory.places(to, sizes, "to")
    here = memory.places(source, sizes, "from")
    is_new = np.ones(sizes.size, bool)
    # Two registrations may touch, and CUDA takes no piece over both.
    is_new[1:] = (to[:-1] + sizes[:-1] != to[1:]) | (source[:-1] + sizes[:-1] != source[1:])
    is_new[1:] |= (there[:-1] != there[1:]) | (here[:-1] != here[1:])
    first = np.flatnonzero(is_new)
    if first.size == sizes.size:
        return Pieces(to, source, sizes)
    return Pieces(to[first], source[first], np.add.reduceat(sizes, first))
