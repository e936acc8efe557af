"""Walking through what was: freezing, stepping, and what the ring may hold."""

from __future__ import annotations

import msgspec
import pytest

from kvd.wire.console import EventQuery, Filter, MapQuery, Query
from kvd.wire.events import Evicted
from tests.tui.frames import LEASES, changes, frame, lease, page_map, table, vitals
from tui.model.log import MAX_ITEMS, Gap, Log
from tui.model.mirror import Mirror, Wanted
from tui.model.moments import NOTHING, Moment, Moments


def moment(heard_s):
    return Moment(heard_s, vitals(heard_s), {}, {}, {})


@pytest.fixture
def moments():
    """Five pictures, a second apart."""
    made = Moments()
    for second in range(5):
        made.add(moment(float(second)))
    return made


def test_the_newest_is_shown_until_the_screen_is_frozen(moments):
    moments.freeze()
    moments.add(moment(5.0))

    assert (moments.shown.heard_s, moments.newest.heard_s, moments.behind_s) == (4.0, 5.0, 1.0)
    assert moments.is_frozen
    moments.live()
    assert (moments.shown.heard_s, moments.is_frozen, moments.behind_s) == (5.0, False, 0.0)


def test_steps_go_back_and_on_and_stop_at_both_ends(moments):
    seen = []
    for count in (-1, -1, 1, -9, 99):
        moments.step(count)
        seen.append(moments.shown.heard_s)

    assert seen == [3.0, 2.0, 3.0, 0.0, 4.0]


def test_steps_are_from_what_is_shown_while_pictures_come_and_go():
    moments = Moments(max_moments=4)
    for second in range(4):
        moments.add(moment(float(second)))
    moments.step(-1)
    moments.add(moment(4.0))

    moments.step(1)

    assert moments.shown.heard_s == 3.0


def test_a_frozen_picture_stays_when_the_ring_has_lost_it():
    moments = Moments(max_moments=3)
    moments.add(moment(0.0))
    moments.freeze()
    for second in range(1, 9):
        moments.add(moment(float(second)))

    assert moments.shown.heard_s == 0.0
    moments.step(1)
    assert (moments.shown.heard_s, len(moments)) == (7.0, 3)


def test_nothing_is_shown_before_the_first_frame():
    moments = Moments()
    moments.freeze()
    moments.step(-1)

    assert moments.shown is NOTHING
    assert not moments.is_frozen


def test_the_ring_is_bounded_by_what_its_pictures_weigh():
    mirror = Mirror(Moments(max_weight_bytes=100_000))
    for call in range(200):
        mirror.look(call, Wanted((LEASES,)))
        rows = [lease(number, held=call) for number in range(10)]
        mirror.take(frame(call, table(*rows, revision=call + 1)), float(call))

    assert mirror.moments.weight_bytes <= 100_000
    assert 10 < len(mirror.moments) < 40
    assert mirror.moments.newest.heard_s == 199.0


def test_a_picture_in_which_nothing_changed_weighs_next_to_nothing():
    mirror = Mirror()
    mirror.look(1, Wanted((LEASES,)))
    mirror.take(frame(1, table(*[lease(n) for n in range(10)])), 0.0)
    first = mirror.moments.weight_bytes
    mirror.look(2, Wanted((LEASES,)))
    mirror.take(frame(2, changes(since=1, revision=1, total=10)), 0.1)

    assert mirror.moments.weight_bytes - first < 3000


def picture(**fields):
    """A moment at 100 s with the leases 1, 2 and 3."""
    mirror = Mirror()
    rows = (lease(1, 4, 90.0), lease(2, 9, 99.0, state="lingering"), lease(3, 2, 50.0))
    mirror.look(1, Wanted((LEASES,)))
    mirror.take(frame(1, table(*rows, **fields)), 0.0)
    return mirror.moment()


def test_the_answer_to_a_query_is_shown_as_it_is():
    assert picture().sheet(msgspec.structs.replace(LEASES, have=9)) == picture().sheets[LEASES]


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
    sheet = picture().sheet(query)

    assert sheet.order == tuple(f"lease:{number}" for number in keys)
    assert [row.key for row in sheet.listed()] == list(sheet.order)
    assert sheet.note == ""


def test_what_is_made_of_part_of_a_table_says_so():
    sheet = picture(total=50, of=60).sheet(Query("leases", sort="-held"))

    assert sheet.note == "of 3 rows that are here; there were 50"


def test_nothing_is_made_of_another_table():
    assert picture().sheet(Query("rooms")) is None


def test_maps_and_logs_are_found_whatever_the_asker_has():
    query = MapQuery("kv", "state", cells=2, pages_each=4)
    mirror = Mirror()
    mirror.look(1, Wanted((query,), EventQuery(0)))
    mirror.take(frame(1, page_map(), events=[Evicted(3, 1.0, 4, 1, "room")], upto=3), 0.0)
    seen = mirror.moment()

    assert seen.page_map(msgspec.structs.replace(query, have=1)) == page_map()
    assert seen.page_map(MapQuery("kv", "owner")) is None
    assert [one.seq for one in seen.log(EventQuery(77)).items()] == [3]
    assert seen.log(EventQuery(0, about="lease:7")).items() == []


def test_a_log_keeps_the_last_events_and_an_older_one_stays_as_it_was():
    log = Log()
    for seq in range(1, 5001):
        log = log.add([Evicted(seq, 1.0, 4, 1, "room")], seq)
        if seq == 3000:
            older = log

    assert (len(log), log.items()[0].seq, log.items()[-1].seq) == (MAX_ITEMS, 3001, 5000)
    assert (older.items()[0].seq, older.items()[-1].seq) == (1001, 3000)
    assert [one.seq for one in log.tail(2)] == [4999, 5000]
    assert log.tail(0) == []
    assert log.add([Gap(0, 7, 0)], 0).last_seq == 5000
