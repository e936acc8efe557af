"""The rules about one lease, one part, one waiter, one lock: exact at any moment between two steps.

Each looks at one thing and at what it names, and says what does not hold. Used for everything at
once by ``invariants`` and piece by piece by ``audit``. The rules about tree nodes alone are in
``radix_audit``, those about pages in ``places``.

I9, beside those of the design: what is held is held for somebody. Every holder of a lease, every
quarantine, post, part and waiter names something that lives and that knows of it; else nothing
would ever give it back.

What must not live here: what a fault means over time, and any change of state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.audit.fault import Fault
from kvd.core.audit.radix_rules import is_linked
from kvd.core.audit.saved_rules import AWAY, COPYING, broken_standing, saved_count_faults
from kvd.core.cache.lease import ARRIVAL, ENGINE, FETCH, UNPROVEN
from kvd.core.cache.lease_state import LeaseStage
from kvd.core.handoff.endings import ASKING
from kvd.core.handoff.frames import page_bytes
from kvd.core.handoff.parts import waits_for_others
from kvd.core.handoff.protocol import Decode, Prefill
from kvd.core.handoff.send import LIVE, WRITING
from kvd.core.leases.admission import OWN_TRANSFER
from kvd.types import ID_BYTES, short

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    from kvd.core.audit.backrefs import Cross
    from kvd.core.cache.lease import Lease
    from kvd.core.cache.radix_node import RadixNode as TreeNode
    from kvd.core.handoff.parts import ReceiveAttempt, ReceivePart, SendPart
    from kvd.core.leases.admission import Waiter
    from kvd.core.node import Node

ARRIVING = ASKING | {Decode.VERIFYING}
"""States of a part whose lease waits for its KV."""


def missing_locks(edge: TreeNode, anchored: Counter[TreeNode | None]) -> int:
    """I2: the locks of a node are those of its children, and of the leases that end at it.

    Returns by how many it has too few, negative where it has too many.
    """
    below = sum([child.lock_ref for child in edge.children.values()])
    return below + anchored[edge] + (edge.parent is None) - edge.lock_ref


def lock_faults(edge: TreeNode, cross: Cross) -> Iterator[Fault]:
    """I2 at one node, in words."""
    if missing_locks(edge, cross.anchored):
        anchored, own = cross.anchored[edge], edge.parent is None
        below = sum([child.lock_ref for child in edge.children.values()])
        yield Fault(
            "I2",
            "lock-count",
            f"{edge.describe()}: {anchored} leases end at it and its children have {below} locks"
            f"{', a root has one of its own' if own else ''}, which is not {edge.lock_ref}",
            node=edge.id,
        )


# ---- leases --------------------------------------------------------------------------------------


def lease_faults(node: Node, lease: Lease, cross: Cross) -> Iterator[Fault]:
    """I1, I2, I4, I6, I7 and I9 at one lease."""

    def fault(rule: str, check: str, what: str) -> Fault:
        at = lease.anchor.id if lease.anchor is not None else 0
        return Fault(rule, check, what, lease=lease.id, node=at)

    is_quarantined = lease.quarantine is not None
    broken = _broken_quarantine if is_quarantined else _broken_claim
    for rule, check, what in broken(node, lease, cross):
        yield fault(rule, check, what)
    if lease.reads < 0 or (lease.deferred and not lease.reads):
        what = f"lease {lease.id} keeps replaced pages that no post reads"
        yield fault("I1", "deferred", what)
    if lease.reads != cross.reads[lease.id]:
        what = f"lease {lease.id} counts {lease.reads} posts and copies that read it, "
        yield fault("I6", "reads", f"{what}{cross.reads[lease.id]} are under way")
    if node.leases.leases.get(lease.id) is not lease:
        yield fault("I9", "lease-name", f"lease {lease.id} is known under another number")


def _broken_quarantine(_: Node, lease: Lease, cross: Cross) -> Iterator[tuple[str, str, str]]:
    """I6, I7 and I9 of pages that a remote may still write."""
    writers = lease.quarantine.writers if lease.quarantine is not None else ()
    if not writers or not all(writer.incarnation for writer in writers):
        yield "I7", "nameless", f"quarantined lease {lease.id} names no incarnation"
    if lease.anchor is not None or lease.owned:
        yield "I6", "lock-kept", f"quarantined lease {lease.id} still locks a prefix"
    if not cross.is_draining(lease.id):
        what = f"nothing would ever end the quarantine of lease {lease.id}: no part drains it"
        yield "I9", "quarantine-leaked", what


def _broken_claim(node: Node, lease: Lease, cross: Cross) -> Iterator[tuple[str, str, str]]:
    """Row, lock and holders of a lease that is somebody's."""
    if lease.state not in AWAY and lease.lost is None:
        for check, what in _broken_row(node, lease):
            yield "I2" if check == "unlocked" else "I4", check, what
    for what in broken_standing(node, lease):
        yield "I1", "standing", f"lease {lease.id} is {lease.state.value}, but {what}"
    for check, what in _missing_holders(lease, cross):
        yield "I9", check, what


