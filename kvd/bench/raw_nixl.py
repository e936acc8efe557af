"""The reference of ``kvd bench stream``: the same bytes moved by bare processes, without a daemon.

``python -m kvd.bench.raw_nixl`` is one such process. It maps the memory of a daemon's pool, the
very same pages, because how they lie in the machine's memory changes the speed of copies by a
fifth; and it obeys one command at a time: write pages to the other one through NIXL, copy pages by
memcpy, or stream bytes over a plain TCP connection. ``RawProcess`` is its parent's end.

Nothing is in the way of NIXL here: the descriptors are built before the clock starts, and nobody is
told of anything before the last handle is done. Where that is fastest the sender spins, which is
more than any service can afford.

Times are of CLOCK_MONOTONIC, so those of two processes of one host can be compared.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Final, TypeVar, assert_never

import msgspec
import numpy as np

from kvd.core.geometry import Geometry, Row
from kvd.transfer.descriptors import writes
from kvd.transfer.mapping import map_region, map_scratch
from kvd.transfer.metadata import VERSION, Metadata, pack, unpack
from kvd.transfer.nixl import Binding, MemorySpan, ReceivingAgent, SendingAgent, TransferStep
from kvd.transfer.transport import RegionFd
from kvd.types import Pages

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import IO

    from numpy.typing import NDArray

A = TypeVar("A", bound="Answer")

REGION: Final = "kv"
SCRATCH_BYTES: Final = 4096
STREAM_STEP_BYTES: Final = 2**20
ANSWER_S: Final = 120.0


class Shape(msgspec.Struct, frozen=True, tag=True):
    """First command: map the region behind an inherited descriptor. Answer: ``Made``."""

    name: str
    descriptor: int
    pages: int
    page_bytes: int


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Make a sending agent for the other process. Answer: ``Did``."""

    metadata: bytes


class Write(msgspec.Struct, frozen=True, tag=True):
    """Write my pages over the other one's, in handles of ``handle_rows`` descriptors of 512 KiB.

    ``sleep_s`` is how long the sender sleeps at most until a socket wakes it; 0: it spins.
    Answer: ``Did``.
    """

    source: bytes
    destination: bytes
    handle_rows: int
    in_flight: int
    sleep_s: float


class Copy(msgspec.Struct, frozen=True, tag=True):
    """memcpy my pages over my pages, at most ``piece_bytes`` per call. Answer: ``Did``."""

    source: bytes
    destination: bytes
    piece_bytes: int


class Take(msgspec.Struct, frozen=True, tag=True):
    """Accept one TCP connection and exchange bytes. Answers: ``Listening``, then ``Did``."""

    host: str
    receive_bytes: int
    send_bytes: int


class Give(msgspec.Struct, frozen=True, tag=True):
    """Make one TCP connection and exchange bytes, both directions at once. Answer: ``Did``."""

    host: str
    port: int
    receive_bytes: int
    send_bytes: int


class Made(msgspec.Struct, frozen=True, tag=True):
    """The region is mapped and registered."""

    metadata: bytes
    binding: str


class Did(msgspec.Struct, frozen=True, tag=True):
    """When the work of the last command began and ended."""

    began_s: float
    ended_s: float


class Listening(msgspec.Struct, frozen=True, tag=True):
    """Where to ``Give``."""

    port: int


Command = Shape | Connect | Write | Copy | Take | Give
Answer = Made | Did | Listening

_COMMAND: Final = msgspec.msgpack.Decoder(Command)
_ANSWER: Final = msgspec.msgpack.Decoder(Answer)
_LENGTH_BYTES: Final = 4


def _put(stream: IO[bytes], message: Command | Answer) -> None:
    body = msgspec.msgpack.encode(message)
    stream.write(len(body).to_bytes(_LENGTH_BYTES, "big") + body)
    stream.flush()


def _get(stream: IO[bytes]) -> bytes:
    """The next message; empty at the end of the stream."""
    head = stream.read(_LENGTH_BYTES)
    return stream.read(int.from_bytes(head, "big")) if len(head) == _LENGTH_BYTES else b""


class RawFailed(Exception):
    """A bare process ended; its standard error says why."""


