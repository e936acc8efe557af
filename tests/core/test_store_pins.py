"""Pins in a store that nodes share: what is pinned is written again before its age removes it."""

from __future__ import annotations

import pytest

from kvd.core.audit.invariants import violations
from kvd.core.layout.quota import Quota
from kvd.core.settings import Demotion
from kvd.wire import admin, client
from kvd.wire.cache_events import PinEnded, PinLeftPool
from kvd.wire.pins import PinPrefix, PrefixPinned, UnpinPrefix
from tests.core.storing import LIFETIME_S, keys_of, store
from tests.core.tiered import PAGE, cached, tokens

PROMPT, OTHER = tokens((1, 8 * PAGE)), tokens((5_000, 8 * PAGE))
TTL_S = 10_000.0


def pinned(side, toks=PROMPT, namespace=""):
    """Of a session of its own."""
    cached(side, toks, namespace)
    session = side.attach("pins")
    reply = side.call(PinPrefix, toks, ttl_s=TTL_S, session=session, namespace=namespace)
    assert isinstance(reply, PrefixPinned), reply
    side.world.pass_time(1.0)
    return reply.pin


def push_out(side):
    """A request that can have no other pages."""
    lease = side.lease(tokens((70_000, 28 * PAGE)))
    side.call(client.ReleaseLease, lease=lease.lease)


def left_pool(**more):
    """A pin whose pages in the pool were needed."""
    world = store(**more)
    pin = pinned(world.d)
    push_out(world.d)
    return world, world.d, pin


def shown(side):
    return side.ask(admin.ShowStatus(1)).snapshot.pins


def ends(side):
    return [event.why for event in side.events if isinstance(event, PinEnded)]


@pytest.mark.parametrize("demotion", [Demotion.ALWAYS, Demotion.SECOND_USE, Demotion.PRIORITY])
def test_what_is_pinned_is_written_at_once_and_shown(demotion):
    world = store(demotion=demotion)
    pinned(world.d)

    assert world.d.there(PROMPT) == 8
    (state,) = shown(world.d)
    (kept,) = state.kept
    assert (state.tier, kept.pages, kept.of_pages) == ("disk", 8, 8)
    assert 0.75 * LIFETIME_S - 2 < kept.due_in_s < 0.75 * LIFETIME_S < kept.left_s < LIFETIME_S
    assert kept.words.startswith("tier disk has all of it for 1")
    assert not violations(world.d.node)


def test_what_is_pinned_is_counted_in_the_store_also_when_all_else_is_forgotten():
    world = store(demotion=Demotion.ALWAYS)
    d = world.d
    cached(d, OTHER)
    pinned(d)
    world.pass_time(1.0)
    for _ in range(30):
        world.pass_time(LIFETIME_S / 6)
        assert d.tier.index.n_objects >= 8
    assert d.tier.index.leading("", keys_of(d, PROMPT)) == 8
    d.ask(admin.Flush(1, namespace=""))
    assert d.tier.index.n_objects == 0


def test_nothing_is_written_where_nothing_ever_is():
    world = store(demotion=Demotion.NEVER)
    pinned(world.d)
    world.pass_time(5.0)

    assert not world.d.n_written
    (kept,) = shown(world.d)[0].kept
    assert (kept.pages, kept.why) == (0, 'tiers.disk.demote is "never"')


def test_what_others_wrote_is_written_too_as_nobody_knows_how_old_it_is():
    world = store()
    world.d.at_s = {("", key): world.now_s - 15.0 for key in keys_of(world.d, PROMPT)}
    for key in keys_of(world.d, PROMPT):
        world.d.stored.write("", key, "theirs", (0, 0))
    cached(world.d, PROMPT)
    pinned(world.d)

    world.pass_time(10.0)

    assert world.d.there(PROMPT) == 8


def test_what_is_pinned_outlives_what_is_not_and_is_written_once_each_time():
    world = store(demotion=Demotion.ALWAYS)
    d = world.d
    cached(d, OTHER)
    pinned(d)
    for n in range(6):
        cached(d, tokens((90_000 + 1000 * n, 4 * PAGE)))
        world.pass_time(0.5)
    assert (d.there(PROMPT), d.there(OTHER)) == (8, 8)
    for _ in range(12):
        world.pass_time(LIFETIME_S / 4)
        assert d.there(PROMPT) == 8

    assert d.there(OTHER) == 0
    # At 0, 15, 30, 45 and 60 s.
    assert {d.times[key] for key in keys_of(d, PROMPT)} == {5}
    assert not violations(d.node)


def test_two_pins_of_one_beginning_write_it_once():
    world = store()
    pinned(world.d)
    longer = tokens((1, 8 * PAGE), (3_000, 4 * PAGE))
    pinned(world.d, longer)
    world.pass_time(0.75 * LIFETIME_S + 2)

    assert world.d.n_written == 2 * 12
    assert world.d.there(longer) == 12


@pytest.mark.parametrize("how", ["unpinned", "session"])
def test_a_pin_that_is_over_renews_nothing(how):
    world = store()
    pin = pinned(world.d)
    if how == "unpinned":
        world.d.call(UnpinPrefix, session=2, pin=pin)
    else:
        world.d.hang_up(2)
    world.pass_time(LIFETIME_S + 1)

    assert world.d.n_written == 8
    assert world.d.there(PROMPT) == 0
    assert not world.d.tier.writes._pinned


