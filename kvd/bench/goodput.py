"""The goodput of handoffs, beside raw NIXL and plain copies of the same bytes.

What lives here: which cases there are, how one is measured, what comes out. What must not: how the
engines (``engines``) and the references (``references``) do their part, and how it is printed.

One repetition of a case is a handoff through two daemons, then raw NIXL, then plain copies, then
the next repetition: whatever else the machine does falls on all of them. A ratio is the median of
the ratios within each repetition.

Goodput is the bytes of the pages that were sent over the time from the call of ``finish`` to its
answer (see ``engines``); raw NIXL is timed from its first post to its last completion.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

import kvd.client
from kvd.bench.engines import Engines, Side, run_count
from kvd.bench.lag import Beats, read_beats
from kvd.bench.memory import huge_bytes, when_collapsed
from kvd.bench.references import Tuning, raw_pair
from kvd.bench.report import Goal, at_least, at_most
from kvd.bench.sites import HUGE
from kvd.harness.daemons import LLAMA_8B, two_daemons
from kvd.types import pack_ids

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from kvd.bench.engines import Handoff, Took
    from kvd.bench.references import RawPair
    from kvd.bench.report import Told
    from kvd.bench.sites import Site
    from kvd.harness.daemons import Pair

PAGE_TOKENS: Final = 16
PAGE_BYTES: Final = 2 * 2**20
SPARE_PAGES: Final = 33
CUT_BYTES: Final = 512 * 2**10
IDLE_S: Final = 3.0
GIGA: Final = 1e9


class Plan(msgspec.Struct, frozen=True):
    """How much is measured: ``pages`` per handoff, so often, and lag over so many seconds."""

    pages: int = 128
    repeats: int = 15
    lag_s: float = 3.0
    seed: int = 1

    @property
    def size_bytes(self) -> int:
        """Bytes of one handoff."""
        return self.pages * PAGE_BYTES

    @property
    def pool_pages(self) -> int:
        """Enough for a handoff each way, and the null page."""
        return 2 * self.pages + SPARE_PAGES


class Case(msgspec.Struct, frozen=True):
    """One row: ``order`` is contiguous or scattered, ``ways`` is 1 or 2."""

    network: str
    memory: str
    order: str
    ways: int


class Rates(msgspec.Struct, frozen=True):
    """Gigabytes (1e9) per second, medians over the repetitions; both ways count both ways' bytes.

    ``raw`` moves runs of neighbours; ``raw_same`` the very pages of the handoff. ``plain`` is one
    memcpy per run, or a TCP stream between namespaces; ``plain_cut`` is memcpy in 512 KiB pieces.
    ``slower`` is the slower direction of the handoffs, over its own bytes.
    """

    kvd: float
    slower: float
    raw: float
    raw_same: float
    plain: float
    plain_cut: float | None


class CaseResult(msgspec.Struct, frozen=True):
    """What one case came to."""

    case: Case
    rates: Rates
    to_raw: float
    to_raw_same: float
    to_plain: float
    source_runs: int
    destination_runs: int
    lag_p99_s: float
    lag_max_s: float
    lag_beats: int


class SiteResult(msgspec.Struct, frozen=True):
    """One pair of daemons: where, on what memory, and how late their loops are when idle."""

    network: str
    memory: str
    pool_bytes: int
    huge_bytes: tuple[int, ...]
    raw_huge_bytes: tuple[int, ...]
    tuning: Tuning
    idle_lag_p99_s: float
    idle_lag_max_s: float
    cases: tuple[CaseResult, ...]


class Skipped(msgspec.Struct, frozen=True):
    """What could not be measured here, and why."""

    network: str
    why: str


class StreamResult(msgspec.Struct, frozen=True):
    """What ``kvd bench stream`` reports."""

    plan: Plan
    sites: tuple[SiteResult, ...]
    skipped: tuple[Skipped, ...]
    goals: tuple[Goal, ...]


def steps_of(sites: int) -> int:
    """How many steps of progress there will be."""
    return sites * (1 + len(_ORDERS) * len(_WAYS))


def measure_site(site: Site, plan: Plan, directory: Path, told: Told) -> SiteResult:
    """Start a pair of daemons and a pair of bare processes at ``site``; measure every case."""
    told(f"{site.network}, {site.memory}: starting")
    size = f"{plan.pool_pages * PAGE_BYTES // 2**20}MiB"
    settings = {**LLAMA_8B, **site.settings, "pool.size": size}
    pages = plan.pool_pages
    with contextlib.ExitStack() as stack:
        pair = stack.enter_context(two_daemons(directory, settings, places=site.places))
        if site.memory == HUGE:
            when_collapsed(pair, pages * PAGE_BYTES)
        raw = stack.enter_context(raw_pair(pair, site, pages=pages, page_bytes=PAGE_BYTES))
        raw.tune(*_halves(plan, None))
        return asyncio.run(_measure(_Running(site, plan, pair, raw, told)))


class _Running(NamedTuple):
    """A site that is up."""

    site: Site
    plan: Plan
    pair: Pair
    raw: RawPair
    told: Told

    def beats(self) -> Beats:
        """Of both daemons together."""
        one, two = (
            read_beats(link.connect("127.0.0.1", daemon.http_port))
            for link, daemon in zip(
                self.site.links, (self.pair.prefill, self.pair.decode), strict=True
            )
        )
        return one.plus(two)


_ORDERS: Final = ("contiguous", "scattered")
_WAYS: Final = (1, 2)


async def _measure(up: _Running) -> SiteResult:
    pair, plan, site = up.pair, up.plan, up.site
    before = up.beats()
    await asyncio.sleep(IDLE_S)
    idle = up.beats().since(before)
    cases = []
    async with _engines(pair, plan) as engines:
        for order in _ORDERS:
            if order == "scattered":
                await engines.scatter(plan.seed)
            for ways in _WAYS:
                case = Case(site.network, site.memory, order, ways)
                up.told(f"{case.network}, {case.memory}, {case.order}, {case.ways} way")
                cases.append(await _measure_case(up, engines, case))
    return SiteResult(
        network=site.network,
        memory=site.memory,
        pool_bytes=plan.pool_pages * PAGE_BYTES,
        huge_bytes=tuple(huge_bytes(one.transfer_pid()) for one in (pair.prefill, pair.decode)),
        raw_huge_bytes=up.raw.huge_bytes,
        tuning=up.raw.tuning,
        idle_lag_p99_s=idle.percentile_s(0.99),
        idle_lag_max_s=idle.percentile_s(1.0),
        cases=tuple(cases),
    )


@contextlib.asynccontextmanager
async def _engines(pair: Pair, plan: Plan) -> AsyncIterator[Engines]:
    p, d = pair.prefill, pair.decode
    async with (
        kvd.client.connect(p.client, name="bench-p") as at_p,
        kvd.client.connect(d.client, name="bench-d") as at_d,
    ):
        yield Engines(Side(p, at_p), Side(d, at_d), plan.pages * PAGE_TOKENS)


async def _measure_case(up: _Running, engines: Engines, case: Case) -> CaseResult:
    plan, raw, ways = up.plan, up.raw, case.ways
    whole = _halves(plan, None)
    mixed = whole if case.order == "contiguous" else _halves(plan, plan.seed)
    times: dict[str, list[Took]] = {}
    moved: list[Handoff] = []
    await engines.move(await engines.meet(ways))  # the first one warms what is cold
    for _ in range(plan.repeats):
        moved = await engines.meet(ways)
        times.setdefault("kvd", []).append(await engines.move(moved))
        same = (moved[0].source, moved[0].destination)
        times.setdefault("raw", []).append(raw.write(*whole, ways=ways))
        times.setdefault("raw_same", []).append(raw.write(*same, ways=ways))
        if up.site.stream_host:
            took = raw.stream(up.site.stream_host, plan.size_bytes, ways=ways)
            times.setdefault("plain", []).append(took)
        else:
            for name, piece in (("plain", plan.size_bytes), ("plain_cut", CUT_BYTES)):
                took = raw.copy(*mixed, ways=ways, piece_bytes=piece)
                times.setdefault(name, []).append(took)
    beats = await _lag(up, engines, ways)
    rates = _rates(times, plan.size_bytes, ways)
    return CaseResult(
        case=case,
        rates=rates,
        to_raw=_ratio(times, "raw"),
        to_raw_same=_ratio(times, "raw_same"),
        to_plain=_ratio(times, "plain"),
        source_runs=run_count(moved[0].source),
        destination_runs=run_count(moved[0].destination),
        lag_p99_s=beats.percentile_s(0.99),
        lag_max_s=beats.percentile_s(1.0),
        lag_beats=beats.count,
    )


async def _lag(up: _Running, engines: Engines, ways: int) -> Beats:
    """How late both loops are while handoffs follow one another without a pause."""
    before = up.beats()
    end_s = time.monotonic() + up.plan.lag_s
    while time.monotonic() < end_s:
        await engines.move(await engines.meet(ways))
    return up.beats().since(before)


def _ratio(times: dict[str, list[Took]], reference: str) -> float:
    """How fast handoffs are, where the reference is 1."""
    pairs = zip(times["kvd"], times[reference], strict=True)
    return statistics.median(other.seconds / mine.seconds for mine, other in pairs)


def _rates(times: dict[str, list[Took]], size_bytes: int, ways: int) -> Rates:
    middle = {
        name: ways * size_bytes / statistics.median(took.seconds for took in each) / GIGA
        for name, each in times.items()
    }
    slowest_s = statistics.median(took.slowest_s for took in times["kvd"])
    return Rates(
        kvd=middle["kvd"],
        slower=size_bytes / slowest_s / GIGA,
        raw=middle["raw"],
        raw_same=middle["raw_same"],
        plain=middle["plain"],
        plain_cut=middle.get("plain_cut"),
    )


def _halves(plan: Plan, seed: int | None) -> tuple[bytes, bytes]:
    """Pages to read and others to write: two runs, or in random order."""
    ids = np.arange(1, 2 * plan.pages + 1)
    if seed is not None:
        ids = np.random.default_rng(seed).permutation(ids)
    return pack_ids(ids[: plan.pages].tolist()), pack_ids(ids[plan.pages :].tolist())


def goals_of(sites: tuple[SiteResult, ...]) -> tuple[Goal, ...]:
    """What was to be reached, one way."""
    goals = []
    for case in (case for site in sites for case in site.cases if case.case.ways == 1):
        where = f"{case.case.network}, {case.case.memory}, {case.case.order}"
        wanted = 0.95 if case.case.order == "contiguous" else 0.90
        goals.append(at_least(f"{where}: kvd / raw NIXL contiguous", wanted, case.to_raw))
        if case.case.memory == "huge" and case.rates.plain_cut is not None:
            goals.append(at_least(f"{where}: kvd / memcpy", 0.75, case.to_plain))
        goals.append(at_most(f"{where}: loop lag p99 in ms", 5.0, case.lag_p99_s * 1e3))
    return tuple(goals)
