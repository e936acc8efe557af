"""``benchmarks pull``: a cached prefix that is pulled, beside the same bytes handed over.

Two daemons on this host. The prefill side has a prompt of 64 MiB cached. It is received by an
engine that keeps nothing of it: in one turn in a room, to which an engine of the other side sends
what it has under a lease, in the other without a room. Each way in turns, so that the machine's
noise falls on both.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import numpy as np

import kvd.client
from benchmarks.harness import benchmark
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_least, figure
from kvd.bench.rounds import CallKind, ComparedCalls
from kvd.harness.daemons import two_daemons

if TYPE_CHECKING:
    from kvd.bench.report import Measured, Told
    from kvd.harness.daemons import Pair

SHAPE: Final = {"pool.layers": "4", "pool.heads": "8", "pool.head_dim": "128", "pool.pages": "600"}
TOKEN_BYTES: Final = 4 * 2 * 8 * 128 * 2
PROMPT_TOKENS: Final = 64 * 2**20 // TOKEN_BYTES
HANDOFF, PULL = "handoff", "pull"

COLUMNS: Final = (
    ResultColumn("way", "way"),
    ResultColumn("p50_ms", "p50 ms", ".2f"),
    ResultColumn("gb_per_s", "GB/s", ".2f"),
    ResultColumn("prefill_ms", "of the prefill daemon ms", ".2f"),
    ResultColumn("decode_ms", "of the decode daemon ms", ".2f"),
    ResultColumn("to_handoff", "speed over the handoff", ".3f"),
)


async def measure(pair: Pair, rounds: int, calls: int, told: Told) -> list[Measured]:
    """Both ways, in turns."""
    tokens = np.random.default_rng(1).integers(0, 50_000, PROMPT_TOKENS, dtype=np.int32)
    async with AsyncExitStack() as up:
        p = await up.enter_async_context(kvd.client.connect(pair.prefill.client, name="prefill"))
        d = await up.enter_async_context(kvd.client.connect(pair.decode.client, name="decode"))
        lease = await p.lease(tokens)
        for part in p.pool("main").layer(0):
            part[lease.pages.tolist()] = 1
        await lease.commit()
        rooms = iter(range(1, 2**31))

        async def handed_over(_: int) -> None:
            room = next(rooms)
            sent = asyncio.create_task(p.hand_over(room, lease=lease))
            await received(await d.receive(room, tokens, "p", cache=False))
            assert (await sent).committed

        async def pulled(_: int) -> None:
            await received(await d.receive(tokens, source="p", cache=False))

        async def received(receive: kvd.client.Receive) -> None:
            await receive.done()
            assert (receive.prefix_len, receive.n_tokens) == (0, PROMPT_TOKENS)
            await receive.lease.release()

        daemons = {"prefill": pair.prefill.pid, "decode": pair.decode.pid}
        kinds = {HANDOFF: CallKind(handed_over, daemons), PULL: CallKind(pulled, daemons)}
        compared = ComparedCalls("64 MiB", 1, calls, kinds)
        for _ in range(2):
            await compared.warm_up()
        for number in range(rounds):
            told(f"round {number + 1} of {rounds}")
            await compared.play_round(number)
        await lease.release()
    return [row_of(compared, way) for way in (HANDOFF, PULL)]


def row_of(compared: ComparedCalls, way: str) -> Measured:
    """One way, and its speed over that of the handoff in the same rounds."""
    kind = compared.kinds[way]
    p50_ms = kind.quantile_us(50) / 1000
    slower = compared.ratio(way, HANDOFF, lambda turn: turn.p50_us).median
    return {
        "way": way,
        "p50_ms": p50_ms,
        "gb_per_s": PROMPT_TOKENS * TOKEN_BYTES / p50_ms / 1e6,
        "prefill_ms": kind.cpu_us("prefill") / 1000,
        "decode_ms": kind.cpu_us("decode") / 1000,
        "to_handoff": 1 / slower,
    }


def run(told: Told, *, rounds: int, calls: int) -> BenchmarkResult:
    """A cached prefix of 64 MiB, pulled and handed over."""
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as name,
        two_daemons(Path(name), SHAPE) as pair,
    ):
        rows = asyncio.run(measure(pair, rounds, calls, told))
    speed = figure(rows[-1], "to_handoff")
    return BenchmarkResult(
        tables=(ResultTable(title="A prefix of 64 MiB", columns=COLUMNS, rows=tuple(rows)),),
        goals=(at_least("speed of a pull over the handoff of the same bytes", 0.95, speed),),
    )


command = benchmark(
    "pull",
    run,
    click.option("--rounds", default=30, show_default=True, help="To take medians of."),
    click.option("--calls", default=5, show_default=True, help="In a turn."),
)
