"""Pull: a decode side asks a node what it has of a prompt, and gets it without an engine there."""

from __future__ import annotations

import pytest

from kvd.core.audit.invariants import violations
from kvd.core.handoff import pull
from kvd.core.inspect.snapshot import snapshot
from kvd.errors import Code
from kvd.types import MAX_ROOM, Tokens
from kvd.wire import client
from kvd.wire.peer import AskPrefix, Closed, Offer, PrefixFound, Settled, Withdrawn
from tests.core.engines import PageTotals, totals
from tests.core.families import SPECS
from tests.core.test_drain import drain
from tests.core.world import PAGE, World, tokens

PROMPT = tokens((1, 10 * PAGE + 3))
WHOLE = Tokens(PROMPT[: 4 * 10 * PAGE])


def cached(side, prompt, namespace=""):
    """The prompt, written by an engine of that side and in its tree."""
    lease = side.lease(prompt, namespace=namespace)
    side.write(lease.pages, prompt, namespace)
    side.call(client.CommitAndRelease, lease=lease.lease)


def asked(world, prompt=PROMPT, **fields):
    """A receive without a room; its answer, or None while there is none."""
    return world.d.call(client.ReceiveRequest, prompt, room=0, source=("p",), **fields)


def received(side):
    return [one for one in side.answers if isinstance(one, client.Received)]


def nothing_held(side):
    found = totals(side)
    return found.held == 0 and not side.node.leases.leases and not violations(side.node)


def test_what_the_source_has_is_sent_and_nobody_there_took_part():
    world = World()
    cached(world.p, PROMPT)
    cached(world.d, Tokens(PROMPT[: 4 * 3 * PAGE]))

    begun = asked(world, reserve_tokens=PAGE)
    (got,) = received(world.d)

    assert (begun.prefix_tokens, begun.prompt_tokens) == (3 * PAGE, 10 * PAGE)
    assert world.d.holds(got.pages[: 4 * 10], WHOLE)
    # Pages for all of the prompt and the reserve; what did not come is the engine's to write.
    assert len(got.pages) == 4 * 12
    lease = world.d.node.leases.leases[got.lease]
    assert (lease.tokens, lease.reason) == (WHOLE, "pulled from p")
    assert nothing_held(world.p)
    assert world.p.node.prefiller.settled_sends.delivered == 1
    # It goes on from there.
    world.d.call(client.CommitAndRelease, PROMPT[4 * 10 * PAGE :], lease=got.lease)
    assert nothing_held(world.d)


def test_while_it_is_under_way_the_source_names_the_puller():
    world = World()
    cached(world.p, PROMPT)
    world.hold_posts = True
    asked(world)
    (lease,) = snapshot(world.p.node).leases
    assert (lease.reason, lease.owner) == ("pull of d", "kvd")
    (room,) = snapshot(world.p.node).rooms
    assert (room.room, room.peer) == (MAX_ROOM - 1, "d")
    # Locked: what is being read does not give way.
    assert totals(world.p).evictable == 0
    world.hold_posts = False
    world.land_posts()
    assert received(world.d)
    assert nothing_held(world.p)


@pytest.mark.parametrize("have", [0, 10])
def test_where_there_is_no_more_over_there_the_lease_begins_with_what_is_here(have):
    world = World()
    if have:
        cached(world.d, WHOLE)
        cached(world.p, Tokens(PROMPT[: 4 * 4 * PAGE]))
    begun = asked(world)
    (got,) = received(world.d)
    assert (begun.prefix_tokens, begun.prompt_tokens) == (have * PAGE, have * PAGE)
    assert len(got.pages) == 4 * 11
    assert not world.held(Offer)
    assert nothing_held(world.p)
    world.d.call(client.CommitAndRelease, PROMPT[4 * have * PAGE :], lease=got.lease)
    assert nothing_held(world.d)


def test_a_namespace_is_pulled_from_the_same_one():
    world = World()
    cached(world.p, PROMPT, "lora")
    assert asked(world).prompt_tokens == 0
    assert asked(world, namespace="lora").prompt_tokens == 10 * PAGE


@pytest.mark.parametrize("kind", [AskPrefix, PrefixFound, Offer, Settled, Closed])
def test_lost_messages_are_said_again(kind):
    world = World()
    cached(world.p, PROMPT)
    world.lost = {kind}
    asked(world)
    world.pass_time(0.5)
    world.lost = set()
    world.pass_time(3)
    assert len(received(world.d)) == 1
    world.pass_time(40, tick_s=0.5)
    assert nothing_held(world.p)


def test_a_repeated_question_opens_one_room():
    world = World()
    cached(world.p, PROMPT)
    world.hold_wire = True
    asked(world)
    (letter,) = world.held(AskPrefix)
    for _ in range(3):
        world.deliver(letter)
    assert len(world.p.node.prefiller.rooms.by_room) == 1
    assert len({one.message.room for one in world.held(PrefixFound)}) == 1
    world.hold_wire = False
    world.run()
    assert len(received(world.d)) == 1


