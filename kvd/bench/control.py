"""``kvd bench control``: round trips of the verbs beside a bare ZMQ echo with the same frames.

Everything is measured in small rounds within one run (see ``rounds``): each figure on daemons
without a flight recorder, its reference, and the same on daemons with one. The client is
``kvd.client`` as an engine uses it. Beside the time that passed stands what each process computed:
a busy machine changes that far less.

Messages are counted before the rounds and system calls after them, while nothing is timed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import click
import msgspec
import numpy as np
import uvloop
import zmq

import kvd.client
from kvd.bench.counts import SystemCalls, messages_of
from kvd.bench.echo import BlockingEcho, EchoClient, echo_server
from kvd.bench.report import (
    BenchmarkResult,
    Goal,
    Measured,
    ResultColumn,
    ResultTable,
    at_least,
    at_most,
    figure,
    measurement,
)
from kvd.bench.rounds import CallKind, ComparedCalls, Turn
from kvd.harness.daemons import two_daemons

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from kvd.bench.counts import Span
    from kvd.bench.echo import EchoServer
    from kvd.bench.report import Told
    from kvd.bench.rounds import Call
    from kvd.client.answers import Matched
    from kvd.client.api import Node
    from kvd.client.pending import PendingCall
    from kvd.client.sync import SyncNode
    from kvd.harness.daemons import Pair

PAGE_SIZE: Final = 16
CYCLE_TOKENS: Final = 13_000
MATCH_TOKENS: Final = (2_048, 32_768)
HANDOFF_TOKENS: Final = 4_096
PROMPTS: Final = 256
"""Twice what the pool has room for, nearly: each was evicted before its turn comes again."""

CYCLES: Final = {1: 60, 16: 160, 64: 320}
HANDOFFS: Final = {1: 50, 16: 160, 64: 256}
"""How many in a turn, by how many are in flight."""
MATCHES: Final = 100
BURSTS: Final = 50
BEGUN: Final = 16
"""Calls begun in one step of a scheduler, before it looks for the answer of any."""
WITHIN_S: Final = 10.0

RECORDING_S: Final = 30.0
OURS, ECHO, RECORDED = "kvd", "echo", "recorded"
SETTINGS: Final = {
    "pool.layers": "1",
    "pool.heads": "1",
    "pool.head_dim": "1",
    "pool.dtype": "uint8",
    "pool.page_size": str(PAGE_SIZE),
    "pool.pages": "131073",
    "peers.heartbeat_s": "0.5",
}
"""A pool of 2 M tokens with one byte of KV per token: the control plane is what is measured."""

WITH_RECORDER: Final = {
    **SETTINGS,
    "recorder.enabled": "true",
    "recorder.max_bytes": str(2**30),
}
"""The recorder computes when nobody else does: on a busy machine it falls far behind."""


class ServingPair(NamedTuple):
    """Two daemons with a session each; ``processes`` are all that serve it, the client too."""

    daemons: Pair
    prefill: Node
    decode: Node
    blocking: SyncNode
    """With the prefill daemon."""
    processes: dict[str, int]


@contextlib.asynccontextmanager
async def serving(pair: Pair, *, is_recorded: bool = False) -> AsyncIterator[ServingPair]:
    """A session with each daemon, for as long as the block lasts."""
    processes = {"client": os.getpid()}
    for name, daemon in (("prefill", pair.prefill), ("decode", pair.decode)):
        processes |= {name: daemon.pid, f"{name}_transfer": daemon.transfer_pid()}
        if is_recorded:
            daemon.wait_for(
                lambda daemon=daemon: daemon.snapshot().recorder.inputs > 0,  # type: ignore[misc]
                "records nothing",
                RECORDING_S,
            )
            processes[f"{name}_recorder"] = daemon.recorder_pid()
    async with (
        kvd.client.connect(pair.prefill.client, name="bench-prefill") as prefill,
        kvd.client.connect(pair.decode.client, name="bench-decode") as decode,
    ):
        with kvd.client.connect_sync(pair.prefill.client, name="bench-blocking") as blocking:
            yield ServingPair(
                daemons=pair,
                prefill=prefill,
                decode=decode,
                blocking=blocking,
                processes=processes,
            )


def prompts(count: int, n_tokens: int, seed: int) -> list[np.ndarray]:
    """Random prompts, no two alike."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 128_256, n_tokens, dtype=np.int32) for _ in range(count)]


