"""``kvd bench radix``: the prefix index on a recorded load, against the bytes it has to move.

Replays a trace, one request at a time: match, lock, evict when the pool lacks pages, extend,
relock, unlock. Only these calls are timed; making tokens and handing out pages is not. How a
request is measured is ``replay``.

Each of ``COLUMNS`` replays the trace with its own floors. To measure another beside the bare tree,
write a class with ``serve`` and name it there.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from kvd.bench.nodestep import NodeColumn
from kvd.bench.replay import NAMESPACE, Column, ColumnResult, Cost, replay
from kvd.bench.table import Goal, at_most, bar, show_goals, show_notes, show_table, write_json
from kvd.core.cache.eviction import Policy, eviction_order
from kvd.core.cache.pages import PagePool
from kvd.core.cache.radix import RadixTree
from kvd.trace import BadTrace, TraceRequest, read_trace
from kvd.types import Tokens, count

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.bench.table import Told

TREE, NODE = "tree", "node"


class RadixResult(msgspec.Struct, frozen=True):
    """What ``kvd bench radix`` reports."""

    trace: str
    requests: int
    tokens: int
    capacity_tokens: int
    page_size: int
    columns: tuple[ColumnResult, ...]
    goals: tuple[Goal, ...]


class TreeColumn:
    """The bare tree and a page pool; nothing is locked between requests."""

    def __init__(self, capacity_tokens: int, page_size: int) -> None:
        self._page_size = page_size
        self._tree = RadixTree(page_size, eviction_order(Policy.LRU))
        self._pool = PagePool("bench", capacity_tokens // page_size + 1)

    @property
    def cached_tokens(self) -> int:
        """Tokens in the tree."""
        return self._tree.cached_pages * self._page_size

    def serve(self, tokens: Tokens) -> Cost:
        """Match and lock, make room, extend and unlock."""
        tree, pool, clock = self._tree, self._pool, time.perf_counter_ns
        start = clock()
        anchor = tree.hold(tokens, NAMESPACE)
        ns = clock() - start
        hit = anchor.end_tokens
        n_new = (count(tokens) - hit) // self._page_size
        short = n_new - pool.free_pages
        if short > 0:
            start = clock()
            freed = tree.evict(short).pages
            ns += clock() - start
            pool.return_pages(freed)
        pages = pool.take_pages(n_new)
        start = clock()
        tree.extend(anchor, tokens, pages, start_tokens=hit)
        tree.unlock(anchor)
        ns += clock() - start
        return Cost(ns, hit, n_new * self._page_size)


COLUMNS: dict[str, Callable[[int, int], Column]] = {TREE: TreeColumn, NODE: NodeColumn}
"""What is measured: a name, and what makes it from the capacity in tokens and the page size."""

STEPS = 100
"""How often the progress bar moves per column."""


def run(
    trace: Path, *, capacity_tokens: int, page_size: int, limit: int | None, told: Told
) -> RadixResult:
    """Replays ``trace`` through each column.

    Args:
        trace: A file in Mooncake's trace format.
        capacity_tokens: Size of the page pool.
        page_size: Tokens per page.
        limit: Requests to replay; all when None.
        told: Called ``STEPS`` times per column.

    Raises:
        BadTrace: The file is not a trace.
    """
    requests = read_trace(trace, limit)
    columns = tuple(
        _replay_column(name, make(capacity_tokens, page_size), requests, page_size, told)
        for name, make in COLUMNS.items()
    )
    return RadixResult(
        trace=trace.name,
        requests=len(requests),
        tokens=sum(request.input_length for request in requests),
        capacity_tokens=capacity_tokens,
        page_size=page_size,
        columns=columns,
        goals=goals_of(*columns),
    )


def _replay_column(
    name: str, column: Column, requests: list[TraceRequest], page_size: int, told: Told
) -> ColumnResult:
    told_steps = 0

    def progress(done: int, total: int) -> None:
        nonlocal told_steps
        while told_steps * total < done * STEPS:
            told_steps += 1
            told(name)

    return replay(name, column, requests, page_size=page_size, told=progress)


def goals_of(tree: ColumnResult, node: ColumnResult) -> tuple[Goal, ...]:
    """What was to be reached."""
    return (
        at_most("tree p50 / floor", 3.5, tree.ratio_p50),
        at_most("tree, bytes per cached token", 5.0, tree.bytes_per_token),
        at_most("node p50 / tree", 3.0, node.times.p50_us / tree.times.p50_us),
        at_most("node mean / tree", 3.0, node.times.mean_us / tree.times.mean_us),
    )


@click.command("radix")
@click.option(
    "--trace",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file in Mooncake's format.",
)
@click.option("--capacity", default=2_000_000, show_default=True, help="Tokens in the pool.")
@click.option("--page", default=16, show_default=True, help="Tokens per page.")
@click.option("--limit", type=int, help="Requests to replay; all by default.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Result.")
def command(trace: Path, capacity: int, page: int, limit: int | None, file: Path | None) -> None:
    """The prefix tree, and a whole node around it, on a recorded load."""
    try:
        with bar("radix", len(COLUMNS) * STEPS) as told:
            result = run(trace, capacity_tokens=capacity, page_size=page, limit=limit, told=told)
    except BadTrace as error:
        raise click.ClickException(str(error)) from error
    _show(result)
    if file is not None:
        write_json(file, result)


HEADERS = (
    "column",
    "p50 us",
    "p99",
    "mean",
    "floor p50",
    "p99",
    "mean",
    "p50/floor",
    "mean/floor",
    "hit rate",
    "bytes/token",
    "preempted",
)


def _show(result: RadixResult) -> None:
    show_table(
        f"{result.trace}: {result.requests} requests, {result.tokens} tokens; "
        f"capacity {result.capacity_tokens} tokens, page {result.page_size}",
        HEADERS,
        [_row(column) for column in result.columns],
    )
    show_notes(
        [
            "tree: match, lock, evict, extend, unlock; node: Node.step of lease and "
            "commit-and-release, with pages, leases, owners and events",
            "floor: comparing the hit twice and copying what is new, for the same requests",
        ]
    )
    show_goals(result.goals)


def _row(column: ColumnResult) -> list[str]:
    each = [
        figure
        for times in (column.times, column.floor)
        for figure in (times.p50_us, times.p99_us, times.mean_us)
    ]
    return [
        column.name,
        *(f"{figure:.1f}" for figure in each),
        f"{column.ratio_p50:.2f}",
        f"{column.ratio_mean:.2f}",
        f"{column.hit_rate:.2%}",
        f"{column.bytes_per_token:.2f}",
        str(column.preempted),
    ]


if __name__ == "__main__":
    command()
