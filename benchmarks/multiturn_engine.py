"""An engine of ``multiturn`` and ``decode_radix``: a process of its own with real KV and no model.

``python -m benchmarks.multiturn_engine DAEMON SHAPE`` attaches to its daemon, says so, and answers
each line of JSON on its standard input, a ``ServeTurn``, with one of its own, until the input ends.
``SHAPE`` is an ``EngineShape``, as JSON. KV of a token is its id in every byte (``token_memory``);
the decode side checks what it received before it uses it.

The decode engine batches continuously: a step computes for a fixed time, writes the KV of one token
of every running sequence and says the next one. Between two steps the loop looks at its sockets.
What a step waits for (a core, memory bandwidth, the loop) shows in the time between tokens. Where
something else than this host's cores computes, as a GPU would, a step is due when its time is over.
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
LINE_BYTES = 2**20
"""More than a request or an answer ever takes."""
PREFILL, DECODE = "prefill", "decode"
SOURCE = "p"
"""The prefill daemon, as the decode daemon's configuration calls it."""

CHECK_S = 0.005
"""More than the check of a prompt of 54,500 tokens takes: 2 to 3 ms."""
MOMENT_S = 0.001
"""After which whoever waited for the end of a step has begun the next one."""


class EngineShape(msgspec.Struct, frozen=True):
    """Which engine it is: ``chunk_tokens`` of a prefill's pieces, ``step_s`` of a decode step.

    ``is_elsewhere``: a step is not computed by the cores of this host.
    """

    role: str
    chunk_tokens: int = 256
    step_s: float = 0.002
    is_elsewhere: bool = False


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


def said_next(last: int, n_tokens: int) -> int:
    """What an engine without a model says after so many tokens, the ``last`` of them this one."""
    return (last * 48_271 + n_tokens * ID_BYTES) % VOCABULARY


def ids_frame(token: int) -> bytes:
    """One token id, as prompts have them."""
    return token.to_bytes(ID_BYTES, "little")


class TurnPrefill:
    """Writes the KV of what its node has not cached, and sends it meanwhile."""

    def __init__(self, node: Node, shape: EngineShape) -> None:
        self._node = node
        self._chunk_tokens = shape.chunk_tokens
        self._memory = TokenMemory(node.pool("main"))

    async def serve(self, request: ServeTurn) -> TurnServed:
        """Prefill ``request`` and hand it over."""
        tokens = Tokens(request.tokens)
        ids = np.frombuffer(tokens, "<i4")
        lease = await self._node.lease(ids, namespace=request.namespace)
        send = await self._node.send(request.room, ids, lease=lease, namespace=request.namespace)
        for first in range(lease.prefix_len, ids.size, self._chunk_tokens):
            last = min(first + self._chunk_tokens, ids.size)
            self._memory.write(WrittenTokens(lease=lease, tokens=tokens, first=first, last=last))
            await send.advance(last)
        outcome = await send.finish(ids_frame(said_next(int(ids[-1]), ids.size)))
        if outcome.reason is not None:
            raise KvdError(outcome.reason)
        await lease.release(())
        return TurnServed(request.room, sent_bytes=outcome.sent_bytes)


class RunningSequence:
    """One running sequence: all tokens so far; the KV of the last one is not written yet."""

    def __init__(self, lease: Lease, prompt: Tokens, first: bytes, output_tokens: int) -> None:
        self._lease = lease
        self._n_prompt = count(prompt)
        self._ids = np.frombuffer(prompt + bytes(ID_BYTES * output_tokens), "<i4").copy()
        self._n_tokens = self._n_prompt
        self.times_s: list[float] = []
        self.ended = asyncio.Event()
        self.say(int.from_bytes(first, "little"), time.monotonic())

    def say(self, token: int, now_s: float) -> None:
        """Its next token."""
        self._ids[self._n_tokens] = token
        self._n_tokens += 1
        self.times_s.append(now_s)
        if self._n_tokens == self._ids.size:
            self.ended.set()

    def next_said(self) -> int:
        """What it says after all tokens so far."""
        return said_next(int(self._ids[self._n_tokens - 1]), self._n_tokens)

    @property
    def output(self) -> bytes:
        """The ids of the tokens behind the prompt."""
        return self._ids[self._n_prompt : self._n_tokens].tobytes()

    def last_written(self) -> WrittenTokens:
        """The last token, whose KV is to be written."""
        n_tokens = self._n_tokens
        return WrittenTokens(
            lease=self._lease, tokens=self._ids.data, first=n_tokens - 1, last=n_tokens
        )