class RawProcess:
    """One bare process, from its parent's side. One command at a time."""

    def __init__(
        self, descriptor: int, prefix: tuple[str, ...], environment: Mapping[str, str]
    ) -> None:
        """Start it with ``prefix`` before its command line, to inherit ``descriptor``."""
        self._child = subprocess.Popen(
            [*prefix, sys.executable, "-m", "kvd.bench.raw_nixl"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(descriptor,),
            env={**os.environ, **environment},
            start_new_session=True,
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._orders, self._answers = self._child.stdin, self._child.stdout

    @property
    def pid(self) -> int:
        """Of the process, or of what put it into its place."""
        return self._child.pid

    def tell(self, command: Command) -> None:
        """Hand over a command; ``hear`` its answer before the next."""
        try:
            _put(self._orders, command)
        except BrokenPipeError as gone:
            raise RawFailed("a bare process is gone; its standard error is above") from gone

    def hear(self, kind: type[A]) -> A:
        """The answer to the last command.

        Raises:
            RawFailed: the process ended instead.
        """
        body = _get(self._answers)
        answer = _ANSWER.decode(body) if body else None
        if not isinstance(answer, kind):
            raise RawFailed(f"a bare process answered {answer!r} where {kind.__name__} was due")
        return answer

    def do(self, command: Command, kind: type[A]) -> A:
        """``tell`` and ``hear``."""
        self.tell(command)
        return self.hear(kind)

    def stop(self) -> None:
        """End it: it exits when its standard input does."""
        self._orders.close()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._answers.close()


# ---- inside the process --------------------------------------------------------------------------


class _Bare:
    """What one bare process owns."""

    def __init__(self, shape: Shape) -> None:
        geometry = Geometry(
            shape.pages, shape.page_bytes, (Row(0, shape.page_bytes, shape.page_bytes),), ()
        )
        self._note = map_region(RegionFd(REGION, shape.descriptor, geometry).plan())
        whole = (ctypes.c_uint8 * self._note.region_bytes).from_address(self._note.address)
        self._bytes: NDArray[np.uint8] = np.ctypeslib.as_array(whole)
        self._page_bytes = shape.page_bytes
        self._scratch = map_scratch(SCRATCH_BYTES)
        self._binding = Binding()
        self._spans = [
            MemorySpan(self._note.address, self._note.region_bytes),
            MemorySpan(self._scratch, SCRATCH_BYTES),
        ]
        self._name = f"{shape.name}-{os.getpid()}"
        self._receiver = ReceivingAgent(self._binding, self._name, self._spans)
        self._sender: SendingAgent | None = None
        self._theirs = self._note

    def obey(self, command: Command, say: IO[bytes]) -> Answer:
        """Do it."""
        match command:
            case Shape():
                return self._made()
            case Connect(metadata):
                return self._connect(metadata)
            case Write():
                return self._write(command)
            case Copy():
                return self._copy(command)
            case Take():
                return self._take(command, say)
            case Give():
                with socket.create_connection((command.host, command.port)) as connection:
                    return self._exchange(connection, command)
            case _:
                assert_never(command)

    def _made(self) -> Made:
        blob = self._receiver.blob
        told = Metadata(VERSION, self._name, blob, self._scratch, SCRATCH_BYTES, (self._note,))
        return Made(pack(told), self._binding.module)

    def _connect(self, metadata: bytes) -> Did:
        began_s = time.monotonic()
        peer = unpack(metadata)
        self._theirs = next(region for region in peer.regions if region.name == REGION)
        self._sender = SendingAgent(self._binding, f"{self._name}-tx", spans=self._spans, peer=peer)
        first = np.array([[self._scratch, SCRATCH_BYTES, 0]], np.uint64)
        there = np.array([[peer.scratch, SCRATCH_BYTES, 0]], np.uint64)
        handle = self._sender.post(first, there)
        while self._sender.step(handle) is TransferStep.RUNNING:
            pass
        return Did(began_s, time.monotonic())

    def _write(self, command: Write) -> Did:
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
            return Did(began_s, time.monotonic())

    def _copy(self, command: Copy) -> Did:
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
        return Did(began_s, time.monotonic())

    def _take(self, command: Take, say: IO[bytes]) -> Did:
        with socket.create_server((command.host, 0)) as listener:
            _put(say, Listening(listener.getsockname()[1]))
            connection, _ = listener.accept()
            with connection:
                return self._exchange(connection, command)

    def _exchange(self, connection: socket.socket, command: Take | Give) -> Did:
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
        return Did(began_s, time.monotonic())


def _await(sender: SendingAgent, flying: list[int], sockets: select.epoll, sleep_s: float) -> None:
    """Look at the oldest handle once, and sleep if it is not done."""
    if sender.step(flying[0]) is TransferStep.DONE:
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


def main() -> None:
    """Obey standard input until it ends."""
    orders, answers = sys.stdin.buffer, sys.stdout.buffer
    first = _get(orders)
    if not first:
        return
    shape = _COMMAND.decode(first)
    assert isinstance(shape, Shape)
    bare = _Bare(shape)
    body = first
    while body:
        _put(answers, bare.obey(_COMMAND.decode(body), answers))
        body = _get(orders)
    os._exit(0)  # agents and handles are not taken down one by one


if __name__ == "__main__":
    main()
