"""``benchmarks multiturn``: conversations with the decode node's radix cache on and off.

Two real daemons with NIXL between them, a prefill engine and a decode engine in processes of their
own, and here the router that sends them every turn of several conversations at once. On and off
take turns, round after round; off is ``receive(..., cache=False)``, so that nothing is ever found
on the decode side. Prompts, computation and the prefill side's cache are the same in both.

Requests per second come from rounds in which a conversation asks again as soon as it is answered.
There the faster side has more sequences running and more prompts computed at any moment, so its
latencies say nothing: they come from paced rounds, where both are asked the same at the same times,
half as often as the slower one could answer.

Time to first token runs from here, when the router sends a turn out, to the decode engine, when the
prompt's KV has arrived and was checked. Time between tokens is that of each running sequence.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
import numpy as np
import uvloop
import zmq

from benchmarks.multiturn_load import Conversation, Seen, Shape, random_tokens
from benchmarks.multiturn_router import Cache, EngineFailed, Router, Turn, engines
from kvd.bench.report import (
    Goal,
    at_most,
    bar,
    show_goals,
    show_notes,
    show_table,
    write_json,
)
from kvd.harness.daemons import DaemonFailed, two_daemons
from kvd.sockets import open_router
from kvd.types import Tokens

if TYPE_CHECKING:
    from kvd.bench.report import Told
    from kvd.harness.daemons import Pair

PAGE_TOKENS = 16
TOKEN_BYTES = 8192
SETTINGS = {
    "pool.layers": "8",
    "pool.heads": "8",
    "pool.head_dim": "64",
    "pool.dtype": "uint8",
    "pool.page_size": str(PAGE_TOKENS),
}
MIB = 2**20
SLACK = 2.0
"""Paced rounds take so many times as long as the slower side needs."""
NOISE = 1.05
"""Two rounds of the same kind differ by so much on a machine that does nothing else."""


class Round(msgspec.Struct, frozen=True):
    """All turns of all conversations, once.

    ``pace_s``: from one turn of a conversation to its next; 0: as soon as it is answered.
    ``bound_bytes``: what had to be sent.
    """

    cache: Cache
    pace_s: float
    seconds: float
    sent_bytes: int
    bound_bytes: int


class CacheResult(msgspec.Struct, frozen=True):
    """What was measured with the decode side's cache on or off, over all rounds."""

    cache: Cache
    requests: int
    sent_bytes: int
    bound_bytes: int
    first_token_p50_ms: float
    first_token_p99_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    requests_per_s: float


class MultiturnResult(msgspec.Struct, frozen=True):
    """What ``benchmarks multiturn`` reports."""

    shape: Shape
    on: CacheResult
    off: CacheResult
    rounds: tuple[Round, ...]
    goals: tuple[Goal, ...]


class Plan(msgspec.Struct, frozen=True):
    """One round that is to be played; ``namespace`` and prompts are of its ``number``."""

    cache: Cache
    number: int
    pace_s: float

    @property
    def name(self) -> str:
        """For people."""
        return f"{'paced' if self.pace_s else 'at once'}, cache {self.cache.value}"


async def play(router: Router, shape: Shape, plan: Plan) -> tuple[list[Turn], Round]:
    """One round: every turn in the order in which they ended, and what came of it.

    The first turn of the first conversation goes alone, so that the system prompt is cached, or
    not, before anybody else brings it.
    """
    namespace = f"{plan.cache.value}-{plan.number}"
    system = random_tokens(np.random.default_rng((plan.number,)), shape.system_tokens)
    turns: list[Turn] = []

    async def take_turn(conversation: Conversation) -> None:
        turn = await router.serve(
            conversation.ask(),
            output_tokens=shape.output_tokens,
            cache=plan.cache,
            namespace=namespace,
        )
        conversation.answered(Tokens(turn.output))
        turns.append(turn)

    async def go_on(conversation: Conversation, n_turns: int, due_s: float) -> None:
        for number in range(n_turns):
            await asyncio.sleep(max(0.0, due_s + number * plan.pace_s - time.monotonic()))
            await take_turn(conversation)

    talks = [Conversation(system, shape, (plan.number, one)) for one in range(shape.conversations)]
    began_s = time.monotonic()
    await take_turn(talks[0])
    now_s = time.monotonic()
    offset_s = plan.pace_s / shape.conversations
    await asyncio.gather(
        *(
            go_on(talk, shape.turns - (one == 0), now_s + one * offset_s)
            for one, talk in enumerate(talks)
        )
    )
    seconds = time.monotonic() - began_s
    sent = sum(turn.sent_bytes for turn in turns)
    return turns, Round(plan.cache, plan.pace_s, seconds, sent, bound_bytes(turns, plan.cache))


def bound_bytes(turns: list[Turn], cache: Cache) -> int:
    """What had to be sent for these turns: the pages that the decode node had not seen."""
    seen = Seen(PAGE_TOKENS)
    pages = 0
    for turn in turns:
        pages += seen.unseen_pages(Tokens(turn.prompt))
        if cache is Cache.ON:
            seen.add(Tokens((turn.prompt + turn.output)[:-4]))
    return pages * PAGE_TOKENS * TOKEN_BYTES


