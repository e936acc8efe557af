"""``benchmarks radix``: the prefix index on a recorded load, against the bytes it has to move.

Replays a trace, one request at a time, through the bare tree and through a whole node, which take
turns to be the first of the two. Of the tree only match, lock, evict when the pool lacks pages,
extend, relock and unlock are timed; of the node ``Node.step`` of a lease and of its commit and
release, without sockets, effects dropped.

Every request is measured against its own floor, right after it: the work no index can avoid, which
is to compare the hit twice (once to find it, once to insert behind it) and to copy the tokens and
page ids that are new. So ratios mean the same on a quiet machine and on a busy one.

Memory is measured before that, each index by itself, while nothing is timed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec
import numpy as np

from benchmarks.harness import benchmark
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most, figure
from kvd.core.cache.eviction import Policy, eviction_order
from kvd.core.cache.pages import PagePool
from kvd.core.cache.radix import RadixTree
from kvd.core.effects import AnswerEngine, Step
from kvd.core.inputs import ClientJoined, FromClient
from kvd.core.layout.spec import Component, PageOrder, PoolSpec, Raw
from kvd.core.node import NodeState
from kvd.core.settings import Settings
from kvd.trace import Blocks, TraceRequest, read_trace
from kvd.types import ID_BYTES, Incarnation, NodeName, Tokens, count
from kvd.wire import client

if TYPE_CHECKING:
    from kvd.bench.report import Measured, Told

    Nanoseconds = np.ndarray[tuple[int], np.dtype[np.int64]]

NAMESPACE: Final = "bench"
SESSION: Final = 1
NS_PER_US: Final = 1000
PREEMPTED_NS: Final = 20 * NS_PER_US
"""Wall time this far above CPU time means that somebody else had the core meanwhile."""

SMALL_TOKENS: Final = 2_000_000
"""Goals are of two sizes: this one with pages of 16 tokens, and ten times as much with 64."""

STEPS: Final = 100
"""How often progress is told per index."""


class RequestCost(msgspec.Struct, frozen=True):
    """What one request took: its time, and the bytes the floor is measured on."""

    ns: int
    hit_tokens: int
    new_tokens: int


class BareTree:
    """The bare tree and a page pool; nothing is locked between requests."""

    def __init__(self, capacity_tokens: int, page_size: int) -> None:
        self._page_size = page_size
        self._tree = RadixTree(page_size, eviction_order(Policy.LRU))
        self._pool = PagePool("bench", capacity_tokens // page_size + 1)

    @property
    def cached_tokens(self) -> int:
        """Tokens in the tree."""
        return self._tree.cached_pages * self._page_size

    def serve(self, tokens: Tokens) -> RequestCost:
        """One prompt: match and lock, make room, extend and unlock; only these calls are timed."""
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
        return RequestCost(ns, hit, n_new * self._page_size)


class WholeNode:
    """A node with one engine attached; pages, owners and events included."""

    def __init__(self, capacity_tokens: int, page_size: int) -> None:
        component = Component(name="kv", layers=1, layout=Raw(page_size), page_size=page_size)
        pages = capacity_tokens // page_size + 1
        spec = PoolSpec(
            name="bench",
            family="mha",
            order=PageOrder.PAGE_FIRST,
            components=(component,),
            pages=(pages,),
        )
        self._page_size = page_size
        self._at_s = 0.0
        self._node = NodeState(Settings(NodeName("bench"), Incarnation("0" * 32), spec), self._at_s)
        self._node.step(ClientJoined(at_s=self._at_s, session=SESSION, name="bench", pid=1))

    @property
    def cached_tokens(self) -> int:
        """Tokens in the tree."""
        return self._node.leases.tree.cached_pages * self._page_size

    def serve(self, tokens: Tokens) -> RequestCost:
        """Lease; then commit and release."""
        self._at_s += 1.0
        node, clock = self._node, time.perf_counter_ns
        opening = FromClient(
            at_s=self._at_s, session=SESSION, message=client.OpenLease(1, NAMESPACE), tokens=tokens
        )
        start = clock()
        opened = node.step(opening)
        ns = clock() - start
        leased = _answer(opened)
        assert isinstance(leased, client.Leased), leased
        ending = FromClient(self._at_s, SESSION, client.CommitAndRelease(2, leased.lease))
        start = clock()
        ended = node.step(ending)
        ns += clock() - start
        assert isinstance(_answer(ended), client.Done)
        n_new = count(tokens) // self._page_size * self._page_size - leased.prefix_tokens
        return RequestCost(ns, leased.prefix_tokens, n_new)


KINDS: Final[dict[str, type[BareTree | WholeNode]]] = {"tree": BareTree, "node": WholeNode}


def _answer(step: Step) -> client.Reply:
    (effect,) = step.effects
    assert isinstance(effect, AnswerEngine)
    return effect.message


def floor_ns(tokens: Tokens, cost: RequestCost, page_size: int) -> int:
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


class TimedIndex:
    """One of the two, and what every request took of it."""

    def __init__(self, name: str, index: BareTree | WholeNode, n_requests: int) -> None:
        self._name = name
        self._index = index
        self._served, self._floors = np.ones((2, n_requests), dtype=np.int64)
        self._hit_tokens = 0
        self._whole_tokens = 0
        self._preempted = 0

    def serve(self, number: int, tokens: Tokens, page_size: int) -> None:
        """One request, and right after it its floor."""
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        cost = self._index.serve(tokens)
        cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
        lost = wall > cpu + PREEMPTED_NS
        self._served[number] = min(cost.ns, cpu) if lost else cost.ns
        cpu = time.thread_time_ns()
        floor = floor_ns(tokens, cost, page_size)
        self._floors[number] = min(floor, time.thread_time_ns() - cpu)
        self._hit_tokens += cost.hit_tokens
        self._whole_tokens += cost.hit_tokens + cost.new_tokens
        self._preempted += lost

    def row(self) -> Measured:
        """What the table shows of this index."""
        times, floor = _times_us("", self._served), _times_us("floor_", self._floors)
        return {
            "index": self._name,
            **times,
            **floor,
            "ratio_p50": times["p50_us"] / floor["floor_p50_us"],
            "ratio_mean": times["mean_us"] / floor["floor_mean_us"],
            "hit_rate": self._hit_tokens / max(self._whole_tokens, 1),
            "preempted": self._preempted,
        }


def replay(
    indices: tuple[TimedIndex, TimedIndex],
    requests: list[TraceRequest],
    *,
    page_size: int,
    told: Told,
) -> None:
    """Serves each request by both, the other one first each time."""
    blocks = Blocks(requests)
    for number, request in enumerate(requests):
        if number * STEPS // len(requests) != (number - 1) * STEPS // len(requests):
            told("time")
        tokens = blocks.expand(request)
        for index in indices[:: 1 if number % 2 else -1]:
            index.serve(number, tokens, page_size)


def bytes_per_token(index: BareTree | WholeNode, requests: list[TraceRequest]) -> float:
    """Memory that a cached token takes, after all requests."""
    blocks = Blocks(requests)
    before = resident_bytes()
    for request in requests:
        index.serve(blocks.expand(request))
    return max(resident_bytes() - before, 0) / max(index.cached_tokens, 1)


def resident_bytes() -> int:
    """Resident memory of this process after everything free was given back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def _times_us(name: str, ns: Nanoseconds) -> dict[str, float]:
    p50, p99 = np.percentile(ns, [50, 99]).tolist()
    found = {"p50_us": p50, "p99_us": p99, "mean_us": float(ns.mean())}
    return {f"{name}{key}": value / NS_PER_US for key, value in found.items()}


