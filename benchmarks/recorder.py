"""``benchmarks recorder``: what the flight recorder takes of the daemon's own time.

One daemon with it and one without, in small turns on the same requests: a lease and its release,
64 at a time, which is the daemon's full rate. The ring is small, so that it has been filled once
before anything is measured: the first way round the kernel still has to find the pages. What is
compared is the processor time of the daemon, the recorder process left out, and the ratio is the
median over the rounds.

Beside it stands what writing the two records of a cycle takes by itself, with nobody reading and
nothing else running: the floor. What is above it is what two processes on two cores take of each
other, for the recorder process steps every input again.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import numpy as np

import kvd.client
from benchmarks.harness import benchmark
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most, figure
from kvd.bench.rounds import CallKind, ComparedCalls
from kvd.core.inputs import FromClient
from kvd.harness.daemons import one_daemon
from kvd.recorder import ring
from kvd.recorder.input_records import headed_request
from kvd.types import Tokens
from kvd.wire.client import GetSnapshot

if TYPE_CHECKING:
    from kvd.bench.report import Measured, Told
    from kvd.harness.daemons import DaemonProcess

RING_BYTES: Final = 32 * 2**20
SHAPE: Final = {"pool.layers": "1", "pool.heads": "1", "pool.head_dim": "8", "pool.pages": "32768"}
RECORDED: Final = {**SHAPE, "recorder.enabled": "true", "recorder.max_bytes": str(RING_BYTES)}
PROMPT_TOKENS: Final = (200, 2000, 13_000)
PROMPTS: Final = 20
RECORD_BYTES: Final = 300
"""Of an input beside its tokens, or more."""
IN_FLIGHT: Final = 64

COLUMNS: Final = (
    ResultColumn("prompt_tokens", "prompt tokens"),
    ResultColumn("without_us", "without us", ".0f"),
    ResultColumn("with_us", "with us", ".0f"),
    ResultColumn("ratio", "ratio", ".3f"),
    ResultColumn("low", "half of them from", ".3f"),
    ResultColumn("high", "to", ".3f"),
    ResultColumn("floor_us", "writing by itself us", ".1f"),
    ResultColumn("floor_ratio", "with that alone", ".3f"),
)
DAEMON: Final = "daemon"


def cycles_of(daemon: DaemonProcess, node: kvd.client.Node, prompts: list[np.ndarray]) -> CallKind:
    """Lease and release, and what they take of the daemon."""

    async def cycle(number: int) -> None:
        lease = await node.lease(prompts[number % len(prompts)])
        await lease.release()

    return CallKind(cycle, {DAEMON: daemon.pid})


async def measure(
    daemons: list[DaemonProcess], rounds: int, cycles: int, told: Told
) -> list[Measured]:
    """The daemon without the recorder and the one with it, in turns."""
    rng = np.random.default_rng(1)
    rows: list[Measured] = []
    async with AsyncExitStack() as up:
        nodes = [
            await up.enter_async_context(kvd.client.connect(daemon.client, name="bench"))
            for daemon in daemons
        ]
        for n_tokens in PROMPT_TOKENS:
            told(f"{n_tokens} tokens")
            prompts = [rng.integers(0, 50_000, n_tokens, dtype=np.int32) for _ in range(PROMPTS)]
            pairs = zip(("without", "with"), daemons, nodes, strict=True)
            kinds = {kind: cycles_of(daemon, node, prompts) for kind, daemon, node in pairs}
            compared = ComparedCalls(f"{n_tokens} tokens", IN_FLIGHT, cycles, kinds)
            once_round = RING_BYTES // (4 * n_tokens + 2 * RECORD_BYTES) + PROMPTS
            for _ in range(-(-once_round // cycles)):
                await compared.warm_up()
            for number in range(rounds):
                await compared.play_round(number)
            rows.append(row_of(n_tokens, compared, writing_us(prompts[0])))
    return rows


def writing_us(prompt: np.ndarray) -> float:
    """Of the two records of a cycle, the best of some ways round a ring with no other reader."""
    descriptor = ring.create(RING_BYTES)
    records = ring.RecordRing(descriptor)
    frame = bytes(RECORD_BYTES // 2)
    asked, released = (
        FromClient(at_s=0.0, session=1, message=GetSnapshot(call=0), tokens=Tokens(tokens))
        for tokens in (prompt.tobytes(), b"")
    )
    cycles = RING_BYTES // (4 * len(prompt) + 2 * RECORD_BYTES)
    try:
        return min(_round_us(records, (asked, released), frame, cycles) for _ in range(5))
    finally:
        records.close()
        os.close(descriptor)


def _round_us(
    records: ring.RecordRing, requests: tuple[FromClient, ...], frame: bytes, cycles: int
) -> float:
    records.forget(records.end)
    began_s = time.process_time()
    for _ in range(cycles):
        for request in requests:
            records.write(headed_request(request, frame), request.tokens)
    return (time.process_time() - began_s) / cycles * 1e6


def row_of(n_tokens: int, compared: ComparedCalls, floor_us: float) -> Measured:
    """The daemon's time for a cycle, the ratio of each round, and the floor."""
    ratio = compared.ratio("with", "without", lambda turn: turn.cpu_us[DAEMON])
    us = {f"{kind}_us": calls.cpu_us(DAEMON) for kind, calls in compared.kinds.items()}
    return {
        "prompt_tokens": n_tokens,
        **us,
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "floor_us": floor_us,
        "floor_ratio": 1 + floor_us / us["without_us"],
    }


def run(told: Told, *, rounds: int, cycles: int) -> BenchmarkResult:
    """What the flight recorder takes of the daemon's own time."""
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as name, ExitStack() as up:
        daemons = [
            up.enter_context(one_daemon(Path(name), settings, name=kind))
            for kind, settings in (("without", SHAPE), ("with", RECORDED))
        ]
        rows = asyncio.run(measure(daemons, rounds, cycles, told))
    title = "Processor time of the daemon for a lease and its release"
    worst = max(figure(row, "ratio") for row in rows)
    return BenchmarkResult(
        tables=(ResultTable(title=title, columns=COLUMNS, rows=tuple(rows)),),
        goals=(at_most("processor time with it over without, worst", 1.05, worst),),
    )


command = benchmark(
    "recorder",
    run,
    click.option("--rounds", default=100, show_default=True, help="To take medians of."),
    click.option("--cycles", default=100, show_default=True, help="Leases in a turn."),
)
