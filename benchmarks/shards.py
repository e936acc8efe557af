"""``benchmarks shards``: pages between pools that are sharded differently, beside raw NIXL.

Two real transfer processes of this host, without daemons. A case is what each side keeps of a model
of a Llama-8B shape; a repetition writes the pages of all lanes of the case through kvd, without
sums and with them, then the same pieces by descriptors only, then as many bytes of whole pages by
raw NIXL, then the next repetition: whatever else the machine does falls on all of them.

Descriptors only and raw NIXL are written by this process into the same receiver: descriptors are
built before the clock starts, and it spins until they are done.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import statistics
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

import click
import msgspec
import numpy as np

from benchmarks.harness import benchmark
from kvd.bench.memory import busy_s
from kvd.bench.raw_nixl import SCRATCH_BYTES, connected_sender
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_least, figure
from kvd.core.effects import LoadAgent, Post, Verify
from kvd.core.inputs import AgentLoaded, PostDone, Verified
from kvd.core.layout.geometry import Geometry, geometry
from kvd.core.layout.seal import Seal
from kvd.core.layout.shards import Shard, ShardRoute, Straight, lanes, tp_shards
from kvd.core.layout.spec import Component, Mha, PageOrder, shard_region
from kvd.transfer.copies import mapped_area
from kvd.transfer.mapping import map_region, map_scratch
from kvd.transfer.metadata import unpack
from kvd.transfer.nixl import Binding, MemorySpan
from kvd.transfer.orders import Collapsed, RegionPlan
from kvd.transfer.plans import direct, found
from kvd.transfer.process import ReportQueue, TransferProcess, TransportDown
from kvd.types import Pages
from kvd.wire.peer import Integrity

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvd.bench.report import Measured, Told
    from kvd.transfer.copies import Area
    from kvd.transfer.descriptors import Writes
    from kvd.transfer.metadata import Metadata

LAYERS: Final = 32
HEADS: Final = 8
DIM: Final = 128
PAGE_TOKENS: Final = 16
PAGE_BYTES: Final = 2 * 2**20
KV, WHOLE = "kv", "whole"
RECEIVER: Final = "receiver"
GENERATION: Final = 1
IN_FLIGHT: Final = 4
CALMEST: Final = 4
"""One repetition in so many is told of beside all: those that waited for cores least."""
LIMIT_S: Final = 60.0
GIGA: Final = 1e9
MODEL: Final = Shard(first_layer=0, end_layer=LAYERS, first_head=0, end_head=HEADS)


class ShardCase(NamedTuple):
    """What both sides keep; ``is_packed``: its pieces are packed before they travel."""

    name: str
    ours: tuple[Shard, ...]
    theirs: tuple[Shard, ...]
    is_packed: bool


def _tp(size: int) -> tuple[Shard, ...]:
    return tp_shards(HEADS, size, (0, size), (0, LAYERS))


CASES: Final = (
    ShardCase("1 to 1", _tp(1), _tp(1), is_packed=False),
    ShardCase("2 to 2", _tp(2), _tp(2), is_packed=False),
    ShardCase("1 to 2", _tp(1), _tp(2), is_packed=True),
    ShardCase("2 to 1", _tp(2), _tp(1), is_packed=True),
    ShardCase("2 to 4", _tp(2), _tp(4), is_packed=True),
    ShardCase("4 to 2", _tp(4), _tp(2), is_packed=True),
    ShardCase(
        "second stage of 2 to 1",
        (Shard(first_layer=16, end_layer=32, first_head=0, end_head=HEADS),),
        (MODEL,),
        is_packed=False,
    ),
    ShardCase("second rank of 2 to 1", _tp(2)[1:], (MODEL,), is_packed=False),
)


class _End:
    """One transfer process over the shards of a case, and what it reports."""

    def __init__(self, shapes: dict[str, Geometry], environment: dict[str, str]) -> None:
        self.regions: list[RegionPlan] = []
        for name, shape in shapes.items():
            descriptor = os.memfd_create(f"kvd-bench-{name}", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, -(-shape.total_bytes // PAGE_BYTES) * PAGE_BYTES)
            self.regions.append(RegionPlan(name, descriptor, shape))
        name = f"bench-{os.getpid()}-{id(self):x}"
        self.process = TransferProcess(name, self.regions, environment=environment)
        self.reports = ReportQueue()
        self.metadata = b""

    async def start(self) -> None:
        """Return when it serves and its memory is in huge pages, or will not be."""
        self.metadata = (await self.reports.start(self.process)).metadata
        for _ in self.regions:
            await self.reports.next(Collapsed)

    async def stop(self) -> None:
        """End the process, then close its memory."""
        await self.process.stop()
        for region in self.regions:
            os.close(region.fd)

    def fill(self, seed: int) -> None:
        """Random bytes everywhere."""
        random = np.random.default_rng(seed)
        for region in self.regions:
            with mmap.mmap(region.fd, 0) as memory:
                memory[:] = random.bytes(len(memory))


class _Bare:
    """What this process itself writes to the receiver, from the sender's memory."""

    def __init__(self, sender: _End, peer: Metadata) -> None:
        notes = {region.name: map_region(region) for region in sender.regions}
        self._ours: dict[str, Area] = {name: mapped_area(note) for name, note in notes.items()}
        self._theirs = {note.name: note for note in peer.regions}
        spans = [MemorySpan(note.address, note.region_bytes) for note in notes.values()]
        scratch = map_scratch(SCRATCH_BYTES)
        name = f"bench-bare-{os.getpid()}-{id(self):x}"
        spans.append(MemorySpan(scratch, SCRATCH_BYTES))
        self._sender = connected_sender(Binding(), name, spans, scratch, peer)

    def rows(self, order: Post) -> Writes:
        """The descriptors of a post from where its pages lie.

        Raises:
            TransportDown: it would be refused.
        """
        regions = found(order, self._ours, self._theirs)
        if isinstance(regions, str):
            raise TransportDown(regions)
        return direct(order, regions)

    def write(self, plans: list[Writes]) -> float:
        """The seconds that it takes to write them all."""
        flying: list[int] = []
        began_s = time.perf_counter()
        for plan in plans:
            for low, high in zip(plan.bounds, plan.bounds[1:], strict=False):
                if len(flying) == IN_FLIGHT:
                    self._await(flying.pop(0))
                handle = self._sender.post(plan.source[low:high], plan.destination[low:high])
                flying.append(handle)
        for handle in flying:
            self._await(handle)
        return time.perf_counter() - began_s

    def _await(self, handle: int) -> None:
        while not self._sender.step(handle):
            pass

    def close(self) -> None:
        """Destroy the agent."""
        self._sender.destroy()


