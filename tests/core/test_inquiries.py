"""The other end of a handoff, as an operator hears of it: always within a second, with a reason."""

from __future__ import annotations

import msgspec
import pytest

from kvd.core import effects, inputs
from kvd.core.handoff.parts import HISTORY_LINES
from kvd.core.inspect.inquiries import MAX_INQUIRIES, MAX_STORIES
from kvd.errors import Code
from kvd.wire import admin, client
from kvd.wire.codec import PEER_MESSAGES
from kvd.wire.peer import AskStory, Hello, Story, Told
from tests.core.engines import PROMPT, Sender, cached
from tests.core.sentences import sentence_of
from tests.core.world import Side, World, tokens

ROOM = 7


def ask(side: Side, room: int = ROOM) -> list[admin.AdminReply]:
    """One question; what has been answered so far."""
    before = len(side.reports)
    side.feed(inputs.FromOperator(side.world.now_s, b"op", admin.AskOtherEnd(5, room)))
    side.world.run()
    return side.reports[before:]


def streaming() -> World:
    """Room 7 under way: 4 of 7 pages are there already, 2 of 3 are posted and not landed."""
    world = World()
    cached(world.d, tokens((1, 64)))
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=ROOM, source=("p",))
    sender.advance(96)
    return world


def test_the_decode_side_hears_how_far_the_prefill_side_is():
    world = streaming()
    world.pass_time(0.5)

    (answer,) = ask(world.d)

    assert isinstance(answer, admin.OtherEnds)
    assert answer.call == 5
    (end,) = answer.ends
    assert (end.ours, end.peer, end.side, end.why_none) == ("receive:1", "p", "prefill", "")
    assert (end.state, end.waiting_for) == ("streaming", "the engine to compute")
    assert (end.prompt_tokens, end.decode_prefix_len) == (100, 64)
    assert (end.moved_bytes, end.total_bytes, end.outstanding_posts) == (0, 384, 1)
    assert end.deadline_in_s == pytest.approx(29.5)
    assert end.marks == (
        admin.Mark(pytest.approx(0.5), "opened by session 1"),
        admin.Mark(pytest.approx(0.5), "await-offer -> streaming (offered: decode has 64 tokens)"),
    )


def test_the_prefill_side_hears_what_the_decode_side_waits_for():
    world = streaming()

    (answer,) = ask(world.p)

    assert isinstance(answer, admin.OtherEnds)
    (end,) = answer.ends
    assert (end.ours, end.peer, end.side) == ("send:1", "d", "decode")
    assert (end.state, end.waiting_for) == ("receiving", "the rest of the bytes")
    assert (end.moved_bytes, end.total_bytes, end.outstanding_posts) == (0, 384, 0)


def test_a_delivered_receive_can_still_be_asked_about_by_its_sender():
    world = streaming()
    world.lost = {Story}
    assert ask(world.p) == []
    world.lost = set()
    world.pass_time(1.1)
    world.land_posts()
    world.p.call(client.Finish, send=1, aux=b"")
    world.land_posts()

    (answer,) = ask(world.d)

    assert isinstance(answer, admin.OtherEnds)
    assert [(end.ours, end.state) for end in answer.ends] == [("receive:1", "closed")]


@pytest.mark.parametrize("lost", [AskStory, Story])
def test_a_peer_that_does_not_answer_is_named_after_a_second(lost):
    world = streaming()
    world.lost = {lost}

    assert ask(world.d) == []
    world.pass_time(0.9)
    assert not any(isinstance(one, admin.OtherEnds) for one in world.d.reports)
    world.pass_time(0.1)

    assert world.d.reports[-1] == admin.OtherEnds(
        5, (admin.OtherEnd("receive:1", "p", "prefill", why_none="it has not answered within 1 s"),)
    )
    assert (world.d.node.inquiries.open, world.d.node.inquiries.questions) == ([], {})


def test_a_late_answer_is_nothing():
    world = streaming()
    world.hold_wire = True
    ask(world.d)
    world.pass_time(1.5)
    n_reports = len(world.d.reports)
    world.hold_wire = False

    world.run()

    assert len(world.d.reports) == n_reports
    assert world.d.node.refused == 0


def test_a_moment_over_there_is_as_old_as_half_the_round_trip_more():
    world = streaming()
    world.hold_wire = True
    ask(world.d)
    (question,) = world.held(AskStory)
    asked = question.message
    assert isinstance(asked, AskStory)
    world.wire.clear()
    world.now_s += 0.4
    world.hold_wire = False

    world.inject(
        world.d,
        Story(asked.target, asked.source, asked.ask, "streaming", marks=(Told(2.0, "began"),)),
    )

    answer = world.d.reports[-1]
    assert isinstance(answer, admin.OtherEnds)
    assert answer.ends[0].round_trip_s == pytest.approx(0.4)
    assert answer.ends[0].marks == (admin.Mark(pytest.approx(2.2), "began"),)


def test_a_time_that_is_none_is_shown_as_none():
    world = streaming()
    world.lost = {AskStory}
    ask(world.d)

    world.inject(
        world.d,
        Story(
            *(world.p.incarnation, world.d.incarnation, 1, "streaming"),
            deadline_in_s=float("nan"),
            marks=(Told(float("-inf"), "x"),),
        ),
    )

    answer = world.d.reports[-1]
    assert isinstance(answer, admin.OtherEnds)
    assert (answer.ends[0].deadline_in_s, answer.ends[0].marks) == (0.0, (admin.Mark(0.0, "x"),))


