"""Requests of a trace through one index, each against the bytes that it has to move.

Every request is measured against its own floor, right after it: the work no index can avoid, which
is to compare the hit twice (once to find it, once to insert behind it) and to copy the tokens and
page ids that are new. So the ratio means the same on a quiet machine and on a busy one.

A ``Column`` is one thing that serves requests: the bare tree (``radix``), the whole node
(``nodestep``).
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from kvd.trace import Blocks, TraceRequest
from kvd.types import ID_BYTES, Tokens

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
