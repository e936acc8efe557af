"""An engine of ``benchmarks multiturn``: a process of its own with real KV and no model.

``python -m benchmarks.multiturn_engine ROLE DAEMON`` attaches to its daemon, says so, and answers
each line of JSON on its standard input, a ``ServeTurn``, with one of its own, until the input ends.
KV of a token is its id in every byte (``token_memory``); the decode side checks what it received
before it uses it.

The decode engine batches continuously: a step computes for a fixed time, writes the KV of one token
of every running sequence and says the next one. Between two steps the loop looks at its sockets.
What a step waits for (a core, memory bandwidth, the loop) shows in the time between tokens.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import uvloop

import kvd.client
from benchmarks.token_memory import TokenMemory, WrittenTokens
from kvd.errors import KvdError
from kvd.harness.child import answer
from kvd.types import ID_BYTES, Tokens, count

if TYPE_CHECKING:
    from kvd.client import Lease, Node

VOCABULARY = 128_256
CHUNK_TOKENS = 256
STEP_S = 0.002
LINE_BYTES = 2**20
"""More than a request or an answer ever takes."""
PREFILL, DECODE = "prefill", "decode"
SOURCE = "p"
"""The prefill daemon, as the decode daemon's configuration calls it."""


class ServeTurn(msgspec.Struct, frozen=True):
    """A request's half, for either engine. Answer: ``TurnServed``."""

    room: int
    namespace: str
    is_cached: bool
    tokens: bytes
    output_tokens: int


class TurnServed(msgspec.Struct, frozen=True):
    """What became of it; of no room: the engine serves. ``why`` is of an engine that gave up.

    The prefill side has ``sent_bytes``, the decode side the output and when each of its tokens was
    there (monotonic clock of the host).
    """

    room: int = 0
    why: str = ""
    sent_bytes: int = 0
    output: bytes = b""
    token_times_s: tuple[float, ...] = ()


def said_next(tokens: Tokens) -> int:
    """What an engine without a model says after ``tokens``."""
    last = int.from_bytes(tokens[-ID_BYTES:], "little")
    return (last * 48_271 + len(tokens)) % VOCABULARY


class TurnPrefill:
    """Writes the KV of what its node has not cached, and sends it meanwhile."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._memory = TokenMemory(node.pool("main"))

    async def serve(self, request: ServeTurn) -> TurnServed:
        """Prefill ``request`` and hand it over."""
        tokens = Tokens(request.tokens)
        ids = np.frombuffer(tokens, "<i4")
        lease = await self._node.lease(ids, namespace=request.namespace)
        send = await self._node.send(request.room, ids, lease=lease, namespace=request.namespace)
        for first in range(lease.prefix_len, ids.size, CHUNK_TOKENS):
            last = min(first + CHUNK_TOKENS, ids.size)
            self._memory.write(WrittenTokens(lease=lease, tokens=tokens, first=first, last=last))
            await send.advance(last)
        outcome = await send.finish(said_next(tokens).to_bytes(ID_BYTES, "little"))
        if outcome.reason is not None:
            raise KvdError(outcome.reason)
        await lease.release(())
        return TurnServed(request.room, sent_bytes=outcome.sent_bytes)


class RunningSequence:
    """One running sequence: all tokens so far; the KV of the last one is not written yet."""

    def __init__(self, lease: Lease, tokens: Tokens, output_tokens: int) -> None:
        self.lease = lease
        self.tokens = tokens
        self.times_s = [time.monotonic()]
        self.end_tokens = count(tokens) + output_tokens - 1
        self.ended = asyncio.Event()

    def last_written(self) -> WrittenTokens:
        """Its last token."""
        n_tokens = count(self.tokens)
        return WrittenTokens(
            lease=self.lease, tokens=self.tokens, first=n_tokens - 1, last=n_tokens
        )


class TurnDecode:
    """Receives prompts and says tokens, one step for all running sequences at a time."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._memory = TokenMemory(node.pool("main"))
        self._running: list[RunningSequence] = []
        self._arrived = asyncio.Event()
        self._work = SteadyWork(STEP_S)
        self._stepping = asyncio.ensure_future(self._step_for_ever())

    async def serve(self, request: ServeTurn) -> TurnServed:
        """Receive the prompt of ``request``, say its output, cache both if they may be cached."""
        prompt = Tokens(request.tokens)
        receive = await self._node.receive(
            request.room,
            np.frombuffer(prompt, "<i4"),
            source=SOURCE,
            namespace=request.namespace,
            reserve_tokens=request.output_tokens,
            cache=request.is_cached,
        )
        await receive.done()
        self._memory.check(receive.lease, prompt)
        sequence = RunningSequence(
            receive.lease, Tokens(prompt + receive.aux), request.output_tokens
        )
        if request.output_tokens > 1:
            self._running.append(sequence)
            self._arrived.set()
            await sequence.ended.wait()
        output = sequence.tokens[len(prompt) :]
        await receive.lease.release(np.frombuffer(output[:-ID_BYTES], "<i4"))
        times_s = tuple(sequence.times_s)
        return TurnServed(request.room, output=output, token_times_s=times_s)

    async def _step_for_ever(self) -> None:
        while True:
            await self._arrived.wait()
            self._work.run()
            self._memory.write(*(one.last_written() for one in self._running))
            now_s = time.monotonic()
            for sequence in self._running:
                said = said_next(sequence.tokens).to_bytes(ID_BYTES, "little")
                sequence.tokens = Tokens(sequence.tokens + said)
                sequence.times_s.append(now_s)
                if count(sequence.tokens) > sequence.end_tokens:
                    sequence.ended.set()
            self._running = [one for one in self._running if not one.ended.is_set()]
            if not self._running:
                self._arrived.clear()
            await asyncio.sleep(0)


class SteadyWork:
    """Computation that takes about ``seconds`` on an idle core."""

    def __init__(self, seconds: float) -> None:
        self._matrix = np.full((192, 192), 0.01, dtype=np.float32)
        self._times = 1
        took_s = []
        for _ in range(50):
            began_s = time.perf_counter()
            self.run()
            took_s.append(time.perf_counter() - began_s)
        self._times = max(1, round(seconds / min(took_s)))

    def run(self) -> None:
        """Compute."""
        for _ in range(self._times):
            self._matrix @ self._matrix


async def _serve(engine: TurnPrefill | TurnDecode, request: ServeTurn) -> None:
    try:
        answer(await engine.serve(request))
    except (KvdError, AssertionError) as error:
        answer(TurnServed(request.room, why=str(error)))


async def run(role: str, daemon: str) -> None:
    """Serve until the standard input ends."""
    loop = asyncio.get_running_loop()
    requests = asyncio.StreamReader(limit=LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
    under_way: set[asyncio.Task[None]] = set()
    async with kvd.client.connect(daemon, name=role) as node:
        engine = TurnPrefill(node) if role == PREFILL else TurnDecode(node)
        answer(TurnServed())
        while line := await requests.readline():
            task = asyncio.create_task(_serve(engine, msgspec.json.decode(line, type=ServeTurn)))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
    os._exit(0)  # whatever was under way has nobody to answer to


if __name__ == "__main__":
    uvloop.run(run(*sys.argv[1:]))
