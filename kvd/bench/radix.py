"""``kvd bench radix``: the prefix index on a recorded load, against the bytes it has to move.

Replays a trace, one request at a time: match, lock, evict when the pool lacks pages, extend,
relock, unlock. Only these calls are timed; making tokens and handing out pages is not.

Every request is measured against its own floor, right after it: the work no index can avoid, which
is to compare the hit twice (once to find it, once to insert behind it) and to copy the tokens and
page ids that are new. So the ratio means the same on a quiet machine and on a busy one.

A ``Column`` is one thing that serves requests; each of ``COLUMNS`` replays the trace with its own
floors. To measure another beside the bare tree (the whole node with leases, say), write a class
with ``serve`` and name it there.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from kvd.bench.trace import Blocks, TraceRequest, read_trace
from kvd.core.eviction import Policy, eviction_order
from kvd.core.pages import PagePool
from kvd.core.radix import RadixTree
from kvd.types import ID_BYTES, Tokens, count

if TYPE_CHECKING:
    from collections.abc import Callable

    Progress = Callable[[int, int], None]
    """Told after every request: how many are done, of how many."""

    Nanoseconds = np.ndarray[tuple[int], np.dtype[np.int64]]

NAMESPACE = "bench"
NS_PER_US = 1000

PREEMPTED_NS = 20 * NS_PER_US
"""Wall time this far above CPU time means that somebody else had the core meanwhile."""


class Cost(msgspec.Struct, frozen=True):
    """What one request took: its time, and the bytes the floor is measured on."""

    ns: int
    hit_tokens: int
    new_tokens: int


class Column(Protocol):
    """Something that serves the requests of a trace, and can say how long each took."""

    @property
    def cached_tokens(self) -> int:
        """Tokens it holds now."""

    def serve(self, tokens: Tokens) -> Cost:
        """Serves one prompt from match to release; only the index's own calls are timed."""


class Times(msgspec.Struct, frozen=True):
    """The distribution of one measurement over the requests, in microseconds."""

    p50_us: float
    p99_us: float
    mean_us: float


class ColumnResult(msgspec.Struct, frozen=True):
    """One column of the table.

    ``ratio_*`` is the column over the floor of the same requests in the same run.
    """

    name: str
    times: Times
    floor: Times
    ratio_p50: float
    ratio_mean: float
    hit_rate: float
    bytes_per_token: float
    """Growth of resident memory over the tokens cached at the end."""
    preempted: int
    """Requests that lost the core on the way; they are charged their CPU time."""


class RadixResult(msgspec.Struct, frozen=True):
    """What ``kvd bench radix`` reports."""

    trace: str
    requests: int
    tokens: int
    capacity_tokens: int
    page_size: int
    columns: tuple[ColumnResult, ...]


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
            pool.give(freed)
        pages = pool.take(n_new)
        start = clock()
        tree.extend(anchor, tokens, pages, start_tokens=hit)
        tree.unlock(anchor)
        ns += clock() - start
        return Cost(ns, hit, n_new * self._page_size)


COLUMNS: dict[str, Callable[[int, int], Column]] = {"tree": TreeColumn}
"""What is measured: a name, and what makes it from the capacity in tokens and the page size."""


