"""A tier that nodes share: what others wrote there is asked for, once, and for a bounded time."""

from __future__ import annotations

import pytest

from kvd.core import effects, inputs
from kvd.core.audit.invariants import violations
from kvd.core.settings import Demotion
from kvd.core.tiers import probes
from kvd.core.tiers.keys import each_key, keys_along, layout_digest, root_key
from kvd.types import ID_BYTES
from kvd.wire import admin, client, events
from tests.core.tiered import PAGE, TieredWorld, cached, disk, fill, tokens
from tests.support.compiled import replaces_methods

PROMPT = tokens((1, 8 * PAGE))
LIFETIME_S = 60.0


def shared(**more):
    """A world whose decode side has a shared tier, in which nobody has written anything."""
    tier = disk(
        **{
            "objects": 500,
            "moving": 16,
            "is_shared": True,
            "lifetime_s": LIFETIME_S,
            "probe_s": 1.0,
            **more,
        }
    )
    world = TieredWorld(d_pages=33, tier=tier)
    return world, world.d


def written_by_another(d, toks=PROMPT, namespace="", n_pages=8):
    """Another node has written the first pages of that prompt."""
    keys = keys_of(d, toks, namespace)[:n_pages]
    for number, key in enumerate(keys):
        d.stored.write(namespace, key, f"page {number}", (0, -number))
    return keys


def keys_of(d, toks, namespace=""):
    layout = layout_digest(d.config.spec)
    return keys_along(root_key(layout, namespace), toks, PAGE * ID_BYTES)


def opened(d, toks):
    """A call that waits."""
    assert d.call(client.OpenLease, toks) is None
    return d.calls


def asked(d):
    return [effect for effect in d.effects if isinstance(effect, effects.ProbeTier)]


def test_what_another_node_wrote_is_asked_for_once_and_read():
    _, d = shared()
    written_by_another(d)

    lease = d.lease(PROMPT)

    assert lease.prefix_tokens == 8 * PAGE
    (probe,) = asked(d)
    assert len(each_key(probe.keys)) == 8
    assert d.tier.counts.probes == d.tier.counts.probe_hits == d.tier.counts.hits == 1
    assert d.tier.index.n_objects == 8
    assert not violations(d.node)


def test_as_much_as_is_there_is_read_and_what_was_not_is_not_asked_for_again():
    _, d = shared()
    written_by_another(d, n_pages=3)

    first = d.lease(PROMPT)
    d.call(client.ReleaseLease, lease=first.lease)
    again = d.lease(PROMPT)

    assert (first.prefix_tokens, again.prefix_tokens) == (3 * PAGE, 3 * PAGE)
    assert len(asked(d)) == 1, "the fourth is known not to be there"
    assert d.tier.counts.unasked >= 1


def test_what_was_not_there_is_asked_for_again_after_a_time():
    world, d = shared(absent_s=5.0)
    lease = d.lease(PROMPT)
    d.call(client.ReleaseLease, lease=lease.lease)
    written_by_another(d)
    assert d.lease(PROMPT).prefix_tokens == 0
    world.pass_time(6.0)

    assert d.lease(PROMPT).prefix_tokens == 8 * PAGE


def test_who_asks_for_the_same_waits_for_the_same_answer():
    world, d = shared()
    written_by_another(d)
    d.hold_storage = True
    calls = [opened(d, PROMPT) for _ in range(3)]
    assert len(asked(d)) == 1
    d.hold_storage = False
    world.run()

    got = [d.answer(call) for call in calls]

    assert [lease.prefix_tokens for lease in got] == [8 * PAGE] * 3


def test_a_request_waits_for_the_answer_no_longer_than_it_may_and_the_next_has_it():
    world, d = shared(probe_s=0.5)
    written_by_another(d)
    d.hold_storage = True
    call = opened(d, PROMPT)
    world.pass_time(0.3)
    assert d.answer(call) is None
    world.pass_time(0.4)
    lease = d.answer(call)
    assert lease.prefix_tokens == 0
    assert d.tier.counts.late == 1
    d.call(client.ReleaseLease, lease=lease.lease)
    d.hold_storage = False
    world.run()

    assert d.lease(PROMPT).prefix_tokens == 8 * PAGE
    assert len(asked(d)) == 1


