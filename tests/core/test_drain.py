"""A node that drains begins nothing new, ends what is under way, and tells everybody."""

from __future__ import annotations

import pytest

from kvd.core import effects, inputs
from kvd.core.handoff.drain import SETTLE_S
from kvd.core.inspect.snapshot import snapshot
from kvd.core.peers.peer import Life
from kvd.errors import Code, Refusal
from kvd.wire import admin, client, events
from kvd.wire.peer import Offer, Ping, ReceiveOutcome, Settled, Withdrawn
from tests.core.engines import PROMPT, Sender, totals
from tests.core.side import incarnation
from tests.core.world import Side, World, tokens

P, D = incarnation("p", 1), incarnation("d", 1)


def drain(side: Side, deadline_s: float = 0.0) -> admin.Report:
    report = side.ask(admin.Drain(1, "root", "new switch", deadline_s))
    assert isinstance(report, admin.Report)
    return report


def stop(side: Side, drain_s: float = 20.0) -> list[effects.Effect]:
    out = side.feed(inputs.StopAsked(side.world.now_s, "SIGTERM", drain_s))
    side.world.run()
    return out


def is_stopped(side: Side) -> bool:
    return effects.ReadyToStop() in side.effects


def code_of(reply: object) -> Code:
    assert isinstance(reply, client.Failed | client.ReceiveFailed | client.SendFailed), reply
    return reply.refusal.code


def flying(world: World) -> Sender:
    """A handoff whose last post is under way; its engine waits for ``finish``."""
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.finish()
    return sender


def test_a_new_lease_is_refused_with_who_drains_why_and_what_to_do():
    world = World()
    drain(world.p)
    world.now_s += 3

    refused = world.p.feed(
        inputs.FromClient(world.now_s, 1, client.OpenLease(9, "", 0, 0, 30.0), PROMPT)
    )

    why = Refusal(
        Code.DRAINING,
        "p has been drained for 3.0 s by root (new switch) and begins nothing new: ask another "
        "node, or ask again after kvd undrain",
        side="p",
        numbers={"since_s": 3.0},
    )
    assert refused == [effects.AnswerEngine(1, client.Failed(9, why))]
    assert why.is_retryable


def test_a_new_receive_is_refused_and_its_sender_told():
    world = World()
    drain(world.d)
    call = world.d.calls + 1

    heard = world.d.feed(
        inputs.FromClient(world.now_s, 1, client.ReceiveRequest(call, 7, ("p",)), PROMPT)
    )

    refusal = world.d.node.drainer.refusal()
    assert heard == [
        effects.SendToPeer("out:p", Withdrawn(D, P, 7, "draining")),
        effects.AnswerEngine(1, client.Failed(call, refusal)),
    ]


def test_a_new_send_is_refused_and_the_lease_stays():
    world = World()
    lease = world.p.lease(PROMPT)
    drain(world.p)

    refused = world.p.call(client.SendRequest, PROMPT, room=7, lease=lease.lease)

    assert code_of(refused) is Code.DRAINING
    assert isinstance(
        world.p.call(client.ExtendLease, lease=lease.lease, n_tokens=16), client.PageTable
    )
    done = world.p.call(client.CommitAndRelease, tokens((101, 4)), lease=lease.lease)
    assert isinstance(done, client.Done)


def test_a_new_offer_is_refused_at_once():
    """It was on its way when the other side did not know yet."""
    world = World()
    world.pass_time(0.6)
    world.hold_wire = True
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    (letter,) = world.held(Offer)
    world.wire.clear()
    world.p.ask(admin.Drain(1, "root", "new switch"))
    world.wire.clear()

    out = world.p.feed(inputs.FromPeer(world.now_s, letter.link, letter.message))

    (send,) = out
    assert isinstance(send, effects.SendToPeer)
    assert isinstance(send.message, Settled)
    assert (send.message.outcome, send.message.reason.code) == (
        ReceiveOutcome.REFUSED,
        Code.PEER_DRAINING,
    )


def test_a_peer_that_never_said_its_state_is_refused_in_words_that_it_has():
    world = World()
    world.hold_wire = True
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    (letter,) = world.held(Offer)
    assert world.p.node.peers.by_name["d"].drain.state == ""
    world.p.ask(admin.Drain(1, "root", "new switch"))

    (send,) = world.p.feed(inputs.FromPeer(world.now_s, letter.link, letter.message))

    assert send.message.reason.code is Code.SHUTTING_DOWN


