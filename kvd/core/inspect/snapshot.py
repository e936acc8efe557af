"""The node's state as plain data: one snapshot between two steps. Reads everything, only reads.

Leases are made from ``schema``; the queue says of each request which budget it waits for, how much
is missing and who has it; pools say how many pages of each component are in which state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd import __version__
from kvd.core.components.device_buffer import Buffers
from kvd.core.components.windows import WindowPages
from kvd.core.inspect.page_states import component_places, nobodys, places
from kvd.core.inspect.schema import lease_state, mapped_pages
from kvd.core.inspect.words import (
    agent_words,
    layout_words,
    node_word,
    receive_share,
    receive_waits_for,
    send_share,
    send_waits_for,
)
from kvd.core.layout.geometry import shard_places
from kvd.core.layout.spec import (
    companion_factor,
    extent_tokens,
    has_bytes,
    is_companion,
    kind,
    node_page_bytes,
)
from kvd.core.leases.owners import owner_of
from kvd.core.peers.peer import drain_words
from kvd.types import count
from kvd.wire.snapshot import (
    BufferState,
    ClientState,
    CompanionState,
    PeerState,
    PoolState,
    RoomState,
    Snapshot,
    Totals,
    WaitingState,
    WindowState,
)

if TYPE_CHECKING:
    from kvd.core.components.component_pages import ComponentPages
    from kvd.core.handoff.parts import ReceivePart, SendPart
    from kvd.core.inspect.view import NodeView
    from kvd.core.leases.admission import Admission, Waiter
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.leases.sessions import Session
    from kvd.core.peers.peer import Peer
    from kvd.core.peers.registry import Peers
    from kvd.core.settings import Settings


def waiting_states(node: NodeView) -> list[WaitingState]:
    """Every waiter in the order of the queue."""
    holders: dict[str, tuple[str, ...]] = {}
    """By budget: many wait for the same."""
    states = []
    ahead = 0
    for waiter in node.admission.queue:
        if waiter.budget not in holders:
            holders[waiter.budget] = node.owners.of_most_pages(waiter.budget)
        states.append(_state(node, waiter, ahead, holders[waiter.budget]))
        # Who waits for a peer lets those behind it pass: it is ahead of nobody.
        ahead += waiter.asker.blocked() is None
    return states


def _state(node: NodeView, waiter: Waiter, ahead: int, holders: tuple[str, ...]) -> WaitingState:
    return WaitingState(
        kind=kind_of(waiter),
        owner=owner_of(node, waiter.claim.session)[0],
        room=waiter.claim.room,
        priority=waiter.claim.priority,
        waited_s=node.out.at_s - waiter.since_s,
        deadline_in_s=waiter.deadline_s - node.out.at_s,
        needed_pages=waiter.needed_pages,
        why=why_waits(node.admission, waiter, ahead),
        budget=waiter.budget or node.leases.pool.name,
        missing_pages=waiter.missing_pages,
        ahead=ahead,
        overtaken=waiter.overtaken,
        held_by=holders if lacks_pages(waiter) else (),
    )


def lacks_pages(waiter: Waiter) -> bool:
    """Whether it waits for memory: not for its peer, nor for those before it."""
    return bool(waiter.budget) and waiter.asker.blocked() is None


def why_waits(admission: Admission, waiter: Waiter, ahead: int) -> str:
    """For its peer, for pages, or for ``ahead`` others."""
    other = waiter.asker.blocked()
    if other is not None:
        return other
    return admission.shortage(waiter) if waiter.budget else f"its turn: {ahead} before it"


def kind_of(waiter: Waiter) -> str:
    """What was asked for: ``lease``, ``receive`` or ``resume``."""
    if waiter.claim.resumes:
        return "resume"
    return "receive" if waiter.claim.room else "lease"


def snapshot(node: NodeView) -> Snapshot:
    """Everything there is to see, ages computed against the time of the running step."""
    return Snapshot(
        node=node.settings.name,
        incarnation=node.settings.incarnation,
        version=__version__,
        uptime_s=node.out.at_s - node.started_s,
        state=node_word(node),
        transport=node.transport,
        generation=node.peers.generation,
        last_event=node.out.seq,
        pools=pool_states(node),
        leases=tuple(lease_state(node, lease) for lease in node.leases.leases.values()),
        waiting=tuple(waiting_states(node)),
        rooms=tuple(room_states(node)),
        peers=tuple(peer_state(node, peer) for peer in node.peers.by_name.values())
        + tuple(_unanswered_peers(node.peers)),
        clients=tuple(_client_states(node)),
        totals=totals(node),
        recorder=node.recorded.state,
        audit=node.audit.state(),
        drain=node.drainer.state(),
    )


def totals(node: NodeView) -> Totals:
    """Counters since the incarnation began."""
    decoder, prefiller = node.decoder, node.prefiller
    return Totals(
        steps=node.steps,
        events=node.out.seq,
        leases_opened=node.leases.opened,
        leases_released=node.leases.released,
        handoffs_delivered=decoder.delivered + prefiller.settled_sends.delivered,
        handoffs_failed=decoder.failed + prefiller.settled_sends.failed,
        sent_bytes=prefiller.posts.sent_bytes,
        received_bytes=decoder.received_bytes,
        saved_bytes=decoder.saved_bytes,
        evicted_pages=node.leases.evicted_pages,
        messages_refused=node.refused,
        violations=node.audit.violations,
        leases_retracted=node.retractor.retracted,
        leases_resumed=node.retractor.resumed,
        restored_bytes=node.retractor.restored_bytes,
        spared_bytes=node.retractor.spared_bytes,
    )


def room_states(node: NodeView) -> list[RoomState]:
    """Every part that is not over, both sides; delivered ones until their lease is released."""
    decoder, prefiller = node.decoder, node.prefiller
    prefill = prefiller.known()
    return [decode_room(node, part) for part in decoder.known()] + [
        prefill_room(node, part) for part in prefill
    ]


def decode_room(node: NodeView, part: ReceivePart) -> RoomState:
    """One part of the decode side."""
    table = node.leases
    delta_tokens = part.prompt_tokens - part.prefix_tokens
    return RoomState(
        side="decode",
        part=part.id,
        handoff=part.handoff,
        room=part.room,
        state=part.state.value,
        peer=part.peer,
        incarnation=part.incarnation,
        owner=owner_of(node, part.session)[0],
        lease=part.lease.id if part.lease else 0,
        prompt_tokens=part.prompt_tokens,
        decode_prefix_len=part.prefix_tokens,
        written_tokens=0,
        posted_pages=0,
        total_pages=table.pages_for(delta_tokens),
        moved_bytes=part.moved_bytes,
        total_bytes=part.total_bytes or table.bytes_of(delta_tokens),
        outstanding_posts=0,
        age_s=node.out.at_s - part.since_s,
        deadline_in_s=part.deadline_s - node.out.at_s,
        waiting_for=receive_waits_for(node.decoder, part),
        story=part.history.lines(node.out.at_s),
        share=receive_share(node.settings, part),
    )


def prefill_room(node: NodeView, part: SendPart) -> RoomState:
    """One part of the prefill side."""
    table = node.leases
    delta_tokens = part.prompt_tokens - part.decode_prefix_len
    return RoomState(
        side="prefill",
        part=part.id,
        handoff=part.handoff,
        room=part.room,
        state=part.state.value,
        peer=part.peer,
        incarnation=part.incarnation,
        owner=owner_of(node, part.session)[0] if part.session else "",
        lease=part.engine.lease.id if part.engine else 0,
        prompt_tokens=part.prompt_tokens,
        decode_prefix_len=part.decode_prefix_len,
        written_tokens=part.cursor_tokens,
        posted_pages=part.posted_pages,
        total_pages=table.pages_for(delta_tokens),
        moved_bytes=part.moved_bytes,
        total_bytes=part.total_bytes or table.bytes_of(delta_tokens),
        outstanding_posts=len(part.outstanding),
        age_s=node.out.at_s - part.since_s,
        deadline_in_s=part.deadline_s - node.out.at_s,
        waiting_for=send_waits_for(part),
        story=part.history.lines(node.out.at_s),
        share=send_share(node.prefiller, part),
    )


def peer_state(node: NodeView, peer: Peer) -> PeerState:
    """One other daemon."""
    receives = [p for p in node.decoder.parts.values() if p.incarnation == peer.incarnation]
    sends = [p for p in node.prefiller.rooms.live() if p.incarnation == peer.incarnation]
    dialed = next((one for one in node.peers.dialed.values() if one.name == peer.name), None)
    return PeerState(
        name=peer.name,
        address=dialed.address if dialed else "dialed us",
        state=peer.life.value,
        incarnation=peer.incarnation,
        generation=peer.generation,
        agent=agent_words(peer),
        silent_s=node.out.at_s - peer.heard_s,
        round_trip_ms=peer.round_trip_s * 1e3,
        layout=layout_words(peer),
        open_receives=len(receives),
        open_sends=len(sends),
        trouble=node.peers.trouble(peer.name),
        drain=drain_words(peer, node.out.at_s),
    )


def _unanswered_peers(peers: Peers) -> list[PeerState]:
    return [
        PeerState(
            name=dialed.name,
            address=dialed.address,
            state="silent",
            incarnation="",
            generation=0,
            agent="none",
            silent_s=0.0,
            round_trip_ms=0.0,
            layout="unknown",
            open_receives=0,
            open_sends=0,
            trouble=peers.trouble(dialed.name),
        )
        for dialed in peers.dialed.values()
        if dialed.name not in peers.by_name
    ]


def _client_states(node: NodeView) -> list[ClientState]:
    out = []
    for session in node.sessions.by_id.values():
        leases = [one for one in node.leases.leases.values() if one.session == session.id]
        out.append(
            ClientState(
                session=session.id,
                name=session.name,
                pids=tuple(session.pids),
                age_s=node.out.at_s - session.since_s,
                leases=len(leases),
                held_pages=sum(one.held_pages for one in leases),
                receives=sum(p.session == session.id for p in node.decoder.parts.values()),
                sends=sum(p.session == session.id for p in node.prefiller.by_send.values()),
                state=_session_word(session),
                former_leases=len(node.former_leases.of_session(session.id)),
                why=session.hang_up.why.message if session.hang_up is not None else "",
            )
        )
    return out


def _session_word(session: Session) -> str:
    if session.hang_up is not None:
        return "hung-up-on"
    return "awaited" if session.is_former else "attached"


def pool_states(node: NodeView) -> tuple[PoolState, ...]:
    """Each component with page ids of its own, the first one first (I1)."""
    return (_first(node), *(_beside(node, keeper) for keeper in node.leases.components.each))


def _first(node: NodeView) -> PoolState:
    table, spec = node.leases, node.settings.spec
    first = spec.components[0]
    held = quarantined = 0
    for lease in table.leases.values():
        if lease.quarantine is None:
            held += lease.held_pages
        else:
            quarantined += lease.held_pages
    return PoolState(
        pool=spec.name,
        component=table.pool.name,
        page_size=table.page_size,
        page_bytes=node_page_bytes(spec, first) if has_bytes(first) else 0,
        total_pages=table.pool.total_pages,
        free_pages=table.pool.free_pages,
        held_pages=held,
        cached_pages=table.tree.cached_pages,
        quarantined_pages=quarantined,
        evictable_pages=table.tree.evictable_pages,
        locked_pages=table.tree.protected_pages,
        saved_pages=table.saved.used_pages(first.name),
        saved_capacity_pages=table.saved.capacity_pages(first.name),
        placeholder_bytes=0 if has_bytes(first) else node_page_bytes(spec, first),
        tier=kind(first.tier),
        extent=kind(first.extent),
        companions=_companions(node.settings),
        shards=shard_places(spec),
        condemned_pages=nobodys(places(node.leases), table.pool),
    )


def _companions(settings: Settings) -> tuple[CompanionState, ...]:
    spec = settings.spec
    return tuple(
        CompanionState(
            component=one.name,
            page_size=one.page_size,
            page_bytes=node_page_bytes(spec, one),
            pages_each=companion_factor(spec, one),
            total_pages=pages,
            tier=kind(one.tier),
        )
        for one, pages in zip(spec.components, spec.pages, strict=True)
        if is_companion(spec, one)
    )


def _beside(node: NodeView, keeper: ComponentPages) -> PoolState:
    held = quarantined = 0
    for lease in node.leases.leases.values():
        if lease.quarantine is None:
            held += count(keeper.own_pages(lease))
        else:
            quarantined += count(keeper.own_pages(lease))
    component, cached = keeper.component, keeper.cached_pages
    return PoolState(
        pool=node.settings.spec.name,
        component=component.name,
        page_size=component.page_size,
        page_bytes=node_page_bytes(node.settings.spec, component),
        total_pages=keeper.pool.total_pages,
        free_pages=keeper.pool.free_pages,
        held_pages=held,
        cached_pages=cached,
        quarantined_pages=quarantined,
        evictable_pages=keeper.evictable_pages,
        locked_pages=cached - keeper.evictable_pages,
        condemned_pages=nobodys(component_places(node.leases, keeper), keeper.pool),
        saved_pages=node.leases.saved.used_pages(component.name),
        saved_capacity_pages=node.leases.saved.capacity_pages(component.name),
        tier=kind(component.tier),
        extent=kind(component.extent),
        window=_window(node.leases, keeper),
        buffer=_buffer(keeper),
    )


def _window(table: LeaseTable, keeper: ComponentPages) -> WindowState | None:
    if not isinstance(keeper, WindowPages):
        return None
    running = [one for one in table.leases.values() if one.quarantine is None]
    return WindowState(
        window_tokens=extent_tokens(keeper.component),
        mapped_pages=sum(mapped_pages(keeper.page_table(lease)) for lease in running),
        full_pages=sum(count(lease.page_table) for lease in running),
        slides=keeper.slides,
    )


def _buffer(keeper: ComponentPages) -> BufferState | None:
    if not isinstance(keeper, Buffers):
        return None
    return BufferState(
        request_tokens=extent_tokens(keeper.component),
        hits=keeper.hits,
        misses=keeper.misses,
        copied_bytes=keeper.copied_bytes,
    )
