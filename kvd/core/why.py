"""Who holds it, why, and since when: one sentence for a page, a node, a room or a lease."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from kvd.core import why_beside
from kvd.core.owners import describe_holder
from kvd.core.report import lease_state, room_states
from kvd.core.standing import Standing
from kvd.core.waiting import waiting_states
from kvd.errors import Code, Refusal
from kvd.types import NULL_PAGE
from kvd.wire.admin import Because, TreeNode

if TYPE_CHECKING:
    from kvd.core.lease import Lease
    from kvd.core.node import Node
    from kvd.core.radix import RadixTree
    from kvd.core.radix_node import Node as TreeEdge
    from kvd.wire.admin import Why

FIRST_TOKENS_SHOWN = 8
"""Enough of an edge to recognise a prompt by, few enough for a line."""


def because(node: Node, got: Why) -> Because | Refusal:
    """Answer for a page, node, room or lease; a Refusal when there is no such thing."""
    answers = {"node": _node, "room": _room, "lease": _lease}
    if got.kind == "page":
        said = _page_of(node, got.component, got.id)
    elif got.kind in answers:
        said = answers[got.kind](node, got.id)
    else:
        return Refusal(Code.BAD_REQUEST, f"{got.kind!r} is none of page, {', '.join(answers)}")
    if isinstance(said, Refusal):
        return said
    return Because(got.call, said[0], tuple(said[1:]))


def holders(node: Node) -> dict[int, list[Lease]]:
    """By node id, the leases whose path crosses it; their number is its lock_ref (I2).

    One walk up from each lease, whatever the size of the tree.
    """
    found: dict[int, list[Lease]] = {}
    for lease in node.leases.leases.values():
        step = lease.anchor
        while step is not None:
            found.setdefault(step.id, []).append(lease)
            step = step.parent
    return found


def in_display_order(tree: RadixTree) -> list[TreeEdge]:
    """All nodes, parents first, and among siblings the biggest subtree first."""
    edges = list(tree.nodes())
    below: Counter[int] = Counter()
    for edge in reversed(edges):
        below[edge.id] += len(edge.pages)
        if edge.parent is not None:
            below[edge.parent.id] += below[edge.id]
    tops = [edge for edge in edges if edge.parent is not None and edge.parent.parent is None]
    shown = []
    stack = sorted(tops, key=lambda edge: below[edge.id])
    while stack:
        edge = stack.pop()
        shown.append(edge)
        stack.extend(sorted(edge.children.values(), key=lambda child: below[child.id]))
    return shown


def tree_node(node: Node, edge: TreeEdge, crossing: list[Lease]) -> TreeNode:
    """One node of the tree with its holders, which are ``crossing``."""
    parent = edge.parent
    tokens = np.frombuffer(edge.edge, dtype="<i4")
    return TreeNode(
        id=edge.id,
        parent=parent.id if parent is not None and parent.parent is not None else 0,
        namespace=edge.namespace,
        start_tokens=edge.end_tokens - tokens.size,
        end_tokens=edge.end_tokens,
        pages=len(edge.pages) // 4,
        lock_ref=edge.lock_ref,
        hits=edge.hits,
        holders=tuple(describe_holder(node, lease) for lease in crossing),
        first_tokens=tuple(tokens[:FIRST_TOKENS_SHOWN].tolist()),
        beside=why_beside.beside(node, edge),
    )


def _page_of(node: Node, component: str, page: int) -> list[str] | Refusal:
    """A page of any component: one in lockstep with the first is where that one's page is."""
    first = why_beside.first_page(node, component, page)
    if first is None:
        return why_beside.page_beside(node, component, page)
    said = _page(node, first)
    if isinstance(said, Refusal) or component in {"", node.leases.pool.name}:
        return said
    return [f"page {page} of {component} goes with page {first}: {said[0]}", *said[1:]]


