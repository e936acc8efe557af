"""Ways to break what a node has beside its first component, each with what must be found of it.

``busy_beside`` makes a node of a pool with every kind of component; see ``breakage`` for the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.core import effects, inputs
from kvd.core.components.device_buffer import Buffers
from kvd.core.components.state import StatePages
from kvd.core.components.windows import WindowPages
from kvd.core.node import NodeState
from kvd.types import ID_BYTES, NO_PAGES, Pages, page_ids
from kvd.wire import client
from tests.core.breakage import Breakage
from tests.core.families import Engine, settings_of
from tests.core.side import tokens

if TYPE_CHECKING:
    from kvd.core.cache.lease import SavedPart
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.radix_node import RadixNode
    from kvd.types import Tokens

SHARED, FIRST, SECOND = (1, 64), (1000, 48), (2000, 48)


def busy_beside() -> Engine:
    """Two cached prompts; a lease that goes on from one, one that slides alone, two retracted."""
    engine = Engine(NodeState(settings_of("everything"), 1.0), seed=0)
    for branch in (FIRST, SECOND):
        leased = engine.call(client.OpenLease, toks=tokens(SHARED, branch))
        assert isinstance(leased, client.Leased), leased
        engine.call(client.CommitAndRelease, leased.lease)
    for toks in (tokens(SHARED, FIRST, (5000, 40)), tokens((9000, 120))):
        leased = engine.call(client.OpenLease, "", 0, toks=toks, step_tokens=32)
        assert isinstance(leased, client.Leased), leased
    engine.call(client.SlideLease, leased.lease, 64)
    for toks in (tokens((7000, 20)), tokens((8000, 20))):
        retracted(engine, toks)
    engine.now_s += 1.0
    return engine


def retracted(engine: Engine, toks: Tokens) -> None:
    """A lease whose pages are all in the saved area."""
    engine.feed(inputs.TransferReady(engine.now_s, 1, b"", "simulated", "start"))
    leased = engine.call(client.OpenLease, toks=toks)
    assert isinstance(leased, client.Leased), leased
    message = client.RetractLease(1000 + leased.lease, leased.lease, "host")
    ordered = engine.feed(inputs.FromClient(engine.now_s, 1, message)).effects
    for copy in ordered:
        assert isinstance(copy, effects.Copy), copy
        engine.feed(inputs.Copied(engine.now_s, copy.ticket, 64))
    del engine.leases[leased.lease]


# ---- what is broken where ------------------------------------------------------------------------


def windows(node: NodeState) -> WindowPages:
    found = node.leases.components.named("swa")
    assert isinstance(found, WindowPages)
    return found


def states(node: NodeState) -> StatePages:
    found = node.leases.components.named("state")
    assert isinstance(found, StatePages)
    return found


def buffers(node: NodeState) -> Buffers:
    found = node.leases.components.named("buffer")
    assert isinstance(found, Buffers)
    return found


def leases(node: NodeState) -> tuple[LeaseRecord, LeaseRecord]:
    """The one that goes on from a cached prompt, and the other."""
    first, second, *_ = node.leases.leases.values()
    return first, second


def away(node: NodeState) -> tuple[LeaseRecord, LeaseRecord]:
    """The two that are retracted."""
    *_, first, second = node.leases.leases.values()
    return first, second


def part_of(lease: LeaseRecord, component: str) -> SavedPart:
    assert lease.saved is not None
    return next(one for one in lease.saved.parts if one.component == component)


def locked(keeper: WindowPages | StatePages) -> RadixNode:
    return next(one for one in keeper.nodes if keeper.locks_at(one))


def unlocked(keeper: WindowPages | StatePages) -> RadixNode:
    return next(iter(keeper.unlocked))


def window_page_lost(node: NodeState) -> str:
    free = windows(node).pool._free
    page = int.from_bytes(free[:ID_BYTES], "little")
    del free[:ID_BYTES]
    return f"page {page} of swa is nowhere"


def window_page_in_two_places(node: NodeState) -> str:
    keeper, (_, lease) = windows(node), leases(node)
    edge = unlocked(keeper)
    page = keeper.pages_at(edge)[:ID_BYTES]
    keeper.held[lease.id].spare = Pages(keeper.held[lease.id].spare + page)
    return f"page {page_ids(page)[0]} of swa is in node {edge.id} and in lease {lease.id}"


def window_page_free_and_held(node: NodeState) -> str:
    keeper, (lease, _) = windows(node), leases(node)
    page = keeper.own_pages(lease)[:ID_BYTES]
    keeper.pool._free[:0] = page
    return f"page {page_ids(page)[0]} of swa is in the free list and in lease {lease.id}"


def window_lock_too_many(node: NodeState) -> str:
    edge = locked(windows(node))
    windows(node).at[edge].locks += 1
    return f"swa at {edge.describe()} has 2 locks, due for leases: 1"


def window_lock_too_few(node: NodeState) -> str:
    edge = locked(windows(node))
    windows(node).at[edge].locks -= 1
    return f"swa at {edge.describe()} has 0 locks, due for leases: 1"


def needed_window_dropped(node: NodeState) -> str:
    edge = locked(windows(node))
    del windows(node).at[edge]
    return f"swa at {edge.describe()} has 0 locks, due for leases: 1"


def window_too_short(node: NodeState) -> str:
    edge = unlocked(windows(node))
    window = windows(node).at[edge]
    window.pages = Pages(window.pages[:-ID_BYTES])
    return f"{edge.describe()} has {edge.n_pages - 1} pages of swa, {edge.n_pages} are due"


def window_of_a_dropped_node(node: NodeState) -> str:
    tree, pool = node.leases.tree, node.leases.pool
    kept, tree.components = tree.components, []
    evicted = tree.evict(1)
    (gone,) = evicted.victims
    pool.return_pages(evicted.pages)
    tree.components = kept
    return f"{gone.describe()} has left the tree with 1 pages of state"


def window_order_lost_a_node(node: NodeState) -> str:
    edge = unlocked(windows(node))
    del windows(node).unlocked[edge]
    return f"swa at {edge.describe()} has 0 locks and may be dropped, or neither"


def window_sum_off(node: NodeState) -> str:
    windows(node).evictable_pages += 1
    return "evictable pages of swa"


def null_page_mapped(node: NodeState) -> str:
    lease = leases(node)[1]
    held = windows(node).held[lease.id]
    held.pages = Pages(held.pages[:-ID_BYTES] + bytes(ID_BYTES))
    return f"swa of lease {lease.id} maps the null page at page {held.top - 1} of its row"


def stretch_too_long(node: NodeState) -> str:
    lease = leases(node)[1]
    held = windows(node).held[lease.id]
    held.top += 1
    return f"swa of lease {lease.id} has {held.top - held.floor - 1} pages for {held.floor}"


def window_of_another_path(node: NodeState) -> str:
    lease = leases(node)[0]
    held = windows(node).held[lease.id]
    theirs = windows(node).pages_at(unlocked(windows(node)))
    held.pages = Pages(theirs[:ID_BYTES] + held.pages[ID_BYTES:])
    return f"swa of lease {lease.id} is not the windows of the path that it locks"


def stretch_forgotten(node: NodeState) -> str:
    lease = leases(node)[1]
    del windows(node).held[lease.id]
    return f"swa of lease {lease.id} is not noted"


def snapshot_lock_too_many(node: NodeState) -> str:
    edge = locked(states(node))
    states(node).at[edge].locks += 1
    return f"state at {edge.describe()} has 2 locks, due for leases: 1"


def snapshot_of_another_path(node: NodeState) -> str:
    lease, keeper = leases(node)[0], states(node)
    source = unlocked(keeper)
    keeper.held[lease.id].source = source
    return f"state of lease {lease.id} goes on from {source.describe()}, where it has no snapshot"


def state_lost(node: NodeState) -> str:
    lease = leases(node)[1]
    states(node).held[lease.id].own = NO_PAGES
    return f"state of lease {lease.id} has 0 pages of its own, one is due"


def buffer_of_a_gone_lease(node: NodeState) -> str:
    keeper = buffers(node)
    keeper.held[99] = keeper.pool.take_pages(2)
    return "buffer is kept for lease 99, which is gone"


def buffer_too_large(node: NodeState) -> str:
    lease, keeper = leases(node)[0], buffers(node)
    keeper.held[lease.id] = Pages(keeper.held[lease.id] + keeper.pool.take_pages(1))
    keeper.resident[lease.id].grow(5)
    return f"buffer of lease {lease.id} has 5 pages, at most 4 are any lease's"


def slot_in_two_pages(node: NodeState) -> str:
    resident = buffers(node).resident[leases(node)[0].id]
    resident.slots[7] = resident.slots[8] = resident._free.pop()
    return f"buffer of lease {leases(node)[0].id} has 2 slots taken and 3 free, of 4"


def slot_lost(node: NodeState) -> str:
    lease = leases(node)[0]
    buffers(node).resident[lease.id].n_slots -= 1
    return f"buffer of lease {lease.id} has 4 pages, and 3 slots"


def page_without_slot_copied(node: NodeState) -> str:
    lease = leases(node)[0]
    buffers(node).resident[lease.id]._copying[3] = 99
    return f"buffer of lease {lease.id} copies pages that have no slot"


def copy_that_never_ends(node: NodeState) -> str:
    lease = leases(node)[0]
    resident = buffers(node).resident[lease.id]
    resident.slots[3] = resident._free.pop()
    resident.copying([3], ticket=99)
    return f"buffer of lease {lease.id} waits for copy 99, which is not under way"


def saved_window_lost(node: NodeState) -> str:
    free = node.leases.saved.pools["swa"]._free
    page = int.from_bytes(free[:ID_BYTES], "little")
    del free[:ID_BYTES]
    return f"page {page} of swa.saved is nowhere"


def saved_window_in_two_leases(node: NodeState) -> str:
    (mine, theirs), (first, second) = [part_of(one, "swa") for one in away(node)], away(node)
    msgspec.structs.force_setattr(theirs, "slots", Pages(theirs.slots + mine.slots[:ID_BYTES]))
    page = page_ids(mine.slots)[0]
    return f"page {page} of swa.saved is in lease {first.id} and in lease {second.id}"


def saved_state_of_a_running_lease(node: NodeState) -> str:
    lease = leases(node)[0]
    lease.saved = away(node)[0].saved
    return f"lease {lease.id} is running, but it has"


def companion_out_of_step(node: NodeState) -> str:
    spec = node.settings.spec
    pages = (*spec.pages[:1], spec.pages[1] - 1, *spec.pages[2:])
    msgspec.structs.force_setattr(node.settings, "spec", msgspec.structs.replace(spec, pages=pages))
    return "index has 159 pages, 160 belong to the 40 of kv"


BESIDE_BREAKAGES = {
    one.apply.__name__: one
    for one in (
        Breakage("", window_page_lost, "page-lost"),
        Breakage("", window_page_in_two_places, "page-double"),
        Breakage("", window_page_free_and_held, "page-double"),
        Breakage("", window_lock_too_many, "beside-locks"),
        Breakage("", window_lock_too_few, "beside-locks"),
        Breakage("", needed_window_dropped, "beside-locks"),
        Breakage("", window_too_short, "beside-length"),
        Breakage("", window_of_a_dropped_node, "beside-gone"),
        Breakage("", window_order_lost_a_node, "beside-order"),
        Breakage("", window_sum_off, "beside-evictable"),
        Breakage("", null_page_mapped, "null-mapped"),
        Breakage("", stretch_too_long, "stretch"),
        Breakage("", window_of_another_path, "beside-row"),
        Breakage("", stretch_forgotten, "beside-record"),
        Breakage("", snapshot_lock_too_many, "beside-locks"),
        Breakage("", snapshot_of_another_path, "beside-row"),
        Breakage("", state_lost, "state"),
        Breakage("", buffer_of_a_gone_lease, "beside-record"),
        Breakage("", buffer_too_large, "buffer"),
        Breakage("", slot_in_two_pages, "slots"),
        Breakage("", slot_lost, "buffer"),
        Breakage("", page_without_slot_copied, "slots"),
        Breakage("", copy_that_never_ends, "filling"),
        Breakage("", saved_window_lost, "page-lost"),
        Breakage("", saved_window_in_two_leases, "page-double"),
        Breakage("", saved_state_of_a_running_lease, "standing"),
        Breakage("", companion_out_of_step, "lockstep"),
    )
}
