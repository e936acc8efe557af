"""The Prometheus page: counters and gauges under their public names.

prometheus_client takes about as long to import as the rest of the daemon takes to start, so it is
imported by ``load`` or by the first scrape, never by importing this file. It formats; it keeps no
state of ours, and its global registry stays empty.

Invariant: a counter's series that was shown once is shown until the process ends.

What is counted is in ``metrics``. What is read off the node at the moment of a scrape is a row of
``STATE_FAMILIES``, over the snapshot that ``kvd status`` prints, so that both say the same.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from kvd.observe.metrics import Labels
from kvd.wire.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from kvd.observe.metrics import Counter, Histogram, Histograms, Metrics
    from kvd.wire.snapshot import PeerState, PoolState

    Series = Iterable[tuple[Labels, float]]


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Build(msgspec.Struct, frozen=True):
    """What runs: the label values of ``kvd_build_info``."""

    version: str
    proto: str
    nixl: str


class Exposition:
    """Renders one node's metrics. ``read_snapshot`` is called once for each page."""

    def __init__(
        self, metrics: Metrics, build: Build, read_snapshot: Callable[[], Snapshot]
    ) -> None:
        self._metrics = metrics
        self._build = build
        self._read_snapshot = read_snapshot
        self._registry: CollectorRegistry | None = None

    def load(self) -> None:
        """Import the formatter. Call it in a thread once the daemon is ready."""
        from prometheus_client import CollectorRegistry, ProcessCollector  # noqa: PLC0415

        if self._registry is None:
            registry = CollectorRegistry()
            registry.register(self)
            ProcessCollector(registry=registry)
            self._registry = registry

    def describe(self) -> list[Metric]:
        """Nothing: lets the registry take this collector without a scrape."""
        return []

    def render(self) -> bytes:
        """The page, in the text format 0.0.4."""
        from prometheus_client import generate_latest  # noqa: PLC0415

        self.load()
        assert self._registry is not None
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Every family, for prometheus_client."""
        yield from _handoffs(self._metrics)
        yield from _ledger(self._metrics)
        yield from _loop(self._metrics)
        yield from _state(self._read_snapshot(), self._build)


def _handoffs(metrics: Metrics) -> Iterator[Metric]:
    """What handoffs did."""
    yield counter(
        "kvd_handoffs",
        "Handoffs that ended on this node.",
        metrics.handoffs,
        ("role", "outcome", "reason"),
    )
    yield counter(
        "kvd_handoff_bytes",
        "KV bytes that handoffs moved.",
        metrics.handoff_bytes,
        ("dir",),
        (("received",), ("sent",)),
    )
    yield counter(
        "kvd_handoff_bytes_saved",
        "KV bytes that handoffs need not move, because the decode side had them.",
        metrics.handoff_bytes_saved,
        ("dir",),
        (("received",), ("sent",)),
    )
    yield histogram(
        "kvd_decode_prefix_tokens",
        "Tokens of a received prompt that were cached here already.",
        metrics.decode_prefix_tokens,
    )
    yield histograms(
        "kvd_handoff_seconds",
        "From the first request to the end.",
        metrics.handoff_seconds,
        ("role",),
    )
    yield histograms(
        "kvd_handoff_stage_seconds",
        "Time a part of a handoff spent in one stage.",
        metrics.stage_seconds,
        ("role", "stage"),
    )


def _ledger(metrics: Metrics) -> Iterator[Metric]:
    """What happened to pages and leases."""
    yield counter(
        "kvd_evicted_pages",
        "Cached pages that gave way.",
        metrics.evicted_pages,
        ("pool", "component", "reason"),
    )
    yield counter("kvd_leases_released", "Leases that ended.", metrics.leases_released, ("cause",))
    yield counter(
        "kvd_leases_retracted",
        "Running leases that gave their pages back, by what was kept of them.",
        metrics.leases_retracted,
        ("kept",),
        (("host",), ("nothing",)),
    )
    yield counter(
        "kvd_retraction_bytes",
        "KV bytes of retracted leases: saved, restored, and spared because the tree had them.",
        metrics.retraction_bytes,
        ("what",),
        (("saved",), ("restored",), ("spared",)),
    )
    yield total(
        "kvd_ledger_violations", "Invariants found broken; must stay 0.", metrics.violations
    )
    yield counter(
        "kvd_corrupt_pages",
        "Received pages that were not what was sent; none of them was cached.",
        metrics.corrupt_pages,
        ("peer",),
    )
    yield counter("kvd_peers_lost", "Peers given up as lost.", metrics.peers_lost, ("peer",))
    yield counter(
        "kvd_peer_handshakes_failed",
        "Connections with peers that ended before the first message.",
        metrics.handshakes_failed,
        ("reason",),
    )


def _loop(metrics: Metrics) -> Iterator[Metric]:
    """How requests and the event loop fare."""
    yield histograms("kvd_rpc_seconds", "From request to answer.", metrics.rpc_seconds, ("op",))
    yield counter("kvd_rpc_errors", "Requests refused.", metrics.rpc_errors, ("op", "code"))
    yield counter(
        "kvd_messages_refused",
        "Messages that could not be acted on.",
        metrics.messages_refused,
        ("socket", "code"),
    )
    yield histogram(
        "kvd_loop_lag_seconds", "How late timers of the event loop fire.", metrics.loop_lag_seconds
    )


class StateFamily(msgspec.Struct, frozen=True):
    """One family that is read off the snapshot: ``series`` gives label values and figures.

    It is a gauge, or a counter where ``is_total``; one that is ``is_optional`` is not on the page
    while it has no series.
    """

    name: str
    doc: str
    series: Callable[[Snapshot], Series]
    labels: Labels = ()
    is_total: bool = False
    is_optional: bool = False


def _one(read: Callable[[Snapshot], float]) -> Callable[[Snapshot], Series]:
    """A family without labels."""
    return lambda node: [((), read(node))]


def _each_pool(read: Callable[[PoolState], dict[str, float]]) -> Callable[[Snapshot], Series]:
    """Of each component by one more label."""
    return lambda node: [
        ((pool.pool, pool.component, name), figure)
        for pool in node.pools
        for name, figure in read(pool).items()
    ]


def _of_pool(read: Callable[[PoolState], float | None]) -> Callable[[Snapshot], Series]:
    """Of each component that has such a figure."""
    return lambda node: [
        ((pool.pool, pool.component), figure)
        for pool in node.pools
        if (figure := read(pool)) is not None
    ]


def _each_peer(read: Callable[[PeerState], float]) -> Callable[[Snapshot], Series]:
    return lambda node: [((peer.name,), read(peer)) for peer in node.peers]


def _pages_by_state(pool: PoolState) -> dict[str, float]:
    """They add up to all pages."""
    counted: dict[str, float] = {
        "free": pool.free_pages,
        "leased": pool.held_pages,
        "cached": pool.cached_pages,
        "quarantined": pool.quarantined_pages,
        "condemned": pool.condemned_pages,
    }
    return counted | {"reserved": pool.total_pages - sum(counted.values())}


def _memory_bytes(node: Snapshot) -> Series:
    """Of each component, those in lockstep with it too."""
    return [
        ((pool.pool, component), size)
        for pool in node.pools
        for component, size in {
            pool.component: pool.page_bytes * pool.total_pages,
            **{one.component: one.page_bytes * one.total_pages for one in pool.companions},
        }.items()
    ]


def _window_pages(pool: PoolState) -> dict[str, float]:
    window = pool.window
    return {"mapped": window.mapped_pages, "full": window.full_pages} if window else {}


def _leases(node: Snapshot) -> Series:
    kinds = [(lease.reason.partition(" ")[0], lease.state) for lease in node.leases]
    return collections.Counter(kinds).items()


def _inflight(node: Snapshot) -> Series:
    sides = [room.side for room in node.rooms if room.state not in OVER]
    return [((role,), sides.count(role)) for role in ("decode", "prefill")]


OVER = frozenset({"ready", "closed", "settled", "forgotten"})
"""States of a part in which nothing is under way any more."""

_POOL = ("pool", "component")
STATE_FAMILIES = (
    StateFamily(
        "kvd_pool_pages",
        "Pages by state; the states add up to all pages.",
        series=_each_pool(_pages_by_state),
        labels=(*_POOL, "state"),
    ),
    StateFamily("kvd_pool_bytes", "Memory of the pool.", series=_memory_bytes, labels=_POOL),
    StateFamily(
        "kvd_pool_saved_pages",
        "Pages of host memory for retracted leases, by state.",
        series=_each_pool(
            lambda pool: {
                "used": pool.saved_pages,
                "free": pool.saved_capacity_pages - pool.saved_pages,
            }
        ),
        labels=(*_POOL, "state"),
    ),
    StateFamily(
        "kvd_pool_evictable_pages",
        "Cached pages that nobody locks.",
        series=_of_pool(lambda pool: pool.evictable_pages),
        labels=_POOL,
    ),
    StateFamily(
        "kvd_pool_locked_pages",
        "Cached pages that a lease locks.",
        series=_of_pool(lambda pool: pool.locked_pages),
        labels=_POOL,
    ),
    StateFamily(
        "kvd_pool_window_pages",
        "Pages that live leases have of a window: mapped, and with one for every token (full).",
        series=_each_pool(_window_pages),
        labels=(*_POOL, "allocation"),
        is_optional=True,
    ),
    StateFamily(
        "kvd_pool_window_slides",
        "Times that a lease gave back what had left its window.",
        series=_of_pool(lambda pool: pool.window.slides if pool.window else None),
        labels=_POOL,
        is_total=True,
        is_optional=True,
    ),
    StateFamily(
        "kvd_pool_buffer_pages_wanted",
        "Pages that engines fetched: there already (hit), or copied for it (miss).",
        series=_each_pool(
            lambda pool: (
                {"hit": pool.buffer.hits, "miss": pool.buffer.misses} if pool.buffer else {}
            )
        ),
        labels=(*_POOL, "result"),
        is_total=True,
        is_optional=True,
    ),
    StateFamily(
        "kvd_pool_buffer_copied_bytes",
        "Bytes copied into the device buffer.",
        series=_of_pool(lambda pool: pool.buffer.copied_bytes if pool.buffer else None),
        labels=_POOL,
        is_total=True,
        is_optional=True,
    ),
    StateFamily(
        "kvd_peer_up",
        "1 if the peer is heard, 0 if it is suspect or lost.",
        series=_each_peer(lambda peer: int(peer.state == "up")),
        labels=("peer",),
    ),
    StateFamily(
        "kvd_peer_generation",
        "Generation of the peer's transfer process.",
        series=_each_peer(lambda peer: peer.generation),
        labels=("peer",),
    ),
    StateFamily(
        "kvd_rtt_seconds",
        "Round trip of the last Ping.",
        series=_each_peer(lambda peer: peer.round_trip_ms / 1e3),
        labels=("peer",),
    ),
    StateFamily(
        "kvd_leases", "Leases by reason and state.", series=_leases, labels=("reason", "state")
    ),
    StateFamily(
        "kvd_lease_age_seconds",
        "Age of the oldest lease.",
        series=lambda node: [(("max",), max((lease.age_s for lease in node.leases), default=0.0))],
        labels=("quantile",),
    ),
    StateFamily("kvd_inflight_handoffs", "Handoffs under way.", series=_inflight, labels=("role",)),
    StateFamily(
        "kvd_waiting_requests",
        "Requests that wait for room.",
        series=_one(lambda node: len(node.waiting)),
    ),
    StateFamily(
        "kvd_engine_clients", "Engine sessions.", series=_one(lambda node: len(node.clients))
    ),
    StateFamily(
        "kvd_draining",
        "1 while this node begins nothing new.",
        series=_one(lambda node: int(node.drain is not None)),
    ),
    StateFamily(
        "kvd_transfer_generation",
        "Generation of the transfer process; a step says that it was restarted.",
        series=_one(lambda node: node.generation),
    ),
    StateFamily(
        "kvd_events",
        "Events since the daemon began.",
        series=_one(lambda node: node.last_event),
        is_total=True,
    ),
    StateFamily(
        "kvd_last_event_seq",
        "Number of the last event.",
        series=_one(lambda node: node.last_event),
    ),
    StateFamily(
        "kvd_audit_findings",
        "Rules that are broken now; must stay 0.",
        series=_one(lambda node: node.audit.findings),
    ),
    StateFamily(
        "kvd_audit_sweeps",
        "Whole looks at pages, locks and transfers.",
        series=_one(lambda node: node.audit.sweeps),
        is_total=True,
    ),
    StateFamily(
        "kvd_audit_seconds",
        "Processor time of the standing audit.",
        series=_one(lambda node: node.audit.spent_s),
        is_total=True,
    ),
    StateFamily(
        "kvd_audit_age_seconds",
        "Since the last sweep ended.",
        series=_one(lambda node: node.audit.last_sweep_ago_s),
    ),
    StateFamily(
        "kvd_uptime_seconds", "Age of this incarnation.", series=_one(lambda node: node.uptime_s)
    ),
)
"""In the order of the page."""


def _state(node: Snapshot, build: Build) -> Iterator[Metric]:
    """The node as it is."""
    from prometheus_client.core import (  # noqa: PLC0415
        CounterMetricFamily,
        GaugeMetricFamily,
        InfoMetricFamily,
    )

    for one in STATE_FAMILIES:
        make = CounterMetricFamily if one.is_total else GaugeMetricFamily
        series = one.series(node)
        if not series and one.is_optional:
            continue
        family = make(one.name, one.doc, labels=one.labels)
        for label_values, figure in series:
            family.add_metric(label_values, figure)
        yield family
    yield InfoMetricFamily("kvd_build", "What runs here.", value=msgspec.structs.asdict(build))


def counter(
    name: str, doc: str, counter: Counter, labels: Labels, always: tuple[Labels, ...] = ()
) -> Metric:
    """A counter family; the series in ``always`` are shown even at 0."""
    from prometheus_client.core import CounterMetricFamily  # noqa: PLC0415

    family = CounterMetricFamily(name, doc, labels=labels)
    for values, total in (dict.fromkeys(always, 0) | counter.values).items():
        family.add_metric(values, total)
    return family


def total(name: str, doc: str, total: float) -> Metric:
    """A counter without labels."""
    from prometheus_client.core import CounterMetricFamily  # noqa: PLC0415

    return CounterMetricFamily(name, doc, value=total)


def histogram(name: str, doc: str, histogram: Histogram) -> Metric:
    """A histogram without labels."""
    from prometheus_client.core import HistogramMetricFamily  # noqa: PLC0415

    return HistogramMetricFamily(
        name, doc, buckets=_cumulated(histogram), sum_value=histogram.total
    )


def histograms(name: str, doc: str, histograms: Histograms, labels: Labels) -> Metric:
    """A histogram family."""
    from prometheus_client.core import HistogramMetricFamily  # noqa: PLC0415

    family = HistogramMetricFamily(name, doc, labels=labels)
    for values, histogram in histograms.values.items():
        family.add_metric(values, _cumulated(histogram), histogram.total)
    return family


def _cumulated(histogram: Histogram) -> list[tuple[str, float]]:
    """Prometheus buckets: how many values lie at or below each bound."""
    below = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), below))
    return buckets