class _Running(NamedTuple):
    """Both ends, and this process beside the first."""

    sender: _End
    receiver: _End
    bare: _Bare


def _shapes(pages: int, side: int) -> dict[str, Geometry]:
    """Every shard of every case, and whole pages, of one side."""
    kept = {case.name: (case.ours, case.theirs)[side] for case in CASES}
    return {
        shard_region(name, index): _memory(shard, pages)
        for name, shards in {**kept, WHOLE: (MODEL,)}.items()
        for index, shard in enumerate(shards)
    }


def _memory(shard: Shard, pages: int) -> Geometry:
    heads, layers = shard.end_head - shard.first_head, shard.end_layer - shard.first_layer
    component = Component(
        name=KV,
        layers=layers,
        layout=Mha(heads=heads, k_dim=DIM, v_dim=DIM, dtype="bfloat16"),
        page_size=PAGE_TOKENS,
    )
    return geometry(component, pages=pages + 1, order=PageOrder.PAGE_FIRST)


@contextlib.asynccontextmanager
async def _running(pages: int, seed: int, environment: dict[str, str]) -> AsyncIterator[_Running]:
    async with contextlib.AsyncExitStack() as stack:
        sender, receiver = (_End(_shapes(pages, side), environment) for side in (0, 1))
        sender.fill(seed)
        for end in (sender, receiver):
            stack.push_async_callback(end.stop)
            await end.start()
        sender.process.order(LoadAgent(RECEIVER, GENERATION, receiver.metadata))
        await sender.reports.next(AgentLoaded)
        bare = _Bare(sender, unpack(receiver.metadata))
        stack.callback(bare.close)
        yield _Running(sender, receiver, bare)