@pytest.mark.parametrize("kind", [AskPrefix, PrefixFound, Offer])
def test_whoever_gives_up_unlocks_the_source(kind):
    world = World()
    cached(world.p, PROMPT)
    world.hold_wire = True
    world.d.call(client.ReceiveRequest, PROMPT, room=0, source=("p",))
    call = world.d.calls
    while not world.held(kind):
        world.deliver(world.wire.pop(0))
    world.d.call(client.CancelCall, of=call)
    number = world.d.node.decoder.open.attempts
    for receive in list(number):
        world.d.call(client.CancelReceive, receive=receive)
    world.hold_wire = False
    world.run()
    world.pass_time(1)
    assert not received(world.d)
    assert nothing_held(world.p)
    assert nothing_held(world.d)
    assert not world.d.node.pulls.asks.by_id


def test_a_session_that_ends_takes_its_pulls_with_it():
    world = World()
    cached(world.p, PROMPT)
    world.lost = {PrefixFound}
    asked(world)
    world.d.hang_up()
    assert not world.d.node.pulls.asks.by_id
    world.lost = set()
    world.pass_time(31, tick_s=0.5)
    assert nothing_held(world.p)


def test_a_puller_that_is_silent_or_restarted_is_not_waited_for():
    for ends in ("silence", "restart"):
        world = World()
        cached(world.p, PROMPT)
        world.lost = {Offer}
        asked(world)
        assert not nothing_held(world.p)
        if ends == "silence":
            world.cut = {"d"}
            world.pass_time(4)
        else:
            world.restart(world.d)
        assert nothing_held(world.p), ends


def test_a_source_that_restarts_is_asked_again_and_has_nothing():
    world = World()
    cached(world.p, PROMPT)
    world.lost = {AskPrefix}
    asked(world)
    world.lost = set()
    world.restart(world.p)
    world.pass_time(2)
    (got,) = received(world.d)
    assert world.d.node.leases.leases[got.lease].tokens == b""


def test_a_source_that_never_says_a_word_costs_the_deadline():
    world = World()
    world.lost = {AskPrefix}
    asked(world, deadline_s=2.0)
    call = world.d.calls
    world.pass_time(3)
    failed = world.d.answer(call)
    assert failed.refusal.code is Code.DEADLINE
    assert "the word of p" in failed.refusal.message


def test_refusals_say_which_side_and_why():
    world = World()
    cached(world.p, PROMPT)
    two = world.d.call(client.ReceiveRequest, PROMPT, room=0, source=("p", "p"))
    stranger = world.d.call(client.ReceiveRequest, PROMPT, room=0, source=("x",))
    assert two.refusal.code is Code.BAD_REQUEST
    assert stranger.refusal.code is Code.PEER_UNKNOWN
    drain(world.p)
    drained = asked(world)
    assert (drained.refusal.code, drained.refusal.side) == (Code.PEER_DRAINING, "d")


def test_an_older_peer_is_not_asked():
    world = World()
    world.d.node.peers.by_name["p"].serves_pulls = False
    refused = asked(world)
    assert refused.refusal.code is Code.NOT_SUPPORTED
    assert "older" in refused.refusal.message


@pytest.mark.parametrize("family", [one for one in SPECS if one not in {"mha", "mla"}])
def test_pools_with_more_than_one_component_refuse_in_words(family):
    world = World(spec=SPECS[family])
    refused = asked(world)
    if world.d.node.leases.components.each:
        assert refused.refusal.code is Code.NOT_SUPPORTED


def test_an_answer_to_nobody_is_withdrawn():
    world = World()
    cached(world.p, PROMPT)
    peer = world.d.node.peers.by_name["p"]
    world.hold_wire = True
    world.inject(
        world.d,
        PrefixFound(
            source=peer.incarnation,
            target=world.d.config.incarnation,
            ask=99,
            room=7,
            n_tokens=PAGE,
        ),
        sender=world.p,
    )
    assert [one.message.room for one in world.held(Withdrawn)] == [7]


def test_a_full_pool_at_the_source_serves_it():
    world = World(p_pages=12)
    cached(world.p, WHOLE)
    holder = world.p.lease(tokens((9000, PAGE)))
    assert totals(world.p) == PageTotals(free=0, held=1, cached=10, evictable=10)
    assert asked(world).prompt_tokens == 10 * PAGE
    world.p.call(client.ReleaseLease, lease=holder.lease)
    assert nothing_held(world.p)


def test_so_many_wait_and_no_more(monkeypatch):
    monkeypatch.setattr(pull, "MOST_ASKS", 2)
    world = World()
    world.lost = {AskPrefix}
    answers = [asked(world) for _ in range(3)]
    assert answers[:2] == [None, None]
    assert answers[2].refusal.code is Code.NO_ROOM


def test_what_was_evicted_while_it_waited_for_room_is_not_said_to_be_there():
    world = World(d_pages=12)
    cached(world.d, Tokens(PROMPT[: 4 * 4 * PAGE]))
    holder = world.d.lease(tokens((5000, 7 * PAGE)))
    call = world.d.calls + 1
    assert asked(world) is None  # 11 pages are more than can be had
    (waiter,) = world.d.node.admission.queue
    assert waiter.claim.reason == "pull from p"
    # Somebody else's need takes what is cached meanwhile.
    world.d.call(client.FlushNamespace)
    world.d.call(client.ReleaseLease, lease=holder.lease)
    begun = world.d.answer(call)
    assert (begun.prefix_tokens, begun.prompt_tokens) == (0, 0)
    (got,) = received(world.d)
    assert world.d.node.leases.leases[got.lease].tokens == b""
