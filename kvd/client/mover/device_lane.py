"""Copies by the copy engine of a device, beside what the engine computes there.

    pieces -> in registered memory -> one of two streams -> an event behind them, looked at
           -> elsewhere yet        -> bit by bit through a small registered stage

A stream for saves and one for loads, and no stream of the engine ever waits for either. What was
given to a stream is over when the event behind it has come.

The pool is registered with CUDA in the background, which takes 20 to 60 ms a GiB, chunk by chunk;
no chunk ends inside of a page. A chunk that cannot be registered stays behind the stage.

CUDA is called by ctypes, as everywhere in kvd. A call costs 0.4 us more by that (``benchmarks
copies``) and carries up to 2,048 pieces; the double of the runtime that the tests have can stand in
for CUDA, and nothing needs installing. NVIDIA's ``cuda-bindings`` would be one more package, of
0.13 s of import, for the same entry points.

Whatever is looked at for an event that has not come costs a nap of the mover's thread, not a wait.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import mmap
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import numpy as np

from kvd.client.mover.host_lane import copy_pieces
from kvd.client.mover.pending_copy import CopyMark, LaneDead, MemoryFault
from kvd.client.mover.pieces import PieceColumns, cut_pieces
from kvd.device.copies import CopyStream, KnownMemory, OutOfReach, Pieces, Stretch
from kvd.device.cuda import CudaError, Runtime
from kvd.device.cuda_library import load
from kvd.errors import Code, KvdError, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvd.client.mover.engine_memory import BlockLayout
    from kvd.client.mover.pieces import PoolBytes

log = logging.getLogger("kvd.client")

STAGE_BYTES: Final = 4 * 2**20
"""Of each direction."""

REGISTERED_AT_ONCE: Final = 256 * 2**20
"""Some ten milliseconds."""

LARGEST_CHUNK: Final = 4 * 2**30
"""What a chunk may take where pages end on no border of a page of this machine for so long."""

_PAGE: Final = mmap.PAGESIZE


@runtime_checkable
class StreamOfTorch(Protocol):
    """What has the number of a CUDA stream."""

    cuda_stream: int


class DeviceMark:
    """An event that was recorded in a stream of the engine; for as many orders as it is given to.

    When nobody has it any more, its event is another's.
    """

    __slots__ = ("_free", "event")

    def __init__(self, event: int, free: list[int]) -> None:
        self.event = event
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.event)


class DeviceCopy:
    """Pieces that are in a stream, or refused; ``fault`` says why they are not all there."""

    def __init__(self, lane: DeviceLane, event: int, fault: MemoryFault | None = None) -> None:
        self._lane = lane
        self._event: int | None = event
        self.fault = fault

    @property
    def is_over(self) -> bool:
        """Whether no byte of them moves any more.

        Raises:
            LaneDead: nobody can tell any more.
        """
        if self._event is not None and self._lane.has_ended(self._event):
            self._event = None
        return self._event is None


class StagedCopy:
    """Pieces that go through the stage, a part of them at a time."""

    def __init__(self, lane: DeviceLane, columns: PieceColumns, *, to_pages: bool) -> None:
        self._lane = lane
        self._to_pages = to_pages
        self._parts = deque(cut_pieces(columns, STAGE_BYTES))
        self._moving: DeviceCopy | None = None
        self._part: PieceColumns | None = None
        self.fault: Exception | None = None

    @property
    def is_over(self) -> bool:
        """As ``DeviceCopy.is_over``; whoever asks has it go on."""
        stage = self._lane.stage(to_pages=self._to_pages)
        if not stage.is_taken_by(self):
            return False
        if self._moving is not None:
            if not self._moving.is_over:
                return False
            self._arrived(stage, self._moving)
        if self._parts and self.fault is None:
            self._begin(stage, self._parts.popleft())
            return False
        stage.leave(self)
        return True

    def _begin(self, stage: CopyStage, part: PieceColumns) -> None:
        self._part = part
        places = stage.places(part)
        if not self._to_pages:
            self.fault = copy_pieces(PieceColumns(places, part.pool, part.sizes), to_pages=False)
            if self.fault is not None:
                return
        self._moving = self._lane.submit(
            PieceColumns(part.engine, places, part.sizes), to_pages=self._to_pages
        )

    def _arrived(self, stage: CopyStage, moving: DeviceCopy) -> None:
        self._moving = None
        self.fault = self.fault or moving.fault
        if self._to_pages and self.fault is None and self._part is not None:
            staged = self._part._replace(engine=stage.places(self._part))
            self.fault = copy_pieces(staged, to_pages=True)


class CopyStage:
    """Registered memory through which one copy at a time goes."""

    def __init__(self, memory: KnownMemory) -> None:
        self._range = mmap.mmap(-1, STAGE_BYTES)
        self._bytes = np.frombuffer(self._range, np.uint8)
        self._users: deque[StagedCopy] = deque()
        self._memory = memory
        memory.register(self._bytes.ctypes.data, STAGE_BYTES)

    def is_taken_by(self, copy: StagedCopy) -> bool:
        """Whether it is this one's turn."""
        if copy not in self._users:
            self._users.append(copy)
        return self._users[0] is copy

    def leave(self, copy: StagedCopy) -> None:
        """It is the next one's turn."""
        self._users.remove(copy)

    def places(self, part: PieceColumns) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Where each piece lies in it, one behind the other."""
        ends = np.cumsum(part.sizes)
        found: np.ndarray[tuple[int], np.dtype[np.uint64]] = (
            ends - part.sizes + np.uint64(self._bytes.ctypes.data)
        )
        return found

    def close(self) -> None:
        """Give it back."""
        self._memory.forget(self._bytes.ctypes.data)


class DeviceLane:
    """Two streams of a device, and what of the pool they reach."""

    chunk_bytes: Final = 32 * 2**20
    depth: Final = 2
    polls: Final = True

    mark_kind: Final = (DeviceMark, CopyMark)

    def __init__(self, runtime: Runtime, device: int) -> None:
        """Make the streams.

        Raises:
            KvdError: ``post-failed`` when the device refuses.
        """
        self.device = f"cuda:{device}"
        self._runtime = runtime
        self._number = device
        self._memory = KnownMemory(runtime)
        self._lock = threading.Lock()
        """Held where memory becomes known: by those who give blocks, and by who registers."""
        self._events: list[int] = []
        """Those that nobody waits for."""
        self._registering: dict[int, threading.Thread] = {}
        self._registered: list[int] = []
        self._pinned: list[object] = []
        """What must stay mapped as long as it is registered."""
        self._is_closing = False
        with _refused("making two streams for copies"), runtime.on(device):
            self._streams = {
                to_pages: CopyStream(runtime, device, self._memory) for to_pages in (False, True)
            }
            self._stages = {to_pages: CopyStage(self._memory) for to_pages in (False, True)}

    # ---- what it reaches ---------------------------------------------------------------------

    def knows(self, layouts: Sequence[BlockLayout], pools: Sequence[PoolBytes]) -> None:
        """Blocks that are copied from now on, and the pages; these are registered by and by.

        Raises:
            KvdError: ``layout-mismatch`` for blocks that are not in memory of this device.
        """
        stretches = list(_allocations(layouts))
        with _refused("looking for the engine's blocks"):
            for stretch in stretches:
                self._check(stretch)
        with self._lock:
            for stretch in stretches:
                if stretch not in self._memory.stretches:
                    # What was given before and lies there otherwise was freed since.
                    self._forget(stretch)
                    self._memory.add(stretch)
            for pool in pools:
                if pool.address not in self._registering:
                    self._pinned.append(pool.memory)
                    thread = threading.Thread(
                        target=self._register, args=(pool,), name="kvd-register", daemon=True
                    )
                    self._registering[pool.address] = thread
                    thread.start()

    def is_registered(self) -> bool:
        """Whether nothing is being registered any more."""
        return not any(thread.is_alive() for thread in list(self._registering.values()))

    def _check(self, stretch: Stretch) -> None:
        for address in (stretch.address, stretch.address + stretch.size_bytes - 1):
            found = self._runtime.device_of(address)
            if found != self._number:
                where = "no memory of a device, or freed" if found is None else f"on cuda:{found}"
                raise KvdError(
                    Refusal(
                        Code.LAYOUT_MISMATCH,
                        f"the engine's blocks from {stretch.address:#x} on, {stretch.size_bytes:,} "
                        f"bytes, are to be on {self.device}; at {address:#x} they are {where}",
                        side="client",
                    )
                )

    def _forget(self, stretch: Stretch) -> None:
        end = stretch.address + stretch.size_bytes
        for known in self._memory.stretches:
            if known.address < end and stretch.address < known.address + known.size_bytes:
                self._memory.forget(known.address)

    def _register(self, pool: PoolBytes) -> None:
        """Chunk by chunk; a thread's whole life."""
        try:
            self._runtime.ignore_captures()
            self._runtime.use(self._number)
            for first, end in itertools.pairwise(chunk_borders(pool)):
                with self._lock:
                    if self._is_closing:
                        return
                    self._memory.register(pool.address + first, end - first)
                    self._registered.append(pool.address + first)
        except (CudaError, ValueError) as error:
            log.warning(
                "copies between %s and the pool go through a small stage, at a part of the speed: "
                "%s",
                self.device,
                error,
            )

    # ---- marks -------------------------------------------------------------------------------

    def mark(self, stream: object = None) -> DeviceMark:
        """An event behind what is in a stream of the engine by now; on the engine's thread."""
        number = self._current() if stream is None else _number_of(stream)
        with _refused("recording a mark"):
            if self._runtime.is_capturing(number):
                raise KvdError(
                    Refusal(
                        Code.WRONG_STATE,
                        f"a graph is being captured in stream {number:#x} of {self.device}: what "
                        "is recorded there now never comes; order copies before or behind",
                        side="client",
                    )
                )
            event = self._event()
            if number > _LEGACY:
                self._runtime.record(event, number)
            else:
                # The default stream is that of the device of the thread.
                with self._runtime.on(self._number):
                    self._runtime.record(event, number)
        return DeviceMark(event, self._events)

    def has_come(self, mark: object) -> bool:
        """Whether all before the mark is done; on the mover's thread.

        Raises:
            LaneDead: the device has failed.
        """
        return not isinstance(mark, DeviceMark) or self._has_come(mark.event)

    def has_ended(self, event: int) -> bool:
        """Whether what is before an event of this lane is done; once, then it is another's."""
        if not self._has_come(event):
            return False
        self._events.append(event)
        return True

    def _has_come(self, event: int) -> bool:
        try:
            return self._runtime.has_come(event)
        except CudaError as error:
            raise LaneDead(str(error)) from error

    def _event(self) -> int:
        try:
            return self._events.pop()
        except IndexError:
            with self._runtime.on(self._number):
                return self._runtime.event(self._number, is_shared=False)

    def _current(self) -> int:
        """What torch says that this thread computes in; it is not loaded for that."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return 0
        return int(torch.cuda.current_stream(self._number).cuda_stream)

    # ---- copies ------------------------------------------------------------------------------

    def enter(self) -> None:
        """The mover's thread begins here."""
        with _refused("entering the device"):
            self._runtime.ignore_captures()
            self._runtime.use(self._number)

    def begin(self, columns: PieceColumns, *, to_pages: bool) -> DeviceCopy | StagedCopy:
        """Begin to copy these pieces.

        Raises:
            MemoryFault: one lies in no memory that is known; nothing has begun.
            LaneDead: the device has failed.
        """
        try:
            self._memory.places(columns.pool, columns.sizes, "of the pool")
        except OutOfReach:
            return StagedCopy(self, columns, to_pages=to_pages)
        return self.submit(columns, to_pages=to_pages)

    def submit(self, columns: PieceColumns, *, to_pages: bool) -> DeviceCopy:
        """Into the stream, pieces of memory that is known."""
        to, source = (columns.pool, columns.engine) if to_pages else (columns.engine, columns.pool)
        stream = self._streams[to_pages]
        fault = None
        try:
            try:
                stream.begin(Pieces(to, source, columns.sizes))
            except OutOfReach as exc:
                raise MemoryFault(str(exc)) from exc
            except CudaError as error:
                # Is it this call that was refused, or is the device lost? Then the next one tells.
                stream.is_over()
                fault = MemoryFault(str(error))
            event = self._event()
            stream.record(event)
        except CudaError as error:
            raise LaneDead(str(error)) from error
        return DeviceCopy(self, event, fault)

    def stage(self, *, to_pages: bool) -> CopyStage:
        """The stage of a direction."""
        return self._stages[to_pages]

    def close(self) -> None:
        """Nothing is under way any more: give everything back that the device still takes."""
        with self._lock:
            self._is_closing = True
        for thread in list(self._registering.values()):
            thread.join()
        try:
            for address in self._registered:
                self._memory.forget(address)
            for stage in self._stages.values():
                stage.close()
            for stream in self._streams.values():
                stream.close()
            for event in self._events:
                self._runtime.destroy(event)
        except CudaError as error:
            # What is pinned must not be unmapped: something else may come to lie there.
            _STILL_PINNED.append(self)
            log.warning("%s took back not all that copies had of it: %s", self.device, error)
        else:
            self._pinned.clear()


