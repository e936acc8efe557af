"""Why of whoever holds: leases, and the clients that they belong to."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from kvd.core.cache.lease_state import LeaseStage
from kvd.core.inspect import why_beside
from kvd.core.inspect.answer import MAX_LINKS, Explanation, lease_refs, links_of
from kvd.core.inspect.snapshot import lease_state
from kvd.core.inspect.words import death_of, lease_word
from kvd.core.leases.owners import describe_holder, owner_of
from kvd.errors import Code, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.core.cache.lease import Lease
    from kvd.core.handoff.parts import ReceivePart, SendPart
    from kvd.core.node import Node


def of_lease(node: Node, number: int) -> Explanation | Refusal:
    """What it holds and locks, for whom, and what it waits for."""
    lease = node.leases.leases.get(number)
    if lease is None:
        return Refusal(Code.BAD_REQUEST, f"there is no lease {number}: released, or never was")
    state = lease_state(node, lease)
    said = [f"holders: {', '.join(state.holders) or 'none'}"]
    said += [
        f"of {one.component}: {one.held_pages} pages held, {one.mapped_pages} in its row"
        for one in state.beside
    ]
    said += why_beside.said_of_lease(node, lease)
    if lease.quarantine:
        said.append(f"in quarantine for {state.quarantined_s:.1f} s, because {state.because}")
    if lease.state not in {LeaseStage.RUNNING, LeaseStage.FORMER}:
        since = f" for {state.retracted_s:.1f} s" if state.retracted_s else ""
        said.append(
            f"{state.state}{since}: {state.saved_pages} pages ({state.saved_bytes} bytes) of "
            f"{state.prompt_tokens} tokens saved"
        )
    if state.waiting_for:
        said.append(f"waits for {state.waiting_for}")
    parts = list(_parts_of(node, lease))
    refs = [f"client:{lease.session}"] if lease.session else []
    if lease.anchor is not None and lease.anchor.parent is not None:
        refs.append(f"node:{lease.anchor.id}")
    refs += [ref for ref, _ in parts]
    if lease.room:
        refs.append(f"room:{lease.room}")
    peers = [part.peer for _, part in parts]
    peers += [writer.peer for writer in lease.quarantine.writers] if lease.quarantine else []
    refs += [f"peer:{name}" for name in peers if name]
    return Explanation(
        sentence=f"{describe_holder(node, lease)}: {state.state}, {state.held_pages} pages held, "
        f"{state.quarantined_pages} in quarantine, prefix of {state.prefix_tokens} tokens locked",
        facts=tuple(said),
        links=links_of(*refs),
        marks=tuple(mark for _, part in parts for mark in part.story.marks(node.out.at_s)),
    )


def _parts_of(node: Node, lease: Lease) -> Iterator[tuple[str, ReceivePart | SendPart]]:
    """The handoffs that fill it, have filled it, or read it, as links."""
    decoder, prefiller = node.decoder, node.prefiller
    for receive in decoder.known():
        if receive.lease is lease:
            yield f"receive:{receive.id}", receive
    for send in prefiller.rooms.live():
        if send.engine is not None and send.engine.lease is lease:
            yield f"send:{send.id}", send


def of_client(node: Node, number: int) -> Explanation | Refusal:
    """Who it is and what it holds; one that is gone may have left leases behind."""
    session = node.sessions.by_id.get(number)
    leases = [one for one in node.leases.leases.values() if one.session == number]
    if session is None and not leases:
        return Refusal(Code.BAD_REQUEST, f"there is no client {number}: gone, or never was")
    receives = [part for part in node.decoder.parts.values() if part.session == number]
    sends = [part for part in node.prefiller.rooms.live() if part.session == number]
    biggest = heapq.nlargest(MAX_LINKS, leases, key=lambda one: one.held_pages)
    pages = sum(one.held_pages for one in leases)
    has = (
        f"{len(leases)} leases with {pages} pages of their own, {len(receives)} receives and "
        f"{len(sends)} sends under way"
    )
    if session is None:
        sentence = f"client {number} is gone and has left {has}"
    elif session.hang_up is not None:
        for_s = node.out.at_s - session.hang_up.since_s
        sentence = (
            f"client {number} is {session.name}, hung up on for {for_s:.1f} s "
            f"({session.hang_up.why.code.value}): {has}"
        )
    elif session.is_former:
        pids = ", ".join(map(str, session.pids))
        age_s = node.out.at_s - session.since_s
        sentence = (
            f"client {number} is {session.name} (pid {pids}) of before the restart, and has not "
            f"come back for {age_s:.1f} s: {has}"
        )
    else:
        pids = ", ".join(map(str, session.pids))
        age_s = node.out.at_s - session.since_s
        name, _ = owner_of(node, number)
        sentence = f"client {number} is {name} (pid {pids}), attached for {age_s:.1f} s: {has}"
    waiting = [one for one in node.admission.queue if one.claim.session == number]
    facts = [_lease_fact(node, one) for one in biggest]
    if session is not None and session.hang_up is not None:
        facts.insert(0, f"waits for {death_of(session)}")
    if len(leases) > len(biggest):
        facts.append(f"and {len(leases) - len(biggest)} leases more")
    if waiting:
        oldest_s = node.out.at_s - min(one.since_s for one in waiting)
        facts.append(f"{len(waiting)} requests of it wait for room, the first for {oldest_s:.1f} s")
    under_way = [f"receive:{one.id}" for one in receives] + [f"send:{one.id}" for one in sends]
    return Explanation(
        sentence, tuple(facts), links_of(*lease_refs(biggest), *under_way[:MAX_LINKS])
    )


def _lease_fact(node: Node, lease: Lease) -> str:
    n_locked = lease.anchor.end_tokens if lease.anchor is not None else 0
    locked = f", locks {n_locked} cached tokens" if n_locked else ""
    said = describe_holder(node, lease)
    return f"{said}: {lease_word(lease)}, {lease.held_pages} pages{locked}"
