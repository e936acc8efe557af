"""What an operator asks costs one walk up per lease, not one per lease and node."""

from __future__ import annotations

from kvd.core.inspect.why import holders
from kvd.wire import admin
from tests.core.engines import cached
from tests.core.world import World, tokens


def test_each_node_knows_its_holders_after_one_walk_up_from_each_lease():
    world = World(p_pages=600)
    for k in range(100):
        cached(world.p, tokens((1, 32), (1000 * (k + 1), 16)))
    leased = [world.p.lease(tokens((1, 32), (1000 * (k + 1), 17))) for k in range(100)]

    found = holders(world.p.node.leases)

    nodes = list(world.p.node.leases.tree.nodes())
    assert [len(found.get(one.id, [])) for one in nodes] == [one.lock_ref for one in nodes]
    assert sorted(lease.id for lease in max(found.values(), key=len)) == [
        one.lease for one in leased
    ]
    tree = world.p.ask(admin.ShowTree(1))
    assert isinstance(tree, admin.Tree)
    assert [len(one.holders) for one in tree.nodes] == [one.lock_ref for one in tree.nodes]
