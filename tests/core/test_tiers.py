"""Tiers below the pool: what leaves it is written before, and comes back when it is asked for."""

from __future__ import annotations

import pytest

from kvd.core import effects, inputs
from kvd.core.audit.invariants import violations
from kvd.core.settings import Demotion
from kvd.core.tiers.keys import KEY_BYTES
from kvd.core.tiers.moves import TierMove
from kvd.errors import Code
from kvd.wire import admin, client, events
from kvd.wire.pins import PrefetchPrompt
from tests.core.engines import Sender
from tests.core.tiered import DISK, PAGE, TieredWorld, cached, disk, fill, tokens
from tests.core.world import World

PROMPT = tokens((1, 8 * PAGE))


def evicted(world, side, toks=PROMPT, namespace=""):
    """These tokens were cached, written to the tier, and have left the pool."""
    cached(side, toks, namespace)
    fill(world, side)
    assert side.node.leases.tree.probe(toks, namespace) == 0


def world_with_evicted(**more):
    world = TieredWorld(d_pages=33, **{"tier": disk(objects=200, moving=8), **more})
    evicted(world, world.d)
    return world, world.d


def ordered(side, kind):
    return [effect for effect in side.effects if isinstance(effect, kind)]


def happened(side, kind):
    return [event for event in side.events if isinstance(event, kind)]


# ---- demotion ------------------------------------------------------------------------------------


def test_what_will_be_evicted_soon_is_written_before_it_is():
    world = TieredWorld(d_pages=33)
    d = world.d
    cached(d, PROMPT)
    world.pass_time(0.1)
    assert not ordered(d, effects.Demote), "24 of 32 pages are free"

    fill(world, d, n_pages=20)

    assert d.node.leases.tree.probe(PROMPT, "") == count_of(PROMPT), "it is in the pool still"
    assert d.tier.index.n_objects >= 8
    assert not d.node.leases.leases
    assert d.tier.counts.evicted_unwritten == 0


def count_of(toks):
    return len(toks) // 4


def test_a_page_that_is_written_keeps_its_place_in_the_order_of_eviction():
    world = TieredWorld(d_pages=33)
    d = world.d
    for k in range(32):
        cached(d, tokens((1000 * k + 1, PAGE)))
    before = [node.id for node in d.node.leases.tree.order.ahead()]
    hits = [node.hits for node in d.node.leases.tree.nodes()]

    d.hold_storage = True
    world.pass_time(0.1)
    assert d.node.leases.leases, "they are locked while they are read"
    d.hold_storage = False
    world.pass_time(0.5)

    assert d.tier.index.n_objects == 8
    assert [node.id for node in d.node.leases.tree.order.ahead()] == before
    assert [node.hits for node in d.node.leases.tree.nodes()] == hits


def test_a_page_that_is_being_written_is_not_evicted():
    world = TieredWorld(d_pages=9)
    d = world.d
    cached(d, tokens((1, 4 * PAGE)))
    cached(d, tokens((1000, 4 * PAGE)))
    d.hold_storage = True
    world.pass_time(0.1)
    (order,) = ordered(d, effects.Demote)
    (lease,) = d.node.leases.leases.values()
    assert (lease.reason, lease.holders, lease.session) == ("demotion to disk", {"demotion"}, 0)

    too_much = d.call(client.OpenLease, tokens((5000, 8 * PAGE)), deadline_s=20.0)
    assert too_much is None, "it waits until the page is read"
    d.hold_storage = False
    world.run()

    assert order.tier == DISK
    assert isinstance(d.answer(d.calls), client.Leased)


def test_what_lies_in_the_tier_already_is_not_written_again():
    world, d = world_with_evicted()
    lease = d.lease(PROMPT)
    d.call(client.ReleaseLease, lease=lease.lease)
    written = d.tier.counts.written
    fill(world, d, first=90_000)
    again = d.tier.counts.written - written
    assert d.node.leases.tree.probe(PROMPT, "") == 0
    assert again <= 32 + 8, "only what is new was written"
    assert d.lease(PROMPT).prefix_tokens == count_of(PROMPT)