def _page(node: Node, page: int) -> list[str] | Refusal:
    table = node.leases
    if not NULL_PAGE <= page < table.pool.total_pages:
        return Refusal(
            Code.BAD_REQUEST, f"page {page}: this pool has pages 0..{table.pool.total_pages - 1}"
        )
    if page == NULL_PAGE:
        return ["page 0 is the null page: never handed out, never freed"]
    for lease in table.leases.values():
        if page in np.frombuffer(lease.held, dtype="<i4"):
            state = lease_state(node, lease)
            verb = "in quarantine under" if lease.quarantine else "held by"
            said = [f"page {page} is {verb} {describe_holder(node, lease)}"]
            if state.waiting_for:
                said.append(f"waits for {state.waiting_for}")
            if lease.quarantine:
                said.append(f"because {lease.quarantine.why}")
            return said
    for edge in table.tree.nodes():
        if page in np.frombuffer(edge.pages, dtype="<i4"):
            first, *rest = _edge(node, edge)
            return [f"page {page} is cached in {first}", *rest]
    return [f"page {page} is free"]


def _node(node: Node, number: int) -> list[str] | Refusal:
    edge = next((one for one in node.leases.tree.nodes() if one.id == number), None)
    if edge is None:
        return Refusal(Code.BAD_REQUEST, f"the tree has no node {number}: evicted, or never was")
    return _edge(node, edge)


def _edge(node: Node, edge: TreeEdge) -> list[str]:
    shown = tree_node(node, edge, holders(node).get(edge.id, []))
    where = (
        f"node {edge.id} (tokens {shown.start_tokens} to {shown.end_tokens}"
        f"{f' of namespace {edge.namespace!r}' if edge.namespace else ''}, {shown.pages} pages)"
    )
    if not edge.lock_ref:
        said = [f"{where}, locked by nobody: it can be evicted", f"hits: {edge.hits}"]
    else:
        said = [f"{where}, lock_ref {edge.lock_ref}", *shown.holders]
    return said + why_beside.said_of_node(node, edge)


def _room(node: Node, room: int) -> list[str] | Refusal:
    parts = [part for part in room_states(node) if part.room == room]
    if not parts:
        return Refusal(Code.BAD_REQUEST, f"no open handoff in room {room} on this node")
    said = []
    for part in parts:
        said.append(
            f"room {room}: {part.state} on the {part.side} side, "
            f"{'from' if part.side == 'decode' else 'to'} {part.peer or 'nobody yet'}, "
            f"for {part.age_s:.1f} s; waits for {part.waiting_for or 'nothing'}"
        )
        said.append(
            f"prompt {part.prompt_tokens} tokens, decode_prefix_len {part.decode_prefix_len}, "
            f"{part.moved_bytes} of {part.total_bytes} bytes moved"
        )
        said.extend(part.story)
    for waiting in waiting_states(node):
        if waiting.room == room:
            said.append(f"in the queue: {waiting.why}")
            said += [f"held by {holder}" for holder in waiting.held_by]
    return said


def _lease(node: Node, number: int) -> list[str] | Refusal:
    lease = node.leases.leases.get(number)
    if lease is None:
        return Refusal(Code.BAD_REQUEST, f"there is no lease {number}: released, or never was")
    state = lease_state(node, lease)
    said = [
        f"{describe_holder(node, lease)}: {state.state}, {state.held_pages} pages held, "
        f"{state.quarantined_pages} in quarantine, prefix of {state.prefix_tokens} tokens locked",
        f"holders: {', '.join(state.holders) or 'none'}",
    ]
    said += [
        f"of {one.component}: {one.held_pages} pages held, {one.mapped_pages} in its row"
        for one in state.beside
    ]
    said += why_beside.said_of_lease(node, lease)
    if lease.quarantine:
        said.append(f"in quarantine for {state.quarantined_s:.1f} s, because {state.because}")
    if lease.standing is not Standing.RUNNING:
        since = f" for {state.retracted_s:.1f} s" if state.retracted_s else ""
        said.append(
            f"{state.state}{since}: {state.saved_pages} pages ({state.saved_bytes} bytes) of "
            f"{state.prompt_tokens} tokens saved"
        )
    if state.waiting_for:
        said.append(f"waits for {state.waiting_for}")
    return said
