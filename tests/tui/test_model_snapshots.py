"""What was: freezing, and what is kept to compare with."""

from __future__ import annotations

import msgspec
import pytest

from kvd.wire.console import EventQuery, MapQuery
from kvd.wire.events import Evicted
from tests.tui.frames import frame, page_map, vitals
from tui.model.event_log import MAX_ITEMS, EventGap, Log
from tui.model.mirror import Mirror, Subscription
from tui.model.snapshots import MARK_S, MAX_MARKS, NOTHING, DaemonSnapshot, SnapshotHistory


def snapshot(heard_s, **head):
    return DaemonSnapshot(heard_s, vitals(heard_s, **head), {}, {}, {})


@pytest.fixture
def history():
    """Five pictures, a second apart."""
    made = SnapshotHistory()
    for second in range(5):
        made.add(snapshot(float(second)))
    return made


def test_the_newest_is_shown_until_the_screen_is_frozen(history):
    history.freeze()
    for second in range(5, 99):
        history.add(snapshot(float(second)))

    assert (history.shown.heard_s, history.newest.heard_s, history.behind_s) == (4.0, 98.0, 94.0)
    assert history.is_frozen
    history.live()
    assert (history.shown.heard_s, history.is_frozen, history.behind_s) == (98.0, False, 0.0)


def test_nothing_is_shown_before_the_first_frame():
    history = SnapshotHistory()
    history.freeze()

    assert history.shown is history.ago(60.0) is NOTHING
    assert not history.is_frozen


def test_the_figures_of_a_quarter_of_an_hour_are_kept_and_the_rows_are_not():
    history = SnapshotHistory()
    for second in range(3600):
        moment = snapshot(float(second))
        history.add(msgspec.structs.replace(moment, logs={EventQuery(0): Log()}))

    assert [3599 - history.ago(ago_s).heard_s for ago_s in (60.0, 600.0)] == [59, 599]
    assert 3599 - history.ago(9e9).heard_s == pytest.approx((MAX_MARKS - 1) * MARK_S, abs=MARK_S)
    assert not history.ago(60.0).logs


def test_another_daemon_has_no_past():
    history = SnapshotHistory()
    history.add(snapshot(0.0))
    history.add(snapshot(1.0, incarnation="b" * 32))
    history.add(snapshot(2.0, incarnation="b" * 32))

    assert history.ago(60.0).heard_s == 2.0


def test_maps_are_found_by_what_was_asked_and_logs_whoever_has_how_much():
    query = MapQuery("kv", "state", cells=2, pages_each=4)
    mirror = Mirror()
    mirror.look(1, Subscription((query,), EventQuery(0)))
    mirror.take(
        frame(1, page_map(), events=[Evicted(3, 1.0, pages=4, nodes=1, reason="room")], upto=3), 0.0
    )
    seen = mirror.snapshot()

    assert seen.page_map(query) == page_map()
    assert seen.page_map(MapQuery("kv", "owner")) is None
    assert seen.page_map(MapQuery("swa", "state")) is None
    assert [one.seq for one in seen.log(EventQuery(77)).items] == [3]
    assert seen.log(EventQuery(0, about="lease:7")).items == ()


def test_a_log_keeps_the_last_events_and_an_older_one_stays_as_it_was():
    log = Log()
    for seq in range(1, 5001):
        log = log.add([Evicted(seq, 1.0, pages=4, nodes=1, reason="room")], seq)
        if seq == 3000:
            older = log

    assert (len(log.items), log.items[0].seq, log.items[-1].seq) == (MAX_ITEMS, 3001, 5000)
    assert (older.items[0].seq, older.items[-1].seq) == (1001, 3000)
    assert log.add([EventGap(0, 7, 0)], 0).last_seq == 5000
