"""The Prometheus page: counters and gauges under their public names.

prometheus_client takes about as long to import as the rest of the daemon takes to start, so it is
imported by ``load`` or by the first scrape, never by importing this file. It formats; it keeps no
state of ours, and its global registry stays empty.

Invariant: a counter's series that was shown once is shown until the process ends.

Metric families of prometheus_client from what ``metrics`` and ``gauges`` hold.

prometheus_client is imported by whoever makes one: a daemon without HTTP never loads it.

What is read off the daemon's state at the moment of a scrape.

``gauges_of`` makes it from the snapshot that ``kvd status`` prints, so that both say the same.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import msgspec

from kvd.wire.snapshot import AuditState, BufferState, WindowState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from kvd.observe.metrics import Counter, Histogram, Histograms, Labels, Metrics
    from kvd.wire.snapshot import PoolState, Snapshot

    Series = Iterable[tuple[Labels, float]]


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Build(msgspec.Struct, frozen=True):
    """What runs: the label values of ``kvd_build_info``."""

    version: str
    proto: str
    nixl: str


class Exposition:
    """Renders one node's metrics. ``read_gauges`` is called once for each page."""

    def __init__(self, metrics: Metrics, build: Build, read_gauges: Callable[[], Gauges]) -> None:
        self._metrics = metrics
        self._build = build
        self._read_gauges = read_gauges
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
        yield from _state(self._read_gauges(), self._build)


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


def _state(gauges: Gauges, build: Build) -> Iterator[Metric]:
    """The node as it is."""
    from prometheus_client.core import InfoMetricFamily  # noqa: PLC0415

    yield from _pools(gauges)
    yield from _peers(gauges)
    yield gauge(
        "kvd_leases", "Leases by reason and state.", ("reason", "state"), gauges.leases.items()
    )
    yield gauge(
        "kvd_lease_age_seconds",
        "Age of the oldest lease.",
        ("quantile",),
        [(("max",), gauges.oldest_lease_s)],
    )
    yield gauge(
        "kvd_inflight_handoffs",
        "Handoffs under way.",
        ("role",),
        [((role,), count) for role, count in gauges.inflight.items()],
    )
    yield gauge("kvd_waiting_requests", "Requests that wait for room.", (), [((), gauges.waiting)])
    yield gauge("kvd_engine_clients", "Engine sessions.", (), [((), gauges.engine_clients)])
    yield gauge(
        "kvd_draining",
        "1 while this node begins nothing new.",
        (),
        [((), int(gauges.is_draining))],
    )
    yield gauge(
        "kvd_transfer_generation",
        "Generation of the transfer process; a step says that it was restarted.",
        (),
        [((), gauges.transfer_generation)],
    )
    yield total("kvd_events", "Events since the daemon began.", gauges.last_event)
    yield gauge("kvd_last_event_seq", "Number of the last event.", (), [((), gauges.last_event)])
    yield from _audit(gauges.audit)
    yield gauge("kvd_uptime_seconds", "Age of this incarnation.", (), [((), gauges.uptime_s)])
    yield InfoMetricFamily("kvd_build", "What runs here.", value=msgspec.structs.asdict(build))


def _audit(audit: AuditState) -> Iterator[Metric]:
    """The standing audit."""
    yield gauge(
        "kvd_audit_findings", "Rules that are broken now; must stay 0.", (), [((), audit.findings)]
    )
    yield total("kvd_audit_sweeps", "Whole looks at pages, locks and transfers.", audit.sweeps)
    yield total("kvd_audit_seconds", "Processor time of the standing audit.", audit.spent_s)
    yield gauge(
        "kvd_audit_age_seconds",
        "Since the last sweep ended.",
        (),
        [((), audit.last_sweep_ago_s)],
    )


def _pools(gauges: Gauges) -> Iterator[Metric]:
    """Pages and bytes of each component."""
    names = ("pool", "component")
    yield gauge(
        "kvd_pool_pages",
        "Pages by state; the states add up to all pages.",
        (*names, "state"),
        [
            ((pool.pool, pool.component, state), count)
            for pool in gauges.pools
            for state, count in pool.pages.items()
        ],
    )
    yield gauge(
        "kvd_pool_bytes",
        "Memory of the pool.",
        names,
        [
            ((pool.pool, component), size)
            for pool in gauges.pools
            for component, size in pool.memory_bytes.items()
        ],
    )
    yield gauge(
        "kvd_pool_saved_pages",
        "Pages of host memory for retracted leases, by state.",
        (*names, "state"),
        [
            ((pool.pool, pool.component, state), count)
            for pool in gauges.pools
            for state, count in pool.saved_pages.items()
        ],
    )
    yield gauge(
        "kvd_pool_evictable_pages",
        "Cached pages that nobody locks.",
        names,
        [((pool.pool, pool.component), pool.evictable_pages) for pool in gauges.pools],
    )
    yield gauge(
        "kvd_pool_locked_pages",
        "Cached pages that a lease locks.",
        names,
        [((pool.pool, pool.component), pool.locked_pages) for pool in gauges.pools],
    )
    yield from _windows(gauges)
    yield from _buffers(gauges)


def _windows(gauges: Gauges) -> Iterator[Metric]:
    """What sliding windows save, where a component has one."""
    windows = [
        ((pool.pool, pool.component), pool.window)
        for pool in gauges.pools
        if pool.window is not None
    ]
    if not windows:
        return
    names = ("pool", "component")
    yield gauge(
        "kvd_pool_window_pages",
        "Pages that live leases have of a window: mapped, and with one for every token (full).",
        (*names, "allocation"),
        [
            ((*labels, allocation), pages)
            for labels, one in windows
            for allocation, pages in (("mapped", one.mapped_pages), ("full", one.full_pages))
        ],
    )
    yield totals(
        "kvd_pool_window_slides",
        "Times that a lease gave back what had left its window.",
        names,
        [(labels, one.slides) for labels, one in windows],
    )


