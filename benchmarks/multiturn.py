"""``benchmarks multiturn``: conversations with the decode node's radix cache on and off.

Two real daemons with NIXL between them, a prefill engine and a decode engine in processes of their
own (``multiturn_engine``), and here the router that sends them every turn of several conversations
at once. On and off take turns, round after round; off is ``receive(..., cache=False)``, so that
nothing is ever found on the decode side. Prompts, computation and the prefill side's cache are the
same in both.

A prompt is all that was said before, the system prompt first, and new words of the user::

    turn 0 | system | user |
    turn 1 | system | user | output | user |
                           ^ last output token left out: its KV was never computed

What has to be sent is arithmetic over these token lists, in ``SeenPages``; nothing of kvd's own
index is in it, because the bound is what the index is judged by.

Requests per second come from rounds in which a conversation asks again as soon as it is answered.
There the faster side has more sequences running and more prompts computed at any moment, so its
latencies say nothing: they come from paced rounds, where both are asked the same at the same times,
half as often as the slower one could answer.

Time to first token runs from here, when the router sends a turn out, to the decode engine, when the
prompt's KV has arrived and was checked. Time between tokens is that of each running sequence.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec
import numpy as np
import uvloop

from benchmarks.harness import benchmark
from benchmarks.multiturn_engine import (
    DECODE,
    LINE_BYTES,
    PREFILL,
    VOCABULARY,
    EngineShape,
    ServeTurn,
    TurnServed,
)
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most, figure
from kvd.harness.child import ChildFailed
from kvd.harness.daemons import two_daemons
from kvd.types import ID_BYTES, Tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from kvd.bench.report import Measured, Told
    from kvd.harness.daemons import Pair

PAGE_TOKENS: Final = 16
TOKEN_BYTES: Final = 8192
SETTINGS: Final = {
    "pool.layers": "8",
    "pool.heads": "8",
    "pool.head_dim": "64",
    "pool.dtype": "uint8",
    "pool.page_size": str(PAGE_TOKENS),
}
SLACK: Final = 2.0
"""Paced rounds take so many times as long as the slower side needs."""
NOISE: Final = 1.05
"""Two rounds of the same kind differ by so much on a machine that does nothing else."""
ANSWER_S: Final = 60.0
FIRST_PAGE: Final = -1
"""What comes before it."""


class TalkShape(msgspec.Struct, frozen=True):
    """How much is said: so many conversations at once, so many turns each, in so many rounds."""

    conversations: int
    turns: int
    rounds: int
    system_tokens: int = 1000
    user_tokens: int = 400
    output_tokens: int = 24

    @property
    def longest_tokens(self) -> int:
        """A conversation at its end."""
        return self.system_tokens + self.turns * (self.user_tokens + self.output_tokens)


class Conversation:
    """One conversation: what the next prompt is."""

    def __init__(self, system: Tokens, shape: TalkShape, seed: tuple[int, ...]) -> None:
        self._said = system
        self._user_tokens = shape.user_tokens
        self._rng = np.random.default_rng(seed)

    def ask(self) -> Tokens:
        """The prompt of the next turn."""
        self._said = Tokens(self._said + random_tokens(self._rng, self._user_tokens))
        return self._said

    def answered(self, output: Tokens) -> None:
        """What the engine said to it."""
        self._said = Tokens(self._said + output)


class SeenPages:
    """What a node has the KV of, in whole pages. Invariant: with a page its predecessors."""

    def __init__(self, page_tokens: int) -> None:
        self._page_bytes = page_tokens * ID_BYTES
        self._pages: dict[tuple[int, bytes], int] = {}
        """Each by the page before it and its tokens, no digest that could collide."""

    def add(self, tokens: Tokens) -> None:
        """The node has the KV of these now."""
        before = FIRST_PAGE
        for page in self._cut(tokens):
            before = self._pages.setdefault((before, page), len(self._pages))

    def unseen_pages(self, tokens: Tokens) -> int:
        """Pages of a prompt, the last partial one included, that it has to be sent."""
        n_known, before = 0, FIRST_PAGE
        for page in self._cut(tokens):
            following = self._pages.get((before, page))
            if following is None:
                break
            n_known, before = n_known + 1, following
        return -(-len(tokens) // self._page_bytes) - n_known

    def _cut(self, tokens: Tokens) -> Iterator[bytes]:
        size = self._page_bytes
        return (tokens[end - size : end] for end in range(size, len(tokens) + 1, size))


def random_tokens(rng: np.random.Generator, n_tokens: int) -> Tokens:
    """Tokens that nobody said before."""
    return Tokens(rng.integers(0, VOCABULARY, n_tokens, dtype=np.int32).astype("<i4").tobytes())


class ServedTurn(msgspec.Struct, frozen=True):
    """One request that was served; times in seconds."""

    prompt: bytes
    output: bytes
    sent_bytes: int
    first_token_s: float
    gaps_s: tuple[float, ...]


class TalkingEngine:
    """One engine, as the router has it: requests in, answers out in any order."""

    def __init__(self, role: str, process: asyncio.subprocess.Process) -> None:
        self._role = role
        self._process = process
        self._answers: dict[int, asyncio.Future[TurnServed]] = {}
        self.ready = self._answer_of(0)
        self._listening = asyncio.create_task(self._listen())

    def ask(self, request: ServeTurn) -> asyncio.Future[TurnServed]:
        """Hand over its half of a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        return self._answer_of(request.room)

    async def stop(self) -> None:
        """It ends with its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._listening

    def _answer_of(self, room: int) -> asyncio.Future[TurnServed]:
        answer: asyncio.Future[TurnServed] = asyncio.get_running_loop().create_future()
        self._answers[room] = answer
        return answer

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            served = msgspec.json.decode(line, type=TurnServed)
            answer = self._answers.pop(served.room)
            if served.why:
                answer.set_exception(ChildFailed(f"{self._role}: {served.why}"))
            else:
                answer.set_result(served)
        for answer in self._answers.values():
            answer.set_exception(ChildFailed(f"the {self._role} engine has ended"))


@contextlib.asynccontextmanager
async def open_engine(shape: EngineShape, daemon: str) -> AsyncIterator[TalkingEngine]:
    """One engine process, for as long as the block lasts."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.multiturn_engine", daemon),
        msgspec.json.encode(shape).decode(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        limit=LINE_BYTES,
    )
    engine = TalkingEngine(shape.role, process)
    try:
        async with in_time(f"no {shape.role} engine"):
            await engine.ready
        yield engine
    finally:
        await engine.stop()


