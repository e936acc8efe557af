"""The views of the tree: its opened part, what is locked, what is evicted next, and orphaned locks.

``tree`` walks down through opened nodes only, and ``locked`` up from the leases, which stops where
others have been; only the sizes of subtrees need a survey of everything.

Of ``eviction``, ``frees`` adds up: evicting as many pages takes all nodes down to that row. Locked
nodes stand in the order where their last use put them, and are passed.
"""

from __future__ import annotations

from array import array
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from typing_extensions import override

from kvd.console.holders import lease_holder, state_of
from kvd.console.view import View
from kvd.core.cache.eviction import peek
from kvd.core.cache.namespaces import NO_NAMESPACE, told
from kvd.core.inspect.schema import StateField
from kvd.core.inspect.why import beside
from kvd.filters import rank
from kvd.types import ID_BYTES, count
from kvd.wire.page_address import in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping

    from kvd.console.context import Context
    from kvd.console.survey import Survey
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.inspect.view import NodeView
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.wire.console import Holder, Query


HOLDERS = 8
"""Named of each node, those that have been there for longest: a root is crossed by all leases."""


def locks_of(node: RadixNode) -> int:
    """Locks by leases: a root has one of its own."""
    return node.lock_ref - (node.parent is None)


class Crossings:
    """The holders of nodes as they were when this was made: one look at all leases."""

    def __init__(self, context: Context) -> None:
        self._scene = context
        self._first = first_holders(context.node.leases.leases.values())

    def of(self, node: RadixNode) -> tuple[Holder, ...]:
        """Some ``HOLDERS`` leases that lock this node."""
        if not locks_of(node):
            return ()
        return tuple([lease_holder(self._scene.node, lease) for lease in self._first.get(node, ())])


def first_holders(leases: Iterable[LeaseRecord]) -> dict[RadixNode, list[LeaseRecord]]:
    """By node, the first leases that cross it.

    Whoever crosses a node crosses those above it: from where one has enough, all have.
    """
    first: dict[RadixNode, list[LeaseRecord]] = {}
    for lease in leases:
        step = lease.anchor
        while step is not None:
            found = first.get(step)
            if found is None:
                first[step] = [lease]
            elif len(found) < HOLDERS:
                found.append(lease)
            else:
                break
            step = step.parent
    return first


def holder_counts(leases: Collection[LeaseRecord]) -> dict[RadixNode, int]:
    """By node, how many leases cross it; every node on the path of one is there."""
    counts: dict[RadixNode, int] = {}
    open_below: dict[RadixNode, int] = {}
    """Nodes on paths below a node whose own count is not added to it yet."""
    for lease in leases:
        step = lease.anchor
        while step is not None and step not in counts:
            counts[step] = 0
            step = step.parent
            if step is not None:
                open_below[step] = open_below.get(step, 0) + 1
        if lease.anchor is not None:
            counts[lease.anchor] += 1
    ready = [node for node in counts if node not in open_below]
    while ready:
        node = ready.pop()
        above = node.parent
        if above is not None:
            counts[above] += counts[node]
            open_below[above] -= 1
            if not open_below[above]:
                ready.append(above)
    return counts


NAMED_TOKENS = 6
"""Of an edge: enough to tell siblings apart, few enough for a line."""

SHOWN_AT_ONCE = 1024
SIBLINGS_AT_ONCE = 4096
"""In one step: a millisecond at most."""

ABANDONED = frozenset({"gone", "lingering"})
"""States of holders that no engine stands for any more."""


class TreeRow(NamedTuple):
    """One node that is shown, and what is asked about it."""

    node: RadixNode
    crossings: Crossings
    survey: Survey | None = None
    depth: int = 0
    why: str = ""
    """It is shown, where it is for a reason of its own."""
    rank: int | None = None
    """Of those that are evicted next; None for one that is passed."""
    frees: int | None = None
    """Pages that are free when it is gone."""


class NodeTable(View[TreeRow]):
    """Nodes may be evicted before their row is made."""

    @override
    def is_there(self, context: Context, row: TreeRow) -> bool:
        """Whether it has not been evicted meanwhile."""
        return row.node.parent is None or row.node in context.node.leases.tree.order


def _table(
    name: str,
    columns: str,
    objects: Callable[[Context, Query], Iterator[TreeRow | None]],
    *,
    sort: str = "",
    sorts_itself: bool = False,
    helps: Mapping[str, str] = MappingProxyType({}),
) -> NodeTable:
    """A table of nodes with these of all ``FIELDS``, some of which mean something else in it."""
    found = [FIELDS[column] for column in columns.split()]
    fields = [
        StateField(field.column, field.unit, field.get, helps.get(field.column, field.help))
        for field in found
    ]
    return NodeTable(
        name,
        fields,
        objects=objects,
        key=lambda row: f"node:{row.node.id}",
        sort=sort,
        sorts_itself=sorts_itself,
    )