async def measure(pair: Pair, endpoint: str, shape: Shape, told: Told) -> MultiturnResult:
    """All rounds, on and off in turns, after one of each that warms up and sets the pace."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = open_router(context)
    socket.bind(endpoint)
    router = Router(socket)
    played: list[tuple[list[Turn], Round]] = []
    told("engines start")
    try:
        await router.wait_ready()
        warm = []
        for cache in Cache:
            told(f"warm-up, cache {cache.value}")
            warm.append(await play(router, shape, Plan(cache, 0, 0.0)))
        pace_s = SLACK * max(one.seconds for _, one in warm) / shape.turns
        for plan in plans(shape, pace_s):
            told(plan.name)
            played.append(await play(router, shape, plan))
    finally:
        router.close()
        context.term()
    on, off = (_summary([one for one in played if one[1].cache is cache]) for cache in Cache)
    rounds = tuple(one for _, one in played)
    return MultiturnResult(shape, on, off, rounds, goals_of(on, off))


def plans(shape: Shape, pace_s: float) -> list[Plan]:
    """The rounds that count: on before off, then off before on, and so forth."""
    kinds = [(cache, pace) for pace in (pace_s, 0.0) for cache in Cache]
    return [
        Plan(cache, 2 * number + bool(pace), pace)
        for number in range(1, shape.rounds + 1)
        for cache, pace in kinds[:: 1 if number % 2 else -1]
    ]


def _summary(played: list[tuple[list[Turn], Round]]) -> CacheResult:
    paced = [turn for turns, one in played if one.pace_s for turn in turns]
    at_once = [(len(turns), one.seconds) for turns, one in played if not one.pace_s]
    firsts = np.percentile([turn.first_token_s for turn in paced], [50, 99]) * 1e3
    gaps = np.percentile([gap for turn in paced for gap in turn.gaps_s], [50, 99]) * 1e3
    return CacheResult(
        cache=played[0][1].cache,
        requests=sum(len(turns) for turns, _ in played),
        sent_bytes=sum(one.sent_bytes for _, one in played),
        bound_bytes=sum(one.bound_bytes for _, one in played),
        first_token_p50_ms=float(firsts[0]),
        first_token_p99_ms=float(firsts[1]),
        gap_p50_ms=float(gaps[0]),
        gap_p99_ms=float(gaps[1]),
        requests_per_s=sum(n for n, _ in at_once) / sum(seconds for _, seconds in at_once),
    )


def goals_of(on: CacheResult, off: CacheResult) -> tuple[Goal, ...]:
    """What was to be reached."""
    return (
        *(
            at_most(
                f"cache {one.cache.value}: bytes sent above or below the bound",
                0,
                abs(one.sent_bytes - one.bound_bytes),
            )
            for one in (on, off)
        ),
        at_most("between tokens p50, on / off", NOISE, on.gap_p50_ms / off.gap_p50_ms),
        at_most("between tokens p99, on / off", NOISE, on.gap_p99_ms / off.gap_p99_ms),
    )


def run(shape: Shape, told: Told) -> MultiturnResult:
    """Start everything, measure, stop everything.

    Raises:
        EngineFailed, DaemonFailed: something did not do what it should.
    """
    # Two rounds fit: what is evicted is always of a round that is over.
    pages = 2 * shape.conversations * (shape.longest_tokens // PAGE_TOKENS + 2) + 1
    settings = {**SETTINGS, "pool.pages": str(pages)}
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as directory:
        endpoint = f"ipc://{directory}/router.sock"
        with two_daemons(Path(directory), settings) as pair, engines(pair, endpoint):
            return uvloop.run(measure(pair, endpoint, shape, told))


@click.command("multiturn")
@click.option("--conversations", default=8, show_default=True, help="How many at once.")
@click.option("--turns", default=5, show_default=True, help="Of each conversation.")
@click.option("--rounds", default=5, show_default=True, help="With the cache on, and with it off.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Result.")
def command(conversations: int, turns: int, rounds: int, file: Path | None) -> None:
    """Conversations through two daemons, with the decode side's radix cache on and off."""
    shape = Shape(conversations, turns, rounds)
    try:
        with bar("multiturn", 4 * rounds + 3) as told:
            result = run(shape, told)
    except (EngineFailed, DaemonFailed) as failed:
        raise click.ClickException(str(failed)) from failed
    _show(result)
    if file is not None:
        write_json(file, result)


def _show(result: MultiturnResult) -> None:
    shape = result.shape
    show_table(
        f"{shape.conversations} conversations at once, {shape.turns} turns, "
        f"{shape.longest_tokens} tokens at their end, {TOKEN_BYTES} bytes of KV per token",
        (
            "decode cache",
            "requests",
            "sent MiB",
            "bound MiB",
            "first token p50 ms",
            "p99",
            "between tokens p50 ms",
            "p99",
            "requests/s",
        ),
        [_row(one) for one in (result.on, result.off)],
    )
    show_notes(
        [
            "bound: pages of the prompts that the decode node had not seen, from the token lists",
            "requests/s: every conversation asks again at once; the latencies are of paced rounds",
            "first token: from the router to the decode engine with the KV there and checked",
            "between tokens: the engine computes 2 ms a step; the rest is what it waited for",
        ]
    )
    show_goals(result.goals)


def _row(one: CacheResult) -> list[str]:
    return [
        one.cache.value,
        str(one.requests),
        f"{one.sent_bytes / MIB:.1f}",
        f"{one.bound_bytes / MIB:.1f}",
        f"{one.first_token_p50_ms:.1f}",
        f"{one.first_token_p99_ms:.1f}",
        f"{one.gap_p50_ms:.2f}",
        f"{one.gap_p99_ms:.2f}",
        f"{one.requests_per_s:.1f}",
    ]