@contextlib.asynccontextmanager
async def in_time(what: str) -> AsyncIterator[None]:
    """The block must not take longer than anything ever does.

    Raises:
        ChildFailed: it did; ``what`` says what that means.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            yield
    except TimeoutError:
        raise ChildFailed(f"{what} after {ANSWER_S:.0f} s") from None


class Router:
    """Sends both halves of every request to the engines, and takes their answers."""

    def __init__(self, prefill: TalkingEngine, decode: TalkingEngine) -> None:
        self._prefill = prefill
        self._decode = decode
        self._last_room = 0

    async def serve(
        self, prompt: Tokens, *, output_tokens: int, is_cached: bool, namespace: str
    ) -> ServedTurn:
        """One turn, from its submission to its end on both nodes.

        Raises:
            ChildFailed: an engine gave up or did not answer.
        """
        self._last_room += 1
        request = ServeTurn(
            room=self._last_room,
            namespace=namespace,
            is_cached=is_cached,
            tokens=prompt,
            output_tokens=output_tokens,
        )
        began_s = time.monotonic()
        halves = [engine.ask(request) for engine in (self._decode, self._prefill)]
        async with in_time(f"no answer of room {request.room}"):
            decoded, prefilled = await asyncio.gather(*halves)
        times_s = decoded.token_times_s
        return ServedTurn(
            prompt=prompt,
            output=decoded.output,
            sent_bytes=prefilled.sent_bytes,
            first_token_s=times_s[0] - began_s,
            gaps_s=tuple(np.diff(times_s).tolist()),
        )


class RoundPlan(msgspec.Struct, frozen=True):
    """One round that is to be played; ``namespace`` and prompts are of its ``number``.

    ``pace_s``: from one turn of a conversation to its next; 0: as soon as it is answered.
    """

    is_cached: bool
    number: int
    pace_s: float

    @property
    def cache(self) -> str:
        """``on`` or ``off``, as the table says it."""
        return "on" if self.is_cached else "off"


class PlayedRound(msgspec.Struct, frozen=True):
    """All turns of all conversations, once, in the order in which they ended."""

    plan: RoundPlan
    seconds: float
    turns: list[ServedTurn]

    @property
    def sent_bytes(self) -> int:
        """Sent to the decode node, of all turns."""
        return sum(turn.sent_bytes for turn in self.turns)

    @property
    def bound_bytes(self) -> int:
        """What had to be sent: the pages that the decode node had not seen."""
        seen = SeenPages(PAGE_TOKENS)
        pages = 0
        for turn in self.turns:
            pages += seen.unseen_pages(Tokens(turn.prompt))
            if self.plan.is_cached:
                seen.add(Tokens((turn.prompt + turn.output)[:-ID_BYTES]))
        return pages * PAGE_TOKENS * TOKEN_BYTES


async def play(router: Router, shape: TalkShape, plan: RoundPlan) -> PlayedRound:
    """One round.

    The first turn of the first conversation goes alone, so that the system prompt is cached, or
    not, before anybody else brings it.
    """
    namespace = f"{plan.cache}-{plan.number}"
    system = random_tokens(np.random.default_rng((plan.number,)), shape.system_tokens)
    turns: list[ServedTurn] = []

    async def take_turn(conversation: Conversation) -> None:
        turn = await router.serve(
            conversation.ask(),
            output_tokens=shape.output_tokens,
            is_cached=plan.is_cached,
            namespace=namespace,
        )
        conversation.answered(Tokens(turn.output))
        turns.append(turn)

    async def go_on(conversation: Conversation, n_turns: int, due_s: float) -> None:
        for number in range(n_turns):
            await asyncio.sleep(max(0.0, due_s + number * plan.pace_s - time.monotonic()))
            await take_turn(conversation)

    talks = [
        Conversation(system, shape, (plan.number, number)) for number in range(shape.conversations)
    ]
    began_s = time.monotonic()
    await take_turn(talks[0])
    now_s = time.monotonic()
    offset_s = plan.pace_s / shape.conversations
    await asyncio.gather(
        *(
            go_on(talk, shape.turns - (number == 0), now_s + number * offset_s)
            for number, talk in enumerate(talks)
        )
    )
    seconds = time.monotonic() - began_s
    return PlayedRound(plan, seconds, turns)


async def measure(pair: Pair, shape: TalkShape, told: Told) -> list[PlayedRound]:
    """All rounds, on and off in turns, after one of each that warms up and sets the pace."""
    told("engines start")
    async with (
        open_engine(EngineShape(PREFILL), pair.prefill.client) as prefill,
        open_engine(EngineShape(DECODE), pair.decode.client) as decode,
    ):
        router = Router(prefill, decode)
        warm = []
        for is_cached in (True, False):
            told(f"warm-up, cache {'on' if is_cached else 'off'}")
            warm.append(await play(router, shape, RoundPlan(is_cached, 0, 0.0)))
        pace_s = SLACK * max(run.seconds for run in warm) / shape.turns
        played = []
        for plan in plans(shape, pace_s):
            told(f"{'paced' if plan.pace_s else 'at once'}, cache {plan.cache}")
            played.append(await play(router, shape, plan))
        return played


def plans(shape: TalkShape, pace_s: float) -> list[RoundPlan]:
    """The rounds that count: on before off, then off before on, and so forth."""
    kinds = [(is_cached, pace) for pace in (pace_s, 0.0) for is_cached in (True, False)]
    return [
        RoundPlan(is_cached, 2 * number + bool(pace), pace)
        for number in range(1, shape.rounds + 1)
        for is_cached, pace in kinds[:: 1 if number % 2 else -1]
    ]


def row_of(played: list[PlayedRound]) -> Measured:
    """What was measured with the decode side's cache on or off, over all rounds."""
    paced = [turn for run in played if run.plan.pace_s for turn in run.turns]
    at_once = [run for run in played if not run.plan.pace_s]
    firsts = np.percentile([turn.first_token_s for turn in paced], [50, 99]) * 1e3
    gaps = np.percentile([gap for turn in paced for gap in turn.gaps_s], [50, 99]) * 1e3
    sent_bytes = sum(run.sent_bytes for run in played)
    bound_bytes = sum(run.bound_bytes for run in played)
    return {
        "cache": played[0].plan.cache,
        "requests": sum(len(run.turns) for run in played),
        "sent_bytes": sent_bytes,
        "bound_bytes": bound_bytes,
        "sent_mib": sent_bytes / 2**20,
        "bound_mib": bound_bytes / 2**20,
        "first_token_p50_ms": float(firsts[0]),
        "first_token_p99_ms": float(firsts[1]),
        "gap_p50_ms": float(gaps[0]),
        "gap_p99_ms": float(gaps[1]),
        "requests_per_s": sum(len(run.turns) for run in at_once)
        / sum(run.seconds for run in at_once),
    }


