"""The life of a handoff as it is drawn: both ends over one axis, and what took so long."""

from __future__ import annotations

import math

import pytest

from kvd.text import lasting
from kvd.wire import client
from kvd.wire.admin import Mark
from tests.core.world import World, tokens
from tui.draw.phases import MAX_MARKS, HandoffEnd, HandoffPhase, draw, phases, silence
from tui.draw.spans import text_of, width_of
from tui.model.handoffs import seen

HERE = HandoffEnd(
    "here",
    "decode",
    "receiving",
    (
        Mark(8.41, "asked for by session 1"),
        Mark(8.409, "queued -> offered (admitted)"),
        Mark(8.3, "offered -> receiving (accepted: all of it)"),
    ),
    "bytes",
)
THERE = HandoffEnd(
    "prefill-0",
    "prefill",
    "streaming",
    (Mark(8.6, "opened by session 4"), Mark(8.405, "await-offer -> streaming (offered)")),
)
OVER = HandoffEnd(
    "here",
    "decode",
    "closed",
    (
        Mark(5.0, "queued -> offered (admitted)"),
        Mark(4.0, "offered -> receiving (accepted)"),
        Mark(1.0, "receiving -> closed (settled)"),
    ),
)


def texts(ends: list[HandoffEnd], width: int, deadline_in_s: float | None = None) -> list[str]:
    return [text_of(one) for one in draw(ends, width, deadline_in_s)]


def test_a_phase_lasts_from_one_transition_to_the_next_and_the_last_runs():
    assert phases(HERE) == (
        HandoffPhase("queued", 8.41, 8.409, "asked for by session 1", False),
        HandoffPhase("offered", 8.409, 8.3, "admitted", False),
        HandoffPhase("receiving", 8.3, 0.0, "accepted: all of it", True),
    )


def test_a_handoff_that_is_over_has_no_phase_that_runs():
    assert [phase.state for phase in phases(OVER)] == ["offered", "receiving"]
    assert [phase.lasted_s for phase in phases(OVER)] == [1.0, 3.0]


def test_a_handoff_without_any_transition_is_in_its_state_since_its_first_mark():
    one = HERE._replace(marks=HERE.marks[:1], state="queued")
    assert phases(one) == (HandoffPhase("queued", 8.41, 0.0, "asked for by session 1", True),)
    assert phases(one._replace(marks=())) == ()


def test_a_transition_into_the_same_state_begins_no_phase():
    again = HERE._replace(marks=(*HERE.marks, Mark(2.0, "receiving -> receiving (fenced)")))
    assert phases(again) == phases(HERE)


def test_a_running_phase_grows_between_two_answers():
    older = HERE._replace(marks=seen(HERE.marks, 1.5))
    assert phases(older)[-1].lasted_s == pytest.approx(9.8)
    assert phases(older)[0].lasted_s == pytest.approx(phases(HERE)[0].lasted_s)


def test_both_ends_stand_over_one_axis():
    assert texts([HERE, THERE], 64, 21.6) == [
        "nothing for 8.30s: here waits for bytes                         ",
        "deadline in 21.6s       8.60s ago                            now",
        "here decode               ││─│receiving 8.30s──────────────────>",
        "prefill-0 prefill       │───│streaming 8.40s───────────────────>",
        "here: queued 1.00ms  offered 109ms  receiving 8.30s so far      ",
        "prefill-0: await-offer 195ms  streaming 8.40s so far            ",
        "longest silence 8.30s, after here: offered -> receiving (accept…",
    ]


def test_what_both_ends_wait_for_is_one_sentence():
    there = THERE._replace(waiting_for="its engine")
    assert texts([HERE, there], 90)[0].strip() == (
        "nothing for 8.30s: here waits for bytes, as prefill-0 waits for its engine"
    )
    fresh = HERE._replace(marks=(*HERE.marks, Mark(0.5, "12 pages came")))
    assert texts([fresh, there], 90)[0].strip() == (
        "here waits for bytes, as prefill-0 waits for its engine"
    )


