"""What ``kvd bench shards`` measures: pages between pools that are sharded differently.

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
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec
import numpy as np

from kvd.bench.memory import busy_s
from kvd.bench.table import Goal, at_least
from kvd.core.effects import LoadAgent, Post, Verify
from kvd.core.geometry import Geometry, geometry
from kvd.core.inputs import AgentFailed, AgentLoaded, PostDone, PostFailed, Verified
from kvd.core.seal import Seal
from kvd.core.shards import Lane, Shard, Straight, lanes, tp_shards
from kvd.core.spec import Component, Mha, Order, shard_region
from kvd.transfer.copies import mapped_area
from kvd.transfer.mapping import map_region, map_scratch
from kvd.transfer.metadata import unpack
from kvd.transfer.nixl import Binding, MemorySpan, SendingAgent, TransferStep
from kvd.transfer.orders import Collapsed, Report
from kvd.transfer.plans import direct, found
from kvd.transfer.process import TransferProcess
from kvd.transfer.transport import RegionFd, TransportDown
from kvd.types import Pages
from kvd.wire.peer import Integrity

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvd.bench.table import Told
    from kvd.transfer.copies import Area
    from kvd.transfer.descriptors import Writes
    from kvd.transfer.metadata import Metadata

R = TypeVar("R", Collapsed, AgentLoaded, PostDone, Verified)

LAYERS: Final = 32
HEADS: Final = 8
DIM: Final = 128
PAGE_TOKENS: Final = 16
PAGE_BYTES: Final = 2 * 2**20
KV, WHOLE = "kv", "whole"
RECEIVER: Final = "receiver"
GENERATION: Final = 1
IN_FLIGHT: Final = 4
SCRATCH_BYTES: Final = 4096
LIMIT_S: Final = 60.0
GIGA: Final = 1e9
MODEL: Final = Shard(0, LAYERS, 0, HEADS)
WANTED: Final = 0.6


class Case(NamedTuple):
    """What both sides keep; ``is_packed``: its pieces are packed before they travel."""

    name: str
    ours: tuple[Shard, ...]
    theirs: tuple[Shard, ...]
    is_packed: bool


def _tp(size: int) -> tuple[Shard, ...]:
    return tp_shards(HEADS, size, (0, size), (0, LAYERS))


CASES: Final = (
    Case("1 to 1", _tp(1), _tp(1), is_packed=False),
    Case("2 to 2", _tp(2), _tp(2), is_packed=False),
    Case("1 to 2", _tp(1), _tp(2), is_packed=True),
    Case("2 to 1", _tp(2), _tp(1), is_packed=True),
    Case("2 to 4", _tp(2), _tp(4), is_packed=True),
    Case("4 to 2", _tp(4), _tp(2), is_packed=True),
    Case("second stage of 2 to 1", (Shard(16, 32, 0, HEADS),), (MODEL,), is_packed=False),
    Case("second rank of 2 to 1", _tp(2)[1:], (MODEL,), is_packed=False),
)


class Plan(msgspec.Struct, frozen=True):
    """How much is measured: so many pages of the model in random order, so often."""

    pages: int = 32
    repeats: int = 15
    seed: int = 1
    environment: dict[str, str] = {}


class Rates(msgspec.Struct, frozen=True):
    """Gigabytes (1e9) per second, medians; ``to_raw`` is the median of kvd / raw.

    ``cpu``, ``raw_cpu``: seconds that the sender computed for a gigabyte. Of a busy machine they
    say more than times do.
    """

    kvd: float
    with_sums: float
    descriptors: float
    raw: float
    to_raw: float
    cpu: float
    raw_cpu: float


class CaseResult(msgspec.Struct, frozen=True):
    """What one case came to; its pieces are as many stretches of memory where they lie."""

    name: str
    is_packed: bool
    moved_bytes: int
    pieces: int
    rates: Rates


class ShardsResult(msgspec.Struct, frozen=True):
    """What ``kvd bench shards`` reports."""

    plan: Plan
    cases: tuple[CaseResult, ...]
    goals: tuple[Goal, ...]


class _End:
    """One transfer process over the shards of a case, and what it reports."""

    def __init__(self, shapes: dict[str, Geometry], environment: dict[str, str]) -> None:
        self.regions: list[RegionFd] = []
        for name, shape in shapes.items():
            descriptor = os.memfd_create(f"kvd-bench-{name}", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, -(-shape.total_bytes // PAGE_BYTES) * PAGE_BYTES)
            self.regions.append(RegionFd(name, descriptor, shape))
        name = f"bench-{os.getpid()}-{id(self):x}"
        self.process = TransferProcess(name, self.regions, environment=environment)
        self.metadata = b""
        self._reports: asyncio.Queue[Report | str] = asyncio.Queue()

    async def start(self) -> None:
        """Return when it serves and its memory is in huge pages, or will not be."""
        ready = await self.process.start(self._take, self._reports.put_nowait)
        self.metadata = ready.metadata
        for _ in self.regions:
            await self.next(Collapsed)

    async def stop(self) -> None:
        """End it."""
        await self.process.stop()
        for region in self.regions:
            os.close(region.fd)

    def fill(self, seed: int) -> None:
        """Random bytes everywhere."""
        random = np.random.default_rng(seed)
        for region in self.regions:
            with mmap.mmap(region.fd, 0) as memory:
                memory[:] = random.bytes(len(memory))

    def _take(self, reports: list[Report]) -> None:
        for report in reports:
            self._reports.put_nowait(report)

    async def next(self, kind: type[R]) -> R:
        """The next report of ``kind``; a failure or the end of the process raises.

        Raises:
            TransportDown: one of these.
        """
        while True:
            report = await self._reports.get()
            if isinstance(report, kind):
                return report
            if isinstance(report, AgentFailed | PostFailed):
                raise TransportDown(report.why)
            if isinstance(report, str):
                raise TransportDown(report)


class _Bare:
    """What this process itself writes to the receiver, from the sender's memory."""

    def __init__(self, sender: _End, peer: Metadata) -> None:
        notes = {region.name: map_region(region.plan()) for region in sender.regions}
        self._ours: dict[str, Area] = {name: mapped_area(note) for name, note in notes.items()}
        self._theirs = {note.name: note for note in peer.regions}
        spans = [MemorySpan(note.address, note.region_bytes) for note in notes.values()]
        scratch = map_scratch(SCRATCH_BYTES)
        name = f"bench-bare-{os.getpid()}-{id(self):x}"
        spans.append(MemorySpan(scratch, SCRATCH_BYTES))
        self._sender = SendingAgent(Binding(), name, spans=spans, peer=peer)
        one = np.array([[scratch, SCRATCH_BYTES, 0]], np.uint64)
        there = np.array([[peer.scratch, SCRATCH_BYTES, 0]], np.uint64)
        self._await(self._sender.post(one, there))

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
        while self._sender.step(handle) is TransferStep.RUNNING:
            pass

    def close(self) -> None:
        """Destroy the agent."""
        self._sender.destroy()


