"""The views of the tree: its opened part, what is locked, and locks that nobody stands for.

``tree`` walks down through opened nodes only, and ``locked`` up from the leases; only the sizes of
subtrees need a survey of everything.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
from typing_extensions import override

from kvd.console.crossings import Crossings, holder_counts, locks_of
from kvd.console.named import state_of
from kvd.console.view import Field, View
from kvd.core.inspect.why_beside import beside
from kvd.types import count

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator

    from kvd.console.scene import Scene
    from kvd.console.survey import Survey
    from kvd.core.cache.radix_node import RadixNode as TreeNode
    from kvd.wire.console import Holder, Query

NAMED_TOKENS = 6
"""Of an edge: enough to tell siblings apart, few enough for a line."""

SHOWN_AT_ONCE = 1024
SIBLINGS_AT_ONCE = 4096
"""In one step: a millisecond at most."""

NO_NAMESPACE = "(no namespace)"
ABANDONED = frozenset({"gone", "lingering"})
"""States of holders that no engine stands for any more."""


class Branch(NamedTuple):
    """One node that is shown, and what is asked about it."""

    node: TreeNode
    depth: int
    crossings: Crossings
    survey: Survey | None
    why: str = ""
    """It is shown, where it is for a reason of its own."""


class HasNode(Protocol):
    """A row of a node."""

    @property
    def node(self) -> TreeNode:
        """Which."""


R = TypeVar("R", bound=HasNode)


class Nodes(View[R]):
    """Nodes may be evicted before their row is made."""

    @override
    def is_there(self, scene: Scene, one: R) -> bool:
        """Whether it has not been evicted meanwhile."""
        return one.node.parent is None or one.node in scene.node.leases.tree.order


# ---- cells ---------------------------------------------------------------------------------------


def tokens_in_short(node: TreeNode) -> str:
    """The first tokens of its edge."""
    edge = node.edge
    first = np.frombuffer(edge[: NAMED_TOKENS * 4], dtype="<i4").tolist()
    more = " …" if count(edge) > NAMED_TOKENS else ""
    return " ".join(map(str, first)) + more


def name_of(node: TreeNode) -> str:
    """A root is its namespace, any other node its first tokens."""
    if node.parent is None:
        return node.namespace or NO_NAMESPACE
    return tokens_in_short(node)


def beside_of(scene: Scene, node: TreeNode) -> str:
    """What of the components beside the first lies there: ``swa 4, state 1 (2 locks)``."""
    said = []
    for one in beside(scene.node, node) if node.parent is not None else ():
        locks = f" ({one.locks} locks)" if one.locks else ""
        said.append(f"{one.component} {one.pages or 'gone'}{locks}")
    return ", ".join(said)


def start_of(node: TreeNode) -> int:
    """The first token of its edge."""
    return node.end_tokens - count(node.edge)


def _below(_: Scene, one: Branch) -> int | None:
    return one.survey.below(one.node) if one.survey is not None else None


def _last_use(_: Scene, one: Branch) -> float | None:
    used_s = one.survey.last_use(one.node) if one.survey is not None else one.node.touched_at
    return used_s or None


def _holders(_: Scene, one: Branch) -> tuple[Holder, ...]:
    return one.crossings.of(one.node)


_TOKENS: Field[Branch] = Field("tokens", "tokens", lambda _, one: count(one.node.edge))
_PAGES: Field[Branch] = Field("pages", "pages", lambda _, one: one.node.n_pages)
_HITS: Field[Branch] = Field("hits", "count", lambda _, one: one.node.hits, "leases that used it")
_USED: Field[Branch] = Field("last_use", "since", _last_use, "of anything below it, too")
_LOCKS: Field[Branch] = Field(
    "lock_ref", "count", lambda _, one: locks_of(one.node), "leases that keep it from eviction"
)
_HOLDERS: Field[Branch] = Field("holders", "holders", _holders, "those, the first few")
_BESIDE: Field[Branch] = Field(
    "beside",
    "text",
    lambda scene, one: beside_of(scene, one.node),
    "windows and snapshots that lie there",
)
_NAMESPACE: Field[Branch] = Field(
    "namespace", "text", lambda _, one: one.node.namespace or NO_NAMESPACE
)
_START: Field[Branch] = Field("start", "tokens", lambda _, one: start_of(one.node), "tokens before")
_NAME: Field[Branch] = Field("name", "text", lambda _, one: name_of(one.node), "its first tokens")


# ---- tree ----------------------------------------------------------------------------------------


def _opened(scene: Scene, query: Query) -> Iterator[Branch | None]:
    """Roots, and the children of opened nodes, each behind its parent."""
    survey = scene.surveyor.ask(scene.now_s)
    yield None
    crossings = Crossings(scene)
    yield None
    opened = set(query.opened)
    roots = scene.node.leases.tree.roots.values()
    used = [root for root in roots if root.children or locks_of(root)]
    shown = yield from _smallest_first(used, survey)
    stack = [(root, 0) for root in shown]
    n_shown = 0
    while stack:
        node, depth = stack.pop()
        yield Branch(node, depth, crossings, survey)
        n_shown += 1
        if n_shown % SHOWN_AT_ONCE == 0:
            yield None
        if node.id in opened:
            below = yield from _smallest_first(node.children.values(), survey)
            stack += [(child, depth + 1) for child in below]


def _smallest_first(
    nodes: Collection[TreeNode], survey: Survey | None
) -> Generator[None, None, list[TreeNode]]:
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


TREE: Nodes[Branch] = Nodes(
    "tree",
    (
        Field("depth", "depth", lambda _, one: one.depth),
        _NAME,
        _TOKENS,
        _PAGES,
        Field("below_pages", "pages", _below, "of its subtree; empty until all was looked at"),
        Field("children", "count", lambda _, one: len(one.node.children)),
        _HITS,
        _USED,
        _LOCKS,
        _HOLDERS,
        _BESIDE,
    ),
    objects=_opened,
    key=lambda one: f"node:{one.node.id}",
)


# ---- locked --------------------------------------------------------------------------------------


def _locked(scene: Scene, _: Query) -> Iterator[Branch | None]:
    crossings = Crossings(scene)
    yield None
    counts = holder_counts(scene.node.leases.leases.values())
    yield None
    for node in reversed(counts):
        if node.parent is not None:
            yield Branch(node, 0, crossings, None)


LOCKED: Nodes[Branch] = Nodes(
    "locked",
    (_NAMESPACE, _START, _NAME, _TOKENS, _PAGES, _HITS, _USED, _LOCKS, _HOLDERS, _BESIDE),
    objects=_locked,
    key=lambda one: f"node:{one.node.id}",
    sort="-pages",
)


# ---- orphans -------------------------------------------------------------------------------------


def _orphans(scene: Scene, _: Query) -> Iterator[Branch | None]:
    """Nodes on the paths of leases; and what a survey saw locked where no lease is.

    Locks and leases are counted at one moment: they change together.
    """
    survey = scene.surveyor.ask(scene.now_s)
    yield None
    whys: dict[TreeNode, str] = {}
    counts = holder_counts(scene.node.leases.leases.values())
    for node, holders in counts.items():
        if locks_of(node) != holders:
            whys[node] = f"{locks_of(node)} locks, {holders} holders"
    for node in survey.locked if survey is not None else ():
        if node.lock_ref and node not in counts:  # what is locked does not leave the tree
            whys[node] = f"{node.lock_ref} locks, no holder"
    yield None
    for lease in scene.node.leases.leases.values():
        state = state_of(scene, lease)
        step = lease.anchor if state in ABANDONED else None
        while step is not None and step.parent is not None:
            whys.setdefault(step, f"lease {lease.id} is {state}")
            step = step.parent
    yield None
    crossings = Crossings(scene)
    for node, why in whys.items():
        yield Branch(node, 0, crossings, survey, why)


ORPHANS: Nodes[Branch] = Nodes(
    "orphans",
    (
        Field("why", "text", lambda _, one: one.why),
        *(_NAMESPACE, _START, _NAME, _TOKENS, _PAGES, _HITS, _USED, _LOCKS, _HOLDERS, _BESIDE),
    ),
    objects=_orphans,
    key=lambda one: f"node:{one.node.id}",
    sort="-pages",
)