def _buffers(gauges: Gauges) -> Iterator[Metric]:
    """How the device buffer fares, where there is one."""
    buffers = [
        ((pool.pool, pool.component), pool.buffer)
        for pool in gauges.pools
        if pool.buffer is not None
    ]
    if not buffers:
        return
    names = ("pool", "component")
    yield totals(
        "kvd_pool_buffer_pages_wanted",
        "Pages that engines fetched: there already (hit), or copied for it (miss).",
        (*names, "result"),
        [
            ((*labels, result), pages)
            for labels, one in buffers
            for result, pages in (("hit", one.hits), ("miss", one.misses))
        ],
    )
    yield totals(
        "kvd_pool_buffer_copied_bytes",
        "Bytes copied into the device buffer.",
        names,
        [(labels, one.copied_bytes) for labels, one in buffers],
    )


def _peers(gauges: Gauges) -> Iterator[Metric]:
    """Other daemons."""
    peers = gauges.peers
    up = [((peer.peer,), int(peer.is_up)) for peer in peers]
    yield gauge("kvd_peer_up", "1 if the peer is heard, 0 if it is suspect or lost.", ("peer",), up)
    yield gauge(
        "kvd_peer_generation",
        "Generation of the peer's transfer process.",
        ("peer",),
        [((peer.peer,), peer.generation) for peer in peers],
    )
    yield gauge(
        "kvd_rtt_seconds",
        "Round trip of the last Ping.",
        ("peer",),
        [((peer.peer,), peer.round_trip_s) for peer in peers],
    )


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


def totals(name: str, doc: str, labels: Labels, values: Series) -> Metric:
    """A counter family whose totals are read off the state."""
    from prometheus_client.core import CounterMetricFamily  # noqa: PLC0415

    family = CounterMetricFamily(name, doc, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def gauge(name: str, doc: str, labels: Labels, values: Series) -> Metric:
    """A gauge family."""
    from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415

    family = GaugeMetricFamily(name, doc, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


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


OVER = frozenset({"ready", "closed", "settled", "forgotten"})
"""States of a part in which nothing is under way any more."""


class PoolGauges(msgspec.Struct, frozen=True):
    """Pages of one component with page ids of its own.

    ``pages`` is by state, and its values add up to all pages. ``memory_bytes`` is by component: its
    own, and those in lockstep with it.
    """

    pool: str
    component: str
    memory_bytes: dict[str, int]
    pages: dict[str, int]
    evictable_pages: int
    locked_pages: int
    saved_pages: dict[str, int]
    """Of the host memory beside it for retracted leases, by state."""
    window: WindowState | None
    buffer: BufferState | None


class PeerGauges(msgspec.Struct, frozen=True):
    """One other daemon."""

    peer: str
    is_up: bool
    generation: int
    round_trip_s: float


class Gauges(msgspec.Struct, frozen=True):
    """The state of the node. ``leases`` is by reason and state, ``inflight`` by role."""

    pools: tuple[PoolGauges, ...]
    leases: dict[tuple[str, str], int]
    oldest_lease_s: float
    inflight: dict[str, int]
    waiting: int
    peers: tuple[PeerGauges, ...]
    engine_clients: int
    is_draining: bool
    transfer_generation: int
    last_event: int
    uptime_s: float
    audit: AuditState


def gauges_of(snapshot: Snapshot) -> Gauges:
    """The gauges that a snapshot gives."""
    leases = collections.Counter(
        (lease.reason.partition(" ")[0], lease.state) for lease in snapshot.leases
    )
    inflight = collections.Counter(room.side for room in snapshot.rooms if room.state not in OVER)
    return Gauges(
        pools=tuple(map(_pool_gauges, snapshot.pools)),
        leases=dict(leases),
        oldest_lease_s=max((lease.age_s for lease in snapshot.leases), default=0.0),
        inflight={"decode": inflight["decode"], "prefill": inflight["prefill"]},
        waiting=len(snapshot.waiting),
        peers=tuple(
            PeerGauges(
                peer=peer.name,
                is_up=peer.state == "up",
                generation=peer.generation,
                round_trip_s=peer.round_trip_ms / 1e3,
            )
            for peer in snapshot.peers
        ),
        engine_clients=len(snapshot.clients),
        is_draining=snapshot.drain is not None,
        transfer_generation=snapshot.generation,
        last_event=snapshot.last_event,
        uptime_s=snapshot.uptime_s,
        audit=snapshot.audit,
    )


def _pool_gauges(pool: PoolState) -> PoolGauges:
    counted = {
        "free": pool.free_pages,
        "leased": pool.held_pages,
        "cached": pool.cached_pages,
        "quarantined": pool.quarantined_pages,
        "condemned": pool.condemned_pages,
    }
    memory_bytes = {pool.component: pool.page_bytes * pool.total_pages}
    for one in pool.companions:
        memory_bytes[one.component] = one.page_bytes * one.total_pages
    return PoolGauges(
        pool=pool.pool,
        component=pool.component,
        memory_bytes=memory_bytes,
        pages=counted | {"reserved": pool.total_pages - sum(counted.values())},
        evictable_pages=pool.evictable_pages,
        locked_pages=pool.locked_pages,
        saved_pages={
            "used": pool.saved_pages,
            "free": pool.saved_capacity_pages - pool.saved_pages,
        },
        window=pool.window,
        buffer=pool.buffer,
    )
