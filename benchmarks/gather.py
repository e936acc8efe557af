"""``benchmarks gather``: what gathers of context-parallel ranks cost beside the bare collective.

Each rank is a process over gloo on this host, with one thread. In turn it gathers the keys of one
layer as kvd does, and does the least that there is to do: the bare collective of the same bytes and
one read of the rows in their order, between tensors that were there before. How much more a gather
costs is the result. How fast gloo is on one host says nothing of GPUs.

``python -m benchmarks.gather RANK RANKS STORE SHAPE`` is one such rank.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import click
import msgspec
import torch
import torch.distributed as dist

from kvd.bench.report import Goal, at_most, bar, show_goals, show_notes, show_table, write_json
from kvd.device.collectives import Gather, collect
from kvd.device.sequence import Split, shard
from kvd.device.symmetric import open_arena

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.bench.report import Told

TIMEOUT: Final = timedelta(seconds=180)
MARGIN: Final = 1.1


class Shape(msgspec.Struct, frozen=True):
    """One layer's keys of one prompt, in bf16."""

    tokens: int = 8192
    heads: int = 8
    head_dim: int = 128
    rounds: int = 15


class GatherTimes(msgspec.Struct, frozen=True):
    """Medians in ms; ``least_ms``: the collective, then the order.

    ``ratio``: gather against least in processor time of the rank and its threads, the median of the
    rounds. On a machine that has fewer cores than ranks, or other work, times on the clock vary by
    more than what is measured.
    """

    ranks: int
    result_bytes: int
    collective_ms: float
    order_ms: float
    least_ms: float
    gather_ms: float
    ratio: float


class Took(NamedTuple):
    """One step on one rank: on the clock, and of processors by all threads of the rank."""

    clock_ms: float
    cpu_ms: float


class GatherResult(msgspec.Struct, frozen=True):
    """What ``benchmarks gather`` reports."""

    shape: Shape
    times: tuple[GatherTimes, ...]
    goals: tuple[Goal, ...]


def measure(ranks: int, shape: Shape) -> GatherTimes:
    """Start so many ranks, let them gather, take the one in the middle by its ratio.

    Raises:
        subprocess.CalledProcessError: a rank failed; its error is on standard error.
    """
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as directory:
        given = [str(ranks), str(Path(directory) / "store"), msgspec.json.encode(shape).decode()]
        # What one rank takes of the other's cores must not decide: one thread each.
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gather", str(rank), *given],
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank in range(ranks)
        ]
        try:
            found = [msgspec.json.decode(_answer(one), type=GatherTimes) for one in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return sorted(found, key=lambda times: times.ratio)[ranks // 2]


def run(every: tuple[int, ...], shape: Shape, told: Told) -> GatherResult:
    """Measure each number of ranks."""
    times = []
    for ranks in every:
        told(f"{ranks} ranks")
        times.append(measure(ranks, shape))
    goals = tuple(at_most(f"{one.ranks} ranks: gather / least", MARGIN, one.ratio) for one in times)
    return GatherResult(shape, tuple(times), goals)


def _answer(process: subprocess.Popen[bytes]) -> bytes:
    answer, _ = process.communicate(timeout=TIMEOUT.total_seconds())
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return answer


def _rank(rank: int, ranks: int, store: str, shape: Shape) -> GatherTimes:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    group = dist.group.WORLD
    assert group is not None
    sharding = shard(Split.ZIGZAG, [shape.tokens], ranks)
    row = (shape.heads, shape.head_dim)
    x = torch.rand(sharding.counts[rank], *row).bfloat16()
    out = torch.empty(shape.tokens, *row, dtype=torch.bfloat16)
    send = torch.zeros(sharding.max_len, *row, dtype=torch.bfloat16).view(torch.uint8)
    received = torch.empty(ranks * sharding.max_len, *send.shape[1:], dtype=torch.uint8)
    order = torch.from_numpy(sharding.order())
    rows, into = received.view(received.shape[0], -1), out.view(torch.uint8).view(shape.tokens, -1)
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

    took = _timed((collective, in_order, least, gathered), shape.rounds, group)
    dist.destroy_process_group()
    ms = [statistics.median(one.clock_ms for one in of_step) for of_step in took]
    pairs = zip(took[2], took[3], strict=True)
    return GatherTimes(
        ranks=ranks,
        result_bytes=out.nbytes,
        collective_ms=ms[0],
        order_ms=ms[1],
        least_ms=ms[2],
        gather_ms=ms[3],
        ratio=statistics.median(mine.cpu_ms / least.cpu_ms for least, mine in pairs),
    )


def _timed(
    steps: tuple[Callable[[], None], ...], rounds: int, group: dist.ProcessGroup
) -> list[list[Took]]:
    """Each step in turn, so often, all ranks together: what each took."""
    took: list[list[Took]] = [[] for _ in steps]
    for _ in range(rounds):
        for step, of_step in zip(steps, took, strict=True):
            dist.barrier(group)
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            step()
            of_step.append(
                Took(
                    (time.perf_counter() - began_s) * 1e3,
                    (time.process_time() - began_cpu_s) * 1e3,
                )
            )
    return took


@click.command("gather")
@click.option("--ranks", "every", multiple=True, type=int, default=(2, 4), show_default=True)
@click.option("--tokens", default=Shape().tokens, show_default=True, help="Of one prompt.")
@click.option("--rounds", default=Shape().rounds, show_default=True, help="To take medians of.")
@click.option(
    "--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the result here."
)
def command(every: tuple[int, ...], tokens: int, rounds: int, file: Path | None) -> None:
    """Gathers of context-parallel ranks beside the bare collective."""
    shape = Shape(tokens=tokens, rounds=rounds)
    with bar("gather", len(every)) as told:
        result = run(every, shape, told)
    rows = [
        [
            str(one.ranks),
            f"{one.result_bytes / 1e6:.1f}",
            f"{one.collective_ms:.2f}",
            f"{one.order_ms:.2f}",
            f"{one.least_ms:.2f}",
            f"{one.gather_ms:.2f}",
            f"{one.ratio:.2f}",
        ]
        for one in result.times
    ]
    headers = ["ranks", "MB", "collective ms", "order ms", "least ms", "gather ms", "ratio"]
    title = f"Keys of one layer, {tokens} tokens, {shape.heads} heads of {shape.head_dim} in bf16"
    show_table(title, headers, rows)
    show_notes(
        [
            f"gloo on this host, one thread a rank, medians of {rounds} rounds",
            "least: the bare collective, then the rows put in order; ratio: the gather against "
            "it, in processor time",
        ]
    )
    show_goals(result.goals)
    if file is not None:
        write_json(file, result)


if __name__ == "__main__":
    found = _rank(
        int(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        msgspec.json.decode(sys.argv[4], type=Shape),
    )
    sys.stdout.buffer.write(msgspec.json.encode(found))
