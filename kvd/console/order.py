"""The view of what is evicted next: the first nodes of the eviction order, and why some are passed.

``frees`` adds up: evicting as many pages takes all nodes down to that row. Locked nodes stand in
the order where their last use put them, and are passed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvd.console.crossings import Crossings, locks_of
from kvd.console.tree import NO_NAMESPACE, Nodes, beside_of, name_of, start_of
from kvd.console.view import Field
from kvd.types import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.console.scene import Scene
    from kvd.core.cache.radix_node import RadixNode as TreeNode
    from kvd.wire.console import Query

PEEKED = 1000
"""Nodes that are shown at most: 2 ms."""


class Turn(NamedTuple):
    """One node and when its turn comes."""

    node: TreeNode
    rank: int | None
    """None for one that is passed."""
    frees: int | None
    """Pages that are free when it is gone."""
    crossings: Crossings


def _turns(scene: Scene, _: Query) -> Iterator[Turn | None]:
    crossings = Crossings(scene)
    yield None
    rank = pages = 0
    for node in scene.node.leases.tree.order.peek(PEEKED):
        if node.lock_ref:
            yield Turn(node, None, None, crossings)
        else:
            rank += 1
            pages += node.n_pages
            yield Turn(node, rank, pages, crossings)


def _skipped(_: Scene, one: Turn) -> str:
    locks = locks_of(one.node)
    return f"locked by {locks} lease{'s' if locks > 1 else ''}" if locks else ""


EVICTION: Nodes[Turn] = Nodes(
    "eviction",
    (
        Field("rank", "count", lambda _, one: one.rank, "who goes first; empty: passed"),
        Field("frees", "pages", lambda _, one: one.frees, "with all before it"),
        Field("skipped", "text", _skipped, "why it is passed"),
        Field("namespace", "text", lambda _, one: one.node.namespace or NO_NAMESPACE),
        Field("start", "tokens", lambda _, one: start_of(one.node), "tokens before"),
        Field("name", "text", lambda _, one: name_of(one.node), "its first tokens"),
        Field("tokens", "tokens", lambda _, one: count(one.node.edge)),
        Field("pages", "pages", lambda _, one: one.node.n_pages),
        Field("hits", "count", lambda _, one: one.node.hits, "leases that used it"),
        Field("last_use", "since", lambda _, one: one.node.touched_at or None),
        Field("lock_ref", "count", lambda _, one: locks_of(one.node)),
        Field("holders", "holders", lambda _, one: one.crossings.of(one.node), "who locks it"),
        Field("beside", "text", lambda scene, one: beside_of(scene, one.node), "goes with it"),
    ),
    objects=_turns,
    key=lambda one: f"node:{one.node.id}",
)