# ---- cells ---------------------------------------------------------------------------------------


def tokens_in_short(node: RadixNode) -> str:
    """The first tokens of its edge, or the key of its first page."""
    edge = node.edge
    more = " …" if count(edge) > NAMED_TOKENS else ""
    return in_words(edge[: NAMED_TOKENS * ID_BYTES]) + more


def name_of(node: RadixNode) -> str:
    """A root is its namespace, any other node its first tokens."""
    if node.parent is None:
        return told(node.namespace) or NO_NAMESPACE
    return tokens_in_short(node)


def beside_of(table: LeaseTable, node: RadixNode) -> str:
    """What of the components beside the first lies there: ``swa 4, state 1 (2 locks)``."""
    said = []
    for component in beside(table, node) if node.parent is not None else ():
        locks = f" ({component.locks} locks)" if component.locks else ""
        said.append(f"{component.component} {component.pages or 'gone'}{locks}")
    return ", ".join(said)


def start_of(node: RadixNode) -> int:
    """The first token of its edge."""
    return node.end_tokens - count(node.edge)


def _below(_: NodeView, row: TreeRow) -> int | None:
    return row.survey.below(row.node) if row.survey is not None else None


def _last_use(_: NodeView, row: TreeRow) -> float | None:
    used_s = row.survey.last_use(row.node) if row.survey is not None else row.node.touched_at
    return used_s or None


def _skipped(_: NodeView, row: TreeRow) -> str:
    locks = locks_of(row.node)
    return f"locked by {locks} lease{'s' if locks > 1 else ''}" if locks else ""


_ALL: tuple[StateField[TreeRow], ...] = (
    StateField("depth", "depth"),
    StateField("rank", "count", "", "who goes first; empty: passed"),
    StateField("frees", "pages", "", "with all before it"),
    StateField("skipped", "text", _skipped, "why it is passed"),
    StateField("why", "text"),
    StateField("namespace", "text", lambda _, row: told(row.node.namespace) or NO_NAMESPACE),
    StateField("start", "tokens", lambda _, row: start_of(row.node), "tokens before"),
    StateField("name", "text", lambda _, row: name_of(row.node), "its first tokens"),
    StateField("tokens", "tokens", lambda _, row: count(row.node.edge)),
    StateField("pages", "pages", "node.n_pages"),
    StateField("below_pages", "pages", _below, "of its subtree; empty until all was looked at"),
    StateField("children", "count", lambda _, row: len(row.node.children)),
    StateField("hits", "count", "node.hits", "leases that used it"),
    StateField("last_use", "since", _last_use, "of anything below it, too"),
    StateField(
        "lock_ref", "count", lambda _, row: locks_of(row.node), "leases that keep it from eviction"
    ),
    StateField(
        "holders", "holders", lambda _, row: row.crossings.of(row.node), "those, the first few"
    ),
    StateField(
        "beside",
        "text",
        lambda node, row: beside_of(node.leases, row.node),
        "windows and snapshots that lie there",
    ),
)
FIELDS = {field.column: field for field in _ALL}


# ---- tree ----------------------------------------------------------------------------------------


def _opened(context: Context, query: Query) -> Iterator[TreeRow | None]:
    """Roots, and the children of opened nodes, each behind its parent, however they are sorted."""
    survey = context.surveyor.ask(context.now_s)
    yield None
    crossings = Crossings(context)
    yield None
    opened = set(query.opened)
    roots = context.node.leases.tree.roots.values()
    used = [root for root in roots if root.children or locks_of(root)]
    rows = [TreeRow(root, crossings, survey) for root in used]
    stack = yield from _last_first(context, rows, query.sort)
    n_shown = 0
    while stack:
        row = stack.pop()
        yield row
        n_shown += 1
        if n_shown % SHOWN_AT_ONCE == 0:
            yield None
        if row.node.id in opened:
            children = row.node.children.values()
            below = [TreeRow(child, crossings, survey, row.depth + 1) for child in children]
            stack += yield from _last_first(context, below, query.sort)


