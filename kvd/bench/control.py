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
from typing import TYPE_CHECKING

import click
import msgspec
import numpy as np
import uvloop
import zmq

import kvd.client
from kvd.bench.report import (
    Goal,
    at_least,
    at_most,
    bar,
    show_goals,
    show_notes,
    show_table,
    write_json,
)
from kvd.harness.daemons import Pair, two_daemons
from kvd.sockets import LoopSocket, open_dealer, open_router

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.bench.report import Told
    from kvd.client.api import Node


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
    process = subprocess.Popen([sys.executable, "-m", "kvd.bench.control", endpoint])
    try:
        yield endpoint
    finally:
        process.terminate()
        process.wait()


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


class ControlFigure(msgspec.Struct, frozen=True):
    """One row: kvd beside the echo, microseconds and calls a second.

    ``ratio``: of the p50s, kvd over echo; of lease cycles, which take two calls, of the rates.
    """

    what: str
    in_flight: int
    p50_us: float
    p99_us: float
    per_s: float
    echo_p50_us: float
    echo_per_s: float
    ratio: float
    goals: tuple[Goal, ...]


class KeyCost(msgspec.Struct, frozen=True):
    """A full-hit handoff between daemons with CURVE keys, beside one between daemons without.

    ``ratio``: of the p50s, with keys over without.
    """

    in_flight: int
    keys_p50_us: float
    keys_per_s: float
    bare_p50_us: float
    bare_per_s: float
    ratio: float


class ControlResult(msgspec.Struct, frozen=True):
    """What ``kvd bench control`` reports; ``keys`` only with ``--keys``."""

    figures: tuple[ControlFigure, ...]
    goals: tuple[Goal, ...]
    keys: tuple[KeyCost, ...] = ()


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


