"""Who holds it, why, and since when: one sentence for anything that has a number or a name.

Here are pages and nodes of the tree; ``why_held``, ``why_moving`` and ``why_beside`` have the rest.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from kvd.core.inspect import why_beside, why_held, why_moving
from kvd.core.inspect.answer import (
    MAX_LINKS,
    Explanation,
    has_page,
    holder_refs,
    lease_refs,
    links_of,
    node_refs,
)
from kvd.core.inspect.words import lease_waits_for
from kvd.core.leases.owners import describe_holder
from kvd.errors import Code, Refusal
from kvd.types import NULL_PAGE, pack_ids
from kvd.wire.admin import Because, TreeNode

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.cache.lease import Lease
    from kvd.core.cache.radix import RadixTree
    from kvd.core.cache.radix_node import RadixNode as TreeEdge
    from kvd.core.node import Node
    from kvd.wire.admin import Why

FIRST_TOKENS_SHOWN = 8
"""Enough of an edge to recognise a prompt by, few enough for a line."""

CHILDREN_LINKED = 8


def because(node: Node, got: Why) -> Because | Refusal:
    """Answer for any kind of thing; a Refusal when there is no such thing.

    A page or a node is looked for in the whole tree, once: some 0.5 us for each node.
    """
    answers: dict[str, Callable[[], Explanation | Refusal]] = {
        "page": lambda: _page_of(node, got.component, got.id),
        "node": lambda: _node(node, got.id),
        "room": lambda: why_moving.of_room(node, got.id),
        "lease": lambda: why_held.of_lease(node, got.id),
        "receive": lambda: why_moving.of_receive(node, got.id),
        "send": lambda: why_moving.of_send(node, got.id),
        "client": lambda: why_held.of_client(node, got.id),
        "peer": lambda: why_moving.of_peer(node, got.name),
    }
    answer = answers.get(got.kind)
    if answer is None:
        return Refusal(Code.BAD_REQUEST, f"{got.kind!r} is none of {', '.join(answers)}")
    said = answer()
    if isinstance(said, Refusal):
        return said
    return Because(
        call=got.call, sentence=said.sentence, facts=said.facts, links=said.links, marks=said.marks
    )


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


def _page_of(node: Node, component: str, page: int) -> Explanation | Refusal:
    """A page of any component: one in lockstep with the first is where that one's page is."""
    first = why_beside.first_page(node, component, page)
    if first is None:
        return why_beside.page_beside(node, component, page)
    said = _page(node, first)
    if isinstance(said, Refusal) or component in {"", node.leases.pool.name}:
        return said
    goes_with = f"page {page} of {component} goes with page {first}: {said.sentence}"
    return replace(said, sentence=goes_with)


def _page(node: Node, page: int) -> Explanation | Refusal:
    table = node.leases
    if not NULL_PAGE <= page < table.pool.total_pages:
        return Refusal(
            Code.BAD_REQUEST, f"page {page}: this pool has pages 0..{table.pool.total_pages - 1}"
        )
    if page == NULL_PAGE:
        return Explanation("page 0 is the null page: never handed out, never freed")
    wanted = pack_ids([page])
    if table.pool.is_condemned(page):
        return why_beside.condemned(node, f"page {page}", page, "")
    for lease in table.leases.values():
        if has_page(lease.page_table, wanted, lease.owned) or has_page(lease.deferred, wanted):
            return _held(node, lease, page)
    for edge in table.tree.nodes():
        if has_page(edge.pages, wanted):
            said = _edge(node, edge)
            return replace(
                said,
                sentence=f"page {page} is cached in {said.sentence}",
                links=links_of(f"node:{edge.id}", *said.links),
            )
    return Explanation(f"page {page} is free")


def _held(node: Node, lease: Lease, page: int) -> Explanation:
    verb = "in quarantine under" if lease.quarantine else "held by"
    waits_for = lease_waits_for(node, lease)
    said = [f"waits for {waits_for}"] if waits_for else []
    said += [f"because {lease.quarantine.why}"] if lease.quarantine else []
    return Explanation(
        f"page {page} is {verb} {describe_holder(node, lease)}",
        tuple(said),
        links_of(*holder_refs(lease)),
    )


def _node(node: Node, number: int) -> Explanation | Refusal:
    roots = node.leases.tree.roots.items()
    namespace = next((name for name, root in roots if root.id == number), None)
    if namespace is not None:
        return _root(node, namespace)
    edge = next((one for one in node.leases.tree.nodes() if one.id == number), None)
    if edge is None:
        return Refusal(Code.BAD_REQUEST, f"the tree has no node {number}: evicted, or never was")
    return _edge(node, edge)


def _root(node: Node, namespace: str) -> Explanation:
    """A root has no pages; every lease of its namespace locks it, cached or not."""
    root = node.leases.tree.roots[namespace]
    crossing = holders(node).get(root.id, [])
    first = [describe_holder(node, lease) for lease in crossing[:MAX_LINKS]]
    of = f"namespace {namespace!r}" if namespace else "no namespace"
    by = f"{len(crossing)} leases" if crossing else "nobody"
    return Explanation(
        f"node {root.id} (the root of {of}, {len(root.children)} children), locked by {by}",
        (*first, *_more(len(crossing) - len(first))),
        links_of(
            *lease_refs(crossing), *node_refs(islice(root.children.values(), CHILDREN_LINKED))
        ),
    )


def _more(n_leases: int) -> list[str]:
    return [f"and {n_leases} more leases"] if n_leases > 0 else []


def _edge(node: Node, edge: TreeEdge) -> Explanation:
    crossing = holders(node).get(edge.id, [])
    shown = tree_node(node, edge, crossing[:MAX_LINKS])
    where = (
        f"node {edge.id} (tokens {shown.start_tokens} to {shown.end_tokens}"
        f"{f' of namespace {edge.namespace!r}' if edge.namespace else ''}, {shown.pages} pages)"
    )
    used = f"hits: {edge.hits}, last used {node.out.at_s - edge.touched_at:.1f} s ago"
    if edge.lock_ref:
        others = f" and {len(crossing) - 1} more" if len(crossing) > 1 else ""
        first = f": {shown.holders[0]}{others}" if shown.holders else ""
        said = [f"{where}, lock_ref {edge.lock_ref}{first}", *shown.holders]
        said += _more(len(crossing) - len(shown.holders))
    else:
        said = [f"{where}, locked by nobody: it can be evicted", used]
    said += why_beside.said_of_node(node, edge)
    parent = [edge.parent] if edge.parent is not None and edge.parent.parent is not None else []
    around = node_refs([*parent, *islice(edge.children.values(), CHILDREN_LINKED)])
    return Explanation(said[0], tuple(said[1:]), links_of(*lease_refs(crossing), *around))
