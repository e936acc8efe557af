"""``benchmarks gather``: what gathers of context-parallel ranks cost beside the bare collective.

Each rank is a process over gloo on this host, with one thread. In turn it gathers the keys of one
layer as kvd does, and does the least that there is to do: the bare collective of the same bytes and
one read of the rows in their order, between tensors that were there before. How much more a gather
costs is the result, in processor time: on a machine that has fewer cores than ranks, or other work,
times on the clock vary by more than what is measured. How fast gloo is on one host says nothing of
GPUs.

``python -m benchmarks.gather RANK RANKS STORE TOKENS ROUNDS`` is one such rank.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import click
import msgspec
import torch
import torch.distributed as dist

from benchmarks.harness import benchmark
from benchmarks.ranks import Ranks, join_ranks
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most, figure
from kvd.device.collectives import Gather, collect
from kvd.device.sequence import Split, shard
from kvd.device.symmetric import open_arena
from kvd.harness.child import answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.bench.report import Measured, Told

MARGIN: Final = 1.1
HEADS: Final = 8
HEAD_DIM: Final = 128


class StepTime(NamedTuple):
    """One step on one rank: on the clock, and of processors by all threads of the rank."""

    clock_ms: float
    cpu_ms: float


class GatherTimes(msgspec.Struct, frozen=True):
    """Of one rank: medians in ms, and the ratio of processor times."""

    result_bytes: int
    collective_ms: float
    order_ms: float
    least_ms: float
    gather_ms: float
    ratio: float


def measure(ranks: int, tokens: int, rounds: int) -> Measured:
    """Start so many ranks, let them gather, take the one in the middle by its ratio.

    Raises:
        ChildFailed: a rank did; its error is on standard error.
    """
    processes = Ranks("benchmarks.gather", ranks, str(tokens), str(rounds))
    try:
        each = processes.hear(GatherTimes)
    finally:
        processes.stop()
    found = sorted(each, key=lambda rank: rank.ratio)[ranks // 2]
    row: Measured = {"ranks": ranks, "result_mb": found.result_bytes / 1e6}
    return {**row, **msgspec.structs.asdict(found)}


def measure_rank(group: dist.ProcessGroup, tokens: int, rounds: int) -> GatherTimes:
    """The times of this rank: each way to gather, in turns with the others."""
    ranks = group.size()
    sharding = shard(Split.ZIGZAG, [tokens], ranks)
    row = (HEADS, HEAD_DIM)
    x = torch.rand(sharding.counts[group.rank()], *row).bfloat16()
    out = torch.empty(tokens, *row, dtype=torch.bfloat16)
    send = torch.zeros(sharding.max_len, *row, dtype=torch.bfloat16).view(torch.uint8)
    received = torch.empty(ranks * sharding.max_len, *send.shape[1:], dtype=torch.uint8)
    order = torch.from_numpy(sharding.order())
    rows, into = received.view(received.shape[0], -1), out.view(torch.uint8).view(tokens, -1)
    gather = Gather(group, open_arena(group, x.device))
    gather.warm_up(sharding, row, torch.bfloat16)

    def collective() -> None:
        collect(received, send, group).wait()

    def in_order() -> None:
        torch.index_select(rows, 0, order, out=into)

    def least() -> None:
        collective()
        in_order()

    def gathered() -> None:
        gather.start(x, sharding, out=out).wait()

    took = _timed((collective, in_order, least, gathered), rounds, group)
    ms = [statistics.median(timed.clock_ms for timed in of_step) for of_step in took]
    pairs = zip(took[2], took[3], strict=True)
    return GatherTimes(
        result_bytes=out.nbytes,
        collective_ms=ms[0],
        order_ms=ms[1],
        least_ms=ms[2],
        gather_ms=ms[3],
        ratio=statistics.median(mine.cpu_ms / least.cpu_ms for least, mine in pairs),
    )


def _timed(
    steps: tuple[Callable[[], None], ...], rounds: int, group: dist.ProcessGroup
) -> list[list[StepTime]]:
    """Each step in turn, so often, all ranks together: what each took."""
    took: list[list[StepTime]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, of_step in zip(steps, took, strict=True):
            dist.barrier(group)
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            step()
            clock_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
            of_step.append(StepTime(clock_s * 1e3, cpu_s * 1e3))
    return took


def run(told: Told, *, ranks: tuple[int, ...], tokens: int, rounds: int) -> BenchmarkResult:
    """Gathers of context-parallel ranks beside the bare collective."""
    rows = []
    for count in ranks:
        told(f"{count} ranks")
        rows.append(measure(count, tokens, rounds))
    title = f"Keys of one layer, {tokens} tokens, {HEADS} heads of {HEAD_DIM} in bf16"
    return BenchmarkResult(
        tables=(ResultTable(title=title, columns=COLUMNS, rows=tuple(rows)),),
        goals=tuple(
            at_most(f"{row['ranks']} ranks: gather / least", MARGIN, figure(row, "ratio"))
            for row in rows
        ),
        notes=(
            f"gloo on this host, one thread a rank, medians of {rounds} rounds",
            "least: the bare collective, then the rows put in order; ratio: the gather against "
            "it, in processor time",
        ),
    )


COLUMNS: Final = (
    ResultColumn("ranks", "ranks"),
    ResultColumn("result_mb", "MB", ".1f"),
    ResultColumn("collective_ms", "collective ms", ".2f"),
    ResultColumn("order_ms", "order ms", ".2f"),
    ResultColumn("least_ms", "least ms", ".2f"),
    ResultColumn("gather_ms", "gather ms", ".2f"),
    ResultColumn("ratio", "ratio", ".2f"),
)

command = benchmark(
    "gather",
    run,
    click.option("--ranks", multiple=True, type=int, default=(2, 4), show_default=True),
    click.option("--tokens", default=8192, show_default=True, help="Of one prompt."),
    click.option("--rounds", default=15, show_default=True, help="To take medians of."),
)


def main(rank: int, ranks: int, store: str, tokens: int, rounds: int) -> None:
    """Join the group as this rank, measure, and tell whoever started it."""
    group = join_ranks(rank, ranks, store)
    answer(measure_rank(group, tokens, rounds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
