"""The reference of the control plane: a bare ZMQ echo with given frame sizes, and nothing else.

Both ends are driven from their descriptors, like kvd's own sockets. The server is a process of its
own; it answers each message with as many bytes as the first frame says.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections import deque
from typing import TYPE_CHECKING

import uvloop
import zmq

from kvd.sockets import LoopSocket, open_dealer, open_router

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

START_S = 10.0
LOOK_S = 0.01


class EchoClient:
    """Calls of the echo; answers come in the order of the calls."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._waiting: deque[asyncio.Future[None]] = deque()
        dealer = open_dealer(context)
        dealer.connect(endpoint)
        self._socket = LoopSocket(dealer, self._answered, loop=loop)

    async def call(self, answer_bytes: int, *frames: bytes) -> None:
        """Send ``frames`` and wait for ``answer_bytes`` bytes."""
        answered: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(answered)
        self._socket.send([b"%d" % answer_bytes, *frames])
        await answered

    def close(self) -> None:
        """Stop."""
        self._socket.close()

    def _answered(self, _: list[bytes]) -> None:
        self._waiting.popleft().set_result(None)


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
def echo_server(directory: Path) -> Iterator[str]:
    """An echo process, as an endpoint, for as long as the block lasts."""
    endpoint = f"ipc://{directory}/echo.sock"
    process = subprocess.Popen([sys.executable, "-m", "kvd.bench.echo", endpoint])
    try:
        yield endpoint
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
