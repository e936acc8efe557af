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
import http.client
import math
import re
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import click
import msgspec
import numpy as np

from kvd.bench.engines import run_count, two_engines
from kvd.bench.memory import huge_bytes, when_collapsed
from kvd.bench.raw_nixl import Tuning, raw_pair
from kvd.bench.report import (
    Goal,
    at_least,
    at_most,
    bar,
    show_goals,
    show_notes,
    show_table,
    write_json,
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


class HostLink(msgspec.Struct, frozen=True):
    """The network namespace we are in."""

    def connect(self, host: str, port: int) -> socket.socket:
        """A TCP connection.

        Raises:
            OSError: nobody listens there.
        """
        return socket.create_connection((host, port), timeout=10)


Link = HostLink | Namespace


class Site(msgspec.Struct, frozen=True):
    """A pair of places. ``links`` reach what listens on loopback there.

    ``stream_host`` is where the second one takes a plain TCP stream; empty for memcpy.
    """

    network: str
    memory: str
    places: tuple[DaemonPlace, DaemonPlace]
    links: tuple[Link, Link]
    settings: dict[str, str]
    environment: dict[str, str]
    stream_host: str


def shared_host(memory: str) -> Site:
    """Both on this host, as it is."""
    return Site(
        network="shared host",
        memory=memory,
        places=(HERE, HERE),
        links=(HostLink(), HostLink()),
        settings=_memory_settings(memory),
        environment={},
        stream_host="",
    )


@contextlib.contextmanager
def namespaces(memory: str) -> Iterator[Site]:
    """One in each of two network namespaces, for as long as the block lasts.

    Raises:
        NoNamespaces: they cannot be made here.
    """
    # UCX would copy from process to process all the same: it looks at the host, not at the network.
    ucx = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": DEVICE}
    settings = {f"transfer.ucx.{name}": value for name, value in ucx.items()}
    with two_namespaces() as (first, second):
        yield Site(
            network="TCP, two namespaces",
            memory=memory,
            places=(
                DaemonPlace(first.prefix, first.host, PEERS_PORT),
                DaemonPlace(second.prefix, second.host, PEERS_PORT),
            ),
            links=(first, second),
            settings={**settings, **_memory_settings(memory), "peers.insecure": "true"},
            environment=ucx,
            stream_host=second.host,
        )


def _memory_settings(memory: str) -> dict[str, str]:
    return {"pool.huge_pages": "collapse" if memory == HUGE else "off"}


_BUCKET: Final = re.compile(r'^kvd_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)


class Beats(msgspec.Struct, frozen=True):
    """Beats by how late they were: ``at_most[i]`` of them by at most ``bounds_s[i]``."""

    bounds_s: tuple[float, ...]
    at_most: tuple[float, ...]

    @property
    def count(self) -> int:
        """All of them."""
        return int(self.at_most[-1])

    def since(self, earlier: Beats) -> Beats:
        """Only those after ``earlier``."""
        pairs = zip(self.at_most, earlier.at_most, strict=True)
        return Beats(self.bounds_s, tuple(now - then for now, then in pairs))

    def plus(self, other: Beats) -> Beats:
        """Those of two daemons, or of two times, together."""
        pairs = zip(self.at_most, other.at_most, strict=True)
        return Beats(self.bounds_s, tuple(one + two for one, two in pairs))

    def percentile_s(self, share: float) -> float:
        """The bound under which ``share`` of them lie; NaN if there are none."""
        if not self.count:
            return math.nan
        wanted = share * self.count
        return next(
            bound
            for bound, count in zip(self.bounds_s, self.at_most, strict=True)
            if count >= wanted
        )


def read_beats(connection: socket.socket) -> Beats:
    """All beats of the daemon at the other end of ``connection``, which is closed."""
    link = http.client.HTTPConnection("daemon")
    link.sock = connection
    try:
        link.request("GET", "/metrics", headers={"Connection": "close"})
        text = link.getresponse().read().decode()
    finally:
        link.close()
    found = [(float(bound), float(count)) for bound, count in _BUCKET.findall(text)]
    return Beats(tuple(bound for bound, _ in found), tuple(count for _, count in found))


PAGE_TOKENS: Final = 16
PAGE_BYTES: Final = 2 * 2**20
SPARE_PAGES: Final = 33
CUT_BYTES: Final = 512 * 2**10
IDLE_S: Final = 3.0
GIGA: Final = 1e9


class StreamPlan(msgspec.Struct, frozen=True):
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


class StreamCase(msgspec.Struct, frozen=True):
    """One row: ``order`` is contiguous or scattered, ``ways`` is 1 or 2."""

    network: str
    memory: str
    order: str
    ways: int


class StreamRates(msgspec.Struct, frozen=True):
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


class StreamCaseResult(msgspec.Struct, frozen=True):
    """What one case came to."""

    case: StreamCase
    rates: StreamRates
    to_raw: float
    to_raw_same: float
    to_plain: float
    source_runs: int
    destination_runs: int
    lag_p99_s: float
    lag_max_s: float
    lag_beats: int


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


class SkippedSite(msgspec.Struct, frozen=True):
    """What could not be measured here, and why."""

    network: str
    why: str


class StreamResult(msgspec.Struct, frozen=True):
    """What ``kvd bench stream`` reports."""

    plan: StreamPlan
    sites: tuple[StreamSiteResult, ...]
    skipped: tuple[SkippedSite, ...]
    goals: tuple[Goal, ...]


def steps_of(sites: int) -> int:
    """How many steps of progress there will be."""
    return sites * (1 + len(_ORDERS) * len(_WAYS))


def measure_site(site: Site, plan: StreamPlan, directory: Path, told: Told) -> StreamSiteResult:
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
        return asyncio.run(_measure(_Running(site=site, plan=plan, pair=pair, raw=raw, told=told)))


class _Running(NamedTuple):
    """A site that is up."""

    site: Site
    plan: StreamPlan
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


async def _measure(up: _Running) -> StreamSiteResult:
    pair, plan, site = up.pair, up.plan, up.site
    before = up.beats()
    await asyncio.sleep(IDLE_S)
    idle = up.beats().since(before)
    cases = []
    async with two_engines(pair, plan.pages * PAGE_TOKENS) as engines:
        for order in _ORDERS:
            if order == "scattered":
                await engines.scatter(plan.seed)
            for ways in _WAYS:
                case = StreamCase(network=site.network, memory=site.memory, order=order, ways=ways)
                up.told(f"{case.network}, {case.memory}, {case.order}, {case.ways} way")
                cases.append(await _measure_case(up, engines, case))
    return StreamSiteResult(
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


async def _measure_case(
    up: _Running, engines: HandoffEngines, case: StreamCase
) -> StreamCaseResult:
    plan, raw, ways = up.plan, up.raw, case.ways
    whole = _halves(plan, None)
    mixed = whole if case.order == "contiguous" else _halves(plan, plan.seed)
    times: dict[str, list[Took]] = {}
    moved: list[OneHandoff] = []
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
    return StreamCaseResult(
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


async def _lag(up: _Running, engines: HandoffEngines, ways: int) -> Beats:
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


def _rates(times: dict[str, list[Took]], size_bytes: int, ways: int) -> StreamRates:
    middle = {
        name: ways * size_bytes / statistics.median(took.seconds for took in each) / GIGA
        for name, each in times.items()
    }
    slowest_s = statistics.median(took.slowest_s for took in times["kvd"])
    return StreamRates(
        kvd=middle["kvd"],
        slower=size_bytes / slowest_s / GIGA,
        raw=middle["raw"],
        raw_same=middle["raw_same"],
        plain=middle["plain"],
        plain_cut=middle.get("plain_cut"),
    )


def _halves(plan: StreamPlan, seed: int | None) -> tuple[bytes, bytes]:
    """Pages to read and others to write: two runs, or in random order."""
    ids = np.arange(1, 2 * plan.pages + 1)
    if seed is not None:
        ids = np.random.default_rng(seed).permutation(ids)
    return pack_ids(ids[: plan.pages].tolist()), pack_ids(ids[plan.pages :].tolist())


def goals_of(sites: tuple[StreamSiteResult, ...]) -> tuple[Goal, ...]:
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


json_option = click.option(
    "--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the result here."
)

STREAM_HEADERS = (
    "network",
    "memory",
    "pages",
    "ways",
    "kvd GB/s",
    "raw NIXL",
    "same pages",
    "plain",
    "plain cut",
    "kvd/raw",
    "kvd/same",
    "kvd/plain",
    "slower way",
    "runs",
    "lag p99 ms",
    "max",
    "beats",
)


@click.command("stream")
@click.option("--pages", default=128, show_default=True, help="Pages of 2 MiB per handoff.")
@click.option("--repeats", default=15, show_default=True, help="Handoffs per case.")
@click.option("--lag-s", default=3.0, show_default=True, help="Seconds of load for the loop lag.")
@click.option("--seed", default=1, show_default=True, help="Of the random order of pages.")
@json_option
def command(pages: int, repeats: int, lag_s: float, seed: int, file: Path | None) -> None:
    """Goodput of one handoff, beside raw NIXL and plain copies of the same bytes.

    Two daemons with pools of a Llama-8B shape (2 MiB pages of 16 tokens), on this host and, where
    root may make them, in two network namespaces; on huge and on 4 KiB pages.
    """
    plan = StreamPlan(pages=pages, repeats=repeats, lag_s=lag_s, seed=seed)
    sites: list[StreamSiteResult] = []
    skipped: list[SkippedSite] = []
    with bar("stream", steps_of(4)) as told:
        for memory in (HUGE, SMALL):
            with tempfile.TemporaryDirectory(prefix="kvd-bench-") as directory:
                sites.append(measure_site(shared_host(memory), plan, Path(directory), told))
        for memory in (HUGE, SMALL):
            try:
                with (
                    contextlib.ExitStack() as stack,
                    tempfile.TemporaryDirectory(prefix="kvd-bench-") as directory,
                ):
                    site = stack.enter_context(namespaces(memory))
                    sites.append(measure_site(site, plan, Path(directory), told))
            except (NoNamespaces, DaemonFailed) as why:
                skipped.append(SkippedSite(f"TCP, two namespaces, {memory}", str(why)))
    result = StreamResult(
        plan=plan, sites=tuple(sites), skipped=tuple(skipped), goals=goals_of(tuple(sites))
    )
    _show(result)
    if file is not None:
        write_json(file, result)


def _show(result: StreamResult) -> None:
    plan = result.plan
    show_table(
        f"A handoff of {plan.size_bytes / 2**20:.0f} MiB in {plan.pages} pages; "
        f"medians of {plan.repeats}, GB/s",
        STREAM_HEADERS,
        [_row(case) for site in result.sites for case in site.cases],
    )
    show_notes(
        [
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
            *(
                f"{site.network}, {site.memory}: of {site.pool_bytes / 2**20:.0f} MiB per pool, in "
                f"huge pages {_mib(site.huge_bytes)} (raw {_mib(site.raw_huge_bytes)}); raw with "
                f"{site.tuning}; idle lag p99 {site.idle_lag_p99_s * 1e3:.3g} ms, max "
                f"{site.idle_lag_max_s * 1e3:.3g} ms"
                for site in result.sites
            ),
            *(f"{one.network}: skipped, {one.why}" for one in result.skipped),
        ]
    )
    show_goals(result.goals)


def _row(result: StreamCaseResult) -> list[str]:
    case, rates = result.case, result.rates
    return [
        case.network,
        case.memory,
        case.order,
        str(case.ways),
        f"{rates.kvd:.2f}",
        f"{rates.raw:.2f}",
        f"{rates.raw_same:.2f}",
        f"{rates.plain:.2f}",
        "-" if rates.plain_cut is None else f"{rates.plain_cut:.2f}",
        f"{result.to_raw:.2f}",
        f"{result.to_raw_same:.2f}",
        f"{result.to_plain:.2f}",
        f"{rates.slower:.2f}",
        f"{result.source_runs}/{result.destination_runs}",
        f"{result.lag_p99_s * 1e3:.3g}",
        f"{result.lag_max_s * 1e3:.3g}",
        str(result.lag_beats),
    ]


def _mib(sizes: tuple[int, ...]) -> str:
    return " and ".join(f"{size / 2**20:.0f}" for size in sizes)