def floor_ns(tokens: Tokens, cost: Cost, page_size: int) -> int:
    """Time to compare the hit twice and to copy what is new, on bytes like those of the request."""
    cut, end = cost.hit_tokens * ID_BYTES, (cost.hit_tokens + cost.new_tokens) * ID_BYTES
    stored = bytes(memoryview(tokens)[:cut])
    row = bytes(end // page_size)
    clock = time.perf_counter_ns
    start = clock()
    tokens.startswith(stored)
    tokens.startswith(stored)
    tokens[cut:end]
    row[cut // page_size :]
    return clock() - start


def run(
    trace: Path, *, capacity_tokens: int, page_size: int, limit: int | None, progress: Progress
) -> RadixResult:
    """Replays ``trace`` through each column.

    Args:
        trace: A file in Mooncake's trace format.
        capacity_tokens: Size of the page pool.
        page_size: Tokens per page.
        limit: Requests to replay; all when None.
        progress: Called after every request.
    """
    requests = read_trace(trace, limit)
    columns = [
        replay(name, make(capacity_tokens, page_size), requests, page_size=page_size, told=progress)
        for name, make in COLUMNS.items()
    ]
    return RadixResult(
        trace=trace.name,
        requests=len(requests),
        tokens=sum(request.input_length for request in requests),
        capacity_tokens=capacity_tokens,
        page_size=page_size,
        columns=tuple(columns),
    )


def replay(
    name: str, column: Column, requests: list[TraceRequest], *, page_size: int, told: Progress
) -> ColumnResult:
    """Serves ``requests`` through ``column``, each followed by its floor."""
    served, floors = np.ones((2, len(requests)), dtype=np.int64)
    hit_tokens = whole_tokens = preempted = 0
    blocks = Blocks(requests)
    before = resident_bytes()
    for number, request in enumerate(requests):
        tokens = blocks.expand(request)
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        cost = column.serve(tokens)
        cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
        lost = wall > cpu + PREEMPTED_NS
        served[number] = min(cost.ns, cpu) if lost else cost.ns
        floors[number] = floor_ns(tokens, cost, page_size)
        hit_tokens += cost.hit_tokens
        whole_tokens += cost.hit_tokens + cost.new_tokens
        preempted += lost
        told(number + 1, len(requests))
    grown = resident_bytes() - before
    times, floor = _times(served), _times(floors)
    return ColumnResult(
        name=name,
        times=times,
        floor=floor,
        ratio_p50=times.p50_us / floor.p50_us,
        ratio_mean=times.mean_us / floor.mean_us,
        hit_rate=hit_tokens / max(whole_tokens, 1),
        bytes_per_token=max(grown, 0) / max(column.cached_tokens, 1),
        preempted=preempted,
    )


def resident_bytes() -> int:
    """Resident memory of this process after everything free was given back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def _times(ns: Nanoseconds) -> Times:
    p50, p99 = np.percentile(ns, [50, 99]).tolist()
    return Times(p50 / NS_PER_US, p99 / NS_PER_US, float(ns.mean()) / NS_PER_US)


def table(result: RadixResult) -> str:
    """``result`` for people."""
    lines = [
        f"{result.trace}: {result.requests} requests, {result.tokens} tokens; "
        f"capacity {result.capacity_tokens} tokens, page {result.page_size}"
    ]
    for column in result.columns:
        times, floor = column.times, column.floor
        lines += [
            f"{column.name:8} p50 {times.p50_us:6.1f} us  p99 {times.p99_us:6.1f}  "
            f"mean {times.mean_us:6.1f}  hit {column.hit_rate:.2%}  "
            f"{column.bytes_per_token:.2f} bytes per token  {column.preempted} preempted",
            f"{'floor':8} p50 {floor.p50_us:6.1f} us  p99 {floor.p99_us:6.1f}  "
            f"mean {floor.mean_us:6.1f}  ratio p50 {column.ratio_p50:.2f}  "
            f"mean {column.ratio_mean:.2f}",
        ]
    return "\n".join(lines)


def main() -> None:
    """The command line of this file alone."""
    parser = argparse.ArgumentParser(prog="python -m kvd.bench.radix")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--capacity", type=int, default=2_000_000, help="tokens")
    parser.add_argument("--page", type=int, default=16, help="tokens per page")
    parser.add_argument("--limit", type=int, help="requests; all by default")
    asked = parser.parse_args()
    result = run(
        asked.trace,
        capacity_tokens=asked.capacity,
        page_size=asked.page,
        limit=asked.limit,
        progress=lambda done, total: None,
    )
    sys.stdout.write(table(result) + "\n")


if __name__ == "__main__":
    main()