@pytest.mark.parametrize(
    ("demotion", "is_used", "objects"),
    [(Demotion.SECOND_USE, False, 0), (Demotion.SECOND_USE, True, 8), (Demotion.NEVER, True, 0)],
)
def test_the_policy_says_what_is_written(demotion, is_used, objects):
    world = TieredWorld(d_pages=33, tier=disk(objects=200, demotion=demotion))
    d = world.d
    cached(d, PROMPT)
    if is_used:
        d.call(client.ReleaseLease, lease=d.lease(PROMPT).lease)
    fill(world, d)
    assert d.tier.index.n_objects == objects


def test_what_goes_by_priority_has_the_prefix_of_those_that_have_one():
    world = TieredWorld(d_pages=33, tier=disk(objects=200, demotion=Demotion.PRIORITY))
    d = world.d
    shared = tokens((1, 4 * PAGE))
    cached(d, shared + tokens((500, 2 * PAGE)))
    cached(d, shared + tokens((900, 3 * PAGE)), priority=1)
    fill(world, d)
    assert d.tier.index.n_objects == 4 + 3
    assert d.tier.counts.evicted_unwritten == 0


def test_the_tier_is_never_beyond_its_bound_and_the_oldest_go_first():
    world = TieredWorld(d_pages=17, tier=disk(objects=12))
    d = world.d
    fill(world, d, first=1, n_pages=60)  # the double finds out whoever writes more
    assert d.tier.index.n_objects == len(d.stored.objects) <= 12
    assert ordered(d, effects.DropObjects)
    first = d.call(client.MatchPrefix, tokens((1, PAGE)))
    assert first.tokens == first.tier_tokens == 0


def test_a_path_that_is_longer_than_the_tier_is_not_written_for_ever():
    """Six objects: four pages lie there when four more follow them, and nothing leaves the pool."""
    world = TieredWorld(d_pages=9, tier=disk(objects=6, moving=2))
    d = world.d
    for n_pages in (2, 4, 8):
        cached(d, tokens((1, n_pages * PAGE)))
        for k in range(8 - n_pages):
            cached(d, tokens((1000 * (k + n_pages), PAGE)))
        world.pass_time(5.0)
    before = len(ordered(d, effects.Demote))

    world.pass_time(5.0)

    assert d.node.leases.tree.probe(tokens((1, 8 * PAGE)), "") == 8 * PAGE
    assert len(ordered(d, effects.Demote)) == before


def test_a_disk_that_takes_nothing_is_not_written_for_a_growing_time():
    world = TieredWorld(d_pages=17)
    d = world.d
    d.fails_writing = "no space left on device"
    fill(world, d, first=1, n_pages=30)
    away = happened(d, events.TierAway)
    assert away
    assert away[0].why == "nothing is written: no space left on device"
    orders = len(ordered(d, effects.Demote))
    world.pass_time(0.5)
    assert d.tier.counts.failed_orders == orders
    assert len(ordered(d, effects.Demote)) <= orders + 1
    d.fails_writing = ""
    world.pass_time(5.0)
    fill(world, d, first=9000, n_pages=20)
    assert happened(d, events.TierBack)
    assert d.tier.index.n_objects


def test_what_lies_on_a_disk_that_takes_nothing_is_read_all_the_same():
    world, d = world_with_evicted()
    d.fails_writing = "read-only file system"
    fill(world, d, first=90_000, n_pages=40)
    assert happened(d, events.TierAway)
    assert not d.tier.is_written
    (shown,) = d.ask(admin.ShowStatus(1)).snapshot.tiers
    assert (shown.state, shown.why) == ("serving", "nothing is written: read-only file system")

    lease = d.lease(tokens((1, 8 * PAGE)))

    assert lease.prefix_tokens == 8 * PAGE
    assert not happened(d, events.TierBack), "what was read says nothing of writing"
    assert d.tier.why


# ---- promotion -----------------------------------------------------------------------------------


def test_a_lease_waits_for_what_lies_in_the_tier():
    """scenario A41: what is loaded back is in the prefix, and the bytes are its own."""
    world, d = world_with_evicted()
    d.hold_storage = True
    assert d.call(client.OpenLease, PROMPT) is None
    (waiter,) = d.node.admission.queue
    assert waiter.blocked() == "8 pages to be read from tier disk"
    d.hold_storage = False
    world.run()

    leased = d.answer(d.calls)

    assert (leased.prefix_tokens, leased.promoted_tokens, leased.tier_tokens) == (128, 128, 0)
    assert d.holds(leased.pages, PROMPT)
    assert d.tier.counts.hits == 1


