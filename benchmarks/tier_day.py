"""``benchmarks tier_day``: a load's prefixes through the disk of kvd, and through those of others.

Each request is looked up, what is there of its first blocks is read, and the rest is written; one
after the other, no engine computes, and no pool is in front. kvd is its index of a tier and its
storage process, LMCache its adapters with its own controller of evictions, vLLM the ``fs`` tier of
its offloading, in the processes of ``tier_peers``. Who can be bounded is: by the same bytes.

An hour of a load is a small part of a day. It is repeated ``--times``, each time by others: with
blocks of their own.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import click
import numpy as np

from benchmarks.disk_tier import NAMESPACE, TIER, TierSite
from benchmarks.harness import benchmark
from benchmarks.peer_calls import fill_named
from benchmarks.tier_peers import PEERS, DrivenDisk, KvdProcessors, MoveTime, python_of
from benchmarks.tier_trace import TRACE_OPTION, block_paths, made_trace, reuse_of
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_least, figure
from kvd.core.effects import Demote, Promote
from kvd.core.tiers.index import TierIndex
from kvd.core.tiers.keys import KEY_BYTES
from kvd.storage.orders import DirectoryPlan
from kvd.storage.sizes import object_bytes
from kvd.trace import BLOCK_TOKENS, TraceRequest, read_trace
from kvd.types import Pages, pack_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvd.bench.report import Measured, Told

GB: Final = 1e9
BOUNDED: Final = "LMCache fs_native"
ENDLESS: Final = 2**40
"""Blocks of a tree that forgets none."""
OTHERS: Final = 2**40
"""Between the blocks of those who repeat a load."""

COLUMNS: Final = (
    ResultColumn("tier", "tier"),
    ResultColumn("bound", "bound"),
    ResultColumn("found", "found", ".2%"),
    ResultColumn("written", "written GB", ".2f"),
    ResultColumn("read", "read GB", ".2f"),
    ResultColumn("disk", "on disk GB", ".2f"),
    ResultColumn("speed", "GB/s", ".3f"),
    ResultColumn("cpu", "CPU s/GB", ".2f"),
    ResultColumn("wrong", "wrong"),
)
NOTES: Final = (
    "found: of the tokens of all prompts; on disk: what the directory takes in the end; "
    "GB/s and CPU: of what was written and read, over the time of the calls; files are in the "
    "page cache where nobody opens them past it",
    "LMCache's controller evicts a fifth when four fifths are full, and looks each second: here "
    "each second of the load's clock. LMCache's fs and vLLM's have no bound: what they find is "
    "what lies there for ever",
    "wrong: requests of which a page that was read was not what belongs there",
)


class ServingDisk(Protocol):
    """What finds, reads and writes the blocks of a request."""

    def serve(self, second: float, keys: Sequence[bytes]) -> MoveTime:
        """``second`` is of the load's clock."""


class KvdTier:
    """kvd's storage process, under the index that the core keeps of a tier."""

    def __init__(self, site: TierSite, run: asyncio.Runner, capacity: int) -> None:
        self._site = site
        self._run = run
        self._index = TierIndex(capacity)
        shape = (site.n_pages + 1, site.page_bytes)
        memory = (ctypes.c_uint8 * (shape[0] * shape[1])).from_address(site.note.address)
        rows = np.ctypeslib.as_array(memory).reshape(shape)
        self._half = site.n_pages // 2
        # Page 0 is nobody's; as in the memory of a peer: what is written, and what is read.
        self._source, self._target = rows[1 : self._half + 1], rows[self._half + 1 :]
        self._processors = KvdProcessors(site)

    def serve(self, second: float, keys: Sequence[bytes]) -> MoveTime:
        """One request."""
        del second
        fill_named(self._source, self._target, keys)
        self._processors.begin()
        n_found, took_s = self._run.run(self._moved([key.ljust(KEY_BYTES, b"\0") for key in keys]))
        spent_s = self._processors.spent_s()
        is_right = np.array_equal(self._source[:n_found], self._target[:n_found])
        return MoveTime(took_s, spent_s, n_found, is_right=is_right)

    async def _moved(self, keys: list[bytes]) -> tuple[int, float]:
        loop, site, index = asyncio.get_running_loop(), self._site, self._index
        began_s = loop.time()
        n_found = index.leading(NAMESPACE, keys)
        if n_found:
            index.add(NAMESPACE, keys[:n_found])
            await site.carried_out(Promote, b"".join(keys[:n_found]), self._pages(n_found, half=1))
        new = keys[n_found:]
        if new:
            for gone in index.reserve(len(new)).values():
                site.drop_objects(gone)
            await site.carried_out(Demote, b"".join(new), self._pages(len(new), first=n_found))
            index.release(len(new))
            index.add(NAMESPACE, new, keys[n_found - 1] if n_found else b"")
        return n_found, loop.time() - began_s

    def _pages(self, n_pages: int, first: int = 0, half: int = 0) -> Pages:
        start = 1 + half * self._half + first
        return Pages(pack_ids(list(range(start, start + n_pages))))


class ReplayedLoad(NamedTuple):
    """What goes through each tier."""

    requests: list[tuple[float, list[int]]]
    tokens: int
    """Of all prompts."""
    page_bytes: int
    bound: int
    """Bytes."""

    @property
    def shape(self) -> tuple[int, int]:
        """Blocks of the longest request, and bytes of one."""
        return max(len(blocks) for _, blocks in self.requests), self.page_bytes


