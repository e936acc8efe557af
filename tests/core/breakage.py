"""Ways to break a living node as a bug would, each with what must be found of it.

``busy`` makes a node of each side on which every rule has something to look at; ``BREAKAGES`` are
applied to one of them. The real daemon of ``tests/daemon`` breaks its own node by the same names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvd.core.cache.lease import ENGINE
from kvd.core.handoff.protocol import Decode
from kvd.types import ID_BYTES, Pages
from kvd.wire import client
from tests.core.world import World, tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.node import NodeState

SHARED, FIRST, SECOND = (1, 64), (1000, 48), (2000, 32)


def busy() -> World:
    """Cached prompts, a lease, a send with posts under way; a receive, a quarantine, a waiter."""
    world = World(p_pages=64, d_pages=32)
    p, d = world.p, world.d
    for branch in (FIRST, SECOND):
        lease = p.lease(tokens(SHARED, branch))
        p.call(client.CommitAndRelease, lease=lease.lease)
    prompt = tokens(SHARED, FIRST, (5000, 40))
    source = p.lease(prompt)
    world.hold_posts = True
    for room in (7, 8):
        d.call(client.ReceiveRequest, prompt, room=room, source=("p",))
        p.call(client.SendRequest, prompt, room=room, lease=source.lease)
        send = p.node.prefiller.rooms.by_room[room].id
        p.call(client.Advance, send=send, upto_tokens=96)
    d.call(client.CancelReceive, receive=2)
    d.call(client.OpenLease, tokens((9000, 20 * 16)))
    p.call(client.OpenLease, tokens(SHARED))
    world.pass_time(0.1)
    return world


# ---- what is broken where ------------------------------------------------------------------------


def engine_lease(node: NodeState) -> LeaseRecord:
    """One that an engine holds and nobody reads."""
    return next(
        one for one in node.leases.leases.values() if one.holders == {ENGINE} and not one.reads
    )


def source_lease(node: NodeState) -> LeaseRecord:
    return next(one for one in node.leases.leases.values() if one.reads)


def quarantined(node: NodeState) -> LeaseRecord:
    return next(one for one in node.leases.leases.values() if one.quarantine is not None)


def locked_node(node: NodeState) -> RadixNode:
    return next(one for one in node.leases.tree.nodes() if one.lock_ref)


def leaf(node: NodeState) -> RadixNode:
    return next(one for one in node.leases.tree.nodes() if not one.lock_ref and not one.children)


def lost_unlock(node: NodeState) -> str:
    edge = locked_node(node)
    edge.lock_ref += 1
    root = edge.parent
    while root is not None:
        root.lock_ref += 1
        root = root.parent
    return f"node {edge.id}"


def lost_page(node: NodeState) -> str:
    page = int.from_bytes(node.leases.pool._free[:ID_BYTES], "little")
    del node.leases.pool._free[:ID_BYTES]
    return f"page {page} is nowhere"


def page_in_two_leases(node: NodeState) -> str:
    mine, theirs = engine_lease(node), source_lease(node)
    page = theirs.held[-ID_BYTES:]
    mine.page_table = Pages(mine.page_table + page)
    number = int.from_bytes(page, "little")
    first, second = sorted((mine.id, theirs.id))
    return f"page {number} is in lease {first} and in lease {second}"


def page_in_two_plain_leases(node: NodeState) -> str:
    first, second = list(node.leases.leases.values())[:2]
    second.page_table = Pages(second.page_table + first.page_table[-ID_BYTES:])
    return f"is in lease {first.id} and in lease {second.id}"


def cached_page_in_free_list(node: NodeState) -> str:
    edge = leaf(node)
    node.leases.pool._free[:0] = edge.pages[:ID_BYTES]
    page = int.from_bytes(edge.pages[:ID_BYTES], "little")
    return f"page {page} is in the free list and in node {edge.id}"


def stray_page(node: NodeState) -> str:
    lease = engine_lease(node)
    lease.page_table = Pages(lease.page_table + (99_999).to_bytes(ID_BYTES, "little"))
    return f"lease {lease.id} has page 99999"


def leaked_quarantine(node: NodeState) -> str:
    lease = quarantined(node)
    part = next(one for one in node.decoder.open.parts.values() if one.lease is lease)
    del node.decoder.open.parts[part.id], node.decoder.open.by_handoff[part.handoff]
    return f"the quarantine of lease {lease.id}"


def nameless_quarantine(node: NodeState) -> str:
    lease = quarantined(node)
    lease.quarantine = type(lease.quarantine)((), 0.0, "x")
    return f"lease {lease.id} names no incarnation"


def lease_of_the_dead(node: NodeState) -> str:
    lease = engine_lease(node)
    lease.session = 77
    return f"lease {lease.id} is held for session 77, which is gone"


def lease_without_holder(node: NodeState) -> str:
    lease = engine_lease(node)
    lease.holders.clear()
    return f"lease {lease.id} has no holder"


def lease_of_a_lost_send(node: NodeState) -> str:
    lease = source_lease(node)
    lease.holders.add("send 99")
    return f"lease {lease.id} is held for send 99"


def post_without_part(node: NodeState) -> str:
    post, part = next(iter(node.prefiller.posts.parts.items()))
    part.outstanding.discard(post)
    return f"post {post} is under way for send {part.id}"


def part_without_post(node: NodeState) -> str:
    post, part = next(iter(node.prefiller.posts.parts.items()))
    del node.prefiller.posts.parts[post]
    source_lease(node).reads -= 1
    return f"send {part.id}"


def reads_off(node: NodeState) -> str:
    lease = source_lease(node)
    lease.reads += 1
    return f"lease {lease.id} counts {lease.reads} posts"


def order_lost_a_leaf(node: NodeState) -> str:
    edge = leaf(node)
    node.leases.tree.order.remove(edge)
    return f"node {edge.id}"


def wrong_child_key(node: NodeState) -> str:
    edge = leaf(node)
    del edge.parent.children[edge.key]
    edge.parent.children[b"elsewhere"] = edge
    return f"node {edge.id}"


def evictable_off(node: NodeState) -> str:
    node.leases.tree.evictable_bytes += ID_BYTES
    return "evictable"


def edge_cut(node: NodeState) -> str:
    edge = leaf(node)
    edge.edge = edge.edge[:-ID_BYTES]
    return f"node {edge.id}"


def row_off(node: NodeState) -> str:
    lease = engine_lease(node)
    lease.page_table = Pages(
        lease.page_table[ID_BYTES : 2 * ID_BYTES] + lease.page_table[ID_BYTES:]
    )
    return f"the row of lease {lease.id}"


def lease_unlocked(node: NodeState) -> str:
    lease = engine_lease(node)
    node.leases.tree.unlock(lease.anchor)
    return f"node {lease.anchor.id}"


def receive_without_lease(node: NodeState) -> str:
    part = next(one for one in node.decoder.open.parts.values() if one.state.value == "receiving")
    part.attempt.lease = None
    return f"receive {part.id}"


def verification_forgotten(node: NodeState) -> str:
    part = next(one for one in node.decoder.open.parts.values() if one.state.value == "receiving")
    part.state = Decode.VERIFYING
    return f"receive {part.id}"


def unfindable_receive(node: NodeState) -> str:
    part = next(iter(node.decoder.open.by_handoff.values()))
    del node.decoder.open.by_handoff[part.handoff]
    return f"receive {part.id}"


def unfindable_send(node: NodeState) -> str:
    part = next(iter(node.prefiller.rooms.by_room.values()))
    del node.prefiller.settled_sends.records[part.incarnation].parts[part.handoff]
    return f"send {part.id}"


def records_off(node: NodeState) -> str:
    records = next(iter(node.prefiller.settled_sends.records.values()))
    records.kept_bytes += 4
    return "are counted as open"


def waiter_of_the_dead(node: NodeState) -> str:
    waiter = node.admission.queue[0]
    waiter.claim = msgspec.structs.replace(waiter.claim, session=77)
    return "a request of session 77"


def settling_for_nothing(node: NodeState) -> str:
    lease = next(iter(node.leases.leases.values()))
    node.decoder.quarantines.leases[lease.id] = lease
    return f"lease {lease.id} waits for this host"


class Breakage(NamedTuple):
    """On which side, how, and the check that finds it."""

    side: str
    apply: Callable[[NodeState], str]
    """Breaks the node; returns words that the finding must have."""
    check: str


BREAKAGES = {
    one.apply.__name__: one
    for one in (
        Breakage("p", lost_unlock, "lock-count"),
        Breakage("p", lost_page, "page-lost"),
        Breakage("p", page_in_two_leases, "page-double"),
        Breakage("p", cached_page_in_free_list, "page-double"),
        Breakage("p", stray_page, "page-stray"),
        Breakage("d", leaked_quarantine, "quarantine-leaked"),
        Breakage("d", nameless_quarantine, "nameless"),
        Breakage("p", lease_of_the_dead, "holder-gone"),
        Breakage("p", lease_without_holder, "holder-none"),
        Breakage("p", lease_of_a_lost_send, "holder-gone"),
        Breakage("p", post_without_part, "post-1"),
        Breakage("p", part_without_post, "post-lost"),
        Breakage("p", reads_off, "reads"),
        Breakage("p", order_lost_a_leaf, "not-in-order"),
        Breakage("p", wrong_child_key, "child-key"),
        Breakage("p", evictable_off, "totals"),
        Breakage("p", edge_cut, "edge"),
        Breakage("p", row_off, "row"),
        Breakage("p", lease_unlocked, "lock-count"),
        Breakage("d", receive_without_lease, "receive"),
        Breakage("d", verification_forgotten, "verify"),
        Breakage("d", unfindable_receive, "receive"),
        Breakage("p", unfindable_send, "send"),
        Breakage("p", records_off, "records"),
        Breakage("d", waiter_of_the_dead, "waiter-77-4"),
        Breakage("d", settling_for_nothing, "settling"),
    )
}