COLUMNS: Final = (
    ResultColumn("index", "index"),
    ResultColumn("p50_us", "p50 us", ".1f"),
    ResultColumn("p99_us", "p99", ".1f"),
    ResultColumn("mean_us", "mean", ".1f"),
    ResultColumn("floor_p50_us", "floor p50", ".1f"),
    ResultColumn("floor_p99_us", "p99", ".1f"),
    ResultColumn("floor_mean_us", "mean", ".1f"),
    ResultColumn("ratio_p50", "p50/floor", ".2f"),
    ResultColumn("ratio_mean", "mean/floor", ".2f"),
    ResultColumn("hit_rate", "hit rate", ".2%"),
    ResultColumn("bytes_per_token", "bytes/token", ".2f"),
    ResultColumn("preempted", "preempted"),
)


def run(told: Told, *, trace: Path, capacity: int, page: int, limit: int | None) -> BenchmarkResult:
    """The prefix tree, and a whole node around it, on a recorded load."""
    requests = read_trace(trace, limit)
    sizes = []
    for name, make in KINDS.items():
        told(f"memory of the {name}")
        sizes.append(bytes_per_token(make(capacity, page), requests))
    indices = [
        TimedIndex(name, make(capacity, page), len(requests)) for name, make in KINDS.items()
    ]
    replay((indices[0], indices[1]), requests, page_size=page, told=told)
    tree, node = (
        {**index.row(), "bytes_per_token": size} for index, size in zip(indices, sizes, strict=True)
    )
    tokens = sum(request.input_length for request in requests)
    is_small = capacity <= SMALL_TOKENS
    over = {key: figure(node, key) / figure(tree, key) for key in ("p50_us", "mean_us")}
    return BenchmarkResult(
        tables=(
            ResultTable(
                title=f"{trace.name}: {len(requests)} requests, {tokens} tokens; "
                f"capacity {capacity} tokens, page {page}",
                columns=COLUMNS,
                rows=(tree, node),
            ),
        ),
        goals=(
            at_most("tree p50 / floor", 2.0 if is_small else 3.5, figure(tree, "ratio_p50")),
            at_most("tree, bytes per cached token", 5.0, figure(tree, "bytes_per_token")),
            at_most("node p50 in us", 12 if is_small else 20, figure(node, "p50_us")),
            at_most("node p50 / tree", 2.5, over["p50_us"]),
            at_most("node mean / tree", 3.0, over["mean_us"]),
        ),
        notes=(
            "tree: match, lock, evict, extend, unlock; node: Node.step of lease and "
            "commit-and-release, with pages, leases, owners and events",
            "floor: comparing the hit twice and copying what is new, for the same requests",
            "each request is served by both, in alternating order, and followed by its floor",
            "bytes/token: growth of resident memory over the tokens cached at the end, of each "
            "by itself; preempted: requests that lost the core on the way, and are charged their "
            "CPU time",
        ),
    )


command = benchmark(
    "radix",
    run,
    click.option(
        "--trace",
        required=True,
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="A file in Mooncake's format.",
    ),
    click.option("--capacity", default=2_000_000, show_default=True, help="Tokens in the pool."),
    click.option("--page", default=16, show_default=True, help="Tokens per page."),
    click.option("--limit", type=int, help="Requests to replay; all by default."),
)
