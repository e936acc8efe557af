"""Pages that an engine's kernels still write: posts that wait for the event behind them."""

from __future__ import annotations

import pytest

from kvd.core import inputs
from kvd.core.peers.peer import Agent
from kvd.errors import Code
from kvd.wire import admin, client
from tests.core.engines import FULL, PROMPT, PageTotals, Sender, begun, totals
from tests.core.sentences import sentence_of
from tests.core.world import World

FIRST, SECOND = bytes([1]) * 64, bytes([2]) * 64


def afters(world: World) -> dict[int, bytes]:
    """The event of each post that waits."""
    return {post.post: post.after for post in world.p.waiting.values()}


def test_pages_travel_as_they_are_when_their_event_comes():
    world, sender = begun()

    sender.promise(40, FIRST)
    sender.promise(80, SECOND)
    assert sender.finish(after=SECOND) is None
    assert afters(world) == {1: FIRST, 2: SECOND, 3: SECOND}
    world.p.write(sender.lease.pages, PROMPT)
    world.p.comes(SECOND)
    world.run()
    assert afters(world) == {1: FIRST}
    assert world.p.answer(sender.finish_call) is None
    world.p.comes(FIRST)
    world.run()

    finished = world.p.answer(sender.finish_call)
    assert finished == client.Finished(sender.finish_call, None, 0, 7, 896)
    got = world.d.take()[-1]
    assert world.d.holds(got.pages, PROMPT)


def test_an_event_is_not_lost_when_the_offer_comes_later():
    """The posts that the Offer causes wait for the latest event that was named."""
    world = World()
    sender = Sender(world)
    sender.promise(40, FIRST)
    sender.promise(80, SECOND)

    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))

    assert afters(world) == {1: SECOND}


@pytest.mark.parametrize("upto", [80, 100])
def test_a_call_without_an_event_does_not_take_back_one_that_was_named(upto):
    world = World()
    sender = Sender(world)
    sender.promise(40, FIRST)
    sender.promise(upto)

    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))

    assert set(afters(world).values()) == {FIRST}


def test_less_than_before_names_no_event():
    world = World()
    sender = Sender(world)
    sender.promise(40, FIRST)
    sender.promise(40, SECOND)

    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))

    assert afters(world) == {1: FIRST}


@pytest.mark.parametrize("call", ["advance", "finish"])
@pytest.mark.parametrize("size", [1, 63])
def test_what_is_no_event_is_refused(call, size):
    world, sender = begun()

    if call == "advance":
        reply = sender.promise(40, bytes(size))
    else:
        reply = sender.finish(after=bytes(size))

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.BAD_REQUEST
    assert reply.refusal.message.startswith(f"an event of {size} bytes: the IPC handle of a CUDA")
    assert not world.p.node.prefiller.posts.parts


def test_a_handoff_that_is_given_up_while_it_waits_ends_at_once_and_sends_nothing():
    """Its agent serves others: no byte of the post is in doubt."""
    world, sender = begun()
    sender.promise(80, FIRST)

    world.p.call(client.AbortSend, send=sender.send, reason="no use")
    world.run()

    assert world.p.waiting == {}
    assert world.p.node.prefiller.posts.parts == {}
    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.message == sentence_of(
        "a handoff that is given up while it waits ends at once and sends nothing"
    )
    assert totals(world.d) == PageTotals(free=63)
    (peer,) = world.p.node.peers.by_incarnation.values()
    assert peer.agent is Agent.LOADED


def test_what_already_travels_is_not_forgotten():
    world, sender = begun()
    world.hold_posts = True
    sender.advance(40)
    sender.promise(80, FIRST)

    world.p.call(client.AbortSend, send=sender.send, reason="no use")
    world.run()

    assert list(world.p.flights) == [1]
    assert world.p.waiting == {}
    assert totals(world.d).held == 7, "the writer has not settled"
    world.land_posts()
    assert totals(world.d) == PageTotals(free=63)


def test_an_event_that_cannot_come_fails_its_handoff_alone():
    world, sender = begun()
    other = Sender(world, FULL, room=8)
    world.d.call(client.ReceiveRequest, FULL, room=8, source=("p",))
    sender.promise(80, FIRST)

    world.p.feed(inputs.Unposted(world.now_s, 1, "its event failed: cudaErrorLaunchFailure"))
    world.p.waiting.clear()
    world.run()
    other.finish()

    failed = [one for one in world.p.answers if isinstance(one, client.SendFailed)]
    assert [one.refusal.code for one in failed] == [Code.POST_FAILED]
    assert "cudaErrorLaunchFailure" in failed[0].refusal.message
    assert world.p.answer(other.finish_call).failure is None


def test_an_operator_can_abort_what_waits():
    world, sender = begun()
    sender.promise(80, FIRST)

    world.d.ask(admin.AbortRoom(1, 7, "too slow"))
    world.run()

    assert world.p.waiting == {}
    assert totals(world.d) == PageTotals(free=63)


def test_the_end_of_an_agent_ends_what_waits_for_it():
    world, sender = begun()
    sender.promise(80, FIRST)
    (peer,) = world.p.node.peers.by_incarnation.values()

    world.p.node.peers.drop_agent(peer.incarnation, 1, "told to")
    world.p.feed(inputs.Tick(world.now_s))
    world.run()

    assert world.p.waiting == {}
    assert world.p.node.prefiller.posts.parts == {}


def test_a_handoff_that_waits_too_long_says_that_it_may_be_the_event():
    world, sender = begun(stall_s=2.0)
    sender.finish(after=FIRST)

    world.pass_time(2.2)

    told = world.p.answer(sender.finish_call)
    assert told.failure.code is Code.STALLED
    assert "the event that the engine named" in told.failure.message