def _broken_row(node: Node, lease: Lease) -> Iterator[tuple[str, str]]:
    """Anchor, ``owned`` and row of a lease that locks a prefix."""
    table, anchor = node.leases, lease.anchor
    if anchor is None:
        yield "unlocked", f"lease {lease.id} is neither locked nor quarantined"
        return
    is_root = table.tree.roots.get(lease.namespace) is anchor
    if not (is_root or is_linked(anchor)) or anchor.lock_ref < 1:
        yield "unlocked", f"lease {lease.id} locks {anchor.describe()}, which is not locked there"
    elif anchor.end_tokens != lease.owned * table.page_size:
        yield (
            "owned",
            f"lease {lease.id} owns from page {lease.owned}, its lock ends at token "
            f"{anchor.end_tokens}",
        )
    elif table.tree.path_pages(anchor) != lease.page_table[: lease.owned * ID_BYTES]:
        yield "row", f"the row of lease {lease.id} is not the tree's path that it locks"


def _missing_holders(lease: Lease, cross: Cross) -> Iterator[tuple[str, str]]:
    """Holders that are gone, or do not know of this lease."""
    if not lease.holders:
        yield "holder-none", f"lease {lease.id} has no holder: nobody would ever release it"
    for holder in sorted(lease.holders):
        if holder == ENGINE:
            is_there = cross.is_alive(lease.session)
        elif holder == ARRIVAL:
            receive = cross.receives.get(lease.id)
            is_there = receive is not None and receive.state in ARRIVING
        elif holder in COPYING:
            is_there = lease.state is COPYING[holder] and cross.copies[lease.id] > 0
        elif holder == UNPROVEN:
            is_there = cross.may_read_former
        elif holder == FETCH:
            is_there = cross.reads[lease.id] > 0
        else:
            send = cross.sends.get(int(holder.removeprefix("send ")))
            is_there = send is not None and send.engine is not None and send.engine.lease is lease
        if not is_there:
            what = f"session {lease.session}" if holder == ENGINE else holder
            yield "holder-gone", f"lease {lease.id} is held for {what}, which is gone"


# ---- parts ---------------------------------------------------------------------------------------


def receive_faults(node: Node, part: ReceivePart, cross: Cross) -> Iterator[Fault]:
    """I4 and I9 at one part of the decode side that is not over."""
    wrong = _unqueued(part, cross) if part.state is Decode.QUEUED else _unclaimed(node, part, cross)
    if node.decoder.parts.get(part.id) is not part:
        wrong = "is known under another number"
    if wrong:
        yield _receive_fault("I9", "receive", part, wrong)
    looks_done = part.state is Decode.VERIFYING and not part.sums
    if looks_done and not waits_for_others(part) and not _is_preloading(node, part):
        yield _receive_fault(
            "I9", "verify", part, "waits for a look at its pages that nobody takes"
        )
    if part.prefix_tokens % node.leases.page_size:
        yield _receive_fault("I4", "prefix", part, f"begins at token {part.prefix_tokens}")


def _is_preloading(node: Node, part: ReceivePart) -> bool:
    """Whether it waits for its device buffer, after it was verified."""
    return part.lease is not None and part.lease.id in node.fetcher.turns


def _unqueued(part: ReceivePart, cross: Cross) -> str:
    """Why nobody would ever admit it; empty where somebody will."""
    if part.waiter is None or id(part.waiter) not in cross.queued or part.lease is not None:
        return "is queued, and not in the queue"
    return ""


def _unclaimed(node: Node, part: ReceivePart, cross: Cross) -> str:
    """Why its pages are not kept for it as its state demands; empty where they are."""
    lease, state = part.lease, part.state
    if lease is None or node.leases.leases.get(lease.id) is not lease:
        return "has no lease, or one that is gone"
    if state not in ARRIVING and state is not Decode.DRAINING:
        return "is over, and still among the open ones"
    is_kept = lease.quarantine is not None if state is Decode.DRAINING else ARRIVAL in lease.holders
    if not is_kept or not _is_named(part, lease):
        return f"is not what lease {lease.id} is kept for"
    return _unfound(node, part, cross) or _unjoined(node, part)