class _Running(NamedTuple):
    """Both ends, and this process beside the first."""

    sender: _End
    receiver: _End
    bare: _Bare


def _shapes(plan: Plan, side: int) -> dict[str, Geometry]:
    """Every shard of every case, and whole pages, of one side."""
    kept = {case.name: (case.ours, case.theirs)[side] for case in CASES}
    return {
        shard_region(name, index): _memory(shard, plan.pages)
        for name, shards in {**kept, WHOLE: (MODEL,)}.items()
        for index, shard in enumerate(shards)
    }


def _memory(shard: Shard, pages: int) -> Geometry:
    heads, layers = shard.end_head - shard.first_head, shard.end_layer - shard.first_layer
    component = Component(KV, layers, Mha(heads, DIM, DIM, "bfloat16"), PAGE_TOKENS)
    return geometry(component, pages=pages + 1, order=Order.PAGE_FIRST)


@contextlib.asynccontextmanager
async def _running(plan: Plan) -> AsyncIterator[_Running]:
    async with contextlib.AsyncExitStack() as stack:
        sender, receiver = (_End(_shapes(plan, side), plan.environment) for side in (0, 1))
        sender.fill(plan.seed)
        for end in (sender, receiver):
            stack.push_async_callback(end.stop)
            await end.start()
        sender.process.order(LoadAgent(RECEIVER, GENERATION, receiver.metadata))
        await sender.next(AgentLoaded)
        bare = _Bare(sender, unpack(receiver.metadata))
        stack.callback(bare.close)
        yield _Running(sender, receiver, bare)