def test_a_long_prompt_comes_in_several_promotions():
    _world, d = world_with_evicted(tier=disk(objects=200, moving=3))
    leased = d.lease(PROMPT)
    assert leased.prefix_tokens == leased.promoted_tokens == 128
    assert len(ordered(d, effects.Promote)) == 3
    assert d.holds(leased.pages, PROMPT)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_somebody_waits_for_is_not_the_next_to_leave_the_tier(is_restarted):
    """It was used longest ago, and comes in several promotions while others are written."""
    world, d = world_with_evicted(tier=disk(objects=40, moving=2))
    if is_restarted:
        d.stop_storage()
        d.start_storage(2)  # what it finds is linked to nothing
    fill(world, d, first=60_000, n_pages=40 - d.tier.index.n_objects)
    d.hold_storage = True
    assert d.call(client.OpenLease, PROMPT, deadline_s=30.0) is None
    asked = d.calls
    for k in range(8):
        cached(d, tokens((80_000 + k * PAGE, PAGE)))
        world.pass_time(0.1)
    assert ordered(d, effects.DropObjects), "room was made meanwhile"
    d.hold_storage = False
    world.run()

    leased = d.answer(asked)

    assert (leased.prefix_tokens, leased.promoted_tokens) == (128, 128)
    assert d.holds(leased.pages, PROMPT)
    assert d.tier.counts.bad == 0


def test_who_does_not_wait_is_told_what_there_is():
    _, d = world_with_evicted()
    told = d.call(client.MatchPrefix, PROMPT)
    assert (told.tokens, told.tier_tokens, told.tier_ms) == (0, 128, 0.0)

    leased = d.lease(PROMPT, tiers="now")

    assert (leased.prefix_tokens, leased.promoted_tokens, leased.tier_tokens) == (0, 0, 128)
    assert not ordered(d, effects.Promote)


def test_another_word_for_tiers_is_refused():
    _, d = world_with_evicted()
    reply = d.call(client.OpenLease, PROMPT, tiers="soon")
    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.BAD_REQUEST
    assert reply.refusal.message == "tiers='soon' is none of 'wait' and 'now'"


def test_two_that_want_the_same_wait_for_one_promotion():
    world, d = world_with_evicted()
    d.hold_storage = True
    first, second = tokens((1, 8 * PAGE), (7000, 5)), tokens((1, 8 * PAGE), (8000, 5))
    assert d.call(client.OpenLease, first) is None
    assert d.call(client.OpenLease, second) is None
    assert len(ordered(d, effects.Promote)) == 1
    d.hold_storage = False
    world.run()
    for call in (d.calls - 1, d.calls):
        assert d.answer(call).prefix_tokens == 128


def test_only_what_is_good_before_the_first_bad_one_is_used():
    world, d = world_with_evicted()
    named = list(d.stored.objects)[:8]
    fifth = [name for name in d.stored.objects if d.stored.objects[name].startswith("80:")]
    assert len(named) == 8
    d.stored.damaged.update(fifth)

    leased = d.lease(PROMPT)

    assert leased.prefix_tokens == leased.promoted_tokens == 64
    assert d.holds(leased.pages[: 4 * 4], tokens((1, 64)))
    (told,) = happened(d, events.PagesPromoted)
    assert (told.pages, told.bad, told.why) == (4, 4, "does not verify")
    world.run()
    assert not set(fifth) & set(d.stored.objects), "what lies is removed"
    assert d.call(client.MatchPrefix, PROMPT).tier_tokens == 0


def test_nothing_good_costs_no_more_than_the_wait():
    _, d = world_with_evicted()
    d.stored.damaged.update(d.stored.objects)
    leased = d.lease(PROMPT)
    assert (leased.prefix_tokens, leased.promoted_tokens) == (0, 0)
    assert d.tier.counts.bad == 8


def test_whoever_has_waited_long_enough_goes_on_without():
    world, d = world_with_evicted(tier=disk(objects=200, moving=8, wait_s=0.5))
    d.hold_storage = True
    assert d.call(client.OpenLease, PROMPT) is None
    call = d.calls
    world.pass_time(0.6)
    leased = d.answer(call)
    assert (leased.prefix_tokens, leased.tier_tokens) == (0, 128)
    assert d.tier.counts.late == 1
    # What comes late is cached all the same, and the pages were nobody else's meanwhile.
    d.call(client.ReleaseLease, lease=leased.lease)
    d.hold_storage = False
    world.run()
    assert d.node.leases.tree.probe(PROMPT, "") == 128


