"""The Prometheus page: counters and gauges under their public names.

prometheus_client takes about as long to import as the rest of the daemon takes to start, so it is
imported by ``load`` or by the first scrape, never by importing this file. It formats; it keeps no
state of ours, and its global registry stays empty.

Invariant: a counter's series that was shown once is shown until the process ends.

What is counted is in ``metrics``. The rest is read off the node at the moment of a scrape, from the
snapshot that ``kvd status`` prints, so that both say the same.
"""

from __future__ import annotations

from collections import Counter as Counted
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec import UNSET

from kvd.observe.metrics import Counter
from kvd.wire.snapshot import IN_POOL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

    from kvd.observe.metrics import Histogram, Histograms, Labels, Metrics
    from kvd.wire.snapshot import (
        KvEventState,
        PeerState,
        PoolState,
        QuotaState,
        Snapshot,
        ThrashState,
        TierState,
    )

Values = TypeVar("Values", bound="Labels")

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
        from prometheus_client.core import InfoMetricFamily  # noqa: PLC0415

        for family in self._metrics.families():
            yield _counted(family)
        node = self._read_snapshot()
        yield from _of_pools(node.pools)
        yield from _of_peers(node.peers)
        if node.tiers:
            yield from _of_tiers(node.tiers)
            yield from _of_tier_thrash(node.tiers, node.evictions.thrashing)
        if node.quotas:
            yield from _of_quotas(node.quotas)
        if node.kv_events is not UNSET:
            yield from _of_kv_events(node.kv_events)
        yield from _of_node(node)
        build = msgspec.structs.asdict(self._build)
        yield InfoMetricFamily("kvd_build", "What runs here.", value=build)


def _counted(counted: Counter | Histograms) -> Metric:
    """A family of ``metrics``."""
    from prometheus_client.core import (  # noqa: PLC0415
        CounterMetricFamily,
        HistogramMetricFamily,
    )

    if isinstance(counted, Counter):
        return _filled(
            CounterMetricFamily(counted.name, counted.doc, labels=counted.labels), counted.values
        )
    family = HistogramMetricFamily(counted.name, counted.doc, labels=counted.labels)
    for values, histogram in counted.values.items():
        family.add_metric(values, _cumulated(histogram), histogram.total)
    return family


def _filled(
    family: CounterMetricFamily | GaugeMetricFamily, figure: float | Mapping[Values, float]
) -> Metric:
    series = figure.items() if isinstance(figure, Mapping) else [((), figure)]
    for values, each in series:
        family.add_metric(values, each)
    return family


def _cumulated(histogram: Histogram) -> list[tuple[str, float]]:
    """Prometheus buckets: how many values lie at or below each bound."""
    below = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), below))
    return buckets


# ---- read off the snapshot -----------------------------------------------------------------------


def gauge(
    name: str, doc: str, figure: float | Mapping[Values, float], labels: Labels = ()
) -> Metric:
    """A family of figures that go up and down: one, or one for each tuple of label values."""
    from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415

    return _filled(GaugeMetricFamily(name, doc, labels=labels), figure)


def total(
    name: str, doc: str, figure: float | Mapping[Values, float], labels: Labels = ()
) -> Metric:
    """The same of figures that only grow."""
    from prometheus_client.core import CounterMetricFamily  # noqa: PLC0415

    return _filled(CounterMetricFamily(name, doc, labels=labels), figure)


_POOL = ("pool", "component")


