"""Walking through what was: freezing, stepping, and what the ring may hold."""

from __future__ import annotations

import msgspec
import pytest

from kvd.wire.console import EventQuery, Filter, Level, MapQuery, Query
from kvd.wire.events import ClientGone, Evicted
from tests.tui.frames import LEASES, changes, frame, lease, page_map, table, vitals
from tui.model.event_log import MAX_ITEMS, EventGap, Log
from tui.model.mirror import Mirror, Subscription
from tui.model.snapshots import NOTHING, DaemonSnapshot, SnapshotHistory


def snapshot(heard_s):
    return DaemonSnapshot(heard_s, vitals(heard_s), {}, {}, {})


@pytest.fixture
def history():
    """Five pictures, a second apart."""
    made = SnapshotHistory()
    for second in range(5):
        made.add(snapshot(float(second)))
    return made


def test_the_newest_is_shown_until_the_screen_is_frozen(history):
    history.freeze()
    history.add(snapshot(5.0))

    assert (history.shown.heard_s, history.newest.heard_s, history.behind_s) == (4.0, 5.0, 1.0)
    assert history.is_frozen
    history.live()
    assert (history.shown.heard_s, history.is_frozen, history.behind_s) == (5.0, False, 0.0)


def test_steps_go_back_and_on_and_stop_at_both_ends(history):
    seen = []
    for count in (-1, -1, 1, -9, 99):
        history.step(count)
        seen.append(history.shown.heard_s)

    assert seen == [3.0, 2.0, 3.0, 0.0, 4.0]


def test_steps_are_from_what_is_shown_while_pictures_come_and_go():
    history = SnapshotHistory(max_moments=4)
    for second in range(4):
        history.add(snapshot(float(second)))
    history.step(-1)
    history.add(snapshot(4.0))

    history.step(1)

    assert history.shown.heard_s == 3.0


def test_a_frozen_picture_stays_when_the_ring_has_lost_it():
    history = SnapshotHistory(max_moments=3)
    history.add(snapshot(0.0))
    history.freeze()
    for second in range(1, 9):
        history.add(snapshot(float(second)))

    assert history.shown.heard_s == 0.0
    history.step(1)
    assert (history.shown.heard_s, len(history)) == (7.0, 3)


def test_nothing_is_shown_before_the_first_frame():
    history = SnapshotHistory()
    history.freeze()
    history.step(-1)

    assert history.shown is NOTHING
    assert not history.is_frozen


def test_the_ring_is_bounded_by_what_its_pictures_weigh():
    mirror = Mirror(SnapshotHistory(max_weight_bytes=100_000))
    for call in range(200):
        mirror.look(call, Subscription((LEASES,)))
        rows = [lease(number, held=call) for number in range(10)]
        mirror.take(frame(call, table(*rows, revision=call + 1)), float(call))

    assert mirror.history.weight_bytes <= 100_000
    assert 10 < len(mirror.history) < 40
    assert mirror.history.newest.heard_s == 199.0


def test_a_picture_in_which_nothing_changed_weighs_next_to_nothing():
    mirror = Mirror()
    mirror.look(1, Subscription((LEASES,)))
    mirror.take(frame(1, table(*[lease(n) for n in range(10)])), 0.0)
    first = mirror.history.weight_bytes
    mirror.look(2, Subscription((LEASES,)))
    mirror.take(frame(2, changes(since=1, revision=1, total=10)), 0.1)

    assert mirror.history.weight_bytes - first < 3000


def picture(**fields):
    """A moment at 100 s with the leases 1, 2 and 3."""
    mirror = Mirror()
    rows = (lease(1, 4, 90.0), lease(2, 9, 99.0, state="lingering"), lease(3, 2, 50.0))
    mirror.look(1, Subscription((LEASES,)))
    mirror.take(frame(1, table(*rows, **fields)), 0.0)
    return mirror.snapshot()


def test_the_answer_to_a_query_is_shown_as_it_is():
    assert picture().table(msgspec.structs.replace(LEASES, have=9)) == picture().tables[LEASES]


