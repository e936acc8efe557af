"""How a node of the tree came to its locks: told from the events that are remembered.

A lease that locks anything in a node's subtree locks the node. Events name the node at whose end a
lease's lock is, so those that name one of the present subtree are about this node, and the changes
add up to its ``lock_ref``, as far back as events go. Of nodes evicted since no event is known to be
about it any more; who locked them has let go, so a gain and a loss are missing together.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvd.wire import events
from kvd.wire.admin import Because, Mark

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvd.core.cache.radix_node import RadixNode as TreeNode
    from kvd.core.node import Node
    from kvd.wire.events import Event

MARKS = 32


class Change(NamedTuple):
    """One lock more, or one less."""

    at_s: float
    by: int
    what: str


def with_lock_history(
    said: Because, node: Node, number: int, happened: Sequence[Event], now_s: float
) -> Because:
    """What was said of node ``number``, with its last lock changes, oldest first."""
    tree = node.leases.tree
    edges = chain(tree.roots.values(), tree.nodes())
    edge = next((one for one in edges if one.id == number), None)
    if edge is None:
        return said
    changes = lock_changes(node, edge, happened)
    shown = changes[-MARKS:]
    first = happened[0].seq if happened else node.out.seq + 1
    fact = (
        f"lock changes: {len(shown)} of {len(changes)} since event {first}, of it and of what is "
        "below it now; nodes evicted since are not in it"
    )
    return msgspec.structs.replace(
        said,
        facts=(*said.facts, fact),
        marks=tuple([Mark(now_s - one.at_s, one.what) for one in shown]),
    )


def lock_changes(node: Node, edge: TreeNode, happened: Iterable[Event]) -> list[Change]:
    """All of them in the order in which they happened."""
    story = _Story(node, edge)
    for event in happened:
        story.take(event)
    story.end()
    return story.changes


class _Story:
    """Which leases lock the node, event by event."""

    def __init__(self, node: Node, edge: TreeNode) -> None:
        self.changes: list[Change] = []
        self._node = node
        self._below = _ids_below(edge)
        self._names = {one.id: one.name for one in node.sessions.by_id.values()}
        self._owners: dict[int, str] = {}
        """By lease, as far as its beginning is remembered."""
        self._inside: dict[int, float] = {}
        """Leases that lock the node, and when that was last told."""

    def take(self, event: Event) -> None:
        """One event, in order."""
        match event:
            case events.ClientAttached(session=session, name=name):
                self._names[session] = name
            case events.LeaseOpened(lease=lease, session=session, reason=reason):
                name = self._names.get(session, f"session {session}")
                self._owners[lease] = f"of {name} ({reason})"
                self._enters(event, "")
            case events.LeaseExtended():
                self._enters(event, ", resumed")
            case events.LeaseCommitted(lease=lease):
                if lease not in self._owners and event.locked_node in self._below:
                    # It began before anything that is remembered, most likely in here.
                    self._inside.setdefault(lease, event.at_s)
                self._enters(event, ", committed")
            case events.LeaseReleased(cause=cause):
                self._leaves(event, "released" if cause == "normal" else f"released: {cause}")
            case events.Quarantined():
                self._leaves(event, "in quarantine")
            case events.LeaseRetracted(lease=lease) if lease in self._inside:
                del self._inside[lease]
                self.changes.append(Change(event.at_s, -1, f"-1 lease {lease} retracted"))
            case _:
                pass

    def end(self) -> None:
        """What gave its lock up without an event: its pages came, and could not be used."""
        leases = self._node.leases.leases
        for number, at_s in self._inside.items():
            lease = leases.get(number)
            if lease is None or lease.anchor is None or lease.anchor.id not in self._below:
                self.changes.append(Change(at_s, -1, f"-1 lease {number} was not resumed"))

    def _enters(
        self, event: events.LeaseOpened | events.LeaseExtended | events.LeaseCommitted, how: str
    ) -> None:
        if event.locked_node not in self._below:
            return
        if event.lease not in self._inside:
            owner = self._owners.get(event.lease, "")
            self.changes.append(Change(event.at_s, 1, f"+1 lease {event.lease} {owner}{how}"))
        self._inside[event.lease] = event.at_s

    def _leaves(self, event: events.LeaseReleased | events.Quarantined, how: str) -> None:
        was_inside = self._inside.pop(event.lease, None) is not None
        if was_inside or event.locked_node in self._below:
            self.changes.append(Change(event.at_s, -1, f"-1 lease {event.lease} {how}"))


def _ids_below(edge: TreeNode) -> set[int]:
    """Of a node and its subtree."""
    ids: set[int] = set()
    stack = [edge]
    while stack:
        node = stack.pop()
        ids.add(node.id)
        stack.extend(node.children.values())
    return ids