def _of_pools(pools: tuple[PoolState, ...]) -> Iterator[Metric]:
    """Each component with page ids of its own; windows and buffers where a pool has them."""

    def each(read: Callable[[PoolState], float]) -> dict[Labels, float]:
        return {(pool.pool, pool.component): read(pool) for pool in pools}

    def by(read: Callable[[PoolState], dict[str, float]]) -> dict[Labels, float]:
        return {
            (pool.pool, pool.component, name): figure
            for pool in pools
            for name, figure in read(pool).items()
        }

    states = "Pages by state; the states add up to all pages."
    yield gauge("kvd_pool_pages", states, by(_pages_by_state), (*_POOL, "state"))
    yield gauge("kvd_pool_bytes", "Memory of the pool.", _memory_bytes(pools), _POOL)
    saved = "Pages of host memory for retracted leases, by state."
    yield gauge("kvd_pool_saved_pages", saved, by(_saved_pages), (*_POOL, "state"))
    evictable, locked = "Cached pages that nobody locks.", "Cached pages that a lease locks."
    yield gauge("kvd_pool_evictable_pages", evictable, each(lambda p: p.evictable_pages), _POOL)
    yield gauge("kvd_pool_locked_pages", locked, each(lambda p: p.locked_pages), _POOL)
    promised = "Free or evictable pages that leases are sure of: no headroom of anybody else."
    yield gauge("kvd_pool_promised_pages", promised, each(lambda p: p.promised_pages), _POOL)
    windows = {(p.pool, p.component): p.window for p in pools if p.window is not None}
    if windows:
        yield gauge(
            "kvd_pool_window_pages",
            "Pages that live leases have of a window: mapped, and with one for every token (full).",
            by(_window_pages),
            (*_POOL, "allocation"),
        )
        slides = "Times that a lease gave back what had left its window."
        counts = {at: window.slides for at, window in windows.items()}
        yield total("kvd_pool_window_slides", slides, counts, _POOL)
    buffers = {(p.pool, p.component): p.buffer for p in pools if p.buffer is not None}
    if buffers:
        wanted = "Pages that engines fetched: there already (hit), or copied for it (miss)."
        labels = (*_POOL, "result")
        yield total("kvd_pool_buffer_pages_wanted", wanted, by(_buffer_pages), labels)
        copied = {at: buffer.copied_bytes for at, buffer in buffers.items()}
        doc = "Bytes copied into the device buffer."
        yield total("kvd_pool_buffer_copied_bytes", doc, copied, _POOL)


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


def _memory_bytes(pools: tuple[PoolState, ...]) -> dict[Labels, float]:
    """Of each component, those in lockstep with it too."""
    sizes: dict[Labels, float] = {}
    for pool in pools:
        sizes[pool.pool, pool.component] = pool.page_bytes * pool.total_pages
        for companion in pool.companions:
            sizes[pool.pool, companion.component] = companion.page_bytes * companion.total_pages
    return sizes


def _saved_pages(pool: PoolState) -> dict[str, float]:
    return {"used": pool.saved_pages, "free": pool.saved_capacity_pages - pool.saved_pages}


def _window_pages(pool: PoolState) -> dict[str, float]:
    window = pool.window
    return {"mapped": window.mapped_pages, "full": window.full_pages} if window else {}


def _buffer_pages(pool: PoolState) -> dict[str, float]:
    return {"hit": pool.buffer.hits, "miss": pool.buffer.misses} if pool.buffer else {}


def _of_peers(peers: tuple[PeerState, ...]) -> Iterator[Metric]:
    def each(read: Callable[[PeerState], float]) -> dict[Labels, float]:
        return {(peer.name,): read(peer) for peer in peers}

    up = "1 if the peer is heard, 0 if it is suspect or lost."
    yield gauge("kvd_peer_up", up, each(lambda peer: int(peer.state == "up")), ("peer",))
    generation = "Generation of the peer's transfer process."
    yield gauge("kvd_peer_generation", generation, each(lambda peer: peer.generation), ("peer",))
    slow = "1 if bytes of a device travel to the peer by software emulation, at about 1 GB/s."
    yield gauge("kvd_peer_slow_path", slow, each(lambda peer: int(bool(peer.slow_path))), ("peer",))
    trips = each(lambda peer: peer.round_trip_ms / 1e3)
    yield gauge("kvd_rtt_seconds", "Round trip of the last Ping.", trips, ("peer",))


def _is_written(tier: TierState) -> bool:
    return tier.state == "serving" and not tier.why


