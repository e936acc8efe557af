"""What is known of a handoff at both ends, as of the moment that is shown."""

from __future__ import annotations

from kvd.errors import Code, Refusal
from kvd.wire.admin import Because, Mark, OtherEnd
from kvd.wire.console import Column, Query, TableRow
from tui.model import handoffs
from tui.model.columns import NamedRow, named_row_of
from tui.model.handoffs import HandoffStory, ends, timeline
from tui.model.tables import TableData

KINDS = {"since": "since", "ended": "since"}
HERE = Because(
    0,
    "it waits",
    (),
    (),
    (Mark(3.0, "queued -> offered (admitted)"), Mark(1.0, "offered -> receiving (accepted)")),
)
THERE = OtherEnd(
    "receive:4",
    "p0",
    "prefill",
    "streaming",
    "the engine to compute",
    marks=(Mark(2.0, "await-offer -> streaming (offered)"),),
)


def facts(**more) -> NamedRow:
    cells = {"side": "decode", "state": "receiving", "peer": "peer:p0", "since": 97.0, **more}
    columns = tuple(Column(name, KINDS.get(name, "text")) for name in cells)
    row = TableRow("receive:4", tuple(cells.values()))
    one = TableData(Query("rooms"), columns, ("receive:4",), {"receive:4": row}, 1, 1, 100.0, 1)
    found = named_row_of(one, "receive:4")
    assert found is not None
    return found


def told() -> HandoffStory:
    return HandoffStory("receive:4").with_here(100.0, HERE).with_there(100.0, (THERE,))


def test_both_ends_are_told_as_old_as_they_are_by_now():
    ours, other = ends(told(), facts(), "d0", 102.0)
    assert (ours.name, ours.side, ours.state) == ("d0", "decode", "receiving")
    assert [mark.ago_s for mark in ours.marks] == [5.0, 3.0]
    assert (other.name, other.side, other.state) == ("p0", "prefill", "streaming")
    assert [mark.ago_s for mark in other.marks] == [4.0]


def test_a_frozen_screen_does_not_know_what_was_yet_to_come():
    ours, other = ends(told(), facts(), "d0", 98.5)
    assert [mark.what for mark in ours.marks] == ["queued -> offered (admitted)"]
    assert [mark.ago_s for mark in other.marks] == [0.5]


def test_ends_of_other_parts_of_the_room_are_not_its_own():
    own = HandoffStory("receive:9").with_there(100.0, (THERE,))
    assert [end.trouble for end in ends(own, facts(), "d0", 100.0)[1:]] == [
        "this daemon tells of no other end"
    ]


def test_an_end_that_nothing_is_known_of_says_why():
    silent = OtherEnd("receive:4", "p0", "prefill", why_none="it has been silent for 5.3 s")
    story_shown = HandoffStory("receive:4").with_there(100.0, (silent,))
    assert ends(story_shown, facts(), "d0", 100.0)[1].trouble == "it has been silent for 5.3 s"

    refused = story_shown.with_there(100.0, Refusal(Code.UNREACHABLE, "nobody answers"))
    assert ends(refused, facts(), "d0", 100.0)[1].trouble == "nobody answers"

    assert (
        ends(HandoffStory("receive:4"), facts(), "d0", 100.0)[1].trouble == "asked; no answer yet"
    )
    assert ends(HandoffStory("receive:4"), facts(peer=""), "d0", 100.0)[1].trouble == "nobody yet"


def test_the_story_of_one_that_has_ended_stays_and_has_its_end():
    gone = Refusal(Code.BAD_REQUEST, "no such receive")
    story_shown = told().with_here(103.0, gone)
    row = facts(state="failed", ended=101.5, waiting_for="cancelled: by its engine")
    ours = ends(story_shown, row, "d0", 103.0)[0]
    assert ours.state == "closed"
    assert ours.marks[-1] == Mark(1.5, "receiving -> closed (cancelled: by its engine)")


def test_before_any_answer_the_row_says_when_it_began():
    assert ends(HandoffStory("receive:4"), facts(), "d0", 100.0)[0].marks == (Mark(3.0, "began"),)


def test_a_story_that_is_refused_while_it_is_open_is_said():
    story_shown = HandoffStory("receive:4").with_here(
        100.0, Refusal(Code.UNREACHABLE, "nobody answers")
    )
    assert ends(story_shown, facts(), "d0", 100.0)[0].trouble == "nobody answers"


def test_both_stories_are_told_in_one_order():
    assert [(ago_s, name) for ago_s, name, _ in timeline(ends(told(), facts(), "d0", 100.0))] == [
        (3.0, "d0"),
        (2.0, "p0"),
        (1.0, "d0"),
    ]
    assert handoffs.seen((Mark(1.0, "x"),), -2.0) == ()


def test_one_that_had_ended_before_anybody_asked_has_its_beginning_and_its_end():
    row = facts(state="failed", ended=99.0, waiting_for="lost: its peer")
    ours, other = ends(HandoffStory("receive:4"), row, "d0", 100.0)
    assert ours.state == "closed"
    assert ours.marks == (Mark(3.0, "began"), Mark(1.0, "open -> closed (lost: its peer)"))
    assert other.trouble == "not asked: it has ended"


def test_what_the_other_end_said_stays_while_nobody_can_be_asked():
    story_shown = told().with_there(101.0, Refusal(Code.UNREACHABLE, "nobody answers"))
    assert story_shown == told()