def test_a_pin_that_gives_way_goes_on_in_the_store_and_is_read_to_be_written_again():
    world, d, pin = left_pool()

    (left,) = [event for event in d.events if isinstance(event, PinLeftPool)]
    assert (left.pin, left.tier) == (pin, "disk")
    assert d.node.leases.tree.probe(PROMPT, "") < 8 * PAGE
    for _ in range(20):
        world.pass_time(LIFETIME_S / 4)
        push_out(d)
        assert d.there(PROMPT) == 8
    (state,) = shown(d)
    assert (state.pages, state.tier) == (0, "disk")
    assert d.tier.counts.read >= 8
    assert d.lease(PROMPT).prefix_tokens == 8 * PAGE
    assert not ends(d)
    assert not violations(d.node)


def test_a_pin_in_the_store_outlives_the_storage_process():
    world, d, _ = left_pool()
    d.stop_storage()
    world.pass_time(2.0)
    assert not ends(d)
    d.start_storage(2)
    world.pass_time(LIFETIME_S)

    assert d.there(PROMPT) == 8
    assert not ends(d)


@pytest.mark.parametrize("is_in_pool", [True, False])
def test_a_store_that_is_not_written_for_too_long_ends_what_is_in_no_pool(is_in_pool):
    world = store()
    d = world.d
    pinned(d)
    if not is_in_pool:
        push_out(d)
    d.fails_writing = "no answer"
    world.pass_time(LIFETIME_S + 1)
    assert d.there(PROMPT) == 0
    d.fails_writing = ""
    world.pass_time(40.0)

    if is_in_pool:
        assert d.there(PROMPT) == 8
        assert not ends(d)
    else:
        assert ends(d) == ["it left the pool, and then its tier"]


@pytest.mark.parametrize("is_in_pool", [True, False])
def test_a_flush_leaves_nothing_in_the_store_that_was_there(is_in_pool):
    world = store()
    d = world.d
    pinned(d)
    if not is_in_pool:
        push_out(d)
    n_written = d.n_written
    d.ask(admin.Flush(1))
    world.pass_time(2.0)

    if is_in_pool:
        assert d.n_written == n_written + 8
    else:
        assert ends(d) == ["it left the pool, and then its tier"]


@pytest.mark.parametrize(
    "verb", [admin.Flush(1), admin.Flush(1, namespace="n"), admin.RaiseEpoch(1, "n")]
)
def test_a_pin_that_the_store_alone_has_ends_when_its_namespace_does_though_that_forgot_it(verb):
    """Once in a lifetime a node forgets what lies in a store, and knows its pins still."""
    world = store()
    d = world.d
    pinned(d, namespace="n#a")
    push_out(d)
    world.pass_time(0.9 * LIFETIME_S)
    d.ask(admin.Evict(1, 100))
    d.tier.index.forget_namespace("n#a")
    d.node.leases.tree._sweep_roots()
    assert "n#a" not in d.node.leases.tree.roots
    d.ask(verb)
    world.pass_time(2.0)

    (why,) = ends(d)
    is_flush = isinstance(verb, admin.Flush)
    words = "it left the pool, and then its tier", "its namespace has new weights"
    assert why == words[not is_flush]
    n_written = d.n_written
    world.pass_time(2 * LIFETIME_S)
    assert d.n_written == n_written
    assert not violations(d.node)


def test_an_object_that_turns_out_to_be_bad_is_written_anew():
    world, d, _ = left_pool()
    d.stored.damaged.add(("", keys_of(d, PROMPT)[5]))
    world.pass_time(0.75 * LIFETIME_S + 5)

    assert ends(d) == ["it left the pool, and then its tier"]

    world = store()
    pinned(world.d)
    world.d.tier.writes.forget(keys_of(world.d, PROMPT)[5:6])
    world.pass_time(1.0)
    assert world.d.n_written == 9


def test_pins_have_half_of_what_is_known_of_a_store():
    world = store(d_pages=65, objects=20)
    for first in (1, 1000, 2000):
        pinned(world.d, tokens((first, 6 * PAGE)))
    world.pass_time(10.0)

    assert world.d.tier.counts.written == 6
    first, *others = [state.kept[0] for state in shown(world.d)]
    assert (first.pages, first.why) == (6, "")
    half = "all pins may have 10 pages there, half of it, and they need more"
    assert [(kept.pages, kept.why) for kept in others] == [(0, half)] * 2


def test_a_namespace_at_its_ceiling_is_why_a_pin_is_not_written_and_until_when():
    quotas = (Quota("n", ceiling_pages=16),)
    world = store(quotas=quotas, d_pages=65, demotion=Demotion.ALWAYS)
    d = world.d
    for n in range(16):
        cached(d, tokens((90_000 + 1000 * n, 4 * PAGE)), "n")
        world.pass_time(0.1)
    assert d.tier.writes.is_full("n")
    pinned(d, namespace="n")
    world.pass_time(2.0)
    (kept,) = shown(d)[0].kept
    assert kept.pages == 0
    assert kept.why.startswith("its namespace is at its ceiling there, 16 pages, and the next of")
    assert 1.5 <= kept.for_s <= 3.2
    world.pass_time(LIFETIME_S)
    assert (shown(d)[0].kept[0].pages, shown(d)[0].kept[0].why) == (8, "")


def test_a_pin_that_left_the_pool_says_why_it_is_not_written_again():
    world, d, _ = left_pool()
    # Nobody may have pages to read it into.
    d.lease(tokens((200_000, 31 * PAGE)), deadline_s=30.0)
    world.pass_time(0.75 * LIFETIME_S + 1)
    (kept,) = shown(d)[0].kept
    assert kept.pages == 8
    assert "pages of it are not in the pool, and are read into it first" in kept.why
    assert "; not written again for " in kept.words