class TurnDecode:
    """Receives prompts and says tokens, one step for all running sequences at a time."""

    def __init__(self, node: Node, shape: EngineShape) -> None:
        self._node = node
        self._memory = TokenMemory(node.pool("main"))
        self._running: list[RunningSequence] = []
        # Many may arrive in one turn of the loop: a step must not wait for all of them.
        self._one_checks = asyncio.Lock()
        self._arrived = asyncio.Event()
        kind = WorkElsewhere if shape.is_elsewhere else SteadyWork
        self._work = kind(shape.step_s)
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
        async with self._one_checks:
            # An engine has no such check: it must not make a step end late.
            await self._work.leave_room(CHECK_S)
            self._memory.check(receive.lease, prompt)
            await asyncio.sleep(0)
        sequence = RunningSequence(
            lease=receive.lease,
            prompt=prompt,
            first=receive.aux,
            output_tokens=request.output_tokens,
        )
        if request.output_tokens > 1:
            self._running.append(sequence)
            self._arrived.set()
            await sequence.ended.wait()
        output = sequence.output
        await receive.lease.release(np.frombuffer(output[:-ID_BYTES], "<i4"))
        times_s = tuple(sequence.times_s)
        return TurnServed(request.room, output=output, token_times_s=times_s)

    async def _step_for_ever(self) -> None:
        while True:
            is_first = not self._arrived.is_set()
            await self._arrived.wait()
            batch = list(self._running)
            await self._work.step(is_first=is_first)
            self._memory.write(*(sequence.last_written() for sequence in batch))
            now_s = time.monotonic()
            for sequence in batch:
                sequence.say(sequence.next_said(), now_s)
            self._running = [sequence for sequence in self._running if not sequence.ended.is_set()]
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

    async def step(self, *, is_first: bool) -> None:
        """Compute; nothing else runs meanwhile."""
        self.run()

    async def leave_room(self, seconds: float) -> None:
        """Nothing to wait for: no step is computed while anything else runs."""

    def run(self) -> None:
        """Keep the processor busy for one step."""
        for _ in range(self._times):
            self._matrix @ self._matrix


class WorkElsewhere:
    """Computation that takes ``seconds`` and none of this host's cores.

    One step follows the other at once: what the host does after a step is done while the next one
    is computed. Only where that takes longer than the step itself, the next one ends late.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._over_s = 0.0

    async def step(self, *, is_first: bool) -> None:
        """Wait for the end of the step; ``is_first``: nothing was computed before it."""
        now_s = time.monotonic()
        began_s = now_s if is_first else self._over_s
        self._over_s = max(began_s + self._seconds, now_s)
        await asyncio.sleep(self._over_s - now_s)

    async def leave_room(self, seconds: float) -> None:
        """Return when no step ends within ``seconds``, if steps are longer than that."""
        left_s = self._over_s - time.monotonic()
        if 0.0 < left_s < seconds < self._seconds:
            await asyncio.sleep(left_s + MOMENT_S)


async def _serve(engine: TurnPrefill | TurnDecode, request: ServeTurn) -> None:
    try:
        answer(await engine.serve(request))
    except (KvdError, AssertionError) as error:
        answer(TurnServed(request.room, why=str(error)))


async def run(daemon: str, said: str) -> None:
    """Serve until the standard input ends."""
    shape = msgspec.json.decode(said, type=EngineShape)
    loop = asyncio.get_running_loop()
    requests = asyncio.StreamReader(limit=LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
    under_way: set[asyncio.Task[None]] = set()
    async with kvd.client.connect(daemon, name=shape.role) as node:
        engine = (TurnPrefill if shape.role == PREFILL else TurnDecode)(node, shape)
        answer(TurnServed())
        while line := await requests.readline():
            task = asyncio.create_task(_serve(engine, msgspec.json.decode(line, type=ServeTurn)))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
    os._exit(0)  # whatever was under way has nobody to answer to


if __name__ == "__main__":
    uvloop.run(run(*sys.argv[1:]))