@pytest.mark.parametrize(
    ("query", "keys"),
    [
        (Query("leases", sort="-held"), [2, 1, 3]),
        (Query("leases", sort="held", limit=2), [3, 1]),
        (Query("leases", first=1, limit=1), [2]),
        (Query("leases", filters=(Filter("since", "over", 5.0),)), [1, 3]),
        (Query("leases", filters=(Filter("since", "under", 5.0),)), [2]),
        (Query("leases", filters=(Filter("state", "is-not", "held"),)), [2]),
        (Query("leases", filters=(Filter("", "has", "LINGER"),)), [2]),
        (Query("leases", filters=(Filter("", "has-not", "linger"),)), [1, 3]),
        (Query("leases", filters=(Filter("held", "is", 2.0),)), [3]),
    ],
)
def test_another_window_of_the_past_is_made_of_the_rows_that_are_here(query, keys):
    data = picture().table(query)

    assert data.order == tuple(f"lease:{number}" for number in keys)
    assert [row.key for row in data.listed()] == list(data.order)
    assert data.note == ""


def test_what_is_made_of_part_of_a_table_says_so():
    data = picture(total=50, of=60).table(Query("leases", sort="-held"))

    assert data.note == "of 3 rows that are here; there were 50"


def test_nothing_is_made_of_another_table():
    assert picture().table(Query("rooms")) is None


def test_maps_and_logs_are_found_whatever_the_asker_has():
    query = MapQuery("kv", "state", cells=2, pages_each=4)
    mirror = Mirror()
    mirror.look(1, Subscription((query,), EventQuery(0)))
    mirror.take(
        frame(1, page_map(), events=[Evicted(3, 1.0, pages=4, nodes=1, reason="room")], upto=3), 0.0
    )
    seen = mirror.snapshot()

    assert seen.page_map(msgspec.structs.replace(query, have=1)) == page_map()
    assert seen.page_map(MapQuery("kv", "owner")) is None
    assert seen.page_map(MapQuery("swa", "state")) is None
    assert [one.seq for one in seen.log(EventQuery(77)).items()] == [3]
    assert seen.log(EventQuery(0, about="lease:7")).items() == []


@pytest.mark.parametrize(
    ("first_page", "pages_each", "cells", "shown"),
    [
        (0, 2, 4, [0, 1, 2, 0]),
        (0, 4, 2, [1, 2]),
        (0, 8, 9, [2]),
        (0, 1, 8, [0, 0, 1, 1, 2, 2, 0, 0]),
        (3, 2, 2, [2, 2]),
        (6, 2, 9, [0]),
    ],
)
def test_a_map_in_another_grid_shows_the_worst_of_what_its_cells_touch(
    first_page, pages_each, cells, shown
):
    """Eight pages in cells of two are here: free, held, quarantined, free."""
    levels = (Level(".", "free", 4), Level("H", "held", 2), Level("Q", "quarantined", 2))
    here = page_map(bytes([0, 1, 2, 0]), pages_each=2, levels=levels, lit=(2,))
    query = MapQuery("kv", "state", pages_each=2, cells=4)
    seen = DaemonSnapshot(0.0, vitals(), {}, {query: here}, {})

    made = seen.page_map(
        MapQuery("kv", "state", first_page=first_page, pages_each=pages_each, cells=cells)
    )

    assert list(made.cells) == shown
    assert [made.cells[at] for at in made.lit] == [2] * len(made.lit)


def test_kinds_that_were_not_asked_for_are_found_among_all_events():
    mirror = Mirror()
    mirror.look(1, Subscription((), EventQuery(0)))
    gone = ClientGone(4, 1.0, session=1, name="engine-1", leases=0, handoffs=0)
    mirror.take(
        frame(1, events=[Evicted(3, 1.0, pages=4, nodes=1, reason="room"), gone], upto=4), 0.0
    )

    assert mirror.snapshot().log(EventQuery(0, kinds=("client-gone",))).items() == [gone]


def test_a_log_keeps_the_last_events_and_an_older_one_stays_as_it_was():
    log = Log()
    for seq in range(1, 5001):
        log = log.add([Evicted(seq, 1.0, pages=4, nodes=1, reason="room")], seq)
        if seq == 3000:
            older = log

    assert (len(log), log.items()[0].seq, log.items()[-1].seq) == (MAX_ITEMS, 3001, 5000)
    assert (older.items()[0].seq, older.items()[-1].seq) == (1001, 3000)
    assert [one.seq for one in log.tail(2)] == [4999, 5000]
    assert log.tail(0) == []
    assert log.add([EventGap(0, 7, 0)], 0).last_seq == 5000
