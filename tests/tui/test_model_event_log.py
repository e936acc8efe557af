"""Events in words, what they are about, and the lines of a log."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from kvd import filters
from kvd.wire.admin import Mark, OtherEnd
from kvd.wire.console import Filter
from kvd.wire.events import Event, HandoffEnded, LeaseOpened, Moved, PagesCorrupt, refs_of
from tests.tui.feed import vitals
from tui.model import event_log, event_words
from tui.model.event_log import MAX_ITEMS, EventGap, Log, LogEntries
from tui.model.mirror import Notice

HOSTILE = "[red]x\x1b[31m\u202e"
ESCAPED = r"[red]x\x1b[31m\u202e"


def made(kind: type[Event]) -> Event:
    """One of a kind, with a hostile text in every field that takes one."""
    values = {
        int: 7,
        float: 1.5,
        str: HOSTILE,
        tuple: (1, 2),
    }
    told = msgspec.structs.fields(kind)
    whole = {
        one.name: values[one.type if isinstance(one.type, type) else tuple]
        if one.type in values
        else ((HOSTILE,) if "str" in str(one.type) else (1, 2))
        for one in told
    }
    return kind(**whole)


def moved(seq: int, room: int = 12, at_s: float | None = None, why: str = "") -> Moved:
    at_s = float(seq) if at_s is None else at_s
    return Moved(
        seq,
        at_s,
        side="decode",
        part=4,
        room=room,
        peer="prefill-0",
        before="queued",
        after="offered",
        trigger="admitted",
        why=why,
    )


def ended(outcome: str) -> HandoffEnded:
    return HandoffEnded(
        9,
        1.0,
        side="prefill",
        part=4,
        room=12,
        peer="one",
        outcome=outcome,
        code="",
        reason="",
        prompt_tokens=16,
        decode_prefix_len=0,
        moved_bytes=2048,
        saved_bytes=0,
        took_s=0.5,
        lease=7,
    )


@pytest.mark.parametrize("kind", get_args(Event), ids=lambda kind: kind.__struct_config__.tag)
def test_every_kind_has_words_that_cannot_steer_a_terminal(kind):
    event = made(kind)
    words = event_words.words(event)
    assert words
    assert words.isprintable()
    assert "\x1b" not in words
    row, columns = event_words.record_of(event)
    assert len(row.cells) == len(columns)
    assert event_words.level_of(event) in event_words.levels_of(event_words.tag_of(event))


def test_what_is_nothing_is_not_said():
    opened = LeaseOpened(
        1, 1.0, lease=7, session=2, reason="prefill", room=0, prefix_tokens=0, held_pages=4
    )
    assert event_words.words(opened) == "lease 7 of client 2 (prefill): 4 pages held"
    full = msgspec.structs.replace(
        opened, room=3, prefix_tokens=16, prompt_tokens=64, missed_tokens=48, why_missed="evicted"
    )
    assert event_words.words(full) == (
        "lease 7 of client 2 (prefill) room 3: 4 pages held, prompt 64 tokens, 16 cached, "
        "48 missed: evicted"
    )


def test_units_are_those_that_names_say():
    assert event_words.words(ended("delivered")) == (
        "room 12 prefill one: delivered, 2.00Ki moved in 0.50s"
    )


def test_a_handoff_that_did_not_arrive_is_trouble():
    assert event_words.level_of(ended("delivered")) == "notice"
    assert event_words.level_of(ended("failed")) == "trouble"


def test_an_event_names_the_narrowest_first_and_links_all_that_can_be_opened():
    event = ended("failed")
    assert tuple(refs_of(event)) == ("room:12", "lease:7", "peer:one")
    assert event_words.links_of(event) == ("send:4", "room:12", "lease:7", "peer:one")
    corrupt = PagesCorrupt(
        1,
        1.0,
        part=4,
        room=12,
        peer="one",
        component="swa",
        pages=(17, 18),
        logical_pages=(0, 1),
        bad_pages=2,
        checked_pages=4,
        total_pages=4,
        why="sums",
    )
    assert event_words.links_of(corrupt) == (
        *("receive:4", "room:12", "peer:one", "page:swa:17", "page:swa:18"),
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kind=evicted", ("evicted",)),
        (
            "kind:peer",
            (
                *("peer-draining", "peer-lost", "peer-refused", "peer-replaced"),
                *("peer-suspect", "peer-up"),
            ),
        ),
        ("level:fault", ("pages-corrupt", "violation")),
        ("words", ()),
        ("kind:nothing", ("none",)),
    ],
)
def test_only_kinds_that_may_pass_a_filter_are_asked_for(text, expected):
    assert event_words.kinds_for(filters.parse(text, event_words.COLUMNS)) == expected


def test_a_kind_that_may_be_trouble_is_asked_for_with_the_troubles():
    found = event_words.kinds_for(
        filters.parse("!level:routine !level:notice", event_words.COLUMNS)
    )
    assert "handoff-ended" in found
    assert not {"moved", "client-attached"} & set(found)


# ---- lines ---------------------------------------------------------------------------------------


def test_what_was_made_of_an_event_is_kept():
    book, log = LogEntries(), Log().add([moved(at) for at in range(1, 200)], 199)
    before = book.entries(log, 300.0)
    after = book.entries(log.add([moved(200)], 200), 300.0)
    assert all(a is b for a, b in zip(before, after[:-1], strict=True))
    assert [one.key for one in after] == [f"event:{at}" for at in range(1, 201)]


def test_a_log_stays_bounded_and_so_do_its_lines():
    book, log = LogEntries(), Log()
    for start in range(1, 6001, 500):
        log = log.add([moved(at) for at in range(start, start + 500)], start + 499)
        entries = book.entries(log, 9000.0)
    assert len(entries) == MAX_ITEMS
    assert len(book._made) == MAX_ITEMS
    assert entries[-1].key == "event:6000"


def test_a_filter_leaves_gaps():
    book = LogEntries()
    book.filters = (Filter("", "has", "room 13"),)
    log = Log().add([moved(1), EventGap(2, 7, 3), moved(2, room=13)], 2)
    lines = [event_log.line_of(one) for one in book.entries(log, 9.0)]
    assert [one.kind for one in lines] == ["gap", "moved"]
    assert lines[0].words == (
        "older events are no longer kept, 7 of them: only failures and changes are; "
        "3 events were more than a frame takes"
    )


def test_what_is_kept_of_before_a_gap_is_before_it():
    log = Log().add([moved(1), EventGap(before_seq=9, lost=7, skipped=0, since_s=4.0), moved(9)], 9)
    assert [one.at_s for one in LogEntries().entries(log, 9.0)] == [1.0, 4.0, 9.0]


def test_a_filter_by_age_is_of_now():
    book = LogEntries()
    book.filters = filters.parse("age<5s", event_words.COLUMNS)
    log = Log().add([moved(1), moved(8)], 8)
    assert [one.key for one in book.entries(log, 9.0)] == ["event:8"]
    assert book.entries(log, 20.0) == []


def test_marks_of_the_other_end_stand_where_they_belong_in_time():
    end = OtherEnd("receive:4", HOSTILE, "prefill", marks=(Mark(7.5, HOSTILE), Mark(2.0, "sent")))
    more = event_log.marks_of([end], 10.0)
    log = Log().add([moved(2), moved(5)], 5)
    entries = LogEntries().entries(log, 10.0, more)
    assert [one.at_s for one in entries] == [2.0, 2.5, 5.0, 8.0]
    told = event_log.line_of(entries[1])
    assert (told.letter, told.kind, told.words) == ("~", ESCAPED, f"prefill: {ESCAPED}")


def test_an_end_that_tells_nothing_says_why():
    [one] = event_log.marks_of([OtherEnd("send:3", "two", "", why_none="it is silent")], 10.0)
    assert event_log.line_of(one).words == "tells nothing of its end of send:3: it is silent"
    assert one.ref == "peer:two"


def test_restarts_are_lines_once_they_are_known():
    notices = [
        Notice(2.0, "restart", "the first"),
        Notice(5.0, "restart", "the second"),
        Notice(5.0, "lost", "7 events"),
    ]
    head = vitals(103.0, started_s=99.5)
    first, second = event_log.restarts_of(notices, 8.0, head)
    assert (first.at_s, second.at_s, second.ref) == (97.0, 99.5, "")
    assert event_log.line_of(second).words == "the second"
    assert event_log.restarts_of(notices, 1.0, head) == []
    assert event_log.restarts_of(notices, 8.0, None) == []
