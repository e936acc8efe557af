"""What lies below the pool, as ``kvd tiers`` shows it."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvd.wire.snapshot import QuotaState, TierState

DISK = TierState(
    tier="disk",
    state="serving",
    why="",
    generation=1,
    demotion="always",
    objects=1000,
    capacity_objects=4000,
    object_bytes=2**21 + 4096,
    writing=3,
    reading=0,
    waiting=1,
    written=1500,
    written_bytes=1500 * 2**21,
    unwritten=0,
    read=700,
    read_bytes=700 * 2**21,
    bad=1,
    dropped=500,
    evicted_unwritten=12,
    hits=90,
    waits=95,
    late=0,
    no_room=0,
    failed_orders=0,
    cut=0,
    read_bytes_per_s=2.0**30,
    written_bytes_per_s=0.0,
)
AWAY = msgspec.structs.replace(
    DISK, state="away", why="/t: No space left on device", failed_orders=3, late=2
)


@pytest.fixture
def shown(run, daemon, snapshot):
    """What it prints of a node that has these tiers."""
    whole = daemon.answer

    def show(*words, tiers):
        changed = msgspec.structs.replace(snapshot, tiers=tiers)
        daemon.answer = lambda request: msgspec.structs.replace(whole(request), snapshot=changed)
        return run("tiers", *words).stdout

    return show


def test_a_tier_shows_what_lies_there_what_moved_and_what_was_found(shown):
    assert shown(tiers=(DISK,)).splitlines() == [
        "TIER  STATE    PAGES     USED     SIZE  HITS  WAITED  BAD",
        "disk  serving   1000  2.0 GiB  7.8 GiB    90      95    1",
        "    written 1500 pages, read 700 at 1.0 GiB/s",
        "    3 being written, 0 being read, 1 request waiting",
        "    left the pool unwritten 12, removed as the oldest 500, could not be written 0",
    ]


def test_a_tier_that_is_away_says_why_and_for_how_long(shown):
    lines = shown(tiers=(AWAY,)).splitlines()

    assert lines[1].startswith("disk  away ")
    assert lines[2] == "    away: /t: No space left on device"
    assert lines[-1] == "    waited too long 2, orders failed 3"


def test_a_node_without_tiers_says_so(shown):
    assert shown(tiers=()).strip() == "no tiers"


def test_json_has_every_figure(shown):
    (tier,) = json.loads(shown("--format", "json", tiers=(DISK,)))

    assert tier == msgspec.to_builtins(DISK)


QUOTA = QuotaState(
    namespace="llama",
    place="disk",
    pages=64,
    page_bytes=2**20,
    floor_pages=100,
    ceiling_pages=None,
    over_pages=0,
    went_over_pages=0,
    taken_pages=0,
    taken_ago_s=None,
)
OVER = msgspec.structs.replace(
    QUOTA,
    namespace="batch",
    place="pool",
    floor_pages=0,
    ceiling_pages=40,
    over_pages=24,
    went_over_pages=7,
    why="over its ceiling by 24 pages, the next to go",
)


@pytest.mark.parametrize(("verb", "mine", "other"), [("tiers", 0, 1), ("pools", 1, 0)])
def test_quotas_are_below_what_they_are_of(run, daemon, snapshot, verb, mine, other):
    whole, quotas = daemon.answer, (QUOTA, OVER)
    changed = msgspec.structs.replace(snapshot, tiers=(DISK,), quotas=quotas)
    daemon.answer = lambda request: msgspec.structs.replace(whole(request), snapshot=changed)

    lines = run(verb).stdout.splitlines()

    rows = [line.split() for line in lines]
    head = ["NAMESPACE", "PLACE", "PAGES", "USED", "FLOOR", "CEILING", "WENT"]
    at = rows.index(head)
    assert (
        rows[at + 1]
        == [
            ["llama", "disk", "64", "64.0", "MiB", "100", "-", "-"],
            ["batch", "pool", "64", "64.0", "MiB", "-", "40", "7"],
        ][mine]
    )
    assert not [row for row in rows if row[:1] == [quotas[other].namespace]]
    assert ("over its ceiling by 24 pages" in "\n".join(lines)) == (verb == "pools")


def test_status_says_who_is_over(run, daemon, snapshot):
    whole = daemon.answer
    changed = msgspec.structs.replace(snapshot, quotas=(QUOTA, OVER))
    daemon.answer = lambda request: msgspec.structs.replace(whole(request), snapshot=changed)

    said = " ".join(run("status").stdout.split())

    assert "! batch in pool: over its ceiling by 24 pages, the next to go: kvd why evicted" in said
    assert "llama" not in said
