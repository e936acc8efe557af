"""``kvd bench control``: round trips of the verbs beside a bare ZMQ echo with the same frames.

Each figure and its reference are measured in turns within one run, because the machine's speed
drifts. The client is ``kvd.client`` as an engine uses it. The echo has no codec and no API: both of
its ends are driven from their descriptors, like kvd's own sockets, and its server, a process of its
own (``python -m kvd.bench.control ENDPOINT``), answers each message with as many bytes as the first
frame says.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
import numpy as np
import uvloop
import zmq

import kvd.client
from kvd.bench.report import (
    BenchmarkResult,
    Goal,
    ResultColumn,
    ResultTable,
    at_least,
    at_most,
    measurement,
)
from kvd.harness.daemons import Pair, two_daemons
from kvd.sockets import LoopSocket, open_dealer, open_router

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.bench.report import Measured, Told
    from kvd.client.api import Node


# ---- the echo ------------------------------------------------------------------------------------


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
    process = subprocess.Popen([sys.executable, "-m", "kvd.bench.control", endpoint])
    try:
        yield endpoint
    finally:
        process.terminate()
        process.wait()


# ---- calls in turns ------------------------------------------------------------------------------

ROUNDS = 5
PAGE_SIZE = 16
CYCLE_TOKENS = 13_000
MATCH_TOKENS = (2_048, 32_768)
IN_FLIGHT = (1, 16, 64)
HEADER_BYTES = 16
SETTINGS = {
    "pool.layers": "1",
    "pool.heads": "1",
    "pool.head_dim": "1",
    "pool.dtype": "uint8",
    "pool.page_size": str(PAGE_SIZE),
    "pool.pages": "131073",
    "peers.heartbeat_s": "0.5",
}
"""A pool of 2 M tokens with one byte of KV per token: the control plane is what is measured."""

Call = Callable[[int], Awaitable[None]]


class CallTimes:
    """Latencies and throughput of one kind of call."""

    def __init__(self) -> None:
        self.latencies_s: list[float] = []
        self.rates: list[float] = []

    async def run(self, call: Call, calls: int, in_flight: int) -> None:
        """``calls`` calls, ``in_flight`` at a time."""
        numbers = iter(range(calls))

        async def one_after_the_other() -> None:
            for number in numbers:
                began_s = time.perf_counter()
                await call(number)
                self.latencies_s.append(time.perf_counter() - began_s)

        began_s = time.perf_counter()
        await asyncio.gather(*(one_after_the_other() for _ in range(in_flight)))
        self.rates.append(calls / (time.perf_counter() - began_s))

    def quantile_us(self, q: float) -> float:
        """A quantile over all rounds."""
        return float(np.percentile(self.latencies_s, q)) * 1e6

    @property
    def per_s(self) -> float:
        """The median rate of the rounds."""
        return float(np.median(self.rates))


class CallTimesPair(NamedTuple):
    """Of a call and its reference, which took turns."""

    ours: CallTimes
    reference: CallTimes

    @property
    def p50_ratio(self) -> float:
        """Ours over the reference."""
        return self.ours.quantile_us(50) / self.reference.quantile_us(50)

    def row(self, what: str, in_flight: int) -> Measured:
        """A line of the table; ``ratio``: of the p50s, unless the caller says otherwise."""
        return {
            "what": what,
            "in_flight": in_flight,
            "p50_us": round(self.ours.quantile_us(50), 1),
            "p99_us": round(self.ours.quantile_us(99), 1),
            "per_s": round(self.ours.per_s),
            "echo_p50_us": round(self.reference.quantile_us(50), 1),
            "echo_per_s": round(self.reference.per_s),
            "ratio": round(self.p50_ratio, 2),
        }


class ControlFigure(NamedTuple):
    """A line of the table, and its goals."""

    row: Measured
    goals: tuple[Goal, ...]


async def in_turns(ours: Call, reference: Call, *, calls: int, in_flight: int) -> CallTimesPair:
    """Measure both, one round after the other, after a warm-up of each."""
    pair = CallTimesPair(CallTimes(), CallTimes())
    for call in (ours, reference):
        await CallTimes().run(call, max(in_flight, calls // 10), in_flight)
    for _ in range(ROUNDS):
        await pair.ours.run(ours, calls, in_flight)
        await pair.reference.run(reference, calls, in_flight)
    return pair


def prompts(count: int, n_tokens: int, seed: int) -> list[np.ndarray]:
    """Random prompts, no two alike."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 128_256, n_tokens, dtype=np.int32) for _ in range(count)]