def test_who_waits_for_room_is_told_at_once():
    world = World(d_pages=9)
    world.d.lease(tokens((5000, 100)))
    assert world.d.call(client.OpenLease, PROMPT) is None
    assert world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",)) is None
    world.d.take()

    out = world.d.feed(inputs.FromOperator(world.now_s, b"op", admin.Drain(1, "root", "")))

    refusal = world.d.node.drainer.refusal()
    calls = world.d.calls - 1, world.d.calls
    assert out == [
        effects.AnswerEngine(1, client.Failed(calls[0], refusal)),
        effects.AnswerEngine(1, client.Failed(calls[1], refusal)),
        effects.SendToPeer("out:p", Withdrawn(D, P, 7, "draining")),
        effects.SendToPeer("out:p", Ping(D, P, 1, 0, 1, 0, "draining", "")),
        effects.AnswerOperator(
            b"op",
            admin.Report(
                1,
                {
                    "refused_waiting": 2,
                    "refused_sends": 0,
                    "receives_under_way": 0,
                    "sends_under_way": 0,
                    "leases_kept": 1,
                },
                (),
                notes=("what is under way is never given up",),
            ),
        ),
    ]
    assert world.d.node.drainer.is_drained


def test_sends_that_only_one_side_has_joined_are_told_at_once():
    world = World()
    world.pass_time(0.6)
    Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=8, source=("p",))
    world.p.take()
    world.d.take()

    drain(world.p)

    (ours,) = world.p.take()
    (theirs,) = world.d.take()
    assert (code_of(ours), code_of(theirs)) == (Code.DRAINING, Code.PEER_DRAINING)
    assert snapshot(world.p.node).drain.is_drained


def test_a_handoff_under_way_ends_well_and_then_the_node_is_drained():
    world = World()
    flying(world)
    drain(world.p)
    drain(world.d)
    assert [snapshot(side.node).state for side in (world.p, world.d)] == ["draining"] * 2

    world.land_posts()

    assert isinstance(world.d.take()[-1], client.Received)
    finished = [one for one in world.p.take() if isinstance(one, client.Finished)]
    assert [one.failure for one in finished] == [None]
    assert [snapshot(side.node).state for side in (world.p, world.d)] == ["drained"] * 2
    told = [one for one in world.p.events if isinstance(one, events.Drained)]
    assert [(one.cut, one.leases) for one in told] == [(0, 1)]


def test_a_receive_from_a_draining_peer_is_refused_at_once():
    world = World()
    drain(world.p)
    world.now_s += 2

    refused = world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))

    assert refused == client.Failed(
        world.d.calls,
        Refusal(
            Code.PEER_DRAINING,
            "p has been draining for 2.0 s (new switch) and begins nothing new: receive from "
            "another node, or ask again when it is back",
            side="d",
            numbers={"since_s": 2.0},
        ),
    )
    assert snapshot(world.d.node).peers[0].drain.startswith("p has been draining")


def test_a_receive_that_waits_here_is_told_when_its_peer_begins_to_drain():
    world = World(d_pages=9)
    world.d.lease(tokens((5000, 100)))
    assert world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",)) is None
    world.d.take()

    drain(world.p)

    (refused,) = world.d.take()
    assert code_of(refused) is Code.PEER_DRAINING
    told = [one for one in world.d.events if isinstance(one, events.PeerDraining)]
    assert [(one.peer, one.state, one.why, one.refused) for one in told] == [
        ("p", "draining", "new switch", 1)
    ]


def test_undrain_serves_again_on_both_sides():
    world = World()
    drain(world.p)

    report = world.p.ask(admin.Undrain(2))

    assert report == admin.Report(
        2,
        {"drains_ended": 1},
        (),
        notes=("p has been drained for 0.0 s by root (new switch), and serves again",),
    )
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.finish()
    assert isinstance(world.d.take()[-1], client.Received)
    assert world.p.ask(admin.Undrain(3)) == admin.Report(
        3, {"drains_ended": 0}, (), notes=("nothing was drained here",)
    )


def test_a_peer_that_comes_while_it_drains_is_told_with_its_hello():
    world = World()
    drain(world.p)

    world.restart(world.d)

    assert not world.d.node.peers.by_name["p"].drain.is_serving


def test_the_deadline_gives_up_what_is_under_way_and_keeps_the_leases():
    world = World()
    flying(world)
    lease = world.d.lease(tokens((5000, 20)))
    world.d.take()
    drain(world.d, deadline_s=1.0)

    world.pass_time(1.0)
    world.hold_posts = False
    world.land_posts()
    world.pass_time(6.0)

    failed = [one for one in world.d.take() if isinstance(one, client.ReceiveFailed)]
    assert [code_of(one) for one in failed] == [Code.DRAINING]
    ended = [one for one in world.p.take() if isinstance(one, client.SendFailed)]
    assert [code_of(one) for one in ended] == [Code.ABORTED]
    state = snapshot(world.d.node).drain
    assert (state.is_drained, state.leases) == (True, 1)
    assert lease.lease in world.d.node.leases.leases
    told = [one for one in world.d.events if isinstance(one, events.Drained)]
    assert [one.cut for one in told] == [1]