def _unfound(node: Node, part: ReceivePart, cross: Cross) -> str:
    """Why nobody would hear of it; empty where somebody does."""
    if node.decoder.by_handoff.get(part.handoff) is not part:
        return f"is not found by its handoff {part.handoff}"
    if part.state in ASKING and not cross.is_alive(part.session):
        return f"goes on for session {part.session}, which is gone"
    return ""


def _unjoined(node: Node, part: ReceivePart) -> str:
    """Why it does not go together with the other parts of its receive; empty where it does."""
    reception = part.reception
    if part not in reception.parts or node.decoder.receptions.get(reception.id) is not reception:
        return f"is no part of receive {reception.id}"
    if part.state in ASKING and part.ended is not None:
        return "goes on, and its receive has ended"
    return ""


def _is_named(part: ReceivePart, lease: Lease) -> bool:
    """I7 of one of several: whether a quarantine names its writer, while that may write."""
    held = lease.quarantine
    if held is None:
        return True
    return any(writer.incarnation == part.incarnation for writer in held.writers)


def ready_faults(node: Node, lease_id: int, reception: ReceiveAttempt) -> Iterator[Fault]:
    """I9 at a delivered receive, which stays until its lease is released."""
    lease = node.leases.leases.get(lease_id)
    for part in reception.parts:
        if lease is None or part.lease is not lease or part.state is not Decode.READY:
            what = f"is delivered as lease {lease_id}, which is not"
            yield _receive_fault("I9", "ready", part, what)
        elif ENGINE not in lease.holders:
            wrong = f"is delivered, and no engine holds lease {lease_id}"
            yield _receive_fault("I9", "ready", part, wrong)


def _receive_fault(rule: str, check: str, part: ReceivePart, wrong: str) -> Fault:
    return Fault(
        rule,
        check,
        f"receive {part.id} (room {part.room}, {part.state.value}) {wrong}",
        lease=part.lease.id if part.lease is not None else 0,
        side="decode",
        part=part.id,
    )


def send_faults(node: Node, part: SendPart, cross: Cross) -> Iterator[Fault]:
    """I4, I5, I6 and I9 at one part of the prefill side that is not CLOSED."""

    def fault(rule: str, check: str, what: str) -> Fault:
        lease = part.engine.lease.id if part.engine is not None else 0
        about = f"send {part.id} (room {part.room}, {part.state.value}) {what}"
        return Fault(rule, check, about, lease=lease, side="prefill", part=part.id)

    start, end = part.start_tokens, part.end_tokens
    is_within = part.decode_prefix_len <= start <= part.posted_tokens <= end <= part.prompt_tokens
    if part.offer and not is_within:
        bounds = f"[{start}, {end}]"
        yield fault("I5", "cursor", f"posted to {part.posted_tokens}, outside {bounds}")
    page_tokens = node.prefiller.posts.page_tokens(part)
    if part.decode_prefix_len % page_tokens and part.state is not Prefill.SETTLED:
        yield fault("I4", "prefix", f"begins at token {part.decode_prefix_len}")
    if part.state is Prefill.SETTLED and part.outstanding:
        yield fault("I6", "late-post", f"is settled with posts {sorted(part.outstanding)}")
    posts = node.prefiller.posts.parts
    if any(posts.get(post) is not part for post in part.outstanding):
        yield fault("I9", "post-lost", f"waits for a post of {sorted(part.outstanding)} in vain")
    wrong = _misfiled(node, part) or _unowned(node, part, cross)
    if wrong:
        yield fault("I9", "send", wrong)


def _misfiled(node: Node, part: SendPart) -> str:
    """Why a part of this state cannot be found where it should be; empty where it can."""
    prefiller = node.prefiller
    last_word = prefiller.last_word
    if part.state in LIVE:
        if not prefiller.rooms.has(part):
            return "is not one that its room knows"
    elif part.state is not Prefill.SETTLED or last_word.settled.get(part.id) is not part:
        return "is over, and still among the open ones"
    if part.incarnation and last_word.find(part.incarnation, part.handoff) is not part:
        return f"is not found by its handoff {part.handoff}"
    return ""


def _unowned(node: Node, part: SendPart, cross: Cross) -> str:
    """Why the lease that it reads, or the engine it works for, is not there; empty: they are."""
    engine = part.engine
    if engine is None:
        return "writes without an engine" if part.state in WRITING else ""
    lease = engine.lease
    if part.state is Prefill.SETTLED:
        return f"is settled, and keeps lease {lease.id}"
    if node.leases.leases.get(lease.id) is not lease or f"send {part.id}" not in lease.holders:
        return f"reads lease {lease.id}, which is not held for it"
    if part.state is not Prefill.DRAINING and not cross.is_alive(engine.session):
        return f"goes on for session {engine.session}, which is gone"
    return ""