def _of_tiers(tiers: tuple[TierState, ...]) -> Iterator[Metric]:
    """What lies below the pool, and what came of it."""

    def each(read: Callable[[TierState], float]) -> dict[Labels, float]:
        return {(tier.tier,): read(tier) for tier in tiers}

    def by(read: Callable[[TierState], dict[str, float]]) -> dict[Labels, float]:
        return {(tier.tier, name): n for tier in tiers for name, n in read(tier).items()}

    up = "1 if the tier serves, 0 if it is away or down."
    yield gauge("kvd_tier_up", up, each(lambda t: int(t.state == "serving")), ("tier",))
    written = "1 if the tier is written, 0 if it is not or takes nothing: a full disk."
    yield gauge("kvd_tier_written", written, each(lambda t: int(_is_written(t))), ("tier",))
    used = "What lies there takes."
    yield gauge("kvd_tier_used_bytes", used, each(lambda t: t.objects * t.object_bytes), ("tier",))
    size = "What may lie there takes at most, where that is this node's to say."
    full = {(t.tier,): t.capacity_objects * t.object_bytes for t in tiers if not t.is_shared}
    yield gauge("kvd_tier_size_bytes", size, full, ("tier",))
    asked_for = "Questions for what other nodes have written to a tier that is shared, by outcome."
    yield total("kvd_tier_probes", asked_for, by(_tier_probes), ("tier", "outcome"))
    moving = "Pages on their way there (writing) and back (reading)."
    yield gauge("kvd_tier_moving_pages", moving, by(_moving_pages), ("tier", "direction"))
    speed = "Bytes a second, as measured lately."
    yield gauge("kvd_tier_bytes_per_second", speed, by(_tier_speeds), ("tier", "direction"))
    yield total("kvd_tier_pages", "Pages by outcome.", by(_tier_pages), ("tier", "outcome"))
    moved = "Bytes that were written there and read from there."
    yield total("kvd_tier_moved_bytes", moved, by(_tier_bytes), ("tier", "direction"))
    asked = "Requests that found pages there (hit), waited, waited too long, or found no room."
    yield total("kvd_tier_requests", asked, by(_tier_requests), ("tier", "outcome"))
    way = "How long what is written has made way for handoffs."
    yield total("kvd_tier_gave_way_seconds", way, each(lambda t: t.gave_way_s), ("tier",))
    failed = "Orders that came to nothing, or ended with their storage process (cut)."
    yield total("kvd_tier_failed_orders", failed, by(_tier_failures), ("tier", "outcome"))


def _of_tier_thrash(
    tiers: tuple[TierState, ...], thrashing: tuple[ThrashState, ...]
) -> Iterator[Metric]:
    """Of what was removed there for want of room what is asked for again."""
    missed = {(tier.tier, "any"): float(tier.missed) for tier in tiers}
    missed |= {(tier.tier, "soon"): float(tier.missed_soon) for tier in tiers}
    what = "Pages that requests asked for after they had been removed from the tier."
    yield total("kvd_tier_missed_removed", what, missed, ("tier", "within"))
    places = [pair.place for pair in thrashing]
    found = {(tier.tier,): float(places.count(tier.tier)) for tier in tiers}
    what = "Pairs of namespaces of which one pushes out of the tier what is asked for again soon."
    yield gauge("kvd_tier_thrashing", what, found, ("tier",))


def _of_quotas(quotas: tuple[QuotaState, ...]) -> Iterator[Metric]:
    """What namespaces have beside their quotas: as many labels as are configured."""

    def each(read: Callable[[QuotaState], float | None]) -> dict[Labels, float]:
        found = {(quota.namespace, quota.place): read(quota) for quota in quotas}
        return {labels: value for labels, value in found.items() if value is not None}

    labels = ("namespace", "place")
    pages = "Pages of the quota's namespace that are there."
    yield gauge("kvd_quota_pages", pages, each(lambda quota: quota.pages), labels)
    floor = "Pages that stay as long as anything else can be evicted."
    yield gauge("kvd_quota_floor_pages", floor, each(lambda quota: quota.floor_pages), labels)
    ceiling = "Pages above which it is the first to go, or is not written; no line without one."
    yield gauge("kvd_quota_ceiling_pages", ceiling, each(lambda quota: quota.ceiling_pages), labels)
    went = {
        (quota.namespace, quota.place, why): n_pages
        for quota in quotas
        for why, n_pages in (("over", quota.went_over_pages), ("floor", quota.taken_pages))
    }
    told = (
        "Pages that went because it was over its ceiling (of a store: were not written there), or"
    )
    told += " although they were of its floor."
    yield total("kvd_quota_evicted_pages", told, went, (*labels, "because"))


def _moving_pages(tier: TierState) -> dict[str, float]:
    return {"writing": tier.writing, "reading": tier.reading}


def _tier_speeds(tier: TierState) -> dict[str, float]:
    return {"writing": tier.written_bytes_per_s, "reading": tier.read_bytes_per_s}


def _tier_bytes(tier: TierState) -> dict[str, float]:
    return {"writing": tier.written_bytes, "reading": tier.read_bytes}


def _tier_pages(tier: TierState) -> dict[str, float]:
    return {
        "written": tier.written,
        "unwritten": tier.unwritten,
        "read": tier.read,
        "bad": tier.bad,
        "dropped": tier.dropped,
        "evicted-unwritten": tier.evicted_unwritten,
        "over-ceiling": tier.over_ceiling,
    }


def _tier_requests(tier: TierState) -> dict[str, float]:
    return {"hit": tier.hits, "waited": tier.waits, "late": tier.late, "no-room": tier.no_room}