def test_who_is_nobodys_other_end_is_not_asked():
    world = World(d_pages=9)
    Sender(world)
    world.d.lease(tokens((5000, 100)))
    world.d.call(client.ReceiveRequest, PROMPT, room=ROOM, source=("p",))

    answers = ask(world.d) + ask(world.p)

    assert [one.ends[0].why_none for one in answers if isinstance(one, admin.OtherEnds)] == [
        "nothing was offered to it yet",
        "no peer yet",
    ]


def test_a_silent_peer_is_not_waited_for():
    world = streaming()
    world.cut = {"p"}
    world.pass_time(5)
    world.d.node.peers.by_name["p"].heard_s = world.now_s - 3.0

    (answer,) = ask(world.d)

    assert isinstance(answer, admin.OtherEnds)
    assert answer.ends[0].why_none == sentence_of("a silent peer is not waited for")


def test_a_room_that_is_not_open_is_refused():
    world = World()

    (answer,) = ask(world.d, 99)

    assert isinstance(answer, admin.AdminFailed)
    assert answer.refusal.message == sentence_of("a room that is not open is refused")


def test_questions_under_way_are_bounded():
    world = streaming()
    world.lost = {AskStory}
    for _ in range(MAX_INQUIRIES):
        assert ask(world.d) == []

    (answer,) = ask(world.d)
    world.pass_time(1.0)

    assert isinstance(answer, admin.AdminFailed)
    assert answer.refusal.code is Code.NO_ROOM
    assert world.d.node.inquiries.questions == {}
    assert sum(isinstance(one, admin.OtherEnds) for one in world.d.reports) == MAX_INQUIRIES


def told(world: World, asker: Side, **fields: object) -> Story:
    """What p answers when ``asker`` asks about the handoff of d, with other fields."""
    (part,) = world.d.node.decoder.open.parts.values()
    question = AskStory(asker.incarnation, world.p.incarnation, 1, part.handoff, ROOM, "prefill")
    kind = "in" + asker.connection
    step = world.p.feed(
        inputs.FromPeer(
            world.now_s,
            f"{kind}:{asker.name}",
            msgspec.structs.replace(question, **fields),
        )
    )
    (story,) = [
        one.message
        for one in step
        if isinstance(one, effects.SendToPeer) and isinstance(one.message, Story)
    ]
    return story


def test_only_the_other_end_of_a_handoff_is_told_of_it():
    world = World(names=("d", "e"))
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=ROOM, source=("p",))
    sender.advance(96)

    assert told(world, world.d).state == "streaming"
    nothing = Story(world.p.incarnation, "", 1)
    for story in (
        told(world, world.sides["e"]),
        told(world, world.d, room=8),
        told(world, world.d, handoff=9),
        told(world, world.d, side="decode"),
        told(world, world.d, side="neither"),
    ):
        assert msgspec.structs.replace(story, target="") == nothing


def test_a_peer_that_asks_all_the_time_is_told_so_much_a_second_and_costs_others_nothing():
    world = World(names=("d", "e"))
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=ROOM, source=("p",))
    sender.advance(96)
    question = AskStory(world.d.incarnation, world.p.incarnation, 1, 1, ROOM, "prefill")
    link = f"in{world.d.connection}:d"

    def stories(n_asked: int) -> int:
        asked = [inputs.FromPeer(world.now_s, link, question) for _ in range(n_asked)]
        return sum(len(world.p.feed(one)) for one in asked)

    assert stories(1000) == MAX_STORIES
    assert told(world, world.sides["e"]).state == ""
    world.now_s += 1.0
    assert stories(1000) == MAX_STORIES


def test_a_story_tells_no_tokens_no_pages_and_nobody_else():
    world = streaming()
    story = told(world, world.d)
    said = msgspec.json.encode(story).decode()

    assert set(Story.__struct_fields__) == {
        *("source", "target", "ask", "state", "waiting_for", "prompt_tokens", "decode_prefix_len"),
        *("moved_bytes", "total_bytes", "outstanding_posts", "deadline_in_s", "marks"),
    }
    assert "engine" not in said.replace("the engine", "").replace("await-engine", "")
    assert len(story.marks) <= HISTORY_LINES


def test_an_answer_of_another_peer_than_was_asked_is_nothing():
    world = World(names=("d", "e"))
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=ROOM, source=("p",))
    sender.advance(96)
    world.lost = {AskStory}
    assert ask(world.p) == []

    forged = Story(world.sides["e"].incarnation, world.p.incarnation, 1, "closed")
    world.inject(world.p, forged, world.sides["e"])

    assert not any(isinstance(one, admin.OtherEnds) for one in world.p.reports)


def test_a_restarted_peer_is_answered_for_by_nobody():
    world = streaming()
    world.lost = {AskStory}
    ask(world.d)
    world.lost = set()
    world.restart(world.p)
    world.pass_time(1.1)

    answer = world.d.reports[-1]
    assert isinstance(answer, admin.OtherEnds)
    assert answer.ends[0].why_none == sentence_of("a restarted peer is answered for by nobody")


def test_a_story_that_is_too_long_is_no_message():
    sound = Story("a", "b", 1, "x", marks=tuple(Told(0.0, "y" * 512) for _ in range(32)))
    assert PEER_MESSAGES.decode(PEER_MESSAGES.encode(sound)) == sound

    for unsound in (
        msgspec.structs.replace(sound, waiting_for="z" * 513),
        msgspec.structs.replace(sound, marks=(*sound.marks, Told(0.0, ""))),
        msgspec.structs.replace(sound, marks=(Told(0.0, "y" * 513),)),
        msgspec.structs.replace(sound, state="s" * 129),
    ):
        assert not isinstance(PEER_MESSAGES.decode(PEER_MESSAGES.encode(unsound)), Story | Hello)
