"""Who has a page of a component beside the first, and what lies beside a node or a lease.

What must not live here: pages of the first component, nodes and leases as such (``why``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.audit.beside_rules import needed_nodes
from kvd.core.components.device_buffer import Buffers
from kvd.core.components.state import StatePages
from kvd.core.components.windows import WindowPages
from kvd.core.inspect.answer import Explanation, has_page, holder_refs, lease_refs, links_of
from kvd.core.inspect.words import lease_waits_for
from kvd.core.layout.spec import companion_factor, is_companion
from kvd.core.leases.owners import describe_holder
from kvd.errors import Code, Refusal
from kvd.types import NULL_PAGE, count, pack_ids, page_ids
from kvd.wire.admin import Beside

if TYPE_CHECKING:
    from kvd.core.cache.lease import Lease
    from kvd.core.cache.radix_node import RadixNode as TreeEdge
    from kvd.core.components.component_pages import ComponentPages
    from kvd.core.node import Node
    from kvd.types import Pages


def first_page(node: Node, component: str, page: int) -> int | None:
    """The page of the first component that a page of ``component`` belongs to.

    That is the page itself for the first one (also where none is named), and follows from the
    lockstep for a companion; None where the component has page ids of its own.
    """
    spec = node.settings.spec
    if component in {"", spec.components[0].name}:
        return page
    for one in spec.components:
        if one.name == component and is_companion(spec, one):
            return page // companion_factor(spec, one)
    return None


def page_beside(node: Node, component: str, page: int) -> Explanation | Refusal:
    """Who has this page of a component with page ids of its own, or of a saved area."""
    keeper, area = node.leases.components.named(component), node.leases.saved.pools
    saved = next((name for name, pool in area.items() if pool.name == component), "")
    if keeper is None and not saved:
        names = ", ".join(one.name for one in node.settings.spec.components)
        return Refusal(Code.BAD_REQUEST, f"this pool has no component {component!r}: {names}")
    pool = area[saved] if keeper is None else keeper.pool
    what = f"page {page} of {component}"
    if not NULL_PAGE <= page < pool.total_pages:
        return Refusal(Code.BAD_REQUEST, f"{what}: this pool has pages 0..{pool.total_pages - 1}")
    if page == NULL_PAGE:
        return Explanation(
            f"{what} is the null page: never handed out, never freed; in a row it means none"
        )
    if pool.is_condemned(page):
        return condemned(node, what, page, component)
    return _saved(node, saved, page, what) if keeper is None else _held(node, keeper, page, what)


def condemned(node: Node, what: str, page: int, component: str) -> Explanation:
    """Nobody has it, or nobody should: it was in two places, or its lease was broken."""
    why = node.audit.findings.containment.why(component, page)
    return Explanation(
        f"{what} is condemned: nobody gets it before the daemon is started again",
        (f"because {why}",),
    )


def _saved(node: Node, component: str, page: int, what: str) -> Explanation:
    """Whose retracted lease wants it back, in the area of that component."""
    for lease in node.leases.leases.values():
        for part in () if lease.saved is None else lease.saved.parts:
            if part.component == component and _has(part.slots, page):
                kept = part.first + page_ids(part.slots).index(page)
                return Explanation(
                    f"{what} is held by {describe_holder(node, lease)}, which is "
                    f"{lease.state.value}",
                    (f"it keeps page {kept} of its row",),
                    links_of(*holder_refs(lease)),
                )
    return Explanation(f"{what} is free")


def _held(node: Node, keeper: ComponentPages, page: int, what: str) -> Explanation:
    """Which lease, or which node of the tree, has it."""
    for lease in node.leases.leases.values():
        if _has(keeper.own_pages(lease), page):
            verb = "in quarantine under" if lease.quarantine else "held by"
            waits_for = lease_waits_for(node, lease)
            said = [f"waits for {waits_for}"] if waits_for else []
            return Explanation(
                f"{what} is {verb} {describe_holder(node, lease)}",
                (_in_lease(keeper, lease, page), *said),
                links_of(*holder_refs(lease)),
            )
    for edge in keeper.nodes:
        pages = keeper.pages_at(edge)
        if _has(pages, page):
            needing = [
                one for one in node.leases.leases.values() if edge in needed_nodes(keeper, one)
            ]
            return Explanation(
                f"{what} is cached {_at(keeper, edge, page)}",
                tuple(_needing(node, needing)),
                links_of(f"node:{edge.id}", *lease_refs(needing)),
            )
    return Explanation(f"{what} is free")


def _has(pages: Pages, page: int) -> bool:
    return has_page(pages, pack_ids([page]))


def _in_lease(keeper: ComponentPages, lease: Lease, page: int) -> str:
    """Where in the lease it is, and what keeps it there."""
    size = keeper.component.page_size
    match keeper:
        case _ if lease.quarantine is not None:
            return f"because {lease.quarantine.why}"
        case WindowPages() if _has(keeper.page_table(lease), page):
            at = page_ids(keeper.page_table(lease)).index(page)
            return f"it is the window of tokens {at * size} to {(at + 1) * size}"
        case WindowPages():
            return "it is spare: the lease maps it further on when it slides"
        case StatePages():
            return "it is the state that the lease writes"
        case Buffers():
            return _in_slot(keeper, lease, page_ids(keeper.own_pages(lease)).index(page))
        case _:
            return ""


def _in_slot(keeper: Buffers, lease: Lease, slot: int) -> str:
    """Which page of the lease is copied there."""
    size = keeper.component.page_size
    where = f"it is slot {slot} of its {count(keeper.own_pages(lease))}"
    for logical, taken in keeper.resident[lease.id].slots.items():
        if taken == slot:
            return f"{where}, for tokens {logical * size} to {(logical + 1) * size}"
    return f"{where}, and free"


def _at(keeper: ComponentPages, edge: TreeEdge, page: int) -> str:
    """Where in the tree it is: a window stands for tokens, a snapshot for all before a token."""
    if isinstance(keeper, StatePages):
        return f"at node {edge.id}: the state behind its last token, {edge.end_tokens}"
    size = keeper.component.page_size
    start = edge.end_tokens - count(edge.edge) + page_ids(keeper.pages_at(edge)).index(page) * size
    return f"beside node {edge.id}: the window of tokens {start} to {start + size}"


def _needing(node: Node, leases: list[Lease]) -> list[str]:
    """The leases that need what lies there."""
    found = [f"needed by {describe_holder(node, lease)}" for lease in leases]
    return found or ["needed by nobody: it can be evicted"]


# ---- nodes and leases ----------------------------------------------------------------------------


def beside(node: Node, edge: TreeEdge) -> tuple[Beside, ...]:
    """What lies beside a node, of each component that can; a window that is gone has no pages."""
    return tuple(
        Beside(keeper.component.name, count(keeper.pages_at(edge)), keeper.locks_at(edge))
        for keeper in node.leases.components.each
        if isinstance(keeper, WindowPages) or edge in keeper.nodes
    )


def said_of_node(node: Node, edge: TreeEdge) -> list[str]:
    """The same in words, with the leases that need it."""
    said = []
    for keeper in node.leases.components.each:
        name = keeper.component.name
        if edge in keeper.nodes:
            n_pages = count(keeper.pages_at(edge))
            what = "a snapshot" if isinstance(keeper, StatePages) else f"{n_pages} pages"
            needing = [
                one for one in node.leases.leases.values() if edge in needed_nodes(keeper, one)
            ]
            said += [f"{name}: {what}, {one}" for one in _needing(node, needing)]
        elif isinstance(keeper, WindowPages):
            said.append(f"{name}: a tombstone, its tokens are cached and their window is gone")
    return said


def said_of_lease(node: Node, lease: Lease) -> list[str]:
    """Where in its row a lease has pages, and what of the tree it needs."""
    said = []
    for keeper in node.leases.components.each:
        name, size = keeper.component.name, keeper.component.page_size
        needed = [edge.id for edge in needed_nodes(keeper, lease)]
        if isinstance(keeper, WindowPages) and lease.id in keeper.leases:
            held = keeper.held[lease.id]
            said.append(
                f"{name}: mapped at tokens {held.floor * size} to {held.top * size}, its own from "
                f"token {held.start * size} on, {count(held.spare)} pages spare"
            )
        if needed:
            nodes = f"node {needed[0]}" if len(needed) == 1 else f"nodes {_listed(needed)}"
            said.append(f"{name}: needs what lies at {nodes}")
    return said


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in sorted(numbers))