def test_a_request_with_no_time_does_not_wait():
    _, d = world_with_evicted()
    assert d.lease(PROMPT, deadline_s=0.0).prefix_tokens == 0


def test_a_promotion_outlives_the_session_that_asked():
    world, d = world_with_evicted()
    d.hold_storage = True
    d.call(client.OpenLease, PROMPT)
    d.hang_up(1)
    assert not d.node.admission.queue
    (lease,) = d.node.leases.leases.values()
    assert lease.reason == "promotion from disk"
    d.hold_storage = False
    world.run()
    assert d.node.leases.tree.probe(PROMPT, "") == 128
    assert not d.node.leases.leases


def test_with_too_little_room_as_much_comes_as_there_is_room_for():
    _, d = world_with_evicted()
    d.lease(tokens((700_000, 29 * PAGE)))
    leased = d.call(client.OpenLease, tokens((1, 3 * PAGE)))
    assert leased.prefix_tokens == 48
    d.call(client.ReleaseLease, lease=leased.lease)
    d.call(client.OpenLease, PROMPT, deadline_s=1.0)
    assert d.node.leases.tree.probe(PROMPT, "") == 48


# ---- handoffs ------------------------------------------------------------------------------------


def test_an_offer_counts_what_was_promoted_before_it_goes_out():
    """scenario A42: never after it."""
    world, d = world_with_evicted(names=("d",))
    p = world.p
    cached(p, PROMPT)
    d.hold_storage = True
    d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    receive = d.calls
    assert d.answer(receive) is None
    assert 7 not in p.node.prefiller.rooms.by_room, "nothing was offered yet"
    d.hold_storage = False
    world.run()

    receiving = d.answer(receive)

    assert (receiving.prefix_tokens, receiving.promoted_tokens) == (128, 128)
    (part,) = d.node.decoder.open.parts.values()
    assert part.unanswered is None or part.unanswered.decode_prefix_len == 128


def test_a_send_has_what_its_lease_has_waited_for():
    """scenario B9: an engine has no lease to send before the tier has loaded back."""
    world, d = world_with_evicted()
    reader = world.p
    sender = Sender(world, PROMPT, side=d)
    assert sender.lease.promoted_tokens == 128
    d.call(client.Advance, send=sender.send, upto_tokens=128)  # nothing is computed
    d.call(client.Finish, send=sender.send, aux=b"")
    reader.call(client.ReceiveRequest, PROMPT, room=7, source=("d",))
    world.run()
    (got,) = [answer for answer in reader.answers if isinstance(answer, client.Received)]
    assert reader.holds(got.pages, PROMPT)


# ---- ends of processes ---------------------------------------------------------------------------


def test_a_storage_process_that_ends_ends_all_that_is_under_way():
    world, d = world_with_evicted()
    d.hold_storage = True
    d.call(client.OpenLease, PROMPT)
    call = d.calls
    old = ordered(d, effects.Promote)[-1]
    d.stop_storage("it crashed")
    leased = d.answer(call)
    assert (leased.prefix_tokens, leased.tier_tokens) == (0, 0)
    assert [lease.session for lease in d.node.leases.leases.values()] == [1]
    (down,) = happened(d, events.TierDown)
    assert (down.cut, down.why) == (1, "it crashed")
    d.call(client.ReleaseLease, lease=leased.lease)
    d.hold_storage = False
    d.start_storage(2)
    # A late word of the process that is gone is about nothing any more.
    d.feed(inputs.Promoted(world.now_s, old.ticket, (), 8))
    assert d.lease(PROMPT).prefix_tokens == 128


def test_an_order_without_an_answer_ends_the_storage_process():
    world, d = world_with_evicted(tier=disk(objects=200, moving=8, deadline_s=3.0))
    d.hold_storage = True
    d.call(client.OpenLease, PROMPT)
    world.pass_time(3.2)
    assert len(d.restarted) == 1
    assert "no answer for 3." in d.restarted[0]
    world.pass_time(3.0)
    assert len(d.restarted) == 1, "it is being killed already"