# ---- what is called ------------------------------------------------------------------------------


async def match_figure(node: Node, echo: EchoClient, n_tokens: int) -> ControlFigure:
    """``match`` of a cached prompt, one at a time."""
    prompt = prompts(1, n_tokens, seed=n_tokens)[0]
    lease = await node.lease(prompt)
    await lease.release(())
    frame = prompt.tobytes()

    async def match(_: int) -> None:
        await node.match(prompt)

    async def bare(_: int) -> None:
        await echo.call(0, frame)

    pair = await in_turns(match, bare, calls=400, in_flight=1)
    what = f"match, {n_tokens} tokens"
    goal = at_most(f"{what}: p50 / echo", 1.5, pair.p50_ratio)
    return ControlFigure(pair.row(what, 1), (goal,))


async def cycle_figure(node: Node, echo: EchoClient, in_flight: int) -> ControlFigure:
    """``lease`` + ``release(tokens)`` of fresh 13k-token prompts, evicting as the pool is full."""
    fresh = prompts(256, CYCLE_TOKENS, seed=in_flight)
    frames = [prompt.tobytes() for prompt in fresh]
    pages_bytes = 4 * (CYCLE_TOKENS // PAGE_SIZE + 1)

    async def cycle(number: int) -> None:
        lease = await node.lease(fresh[number % len(fresh)])
        await lease.release(())

    async def bare(number: int) -> None:
        await echo.call(pages_bytes, frames[number % 256])
        await echo.call(0, b"")

    pair = await in_turns(cycle, bare, calls=600, in_flight=in_flight)
    what = f"lease + release, {CYCLE_TOKENS} tokens"
    ratio = pair.ours.per_s / pair.reference.per_s
    goals: tuple[Goal, ...] = ()
    if in_flight == max(IN_FLIGHT):
        goals = (at_least(f"{what}, {in_flight} in flight: per s / echo", 0.5, ratio),)
    # A cycle takes two calls, of either: what can be compared is how many are done.
    return ControlFigure({**pair.row(what, in_flight), "ratio": round(ratio, 2)}, goals)


@contextlib.asynccontextmanager
async def full_hits(prefill: Node, decode: Node, in_flight: int) -> AsyncIterator[Call]:
    """Whole handoffs of a prompt that the decode side has: zero pages, the aux delivered."""
    prompt = handed_over()
    for node in (prefill, decode):
        lease = await node.lease(prompt)
        await lease.release(())
    source = await prefill.lease(prompt)
    rooms = iter(range(1 + in_flight * 1_000_000, 2**62))

    async def handoff(_: int) -> None:
        room = next(rooms)
        receiving = asyncio.ensure_future(decode.receive(room, prompt, source="p"))
        sending = await prefill.send(room, prompt, lease=source)
        finishing = asyncio.ensure_future(sending.finish(aux=b"first"))
        received = await receiving
        await received.done()
        await finishing
        await received.lease.release()

    yield handoff
    await source.release()


def handed_over() -> np.ndarray:
    """The prompt of every full-hit handoff."""
    return prompts(1, 4096, seed=4096)[0]


async def full_hit_figure(
    prefill: Node, decode: Node, echo: EchoClient, in_flight: int
) -> ControlFigure:
    """Full-hit handoffs, beside one echo with the prompt in it."""
    frame = handed_over().tobytes()

    async def bare(_: int) -> None:
        await echo.call(0, frame)

    async with full_hits(prefill, decode, in_flight) as handoff:
        pair = await in_turns(handoff, bare, calls=200, in_flight=in_flight)
    what = "full-hit handoff, 4096 tokens"
    goal = at_most(f"{what}: p50 in us", 1500, pair.ours.quantile_us(50))
    return ControlFigure(pair.row(what, in_flight), (goal,) if in_flight == 1 else ())


@contextlib.asynccontextmanager
async def sessions(pair: Pair) -> AsyncIterator[tuple[Node, Node]]:
    """A session with each daemon, for as long as the block lasts."""
    async with (
        kvd.client.connect(pair.prefill.client, name="bench-prefill") as prefill,
        kvd.client.connect(pair.decode.client, name="bench-decode") as decode,
    ):
        yield prefill, decode


async def measure(pair: Pair, endpoint: str, told: Told) -> list[ControlFigure]:
    """Every figure, in order."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    echo = EchoClient(context, endpoint)
    figures = []
    async with sessions(pair) as (prefill, decode):
        for n_tokens in MATCH_TOKENS:
            told(f"match, {n_tokens} tokens")
            figures.append(await match_figure(prefill, echo, n_tokens))
        for in_flight in IN_FLIGHT:
            told(f"lease + release, {in_flight} in flight")
            figures.append(await cycle_figure(prefill, echo, in_flight))
        for in_flight in IN_FLIGHT:
            told(f"full-hit handoff, {in_flight} in flight")
            figures.append(await full_hit_figure(prefill, decode, echo, in_flight))
    echo.close()
    context.term()
    return figures


async def measure_keys(keyed: Pair, bare: Pair, told: Told) -> list[Measured]:
    """What encryption and proven names cost a handoff, in turns with one that has neither."""
    costs: list[Measured] = []
    async with sessions(keyed) as with_keys, sessions(bare) as without:
        for in_flight in IN_FLIGHT:
            told(f"full-hit handoff with keys, {in_flight} in flight")
            rooms_of = in_flight + max(IN_FLIGHT)  # others than those of the figures
            async with (
                full_hits(*with_keys, rooms_of) as mine,
                full_hits(*without, rooms_of) as theirs,
            ):
                pair = await in_turns(mine, theirs, calls=200, in_flight=in_flight)
            costs.append(
                {
                    "in_flight": in_flight,
                    "keys_p50_us": round(pair.ours.quantile_us(50), 1),
                    "keys_per_s": round(pair.ours.per_s),
                    "bare_p50_us": round(pair.reference.quantile_us(50), 1),
                    "bare_per_s": round(pair.reference.per_s),
                    "ratio": round(pair.p50_ratio, 3),
                }
            )
    return costs


def run(told: Told, *, keys: bool) -> tuple[BenchmarkResult, object]:
    """Round trips of match, lease cycles and full-hit handoffs, beside a bare ZMQ echo."""
    costs: list[Measured] = []
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as name,
        two_daemons(Path(name), SETTINGS) as pair,
    ):
        with echo_server(Path(name)) as endpoint:
            figures = uvloop.run(measure(pair, endpoint, told))
        if keys:
            locked = Path(name) / "keys"
            locked.mkdir()
            with two_daemons(locked, SETTINGS, with_keys=True) as keyed:
                costs = uvloop.run(measure_keys(keyed, pair, told))
    goals = tuple(goal for one in figures for goal in one.goals)
    shown = BenchmarkResult(
        tables=(
            ResultTable(
                "Round trips of the control plane", COLUMNS, tuple(one.row for one in figures)
            ),
            ResultTable(
                "Full-hit handoffs between daemons with CURVE keys", KEY_COLUMNS, tuple(costs)
            ),
        ),
        notes=(
            "echo: bare ZMQ from its descriptor, frames of the same sizes; in turns with kvd, "
            f"{ROUNDS} rounds. A lease cycle is two calls of kvd and two of the echo",
            "ratio: kvd / echo, of the p50s; of lease cycles of the rates",
        ),
        goals=goals,
    )
    rows = [{**one.row, "goals": one.goals} for one in figures]
    return shown, {"figures": rows, "goals": goals, "keys": costs}


COLUMNS = (
    ResultColumn("what", "what"),
    ResultColumn("in_flight", "in flight"),
    ResultColumn("p50_us", "p50 us", ".0f"),
    ResultColumn("p99_us", "p99", ".0f"),
    ResultColumn("per_s", "per s"),
    ResultColumn("echo_p50_us", "echo p50", ".0f"),
    ResultColumn("echo_per_s", "echo per s"),
    ResultColumn("ratio", "ratio", ".2f"),
)
KEY_COLUMNS = (
    ResultColumn("in_flight", "in flight"),
    ResultColumn("keys_p50_us", "with keys p50 us", ".0f"),
    ResultColumn("keys_per_s", "per s"),
    ResultColumn("bare_p50_us", "without p50", ".0f"),
    ResultColumn("bare_per_s", "per s"),
    ResultColumn("ratio", "ratio", ".3f"),
)

command = measurement(
    "control",
    run,
    (click.option("--keys", is_flag=True, help="Measure too what CURVE keys cost a handoff."),),
    steps=lambda keys: len(MATCH_TOKENS) + (3 if keys else 2) * len(IN_FLIGHT),
)

if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
