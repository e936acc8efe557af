"""``benchmarks shards``: options in, a table and a JSON file out; ``shard_moves`` measures."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import click

from benchmarks.shard_moves import CASES, CaseResult, Plan, ShardsResult, measure
from kvd.bench.report import bar, show_goals, show_notes, show_table, write_json
from kvd.bench.stream import json_option

if TYPE_CHECKING:
    from pathlib import Path

HEADERS = (
    "shards",
    "MiB",
    "packed",
    "kvd",
    "with sums",
    "descriptors",
    "of KiB",
    "raw",
    "kvd/raw",
    "cpu s/GB",
    "raw cpu",
)


@click.command("shards")
@click.option("--pages", default=32, show_default=True, help="Pages of 2 MiB of the model.")
@click.option("--repeats", default=15, show_default=True, help="Writes per case.")
@click.option("--seed", default=1, show_default=True, help="Of the random order of pages.")
@click.option("--tls", default="", help="UCX_TLS; tcp is how bytes travel between hosts.")
@json_option
def command(pages: int, repeats: int, seed: int, tls: str, file: Path | None) -> None:
    """Pages between pools that are sharded differently, beside raw NIXL.

    Two transfer processes with pools of a Llama-8B shape (32 layers, 8 heads of 128, bfloat16, 16
    tokens a page), without daemons.
    """
    plan = Plan(pages, repeats, seed, {"UCX_TLS": tls} if tls else {})
    os.environ.update(plan.environment)
    with bar("shards", 1 + len(CASES)) as told:
        result = asyncio.run(measure(plan, told))
    _show(result)
    if file is not None:
        write_json(file, result)


def _show(result: ShardsResult) -> None:
    plan = result.plan
    show_table(
        f"{plan.pages} pages of 2 MiB in random order; medians of {plan.repeats}, GB/s",
        HEADERS,
        [_row(one) for one in result.cases],
    )
    show_notes(
        [
            "kvd: from the first order to the last answer of a transfer process; with sums: of "
            "every page, too",
            "cpu: of all threads of the sending process; on a busy machine it says more than times",
            "descriptors: the same pieces from where they lie; raw: whole pages of 2 MiB. Both "
            "written by a bare process that spins, timed without planning",
        ]
    )
    show_goals(result.goals)


def _row(one: CaseResult) -> list[str]:
    rates = one.rates
    return [
        one.name,
        f"{one.moved_bytes / 2**20:.0f}",
        "yes" if one.is_packed else "no",
        f"{rates.kvd:.2f}",
        f"{rates.with_sums:.2f}",
        f"{rates.descriptors:.2f}",
        f"{one.moved_bytes / one.pieces / 2**10:.3g}",
        f"{rates.raw:.2f}",
        f"{rates.to_raw:.2f}",
        f"{rates.cpu:.2f}",
        f"{rates.raw_cpu:.2f}",
    ]
