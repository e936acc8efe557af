from __future__ import annotations

import subprocess
import sys
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvd.observe.exposition import CONTENT_TYPE, Build, Exposition
from kvd.observe.metrics import (
    FAST_S,
    MAX_PARTS,
    MAX_SERIES,
    Counter,
    Histogram,
    Histograms,
    Metrics,
)
from kvd.wire import events
from kvd.wire.snapshot import (
    AuditState,
    BufferState,
    ClientState,
    CompanionState,
    LateMark,
    LeaseState,
    PeerState,
    PoolState,
    QuotaState,
    RoomState,
    Snapshot,
    Totals,
    WaitingState,
    WindowState,
)

BUILD = Build(version="0.1.0", proto="1", nixl="1.5.1")


def lease(ident: int, reason: str, state: str, age_s: float) -> LeaseState:
    return LeaseState(
        ident, state, "decode-0", 7, 1, reason, 9, "", age_s, 10, 0, 0, 1, 0, ("decode-0",), ""
    )


def room(side: str, part: int, state: str) -> RoomState:
    return RoomState(
        side, part, part, 9, state, "p", "3f", "e", 1, 10, 0, 0, 0, 1, 0, 1, 0, 1.0, 2.0, "", ()
    )


SNAPSHOT = Snapshot(
    node="decode-0",
    incarnation="a1",
    version="0.1.0",
    uptime_s=12.5,
    state="ready",
    transport="nixl",
    generation=3,
    last_event=41,
    pools=(PoolState("main", "kv", 16, 1024, 100, 50, 20, 25, 4, 11, 14, 9, 12, promised_pages=6),),
    leases=(
        lease(1, "lease", "held", 2.0),
        lease(2, "receive from prefill-0", "held", 5.5),
        lease(3, "receive from prefill-0", "quarantined", 1.0),
        lease(4, "receive from prefill-1", "held", 0.5),
    ),
    waiting=(WaitingState("lease", "e", 0, 0, 1.0, 2.0, 3, "full"),),
    rooms=(
        room("decode", 1, "receiving"),
        room("decode", 2, "ready"),
        room("prefill", 3, "settled"),
    ),
    peers=(
        PeerState("prefill-0", "tcp://a:1", "up", "3f", 2, "loaded", 0.1, 0.25, "", 1, 0),
        PeerState("prefill-1", "tcp://b:1", "lost", "", 0, "none", 9.0, 0.0, "", 0, 0),
    ),
    clients=(ClientState(1, "e", (7,), 9.0, 1, 1, 0, 0),),
    totals=Totals(*([0] * 12)),
    audit=AuditState(findings=2, sweeps=30, last_sweep_ago_s=0.2, spent_s=1.5),
)


def ended(side: str, part: int, at_s: float, **fields: object) -> events.HandoffEnded:
    values: dict[str, object] = {
        "outcome": "committed",
        "code": "",
        "reason": "",
        "prompt_tokens": 100,
        "decode_prefix_len": 64,
        "moved_bytes": 3000,
        "saved_bytes": 4000,
        "took_s": 0.3,
    }
    values |= fields
    return events.HandoffEnded(
        seq=1,
        at_s=at_s,
        side=side,
        part=part,
        room=9,
        peer="p",
        **values,  # type: ignore[arg-type]
    )


def moved(side: str, part: int, at_s: float, before: str, after: str) -> events.Moved:
    return events.Moved(
        1, at_s, side=side, part=part, room=9, peer="p", before=before, after=after, trigger="x"
    )


