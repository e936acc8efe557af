"""A node frozen and thawed is the same node; what cannot be frozen is named; bad bytes are refused.

Whoever gives the core a new kind of state finds out here whether the flight recorder can keep it.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from typing import Any

import msgspec
import pytest

from kvd.core import inputs
from kvd.core.audit.invariants import violations
from kvd.core.cache.eviction import Policy
from kvd.core.cache.radix_node import NO_CHILDREN
from kvd.core.leases.session_table import HangUp
from kvd.core.node import NodeState
from kvd.core.replay import graph
from kvd.core.replay.freeze import TooManyObjects, Unfreezable, freeze, state_hash
from kvd.core.replay.thaw import NotFrozen, thaw
from kvd.errors import Code, Refusal
from kvd.sim.profile import PROFILES
from kvd.sim.world import World
from kvd.wire import client, events
from tests.core.families import SPECS, worked
from tests.core.side import settings, tokens
from tests.support.compiled import IS_COMPILED


def a_node(policy: Policy = Policy.LRU) -> NodeState:
    """With an engine, a lease, and a tree of a few nodes."""
    node = NodeState(settings("a", 40, policy=policy), 1.0)
    node.step(inputs.ClientJoined(1.0, 1, "engine", 7))
    for call, toks in enumerate(
        (tokens((1, 64)), tokens((1, 32), (900, 48)), tokens((1, 16))), start=1
    ):
        step = node.step(inputs.FromClient(1.0 + call, 1, client.OpenLease(call, ""), toks))
        leased: Any = step.effects[0]
        node.step(inputs.FromClient(2.0 + call, 1, client.CommitLease(9, leased.message.lease)))
    return node


def test_everything_that_a_busy_node_holds_can_be_frozen():
    """If this fails: the message names the attribute, and what it may be instead."""
    for seed, profile in enumerate(("storm", "storm", "swa", "recurrent", "hisparse")):
        world = World(seed, PROFILES[profile], 2)
        for number in range(800):
            world.agenda.step()
            if number % 40 == 0:
                for host in world.hosts:
                    freeze(host.node)


@pytest.mark.parametrize("family", SPECS)
def test_what_is_beside_the_first_component_is_thawed_as_it_was(family):
    node = worked(family, seed=1, steps=200).node
    again = thaw(freeze(node))

    assert freeze(again) == freeze(node)
    assert violations(again) == []
    for mine, theirs in zip(again.leases.components.each, node.leases.components.each, strict=True):
        assert mine is again.leases.tree.components[again.leases.components.each.index(mine)]
        assert mine.pool.free_ids() == theirs.pool.free_ids()
        assert [one.id for one in mine.unlocked] == [one.id for one in theirs.unlocked]
        assert {*mine.nodes} <= {*again.leases.tree.nodes()}
        for number, lease in again.leases.leases.items():
            assert mine.page_table(lease) == theirs.page_table(node.leases.leases[number])


@pytest.mark.parametrize("change", ["window lock", "snapshot", "buffer", "last use"])
def test_the_hash_tells_nodes_apart_that_differ_beside_the_first_component(change):
    """As those differ who have gone another way."""
    node = worked("everything", seed=1, steps=200).node
    windows, states, buffers = node.leases.components.each
    match change:
        case "window lock":
            next(iter(windows.at.values())).locks += 1
        case "snapshot":
            states.pool.return_pages(states.at.popitem()[1].pages)
        case "buffer":
            lease, pages = buffers.held.popitem()
            buffers.held[lease] = pages[4:] + pages[:4]
        case "last use":
            windows.unlocked.move_to_end(next(iter(windows.unlocked)))

    assert state_hash(node) != state_hash(worked("everything", seed=1, steps=200).node)


@pytest.mark.parametrize("policy", list(Policy))
def test_what_is_thawed_freezes_to_the_same_bytes(policy):
    frozen = freeze(a_node(policy))

    assert freeze(thaw(frozen)) == frozen


def test_the_hash_is_the_same_in_another_process():
    """Sets of texts have another order there."""
    script = (
        "from tests.core.test_freeze import a_node\n"
        "from kvd.core.replay.freeze import state_hash\n"
        "print(state_hash(a_node()))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)}

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )

    assert done.stdout.strip() == state_hash(a_node())


def worked_on(node: NodeState) -> NodeState:
    """A lease of a dozen pages in one run comes and goes: more than are looked at one by one."""
    opened = inputs.FromClient(9.0, 1, client.OpenLease(10, ""), tokens((5000, 12 * 16)))
    leased: Any = node.step(opened).effects[0]
    node.step(inputs.FromClient(9.0, 1, client.ReleaseLease(11, leased.message.lease)))
    return node


def test_a_process_that_has_only_thawed_a_node_goes_on_to_the_same_state():
    """As a replay does: what the process has seen before must not be part of what a node knows."""
    script = (
        "import sys\n"
        "from tests.core.test_freeze import state_hash, thaw, worked_on\n"
        "print(state_hash(worked_on(thaw(sys.stdin.buffer.read()))))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    node = a_node()
    base = freeze(node)

    done = subprocess.run(
        [sys.executable, "-c", script], input=base, capture_output=True, env=environment, check=True
    )

    assert done.stdout.decode().strip() == state_hash(worked_on(node))


@pytest.mark.parametrize(
    "change",
    [
        lambda node: node.leases.pool.return_pages(
            node.leases.pool.take_pages(2)[4:] + b"\1\0\0\0"
        ),
        lambda node: node.leases.tree.match(tokens((1, 32), (900, 48)), ""),
        lambda node: node.out.emit(events.RecordingSaved(path="a file", why="asked")),
        lambda node: node.sessions.by_id[1].pids.append(8),
        lambda node: node.leases.leases[1].holders.add("send 1"),
    ],
    ids=["free stack", "last use", "event number", "pids", "holder"],
)
def test_the_hash_tells_nodes_apart_that_differ_in_one_thing(change):
    node = a_node()

    change(node)

    assert state_hash(node) != state_hash(a_node())


def test_a_leaf_of_a_thawed_tree_has_the_very_dict_that_every_leaf_has():
    """The tree asks for its identity before it gives a node children of its own."""
    node = thaw(freeze(a_node()))

    leaves = [one for one in node.leases.tree.nodes() if not one.children]

    assert leaves
    assert all(one.children is NO_CHILDREN for one in leaves)


def test_a_limit_of_objects_is_kept():
    with pytest.raises(TooManyObjects, match="more than 20 objects"):
        freeze(a_node(), max_objects=20)


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (threading.Lock(), "a _thread.lock is no state of a node"),
        (lambda: None, "a lambda or a local function cannot be kept"),
        ({object()}, "a builtins.object is no state of a node"),
        ({("a", 1), 2}, "a set whose members have no order"),
    ],
    ids=["lock", "lambda", "object", "set"],
)
def test_what_cannot_be_frozen_is_named_with_its_place(held, said):
    node = a_node()
    node.sessions.by_id[1].pids = [held]

    with pytest.raises(Unfreezable, match=said):
        freeze(node)
    node.sessions.by_id[1].name = held
    with pytest.raises(Unfreezable, match="Session.name: " if not isinstance(held, set) else said):
        freeze(node)


def frozen_with(**changed: Any) -> bytes:
    """A frozen node of which something was replaced."""
    frozen = msgspec.msgpack.decode(freeze(a_node()), type=graph.Frozen)
    return msgspec.msgpack.encode(msgspec.structs.replace(frozen, **changed))


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "builtins:eval",
        "sys",
        "kvd.daemon.app:Daemon",
        "NotFrozen",
        "Thing",
        "kvd.core.node:Node",
        "",
    ],
)
def test_a_name_that_no_node_may_contain_is_refused(name):
    names = msgspec.msgpack.decode(freeze(a_node()), type=graph.Frozen).names

    with pytest.raises(NotFrozen, match="does not fit this kvd"):
        thaw(frozen_with(names=[*names, name]))


def test_a_module_that_is_named_is_not_loaded():
    assert "kvd.wire.planted" not in sys.modules

    with pytest.raises(NotFrozen):
        thaw(frozen_with(names=["kvd.wire.planted:Thing"]))

    assert "kvd.wire.planted" not in sys.modules


@pytest.mark.parametrize(
    ("shapes", "objects"),
    [
        ([(0, ["__class__"])], [[graph.INSTANCE, 0, 1]]),
        ([(0, ["step"])], [[graph.INSTANCE, 0, 1]]),
        ([], [[graph.OBJECT_LIST, [graph.METHOD, [graph.REFERENCE, 0], "__reduce__"]]]),
        ([], [[graph.OBJECT_LIST, [graph.REFERENCE, -1]]]),
        ([], [[graph.OBJECT_LIST, [graph.REFERENCE, 5]]]),
        ([], [[graph.OBJECT_DEQUE, 2**63]]),
        ([], [[99]]),
        ([], [[graph.OBJECT_LIST]]),
        ([], []),
    ],
    ids=[
        "class",
        "method replaced",
        "method",
        "below zero",
        "beyond",
        "deque",
        "kind",
        "list",
        "none",
    ],
)
def test_a_graph_that_no_node_has_is_refused(shapes, objects):
    with pytest.raises(NotFrozen):
        thaw(frozen_with(names=["NodeState"], shapes=shapes, objects=objects))


def test_another_format_is_refused_by_its_number():
    with pytest.raises(NotFrozen, match=r"its format is 3, this kvd reads format 2"):
        thaw(frozen_with(format=3))


@pytest.mark.skipif(IS_COMPILED, reason="a compiled class need not have all its attributes set")
def test_an_attribute_that_the_recorded_class_lacked_is_named():
    frozen = msgspec.msgpack.decode(freeze(a_node()), type=graph.Frozen)
    shapes = [
        (number, [name for name in names if name != "hits"]) for number, names in frozen.shapes
    ]

    with pytest.raises(NotFrozen, match="Node has hits, the recorded one had not"):
        thaw(frozen_with(shapes=shapes))


def test_damaged_bytes_give_a_node_or_a_refusal_and_nothing_else():
    seed = 20
    rng = random.Random(seed)
    whole = freeze(a_node())
    refused = 0
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            thaw(bytes(data[: rng.choice((len(data), rng.randrange(len(data))))]))
        except NotFrozen:
            refused += 1

    assert refused > 200, f"seed {seed}"


def test_a_code_of_a_later_version_is_thawed_as_it_was_said():
    """A peer of a later version may have refused with one that has no name here."""
    node = a_node()
    why = Refusal(Code("not-yet-known"), "from tomorrow", "b")
    node.sessions.by_id[1].hang_up = HangUp(why, 1.0)

    again = thaw(freeze(node)).sessions.by_id[1].hang_up
    assert again is not None
    assert again.why == why
