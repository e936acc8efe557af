"""Pins below the pool: what is pinned is on the disk before it is needed there, and goes last."""

from __future__ import annotations

import pytest

from kvd.core.audit.invariants import violations
from kvd.core.settings import Demotion
from kvd.wire import admin, client
from kvd.wire.cache_events import PinEnded, PinLeftPool
from kvd.wire.pins import PinPrefix, PrefixPinned, UnpinPrefix
from tests.core.storing import keys_of
from tests.core.tiered import PAGE, TieredWorld, cached, disk, fill, tokens

PROMPT = tokens((1, 8 * PAGE))
TTL_S = 600.0


def pinned(side, toks=PROMPT) -> int:
    """Of a session of its own."""
    cached(side, toks)
    reply = side.call(PinPrefix, toks, ttl_s=TTL_S, session=side.attach("pins"))
    assert isinstance(reply, PrefixPinned), reply
    side.world.pass_time(1.0)
    return reply.pin


def given_way(**more):
    """A pin whose pages in the pool were needed."""
    world = TieredWorld(d_pages=33, tier=disk(**{"objects": 100, **more}))
    pin = pinned(world.d)
    lease = world.d.lease(tokens((70_000, 28 * PAGE)))
    world.d.call(client.ReleaseLease, lease=lease.lease)
    return world, world.d, pin


def happened(side, kind):
    return [event for event in side.events if isinstance(event, kind)]


def shown(side):
    return side.ask(admin.ShowStatus(1)).snapshot.pins


@pytest.mark.parametrize("demotion", [Demotion.ALWAYS, Demotion.SECOND_USE, Demotion.PRIORITY])
def test_what_is_pinned_is_written_at_once_whatever_the_policy(demotion):
    world = TieredWorld(tier=disk(demotion=demotion))
    pinned(world.d)

    assert world.d.tier.index.n_objects == 8
    (state,) = shown(world.d)
    assert (state.pages, state.tier) == (8, "disk")
    assert not violations(world.d.node)


def test_a_long_one_is_written_in_several_and_where_nothing_is_written_it_is_not():
    world = TieredWorld(tier=disk(moving=2))
    pinned(world.d)
    world.pass_time(3.0)
    assert world.d.tier.index.n_objects == 8

    world = TieredWorld(tier=disk(demotion=Demotion.NEVER))
    pinned(world.d)
    assert not world.d.tier.index.n_objects