@pytest.mark.parametrize("verb", ["promotion", "demotion"])
def test_an_order_without_an_answer_is_none_the_less_so_beside_those_that_go_the_other_way(verb):
    """What is read hangs, and what is written is answered all the time; and the other way round."""
    world, d = world_with_evicted(tier=disk(objects=200, moving=8, deadline_s=3.0))
    d.hold_storage = True
    d.call(client.OpenLease, PROMPT)
    hangs = effects.Promote if verb == "promotion" else effects.Demote
    for number in range(40):
        cached(d, tokens((90_000 + number * PAGE, PAGE)))
        d.call(PrefetchPrompt, tokens((50_000 + number * PAGE, PAGE)))
        world.pass_time(0.1)
        for order in [one for one in d.orders if not isinstance(one, hangs)]:
            d.orders.remove(order)
            d.orders.appendleft(order)
            d.carry_out()
        world.run()
    assert d.restarted
    assert f"{verb} of " in d.restarted[0]


@pytest.mark.parametrize("first_s", [None, 1.0, 2.9])
def test_answers_to_later_orders_do_not_excuse_a_process_that_owes_an_earlier_one(first_s):
    _, d = world_with_evicted(tier=disk(objects=200, moving=8, deadline_s=3.0))
    d.hold_storage = True
    d.call(client.OpenLease, PROMPT)
    out, tier, moves = d.node.out, d.node.tiers.each[0], d.node.tiers.moves
    lease = next(iter(d.node.leases.leases.values()))
    moves.under_way.clear()
    began_s = out.at_s
    orders = [TierMove(tier, lease, "", b"", [bytes(KEY_BYTES)]) for _ in range(9)]
    for order in orders:
        moves.begin(order)

    owed = orders[0]
    if first_s is not None:
        out.at_s = began_s + first_s
        assert moves.end(owed.ticket, TierMove) is owed
        owed = orders[1]
    for later, order in enumerate(orders[3:], 1):
        out.at_s = began_s + (first_s or 0.0) + later / 2 - 0.1
        assert moves.end(order.ticket, TierMove) is order
        assert moves.restart_if_silent() is None

    out.at_s = began_s + (first_s or 0.0) + 2.99
    assert moves.restart_if_silent() is None
    out.at_s += 0.02
    assert moves.restart_if_silent() is owed


def test_objects_of_before_are_found_by_the_next_daemon():
    world, d = world_with_evicted()
    world.restart(d)
    d.attach()
    d.start_storage(1)
    leased = d.lease(PROMPT)
    assert leased.prefix_tokens == 128


# ---- flush, epochs, eyes -------------------------------------------------------------------------


def test_a_flush_takes_what_is_in_the_tier_and_what_is_under_way():
    world, d = world_with_evicted()
    d.hold_storage = True
    d.call(client.OpenLease, PROMPT)
    call = d.calls
    d.ask(admin.Flush(1, namespace=""))
    d.hold_storage = False
    world.run()
    assert d.answer(call).prefix_tokens == 0
    assert not d.stored.objects
    assert not d.tier.index.n_objects


def test_a_flush_that_the_storage_process_never_did_is_done_by_the_next():
    _, d = world_with_evicted()
    d.hold_storage = True
    d.ask(admin.Flush(1, namespace=""))
    d.stop_storage()
    assert d.stored.objects
    d.hold_storage = False
    d.start_storage(2)
    assert not d.stored.objects
    assert d.lease(PROMPT).prefix_tokens == 0


