"""A node that pulls looks into its own tier first: what is there is sent by nobody."""

from __future__ import annotations

import pytest

from kvd.core import effects, inputs
from kvd.core.audit.invariants import violations
from kvd.core.inspect.snapshot import snapshot
from kvd.errors import Code
from kvd.types import Tokens
from kvd.wire import client
from kvd.wire.peer import AskPrefix, Offer
from tests.core.engines import totals
from tests.core.test_drain import drain
from tests.core.test_probes import asked, shared, written_by_another
from tests.core.tiered import PAGE, TieredWorld, cached, disk, fill, tokens

N_PAGES = 8
PROMPT = tokens((1, N_PAGES * PAGE))


def first(pages: int) -> Tokens:
    return Tokens(PROMPT[: 4 * pages * PAGE])


def world_of(own_pages: int, source_pages: int, in_tier_of_source: int = 0, **more) -> TieredWorld:
    """The puller's tier has the first pages of the prompt, and the source's pool, or its tier."""
    world = TieredWorld(
        p_pages=33, d_pages=33, tier=disk(objects=200, moving=8, **{"wait_s": 2.0, **more})
    )
    if own_pages:
        cached(world.d, first(own_pages))
        fill(world, world.d)
    if in_tier_of_source:
        cached(world.p, first(in_tier_of_source))
        fill(world, world.p)
    if source_pages:
        cached(world.p, first(source_pages))
    assert world.d.node.leases.tree.probe(PROMPT, "") == 0
    return world


def pull(world, **fields):
    return world.d.call(client.ReceiveRequest, PROMPT, room=0, source=("p",), **fields)


def said(side, kind):
    sent = [effect.message for effect in side.effects if isinstance(effect, effects.SendToPeer)]
    return [message for message in sent if isinstance(message, kind)]


def received(world):
    return [answer for answer in world.d.answers if isinstance(answer, client.Received)]


def promotions(side):
    return [effect for effect in side.effects if isinstance(effect, effects.Promote)]


def nothing_held(side):
    is_idle = not side.node.admission.queue and not side.node.leases.leases
    return is_idle and totals(side).held == 0 and not violations(side.node)


@pytest.mark.parametrize(("own", "source"), [(8, 8), (4, 8), (8, 4), (8, 0), (4, 0), (0, 8)])
def test_what_lies_here_is_read_here_and_only_the_rest_is_sent(own, source):
    """scenario A42: the Offer counts what was promoted before it."""
    world = world_of(own, source)

    begun = pull(world)

    most = max(own, source)
    (ask,) = said(world.d, AskPrefix)
    assert ask.have_tokens == own * PAGE
    assert [offer.decode_prefix_len for offer in said(world.d, Offer)] == (
        [own * PAGE] if source > own else []
    )
    assert (begun.prefix_tokens, begun.promoted_tokens) == (own * PAGE, own * PAGE)
    (got,) = received(world)
    assert begun.prompt_tokens == most * PAGE
    assert world.d.holds(got.pages, first(most))
    world.d.call(client.ReleaseLease, lease=got.lease)
    assert nothing_held(world.d)
    assert nothing_held(world.p)


def test_the_source_does_not_read_what_lies_here():
    world = world_of(own_pages=8, source_pages=0, in_tier_of_source=8)
    before = len(promotions(world.p))

    pull(world)

    assert len(promotions(world.p)) == before
    assert received(world)


def test_who_does_not_wait_for_tiers_has_it_all_sent():
    world = world_of(own_pages=8, source_pages=8)
    before = len(promotions(world.d))

    begun = pull(world, tiers="now")

    assert len(promotions(world.d)) == before
    assert (begun.prefix_tokens, begun.promoted_tokens) == (0, 0)
    assert received(world)


def test_a_tier_that_is_slower_than_its_wait_is_not_waited_for():
    """What it costs is told by what was measured."""
    world = world_of(own_pages=8, source_pages=8)
    world.d.tier.read_rate = 2.0  # 8 objects of one byte take 4 s

    begun = pull(world)

    assert begun.prefix_tokens == 0
    assert received(world)


def test_a_tier_that_is_silent_costs_its_wait_once():
    world = world_of(own_pages=8, source_pages=8)
    world.d.hold_storage = True

    assert pull(world, deadline_s=60.0) is None
    world.pass_time(1.9)
    assert not said(world.d, AskPrefix)
    world.pass_time(0.2)

    assert said(world.d, AskPrefix)[0].have_tokens == 0
    assert received(world)


def test_a_bad_object_here_has_the_rest_sent():
    world = world_of(own_pages=8, source_pages=8)
    names = list(world.d.stored.objects)[:N_PAGES]
    world.d.stored.damaged.add(names[3])

    pull(world)

    (got,) = received(world)
    assert world.d.holds(got.pages, PROMPT)
    (offer,) = said(world.d, Offer)
    assert offer.decode_prefix_len == 3 * PAGE


def test_a_pull_that_waits_here_is_shown_with_what_it_waits_for():
    world = world_of(own_pages=8, source_pages=8)
    world.d.hold_storage = True
    pull(world)

    (row,) = snapshot(world.d.node).waiting

    assert row.why == "8 pages to be read from tier disk"
    assert not violations(world.d.node)


@pytest.mark.parametrize("ends", ["cancelled", "session", "deadline", "drained", "storage"])
def test_whoever_gives_up_is_answered_once_and_holds_nothing(ends):
    world = world_of(own_pages=8, source_pages=8)
    world.d.hold_storage = True
    pull(world, deadline_s=60.0 if ends != "deadline" else 1.0)
    call = world.d.calls

    if ends == "cancelled":
        world.d.call(client.CancelCall, of=call)
    elif ends == "session":
        world.d.feed(inputs.ClientHungUp(world.now_s, 1))
    elif ends == "drained":
        drain(world.d)
    elif ends == "storage":
        world.d.stop_storage()
    world.pass_time(3.0)

    answers = [one for one in world.d.answers if getattr(one, "call", None) == call]
    if ends == "session":
        assert not answers
    elif ends in {"storage", "deadline"}:
        (begun,) = answers
        assert begun.prefix_tokens == 0
    else:
        (failed,) = answers
        assert failed.refusal.code is {"cancelled": Code.CANCELLED, "drained": Code.DRAINING}[ends]
    assert bool(said(world.d, AskPrefix)) == (ends in {"storage", "deadline"})
    assert not world.d.node.pulls.asks.by_id


@pytest.mark.parametrize("source", [0, 2])
def test_a_store_is_asked_here_where_the_source_has_no_more(source):
    """Whoever pulls can ask the store itself, and the source asks it for nothing."""
    world, d = shared()
    if source:
        cached(world.p, first(source))
        cached(d, first(source))
    written_by_another(d, PROMPT)
    before = len(asked(world.p)), len(asked(d))

    begun = pull(world)

    assert (begun.prefix_tokens, begun.prompt_tokens) == (N_PAGES * PAGE, N_PAGES * PAGE)
    assert begun.promoted_tokens == (N_PAGES - source) * PAGE
    assert received(world)
    assert (len(asked(world.p)), len(asked(d))) == (before[0], before[1] + 1)


def test_a_store_is_not_asked_for_what_the_source_sends():
    world, d = shared()
    cached(world.p, PROMPT)
    written_by_another(d)

    begun = pull(world)

    assert (begun.prefix_tokens, begun.prompt_tokens) == (0, N_PAGES * PAGE)
    assert not asked(d)
