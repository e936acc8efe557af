"""``kvd bench stream``: the goodput of handoffs, beside raw NIXL and plain copies of the bytes.

Measured on this host as it is and, where root may make them, between two network namespaces, on
huge and on 4 KiB pages: each is a ``Site``. One repetition of a case is a handoff through two
daemons, then raw NIXL, then plain copies, then the next repetition: whatever else the machine does
falls on all of them. A ratio is the median of the ratios within each repetition.

Goodput is the bytes of the pages that were sent over the time from the call of ``finish`` to its
answer (see ``engines``); raw NIXL is timed from its first post to its last completion. How late the
event loop of a daemon is comes from its own histogram at /metrics, twice; a percentile is the upper
bound of the bucket in which it lies: never less than the truth.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import click
import msgspec
import numpy as np

from kvd.bench.engines import run_count, two_engines
from kvd.bench.memory import huge_bytes, when_collapsed
from kvd.bench.raw_nixl import Tuning, raw_pair
from kvd.bench.report import (
    BenchmarkResult,
    Goal,
    Measured,
    ResultColumn,
    ResultTable,
    at_least,
    at_most,
    measurement,
)
from kvd.harness.daemons import HERE, LLAMA_8B, DaemonFailed, DaemonPlace, two_daemons
from kvd.harness.netns import DEVICE, Namespace, NoNamespaces, two_namespaces
from kvd.types import pack_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.bench.engines import HandoffEngines, OneHandoff, Took
    from kvd.bench.raw_nixl import RawPair
    from kvd.bench.report import Told
    from kvd.harness.daemons import Pair

PEERS_PORT: Final = 7402
HUGE, SMALL = "huge", "4k"
SHARED_HOST, NAMESPACES = "shared host", "TCP, two namespaces"


class Site(msgspec.Struct, frozen=True):
    """A pair of places; ``namespaces`` are theirs, where they have namespaces of their own.

    ``stream_host`` is where the second one takes a plain TCP stream; empty for memcpy.
    """

    network: str
    memory: str
    places: tuple[DaemonPlace, DaemonPlace] = (HERE, HERE)
    namespaces: tuple[Namespace, Namespace] | None = None
    settings: dict[str, str] = {}
    environment: dict[str, str] = {}
    stream_host: str = ""


@contextlib.contextmanager
def site_of(network: str, memory: str) -> Iterator[Site]:
    """Both on this host as it is, or each in a namespace, for as long as the block lasts.

    Raises:
        NoNamespaces: they cannot be made here.
    """
    settings = {"pool.huge_pages": "collapse" if memory == HUGE else "off"}
    if network == SHARED_HOST:
        yield Site(network, memory, settings=settings)
        return
    # UCX would copy from process to process all the same: it looks at the host, not at the network.
    ucx = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": DEVICE}
    settings |= {f"transfer.ucx.{name}": value for name, value in ucx.items()}
    with two_namespaces() as (first, second):
        yield Site(
            network=network,
            memory=memory,
            places=(
                DaemonPlace(first.prefix, first.host, PEERS_PORT),
                DaemonPlace(second.prefix, second.host, PEERS_PORT),
            ),
            namespaces=(first, second),
            settings={**settings, "peers.insecure": "true"},
            environment=ucx,
            stream_host=second.host,
        )


_BUCKET: Final = re.compile(r'^kvd_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)

Beats = Counter[float]
"""How many beats of the loops were late by at most so many seconds."""


def percentile_s(beats: Beats, share: float) -> float:
    """The bound under which ``share`` of them lie; NaN if there are none."""
    total = max(beats.values(), default=0)
    return min((late_s for late_s, n in beats.items() if n >= share * total), default=math.nan)


PAGE_TOKENS: Final = 16
PAGE_BYTES: Final = 2 * 2**20
SPARE_PAGES: Final = 33
CUT_BYTES: Final = 512 * 2**10
IDLE_S: Final = 3.0
GIGA: Final = 1e9


class StreamPlan(msgspec.Struct, frozen=True):
    """How much is measured: ``pages`` per handoff, so often, and lag over so many seconds."""

    pages: int
    repeats: int
    lag_s: float
    seed: int

    @property
    def size_bytes(self) -> int:
        """Bytes of one handoff."""
        return self.pages * PAGE_BYTES

    @property
    def pool_pages(self) -> int:
        """Enough for a handoff each way, and the null page."""
        return 2 * self.pages + SPARE_PAGES

    def halves(self, seed: int | None = None) -> tuple[bytes, bytes]:
        """Pages to read and others to write: two runs, or in random order."""
        ids = np.arange(1, 2 * self.pages + 1)
        if seed is not None:
            ids = np.random.default_rng(seed).permutation(ids)
        return pack_ids(ids[: self.pages].tolist()), pack_ids(ids[self.pages :].tolist())


class StreamCaseResult(msgspec.Struct, frozen=True):
    """What one case came to, as the file says it: which case, how fast, and the rest."""

    case: Measured
    rates: Measured
    to_raw: float
    to_raw_same: float
    to_plain: float
    source_runs: int
    destination_runs: int
    lag_p99_s: float
    lag_max_s: float
    lag_beats: int

    def row(self) -> Measured:
        """Case and figures, one column each."""
        return {
            **msgspec.structs.asdict(self),
            **self.case,
            **self.rates,
            "runs": f"{self.source_runs}/{self.destination_runs}",
            "lag_p99_ms": self.lag_p99_s * 1e3,
            "lag_max_ms": self.lag_max_s * 1e3,
        }

    def goals(self) -> list[Goal]:
        """What was to be reached, one way."""
        case, goals = self.case, []
        if case["ways"] == 1:
            where = f"{case['network']}, {case['memory']}, {case['order']}"
            wanted = 0.95 if case["order"] == "contiguous" else 0.90
            goals.append(at_least(f"{where}: kvd / raw NIXL contiguous", wanted, self.to_raw))
            if case["memory"] == HUGE and self.rates["plain_cut"] is not None:
                goals.append(at_least(f"{where}: kvd / memcpy", 0.75, self.to_plain))
            goals.append(at_most(f"{where}: loop lag p99 in ms", 5.0, self.lag_p99_s * 1e3))
        return goals


class StreamSiteResult(msgspec.Struct, frozen=True):
    """One pair of daemons: where, on what memory, and how late their loops are when idle."""

    network: str
    memory: str
    pool_bytes: int
    huge_bytes: tuple[int, ...]
    raw_huge_bytes: tuple[int, ...]
    tuning: Tuning
    idle_lag_p99_s: float
    idle_lag_max_s: float
    cases: tuple[StreamCaseResult, ...]

    def note(self) -> str:
        """What a reader of its rows should know."""
        return (
            f"{self.network}, {self.memory}: of {self.pool_bytes / 2**20:.0f} MiB per pool, in "
            f"huge pages {_mib(self.huge_bytes)} (raw {_mib(self.raw_huge_bytes)}); raw with "
            f"{self.tuning}; idle lag p99 {self.idle_lag_p99_s * 1e3:.3g} ms, max "
            f"{self.idle_lag_max_s * 1e3:.3g} ms"
        )


def measure_site(site: Site, plan: StreamPlan, directory: Path, told: Told) -> StreamSiteResult:
    """Start a pair of daemons and a pair of bare processes at ``site``; measure every case."""
    told(f"{site.network}, {site.memory}: starting")
    pages = plan.pool_pages
    size = f"{pages * PAGE_BYTES // 2**20}MiB"
    settings = {**LLAMA_8B, **site.settings, "pool.size": size}
    with contextlib.ExitStack() as stack:
        pair = stack.enter_context(two_daemons(directory, settings, places=site.places))
        if site.memory == HUGE:
            when_collapsed(pair, pages * PAGE_BYTES)
        raw = stack.enter_context(raw_pair(pair, site, pages=pages, page_bytes=PAGE_BYTES))
        raw.tune(*plan.halves())
        return asyncio.run(_measure(_Running(site=site, plan=plan, pair=pair, raw=raw, told=told)))


class _Running(NamedTuple):
    """A site that is up."""

    site: Site
    plan: StreamPlan
    pair: Pair
    raw: RawPair
    told: Told

    def beats(self) -> Beats:
        """Of both daemons together, so far."""
        both: Beats = Counter()
        for number, daemon in enumerate((self.pair.prefill, self.pair.decode)):
            spaces = self.site.namespaces
            link = spaces[number].connect("127.0.0.1", daemon.http_port) if spaces else None
            for late_s, beats in _BUCKET.findall(daemon.metrics(link)):
                both[float(late_s)] += int(float(beats))
        return both


_ORDERS: Final = ("contiguous", "scattered")
_WAYS: Final = (1, 2)


async def _measure(up: _Running) -> StreamSiteResult:
    pair, plan, site = up.pair, up.plan, up.site
    before = up.beats()
    await asyncio.sleep(IDLE_S)
    idle = up.beats() - before
    cases = []
    async with two_engines(pair, plan.pages * PAGE_TOKENS) as engines:
        for order in _ORDERS:
            if order == "scattered":
                await engines.scatter(plan.seed)
            for ways in _WAYS:
                up.told(f"{site.network}, {site.memory}, {order}, {ways} way")
                cases.append(await _measure_case(up, engines, order, ways))
    return StreamSiteResult(
        network=site.network,
        memory=site.memory,
        pool_bytes=plan.pool_pages * PAGE_BYTES,
        huge_bytes=tuple(
            huge_bytes(daemon.transfer_pid()) for daemon in (pair.prefill, pair.decode)
        ),
        raw_huge_bytes=up.raw.huge_bytes,
        tuning=up.raw.tuning,
        idle_lag_p99_s=percentile_s(idle, 0.99),
        idle_lag_max_s=percentile_s(idle, 1.0),
        cases=tuple(cases),
    )


async def _measure_case(
    up: _Running, engines: HandoffEngines, order: str, ways: int
) -> StreamCaseResult:
    plan, raw, site = up.plan, up.raw, up.site
    whole = plan.halves()
    mixed = whole if order == "contiguous" else plan.halves(plan.seed)
    times: dict[str, list[Took]] = defaultdict(list)
    moved: list[OneHandoff] = []
    await engines.move(await engines.meet(ways))  # the first one warms what is cold
    for _ in range(plan.repeats):
        moved = await engines.meet(ways)
        times["kvd"].append(await engines.move(moved))
        same = (moved[0].source, moved[0].destination)
        times["raw"].append(raw.write(*whole, ways=ways))
        times["raw_same"].append(raw.write(*same, ways=ways))
        if site.stream_host:
            times["plain"].append(raw.stream(site.stream_host, plan.size_bytes, ways=ways))
        else:
            for name, piece in (("plain", plan.size_bytes), ("plain_cut", CUT_BYTES)):
                times[name].append(raw.copy(*mixed, ways=ways, piece_bytes=piece))
    beats = await _lag(up, engines, ways)
    to = {
        name: statistics.median(
            other.seconds / mine.seconds for mine, other in zip(times["kvd"], each, strict=True)
        )
        for name, each in times.items()
    }
    return StreamCaseResult(
        case={"network": site.network, "memory": site.memory, "order": order, "ways": ways},
        rates=_rates(times, plan.size_bytes, ways),
        to_raw=to["raw"],
        to_raw_same=to["raw_same"],
        to_plain=to["plain"],
        source_runs=run_count(moved[0].source),
        destination_runs=run_count(moved[0].destination),
        lag_p99_s=percentile_s(beats, 0.99),
        lag_max_s=percentile_s(beats, 1.0),
        lag_beats=max(beats.values(), default=0),
    )


async def _lag(up: _Running, engines: HandoffEngines, ways: int) -> Beats:
    """How late both loops are while handoffs follow one another without a pause."""
    before = up.beats()
    end_s = time.monotonic() + up.plan.lag_s
    while time.monotonic() < end_s:
        await engines.move(await engines.meet(ways))
    return up.beats() - before


def _rates(times: dict[str, list[Took]], size_bytes: int, ways: int) -> Measured:
    """Gigabytes (1e9) per second, medians over the repetitions; both ways count both ways' bytes.

    ``raw`` moves runs of neighbours; ``raw_same`` the very pages of the handoff. ``plain`` is one
    memcpy per run, or a TCP stream between namespaces; ``plain_cut`` is memcpy in 512 KiB pieces.
    ``slower`` is the slower direction of the handoffs, over its own bytes.
    """
    rates: Measured = {"plain_cut": None}
    for name, each in times.items():
        rates[name] = ways * size_bytes / statistics.median(took.seconds for took in each) / GIGA
    slowest_s = statistics.median(took.slowest_s for took in times["kvd"])
    return {**rates, "slower": size_bytes / slowest_s / GIGA}


def run(
    told: Told, *, pages: int, repeats: int, lag_s: float, seed: int
) -> tuple[BenchmarkResult, object]:
    """Goodput of one handoff, beside raw NIXL and plain copies of the same bytes.

    Two daemons with pools of a Llama-8B shape (2 MiB pages of 16 tokens), on this host and, where
    root may make them, in two network namespaces; on huge and on 4 KiB pages.
    """
    plan = StreamPlan(pages=pages, repeats=repeats, lag_s=lag_s, seed=seed)
    sites: list[StreamSiteResult] = []
    skipped: list[dict[str, str]] = []
    for network in (SHARED_HOST, NAMESPACES):
        for memory in (HUGE, SMALL):
            try:
                with (
                    site_of(network, memory) as site,
                    tempfile.TemporaryDirectory(prefix="kvd-bench-") as directory,
                ):
                    sites.append(measure_site(site, plan, Path(directory), told))
            except (NoNamespaces, DaemonFailed) as why:
                if network == SHARED_HOST:
                    raise
                skipped.append({"network": f"{network}, {memory}", "why": str(why)})
    cases = [case for site in sites for case in site.cases]
    goals = tuple(goal for case in cases for goal in case.goals())
    file = {"plan": plan, "sites": sites, "skipped": skipped, "goals": goals}
    shown = BenchmarkResult(
        tables=(
            ResultTable(
                f"A handoff of {plan.size_bytes / 2**20:.0f} MiB in {pages} pages; "
                f"medians of {repeats}, GB/s",
                COLUMNS,
                tuple(case.row() for case in cases),
            ),
        ),
        notes=(
            "kvd: bytes over the time from the call of finish() to its answer, when the other "
            "daemon has committed; nothing was posted before",
            "ratios: medians of the ratios within each repetition",
            "raw NIXL: two bare processes, runs of neighbours, fastest of several settings; "
            "same pages: the pages of the handoff. First post to last completion",
            "plain: one memcpy per run, or one TCP connection between the namespaces; plain cut: "
            "memcpy in 512 KiB pieces, for which the C library uses no streaming stores, as the "
            "kernel does for NIXL",
            "lag: of both daemons, from kvd_loop_lag_seconds at /metrics, while handoffs follow "
            "one another; upper bound of the bucket",
            *(site.note() for site in sites),
            *(f"{row['network']}: skipped, {row['why']}" for row in skipped),
        ),
        goals=goals,
    )
    return shown, file


def _mib(sizes: tuple[int, ...]) -> str:
    return " and ".join(f"{size / 2**20:.0f}" for size in sizes)


COLUMNS: Final = (
    ResultColumn("network", "network"),
    ResultColumn("memory", "memory"),
    ResultColumn("order", "pages"),
    ResultColumn("ways", "ways"),
    ResultColumn("kvd", "kvd GB/s", ".2f"),
    ResultColumn("raw", "raw NIXL", ".2f"),
    ResultColumn("raw_same", "same pages", ".2f"),
    ResultColumn("plain", "plain", ".2f"),
    ResultColumn("plain_cut", "plain cut", ".2f"),
    ResultColumn("to_raw", "kvd/raw", ".2f"),
    ResultColumn("to_raw_same", "kvd/same", ".2f"),
    ResultColumn("to_plain", "kvd/plain", ".2f"),
    ResultColumn("slower", "slower way", ".2f"),
    ResultColumn("runs", "runs"),
    ResultColumn("lag_p99_ms", "lag p99 ms", ".3g"),
    ResultColumn("lag_max_ms", "max", ".3g"),
    ResultColumn("lag_beats", "beats"),
)

command = measurement(
    "stream",
    run,
    (
        click.option("--pages", default=128, show_default=True, help="Pages of 2 MiB per handoff."),
        click.option("--repeats", default=15, show_default=True, help="Handoffs per case."),
        click.option(
            "--lag-s", default=3.0, show_default=True, help="Seconds of load for the loop lag."
        ),
        click.option("--seed", default=1, show_default=True, help="Of the random order of pages."),
    ),
    steps=lambda **_: 4 * (1 + len(_ORDERS) * len(_WAYS)),
)