_STILL_PINNED: Final[list[DeviceLane]] = []


@contextlib.contextmanager
def _refused(doing: str) -> Iterator[None]:
    """What CUDA says in this block is said to whoever called."""
    try:
        yield
    except CudaError as error:
        refusal = Refusal(Code.POST_FAILED, f"{doing}: {error}", side="client")
        raise KvdError(refusal) from error


_LEGACY: Final = 2
"""Up to here numbers stand for the default streams."""


def device_of(layouts: Sequence[BlockLayout], device: str) -> tuple[Runtime, int]:
    """CUDA, and the device that these blocks are on by its number here.

    Raises:
        KvdError: ``not-supported`` where CUDA cannot be used here; ``layout-mismatch`` where they
            are on no device.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda":
        why = f"blocks on {device}: kvd copies host memory, and memory of CUDA devices"
        raise KvdError(Refusal(Code.NOT_SUPPORTED, why, side="client"))
    runtime = load()
    if not isinstance(runtime, Runtime):
        why = f"blocks on {device}: {runtime.sentence}"
        raise KvdError(Refusal(Code.NOT_SUPPORTED, why, side="client"))
    if number:
        return runtime, int(number)
    with _refused("looking for the engine's blocks"):
        found = runtime.device_of(layouts[0].address)
    if found is None:
        why = (
            f"the engine's blocks at {layouts[0].address:#x} are in no memory of a device, or it "
            "was freed"
        )
        raise KvdError(Refusal(Code.LAYOUT_MISMATCH, why, side="client"))
    return runtime, found


def chunk_borders(pool: PoolBytes) -> list[int]:
    """Where to register a pool in parts: borders of pages of this machine in no page of the pool.

    One part, where there are none for a long way.
    """
    unit = math.lcm(_PAGE, *(place.stride for place in pool.places))
    step = max(1, REGISTERED_AT_ONCE // unit) * unit
    is_inside = any(0 < -place.offset % place.stride < place.size for place in pool.places)
    if step > LARGEST_CHUNK or is_inside:
        return [0, pool.size]
    return [*range(0, pool.size, step), pool.size]


def _allocations(layouts: Sequence[BlockLayout]) -> Iterator[Stretch]:
    """What lies over each other is of one allocation; what touches may be of two."""
    low = high = 0
    for layout in sorted(layouts, key=lambda layout: layout.address):
        if layout.address < high:
            high = max(high, layout.end)
            continue
        if high:
            yield Stretch(low, high - low, "the engine's blocks")
        low, high = layout.address, layout.end
    if high:
        yield Stretch(low, high - low, "the engine's blocks")


def _number_of(stream: object) -> int:
    if isinstance(stream, int):
        return stream
    if isinstance(stream, StreamOfTorch):
        return int(stream.cuda_stream)
    why = f"stream is {stream!r:.100}, a {type(stream).__name__}: it is a number or a torch stream"
    raise KvdError(Refusal(Code.BAD_REQUEST, why, side="client"))