def test_a_handoff_that_is_over_ends_when_it_did():
    assert texts([OVER], 60) == [
        "                        5.00s ago                  1.00s ago",
        "here decode             │offered─│receiving 3.00s───────────",
        "here: offered 1.00s  receiving 3.00s  closed                ",
        "longest silence 3.00s, after here: offered -> receiving (ac…",
    ]


def test_a_phase_that_has_just_begun_has_a_column():
    fresh = OVER._replace(
        state="draining", marks=(*OVER.marks[:2], Mark(0.001, "receiving -> draining ()"))
    )
    row = texts([fresh], 60)[1]
    assert row.endswith("─│")


def test_with_more_phases_than_columns_the_longest_are_drawn():
    turns = [Mark(90.0 - at, f"s{at} -> s{at + 1} ()") for at in range(60)]
    row = texts([OVER._replace(state="s60", marks=tuple(turns))], 44)[1]
    assert row == "here decode             ││││││││││││││s60──>"


def test_where_there_is_no_room_for_a_chart_the_words_have_to_do():
    assert texts([OVER], 44)[0].endswith("1.00s ago")
    assert texts([OVER], 43, -2.0)[0] == "deadline 2.00s ago".ljust(43)
    assert texts([OVER], 40, -2.0) == [
        "deadline 2.00s ago                      ",
        "here: offered 1.00s  receiving 3.00s    ",
        "      closed                            ",
        "longest silence 3.00s, after here: offe…",
    ]


def test_an_end_that_cannot_be_asked_says_why():
    mute = HandoffEnd("prefill-1", "prefill", "", (), trouble="no answer within 1 s\x1b")
    assert texts([mute], 44) == ["prefill-1: no answer within 1 s\\x1b         "]


@pytest.mark.parametrize("width", [0, 1, 7, 43, 44, 45, 90, 200])
def test_every_line_takes_the_width_at_any_width(width):
    assert {width_of(one) for one in draw([HERE, THERE, OVER], width, 3.0)} == {width}


@pytest.mark.parametrize("ago_s", [math.nan, math.inf, -math.inf, -5.0, 1e300])
def test_what_a_peer_tells_of_its_time_breaks_nothing(ago_s):
    marks = (Mark(ago_s, "漢字 -> 漢字漢字 (x)"), Mark(2.0, "b -> c (y)"), Mark(ago_s, "c -> d ()"))
    hostile = THERE._replace(state="\x1b[2J", marks=marks)
    for width in (10, 44, 90):
        lines = draw([HERE, hostile], width, 3.0)
        assert {width_of(one) for one in lines} == {width}
        assert "\x1b" not in "".join(text_of(one) for one in lines)


def test_a_peer_that_tells_too_much_is_heard_to_the_end_only():
    told = tuple(Mark(1000.0 - at, f"s{at} -> s{at + 1} ()") for at in range(500))
    assert len(phases(THERE._replace(marks=told))) == MAX_MARKS


def test_the_longest_silence_is_named_with_what_came_before_it():
    assert silence([HERE, THERE])[0] == (
        "longest silence 8.30s, after here: offered -> receiving (accepted: all of it); it lasts"
    )
    late = HERE._replace(marks=(*HERE.marks, Mark(0.5, "12 pages to verify")))
    assert silence([late, THERE])[0] == (
        "longest silence 7.80s, after here: offered -> receiving (accepted: all of it)"
    )
    assert silence([]) == ("", 0.0)


@pytest.mark.parametrize(
    ("seconds", "cleaned"),
    [(0.00004, "0.04ms"), (0.0099, "9.90ms"), (0.01, "10ms"), (0.999, "999ms"), (61, "1m01s")],
)
def test_durations_are_told_down_to_a_hundredth_of_a_millisecond(seconds, cleaned):
    assert lasting(seconds) == cleaned


def test_the_story_that_the_core_tells_is_read():
    world = World()
    prompt = tokens((1, 70))
    world.hold_posts = True
    world.d.call(client.ReceiveRequest, prompt, room=7, source=("p",))
    [part] = world.d.node.decoder.open.parts.values()
    world.pass_time(0.5)
    end = HandoffEnd("d", "decode", part.state.value, part.history.marks(world.now_s))

    [phase] = phases(end)
    assert (phase.state, round(phase.lasted_s, 6), phase.runs) == ("offered", 0.5, True)