def _tier_probes(tier: TierState) -> dict[str, float]:
    if not tier.is_shared:
        return {}
    return {"asked": tier.probes, "there": tier.probe_hits, "unasked": tier.unasked}


def _tier_failures(tier: TierState) -> dict[str, float]:
    return {"failed": tier.failed_orders, "cut": tier.cut}


def _of_kv_events(told: KvEventState) -> Iterator[Metric]:
    """What routers are told."""
    number = "Number of the last batch of KV events; consumers count by it."
    yield gauge("kvd_kv_event_number", number, told.last_number)
    yield gauge("kvd_kv_event_subscribers", "Routers that listen.", told.subscribers)
    yield gauge("kvd_kv_event_blocks", "Blocks that a router knows of here.", told.blocks)
    yield total("kvd_kv_event_batches", "Batches published, empty ones too.", told.batches)
    replays = "Questions for batches that were missed."
    yield total("kvd_kv_event_replays", replays, told.replays)
    snapshots = "Times that everything was told anew."
    yield total("kvd_kv_event_snapshots", snapshots, told.snapshots)
    lost = {("slow-subscriber",): told.cut, ("no-number",): told.dropped}
    doc = "Batches that a subscriber did not get, or nobody."
    yield total("kvd_kv_event_lost_batches", doc, lost, ("why",))


OVER = frozenset({"ready", "closed", "settled", "forgotten"})
"""States of a part in which nothing is under way any more."""


def _of_node(node: Snapshot) -> Iterator[Metric]:
    """What this node does for whom, and how it fares itself."""
    audit = node.audit
    kinds = Counted((lease.reason.partition(" ")[0], lease.state) for lease in node.leases)
    yield gauge("kvd_leases", "Leases by reason and state.", kinds, ("reason", "state"))
    oldest = {("max",): max((lease.age_s for lease in node.leases), default=0.0)}
    yield gauge("kvd_lease_age_seconds", "Age of the oldest lease.", oldest, ("quantile",))
    sides = [room.side for room in node.rooms if room.state not in OVER]
    under_way = {(role,): sides.count(role) for role in ("decode", "prefill")}
    yield gauge("kvd_inflight_handoffs", "Handoffs under way.", under_way, ("role",))
    yield gauge("kvd_waiting_requests", "Requests that wait for room.", len(node.waiting))
    yield gauge("kvd_engine_clients", "Engine sessions.", len(node.clients))
    late: Counted[tuple[str, ...]] = Counted()
    for mark in node.late_marks:
        late[(mark.device or "cpu",)] += mark.orders
    doc = "Copies of engines that wait for their mark, longer than a second."
    yield gauge("kvd_engine_late_marks", doc, late, ("device",))
    draining = "1 while this node begins nothing new."
    yield gauge("kvd_draining", draining, int(node.drain is not None))
    restarted = "Generation of the transfer process; a step says that it was restarted."
    yield gauge("kvd_transfer_generation", restarted, node.generation)
    pinned = {(region,): float(size) for region, size in node.pinned_bytes.items()}
    if pinned:
        what = "Host memory of a region that is registered with CUDA, for copies of devices."
        yield gauge("kvd_pinned_bytes", what, pinned, ("region",))
    missed = {("any",): node.evictions.hurt, ("60s",): node.evictions.hurt_soon}
    what = "Requests that found gone what was evicted or flushed before."
    yield total("kvd_missed_evicted", what, missed, ("within",))
    thrashing = "Pairs of engines of which one evicts what the other asks for again soon."
    pairs = [pair for pair in node.evictions.thrashing if pair.place == IN_POOL]
    yield gauge("kvd_thrashing", thrashing, len(pairs))
    pages = sum([pin.pages for pin in node.pins])
    yield gauge("kvd_pin_pages", "Cached pages that pins keep, softly.", pages)
    what = "Pins that ended because a request had no other pages."
    yield total("kvd_pins_gave_way", what, node.pins_gave_way)
    yield total("kvd_events", "Events since the daemon began.", node.last_event)
    yield gauge("kvd_last_event_seq", "Number of the last event.", node.last_event)
    yield gauge("kvd_audit_findings", "Rules that are broken now; must stay 0.", audit.findings)
    yield total("kvd_audit_sweeps", "Whole looks at pages, locks and transfers.", audit.sweeps)
    yield total("kvd_audit_seconds", "Processor time of the standing audit.", audit.spent_s)
    yield gauge("kvd_audit_age_seconds", "Since the last sweep ended.", audit.last_sweep_ago_s)
    yield gauge("kvd_uptime_seconds", "Age of this incarnation.", node.uptime_s)
