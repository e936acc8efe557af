"""A bare ZMQ echo: what a round trip costs without a codec and without an API.

What lives here: both of its ends, driven from their descriptors like kvd's own sockets. Its server,
a process of its own (``python -m kvd.bench.echo ENDPOINT``), answers each message with as many
bytes as the first frame says. What must not: what is measured beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import uvloop
import zmq

from kvd.sockets import LoopSocket, open_dealer, open_router, pusher, send_now

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HEADER_BYTES: Final = 16
ANSWER_MS: Final = 10_000


class EchoServer(NamedTuple):
    """The echo process."""

    endpoint: str
    pid: int


class EchoClient:
    """Calls of the echo; answers come in the order of the calls."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._waiting: deque[asyncio.Future[None]] = deque()
        dealer = open_dealer(context)
        dealer.connect(endpoint)
        self._socket = LoopSocket(dealer, self._answered, loop=loop)

    async def call(self, answer_bytes: int, frame: bytes) -> None:
        """Send a header and ``frame``; wait for a header and ``answer_bytes`` bytes."""
        answered: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(answered)
        self._socket.send([b"%d" % (HEADER_BYTES + answer_bytes), bytes(HEADER_BYTES), frame])
        await answered

    def close(self) -> None:
        """Stop."""
        self._socket.close()

    def _answered(self, _: list[bytes]) -> None:
        self._waiting.popleft().set_result(None)


class BlockingEcho:
    """The same for a thread that blocks, in the fewest calls of libzmq that do it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._dealer = open_dealer(context)
        self._dealer.setsockopt(zmq.RCVTIMEO, ANSWER_MS)
        self._dealer.connect(endpoint)
        self._push = pusher(self._dealer)

    def call(self, answer_bytes: int, frame: bytes) -> None:
        """As ``EchoClient.call``."""
        head = b"%d" % (HEADER_BYTES + answer_bytes)
        send_now(self._push, [head, bytes(HEADER_BYTES), frame])
        self._dealer.recv()

    def close(self) -> None:
        """Stop."""
        self._dealer.close()


async def serve(endpoint: str) -> None:
    """Echo until the process is stopped."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = open_router(context)
    router.bind(endpoint)
    payload = bytes(2**20)

    def answer(frames: list[bytes]) -> None:
        echo.send([frames[0], payload[: int(frames[1])]])

    echo = LoopSocket(router, answer, loop=asyncio.get_running_loop())
    await asyncio.Event().wait()


@contextlib.contextmanager
def echo_server(directory: Path) -> Iterator[EchoServer]:
    """An echo process, for as long as the block lasts."""
    endpoint = f"ipc://{directory}/echo.sock"
    process = subprocess.Popen([sys.executable, "-m", "kvd.bench.echo", endpoint])
    try:
        yield EchoServer(endpoint, process.pid)
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
