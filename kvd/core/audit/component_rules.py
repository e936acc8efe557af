"""The rules about components beside the first: their pages, what lies at nodes, what leases have.

What must hold of every keeper, whatever its extent:

- I1 null + free + held + cached + quarantined = total; each page in exactly one of them
- I2 the locks of what lies at a node are the leases that need it, found by walking up from each
- I3 what no lease needs is evictable, nothing else is, and the sum of it is counted
- I4 what lies at a node fits it: a window has as many pages as the node, a snapshot is one page
- I9 what lies at a node lies at one of the tree; what is noted of a lease is of one that lives

and of each kind, what it has of one lease: see ``_broken_stretch``, ``_broken_state``,
``_broken_buffer``. Components without pages of their own must be in lockstep with the first.

What must not live here: anything about the first component (``rules``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.audit.rules import AWAY, Fault, is_linked
from kvd.core.components.device_buffer import Buffers
from kvd.core.components.state import StatePages
from kvd.core.components.windows import LeaseWindow, WindowPages
from kvd.core.inspect.page_states import nodes_behind
from kvd.core.layout.spec import companion_factor, is_companion
from kvd.types import ID_BYTES, NULL_PAGE, count

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    from kvd.core.audit.backrefs import Backrefs
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.components.component_pages import ComponentPages
    from kvd.core.components.state import LeaseStates
    from kvd.core.inspect.view import NodeView
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.settings import Settings


# ---- everything at once --------------------------------------------------------------------------


def component_faults(node: NodeView, refs: Backrefs) -> list[Fault]:
    """Every rule here that does not hold now."""
    table = node.leases
    found = [*component_register_faults(node)]
    for keeper in table.components.each:
        found += gone_faults(keeper)
    for lease in table.leases.values():
        found += component_lease_faults(node, lease)
    for keeper, needed in zip(table.components.each, refs.needs, strict=True):
        for edge in table.tree.nodes():
            found += component_node_faults(keeper, edge, needed)
    return found


def component_register_faults(node: NodeView) -> Iterator[Fault]:
    """I3 by sums over what lies at nodes, I9 of what is noted of leases; and the lockstep."""
    for keeper in node.leases.components.each:
        yield from _evictable_faults(keeper)
        yield from _record_faults(node.leases, keeper)
    yield from _lockstep_faults(node.settings)


def gone_faults(keeper: ComponentPages) -> Iterator[Fault]:
    """I9: what lies at nodes lies at nodes of the tree."""
    name = keeper.component.name
    for edge in keeper.nodes:
        if not is_linked(edge):
            pages = keeper.pages_at(edge)
            what = f"{edge.describe()} has left the tree with {count(pages)} pages of {name}"
            yield Fault("I9", "beside-gone", what, node=edge.id, pages=pages, component=name)


def _evictable_faults(keeper: ComponentPages) -> Iterator[Fault]:
    """I3: the sum of what no lease needs, and that nothing else is handed out."""
    # In one piece, so as fast as it goes: 0.1 us a node.
    free = [len(kept.pages) for kept in keeper.at.values() if not kept.locks]
    evictable = sum(free) // ID_BYTES
    if (evictable, len(free)) != (keeper.evictable_pages, len(keeper.unlocked)):
        what = (
            f"{keeper.evictable_pages} evictable pages of {keeper.component.name} at "
            f"{len(keeper.unlocked)} nodes are counted, {evictable} at {len(free)} are unlocked"
        )
        yield Fault("I3", "beside-evictable", what, component=keeper.component.name)


def _record_faults(table: LeaseTable, keeper: ComponentPages) -> Iterator[Fault]:
    """I9: nothing is kept for a lease that is gone."""
    for lease_id in keeper.leases:
        if lease_id not in table.leases:
            name = keeper.component.name
            what = f"{name} is kept for lease {lease_id}, which is gone"
            yield Fault("I9", "beside-record", what, lease=lease_id, component=name)


def _lockstep_faults(settings: Settings) -> Iterator[Fault]:
    """I4: a companion has its fixed number of pages for each page of the first component."""
    spec = settings.spec
    for component, pages in zip(spec.components[1:], spec.pages[1:], strict=True):
        if is_companion(spec, component):
            due = spec.pages[0] * companion_factor(spec, component)
            if pages != due:
                what = (
                    f"{component.name} has {pages} pages, {due} belong to the {spec.pages[0]} of "
                    f"{spec.components[0].name}"
                )
                yield Fault("I4", "lockstep", what, component=component.name)


# ---- one node ------------------------------------------------------------------------------------


def component_node_faults(
    keeper: ComponentPages, edge: RadixNode, needed: Counter[RadixNode]
) -> Iterator[Fault]:
    """I2, I3 and I4 of what lies at one node, and of what does not."""
    name = keeper.component.name
    pages, locks = keeper.pages_at(edge), keeper.locks_at(edge)
    if locks != needed[edge]:
        what = f"{name} at {edge.describe()} has {locks} locks, due for leases: {needed[edge]}"
        yield Fault("I2", "beside-locks", what, node=edge.id, component=name)
    if edge not in keeper.nodes:
        return
    due = len(edge.pages) if isinstance(keeper, WindowPages) else ID_BYTES
    if len(pages) != due:
        what = f"{edge.describe()} has {count(pages)} pages of {name}, {due // ID_BYTES} are due"
        yield Fault("I4", "beside-length", what, node=edge.id, component=name)
    if (edge in keeper.unlocked) != (locks == 0):
        what = f"{name} at {edge.describe()} has {locks} locks and may be dropped, or neither"
        yield Fault("I3", "beside-order", what, node=edge.id, component=name)


# ---- one lease -----------------------------------------------------------------------------------


def component_lease_faults(node: NodeView, lease: LeaseRecord) -> Iterator[Fault]:
    """I4 and I9 of what each keeper has for one lease."""
    # What it has was condemned where it lay; its row is not used any more.
    if lease.lost is not None:
        return
    for keeper in node.leases.components.each:
        for check, what in _broken(node, keeper, lease):
            rule = "I9" if check == "beside-record" else "I4"
            at = lease.anchor.id if lease.anchor is not None else 0
            name = keeper.component.name
            about = f"{name} of lease {lease.id} {what}"
            yield Fault(rule, check, about, lease=lease.id, node=at, component=name)


def _broken(
    node: NodeView, keeper: ComponentPages, lease: LeaseRecord
) -> Iterator[tuple[str, str]]:
    is_noted = lease.id in keeper.leases
    # A lease has something of every component exactly while it has pages of the first.
    if is_noted == (lease.state in AWAY):
        what = f"is noted, and it is {lease.state.value}" if is_noted else "is not noted"
        yield "beside-record", what
    elif is_noted:
        match keeper:
            case WindowPages():
                yield from _broken_stretch(keeper, lease, keeper.held[lease.id])
            case StatePages():
                yield from _broken_state(keeper, lease, keeper.held[lease.id])
            case Buffers():
                yield from _broken_buffer(node, keeper, lease)
            case _:
                pass


def _broken_stretch(
    keeper: WindowPages, lease: LeaseRecord, held: LeaseWindow
) -> Iterator[tuple[str, str]]:
    """What is mapped is one stretch of the row; up to its own it is what the path has."""
    # In quarantine it keeps pages and no row, and the table has shortened its own.
    room = held.room if lease.quarantine is not None else count(lease.page_table)
    if not (held.fence <= held.start and held.floor <= held.top <= held.room == room):
        yield (
            "stretch",
            f"has pages {held.floor} to {held.top} of a row of {held.room}, that of the lease has "
            f"{room}; it locks from page {held.fence}, and owns from page {held.start}",
        )
    if len(held.pages) != (held.top - held.floor) * ID_BYTES:
        n_pages = len(held.pages) // ID_BYTES
        yield "stretch", f"has {n_pages} pages for {held.floor} to {held.top} of its row"
    elif NULL_PAGE in memoryview(held.pages).cast("i"):
        at = held.floor + memoryview(held.pages).cast("i").tolist().index(NULL_PAGE)
        yield "null-mapped", f"maps the null page at page {at} of its row"
    elif held.floor < held.start:
        path = [keeper.pages_at(step) for step in reversed(nodes_behind(keeper, lease, held))]
        shared = held.pages[: (held.start - held.floor) * ID_BYTES]
        # From the floor on only: a slide unmaps from below before the lock behind it goes.
        if b"".join(path)[(held.floor - held.fence) * ID_BYTES :] != shared:
            yield "beside-row", "is not the windows of the path that it locks"


def _broken_state(
    keeper: StatePages, lease: LeaseRecord, held: LeaseStates
) -> Iterator[tuple[str, str]]:
    """One state of its own, and the snapshot that it goes on from is on its path."""
    if len(held.own) != ID_BYTES:
        yield "state", f"has {count(held.own)} pages of its own, one is due"
    if held.source is None:
        return
    step = lease.anchor
    while step is not None and step is not held.source:
        step = step.parent
    if step is None or step not in keeper.nodes:
        yield "beside-row", f"goes on from {held.source.describe()}, where it has no snapshot"


def _broken_buffer(
    node: NodeView, keeper: Buffers, lease: LeaseRecord
) -> Iterator[tuple[str, str]]:
    """Never more pages than are configured; a slot for each, and copies only into taken ones."""
    has = count(keeper.own_pages(lease))
    if has > keeper.most_pages:
        yield "buffer", f"has {has} pages, at most {keeper.most_pages} are any lease's"
    resident = keeper.resident.get(lease.id)
    if resident is None:
        if has:
            yield "buffer", f"has {has} pages, and no slot for any"
        return
    if resident.n_slots != has:
        yield "buffer", f"has {has} pages, and {resident.n_slots} slots"
    if what := resident.broken():
        yield "slots", what
    for ticket in resident.tickets:
        copy = node.fetcher.copies.get(ticket)
        if copy is None or copy.lease is not lease:
            yield "filling", f"waits for copy {ticket}, which is not under way"