async def _write(up: _Running, posts: list[Post]) -> tuple[float, list[bytes]]:
    """The seconds from the first order to the last answer, and the sums of each post."""
    began_s = time.perf_counter()
    for post in posts:
        up.sender.process.order(post)
    done = [await up.sender.reports.next(PostDone) for _ in posts]
    took_s = time.perf_counter() - began_s
    return took_s, [report.sums for report in sorted(done, key=lambda report: report.post)]


async def _measure_case(up: _Running, case: ShardCase, orders: _Orders, repeats: int) -> Measured:
    """One row, of so many repetitions.

    Raises:
        TransportDown: what arrived is not what was sent.
    """
    seal = Seal(integrity=Integrity.FULL, key=b"bench of shards!", first=0, end=orders.pages)
    sent = lanes(case.ours, case.theirs)
    posts = [orders.post(case.name, number, lane) for number, lane in enumerate(sent)]
    sealed = [msgspec.structs.replace(post, seal=seal) for post in posts]
    pieces = [up.bare.rows(post) for post in posts]
    whole = up.bare.rows(orders.post(WHOLE, 0, None))
    moved_bytes, whole_bytes = sum(sum(rows.sizes) for rows in pieces), sum(whole.sizes)
    took: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        before_s, waited_s = busy_s(up.sender.process.pid), _waited_s(up.sender.process.pid)
        took_s, _ = await _write(up, posts)
        took["kvd"].append(took_s / moved_bytes)
        took["cpu"].append((busy_s(up.sender.process.pid) - before_s) / moved_bytes)
        took["waited"].append((_waited_s(up.sender.process.pid) - waited_s) / took_s)
        took["with_sums"].append((await _write(up, sealed))[0] / moved_bytes)
        took["descriptors"].append(up.bare.write(pieces) / moved_bytes)
        before_s, waited_s = time.thread_time(), _waited_s(os.getpid())
        took_s = up.bare.write([whole])
        took["raw"].append(took_s / whole_bytes)
        took["raw_cpu"].append((time.thread_time() - before_s) / whole_bytes)
        took["waited"][-1] += (_waited_s(os.getpid()) - waited_s) / took_s
    _, sums = await _write(up, sealed)
    for lane, post, those in zip(sent, sealed, sums, strict=True):
        await _verify(up.receiver, case.name, lane, post, those)
    middle = {name: statistics.median(each) for name, each in took.items()}
    n_rows = sum(len(rows.source) for rows in pieces)
    ratios = [raw / mine for mine, raw in zip(took["kvd"], took["raw"], strict=True)]
    calmest = np.argsort(took["waited"])[: -(-repeats // CALMEST)]
    return {
        "shards": case.name,
        "is_packed": case.is_packed,
        "moved_bytes": moved_bytes,
        "moved_mib": moved_bytes / 2**20,
        "pieces": n_rows,
        "piece_kib": moved_bytes / n_rows / 2**10,
        **{name: 1 / middle[name] / GIGA for name in ("kvd", "with_sums", "descriptors", "raw")},
        **{name: middle[name] * GIGA for name in ("cpu", "raw_cpu")},
        "to_raw": statistics.median(ratios),
        "waited": middle["waited"],
        "calm_waited": statistics.median(took["waited"][at] for at in calmest),
        "calm_to_raw": statistics.median(ratios[at] for at in calmest),
    }


def _waited_s(pid: int) -> float:
    """Seconds that threads of a process have waited for a core, all together."""
    total_ns = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/schedstat", encoding="ascii") as line:
            total_ns += int(line.read().split()[1])
    return total_ns / GIGA


async def _verify(receiver: _End, name: str, lane: ShardRoute, post: Post, sums: bytes) -> None:
    """Have the receiver sum what the last post of a lane has written.

    Raises:
        TransportDown: it is something else.
    """
    receiver.process.order(
        Verify(
            ticket=0,
            component=name,
            seal=post.seal,
            pages=post.destination,
            sums=sums,
            shard=lane.peer_shard,
            window=lane.window,
        )
    )
    found = await receiver.reports.next(Verified)
    if found.bad_pages or found.why:
        raise TransportDown(f"{name}: pages {found.bad_pages} arrived changed {found.why}".strip())


class _Orders(NamedTuple):
    """What is written: so many pages, from and to places in random order."""

    pages: int
    seed: int

    def post(self, name: str, number: int, lane: ShardRoute | None) -> Post:
        """All pages of a lane, or of whole pages."""
        random = np.random.default_rng(self.seed)
        source, destination = (
            Pages(random.permutation(np.arange(1, self.pages + 1, dtype="<i4")).tobytes())
            for _ in range(2)
        )
        return Post(
            post=number,
            incarnation=RECEIVER,
            generation=GENERATION,
            component=name,
            source=source,
            destination=destination,
            peer_shard=lane.peer_shard if lane else 0,
            making=lane.copies[0] if lane else Straight(),
        )


async def measure(
    pages: int, repeats: int, seed: int, environment: dict[str, str], told: Told
) -> list[Measured]:
    """Start both transfer processes and measure every case.

    Raises:
        TransportDown: one of them ended, or refused.
    """
    told("starting")
    rows = []
    async with _running(pages, seed, environment) as up:
        for case in CASES:
            told(case.name)
            async with asyncio.timeout(LIMIT_S):
                rows.append(await _measure_case(up, case, _Orders(pages, seed), repeats))
    return rows


def run(told: Told, *, pages: int, repeats: int, seed: int, tls: str) -> BenchmarkResult:
    """Pages between pools that are sharded differently, beside raw NIXL.

    Two transfer processes with pools of a Llama-8B shape (32 layers, 8 heads of 128, bfloat16, 16
    tokens a page), without daemons.
    """
    environment = {"UCX_TLS": tls} if tls else {}
    os.environ.update(environment)
    rows = tuple(asyncio.run(measure(pages, repeats, seed, environment, told)))
    title = f"{pages} pages of 2 MiB in random order; medians of {repeats}, GB/s"
    return BenchmarkResult(
        tables=(ResultTable(title=title, columns=COLUMNS, rows=rows),),
        goals=tuple(
            at_least(f"{row['shards']}: packed / raw NIXL", 0.7, figure(row, "to_raw"))
            for row in rows
            if row["is_packed"]
        ),
        notes=(
            "kvd: from the first order to the last answer of a transfer process; with sums: of "
            "every page, too",
            "cpu: of all threads of the sending process; on a busy machine it says more than times",
            "waited: how long threads wanted a core and had none, of the time of kvd and of raw, "
            "added up; calm: the quarter of the repetitions in which they waited least",
            "descriptors: the same pieces from where they lie; raw: whole pages of 2 MiB. Both "
            "written by a bare process that spins, timed without planning",
        ),
    )


COLUMNS: Final = (
    ResultColumn("shards", "shards"),
    ResultColumn("moved_mib", "MiB", ".0f"),
    ResultColumn("is_packed", "packed"),
    ResultColumn("kvd", "kvd", ".2f"),
    ResultColumn("with_sums", "with sums", ".2f"),
    ResultColumn("descriptors", "descriptors", ".2f"),
    ResultColumn("piece_kib", "of KiB", ".3g"),
    ResultColumn("raw", "raw", ".2f"),
    ResultColumn("to_raw", "kvd/raw", ".2f"),
    ResultColumn("waited", "waited", ".2f"),
    ResultColumn("calm_waited", "calm", ".2f"),
    ResultColumn("calm_to_raw", "kvd/raw", ".2f"),
    ResultColumn("cpu", "cpu s/GB", ".2f"),
    ResultColumn("raw_cpu", "raw cpu", ".2f"),
)

command = benchmark(
    "shards",
    run,
    click.option("--pages", default=32, show_default=True, help="Of 2 MiB of the model."),
    click.option("--repeats", default=15, show_default=True, help="Writes per case."),
    click.option("--seed", default=1, show_default=True, help="Of the order of pages."),
    click.option("--tls", default="", help="UCX_TLS; tcp is how bytes go between hosts."),
)