@pytest.mark.parametrize("namespace", [None, "llama", "llama#a"])
def test_a_flush_holds_for_what_lies_there_though_no_process_has_said_so(namespace):
    """Between two storage processes, as at a start of the daemon, nobody knows what lies there."""
    world = TieredWorld(d_pages=33, tier=disk(objects=200, moving=8))
    d = world.d
    evicted(world, d, namespace="llama#a")
    evicted(world, d, namespace="other")
    d.stop_storage()
    d.ask(admin.Flush(1, namespace=namespace))
    d.start_storage(2)
    assert d.lease(PROMPT, namespace="llama#a").prefix_tokens == 0
    assert "llama#a" not in {of for of, _ in d.stored.objects}
    found = d.lease(PROMPT, namespace="other").prefix_tokens
    assert found == (0 if namespace is None else len(PROMPT) // 4)

    # It was about what lay there then.
    evicted(world, d, namespace="llama#a")
    d.stop_storage()
    d.start_storage(3)
    assert d.lease(PROMPT, namespace="llama#a").prefix_tokens


def test_another_epoch_finds_nothing_of_the_one_before():
    world = TieredWorld(d_pages=33, tier=disk(objects=200, moving=8))
    d = world.d
    evicted(world, d, namespace="llama")
    d.call(client.BeginEpoch, namespace="llama")
    told = d.call(client.MatchPrefix, PROMPT, namespace="llama")
    assert told.tier_tokens == 0
    assert not [namespace for namespace, _ in d.stored.objects if namespace == "llama"]


def test_why_says_what_a_moving_page_waits_for():
    _, d = world_with_evicted()
    d.hold_storage = True
    d.call(client.OpenLease, PROMPT)
    (lease,) = d.node.leases.leases.values()
    said = d.ask(admin.Why(1, "page", int.from_bytes(lease.held[:4], "little")))
    assert f"held by lease {lease.id} of kvd (pid 0) for promotion from disk" in said.sentence
    assert any("of tier disk to be answered" in fact for fact in said.facts)


def test_the_audit_finds_an_order_whose_lease_is_gone():
    _, d = world_with_evicted()
    d.hold_storage = True
    d.call(client.OpenLease, PROMPT)
    (move,) = d.node.tiers.moves.under_way.values()
    move.lease.holders = {"engine"}
    assert any("has no lease that is kept for it" in found for found in violations(d.node))


def test_the_snapshot_shows_a_tier_with_its_figures():
    world, d = world_with_evicted()
    d.hold_storage = True
    d.call(client.OpenLease, PROMPT)
    (state,) = d.ask(admin.ShowStatus(1)).snapshot.tiers
    assert (state.tier, state.state, state.demotion) == (DISK, "serving", "always")
    assert (state.reading, state.waiting, state.waits) == (8, 1, 1)
    assert state.objects == len(d.stored.objects) <= state.capacity_objects == 200
    d.hold_storage = False
    world.run()
    d.stop_storage()
    (state,) = d.ask(admin.ShowStatus(1)).snapshot.tiers
    assert (state.state, state.objects, state.hits, state.read) == ("down", 0, 1, 8)


# ---- prefetch ------------------------------------------------------------------------------------


def test_a_prompt_that_is_named_before_is_in_the_pool_when_it_is_asked_for():
    world, d = world_with_evicted()

    told = d.call(PrefetchPrompt, PROMPT)
    again = d.call(PrefetchPrompt, PROMPT)
    world.pass_time(1)

    assert isinstance(told, client.MatchReply)
    assert isinstance(again, client.MatchReply)
    assert (told.tokens, told.tier_tokens) == (0, count_of(PROMPT))
    assert len(ordered(d, effects.Promote)) == 1, "what is on its way is not read twice"
    assert d.node.leases.tree.probe(PROMPT, "") == count_of(PROMPT)
    assert d.tier.counts.waits == 0
    assert not d.node.leases.leases
    assert not list(violations(d.node))


def test_a_long_prompt_that_is_named_comes_in_several():
    world, d = world_with_evicted(tier=disk(objects=200, moving=3))

    d.call(PrefetchPrompt, PROMPT)
    world.pass_time(1)

    assert len(ordered(d, effects.Promote)) == 3
    assert d.node.leases.tree.probe(PROMPT, "") == count_of(PROMPT)
    assert not list(violations(d.node))


def test_a_hint_never_takes_memory_that_somebody_waits_for():
    world, d = world_with_evicted()
    held = d.lease(tokens((70_000, 32 * PAGE)))
    d.call(client.OpenLease, tokens((80_000, PAGE)), deadline_s=60.0)

    d.call(PrefetchPrompt, PROMPT)

    assert not ordered(d, effects.Promote)
    d.call(client.ReleaseLease, lease=held.lease)
    world.pass_time(0.2)


def test_a_hint_without_a_tier_is_a_match():
    side = World().d
    cached(side, PROMPT)

    told = side.call(PrefetchPrompt, PROMPT)

    assert isinstance(told, client.MatchReply)
    assert (told.tokens, told.tier_tokens) == (count_of(PROMPT), 0)