def repeated(requests: Sequence[TraceRequest], times: int) -> Iterator[tuple[float, list[int]]]:
    """The second and the whole blocks of each request, by ``times`` others."""
    span_ms = requests[-1].timestamp + 1
    for time in range(times):
        for request in requests:
            blocks = request.hash_ids[: request.input_length // BLOCK_TOKENS]
            yield (
                (time * span_ms + request.timestamp) / 1000,
                [OTHERS * time + block for block in blocks],
            )


def measure(disk: ServingDisk, load: ReplayedLoad) -> Measured:
    """What came of it."""
    page_bytes = load.page_bytes
    found = written = wrong = 0
    took_s = spent_s = 0.0
    for second, blocks in load.requests:
        if not blocks:
            continue
        time = disk.serve(second, list(block_paths(blocks)))
        found += time.found
        written += len(blocks) - time.found
        wrong += not time.is_right
        took_s += time.s
        spent_s += time.processor_s
    moved_gb = (found + written) * page_bytes / GB
    return {
        "found": found * BLOCK_TOKENS / load.tokens,
        "written": written * page_bytes / GB,
        "read": found * page_bytes / GB,
        "speed": moved_gb / took_s,
        "cpu": spent_s / moved_gb,
        "wrong": wrong,
    }


def taken_gb(directory: Path) -> float:
    """What its files take, however they are laid out."""
    os.sync()
    files = [path for path in directory.rglob("*") if path.is_file()]
    return sum(512 * path.stat().st_blocks for path in files) / GB


def of_kvd(load: ReplayedLoad, base: Path) -> Measured:
    """Its row."""
    blocks, page_bytes = load.shape
    with asyncio.Runner() as runner:
        site = TierSite(DirectoryPlan(TIER, str(base)), 2 * blocks, page_bytes)
        runner.run(site.start())
        tier = KvdTier(site, runner, load.bound // object_bytes(page_bytes))
        found = measure(tier, load)
        runner.run(site.process.stop())
    return {"tier": "kvd", "bound": f"{load.bound / GB:.2f} GB", **found, "disk": taken_gb(base)}


def of_peer(number: int, python: str, load: ReplayedLoad, base: Path) -> Measured:
    """The row of one of ``PEERS``."""
    tier, library, spec = PEERS[number]
    bound: dict[str, object] = {}
    if tier == BOUNDED:
        policy = {"eviction_policy": "LRU"}
        bound = {"max_capacity_gb": load.bound / 2**30, "eviction": policy}
    disk = DrivenDisk(python, library, {**spec, **bound, "base_path": str(base)}, load.shape)
    try:
        found = measure(disk, load)
    finally:
        disk.close()
    said = f"{load.bound / GB:.2f} GB" if bound else "none"
    return {"tier": tier, "bound": said, **found, "disk": taken_gb(base)}


def run(
    told: Told,
    *,
    trace: Path | None,
    limit: int,
    times: int,
    kib: int,
    disk_tokens: int,
    directory: str | None,
) -> BenchmarkResult:
    """The same load through all tiers that are here, one after the other."""
    page_bytes, bound = kib << 10, disk_tokens // BLOCK_TOKENS
    once = made_trace(limit) if trace is None else read_trace(trace, limit)
    load = ReplayedLoad(
        requests=list(repeated(once, times)),
        tokens=times * sum(request.input_length for request in once),
        page_bytes=page_bytes,
        bound=bound * page_bytes,
    )
    notes = list(NOTES)
    with tempfile.TemporaryDirectory(prefix="kvd-bench-", dir=directory) as name:
        base = Path(name) / "tier"
        told("kvd")
        rows = [of_kvd(load, base)]
        for number, (tier, library, _) in enumerate(PEERS):
            shutil.rmtree(base)
            base.mkdir()
            python, variable = python_of(library)
            if not python:
                notes.append(f"{tier} was left out: {variable} names no environment that has it")
                continue
            told(tier)
            rows.append(of_peer(number, python, load, base))
    if times == 1:
        small, large = reuse_of(once, bound), reuse_of(once, ENDLESS)
        notes.append(f"a perfect tree finds {small:.2%} within the bound, and {large:.2%} without")
    hours = times * once[-1].timestamp / 3_600_000
    what = "a load that was made" if trace is None else f"{hours:.2f} hours of {trace.name}"
    title = f"{len(load.requests)} requests, {what}; blocks of {BLOCK_TOKENS} tokens in {kib} KiB"
    return BenchmarkResult(
        tables=(ResultTable(title=title, columns=COLUMNS, rows=tuple(rows)),),
        goals=tuple(
            at_least(f"found, over {row['tier']} with the same bound", 1.0, _ratio(rows[0], row))
            for row in rows[1:]
            if row["bound"] != "none"
        ),
        notes=tuple(notes),
    )


def _ratio(ours: Measured, theirs: Measured) -> float:
    return figure(ours, "found") / figure(theirs, "found")


command = benchmark(
    "tier_day",
    run,
    TRACE_OPTION,
    click.option("--limit", default=1500, show_default=True, help="Requests of it."),
    click.option("--times", default=1, show_default=True, help="How often, by others each time."),
    click.option("--kib", default=64, show_default=True, help="Of a block on the disk."),
    click.option(
        "--disk-tokens", default=2_000_000, show_default=True, help="The bound, without heads."
    ),
    click.option("--directory", help="On the disk to measure; the usual temporary one if not."),
)