async def in_turns(
    ours: Call, echo: Call, *, calls: int, in_flight: int
) -> tuple[CallTimes, CallTimes]:
    """Measure both, one round after the other, after a warm-up of each."""
    mine, reference = CallTimes(), CallTimes()
    for sample, call in ((CallTimes(), ours), (CallTimes(), echo)):
        await sample.run(call, max(in_flight, calls // 10), in_flight)
    for _ in range(ROUNDS):
        await mine.run(ours, calls, in_flight)
        await reference.run(echo, calls, in_flight)
    return mine, reference


def prompts(count: int, n_tokens: int, seed: int) -> list[np.ndarray]:
    """Random prompts, no two alike."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 128_256, n_tokens, dtype=np.int32) for _ in range(count)]


async def match_figure(node: Node, echo: EchoClient, n_tokens: int) -> ControlFigure:
    """``match`` of a cached prompt, one at a time."""
    prompt = prompts(1, n_tokens, seed=n_tokens)[0]
    lease = await node.lease(prompt)
    await lease.release(())
    frame = prompt.tobytes()

    async def match(_: int) -> None:
        await node.match(prompt)

    async def bare(_: int) -> None:
        await echo.call(HEADER_BYTES, bytes(HEADER_BYTES), frame)

    mine, reference = await in_turns(match, bare, calls=400, in_flight=1)
    what = f"match, {n_tokens} tokens"
    ratio = mine.quantile_us(50) / reference.quantile_us(50)
    goals = (at_most(f"{what}: p50 / echo", 1.5, ratio),)
    return _figure(what, 1, (mine, reference), ratio, goals)


async def cycle_figure(node: Node, echo: EchoClient, in_flight: int) -> ControlFigure:
    """``lease`` + ``release(tokens)`` of fresh 13k-token prompts, evicting as the pool is full."""
    fresh = prompts(256, CYCLE_TOKENS, seed=in_flight)
    frames = [prompt.tobytes() for prompt in fresh]
    pages_bytes = 4 * (CYCLE_TOKENS // PAGE_SIZE + 1)

    async def cycle(number: int) -> None:
        lease = await node.lease(fresh[number % len(fresh)])
        await lease.release(())

    async def bare(number: int) -> None:
        await echo.call(HEADER_BYTES + pages_bytes, bytes(HEADER_BYTES), frames[number % 256])
        await echo.call(HEADER_BYTES, bytes(HEADER_BYTES), b"")

    mine, reference = await in_turns(cycle, bare, calls=600, in_flight=in_flight)
    what = f"lease + release, {CYCLE_TOKENS} tokens"
    ratio = mine.per_s / reference.per_s
    goals: tuple[Goal, ...] = ()
    if in_flight == max(IN_FLIGHT):
        goals = (at_least(f"{what}, {in_flight} in flight: per s / echo", 0.5, ratio),)
    return _figure(what, in_flight, (mine, reference), ratio, goals)


@contextlib.asynccontextmanager
async def full_hits(ends: tuple[Node, Node], in_flight: int) -> AsyncIterator[Call]:
    """Whole handoffs of a prompt that the decode side has: zero pages, the aux delivered."""
    prefill, decode = ends
    prompt = handed_over()
    for node in ends:
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
    ends: tuple[Node, Node], echo: EchoClient, in_flight: int
) -> ControlFigure:
    """Full-hit handoffs, beside one echo with the prompt in it."""
    frame = handed_over().tobytes()

    async def bare(_: int) -> None:
        await echo.call(HEADER_BYTES, bytes(HEADER_BYTES), frame)

    async with full_hits(ends, in_flight) as handoff:
        mine, reference = await in_turns(handoff, bare, calls=200, in_flight=in_flight)
    what = "full-hit handoff, 4096 tokens"
    p50_us = mine.quantile_us(50)
    ratio = p50_us / reference.quantile_us(50)
    goals = (at_most(f"{what}: p50 in us", 1500, p50_us),) if in_flight == 1 else ()
    return _figure(what, in_flight, (mine, reference), ratio, goals)


def _figure(
    what: str,
    in_flight: int,
    samples: tuple[CallTimes, CallTimes],
    ratio: float,
    goals: tuple[Goal, ...],
) -> ControlFigure:
    mine, echo = samples
    return ControlFigure(
        what=what,
        in_flight=in_flight,
        p50_us=round(mine.quantile_us(50), 1),
        p99_us=round(mine.quantile_us(99), 1),
        per_s=round(mine.per_s),
        echo_p50_us=round(echo.quantile_us(50), 1),
        echo_per_s=round(echo.per_s),
        ratio=round(ratio, 2),
        goals=goals,
    )


async def measure(pair: Pair, endpoint: str, told: Told) -> ControlResult:
    """Every figure, in order."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    echo = EchoClient(context, endpoint)
    figures = []
    async with (
        kvd.client.connect(pair.prefill.client, name="bench-prefill") as prefill,
        kvd.client.connect(pair.decode.client, name="bench-decode") as decode,
    ):
        for n_tokens in MATCH_TOKENS:
            told(f"match, {n_tokens} tokens")
            figures.append(await match_figure(prefill, echo, n_tokens))
        for in_flight in IN_FLIGHT:
            told(f"lease + release, {in_flight} in flight")
            figures.append(await cycle_figure(prefill, echo, in_flight))
        for in_flight in IN_FLIGHT:
            told(f"full-hit handoff, {in_flight} in flight")
            figures.append(await full_hit_figure((prefill, decode), echo, in_flight))
    echo.close()
    context.term()
    return ControlResult(tuple(figures), tuple(goal for one in figures for goal in one.goals))


async def measure_keys(keyed: Pair, bare: Pair, told: Told) -> tuple[KeyCost, ...]:
    """What encryption and proven names cost a handoff, in turns with one that has neither."""
    costs = []
    async with (
        kvd.client.connect(keyed.prefill.client, name="keys-prefill") as prefill,
        kvd.client.connect(keyed.decode.client, name="keys-decode") as decode,
        kvd.client.connect(bare.prefill.client, name="bare-prefill") as bare_prefill,
        kvd.client.connect(bare.decode.client, name="bare-decode") as bare_decode,
    ):
        for in_flight in IN_FLIGHT:
            told(f"full-hit handoff with keys, {in_flight} in flight")
            async with (
                full_hits((prefill, decode), in_flight + max(IN_FLIGHT)) as mine,
                full_hits((bare_prefill, bare_decode), in_flight + max(IN_FLIGHT)) as theirs,
            ):
                with_keys, without = await in_turns(mine, theirs, calls=200, in_flight=in_flight)
            costs.append(_key_cost(in_flight, with_keys, without))
    return tuple(costs)


def _key_cost(in_flight: int, with_keys: CallTimes, without: CallTimes) -> KeyCost:
    return KeyCost(
        in_flight=in_flight,
        keys_p50_us=round(with_keys.quantile_us(50), 1),
        keys_per_s=round(with_keys.per_s),
        bare_p50_us=round(without.quantile_us(50), 1),
        bare_per_s=round(without.per_s),
        ratio=round(with_keys.quantile_us(50) / without.quantile_us(50), 3),
    )


KEY_HEADERS = ("in flight", "with keys p50 us", "per s", "without p50", "per s", "ratio")


def _show_keys(costs: tuple[KeyCost, ...]) -> None:
    rows = [
        [
            str(one.in_flight),
            f"{one.keys_p50_us:.0f}",
            f"{one.keys_per_s:.0f}",
            f"{one.bare_p50_us:.0f}",
            f"{one.bare_per_s:.0f}",
            f"{one.ratio:.3f}",
        ]
        for one in costs
    ]
    if rows:
        show_table("Full-hit handoffs between daemons with CURVE keys", KEY_HEADERS, rows)


HEADERS = ("what", "in flight", "p50 us", "p99", "per s", "echo p50", "echo per s", "ratio")


def _row(one: ControlFigure) -> list[str]:
    return [
        one.what,
        str(one.in_flight),
        f"{one.p50_us:.0f}",
        f"{one.p99_us:.0f}",
        f"{one.per_s:.0f}",
        f"{one.echo_p50_us:.0f}",
        f"{one.echo_per_s:.0f}",
        f"{one.ratio:.2f}",
    ]


@click.command("control")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Result.")
@click.option("--keys", is_flag=True, help="Measure too what CURVE keys cost a handoff.")
def command(file: Path | None, *, keys: bool) -> None:
    """Round trips of match, lease cycles and full-hit handoffs, beside a bare ZMQ echo."""
    steps = len(MATCH_TOKENS) + (3 if keys else 2) * len(IN_FLIGHT)
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as name,
        bar("control", steps) as told,
        two_daemons(Path(name), SETTINGS) as pair,
    ):
        with echo_server(Path(name)) as endpoint:
            result = uvloop.run(measure(pair, endpoint, told))
        if keys:
            locked = Path(name) / "keys"
            locked.mkdir()
            with two_daemons(locked, SETTINGS, with_keys=True) as keyed:
                costs = uvloop.run(measure_keys(keyed, pair, told))
            result = msgspec.structs.replace(result, keys=costs)
    show_table("Round trips of the control plane", HEADERS, [_row(one) for one in result.figures])
    show_notes(
        [
            "echo: bare ZMQ from its descriptor, frames of the same sizes; in turns with kvd, "
            f"{ROUNDS} rounds. A lease cycle is two calls of kvd and two of the echo",
            "ratio: kvd / echo, of the p50s; of lease cycles of the rates",
        ]
    )
    _show_keys(result.keys)
    show_goals(result.goals)
    if file is not None:
        write_json(file, result)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