def post_faults(node: Node, post: int, part: SendPart) -> Iterator[Fault]:
    """I6 and I9 at one post under way."""
    is_live = node.prefiller.by_room.get(part.room) is part
    if post not in part.outstanding or not is_live:
        what = f"post {post} is under way for send {part.id} (room {part.room}), which "
        what += "does not wait for it" if is_live else f"is {part.state.value}"
        yield Fault("I9", f"post-{post}", what, side="prefill", part=part.id)


# ---- the queue and the registers -----------------------------------------------------------------


def queue_faults(node: Node, cross: Cross) -> Iterator[Fault]:
    """The queue is in order, and everybody in it lives."""
    ranks = [waiter.rank for waiter in node.admission.line]
    if ranks != sorted(ranks):
        yield Fault("I9", "queue-order", "the admission queue is not sorted by priority and time")
    yield from _forgotten(node)
    for waiter in node.admission.queue:
        yield from _waiter_faults(waiter, cross)


def _forgotten(node: Node) -> Iterator[Fault]:
    """Who stands apart and waits for nothing but memory: nobody would look at it again.

    Those who wait for one peer wait for the same thing: whether that is there is asked once.
    """
    peers = node.peers
    for name, waiters in node.admission.side_queue.by_name.items():
        if name == OWN_TRANSFER or peers.not_ready(name) is not None:
            continue
        for waiter in waiters.values():
            if not waiter.asker.awaits():
                session, call = waiter.claim.session, waiter.claim.call
                what = f"a request of session {session} (call {call}) waits for {name}, which is up"
                yield Fault("I9", f"forgotten-{session}-{call}", what)


def _waiter_faults(waiter: Waiter, cross: Cross) -> Iterator[Fault]:
    session = waiter.claim.session
    if not cross.is_alive(session):
        what = f"a request of session {session} (call {waiter.claim.call}) waits, and that is gone"
        yield Fault("I9", f"waiter-{session}-{waiter.claim.call}", what)


def register_faults(node: Node) -> Iterator[Fault]:
    """I9: the registers that are kept beside the parts say what the parts say."""
    decoder, prefiller, leases = node.decoder, node.prefiller, node.leases.leases
    for lease_id, lease in decoder.settling.leases.items():
        if leases.get(lease_id) is not lease or lease.quarantine is None:
            what = f"lease {lease_id} waits for this host to be quiet, and is not in quarantine"
            yield Fault("I9", "settling", what, lease=lease_id)
    offered = sum(part.state is not Decode.QUEUED for part in decoder.parts.values())
    if offered != len(decoder.by_handoff):
        what = f"{offered} receives are offered, {len(decoder.by_handoff)} are found by handoff"
        yield Fault("I9", "by-handoff", what)
    for send, part in prefiller.by_send.items():
        if prefiller.by_room.get(part.room) is not part or part.engine is None:
            what = f"send {send} (room {part.room}) is open to its engine, and is over"
            yield Fault("I9", "by-send", what, side="prefill", part=send)
    for send, failed in prefiller.failed.items():
        if failed.session not in node.sessions.by_id:
            what = f"send {send} has failed for session {failed.session}, which is gone"
            yield Fault("I9", "failed", what, side="prefill", part=send)
    yield from _former_faults(node)
    yield from _record_faults(node)
    yield from saved_count_faults(node)


def _former_faults(node: Node) -> Iterator[Fault]:
    former = node.former_leases
    standing = [one for one in node.leases.leases.values() if one.state is LeaseStage.FORMER]
    registered = [*former.leases.values(), *([former.unproven] if former.unproven else [])]
    if {one.id for one in standing} != {one.id for one in registered}:
        what = (
            f"{len(standing)} leases are of before the restart, {len(registered)} are known as it"
        )
        yield Fault("I9", "former", what)
    if former.unproven is not None and not former.may_read():
        what = f"lease {former.unproven.id} keeps pages that nobody of before the restart reads"
        yield Fault("I9", "unproven", what, lease=former.unproven.id)


def _record_faults(node: Node) -> Iterator[Fault]:
    for incarnation, records in node.prefiller.last_word.records.items():
        parts = records.parts.items()
        is_open = sorted([one for one, part in parts if part.state is not Prefill.CLOSED])
        closed = sorted(records.parts.keys() - set(is_open))
        kept_bytes = sum(page_bytes(part.offer) for _, part in parts if part.offer is not None)
        if (is_open, closed, kept_bytes) != (records.open, records.closed, records.kept_bytes):
            what = (
                f"{len(records.open)} handoffs of {short(incarnation)} are counted as open, "
                f"{len(records.closed)} as closed, with {records.kept_bytes} bytes of page ids; "
                f"{len(is_open)} are, {len(closed)}, and {kept_bytes}"
            )
            yield Fault("I9", "records", what)