async def _write(up: _Running, posts: list[Post]) -> tuple[float, list[bytes]]:
    """The seconds from the first order to the last answer, and the sums of each post."""
    began_s = time.perf_counter()
    for post in posts:
        up.sender.process.order(post)
    done = [await up.sender.next(PostDone) for _ in posts]
    took_s = time.perf_counter() - began_s
    return took_s, [one.sums for one in sorted(done, key=lambda one: one.post)]


async def _measure_case(up: _Running, plan: Plan, case: Case) -> CaseResult:
    seal = Seal(Integrity.FULL, b"bench of shards!", 0, plan.pages)
    sent = lanes(case.ours, case.theirs)
    posts = [_post(plan, case.name, number, lane) for number, lane in enumerate(sent)]
    sealed = [msgspec.structs.replace(post, seal=seal) for post in posts]
    pieces = [up.bare.rows(post) for post in posts]
    whole = up.bare.rows(_post(plan, WHOLE, 0, None))
    moved_bytes = sum(sum(rows.sizes) for rows in pieces)
    whole_bytes = sum(whole.sizes)
    times: dict[str, list[float]] = {"kvd": [], "sums": [], "descriptors": [], "raw": []}
    times |= {"cpu": [], "raw cpu": []}
    for _ in range(plan.repeats):
        before_s = busy_s(up.sender.process.pid)
        times["kvd"].append((await _write(up, posts))[0] / moved_bytes)
        times["cpu"].append((busy_s(up.sender.process.pid) - before_s) / moved_bytes)
        times["sums"].append((await _write(up, sealed))[0] / moved_bytes)
        times["descriptors"].append(up.bare.write(pieces) / moved_bytes)
        before_s = time.thread_time()
        times["raw"].append(up.bare.write([whole]) / whole_bytes)
        times["raw cpu"].append((time.thread_time() - before_s) / whole_bytes)
    _, sums = await _write(up, sealed)
    for lane, post, those in zip(sent, sealed, sums, strict=True):
        await _verify(up.receiver, case.name, lane, post, those)
    middle = {name: 1 / statistics.median(each) / GIGA for name, each in times.items()}
    pairs = zip(times["kvd"], times["raw"], strict=True)
    rates = Rates(
        kvd=middle["kvd"],
        with_sums=middle["sums"],
        descriptors=middle["descriptors"],
        raw=middle["raw"],
        to_raw=statistics.median(raw / mine for mine, raw in pairs),
        cpu=1 / middle["cpu"],
        raw_cpu=1 / middle["raw cpu"],
    )
    n_rows = sum(len(rows.source) for rows in pieces)
    return CaseResult(case.name, case.is_packed, moved_bytes, n_rows, rates)


async def _verify(receiver: _End, name: str, lane: Lane, post: Post, sums: bytes) -> None:
    """Have the receiver sum what the last post of a lane has written.

    Raises:
        TransportDown: it is something else.
    """
    receiver.process.order(
        Verify(0, name, post.seal, post.destination, sums, lane.peer_shard, lane.window)
    )
    found = await receiver.next(Verified)
    if found.bad_pages or found.why:
        raise TransportDown(f"{name}: pages {found.bad_pages} arrived changed {found.why}".strip())


def _post(plan: Plan, name: str, number: int, lane: Lane | None) -> Post:
    """All pages of a lane, or of whole pages, from and to places in random order."""
    random = np.random.default_rng(plan.seed)
    source, destination = (
        Pages(random.permutation(np.arange(1, plan.pages + 1, dtype="<i4")).tobytes())
        for _ in range(2)
    )
    return Post(
        number,
        RECEIVER,
        GENERATION,
        name,
        source,
        destination,
        peer_shard=lane.peer_shard if lane else 0,
        making=lane.copies[0] if lane else Straight(),
    )


async def measure(plan: Plan, told: Told) -> ShardsResult:
    """Start both transfer processes and measure every case.

    Raises:
        TransportDown: one of them ended, or refused.
    """
    told("starting")
    results = []
    async with _running(plan) as up:
        for case in CASES:
            told(case.name)
            async with asyncio.timeout(LIMIT_S):
                results.append(await _measure_case(up, plan, case))
    return ShardsResult(plan, tuple(results), goals_of(results))


def goals_of(results: list[CaseResult]) -> tuple[Goal, ...]:
    """What was to be reached."""
    return tuple(
        at_least(f"{one.name}: packed / raw NIXL", WANTED, one.rates.to_raw)
        for one in results
        if one.is_packed
    )