def page(metrics: Metrics, snapshot: Snapshot) -> dict[str, float]:
    """Samples of the page by ``name{label="value"}``, labels sorted, the process left out."""
    text = Exposition(metrics, BUILD, lambda: snapshot).render().decode()
    out = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            out[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return {name: value for name, value in out.items() if name.startswith("kvd_")}


def test_page_says_what_the_snapshot_says() -> None:
    samples = page(Metrics("main"), SNAPSHOT)

    pool = 'component="kv",pool="main"'
    assert {name: value for name, value in samples.items() if "_bucket" not in name} == {
        "kvd_audit_age_seconds": 0.2,
        "kvd_audit_findings": 2,
        "kvd_audit_seconds_total": 1.5,
        "kvd_audit_sweeps_total": 30,
        "kvd_draining": 0,
        'kvd_missed_evicted_total{within="any"}': 0,
        'kvd_missed_evicted_total{within="60s"}': 0,
        "kvd_thrashing": 0,
        "kvd_pin_pages": 0,
        "kvd_pins_gave_way_total": 0,
        'kvd_build_info{nixl="1.5.1",proto="1",version="0.1.0"}': 1,
        "kvd_decode_prefix_tokens_count": 0,
        "kvd_decode_prefix_tokens_sum": 0,
        "kvd_engine_clients": 1,
        "kvd_events_total": 41,
        'kvd_handoff_bytes_saved_total{dir="received"}': 0,
        'kvd_handoff_bytes_saved_total{dir="sent"}': 0,
        'kvd_handoff_bytes_total{dir="received"}': 0,
        'kvd_handoff_bytes_total{dir="sent"}': 0,
        'kvd_inflight_handoffs{role="decode"}': 1,
        'kvd_inflight_handoffs{role="prefill"}': 0,
        "kvd_last_event_seq": 41,
        'kvd_lease_age_seconds{quantile="max"}': 5.5,
        'kvd_leases{reason="lease",state="held"}': 1,
        'kvd_leases{reason="receive",state="held"}': 2,
        'kvd_leases{reason="receive",state="quarantined"}': 1,
        'kvd_leases_retracted_total{kept="host"}': 0,
        'kvd_leases_retracted_total{kept="nothing"}': 0,
        'kvd_retraction_bytes_total{what="saved"}': 0,
        'kvd_retraction_bytes_total{what="restored"}': 0,
        'kvd_retraction_bytes_total{what="spared"}': 0,
        "kvd_ledger_violations_total": 0,
        "kvd_loop_lag_seconds_count": 0,
        "kvd_loop_lag_seconds_sum": 0,
        'kvd_peer_generation{peer="prefill-0"}': 2,
        'kvd_peer_generation{peer="prefill-1"}': 0,
        'kvd_peer_slow_path{peer="prefill-0"}': 0,
        'kvd_peer_slow_path{peer="prefill-1"}': 0,
        'kvd_peer_up{peer="prefill-0"}': 1,
        'kvd_peer_up{peer="prefill-1"}': 0,
        f"kvd_pool_bytes{{{pool}}}": 102400,
        f"kvd_pool_evictable_pages{{{pool}}}": 11,
        f"kvd_pool_locked_pages{{{pool}}}": 14,
        f"kvd_pool_promised_pages{{{pool}}}": 6,
        f'kvd_pool_pages{{{pool},state="free"}}': 50,
        f'kvd_pool_pages{{{pool},state="leased"}}': 20,
        f'kvd_pool_pages{{{pool},state="cached"}}': 25,
        f'kvd_pool_pages{{{pool},state="quarantined"}}': 4,
        f'kvd_pool_pages{{{pool},state="condemned"}}': 0,
        f'kvd_pool_pages{{{pool},state="reserved"}}': 1,
        f'kvd_pool_saved_pages{{{pool},state="used"}}': 9,
        f'kvd_pool_saved_pages{{{pool},state="free"}}': 3,
        'kvd_rtt_seconds{peer="prefill-0"}': 0.00025,
        'kvd_rtt_seconds{peer="prefill-1"}': 0,
        "kvd_transfer_generation": 3,
        "kvd_uptime_seconds": 12.5,
        "kvd_waiting_requests": 1,
    }


def test_page_has_every_component_the_window_and_the_buffer() -> None:
    pools = (
        PoolState(
            *("main", "kv", 16, 1024, 100, 99, 0, 0, 0, 0, 0),
            companions=(CompanionState("index", 4, 10, 4, 400, "device"),),
        ),
        PoolState(
            *("main", "swa", 16, 512, 40, 30, 9, 0, 0, 0, 0),
            window=WindowState(64, 9, 30, 7),
        ),
        PoolState(
            *("main", "buffer", 16, 1024, 9, 8, 0, 0, 0, 0, 0),
            buffer=BufferState(256, 90, 10, 2560),
        ),
    )
    snapshot = msgspec.structs.replace(SNAPSHOT, pools=pools)

    samples = page(Metrics("main"), snapshot)

    swa, buffer = 'component="swa",pool="main"', 'component="buffer",pool="main"'
    assert {
        name: value for name, value in samples.items() if "bytes" in name and "pool_" in name
    } == {
        'kvd_pool_bytes{component="kv",pool="main"}': 102400,
        'kvd_pool_bytes{component="index",pool="main"}': 4000,
        f"kvd_pool_bytes{{{swa}}}": 20480,
        f"kvd_pool_bytes{{{buffer}}}": 9216,
        f"kvd_pool_buffer_copied_bytes_total{{{buffer}}}": 2560,
    }
    assert {
        name: value for name, value in samples.items() if "window" in name or "wanted" in name
    } == {
        'kvd_pool_window_pages{allocation="mapped",component="swa",pool="main"}': 9,
        'kvd_pool_window_pages{allocation="full",component="swa",pool="main"}': 30,
        f"kvd_pool_window_slides_total{{{swa}}}": 7,
        f'kvd_pool_buffer_pages_wanted_total{{{buffer},result="hit"}}': 90,
        f'kvd_pool_buffer_pages_wanted_total{{{buffer},result="miss"}}': 10,
    }
    assert samples[f'kvd_pool_pages{{{swa},state="leased"}}'] == 9


def test_page_has_quotas_by_namespace_as_configured_and_place() -> None:
    quota = QuotaState(
        namespace="llama",
        place="pool",
        pages=64,
        page_bytes=2**20,
        floor_pages=100,
        ceiling_pages=None,
        over_pages=0,
        went_over_pages=7,
        taken_pages=3,
        taken_ago_s=1.0,
    )
    capped = msgspec.structs.replace(quota, namespace="batch", ceiling_pages=40, pages=50)
    samples = page(Metrics("main"), msgspec.structs.replace(SNAPSHOT, quotas=(quota, capped)))

    assert {name: n for name, n in samples.items() if name.startswith("kvd_quota_")} == {
        'kvd_quota_pages{namespace="llama",place="pool"}': 64,
        'kvd_quota_pages{namespace="batch",place="pool"}': 50,
        'kvd_quota_floor_pages{namespace="llama",place="pool"}': 100,
        'kvd_quota_floor_pages{namespace="batch",place="pool"}': 100,
        'kvd_quota_ceiling_pages{namespace="batch",place="pool"}': 40,
        **{
            f'kvd_quota_evicted_pages_total{{because="{why}",namespace="{name}",place="pool"}}': n
            for name in ("llama", "batch")
            for why, n in (("over", 7), ("floor", 3))
        },
    }


def test_page_counts_what_events_and_requests_said() -> None:
    metrics = Metrics("main")
    metrics.take(moved("decode", 1, 10.0, "queued", "offered"))
    metrics.take(moved("decode", 1, 10.1, "offered", "receiving"))
    metrics.take(moved("decode", 1, 10.35, "receiving", "verifying"))
    metrics.take(ended("decode", 1, 10.4, took_s=0.5))
    metrics.take(moved("decode", 1, 20.0, "ready", "closed"))
    metrics.take(ended("prefill", 2, 11.0, outcome="aborted", code="deadline", saved_bytes=0))
    metrics.take(events.Evicted(1, 0.0, pages=12, nodes=3, reason="headroom"))
    metrics.take(events.Evicted(1, 0.0, pages=5, nodes=1, reason="room", component="swa"))
    metrics.take(
        events.LeaseReleased(
            1, 0.0, lease=4, reason="lease", cause="owner-died", freed_pages=2, age_s=1.0
        )
    )
    metrics.take(
        events.LeaseRetracted(
            1,
            0.0,
            lease=4,
            session=1,
            kv_tokens=129,
            freed_pages=5,
            saved_pages=9,
            saved_bytes=9000,
            took_s=0.1,
        )
    )
    metrics.take(
        events.LeaseRetracted(
            1,
            0.0,
            lease=5,
            session=1,
            kv_tokens=129,
            freed_pages=5,
            saved_pages=0,
            saved_bytes=0,
            took_s=0.0,
        )
    )
    metrics.take(
        events.LeaseResumed(
            1,
            0.0,
            lease=4,
            session=1,
            prefix_tokens=64,
            restored_tokens=65,
            restored_bytes=5000,
            spared_bytes=4000,
            took_s=0.1,
            away_s=2.0,
        )
    )
    metrics.take(
        events.MessageRefused(1, 0.0, socket="peers", sender="x", code="bad-request", why="no")
    )
    metrics.take(events.PeerLost(1, 0.0, peer="prefill-0", incarnation="3f", silent_s=2.5))
    metrics.take(
        events.PagesCorrupt(
            1,
            0.0,
            part=1,
            room=7,
            peer="prefill-0",
            component="kv",
            pages=(9, 11),
            logical_pages=(2, 4),
            bad_pages=2,
            checked_pages=7,
            total_pages=7,
            why="why",
        )
    )
    metrics.take(events.Violation(1, 0.0, what="I1"))
    metrics.take(events.PeerUp(1, 0.0, peer="prefill-0", incarnation="3f", generation=1))
    metrics.rpc("match", 0.0001)
    metrics.rpc("match", 0.5)
    metrics.rpc_failed("lease", "no-room")
    metrics.loop_lag(0.002)

    samples = page(metrics, SNAPSHOT)

    zero = page(Metrics("main"), SNAPSHOT)
    changed = {name: samples[name] for name in samples if samples[name] != zero.get(name)}
    assert {name: round(v, 6) for name, v in changed.items() if "_bucket" not in name} == {
        'kvd_handoffs_total{outcome="committed",reason="",role="decode"}': 1,
        'kvd_handoffs_total{outcome="aborted",reason="deadline",role="prefill"}': 1,
        'kvd_handoff_bytes_total{dir="received"}': 3000,
        'kvd_handoff_bytes_total{dir="sent"}': 3000,
        'kvd_handoff_bytes_saved_total{dir="received"}': 4000,
        "kvd_decode_prefix_tokens_count": 1,
        "kvd_decode_prefix_tokens_sum": 64,
        'kvd_handoff_seconds_count{role="decode"}': 1,
        'kvd_handoff_seconds_sum{role="decode"}': 0.5,
        'kvd_handoff_seconds_count{role="prefill"}': 1,
        'kvd_handoff_seconds_sum{role="prefill"}': 0.3,
        'kvd_handoff_stage_seconds_count{role="decode",stage="wait"}': 1,
        'kvd_handoff_stage_seconds_sum{role="decode",stage="wait"}': 0.1,
        'kvd_handoff_stage_seconds_count{role="decode",stage="offer"}': 1,
        'kvd_handoff_stage_seconds_sum{role="decode",stage="offer"}': 0.1,
        'kvd_handoff_stage_seconds_count{role="decode",stage="transfer"}': 1,
        'kvd_handoff_stage_seconds_sum{role="decode",stage="transfer"}': 0.25,
        'kvd_evicted_pages_total{component="kv",pool="main",reason="headroom"}': 12,
        'kvd_evicted_pages_total{component="swa",pool="main",reason="room"}': 5,
        'kvd_leases_released_total{cause="owner-died"}': 1,
        'kvd_leases_retracted_total{kept="host"}': 1,
        'kvd_leases_retracted_total{kept="nothing"}': 1,
        'kvd_retraction_bytes_total{what="saved"}': 9000,
        'kvd_retraction_bytes_total{what="restored"}': 5000,
        'kvd_retraction_bytes_total{what="spared"}': 4000,
        "kvd_ledger_violations_total": 1,
        'kvd_peers_lost_total{peer="prefill-0"}': 1,
        'kvd_corrupt_pages_total{peer="prefill-0"}': 2,
        'kvd_rpc_seconds_count{op="match"}': 2,
        'kvd_rpc_seconds_sum{op="match"}': 0.5001,
        'kvd_rpc_errors_total{code="no-room",op="lease"}': 1,
        'kvd_messages_refused_total{code="bad-request",socket="peers"}': 1,
        "kvd_loop_lag_seconds_count": 1,
        "kvd_loop_lag_seconds_sum": 0.002,
    }
    assert samples['kvd_rpc_seconds_bucket{le="0.0001",op="match"}'] == 1
    assert samples['kvd_rpc_seconds_bucket{le="0.25",op="match"}'] == 1
    assert samples['kvd_rpc_seconds_bucket{le="1.0",op="match"}'] == 2
    assert samples['kvd_rpc_seconds_bucket{le="+Inf",op="match"}'] == 2
    assert metrics._stays == {}


def test_copies_of_engines_are_told_by_direction_and_device() -> None:
    """So that what moves and what waits is seen of each: bytes by the seconds that they moved."""
    metrics = Metrics("main")
    for way, device, n_bytes, waited, moved_us, mark in (
        ("save", "cuda:0", 4 * 10**9, 300_000, 100_000, 250_000),
        ("save", "cuda:0", 10**9, 100_000, 25_000, 50_000),
        ("load", "", 10**6, 200, 1000, 0),
    ):
        metrics.take(
            events.EngineCopied(
                seq=1,
                at_s=0.0,
                session=1,
                lease=2,
                way=way,
                device=device,
                rank=0,
                pages=3,
                n_bytes=n_bytes,
                waited_us=waited,
                moved_us=moved_us,
                mark_us=mark,
            )
        )
    waits = LateMark(session=1, lease=2, waited_s=3.0, left_s=57.0, device="cuda:0")
    samples = page(metrics, msgspec.structs.replace(SNAPSHOT, late_marks=(waits, waits)))

    def seconds(way: str, device: str, stage: str) -> float:
        labels = f'device="{device}",stage="{stage}",way="{way}"'
        return samples[f"kvd_engine_copy_seconds_sum{{{labels}}}"]

    assert seconds("save", "cuda:0", "mark") == pytest.approx(0.3)
    assert seconds("save", "cuda:0", "wait") == pytest.approx(0.4)
    assert seconds("save", "cuda:0", "move") == pytest.approx(0.125)
    assert seconds("load", "cpu", "move") == pytest.approx(0.001)
    moved_bytes = samples['kvd_engine_copy_bytes_total{device="cuda:0",way="save"}']
    assert moved_bytes / seconds("save", "cuda:0", "move") == pytest.approx(40e9)
    assert samples['kvd_engine_late_marks{device="cuda:0"}'] == 2


def test_page_is_stable_and_also_tells_of_the_process() -> None:
    exposition = Exposition(Metrics("main"), BUILD, lambda: SNAPSHOT)

    text = exposition.render().decode()

    assert "process_resident_memory_bytes" in text
    assert text.count("# TYPE kvd_handoffs_total counter") == 1
    assert exposition.render().decode().count("# TYPE") == text.count("# TYPE")
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_whatever_is_counted_is_on_the_page() -> None:
    metrics = Metrics("main")
    counted = [getattr(metrics, name) for name in dir(metrics)]
    counted = [one.name for one in counted if isinstance(one, Counter | Histograms)]
    assert sorted(counted) == sorted(one.name for one in metrics.families())
    assert len(counted) > 10


def test_labels_stay_few_whatever_comes_in() -> None:
    counter = Counter("kvd_some", "Some.", ("reason",))
    for n in range(MAX_SERIES + 10):
        counter.add(1, f"reason-{n}")
    counter.add(1, 'a sentence with "quotes"\n')
    counter.add(1, "reason-3")
    counter.add(1, "")

    assert len(counter.values) == MAX_SERIES + 1
    assert counter.values["other",] == 12
    assert counter.values["reason-3",] == 2


@pytest.mark.parametrize("name", ["Prefill-0.rack_7", "9" * 64])
def test_counter_keeps_every_name_that_a_configuration_allows(name: str) -> None:
    counter = Counter("kvd_some", "Some.", ("reason",))
    counter.add(1, name)
    counter.add(1, name + "x" * 64)

    assert counter.values == {(name,): 1, ("other",): 1}


def test_stays_of_parts_that_never_end_are_bounded() -> None:
    metrics = Metrics("main")
    for part in range(MAX_PARTS + 5):
        metrics.take(moved("decode", part, 1.0, "queued", "offered"))

    assert len(metrics._stays) == MAX_PARTS


@given(st.lists(st.floats(min_value=0, max_value=20), max_size=40))
def test_histogram_puts_each_value_below_its_bound(values: list[float]) -> None:
    histogram = Histogram(FAST_S)
    for value in values:
        histogram.observe(value)

    for index, bound in enumerate(FAST_S):
        assert sum(histogram.counts[: index + 1]) == sum(value <= bound for value in values)
    assert sum(histogram.counts) == len(values)


def test_rpc_costs_little_beside_an_empty_call() -> None:
    """On the hot path: the best of a few rounds, against a method that does nothing."""

    class Nothing:
        def rpc(self, op: str, seconds: float) -> None:
            pass

    def best_us(target: Metrics | Nothing) -> float:
        rounds = []
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(5_000):
                target.rpc("match", 0.0003)
            rounds.append((time.perf_counter() - began) / 5_000 * 1e6)
        return min(rounds)

    assert best_us(Metrics("main")) < 12 * best_us(Nothing())


def test_prometheus_client_is_not_imported_before_the_first_page() -> None:
    code = "import sys, kvd.observe.exposition, kvd.observe.metrics; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert not {"prometheus_client", "torch", "nixl", "asyncio"} & set(done.stdout.split())