def _last_first(
    context: Context, siblings: list[TreeRow], sort: str
) -> Generator[None, None, list[TreeRow]]:
    """Siblings in the order that is asked for, turned round; their own is by size."""
    by_node = {row.node: row for row in siblings}
    survey = siblings[0].survey if siblings else None
    shown = yield from _smallest_first(by_node, survey)
    rows = [by_node[node] for node in shown]
    if not sort:
        return rows
    get, ranks = FIELDS[sort.removeprefix("-")].get, list[str | float | None]()
    for start in range(0, len(rows), SHOWN_AT_ONCE):
        ranks += [rank(get(context.node, row)) for row in rows[start : start + SHOWN_AT_ONCE]]
        yield
    known = [at for at, value in enumerate(ranks) if value is not None]
    by_rank: Callable[[int], Any] = ranks.__getitem__  # texts or numbers, never both
    known.sort(key=by_rank, reverse=not sort.startswith("-"))
    return [*(row for row, value in zip(rows, ranks, strict=True) if value is None),
            *(rows[at] for at in known)]  # fmt: skip


def _smallest_first(
    nodes: Collection[RadixNode], survey: Survey | None
) -> Generator[None, None, list[RadixNode]]:
    """By the pages of their subtrees, then hits; the younger of equal ones first."""
    siblings = list(nodes)
    hits, ids, below = array("q"), array("q"), array("q")
    for start in range(0, len(siblings), SIBLINGS_AT_ONCE):
        some = siblings[start : start + SIBLINGS_AT_ONCE]
        hits.extend([node.hits for node in some])
        ids.extend([-node.id for node in some])
        if survey is None:
            below.extend([node.n_pages for node in some])
        else:
            at, pages = survey.index.get, survey.below_pages
            places = [at(node.id) for node in some]
            below.extend([0 if place is None else pages[place] for place in places])
        if len(some) == SIBLINGS_AT_ONCE:
            yield
    order = np.lexsort((ids, hits, below))
    if len(siblings) > SIBLINGS_AT_ONCE:
        yield
    return [siblings[place] for place in order.tolist()]


TREE = _table(
    "tree",
    "depth name tokens pages below_pages children hits last_use lock_ref holders beside",
    _opened,
    sorts_itself=True,
)


# ---- locked --------------------------------------------------------------------------------------


def _locked(context: Context, _: Query) -> Iterator[TreeRow | None]:
    crossings = Crossings(context)
    yield None
    counts = holder_counts(context.node.leases.leases.values())
    yield None
    for node in reversed(counts):
        if node.parent is not None:
            yield TreeRow(node, crossings)


_NODE = "namespace start name tokens pages hits last_use lock_ref holders beside"
LOCKED = _table("locked", _NODE, _locked, sort="-pages")


# ---- orphans -------------------------------------------------------------------------------------


def _orphans(context: Context, _: Query) -> Iterator[TreeRow | None]:
    """Nodes on the paths of leases; and what a survey saw locked where no lease is.

    Locks and leases are counted at one moment: they change together.
    """
    survey = context.surveyor.ask(context.now_s)
    yield None
    whys: dict[RadixNode, str] = {}
    counts = holder_counts(context.node.leases.leases.values())
    for node, holders in counts.items():
        if locks_of(node) != holders:
            whys[node] = f"{locks_of(node)} locks, {holders} holders"
    for node in survey.locked if survey is not None else ():
        if node.lock_ref and node not in counts:  # what is locked does not leave the tree
            whys[node] = f"{node.lock_ref} locks, no holder"
    yield None
    for lease in context.node.leases.leases.values():
        state = state_of(context.node, lease)
        step = lease.anchor if state in ABANDONED else None
        while step is not None and step.parent is not None:
            whys.setdefault(step, f"lease {lease.id} is {state}")
            step = step.parent
    yield None
    crossings = Crossings(context)
    for node, why in whys.items():
        yield TreeRow(node, crossings, survey, why=why)


ORPHANS = _table("orphans", f"why {_NODE}", _orphans, sort="-pages")


# ---- eviction ------------------------------------------------------------------------------------

PEEKED = 1000
"""Nodes that are shown at most: 2 ms."""


def _turns(context: Context, _: Query) -> Iterator[TreeRow | None]:
    crossings = Crossings(context)
    yield None
    rank = pages = 0
    for node in peek(context.node.leases.tree.order, PEEKED):
        if node.lock_ref:
            yield TreeRow(node, crossings)
        else:
            rank += 1
            pages += node.n_pages
            yield TreeRow(node, crossings, rank=rank, frees=pages)


EVICTION = _table(
    "eviction",
    f"rank frees skipped {_NODE}",
    _turns,
    helps={"last_use": "", "lock_ref": "", "holders": "who locks it", "beside": "goes with it"},
)
