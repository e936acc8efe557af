"""What is pulled from a node whose tier has more of it than its pool: that is read first."""

from __future__ import annotations

import pytest

from kvd.core import effects, inputs
from kvd.core.audit.invariants import violations
from kvd.core.cache.lease import MOVING
from kvd.core.handoff import pull_source
from kvd.core.inspect.snapshot import snapshot
from kvd.errors import Code
from kvd.types import Tokens
from kvd.wire import admin, client
from kvd.wire.peer import Offer, PrefixFound, Withdrawn
from tests.core.engines import totals
from tests.core.test_allowed import FIGURES
from tests.core.test_drain import drain
from tests.core.tiered import PAGE, TieredWorld, cached, disk, fill, tokens

N_PAGES = 8
PROMPT = tokens((1, N_PAGES * PAGE))
HALF = Tokens(PROMPT[: len(PROMPT) // 2])


def world_with_evicted(wait_s=2.0, **more):
    """The source's tier has the prompt, its pool nothing of it."""
    world = TieredWorld(p_pages=33, tier=disk(objects=200, moving=8, wait_s=wait_s), **more)
    cached(world.p, PROMPT)
    fill(world, world.p)
    assert world.p.node.leases.tree.probe(PROMPT, "") == 0
    return world


def pull(world, prompt=PROMPT, **fields):
    """A receive without a room; its answer, or None while there is none."""
    return world.d.call(client.ReceiveRequest, prompt, room=0, source=("p",), **fields)


def received(world):
    return [answer for answer in world.d.answers if isinstance(answer, client.Received)]


def waiting(world):
    """The pull that waits at its source."""
    (waiter,) = world.p.node.admission.queue
    assert not violations(world.p.node)
    return waiter


def promotions(world):
    return [effect for effect in world.p.effects if isinstance(effect, effects.Promote)]


def leases_of(side):
    return side.node.leases.leases.values()


def nothing_held(side):
    is_idle = not side.node.admission.queue and not side.node.leases.leases
    return is_idle and totals(side).held == 0 and not violations(side.node)


@pytest.mark.parametrize("in_pool", [0, 4, 8])
def test_the_source_sends_what_its_pool_and_its_tier_have(in_pool):
    """scenario B9: not before it is loaded back."""
    world = world_with_evicted()
    if in_pool:
        world.p.lease(Tokens(PROMPT[: 4 * in_pool * PAGE]))
        world.p.call(client.ReleaseLease, lease=world.p.answers[-1].lease)
    before = len(promotions(world))

    begun = pull(world)

    (got,) = received(world)
    assert (begun.prefix_tokens, begun.prompt_tokens) == (0, N_PAGES * PAGE)
    assert world.d.holds(got.pages, PROMPT)
    assert len(promotions(world)) - before == (in_pool < N_PAGES)
    assert nothing_held(world.p)


def test_it_says_nothing_before_it_has_read_and_what_it_said_stays():
    """scenario A42: what the Offer says of the prefix is never another after it."""
    world = world_with_evicted()
    world.p.hold_storage = True
    world.hold_wire = True
    world.d.call(client.ReceiveRequest, PROMPT, room=0, source=("p",))
    call = world.d.calls
    world.deliver(world.wire.pop(0))
    assert not world.held(PrefixFound)
    assert not world.p.node.prefiller.rooms.by_room
    # Its pages are of the promotion alone.
    (lease,) = leases_of(world.p)
    assert (lease.holders, lease.held_pages) == ({"promotion"}, N_PAGES)

    world.p.hold_storage = False
    world.run()
    (found,) = world.held(PrefixFound)
    assert found.message.n_tokens == N_PAGES * PAGE
    world.deliver(world.wire.pop(world.wire.index(found)))
    (offer,) = world.held(Offer)
    assert offer.message.decode_prefix_len == 0
    world.hold_wire = False
    world.run()

    assert world.d.answer(call).prefix_tokens == 0
    assert len(received(world)) == 1


def test_what_waits_is_told_with_the_peer_and_since_when():
    world = world_with_evicted()
    world.p.hold_storage = True
    pull(world)
    world.pass_time(0.5)

    assert waiting(world).blocked() == "8 pages to be read from tier disk"
    (row,) = snapshot(world.p.node).waiting
    assert (row.kind, row.owner, row.why) == ("pull", "d", "8 pages to be read from tier disk")
    assert row.waited_s == pytest.approx(0.5)
    said = world.p.ask(admin.Why(1, "peer", 0, name="d"))
    expected = "waits for 0.5 s with a pull of 128 tokens: 8 pages to be read from tier disk"
    assert expected in said.facts

    world.p.hold_storage = False
    world.run()
    assert len(received(world)) == 1


def test_a_question_that_comes_again_waits_once():
    world = world_with_evicted(wait_s=10.0)
    world.p.hold_storage = True
    pull(world)
    world.pass_time(2.0)
    waiting(world)
    assert len(promotions(world)) == 1
    world.p.hold_storage = False
    world.run()
    (got,) = received(world)
    assert world.d.holds(got.pages, PROMPT)


@pytest.mark.parametrize(("wait_s", "deadline_s", "ends_s"), [(0.5, 30.0, 0.5), (60.0, 2.0, 1.0)])
def test_a_tier_that_is_silent_costs_its_wait_or_half_of_the_deadline(wait_s, deadline_s, ends_s):
    world = world_with_evicted(wait_s=wait_s)
    cached(world.p, HALF)
    world.p.hold_storage = True
    assert pull(world, deadline_s=deadline_s) is None
    world.pass_time(ends_s - 0.1)
    waiting(world)
    world.pass_time(0.2)

    (got,) = received(world)

    assert world.d.holds(got.pages[: len(HALF) // PAGE], HALF)
    lease = world.d.node.leases.leases[got.lease]
    assert lease.tokens == HALF
    # What comes late is cached, and its pages were nobody else's meanwhile.
    assert {holder for lease in leases_of(world.p) for holder in lease.holders} == MOVING
    world.p.hold_storage = False
    world.run()
    assert world.p.node.leases.tree.probe(PROMPT, "") == N_PAGES * PAGE
    assert nothing_held(world.p)


def test_an_object_that_is_bad_ends_what_is_sent():
    world = world_with_evicted()
    stored = world.p.stored
    stored.damaged.update([name for name in stored.objects if stored.objects[name][:3] == "80:"])

    begun = pull(world)

    (got,) = received(world)
    assert begun.prompt_tokens == 4 * PAGE
    assert world.d.holds(got.pages[: 4 * 4], Tokens(PROMPT[: 4 * 4 * PAGE]))
    assert nothing_held(world.p)


def test_a_storage_process_that_ends_leaves_what_is_in_the_pool():
    world = world_with_evicted()
    cached(world.p, HALF)
    world.p.hold_storage = True
    pull(world)
    waiting(world)
    world.p.stop_storage("it crashed")
    (got,) = received(world)
    assert world.d.node.leases.leases[got.lease].tokens == HALF
    assert nothing_held(world.p)


@pytest.mark.parametrize("ends", ["silence", "restart"])
def test_a_puller_that_is_gone_waits_for_nothing(ends):
    world = world_with_evicted(wait_s=60.0)
    world.p.hold_storage = True
    pull(world, deadline_s=600.0)
    waiting(world)
    if ends == "silence":
        world.cut = {"d"}
        world.pass_time(4)
    else:
        world.restart(world.d)
    assert not world.p.node.admission.queue
    assert not world.p.node.pull_source.open_pulls()
    world.p.hold_storage = False
    world.run()
    assert nothing_held(world.p)
    assert not world.p.node.prefiller.rooms.by_room


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("ends", ["call", "session"])
def test_whoever_gives_up_ends_the_wait_at_the_source(ends, is_told):
    world = world_with_evicted(wait_s=60.0)
    world.p.hold_storage = True
    pull(world, deadline_s=600.0)
    waiting(world)
    world.lost = set() if is_told else {Withdrawn}
    if ends == "call":
        world.d.call(client.CancelCall, of=world.d.calls)
    else:
        world.d.hang_up()
    world.run()
    assert bool(world.p.node.admission.queue) is not is_told
    world.lost = set()
    world.p.hold_storage = False
    world.run()
    world.pass_time(0.5)
    assert nothing_held(world.p)
    assert not received(world)


def test_a_node_that_drains_refuses_what_waits_for_its_tier():
    world = world_with_evicted()
    world.p.hold_storage = True
    pull(world)
    call = world.d.calls
    drain(world.p)
    refusal = world.d.answer(call).refusal
    assert refusal.code is Code.DRAINING
    assert not world.p.node.admission.queue


def test_a_flush_meanwhile_leaves_nothing_to_send():
    world = world_with_evicted()
    world.p.hold_storage = True
    pull(world)
    call = world.d.calls
    world.p.call(client.FlushNamespace)
    world.p.hold_storage = False
    world.run()
    assert world.d.answer(call).prompt_tokens == 0
    assert nothing_held(world.p)


@pytest.mark.parametrize("have_pages", [N_PAGES - 1, N_PAGES])
def test_nothing_is_read_that_the_puller_has(have_pages):
    world = world_with_evicted()
    cached(world.d, Tokens(PROMPT[: 4 * have_pages * PAGE]))
    pull(world)
    assert len(promotions(world)) == N_PAGES - have_pages
    assert len(received(world)) == 1


def test_so_many_wait_for_a_tier_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(pull_source, "MOST_WAITING", 1)
    world = world_with_evicted()
    world.p.hold_storage = True
    pull(world)
    begun = pull(world)
    assert begun.prompt_tokens == 0
    waiting(world)


def test_who_waits_for_memory_is_not_before_it():
    world = world_with_evicted()
    p = world.p
    p.hold_storage = True
    pull(world)
    p.lease(tokens((700_000, 20 * PAGE)))
    assert p.call(client.OpenLease, tokens((800_000, 20 * PAGE))) is None
    p.hold_storage = False
    world.run()
    (got,) = received(world)
    assert world.d.holds(got.pages, PROMPT)
    assert len(p.node.admission.line) == 1


def test_a_peer_that_may_not_pull_any_more_hears_it():
    world = world_with_evicted()
    world.p.hold_storage = True
    pull(world)
    call = world.d.calls
    world.p.feed(inputs.Reconfigured(world.now_s, allow=("d:other",), **FIGURES))
    world.run()
    assert world.d.answer(call).refusal.code is Code.NOT_SUPPORTED
    assert not world.p.node.admission.queue


def test_what_came_from_the_tier_counts_against_the_share_that_pulls_may_lock():
    world = world_with_evicted(peer_pull_share=0.3)
    other = tokens((90_000, 4 * PAGE))
    cached(world.p, other)
    world.lost = {Offer}
    pull(world, other)
    assert len(world.p.node.pull_source.open_pulls()) == 1

    refusal = pull(world).refusal

    assert refusal.code is Code.NO_ROOM
    assert refusal.numbers == {"locked_pages": 12, "limit": 9, "open": 1}
    assert world.p.node.leases.tree.probe(PROMPT, "") == N_PAGES * PAGE
    assert len(leases_of(world.p)) == 1
