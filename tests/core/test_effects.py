"""Whole steps of one node: every effect of an input, in order, and nothing else."""

from __future__ import annotations

import msgspec
import pytest

from kvd.core import effects, inputs
from kvd.core.effects import Doubt
from kvd.core.handoff.offer import prompt_digest
from kvd.core.layout.spec import fingerprint
from kvd.errors import Code, Refusal
from kvd.types import Pages, pack_ids
from kvd.wire import client
from kvd.wire.client import SentShare
from kvd.wire.peer import (
    Abort,
    Accept,
    Closed,
    Grant,
    Hello,
    Offer,
    Ping,
    Progress,
    ReceiveOutcome,
    Settled,
)
from tests.core.engines import PROMPT, Sender
from tests.core.side import incarnation
from tests.core.world import Side, World

P, D = incarnation("p", 1), incarnation("d", 1)
NOW_S = 100.0
PAGES = Pages(pack_ids([57, 58, 59, 60, 61, 62, 63]))


def from_engine(side: Side, message: client.Request, toks: bytes = b"") -> list[effects.Effect]:
    return side.node.step(inputs.FromClient(NOW_S, 1, message, toks)).effects


def from_peer(side: Side, link: str, message: object) -> list[effects.Effect]:
    return side.node.step(inputs.FromPeer(NOW_S, link, message)).effects


@pytest.fixture
def world() -> World:
    world = World()
    world.hold_posts = True
    return world


def offer(world: World) -> Offer:
    return Offer(
        D, P, 1, 7, 1, 100, 0, prompt_digest(PROMPT, ""), (Grant("kv", 0, 100, PAGES),), 30.0
    )


def test_a_receive_is_answered_and_offered(world):
    assert from_engine(world.d, client.ReceiveRequest(5, 7, ("p",)), PROMPT) == [
        effects.AnswerEngine(1, client.Receiving(5, 1, 0)),
        effects.SendToPeer("out:p", offer(world)),
    ]


def test_an_accept_and_progress_are_only_noted(world):
    from_engine(world.d, client.ReceiveRequest(5, 7, ("p",)), PROMPT)
    assert from_peer(world.d, "out:p", Accept(P, D, 1)) == []
    assert from_peer(world.d, "out:p", Progress(P, D, 1, 256)) == []


def test_a_delivered_prompt_is_handed_over_and_closed(world):
    from_engine(world.d, client.ReceiveRequest(5, 7, ("p",)), PROMPT)
    settled = Settled(P, D, 1, ReceiveOutcome.DELIVERED, None, b"aux", 896)
    closed = effects.SendToPeer("out:p", Closed(D, P, 1, ReceiveOutcome.COMMITTED))

    assert from_peer(world.d, "out:p", settled) == [
        effects.AnswerEngine(1, client.Received(1, 1, PAGES, b"aux")),
        closed,
    ]
    assert from_peer(world.d, "out:p", settled) == [closed]


def test_a_failed_prompt_is_told_and_closed(world):
    from_engine(world.d, client.ReceiveRequest(5, 7, ("p",)), PROMPT)
    why = Refusal(Code.POST_FAILED, "no route", "p")
    assert from_peer(world.d, "out:p", Settled(P, D, 1, ReceiveOutcome.FAILED, why)) == [
        effects.AnswerEngine(1, client.ReceiveFailed(1, why)),
        effects.SendToPeer("out:p", Closed(D, P, 1, ReceiveOutcome.FAILED, why)),
    ]


def test_a_failed_prompt_with_bytes_in_doubt_waits_for_quiet(world):
    from_engine(world.d, client.ReceiveRequest(5, 7, ("p",)), PROMPT)
    why = Refusal(Code.POST_FAILED, "no route", "p")
    settled = Settled(P, D, 1, ReceiveOutcome.FAILED, why, in_doubt=True)
    assert from_peer(world.d, "out:p", settled) == [
        effects.AnswerEngine(1, client.ReceiveFailed(1, why)),
        effects.Quiesce(1, Doubt.SENT),
        effects.SendToPeer("out:p", Closed(D, P, 1, ReceiveOutcome.FAILED, why)),
    ]
    assert world.d.node.step(inputs.Quiet(NOW_S, 1)).effects == []
    assert world.d.node.leases.leases == {}


def test_a_cancelled_receive_tells_the_engine_and_the_writer(world):
    from_engine(world.d, client.ReceiveRequest(5, 7, ("p",)), PROMPT)
    why = Refusal(Code.CANCELLED, "the decode engine cancelled it", "d")
    assert from_engine(world.d, client.CancelReceive(6, 1)) == [
        effects.AnswerEngine(1, client.Done(6)),
        effects.AnswerEngine(1, client.ReceiveFailed(1, why)),
        effects.SendToPeer("out:p", Abort(D, P, 1, 7, "cancelled")),
    ]
    settled = Settled(P, D, 1, ReceiveOutcome.ABORTED)
    assert from_peer(world.d, "out:p", settled) == [
        effects.SendToPeer("out:p", Closed(D, P, 1, ReceiveOutcome.ABORTED, why))
    ]


def test_an_offer_without_an_engine_is_kept_silently(world):
    assert from_peer(world.p, "in:d", offer(world)) == []
    assert from_peer(world.p, "in:d", offer(world)) == []


