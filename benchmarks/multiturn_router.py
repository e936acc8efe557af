"""The router of ``benchmarks multiturn``: both halves of a request go out, both answers come back.

It starts the engine processes too, and measures what is measured from outside: the time from a
request's submission to its first token.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from benchmarks.multiturn_engine import (
    DECODE,
    PREFILL,
    REPLIES,
    Broken,
    Decoded,
    Prefilled,
    Ready,
    Reply,
    Serve,
)
from kvd.sockets import LoopSocket

if TYPE_CHECKING:
    from collections.abc import Iterator

    import zmq

    from kvd.harness.daemons import Pair
    from kvd.types import Tokens

ANSWER_S = 60.0
START_S = 60.0


class Cache(enum.Enum):
    """Whether what the decode engine has may be found again."""

    ON = "on"
    OFF = "off"


class Turn(msgspec.Struct, frozen=True):
    """One request that was served; times in seconds."""

    prompt: bytes
    output: bytes
    sent_bytes: int
    first_token_s: float
    gaps_s: tuple[float, ...]


class EngineFailed(Exception):
    """An engine gave up, or said nothing; the message quotes it."""


class Router:
    """Sends both halves of every request to the engines, and takes their answers."""

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        self._ready = {PREFILL: asyncio.Event(), DECODE: asyncio.Event()}
        self._answers: dict[tuple[str, int], asyncio.Future[Reply]] = {}
        self._last_room = 0
        self._socket = LoopSocket(router, self._take, loop=asyncio.get_running_loop())

    async def wait_ready(self) -> None:
        """Return when both engines serve.

        Raises:
            EngineFailed: one does not, for so long.
        """
        try:
            async with asyncio.timeout(START_S):
                for ready in self._ready.values():
                    await ready.wait()
        except TimeoutError:
            silent = [role for role, ready in self._ready.items() if not ready.is_set()]
            raise EngineFailed(
                f"no {' and no '.join(silent)} engine after {START_S:.0f} s"
            ) from None

    async def serve(
        self, prompt: Tokens, *, output_tokens: int, cache: Cache, namespace: str
    ) -> Turn:
        """One turn, from its submission to its end on both nodes.

        Raises:
            EngineFailed: an engine gave up or did not answer.
        """
        self._last_room += 1
        room, is_cached = self._last_room, cache is Cache.ON
        message = msgspec.msgpack.encode(Serve(room, namespace, is_cached, prompt, output_tokens))
        began_s = time.monotonic()
        halves = [self._ask(role, room, message) for role in (DECODE, PREFILL)]
        try:
            async with asyncio.timeout(ANSWER_S):
                decoded, prefilled = await asyncio.gather(*halves)
        except TimeoutError:
            raise EngineFailed(f"room {room} took longer than {ANSWER_S:.0f} s") from None
        assert isinstance(decoded, Decoded)
        assert isinstance(prefilled, Prefilled)
        times_s = decoded.token_times_s
        return Turn(
            prompt=prompt,
            output=decoded.output,
            sent_bytes=prefilled.sent_bytes,
            first_token_s=times_s[0] - began_s,
            gaps_s=tuple(np.diff(times_s).tolist()),
        )

    def close(self) -> None:
        """Stop."""
        self._socket.close()

    def _ask(self, role: str, room: int, message: bytes) -> asyncio.Future[Reply]:
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._answers[role, room] = answer
        self._socket.send([role.encode(), message])
        return answer

    def _take(self, frames: list[bytes]) -> None:
        role, reply = frames[0].decode(), REPLIES.decode(frames[1])
        match reply:
            case Ready():
                self._ready[role].set()
            case Broken(room, why):
                self._answers.pop((role, room)).set_exception(EngineFailed(f"{role}: {why}"))
            case _:
                self._answers.pop((role, reply.room)).set_result(reply)


@contextlib.contextmanager
def engines(pair: Pair, router: str) -> Iterator[None]:
    """Both engine processes, for as long as the block lasts; they end with their input."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    roles = ((PREFILL, pair.prefill), (DECODE, pair.decode))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.multiturn_engine", role, daemon.client, router],
            stdin=subprocess.PIPE,
            env=environment,
        )
        for role, daemon in roles
    ]
    try:
        yield
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            process.wait()