# ---- what is called ------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def matches(up: ServingPair, prompt: np.ndarray) -> AsyncIterator[Call]:
    """``match`` of a prompt that is cached, and stays so while cycles evict all others."""
    lease = await up.prefill.lease(prompt)

    async def match(_: int) -> None:
        await up.prefill.match(prompt)

    yield match
    await lease.release(())


@contextlib.asynccontextmanager
async def blocking_matches(up: ServingPair, prompt: np.ndarray) -> AsyncIterator[Call]:
    """``matches`` of the blocking client; nothing else goes on meanwhile."""
    lease = up.blocking.lease(prompt)

    async def match(_: int) -> None:
        up.blocking.match(prompt)

    yield match
    lease.release(())


@contextlib.asynccontextmanager
async def cycles(up: ServingPair, fresh: list[np.ndarray]) -> AsyncIterator[Call]:
    """``lease`` + ``release(())`` of fresh prompts, evicting as the pool is full."""
    following = itertools.cycle(fresh)

    async def cycle(_: int) -> None:
        lease = await up.prefill.lease(next(following))
        await lease.release(())

    yield cycle


@contextlib.asynccontextmanager
async def full_hits(up: ServingPair, prompt: np.ndarray, first_room: int) -> AsyncIterator[Call]:
    """Whole handoffs of a prompt that the decode side has: zero pages, the aux delivered.

    In the fewest calls that an engine can do it in, whose prompt is computed when the room opens.
    """
    prefill, decode = up.prefill, up.decode
    for node in (prefill, decode):
        lease = await node.lease(prompt)
        await lease.release(())
    source = await prefill.lease(prompt)
    rooms = itertools.count(first_room)

    async def handoff(_: int) -> None:
        room = next(rooms)
        receiving = asyncio.ensure_future(decode.receive(room, prompt, source="p"))
        handing = asyncio.ensure_future(prefill.hand_over(room, lease=source, aux=b"first"))
        received = await receiving
        await received.done()
        await handing
        await received.lease.release()

    yield handoff
    await source.release()


# ---- what is begun and polled --------------------------------------------------------------------


def pending_row(node: SyncNode, prompt: np.ndarray) -> Measured:
    """Medians, in us, of a match of ``prompt`` that is begun, and polled until it ends.

    Not how long an answer takes: that is measured with the blocking verbs.
    """
    begin_s: list[float] = []
    poll_s: list[float] = []
    pump_s: list[float] = []
    for _ in range(BURSTS):
        calls: list[PendingCall[Matched]] = []
        for _ in range(BEGUN):
            _timed(begin_s, lambda: calls.append(node.begin_match(prompt)))  # noqa: B023 - at once
        end_s = time.monotonic() + WITHIN_S
        while not all(call.is_done for call in calls) and time.monotonic() < end_s:
            for call in calls:
                if not call.is_done:
                    _timed(poll_s, call.poll)
        _timed(pump_s, node.pump)
    return {
        "calls": BEGUN,
        "begin_us": statistics.median(begin_s) * 1e6,
        "poll_us": statistics.median(poll_s) * 1e6,
        "pump_us": statistics.median(pump_s) * 1e6,
    }


def _timed(into: list[float], act: Callable[[], object]) -> None:
    began_s = time.perf_counter()
    act()
    into.append(time.perf_counter() - began_s)