def test_an_offer_for_an_open_room_is_accepted_and_what_is_written_is_posted(world):
    sender = Sender(world)
    sender.advance(40)
    first_two = Pages(PAGES[:8])
    all_of_it = SentShare(0, 1, 0, 100, is_dummy=False, is_authoritative=True)

    assert from_peer(world.p, "in:d", offer(world)) == [
        effects.AnswerEngine(1, client.Accepted(1, 0, all_of_it)),
        effects.Post(1, D, 1, "kv", first_two, first_two),
        effects.SendToPeer("in:d", Accept(P, D, 1, 0)),
    ]
    assert from_peer(world.p, "in:d", offer(world)) == [
        effects.SendToPeer("in:d", Accept(P, D, 1, 0))
    ]
    assert from_engine(world.p, client.Advance(9, 1, 47)) == [
        effects.AnswerEngine(1, client.Done(9))
    ]
    assert from_engine(world.p, client.Advance(10, 1, 48)) == [
        effects.Post(2, D, 1, "kv", Pages(PAGES[8:12]), Pages(PAGES[8:12])),
        effects.AnswerEngine(1, client.Done(10)),
    ]
    assert from_engine(world.p, client.Finish(11, 1, b"aux")) == [
        effects.Post(3, D, 1, "kv", Pages(PAGES[12:]), Pages(PAGES[12:]))
    ]


def test_the_last_post_settles_and_closed_answers_finish(world):
    sender = Sender(world)
    sender.finish()
    from_peer(world.p, "in:d", offer(world))

    assert world.p.node.step(inputs.PostMoved(NOW_S, 1, 128)).effects == [
        effects.SendToPeer("in:d", Progress(P, D, 1, 128))
    ]
    assert world.p.node.step(inputs.PostDone(NOW_S, 1, 896)).effects == [
        effects.SendToPeer("in:d", Progress(P, D, 1, 896)),
        effects.SendToPeer("in:d", Settled(P, D, 1, ReceiveOutcome.DELIVERED, None, b"aux", 896)),
    ]
    closed = Closed(D, P, 1, ReceiveOutcome.COMMITTED)
    assert from_peer(world.p, "in:d", closed) == [
        effects.AnswerEngine(1, client.Finished(sender.finish_call, None, 0, 7, 896))
    ]
    assert from_peer(world.p, "in:d", closed) == []


def test_a_failed_post_destroys_its_agent_and_settles_after_it(world):
    sender = Sender(world)
    sender.finish()
    from_peer(world.p, "in:d", offer(world))
    why = Refusal(Code.POST_FAILED, "no route", "p")

    assert world.p.node.step(inputs.PostFailed(NOW_S, 1, "no route")).effects == [
        effects.AnswerEngine(1, client.SendFailed(1, why)),
        effects.AnswerEngine(1, client.Finished(sender.finish_call, why, 0, 7, 0)),
        effects.DropAgent(D, 1),
    ]
    assert world.p.node.step(inputs.AgentDropped(NOW_S, D, 1, 128)).effects == [
        effects.SendToPeer(
            "in:d", Settled(P, D, 1, ReceiveOutcome.FAILED, why, b"", 0, in_doubt=True)
        ),
        effects.LoadAgent(D, 1, b"meta:d"),
    ]


def test_the_first_hello_is_answered_and_an_agent_is_made(world):
    hello = Hello(
        source=incarnation("x", 1),
        target="",
        node="x",
        layout=fingerprint(world.p.config.spec),
        generation=3,
        metadata=b"theirs",
        max_prompt_tokens=1,
        max_aux_bytes=1,
    )
    mine = msgspec.structs.replace(
        hello,
        source=P,
        target=incarnation("x", 1),
        node="p",
        generation=1,
        metadata=b"meta:p",
        max_prompt_tokens=1_048_576,
        max_aux_bytes=65_536,
        max_frame_bytes=16_777_216,
        serves_pulls=True,
        knows_epochs=True,
    )
    assert from_peer(world.p, "in:x", hello) == [
        effects.LoadAgent(incarnation("x", 1), 3, b"theirs"),
        effects.SendToPeer("in:x", mine),
    ]
    again = msgspec.structs.replace(hello, target=P)
    assert from_peer(world.p, "in:x", again) == []


def test_a_ping_is_echoed_once(world):
    assert from_peer(world.p, "in:d", Ping(D, P, 8, 0, 1, 1)) == [
        effects.SendToPeer("in:d", Ping(P, D, 0, 8, 0, 0, streams=("p:1>d",)))
    ]
    assert from_peer(world.p, "in:d", Ping(D, P, 0, 8, 0, 0)) == []


def test_a_dead_transfer_process_ends_its_posts_and_its_agents(world):
    sender = Sender(world)
    sender.finish()
    from_peer(world.p, "in:d", offer(world))
    why = Refusal(Code.POST_FAILED, "the transfer process of this node ended", "p")

    assert world.p.node.step(inputs.TransferGone(NOW_S, "killed")).effects == [
        effects.AnswerEngine(1, client.SendFailed(1, why)),
        effects.AnswerEngine(1, client.Finished(sender.finish_call, why, 0, 7, 0)),
        effects.SendToPeer(
            "in:d", Settled(P, D, 1, ReceiveOutcome.FAILED, why, b"", 0, in_doubt=True)
        ),
    ]
    ready = inputs.TransferReady(NOW_S, 2, b"new", "simulated", "killed")
    sent = world.p.node.step(ready).effects
    assert [type(one) for one in sent] == [effects.SendToPeer, effects.LoadAgent]
    assert sent[1] == effects.LoadAgent(D, 1, b"meta:d")
