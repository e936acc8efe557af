"""A recorded log of inputs replays: the same effects, the same events, the same state.

So the core has no clock, no dice and no hidden input, and a recording is a bug report.
"""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from kvd.core.inputs import Input
from kvd.core.node import Node
from kvd.core.report import snapshot
from tests.property.chaos import Chaos

LOG = msgspec.msgpack.Decoder(list[Input])


def state_hash(node: Node) -> str:
    """Of everything a node knows: its snapshot, its free pages in order, its tree in order."""
    table = node.leases
    tree = [
        (one.id, one.namespace, one.edge, one.pages, one.lock_ref, one.hits, one.touched_at)
        for one in sorted(table.tree.nodes(), key=lambda one: one.id)
    ]
    rows = [(one.id, one.row, one.owned, sorted(one.holders)) for one in table.leases.values()]
    said = [
        sorted(node.decoder.outcomes.kept.items()),
        sorted(
            (key, part.state.value) for key, part in node.prefiller.last_word.by_handoff.items()
        ),
        sorted(node.prefiller.posts.parts),
    ]
    everything = [snapshot(node), table.pool.free_ids(), tree, rows, said]
    return hashlib.sha256(msgspec.msgpack.encode(everything)).hexdigest()


@pytest.mark.parametrize("seed", range(8))
def test_a_log_of_inputs_replays_to_the_same_effects_events_and_state(seed):
    chaos = Chaos(seed)
    for _ in range(250):
        chaos.step()

    for side in chaos.world.sides.values():
        again = Node(side.config, side.born_s)
        effects, events = [], []
        for happened in LOG.decode(msgspec.msgpack.encode(side.log)):
            step = again.step(happened)
            effects += step.effects
            events += step.events
        assert effects == side.effects
        assert events == side.events
        assert state_hash(again) == state_hash(side.node)