@pytest.mark.parametrize("moving", [64, 2])
def test_after_a_restart_a_known_prompt_is_pinned_out_of_the_tier_by_one_call(moving):
    world = TieredWorld(d_pages=33, tier=disk(objects=100, moving=moving))
    d = world.d
    pinned(d)
    world.pass_time(3.0)
    world.restart(d)
    session = d.attach("pins")
    d.start_storage(1)
    assert d.node.leases.tree.probe(PROMPT, "") == 0

    reply = d.call(PinPrefix, PROMPT, ttl_s=TTL_S, session=session)
    assert (type(reply), reply.tokens) == (PrefixPinned, len(PROMPT) // 4)
    (state,) = shown(d)
    assert (state.pages, state.tier) == (8, "disk")
    assert len(d.node.leases.leases) == 1
    assert not violations(d.node)


def test_who_pins_and_waits_for_no_tier_is_told_that_nothing_is_cached():
    world = TieredWorld(d_pages=33, tier=disk(objects=100))
    d = world.d
    pinned(d)
    world.restart(d)
    session = d.attach("pins")
    d.start_storage(1)
    reply = d.call(PinPrefix, PROMPT, ttl_s=TTL_S, session=session, tiers="now")
    assert "nothing is cached of this prompt" in reply.refusal.message
    reply = d.call(PinPrefix, PROMPT, ttl_s=TTL_S, session=session, tiers="soon")
    assert "tiers='soon' is none of" in reply.refusal.message


@pytest.mark.parametrize("how", ["late", "hung up", "gone"])
def test_whoever_waits_with_a_pin_waits_for_a_bounded_time_and_holds_nothing(how):
    world = TieredWorld(d_pages=33, tier=disk(objects=100, wait_s=2.0))
    d = world.d
    pinned(d)
    world.restart(d)
    session = d.attach("pins")
    d.start_storage(1)
    d.hold_storage = True
    d.call(PinPrefix, PROMPT, ttl_s=TTL_S, session=session)
    call = d.calls
    (waiting,) = d.ask(admin.ShowStatus(1)).snapshot.waiting
    assert "8 pages to be read from tier disk" in str(waiting)
    assert d.lease(tokens((70_000, PAGE)), session=session), "it stands in front of nobody"
    if how == "hung up":
        d.hang_up(session)
    elif how == "gone":
        d.stop_storage()
    else:
        world.pass_time(2.5)
    if how != "hung up":
        assert "nothing is cached of this prompt" in d.answer(call).refusal.message
    assert not shown(d)
    assert not violations(d.node)


def why_not(side):
    (kept,) = shown(side)[0].kept
    return kept.why, kept.for_s


def test_a_tier_that_is_down_or_full_is_why_a_pin_is_not_written_and_since_when():
    world = TieredWorld(tier=disk(moving=2))
    d = world.d
    d.stop_storage("no such device")
    pinned(d)
    world.pass_time(5.0)
    why, for_s = why_not(d)
    assert why == "the tier is down: no such device"
    assert 4.9 < for_s < 6.2

    d.start_storage(2)
    d.fails_writing = "no space left on device"
    world.pass_time(2.0)
    why, for_s = why_not(d)
    assert "nothing is written: no space left on device" in why
    assert for_s < 2.5
    said = d.ask(admin.Why(1, "lease", shown(d)[0].lease))
    assert "not written for" in str(said)
    assert "no space left on device" in str(said)

    d.fails_writing = ""
    world.pass_time(70.0)
    assert why_not(d) == ("", None)
    assert not violations(d.node)


def test_a_pin_whose_turn_has_not_come_says_so_and_one_that_is_being_written():
    world = TieredWorld(d_pages=65, tier=disk(moving=4))
    d = world.d
    d.hold_storage = True
    for first in (1, 5_000):
        cached(d, tokens((first, 8 * PAGE)))
    session = d.attach("pins")
    for first in (1, 5_000):
        d.call(PinPrefix, tokens((first, 8 * PAGE)), ttl_s=TTL_S, session=session)
    world.pass_time(1.5)
    first, second = [state.kept[0].why for state in shown(d)]
    assert first == "it is being written"
    assert second == "it waits its turn, 4 other pages are on their way"


def test_a_pin_that_gives_way_goes_on_in_the_tier_and_its_prompt_comes_back():
    _, d, pin = given_way()

    assert not happened(d, PinEnded)
    (left,) = happened(d, PinLeftPool)
    assert (left.pin, left.tier) == (pin, "disk")
    (state,) = shown(d)
    assert (state.lease, state.pages, state.tier) == (0, 0, "disk")
    assert d.node.leases.tree.probe(PROMPT, "") < 8 * PAGE
    assert d.lease(PROMPT).prefix_tokens == 8 * PAGE
    assert not violations(d.node)


def test_what_is_pinned_is_the_last_to_leave_the_tier():
    world, d, _ = given_way(objects=20)

    fill(world, d, n_pages=120)

    assert d.tier.counts.dropped > 60
    assert d.lease(PROMPT).prefix_tokens == 8 * PAGE


@pytest.mark.parametrize("ends", ["unpinned", "time", "session"])
def test_a_pin_that_is_over_keeps_nothing_there(ends):
    world, d, pin = given_way(objects=20)
    if ends == "unpinned":
        d.call(UnpinPrefix, session=2, pin=pin)
    elif ends == "time":
        world.pass_time(TTL_S)
    else:
        d.hang_up(2)
        world.pass_time(1.0)
    assert len(happened(d, PinEnded)) == 1
    assert not shown(d)
    assert not d.node.tiers.pins.by_id

    fill(world, d, first=200_000, n_pages=120)

    assert d.lease(PROMPT).prefix_tokens == 0


def test_a_pin_that_neither_has_any_more_is_over():
    world, d, _ = given_way()
    d.ask(admin.Flush(1))
    world.pass_time(1.0)

    (over,) = happened(d, PinEnded)
    assert over.why == "it left the pool, and then its tier"


def test_the_end_of_a_storage_process_is_no_end_of_a_pin():
    world, d, pin = given_way()
    d.stop_storage()
    world.pass_time(5.0)
    assert pin in d.node.pins.by_id
    d.start_storage(2)
    world.pass_time(1.0)

    assert pin in d.node.pins.by_id
    fill(world, d, n_pages=120)
    assert d.lease(PROMPT).prefix_tokens == 8 * PAGE


def test_a_page_that_is_gone_is_not_there_because_the_last_one_is():
    _, d, _ = given_way()
    gone = keys_of(d, PROMPT)[3]
    del d.stored.objects["", gone]
    d.stop_storage()
    d.start_storage(2)

    assert not d.tier.index.has("", gone)
    assert shown(d)[0].kept[0].pages == 3


def test_pins_have_half_of_a_tier_and_what_is_beyond_that_is_not_written_for_ever():
    world = TieredWorld(d_pages=65, tier=disk(objects=20))
    for first in (1, 1000, 2000):
        pinned(world.d, tokens((first, 6 * PAGE)))
    world.pass_time(10.0)

    assert world.d.tier.counts.written == 6