def test_what_is_shorter_than_it_is_worth_is_never_asked_for():
    _, d = shared(least_bytes=9 * PAGE * ID_BYTES)
    written_by_another(d)

    assert d.lease(PROMPT).prefix_tokens == 0
    assert not asked(d)


def test_what_is_in_the_pool_is_not_asked_for():
    _, d = shared()
    cached(d, PROMPT)
    before = len(asked(d))

    assert d.lease(PROMPT).prefix_tokens == 8 * PAGE
    assert len(asked(d)) == before


def test_nothing_is_removed_for_a_bound_or_a_flush_and_nothing_comes_back_after_one():
    world, d = shared(objects=40, demotion=Demotion.ALWAYS)
    written_by_another(d)
    d.stored.most = 10_000  # a store has a bound of its own
    fill(world, d, n_pages=60)
    assert not [e for e in d.effects if isinstance(e, effects.DropObjects)]
    assert len(d.stored.objects) > 40

    d.ask(admin.Flush(1, namespace=""))

    lease = d.lease(PROMPT)
    assert lease.prefix_tokens == 0
    assert not violations(d.node)
    d.call(client.ReleaseLease, lease=lease.lease)
    world.pass_time(LIFETIME_S + 1)
    assert d.lease(PROMPT).prefix_tokens == 8 * PAGE, "what was there then has had its time"


def test_what_is_known_is_forgotten_with_its_lifetime():
    world, d = shared()
    written_by_another(d)
    lease = d.lease(PROMPT)
    d.call(client.ReleaseLease, lease=lease.lease)
    assert d.tier.index.n_objects == 8

    world.pass_time(LIFETIME_S + 1)

    assert d.tier.index.n_objects == 0


def test_questions_that_nobody_can_answer_open_the_breaker():
    _, d = shared()
    d.fails_probing = "http://127.0.0.1:1: Connection refused"
    for k in range(3):
        d.lease(tokens((1000 * (k + 1), 8 * PAGE)))

    assert d.tier.word == "away"
    assert d.tier.why == d.fails_probing
    assert [e.why for e in d.events if isinstance(e, events.TierAway)] == [d.fails_probing]
    before = len(asked(d))
    d.lease(tokens((9000, 8 * PAGE)))
    assert len(asked(d)) == before


def test_a_process_that_answers_no_question_is_ended_and_whoever_waits_goes_on():
    world, d = shared(deadline_s=5.0, wait_s=60.0, probe_s=60.0)
    d.hold_storage = True
    call = opened(d, PROMPT)
    world.pass_time(6.0)
    assert d.restarted
    d.stop_storage()

    assert d.answer(call).prefix_tokens == 0
    assert not violations(d.node)


def test_an_answer_that_says_more_than_was_asked_is_cut():
    world, d = shared()
    d.hold_storage = True
    opened(d, PROMPT)
    (probe,) = asked(d)
    d.feed(inputs.TierProbed(world.now_s, probe.ticket, 10_000))

    assert d.tier.index.n_objects == 8
    assert not violations(d.node)


@replaces_methods
def test_too_many_questions_are_not_asked(monkeypatch):
    monkeypatch.setattr(probes, "MOST_PROBES", 2)
    _, d = shared()
    d.hold_storage = True
    for k in range(4):
        d.call(client.OpenLease, tokens((1000 * (k + 1), 2 * PAGE)))

    assert len(asked(d)) == 2
    assert d.tier.counts.unasked == 2


@pytest.mark.parametrize("n_there", [-1, 0])
def test_nothing_there_is_no_failure_of_the_tier(n_there):
    world, d = shared()
    d.hold_storage = True
    opened(d, PROMPT)
    (probe,) = asked(d)
    d.feed(inputs.TierProbed(world.now_s, probe.ticket, n_there))

    assert (d.tier.health.failures, d.tier.word) == (0, "serving")
