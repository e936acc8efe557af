"""The reference of ``kvd bench stream``: the same bytes moved by bare processes, without a daemon.

``python -m kvd.bench.raw_nixl`` is one such process. It maps the memory of a daemon's pool, the
very same pages, because how they lie in the machine's memory changes the speed of copies by a
fifth; and it obeys one command at a time (``kvd.harness.child``): write pages to the other one
through NIXL, copy pages by memcpy, or stream bytes over a plain TCP connection. ``RawPair`` is two
of them that do the same work as a handoff.

Nothing is in the way of NIXL here: the descriptors are built before the clock starts, and nobody is
told of anything before the last handle is done. Where that is fastest the sender spins, which is
more than any service can afford.

Raw NIXL is measured in its best configuration, found on the spot: several sizes of handles and
numbers of them in flight are tried, and the fastest is the reference for the whole run.

Times are of CLOCK_MONOTONIC, so those of two processes of one host can be compared.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple, assert_never

import msgspec
import numpy as np

from kvd.bench.engines import Took
from kvd.bench.memory import huge_bytes
from kvd.client.blocking import attach
from kvd.core.layout.geometry import Geometry, PieceRow
from kvd.harness.child import Child, answer, obey
from kvd.transfer.descriptors import writes
from kvd.transfer.mapping import map_region, map_scratch
from kvd.transfer.metadata import VERSION, Metadata, pack, unpack
from kvd.transfer.nixl import Binding, MemorySpan, ReceivingAgent, SendingAgent
from kvd.transfer.orders import RegionPlan
from kvd.types import Pages
from kvd.wire.attach import Attach

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvd.bench.stream import Site
    from kvd.harness.daemons import Pair


REGION: Final = "kv"
SCRATCH_BYTES: Final = 4096
STREAM_STEP_BYTES: Final = 2**20


class ConnectRaw(msgspec.Struct, frozen=True, tag=True):
    """Make a sending agent for the other process. Answer: ``WorkDone``."""

    metadata: bytes


class WritePages(msgspec.Struct, frozen=True, tag=True):
    """Write my pages over the other one's, in handles of ``handle_rows`` descriptors of 512 KiB.

    ``sleep_s`` is how long the sender sleeps at most until a socket wakes it; 0: it spins.
    Answer: ``WorkDone``.
    """

    source: bytes
    destination: bytes
    handle_rows: int
    in_flight: int
    sleep_s: float


class CopyPages(msgspec.Struct, frozen=True, tag=True):
    """memcpy my pages over my pages, at most ``piece_bytes`` per call. Answer: ``WorkDone``."""

    source: bytes
    destination: bytes
    piece_bytes: int


class TakeStream(msgspec.Struct, frozen=True, tag=True):
    """Accept one TCP connection and exchange bytes. Answers: ``Listening``, then ``WorkDone``."""

    host: str
    receive_bytes: int
    send_bytes: int


class GiveStream(msgspec.Struct, frozen=True, tag=True):
    """Make one TCP connection and exchange bytes, both directions at once. Answer: ``WorkDone``."""

    host: str
    port: int
    receive_bytes: int
    send_bytes: int


class RegionMade(msgspec.Struct, frozen=True, tag=True):
    """The region is mapped and registered: what a process says first."""

    metadata: bytes


class WorkDone(msgspec.Struct, frozen=True, tag=True):
    """When the work of the last command began and ended."""

    began_s: float
    ended_s: float


class Listening(msgspec.Struct, frozen=True, tag=True):
    """Where to ``GiveStream``."""

    port: int


RawCommand = ConnectRaw | WritePages | CopyPages | TakeStream | GiveStream


# ---- inside the process --------------------------------------------------------------------------


class _Bare:
    """What one bare process owns."""

    def __init__(self, name: str, descriptor: int, pages: int, page_bytes: int) -> None:
        """Map the region behind an inherited descriptor, and register it."""
        geometry = Geometry(
            pages=pages,
            page_bytes=page_bytes,
            rows=(PieceRow(0, page_bytes, page_bytes),),
            tensors=(),
        )
        self._note = map_region(RegionPlan(REGION, descriptor, geometry))
        whole = (ctypes.c_uint8 * self._note.region_bytes).from_address(self._note.address)
        self._bytes: NDArray[np.uint8] = np.ctypeslib.as_array(whole)
        self._page_bytes = page_bytes
        self._scratch = map_scratch(SCRATCH_BYTES)
        self._binding = Binding()
        self._spans = [
            MemorySpan(self._note.address, self._note.region_bytes),
            MemorySpan(self._scratch, SCRATCH_BYTES),
        ]
        self._name = f"{name}-{os.getpid()}"
        self._receiver = ReceivingAgent(self._binding, self._name, self._spans)
        self._sender: SendingAgent | None = None
        self._theirs = self._note

    def made(self) -> RegionMade:
        """How the other one connects."""
        told = Metadata(
            version=VERSION,
            agent=self._name,
            blob=self._receiver.blob,
            scratch=self._scratch,
            scratch_bytes=SCRATCH_BYTES,
            regions=(self._note,),
        )
        return RegionMade(pack(told))

    def obey(self, command: RawCommand) -> WorkDone:
        """Carry the command out, and say when that began and ended."""
        match command:
            case ConnectRaw(metadata):
                return self._connect(unpack(metadata))
            case WritePages():
                return self._write(command)
            case CopyPages():
                return self._copy(command)
            case TakeStream():
                with socket.create_server((command.host, 0)) as listener:
                    answer(Listening(listener.getsockname()[1]))
                    connection, _ = listener.accept()
                    with connection:
                        return self._exchange(connection, command)
            case GiveStream():
                with socket.create_connection((command.host, command.port)) as connection:
                    return self._exchange(connection, command)
            case _:
                assert_never(command)

    def _connect(self, peer: Metadata) -> WorkDone:
        began_s = time.monotonic()
        self._theirs = next(region for region in peer.regions if region.name == REGION)
        name = f"{self._name}-tx"
        self._sender = connected_sender(self._binding, name, self._spans, self._scratch, peer)
        return WorkDone(began_s, time.monotonic())

    def _write(self, command: WritePages) -> WorkDone:
        sender = self._sender
        assert sender is not None
        plan = writes(Pages(command.source), Pages(command.destination), self._note, self._theirs)
        cuts = [
            (
                plan.source[low : low + command.handle_rows],
                plan.destination[low : low + command.handle_rows],
            )
            for low in range(0, len(plan.source), command.handle_rows)
        ]
        with select.epoll() as sockets:
            for descriptor in sender.polls:
                sockets.register(descriptor, select.EPOLLIN)
            flying: list[int] = []
            began_s = time.monotonic()
            for at, to in cuts:
                while len(flying) >= command.in_flight:
                    _await(sender, flying, sockets, command.sleep_s)
                flying.append(sender.post(at, to))
            while flying:
                _await(sender, flying, sockets, command.sleep_s)
            return WorkDone(began_s, time.monotonic())

    def _copy(self, command: CopyPages) -> WorkDone:
        size, most = self._page_bytes, command.piece_bytes
        pieces = []
        for at, to in _shared_runs(Pages(command.source), Pages(command.destination)):
            whole = (at.stop - at.start) * size
            for low in range(0, whole, most):
                high = min(low + most, whole)
                here = self._bytes[at.start * size + low : at.start * size + high]
                there = self._bytes[to.start * size + low : to.start * size + high]
                pieces.append((there, here))
        began_s = time.monotonic()
        for there, here in pieces:
            np.copyto(there, here)
        return WorkDone(began_s, time.monotonic())

    def _exchange(self, connection: socket.socket, command: TakeStream | GiveStream) -> WorkDone:
        """Send the start of the region while its end is received over."""
        view = self._bytes.data
        sending = view[: command.send_bytes]

        def send() -> None:
            for low in range(0, len(sending), STREAM_STEP_BYTES):
                connection.sendall(sending[low : low + STREAM_STEP_BYTES])

        receiving = view[len(view) - command.receive_bytes :]
        began_s = time.monotonic()
        sender = threading.Thread(target=send)
        sender.start()
        got = 0
        while got < len(receiving):
            count = connection.recv_into(receiving[got : got + STREAM_STEP_BYTES])
            if not count:
                raise ConnectionError(f"the stream ended after {got} of {len(receiving)} bytes")
            got += count
        sender.join()
        return WorkDone(began_s, time.monotonic())


def connected_sender(
    binding: Binding, name: str, spans: list[MemorySpan], scratch: int, peer: Metadata
) -> SendingAgent:
    """An agent that has written to ``peer`` once, so that it is connected."""
    sender = SendingAgent(binding, name, spans=spans, peer=peer)
    here = np.array([[scratch, SCRATCH_BYTES, 0]], np.uint64)
    there = np.array([[peer.scratch, SCRATCH_BYTES, 0]], np.uint64)
    handle = sender.post(here, there)
    while not sender.step(handle):
        pass
    return sender


def _await(sender: SendingAgent, flying: list[int], sockets: select.epoll, sleep_s: float) -> None:
    """Look at the oldest handle once, and sleep if it is not done."""
    if sender.step(flying[0]):
        del flying[0]
    elif sleep_s:
        sockets.poll(sleep_s)


def _shared_runs(source: Pages, destination: Pages) -> list[tuple[range, range]]:
    """Page ranges that are adjacent on both sides, pairwise."""
    at = np.frombuffer(source, "<i4").astype(np.int64)
    to = np.frombuffer(destination, "<i4").astype(np.int64)
    breaks = np.flatnonzero((np.diff(at) != 1) | (np.diff(to) != 1)) + 1
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), at.size]
    return [
        (
            range(int(at[low]), int(at[low]) + high - low),
            range(int(to[low]), int(to[low]) + high - low),
        )
        for low, high in zip(starts, ends, strict=True)
    ]


def main(name: str, *numbers: str) -> None:
    """Obey standard input until it ends."""
    bare = _Bare(name, *map(int, numbers))
    answer(bare.made())
    obey(RawCommand, bare.obey)  # type: ignore[arg-type]  # a union is no type to mypy
    os._exit(0)  # agents and handles are not taken down one by one


# ---- both, from their parent's side --------------------------------------------------------------

POOL: Final = "main"
TRIES: Final = 3


class Tuning(NamedTuple):
    """How raw NIXL is driven: descriptors of 512 KiB per handle, handles in flight, longest nap."""

    handle_rows: int
    in_flight: int
    sleep_s: float


NAP_S: Final = 0.02
ALL: Final = 1_000_000
TUNINGS: Final = (
    Tuning(16, 1, 0),
    Tuning(16, 4, 0),
    Tuning(64, 4, 0),
    Tuning(ALL, 1, 0),
    Tuning(16, 4, NAP_S),
    Tuning(16, 8, NAP_S),
    Tuning(ALL, 1, NAP_S),
)


class RawPair:
    """Two bare processes, over the pools of two daemons, that can write to each other."""

    def __init__(self, first: Child, second: Child) -> None:
        self._processes = (first, second)
        self.tuning = TUNINGS[0]

    @property
    def huge_bytes(self) -> tuple[int, ...]:
        """Bytes of the pools that each of them has mapped as 2 MiB pages so far."""
        return tuple(huge_bytes(process.pid) for process in self._processes)

    def tune(self, source: bytes, destination: bytes) -> None:
        """Find the fastest way to write these pages, one way."""
        times: dict[Tuning, float] = {}
        for tuning in TUNINGS:
            self.tuning = tuning
            took = [self.write(source, destination, ways=1).seconds for _ in range(TRIES)]
            times[tuning] = statistics.median(took)
        self.tuning = min(times, key=lambda tuning: times[tuning])

    def write(self, source: bytes, destination: bytes, *, ways: int) -> Took:
        """Write pages of the first process over pages of the second; two ways: and back."""
        return self._both(WritePages(source, destination, *self.tuning), ways)

    def copy(self, source: bytes, destination: bytes, *, ways: int, piece_bytes: int) -> Took:
        """As many bytes by memcpy within a process; two ways: in both processes at once."""
        return self._both(CopyPages(source, destination, piece_bytes), ways)

    def stream(self, host: str, size_bytes: int, *, ways: int) -> Took:
        """As many bytes over one plain TCP connection; two ways: in both directions at once."""
        giver, taker = self._processes
        back_bytes = size_bytes * (ways - 1)
        port = taker.do(TakeStream(host, size_bytes, back_bytes), Listening).port
        gave = giver.do(
            GiveStream(host=host, port=port, receive_bytes=back_bytes, send_bytes=size_bytes),
            WorkDone,
        )
        took = taker.hear(WorkDone)
        spans = ((gave.began_s, took.ended_s), (took.began_s, gave.ended_s))
        return Took(spans[:ways])

    def _both(self, command: RawCommand, ways: int) -> Took:
        active = self._processes[:ways]
        for process in active:
            process.tell(command)
        done = [process.hear(WorkDone) for process in active]
        return Took(tuple((work.began_s, work.ended_s) for work in done))


@contextlib.contextmanager
def raw_pair(pair: Pair, site: Site, *, pages: int, page_bytes: int) -> Iterator[RawPair]:
    """A bare process beside each daemon, over its pool, for as long as the block lasts."""
    with contextlib.ExitStack() as stack:
        processes = []
        for daemon, place in zip((pair.prefill, pair.decode), site.places, strict=True):
            attachment = attach(daemon.client, Attach("bench-raw"))
            stack.callback(attachment.close)
            descriptor = attachment.memory_fd(POOL, REGION)
            one = Child(
                "kvd.bench.raw_nixl",
                *(daemon.name, str(descriptor), str(pages), str(page_bytes)),
                prefix=place.prefix,
                pass_fds=(descriptor,),
                environment=site.environment,
            )
            stack.callback(one.stop)
            processes.append(one)
        first, second = processes
        made = (first.hear(RegionMade), second.hear(RegionMade))
        first.do(ConnectRaw(made[1].metadata), WorkDone)
        second.do(ConnectRaw(made[0].metadata), WorkDone)
        yield RawPair(first, second)


if __name__ == "__main__":
    main(*sys.argv[1:])
