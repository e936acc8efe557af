"""The reducer: what frames add up to, and what it makes of those that do not fit."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvd.wire.admin import Look
from kvd.wire.console import EventQuery, MapQuery, Query, TableRow
from kvd.wire.events import Evicted
from tests.tui.frames import LEASES, changes, frame, lease, page_map, table, vitals
from tui.model.event_log import EventGap
from tui.model.mirror import (
    LinkConnecting,
    LinkDown,
    LinkLagging,
    LinkLive,
    Mirror,
    Notice,
    Subscription,
)
from tui.model.tables import fold, read

MAP = MapQuery("kv", "state", cells=2, pages_each=4)
EVENTS = EventQuery(0, limit=3)


class Talk:
    """A mirror and what it hears; each turn is one look and its frame."""

    def __init__(self, *queries, events=None):
        self.mirror = Mirror()
        self.wanted = Subscription(queries, events)
        self.call = 0

    def turn(self, *answers, heard_s=0.0, **fields):
        self.call += 1
        look = self.mirror.look(self.call, self.wanted)
        self.mirror.take(frame(self.call, *answers, **fields), heard_s)
        return look

    def data(self):
        return self.mirror.snapshot().tables.get(LEASES)

    def notices(self):
        return [(one.kind, one.text) for one in self.mirror.notices]


@pytest.fixture
def talk():
    return Talk(LEASES)


def test_a_table_is_asked_for_whole_first_and_by_its_revision_then(talk):
    first = talk.turn(table(lease(1), lease(2), revision=7))
    second = talk.turn(changes(since=7, revision=7))

    assert first == Look(1, (LEASES,), None)
    assert second == Look(2, (msgspec.structs.replace(LEASES, have=7),), None)


def test_a_change_makes_a_new_sheet_that_shares_the_rows_that_stayed(talk):
    talk.turn(table(lease(1), lease(2), revision=1))
    before = talk.data()

    talk.turn(changes(lease(2, held=9), since=1, revision=2))

    after = talk.data()
    assert [row.cells[3] for row in after.listed()] == [4, 9]
    assert [row.cells[3] for row in before.listed()] == [4, 4]
    assert after.rows["lease:1"] is before.rows["lease:1"]
    assert (after.revision, after.at_s, after.columns) == (2, 101.0, before.columns)


def test_rows_that_are_no_longer_in_the_order_are_gone(talk):
    talk.turn(table(lease(1), lease(2), revision=1))

    talk.turn(changes(lease(3), since=1, revision=2, order=("lease:3", "lease:1")))

    assert [row.key for row in talk.data().listed()] == ["lease:3", "lease:1"]
    assert set(talk.data().rows) == {"lease:1", "lease:3"}


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (changes(since=3, revision=4), "leases: changes since 3, but 1 is here"),
        (
            changes(since=1, revision=2, order=("lease:1", "lease:5")),
            "leases: row 'lease:5' is in the order and nowhere else",
        ),
        (
            changes(TableRow("lease:1", ("x",)), since=1, revision=2),
            "leases: row 'lease:1' has not one cell for each column",
        ),
        (table(view="rooms"), "asked for leases, answered with rooms"),
        (page_map(), "a table came for a map, or a map for a table"),
    ],
)
def test_a_change_that_does_not_fit_drops_the_table_and_asks_for_it_whole(talk, answer, why):
    talk.turn(table(lease(1), lease(2), revision=1))

    talk.turn(answer)

    assert talk.data() is None
    assert talk.notices() == [("misfit", f"dropped, and asked for again: {why}")]
    assert talk.turn(table(lease(1), revision=5)).queries == (LEASES,)
    assert talk.data().order == ("lease:1",)


def test_an_answer_that_cannot_be_read_is_a_notice(talk):
    talk.turn(msgspec.Raw(b"\xc1"))

    assert talk.data() is None
    [(kind, text)] = talk.notices()
    assert kind == "misfit"
    assert text.startswith("dropped, and asked for again: an answer cannot be read: ")


def test_a_frame_of_another_call_changes_nothing(talk):
    talk.turn(table(lease(1), revision=1))
    talk.mirror.look(2, talk.wanted)

    talk.mirror.take(frame(1, table(revision=9), head=vitals(200.0)), 5.0)

    assert talk.data().order == ("lease:1",)
    assert talk.mirror.vitals == vitals()
    assert talk.mirror.notices[-1] == Notice(
        5.0, "misfit", "a frame of call 1 came, the one of 2 is due"
    )


def test_an_answer_too_few_drops_what_was_asked_for(talk):
    talk.turn(table(lease(1), revision=1))

    talk.turn()

    assert talk.data() is None
    assert talk.notices() == [("misfit", "dropped, and asked for again: 1 queries, 0 answers")]


def test_a_restarted_daemon_makes_everything_the_past(talk):
    """Its revisions count from 1 again: a change that happens to fit is none of ours."""
    talk.turn(table(lease(1), revision=7))
    again = vitals(1.0, incarnation="b" * 32)

    talk.turn(changes(since=7, revision=7), head=again)

    assert talk.data() is None
    assert talk.notices() == [
        (
            "restart",
            "decode-0 has restarted: incarnation aaaaaaaa ended, bbbbbbbb is here",
        )
    ]
    assert talk.turn(table(lease(4)), head=again).queries == (LEASES,)
    assert talk.data().order == ("lease:4",)


def test_a_table_that_there_is_not_keeps_its_trouble_and_is_asked_for_whole(talk):
    talk.turn(table(lease(1), revision=1))

    talk.turn(table(revision=0, columns=(), trouble="there is no table 'leases'"))

    assert talk.data().trouble == "there is no table 'leases'"
    assert talk.data().order == ("lease:1",)
    assert talk.turn(table(lease(2), revision=3)).queries == (LEASES,)
    assert talk.data().trouble == ""


def test_a_map_keeps_its_cells_while_nothing_changes():
    talk = Talk(MAP)
    talk.turn(page_map(b"\x00\x01", revision=3))

    look = talk.turn(page_map(None, revision=3, lit=(1,)))

    assert look.queries == (msgspec.structs.replace(MAP, have=3),)
    assert talk.mirror.snapshot().page_map(MAP) == page_map(b"\x00\x01", revision=3, lit=(1,))


def test_a_map_without_cells_on_top_of_another_is_dropped():
    talk = Talk(MAP)
    talk.turn(page_map(b"\x00\x01", revision=3))

    talk.turn(page_map(None, revision=4))

    assert talk.mirror.snapshot().page_map(MAP) is None
    assert talk.turn(page_map()).queries == (MAP,)


@pytest.mark.parametrize(
    "wrong", [page_map(b"\x00\x02"), page_map(lit=(2,)), page_map(pages_each=0)]
)
def test_a_map_that_cannot_be_drawn_is_dropped(wrong):
    talk = Talk(MAP)
    talk.turn(page_map())

    talk.turn(wrong)

    assert talk.mirror.snapshot().page_map(MAP) is None
    assert [one.kind for one in talk.mirror.notices] == ["misfit"]


def test_the_same_query_is_asked_for_once():
    rooms = Query("rooms")
    mirror = Mirror()

    asked = mirror.queries((LEASES, rooms, msgspec.structs.replace(LEASES, have=4)))

    assert asked == (LEASES, rooms)


def test_at_most_eight_queries_are_asked():
    assert len(Mirror().queries(Query("leases", first=at) for at in range(20))) == 8


def test_windows_that_were_not_used_for_long_are_forgotten():
    mirror = Mirror()
    for first in range(40):
        mirror.look(first, Subscription((Query("leases", first=first, limit=10),)))
        mirror.take(frame(first, table(lease(first))), 0.0)

    assert [slot.first for slot in mirror.snapshot().tables] == list(range(16, 40))


def event(seq):
    return Evicted(seq, 1.0, pages=4, nodes=1, reason="room")


def test_events_before_the_first_ask_are_no_loss_and_all_that_are_gone_are_a_gap():
    talk = Talk(events=EVENTS)

    talk.turn(events=[event(5)], lost=3, skipped=1, upto=5)
    look = talk.turn(events=[event(9)], lost=2, skipped=1, upto=9)

    assert look.events == EventQuery(5, limit=3)
    assert talk.mirror.snapshot().log(EVENTS).items == (
        *(EventGap(5, 3, 1), event(5), EventGap(9, 2, 1), event(9)),
    )


def test_a_filter_of_events_goes_on_after_all_that_were_looked_at():
    talk = Talk(events=EventQuery(0, kinds=("evicted",)))
    talk.turn(upto=70)

    assert talk.turn(upto=70).events.after == 70


def test_events_begin_again_with_a_restarted_daemon():
    talk = Talk(events=EVENTS)
    talk.turn(events=[event(50)], upto=50)
    again = vitals(1.0, incarnation="b" * 32)

    talk.turn(events=[event(51)], upto=60, head=again)
    look = talk.turn(events=[event(1), event(2)], upto=2, head=again)

    assert look.events.after == 0
    assert talk.mirror.snapshot().log(EVENTS).items == (event(1), event(2))


def test_the_link_is_live_lags_and_is_down_since_it_first_was():
    talk = Talk(LEASES)
    mirror = talk.mirror
    assert mirror.link_state(0.0, 0.1) == LinkConnecting("")
    mirror.failed("there is no socket at /x", 1.0)
    assert mirror.link_state(1.0, 0.1) == LinkConnecting("there is no socket at /x")

    talk.turn(table(), heard_s=10.0)
    assert mirror.link_state(10.25, 0.1) == LinkLive(0.25)
    assert mirror.link_state(11.0, 0.1) == LinkLagging(1.0)
    assert mirror.link_state(11.0, 1.0) == LinkLive(1.0)

    mirror.failed("no answer", 12.0)
    mirror.failed("nobody listens", 13.0)
    assert mirror.link_state(20.0, 0.1) == LinkDown("nobody listens", 12.0)
    talk.turn(table(), heard_s=21.0)
    assert mirror.link_state(21.0, 0.1) == LinkLive(0.0)


def test_any_sequence_of_windows_and_changes_gives_what_a_whole_table_would():
    """Two thousand frames against a table that changes at random; the seed is in the message."""
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    talk = Talk(LEASES)
    rows, changed, order_changed = {}, {}, 0
    for revision in range(1, 2001):
        for number in rng.sample(range(12), rng.randrange(4)):
            key = f"lease:{number}"
            if key in rows and rng.random() < 0.4:
                del rows[key], changed[key]
                order_changed = revision
            else:
                order_changed = order_changed if key in rows else revision
                rows[key] = lease(number, held=rng.randrange(100))
                changed[key] = revision
        have = talk.mirror.queries((LEASES,))[0].have
        all_of_it = table(*rows.values(), revision=revision)
        if have and rng.random() < 0.9:
            order = all_of_it.order if order_changed > have else None
            fresh = [row for key, row in rows.items() if changed[key] > have]
            answer = changes(
                *fresh, since=have, revision=revision, order=order, total=len(rows), at_s=100.0
            )
        else:
            answer = all_of_it
        talk.turn(answer)
        assert talk.data() == fold(None, LEASES, all_of_it), f"seed {seed}"


def test_bytes_that_are_no_answer_never_raise():
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    good = bytearray(msgspec.msgpack.encode(table(lease(1), lease(2))))
    mirror = Mirror()
    for call in range(1500):
        wrap_words = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            wrap_words[rng.randrange(len(wrap_words))] = rng.randrange(256)
        mirror.look(call, Subscription((LEASES,)))
        mirror.take(frame(call, msgspec.Raw(bytes(wrap_words))), 0.0)
        data = mirror.snapshot().tables.get(LEASES)
        assert data is None or len(data.listed()) == len(data.order), f"seed {seed}"
        read(msgspec.Raw(bytes(wrap_words)))