def test_the_deadline_of_the_sending_side_fails_the_receive_over_there():
    world = World()
    flying(world)
    drain(world.p, deadline_s=1.0)

    world.pass_time(1.0)
    assert [code_of(one) for one in world.p.take() if isinstance(one, client.SendFailed)] == [
        Code.DRAINING
    ]
    world.land_posts()

    failed = [one for one in world.d.take() if isinstance(one, client.ReceiveFailed)]
    assert [code_of(one) for one in failed] == [Code.PEER_DRAINING]
    assert world.p.node.drainer.is_drained


def test_a_second_drain_takes_the_new_deadline_and_keeps_the_beginning():
    world = World()
    drain(world.p)
    world.now_s += 5

    world.p.ask(admin.Drain(2, "root", "sooner", 10.0))

    state = snapshot(world.p.node).drain
    assert (state.since_s, state.deadline_in_s, state.why) == (5.0, 10.0, "sooner")


def test_a_lease_that_resumes_is_nothing_new():
    world = World(p_pages=9)
    lease = world.p.lease(PROMPT)
    world.p.write(lease.pages, PROMPT)
    world.p.call(client.RetractLease, lease=lease.lease, keep="nothing")
    drain(world.p)

    assert isinstance(world.p.call(client.ResumeLease, lease=lease.lease), client.Resumed)


# ---- the end of the process ----------------------------------------------------------------------


def test_an_idle_node_stops_in_the_step_in_which_it_is_asked():
    world = World()

    out = stop(world.p)

    assert out == [
        effects.SendToPeer("in:d", Ping(P, D, 1, 0, 1, 0, "draining", "SIGTERM")),
        effects.SendToPeer("in:d", Ping(P, D, 2, 0, 1, 0, "leaving", "SIGTERM")),
        effects.ReadyToStop(),
    ]


def test_leases_do_not_delay_a_stop_and_are_released_with_its_cause():
    world = World()
    world.p.lease(PROMPT)

    stop(world.p)

    assert is_stopped(world.p)
    assert (totals(world.p).free, totals(world.p).held) == (63, 0)
    assert [one.cause for one in world.p.events if type(one).__name__ == "LeaseReleased"] == [
        "drained"
    ]


def test_a_pool_that_outlives_the_process_keeps_its_leases_at_a_stop():
    world = World(is_journaled=True)
    lease = world.p.lease(PROMPT)

    stop(world.p)

    assert is_stopped(world.p)
    assert lease.lease in world.p.node.leases.leases


def test_a_stop_waits_for_the_handoff_under_way():
    world = World()
    flying(world)
    stop(world.p)
    assert not is_stopped(world.p)

    world.land_posts()

    assert isinstance(world.d.take()[-1], client.Received)
    finished = [one for one in world.p.take() if isinstance(one, client.Finished)]
    assert [one.failure for one in finished] == [None]
    assert is_stopped(world.p)


def test_a_stop_ends_at_its_deadline_whatever_is_under_way():
    world = World()
    flying(world)
    stop(world.d, 1.0)
    world.cut.add("p")

    world.pass_time(1.0)
    assert not is_stopped(world.d)
    failed = [one for one in world.d.take() if isinstance(one, client.ReceiveFailed)]
    assert [code_of(one) for one in failed] == [Code.DRAINING]
    world.pass_time(SETTLE_S)

    assert is_stopped(world.d)


def test_what_only_a_lost_peer_could_end_is_not_waited_for():
    world = World()
    flying(world)
    world.cut.add("p")
    world.pass_time(3.0)
    assert world.d.node.peers.by_name["p"].life is Life.LOST

    stop(world.d)

    assert is_stopped(world.d)


def test_a_peer_that_said_goodbye_is_lost_at_once_and_asked_nothing():
    world = World()
    flying(world)
    stop(world.p, 0.0)
    world.pass_time(SETTLE_S)
    assert is_stopped(world.p)

    peer = world.d.node.peers.by_name["p"]
    assert (peer.life, peer.drain.state) == (Life.LOST, "leaving")
    refused = world.d.call(client.ReceiveRequest, PROMPT, room=8, source=("p",))
    assert code_of(refused) is Code.PEER_DRAINING
    assert "p said goodbye 0.0 s ago (SIGTERM)" in refused.refusal.message


def test_a_node_that_has_left_hears_and_says_nothing_more():
    world = World()
    stop(world.p)

    assert world.p.feed(inputs.FromPeer(world.now_s, "in:d", Ping(D, P, 8, 0, 1, 1))) == []


def test_the_next_life_of_a_peer_that_left_is_served():
    world = World()
    stop(world.p)

    world.restart(world.p)
    world.pass_time(1.0)
    world.p.attach()
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.finish()

    assert isinstance(world.d.take()[-1], client.Received)


@pytest.mark.parametrize("request_", [admin.Drain(4), admin.Undrain(4)])
def test_a_stop_cannot_be_taken_back(request_):
    world = World()
    flying(world)
    stop(world.p)

    answer = world.p.ask(request_)

    assert isinstance(answer, admin.AdminFailed)
    assert answer.refusal.code is Code.WRONG_STATE
