"""The rows of the tables that are no objects of the node themselves: what is found for each once.

A lease is its own row. A handoff has two kinds of parts, a peer may be one that only we dial, and
what a session or a pool has is counted over all leases in one look. What only consoles know, as
who of a session's processes lives, they write into their rows; elsewhere it stays as it is here.

What must not live here: what a field says of a row (``schema``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvd.core.inspect.page_states import pools_of
from kvd.core.leases.owners import owner_of
from kvd.core.leases.session_table import Session
from kvd.types import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.radix import RadixTree
    from kvd.core.components.component_pages import ComponentPages
    from kvd.core.handoff.parts import ReceivePart, SendPart
    from kvd.core.inspect.page_states import PoolPlaces
    from kvd.core.inspect.view import NodeView
    from kvd.core.layout.spec import Component
    from kvd.core.leases.admission import Waiter
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.peers.peer import Peer
    from kvd.wire.console import Holder
    from kvd.wire.events import HandoffEnded


@dataclass(slots=True, eq=False, kw_only=True)
class HandoffRow:
    """One part on this node, of either side, or how one has ended."""

    record: ReceivePart | SendPart | HandoffEnded
    side: str
    part: int
    state: str
    decode_prefix_len: int
    total_bytes: int | None
    """None: nobody knows any more how much it would have been."""
    since_s: float
    until_s: float | None = None
    session: int = 0
    lease: LeaseRecord | None = None
    written_tokens: int | None = None
    posted_pages: int | None = None
    posts: int | None = None
    """Only who sends knows what is computed, and given to the transfer process."""
    ended_s: float | None = None
    moved_s: float | None = None
    """Consoles know."""

    @property
    def ref(self) -> str:
        """What to open for it."""
        return f"{'receive' if self.side == 'decode' else 'send'}:{self.part}"

    @property
    def delta_tokens(self) -> int:
        """What is not cached on the decode side."""
        return self.record.prompt_tokens - self.decode_prefix_len


def receive_row(table: LeaseTable, part: ReceivePart) -> HandoffRow:
    """One part of the decode side."""
    return HandoffRow(
        record=part,
        side="decode",
        part=part.id,
        state=part.state.value,
        decode_prefix_len=part.prefix_tokens,
        total_bytes=part.total_bytes or table.bytes_of(part.prompt_tokens - part.prefix_tokens),
        since_s=part.since_s,
        until_s=part.deadline_s,
        session=part.session,
        lease=part.lease,
    )


def send_row(table: LeaseTable, part: SendPart) -> HandoffRow:
    """One part of the prefill side."""
    return HandoffRow(
        record=part,
        side="prefill",
        part=part.id,
        state=part.state.value,
        decode_prefix_len=part.decode_prefix_len,
        total_bytes=part.total_bytes or table.bytes_of(part.prompt_tokens - part.decode_prefix_len),
        since_s=part.since_s,
        until_s=part.deadline_s,
        session=part.session,
        lease=part.engine.lease if part.engine is not None else None,
        written_tokens=part.cursor_tokens,
        posted_pages=part.posted_pages,
        posts=len(part.outstanding),
    )


@dataclass(slots=True, eq=False)
class PeerRow:
    """One daemon: as it said itself, as we dial it, or both; with what is open with it now."""

    name: str
    peer: Peer | None
    """None: it has not said Hello."""
    address: str
    receives: int = 0
    sends: int = 0
    """Those that wait for its Closed included."""
    live_receives: int = 0
    live_sends: int = 0
    """With the process that it is now."""
    posts: int = 0
    in_bytes: int = 0
    out_bytes: int = 0
    delivered: int = 0
    failed: int = 0
    """Of handoffs that have ended consoles know."""


def peer_rows(node: NodeView) -> dict[str, PeerRow]:
    """Everybody who dialed us or whom we dial, by name; one look at all open parts."""
    peers, prefiller = node.peers, node.prefiller
    dialed = {dialed.name: dialed.address for dialed in peers.dialed.values()}
    found = {
        name: PeerRow(name, peers.by_name.get(name), dialed.get(name, "dialed us"))
        for name in dict.fromkeys([*peers.by_name, *dialed])
    }
    nobody = PeerRow("", None, "")  # of parts whose peer is not known yet, or no more
    for receive in node.decoder.open.parts.values():
        one = found.get(receive.peer, nobody)
        # By name, of every life of it; below by incarnation, of the present one only.
        one.receives += 1
        one.in_bytes += receive.moved_bytes
    for send in prefiller.known():
        one = found.get(send.peer, nobody)
        one.sends += 1
        one.posts += len(send.outstanding)
        one.out_bytes += prefiller.posts.live_bytes(send)
    receives = Counter([part.incarnation for part in node.decoder.open.parts.values()])
    sends = Counter([part.incarnation for part in prefiller.rooms.live()])
    for row in found.values():
        if row.peer is not None:
            row.live_receives = receives[row.peer.incarnation]
            row.live_sends = sends[row.peer.incarnation]
    return found


@dataclass(slots=True, eq=False)
class ClientRow:
    """One session, its leases, and how many handoffs it has open."""

    session: Session
    leases: list[LeaseRecord] = field(default_factory=list)
    receives: int = 0
    sends: int = 0
    calls: int = 0
    alive: list[bool] = field(default_factory=list)
    """Of each of its processes, whether it lives; these two consoles know."""

    @property
    def kind(self) -> str:
        """What the engine is, as it says."""
        return self.session.kind

    @property
    def held_pages(self) -> int:
        """Pages of its own, in quarantine or not."""
        return sum([lease.held_pages for lease in self.leases])


def client_rows(node: NodeView) -> dict[int, ClientRow]:
    """By session, those that are gone and still have leases too; one look at all leases."""
    # Living ones first, also without a lease; the dead ones are only seen by what they have left.
    found = {session.id: ClientRow(session) for session in node.sessions.by_id.values()}
    for lease in node.leases.leases.values():
        one = found.get(lease.session)
        if one is None and not lease.session:
            continue  # the node's own: what may still be read of before a restart
        if one is None:
            gone = Session(lease.session, owner_of(node, lease.session)[0], lease.since_s)
            one = found[lease.session] = ClientRow(gone)
        one.leases.append(lease)
    for receive in node.decoder.open.parts.values():
        if receive.session in found:
            found[receive.session].receives += 1
    for send in node.prefiller.by_send.values():
        if send.session in found:
            found[send.session].sends += 1
    return found


@dataclass(slots=True, eq=False, kw_only=True)
class PoolRow:
    """One component with page ids of its own, and what leases have of it."""

    places: PoolPlaces
    component: Component
    cache: RadixTree | ComponentPages
    """What counts its cached pages."""
    held_pages: int
    quarantined_pages: int
    condemned_pages: int
    waiting: int
    held_by: tuple[Holder, ...] = ()
    """Consoles know."""


def pool_rows(node: NodeView) -> Iterator[PoolRow]:
    """Each of them, the first one first; one look at all leases for each, and at the queue."""
    table = node.leases
    waiting = Counter(waiter.budget for waiter in node.admission.queue if waiter.missing_pages)
    for places in pools_of(table):
        keeper = places.keeper
        held = quarantined = 0
        for lease in table.leases.values():
            pages = lease.held_pages if keeper is None else count(keeper.own_pages(lease))
            if lease.quarantine is None:
                held += pages
            else:
                quarantined += pages
        component = node.settings.spec.components[0] if keeper is None else keeper.component
        yield PoolRow(
            places=places,
            component=component,
            cache=table.tree if keeper is None else keeper,
            held_pages=held,
            quarantined_pages=quarantined,
            condemned_pages=places.nobodys(),
            waiting=waiting[component.name],
        )


@dataclass(slots=True, eq=False)
class WaitingRow:
    """One request in the queue, and how many come before it."""

    waiter: Waiter
    ahead: int
    receive: int
    """The part that it would become; 0 for a lease."""
    held_by: tuple[Holder, ...] | tuple[str, ...] = ()
    """Who has the most of what is short: whoever shows it says it in its own way."""

    @property
    def lacks_pages(self) -> bool:
        """Whether it waits for memory: not for its peer, nor for those before it."""
        return bool(self.waiter.budget) and not self.is_blocked

    @property
    def is_blocked(self) -> bool:
        """Whether it waits for its peer, or for a tier, whatever room there is."""
        return bool(self.blocked_by)

    @property
    def blocked_by(self) -> str:
        """For which of both; empty for none."""
        if self.waiter.blocked() is None:
            return ""
        tier = self.waiter.tier
        return "a peer" if tier is None or tier.blocked() is None else "a tier"


def waiting_rows(node: NodeView) -> Iterator[WaitingRow]:
    """The queue in its order; one look at the receives."""
    queue = node.admission.queue
    if not queue:
        return
    parts = node.decoder.open.parts.values()
    receives = {part.waiter.number: part.id for part in parts if part.waiter is not None}
    ahead = 0
    for waiter in queue:
        yield WaitingRow(waiter, ahead, receives.get(waiter.number, 0))
        # Who waits for a peer lets those behind it pass: it is ahead of nobody.
        ahead += waiter.blocked() is None
