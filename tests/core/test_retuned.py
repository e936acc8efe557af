"""Figures that an operator changes while the node runs: for what comes next, and on the tape."""

from __future__ import annotations

import pytest

from kvd.core import inputs
from kvd.core.inspect.snapshot import snapshot
from kvd.core.node import NodeState
from kvd.core.peers.hello import unwelcome
from kvd.core.replay.freeze import state_hash
from kvd.recorder.input_records import input_of, record_of
from kvd.wire import client
from kvd.wire.events import ConfigRefused, ConfigReloaded
from kvd.wire.peer import Hello
from tests.core.sentences import sentence_of
from tests.core.side import settings, tokens
from tests.core.world import World


def retuned(at_s, *, allow=(), max_queue=1024, overtakers=0):
    return inputs.Reconfigured(at_s, allow, max_queue, overtakers, ("a: 1 -> 2",), ("b: 3 -> 4",))


def waiting(max_queue=1024, overtakers=0):
    """A node with three free pages, before whose pool a request for four waits."""
    world = World(d_pages=10, max_queue=max_queue, overtakers=overtakers)
    world.d.lease(tokens((1, 96)))
    assert world.d.call(client.OpenLease, tokens((5000, 64))) is None
    return world


def test_new_figures_are_an_event_with_what_waits_for_a_restart():
    world = World()
    before = len(world.d.events)

    assert world.d.feed(retuned(world.now_s)) == []

    assert world.d.events[before:] == [
        ConfigReloaded(
            before + 1, world.now_s, changed=("a: 1 -> 2",), needs_restart=("b: 3 -> 4",)
        )
    ]


def test_refused_configuration_is_an_event_and_changes_nothing():
    world = World()
    before, hashed = len(world.d.events), world.d.node.peers.allow

    world.d.feed(inputs.ReloadRefused(world.now_s, ("log.level = 7 must be a text",)))

    assert world.d.events[before:] == [
        ConfigRefused(before + 1, world.now_s, errors=("log.level = 7 must be a text",))
    ]
    assert world.d.node.peers.allow == hashed


def test_shorter_queue_refuses_the_next_and_keeps_who_waits():
    world = waiting()

    world.d.feed(retuned(world.now_s, max_queue=1))
    reply = world.d.call(client.OpenLease, tokens((6000, 64)))

    assert isinstance(reply, client.Failed)
    assert reply.refusal.message == sentence_of(
        "shorter queue refuses the next and keeps who waits"
    )
    assert len(snapshot(world.d.node).waiting) == 1


def test_overtakers_that_are_allowed_now_go_past_at_once():
    world = waiting()
    assert world.d.call(client.OpenLease, tokens((6000, 16))) is None

    effects = world.d.feed(retuned(world.now_s, overtakers=1))

    assert len(effects) == 1
    (large,) = snapshot(world.d.node).waiting
    assert (large.needed_pages, large.overtaken) == (4, 1)


@pytest.mark.parametrize(("allow", "is_welcome"), [(("x",), True), (("y",), False), ((), True)])
def test_allow_list_holds_for_the_next_hello(allow, is_welcome):
    world = World(allow=("d", "p"))
    node = world.d.node
    hello = Hello("f" * 32, "", "x", node.peers._layout, 1, b"", 64, 64)
    assert unwelcome(hello, "in:x", node.peers, node.settings) is not None

    world.d.feed(retuned(world.now_s, allow=allow))

    assert (unwelcome(hello, "in:x", node.peers, node.settings) is None) is is_welcome


def test_tape_brings_another_node_to_the_same_state():
    live, twin = (NodeState(settings("d", 16), 1.0) for _ in range(2))
    taped = [
        retuned(2.0, allow=("p",), max_queue=3, overtakers=1),
        inputs.ReloadRefused(3.0, ("no",)),
    ]

    for happened in taped:
        live.step(happened)
        twin.step(input_of(record_of(happened)))

    assert state_hash(twin) == state_hash(live)
    assert state_hash(live) != state_hash(NodeState(settings("d", 16), 1.0))