def measure_talks(shape: TalkShape, told: Told) -> BenchmarkResult:
    """Start everything, measure, stop everything.

    Raises:
        ChildFailed, DaemonFailed: something did not do what it should.
    """
    # Two rounds fit: what is evicted is always of a round that is over.
    pages = 2 * shape.conversations * (shape.longest_tokens // PAGE_TOKENS + 2) + 1
    settings = {**SETTINGS, "pool.pages": str(pages)}
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as directory,
        two_daemons(Path(directory), settings) as pair,
    ):
        played = uvloop.run(measure(pair, shape, told))
    rows = [row_of([run for run in played if run.plan.is_cached is on]) for on in (True, False)]
    apart = [abs(figure(row, "sent_bytes") - figure(row, "bound_bytes")) for row in rows]
    on, off = rows
    return BenchmarkResult(
        tables=(
            ResultTable(
                title=f"{shape.conversations} conversations at once, {shape.turns} turns, "
                f"{shape.longest_tokens} tokens at their end, {TOKEN_BYTES} bytes of KV per token",
                columns=COLUMNS,
                rows=tuple(rows),
            ),
        ),
        goals=(
            at_most("cache on: bytes sent above or below the bound", 0, apart[0]),
            at_most("cache off: bytes sent above or below the bound", 0, apart[1]),
            *(
                at_most(
                    f"between tokens {name}, on / off",
                    NOISE,
                    figure(on, f"gap_{name}_ms") / figure(off, f"gap_{name}_ms"),
                )
                for name in ("p50", "p99")
            ),
        ),
        notes=(
            "bound: pages of the prompts that the decode node had not seen, from the token lists",
            "requests/s: every conversation asks again at once; the latencies are of paced rounds",
            "first token: from the router to the decode engine with the KV there and checked",
            "between tokens: the engine computes 2 ms a step; the rest is what it waited for",
        ),
    )


def run(told: Told, *, conversations: int, turns: int, rounds: int) -> BenchmarkResult:
    """Conversations through two daemons, with the decode side's radix cache on and off."""
    return measure_talks(TalkShape(conversations, turns, rounds), told)


COLUMNS: Final = (
    ResultColumn("cache", "decode cache"),
    ResultColumn("requests", "requests"),
    ResultColumn("sent_mib", "sent MiB", ".1f"),
    ResultColumn("bound_mib", "bound MiB", ".1f"),
    ResultColumn("first_token_p50_ms", "first token p50 ms", ".1f"),
    ResultColumn("first_token_p99_ms", "p99", ".1f"),
    ResultColumn("gap_p50_ms", "between tokens p50 ms", ".2f"),
    ResultColumn("gap_p99_ms", "p99", ".2f"),
    ResultColumn("requests_per_s", "requests/s", ".1f"),
)

command = benchmark(
    "multiturn",
    run,
    click.option("--conversations", default=8, show_default=True, help="How many at once."),
    click.option("--turns", default=5, show_default=True, help="Of each conversation."),
    click.option("--rounds", default=5, show_default=True, help="With the cache on, and off."),
)