class ComparedVerbs:
    """All figures, as they are compared: on each of ``pairs``, and as an echo."""

    def __init__(
        self,
        stack: contextlib.AsyncExitStack,
        pairs: dict[str, ServingPair],
        echo: EchoClient,
        blocking_echo: BlockingEcho,
        server: EchoServer,
    ) -> None:
        self._stack = stack
        self._pairs = pairs
        self._echo = echo
        self._blocking_echo = blocking_echo
        self._server = {"client": os.getpid(), "server": server.pid}

    async def match(self, n_tokens: int) -> ComparedCalls:
        """Matches of that length beside echoes of as many bytes, one call at a time."""
        (prompt,) = prompts(1, n_tokens, seed=n_tokens)
        frame = prompt.tobytes()

        async def bare(_: int) -> None:
            await self._echo.call(0, frame)

        ours = {name: matches(up, prompt) for name, up in self._pairs.items()}
        return await self._compared(f"match, {n_tokens} tokens", (1, MATCHES), ours, bare)

    async def blocking_match(self, n_tokens: int) -> ComparedCalls:
        """The same from a thread that blocks, beside an echo from one."""
        (prompt,) = prompts(1, n_tokens, seed=n_tokens)
        frame = prompt.tobytes()

        async def bare(_: int) -> None:
            self._blocking_echo.call(0, frame)

        ours = {name: blocking_matches(up, prompt) for name, up in self._pairs.items()}
        what = f"blocking match, {n_tokens} tokens"
        return await self._compared(what, (1, MATCHES), ours, bare)

    async def cycle(self, in_flight: int) -> ComparedCalls:
        """A cycle takes two calls, of either."""
        fresh = prompts(PROMPTS, CYCLE_TOKENS, seed=in_flight)
        frames = itertools.cycle([prompt.tobytes() for prompt in fresh])
        pages_bytes = 4 * (CYCLE_TOKENS // PAGE_SIZE + 1)

        async def bare(_: int) -> None:
            await self._echo.call(pages_bytes, next(frames))
            await self._echo.call(0, b"")

        ours = {name: cycles(up, fresh) for name, up in self._pairs.items()}
        what, size = f"lease + release, {CYCLE_TOKENS} tokens", (in_flight, CYCLES[in_flight])
        return await self._compared(what, size, ours, bare)

    async def handoff(self, in_flight: int) -> ComparedCalls:
        """Beside one echo with the prompt in it."""
        (prompt,) = prompts(1, HANDOFF_TOKENS, seed=HANDOFF_TOKENS)
        frame, first_room = prompt.tobytes(), 1 + in_flight * 1_000_000

        async def bare(_: int) -> None:
            await self._echo.call(0, frame)

        ours = {name: full_hits(up, prompt, first_room) for name, up in self._pairs.items()}
        what, size = f"full-hit handoff, {HANDOFF_TOKENS} tokens", (in_flight, HANDOFFS[in_flight])
        return await self._compared(what, size, ours, bare)

    async def _compared(
        self,
        what: str,
        size: tuple[int, int],
        ours: Mapping[str, contextlib.AbstractAsyncContextManager[Call]],
        bare: Call,
    ) -> ComparedCalls:
        kinds = {
            name: CallKind(await self._stack.enter_async_context(call), self._pairs[name].processes)
            for name, call in ours.items()
        }
        return ComparedCalls(what, *size, kinds | {ECHO: CallKind(bare, self._server)})


# ---- what is made of it --------------------------------------------------------------------------


def rate(turn: Turn) -> float:
    """Calls per second."""
    return turn.per_s


def p50(turn: Turn) -> float:
    """The median call, in microseconds."""
    return turn.p50_us


def head(compared: ComparedCalls) -> Measured:
    """Which line of a table it is."""
    return {"what": compared.what, "in_flight": compared.in_flight}


def time_row(compared: ComparedCalls) -> Measured:
    """What passed; ``ratio`` to the echo: of the p50s, of cycles of the rates."""
    ours, echo = compared.kinds[OURS], compared.kinds[ECHO]
    is_cycle = compared.what.startswith("lease")
    ratio = compared.ratio(OURS, ECHO, rate if is_cycle else p50)
    return {
        **head(compared),
        "p50_us": ours.quantile_us(50),
        "p99_us": ours.quantile_us(99),
        "per_s": ours.per_s,
        "echo_p50_us": echo.quantile_us(50),
        "echo_per_s": echo.per_s,
        "ratio": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
    }


def cost_row(compared: ComparedCalls) -> Measured:
    """What each process computed for a call, and how often a core changed its thread."""
    ours, echo, recorded = (compared.kinds[kind] for kind in (OURS, ECHO, RECORDED))
    return {
        **head(compared),
        **{f"{name}_us": ours.cpu_us(name) for name in ours.processes},
        "switches": ours.switches,
        **{
            f"recorded_{name}_us": recorded.cpu_us(name)
            for name in recorded.processes
            if name in {"prefill", "decode"} or name.endswith("_recorder")
        },
        **{f"echo_{name}_us": echo.cpu_us(name) for name in echo.processes},
        "echo_switches": echo.switches,
    }


async def counted_messages(compared: list[ComparedCalls], up: ServingPair) -> list[Measured]:
    """Messages of a call on each socket, as the recorders have them: one more turn of each."""
    spans: list[Span] = []
    for comparison in compared:
        began_s = time.monotonic()
        await comparison.kinds[RECORDED].take_turn(comparison.calls, comparison.in_flight)
        spans.append((began_s, time.monotonic()))
    both = {
        name: messages_of(daemon, spans)
        for name, daemon in (("prefill", up.daemons.prefill), ("decode", up.daemons.decode))
    }
    return [
        {
            f"{name}_{key}": count / comparison.calls
            for name, counts in both.items()
            for key, count in msgspec.structs.asdict(counts[number]).items()
        }
        for number, comparison in enumerate(compared)
    ]


async def counted_system_calls(compared: ComparedCalls) -> Measured:
    """System calls of each process for a call, in one more turn; how they were counted."""
    kind = compared.kinds[OURS]
    calls = SystemCalls(kind.processes)
    with calls.count():
        await kind.take_turn(compared.calls, compared.in_flight)
    counts = {f"{name}_calls": n / compared.calls for name, n in calls.counts.items()}
    return {**counts, "counted_by": calls.way}


class ControlResult(msgspec.Struct, frozen=True):
    """All that was measured, a row for each figure.

    ``pending``: of calls that are begun and polled; ``keys``: of daemons with keys, if asked.
    """

    times: list[Measured]
    costs: list[Measured]
    counts: list[Measured]
    pending: list[Measured]
    keys: list[Measured]
    goals: tuple[Goal, ...] = ()


async def measure(
    pairs: dict[str, Pair], server: EchoServer, rounds: int, told: Told, *, calls: bool
) -> ControlResult:
    """Every figure, in turns with its reference and with all others."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    echo = EchoClient(context, server.endpoint)
    blocking_echo = BlockingEcho(context, server.endpoint)
    async with contextlib.AsyncExitStack() as stack:
        up = {
            name: await stack.enter_async_context(serving(pair, is_recorded=name == RECORDED))
            for name, pair in pairs.items()
        }
        verbs = ComparedVerbs(stack, up, echo, blocking_echo, server)
        compared = [await verbs.match(n_tokens) for n_tokens in MATCH_TOKENS]
        compared.append(await verbs.blocking_match(MATCH_TOKENS[0]))
        compared += [await verbs.cycle(in_flight) for in_flight in CYCLES]
        compared += [await verbs.handoff(in_flight) for in_flight in HANDOFFS]
        await warm_up(compared, told)
        told("counting messages")  # while the recordings are short
        messages = await counted_messages(compared, up[RECORDED])
        await play(compared, rounds, told)
        told("counting system calls")
        called = [
            await counted_system_calls(comparison) if calls else {} for comparison in compared
        ]
        told("beginning calls")
        (prompt,) = prompts(1, MATCH_TOKENS[0], seed=MATCH_TOKENS[0])
        pending = pending_row(up[OURS].blocking, prompt)
    echo.close()
    blocking_echo.close()
    context.term()
    return ControlResult(
        times=[time_row(comparison) for comparison in compared],
        costs=[cost_row(comparison) for comparison in compared],
        counts=[
            {**head(comparison), **sent, **counted}
            for comparison, sent, counted in zip(compared, messages, called, strict=True)
        ],
        pending=[pending],
        keys=[],
    )


async def warm_up(compared: list[ComparedCalls], told: Told) -> None:
    """A turn of each kind that does not count."""
    told("warming up")
    for comparison in compared:
        await comparison.warm_up()


async def play(compared: list[ComparedCalls], rounds: int, told: Told) -> None:
    """Time each comparison once a round, so that no figure has a quieter minute than another."""
    for number in range(rounds):
        told(f"round {number + 1}")
        for comparison in compared:
            await comparison.play_round(number)


async def measure_keys(keyed: Pair, bare: Pair, rounds: int, told: Told) -> list[Measured]:
    """What encryption and proven names cost a handoff, in turns with one that has neither."""
    (prompt,) = prompts(1, HANDOFF_TOKENS, seed=HANDOFF_TOKENS)
    async with contextlib.AsyncExitStack() as stack:
        up = {
            name: await stack.enter_async_context(serving(pair))
            for name, pair in (("keys", keyed), ("bare", bare))
        }
        compared = []
        for in_flight, calls in HANDOFFS.items():
            kinds = {}
            for name, engines in up.items():
                handoffs = full_hits(engines, prompt, in_flight * 1_000_000)
                call = await stack.enter_async_context(handoffs)
                kinds[name] = CallKind(call, engines.processes)
            compared.append(ComparedCalls("handoff", in_flight, calls, kinds))
        await warm_up(compared, told)
        await play(compared, rounds, told)
    return [key_row(comparison) for comparison in compared]


def key_row(compared: ComparedCalls) -> Measured:
    """Handoffs with keys beside those without, by how many are in flight."""
    keys, bare = compared.kinds["keys"], compared.kinds["bare"]
    ratio = compared.ratio("keys", "bare", p50)
    return {
        "in_flight": compared.in_flight,
        "keys_p50_us": keys.quantile_us(50),
        "keys_per_s": keys.per_s,
        "bare_p50_us": bare.quantile_us(50),
        "bare_per_s": bare.per_s,
        "ratio": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
    }


def goals_of(found: ControlResult) -> tuple[Goal, ...]:
    """What was to be reached."""
    times = {(str(row["what"]).split(",")[0], row["in_flight"]): row for row in found.times[2:]}
    costs = {(str(row["what"]).split(",")[0], row["in_flight"]): row for row in found.costs[2:]}
    cycle, handoff = "lease + release", "full-hit handoff"
    short, long = found.times[:2]
    blocking, pending = times["blocking match", 1], found.pending[0]
    of_16 = costs[handoff, 16]
    return (
        at_most("match, 2048 tokens: p50 / echo", 1.2, figure(short, "ratio")),
        at_most("match, 32768 tokens: p50 / echo", 1.5, figure(long, "ratio")),
        at_most("blocking match, 2048 tokens: p50 / echo", 1.2, figure(blocking, "ratio")),
        at_least(f"{cycle}, 64 in flight: per s / echo", 0.75, figure(times[cycle, 64], "ratio")),
        at_most(
            f"{cycle}, 64 in flight: CPU of the daemon in us",
            90,
            figure(costs[cycle, 64], "prefill_us"),
        ),
        at_most(f"{handoff}: p50 in us", 800, figure(times[handoff, 1], "p50_us")),
        at_least(f"{handoff}, 16 in flight: per s", 3000, figure(times[handoff, 16], "per_s")),
        *(
            at_most(f"{handoff}, 16 in flight: CPU of {name} in us", 150, figure(of_16, key))
            for name, key in (("prefill", "prefill_us"), ("decode", "decode_us"))
        ),
        at_most("match, begun: us", 30, figure(pending, "begin_us")),
        at_most("match, polled: us", 10, figure(pending, "poll_us")),
    )


def run(
    told: Told, *, rounds: int, keys: bool, calls: bool = True
) -> tuple[BenchmarkResult, object]:
    """Round trips of match, lease cycles and full-hit handoffs, beside a bare ZMQ echo."""
    with contextlib.ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-bench-")))
        pairs = {}
        for name, settings in ((OURS, SETTINGS), (RECORDED, WITH_RECORDER)):
            (top / name).mkdir()
            pairs[name] = stack.enter_context(two_daemons(top / name, settings))
        server = stack.enter_context(echo_server(top))
        found = uvloop.run(measure(pairs, server, rounds, told, calls=calls))
        if keys:
            (top / "keys").mkdir()
            keyed = stack.enter_context(two_daemons(top / "keys", SETTINGS, with_keys=True))
            costs = uvloop.run(measure_keys(keyed, pairs[OURS], rounds, told))
            found = msgspec.structs.replace(found, keys=costs)
    found = msgspec.structs.replace(found, goals=goals_of(found))
    return shown(found, rounds), found


def shown(found: ControlResult, rounds: int) -> BenchmarkResult:
    """Tables, goals and notes for people."""
    way = found.counts[0].get("counted_by")
    with_calls = tuple(found.counts) if way else ()
    return BenchmarkResult(
        tables=(
            ResultTable("Round trips of the control plane", TIME_COLUMNS, tuple(found.times)),
            ResultTable("Processor time of a call, in us", COST_COLUMNS, tuple(found.costs)),
            ResultTable("Messages of a call", MESSAGE_COLUMNS, tuple(found.counts)),
            ResultTable(f"System calls of a call ({way})", CALL_COLUMNS, with_calls),
            ResultTable(
                "A match of 2048 tokens that is begun and polled",
                PENDING_COLUMNS,
                tuple(found.pending),
            ),
            ResultTable(
                "Full-hit handoffs between daemons with CURVE keys", KEY_COLUMNS, tuple(found.keys)
            ),
        ),
        notes=(
            "echo: bare libzmq, frames of the same sizes: driven from its descriptor on the loop, "
            "blocking beside a blocking call. A lease cycle is two calls of kvd and two of the "
            "echo",
            f"{rounds} rounds, in which all take turns; ratio: kvd / echo, of the p50s, of lease "
            "cycles of the rates; the median round, and half of them lie from low to high",
            "processor time: of all rounds together; switches: how often a core changed from one "
            "thread to another, of all processes; "
            "recorded: the same calls on daemons with a flight recorder",
            "messages: from the daemons' recordings, stepped again, heartbeats included",
        ),
        goals=found.goals,
    )


WHICH: Final = (ResultColumn("what", "what"), ResultColumn("in_flight", "in flight"))
TIME_COLUMNS: Final = (
    *WHICH,
    ResultColumn("p50_us", "p50 us", ".0f"),
    ResultColumn("p99_us", "p99", ".0f"),
    ResultColumn("per_s", "per s", ".0f"),
    ResultColumn("echo_p50_us", "echo p50", ".0f"),
    ResultColumn("echo_per_s", "echo per s", ".0f"),
    ResultColumn("ratio", "ratio", ".2f"),
    ResultColumn("ratio_low", "low", ".2f"),
    ResultColumn("ratio_high", "high", ".2f"),
)
COST_COLUMNS: Final = (
    *WHICH,
    ResultColumn("client_us", "client", ".0f"),
    ResultColumn("prefill_us", "prefill", ".0f"),
    ResultColumn("decode_us", "decode", ".0f"),
    ResultColumn("prefill_transfer_us", "p. transfer", ".1f"),
    ResultColumn("decode_transfer_us", "d. transfer", ".1f"),
    ResultColumn("switches", "switches", ".1f"),
    ResultColumn("recorded_prefill_us", "recorded: prefill", ".0f"),
    ResultColumn("recorded_decode_us", "decode", ".0f"),
    ResultColumn("recorded_prefill_recorder_us", "p. recorder", ".0f"),
    ResultColumn("recorded_decode_recorder_us", "d. recorder", ".0f"),
    ResultColumn("echo_client_us", "echo: client", ".0f"),
    ResultColumn("echo_server_us", "server", ".0f"),
    ResultColumn("echo_switches", "switches", ".1f"),
)
MESSAGE_COLUMNS: Final = (
    *WHICH,
    ResultColumn("prefill_from_engines", "engine to prefill", ".2f"),
    ResultColumn("prefill_to_engines", "and back", ".2f"),
    ResultColumn("decode_from_engines", "engine to decode", ".2f"),
    ResultColumn("decode_to_engines", "and back", ".2f"),
    ResultColumn("prefill_to_peers", "prefill to decode", ".2f"),
    ResultColumn("decode_to_peers", "decode to prefill", ".2f"),
)
CALL_COLUMNS: Final = (
    *WHICH,
    ResultColumn("client_calls", "client", ".1f"),
    ResultColumn("prefill_calls", "prefill", ".1f"),
    ResultColumn("decode_calls", "decode", ".1f"),
    ResultColumn("prefill_transfer_calls", "p. transfer", ".1f"),
    ResultColumn("decode_transfer_calls", "d. transfer", ".1f"),
)
PENDING_COLUMNS: Final = (
    ResultColumn("calls", "begun at once"),
    ResultColumn("begin_us", "begin us", ".1f"),
    ResultColumn("poll_us", "poll", ".1f"),
    ResultColumn("pump_us", "pump", ".1f"),
)
KEY_COLUMNS: Final = (
    ResultColumn("in_flight", "in flight"),
    ResultColumn("keys_p50_us", "with keys p50 us", ".0f"),
    ResultColumn("keys_per_s", "per s", ".0f"),
    ResultColumn("bare_p50_us", "without p50", ".0f"),
    ResultColumn("bare_per_s", "per s", ".0f"),
    ResultColumn("ratio", "ratio", ".3f"),
    ResultColumn("ratio_low", "low", ".3f"),
    ResultColumn("ratio_high", "high", ".3f"),
)

command = measurement(
    "control",
    run,
    (
        click.option("--rounds", default=15, show_default=True, help="To take medians of."),
        click.option(
            "--calls/--no-calls", default=True, help="Count system calls; takes some seconds."
        ),
        click.option("--keys", is_flag=True, help="Measure too what CURVE keys cost a handoff."),
    ),
    steps=lambda rounds, keys, calls: (rounds + 1) * (2 if keys else 1) + 3,
)
