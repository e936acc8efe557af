"""Why a lease misses what it misses, and which node it locks: what the events of leases say."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.core import inputs
from kvd.core.replay.freeze import freeze
from kvd.core.replay.thaw import thaw
from kvd.wire import admin, client, events
from tests.core.engines import PROMPT, Sender, cached
from tests.core.families import SPECS
from tests.core.world import Side, World, settings, tokens

HEAD = (1, 64)


def opened(side: Side, toks: bytes, **fields: object) -> events.LeaseOpened:
    """A lease of these tokens, given back at once; how it was opened."""
    lease = side.lease(toks, **fields)
    side.call(client.ReleaseLease, lease=lease.lease)
    return next(one for one in reversed(side.events) if isinstance(one, events.LeaseOpened))


def missed(side: Side, toks: bytes, **fields: object) -> tuple[int, int, int, str]:
    """Tokens of the prompt, of those cached, missed, and why."""
    event = opened(side, toks, **fields)
    return event.prompt_tokens, event.prefix_tokens, event.missed_tokens, event.why_missed


def test_a_prompt_that_was_never_cached_is_new():
    world = World()
    cached(world.d, tokens(HEAD, (500, 32)))

    assert missed(world.d, tokens((9000, 40))) == (40, 0, 32, "new")
    assert missed(world.d, tokens(HEAD, (700, 40))) == (104, 64, 32, "new")


def test_a_prompt_that_is_cached_misses_nothing_but_what_fills_no_page():
    world = World()
    cached(world.d, tokens(HEAD))

    assert missed(world.d, tokens(HEAD, (700, 15))) == (79, 64, 0, "")


@pytest.mark.parametrize("verb", [admin.Evict(1, 99), admin.Flush(1)])
def test_what_was_evicted_or_flushed_is_known_again(verb):
    world = World()
    cached(world.d, tokens(HEAD, (500, 32)))
    cached(world.d, tokens(HEAD, (600, 32)))
    world.d.ask(verb)

    assert missed(world.d, tokens(HEAD, (500, 32))) == (96, 0, 96, "evicted")
    cached(world.d, tokens(HEAD))
    assert missed(world.d, tokens(HEAD, (600, 32))) == (96, 64, 32, "evicted")
    assert missed(world.d, tokens(HEAD, (800, 32))) == (96, 64, 32, "new")


def test_what_one_namespace_lost_is_new_in_another():
    world = World()
    cached(world.d, tokens(HEAD))
    world.d.ask(admin.Evict(1, 99))

    assert missed(world.d, tokens(HEAD), namespace="lora") == (64, 0, 64, "new")
    assert missed(world.d, tokens(HEAD)) == (64, 0, 64, "evicted")


def test_what_is_cached_without_its_window_is_missed_for_what_lies_beside_it():
    side = Side(World(), settings("p", 64, spec=SPECS["swa"]))
    side.attach()
    cached(side, tokens(HEAD))
    keeper = side.node.leases.components.each[0]
    keeper.make_room(keeper.pool.total_pages - 1)

    event = opened(side, tokens(HEAD))

    assert (event.prefix_tokens, event.missed_tokens, event.why_missed) == (0, 64, "beside")


def test_a_thawed_node_remembers_what_left():
    world = World()
    cached(world.d, tokens(HEAD))
    world.d.ask(admin.Evict(1, 99))

    again = thaw(freeze(world.d.node))

    message = client.OpenLease(77, "")
    step = again.step(inputs.FromClient(world.now_s, 1, message, tokens(HEAD)))
    (event,) = step.events
    assert isinstance(event, events.LeaseOpened)
    assert event.why_missed == "evicted"


def locks(side: Side) -> list[tuple[str, int]]:
    """The events that move a lock, and the node that each names."""
    found: list[tuple[str, int]] = []
    for event in side.events:
        if hasattr(event, "locked_node"):
            one: Any = event
            found.append((type(event).__name__, one.locked_node))
    return found


def test_the_lock_of_a_lease_can_be_followed_from_node_to_node():
    world = World()
    lease = world.d.lease(tokens(HEAD, (500, 32)))
    world.d.call(client.CommitLease, lease=lease.lease)
    world.d.call(client.ReleaseLease, lease=lease.lease)
    (node,) = world.d.node.leases.tree.nodes()

    opened(world.d, tokens(HEAD, (500, 32)))

    assert locks(world.d) == [
        ("LeaseOpened", 0),
        ("LeaseCommitted", node.id),
        ("LeaseReleased", node.id),
        ("LeaseOpened", node.id),
        ("LeaseReleased", node.id),
    ]


def test_a_quarantine_says_what_it_unlocks():
    world = World()
    cached(world.d, tokens(HEAD))
    (node,) = world.d.node.leases.tree.nodes()
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(96)
    before = len(locks(world.d))

    world.d.call(client.CancelReceive, receive=1)
    world.land_posts()

    assert locks(world.d)[before:] == [("Quarantined", node.id), ("LeaseReleased", 0)]


def test_the_end_of_a_receive_names_its_lease():
    world = World()
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.finish()
    world.d.call(client.ReceiveRequest, PROMPT, room=8, source=("p",), deadline_s=0.5)
    world.pass_time(1)

    ended = [one for one in world.d.events if isinstance(one, events.HandoffEnded)]

    assert [(one.room, one.outcome, one.lease) for one in ended] == [
        (7, "committed", 1),
        (8, "aborted", 2),
    ]
