"""The source of a pull: it is asked what it has cached of a prompt, locks that, and sends it.

No engine of this node takes part: the daemon opens the room, for the peer that asked alone. What
was said to an ask is remembered (``PullTickets``), because the ask may come again.

What must not live here: the asking side (``pull``), what a send does (``send``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import Claim, Shortage
from kvd.core.cache.namespaces import name_in
from kvd.core.handoff.offer import prompt_digest
from kvd.core.handoff.parts import SendingEngine
from kvd.core.handoff.protocol import Prefill
from kvd.core.handoff.pull import NO_ROOM, unfit
from kvd.core.handoff.refusals import reader_restarted, reader_silent
from kvd.core.settings import CacheMode
from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, MAX_ROOM, Tokens, count
from kvd.wire.codec import check_tokens
from kvd.wire.peer import AskPrefix, PrefixFound

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.handoff.parts import SendPart
    from kvd.core.handoff.send import Prefiller
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.outbox import Outbox
    from kvd.core.peers.peer import Peer
    from kvd.core.peers.registry import Peers
    from kvd.core.settings import Settings

P = Prefill

PULLER: Final = "pull"
"""Who holds the lease of a source until its send does."""

MOST_PROMPTS = 4
"""The open pulls of one peer have no more tokens than so many of the longest prompts."""

MOST_TICKETS = 1024
"""Of one peer at a time: answers that are remembered, of which few have a room."""


@mypyc_attr(allow_interpreted_subclasses=True)
class PullTicket:
    """What a peer was told of one ask, and the send that it got; none where there is nothing."""

    __slots__ = ("answer", "incarnation", "part", "until_s")

    def __init__(
        self, answer: PrefixFound, incarnation: str, part: SendPart | None, until_s: float = 0.0
    ) -> None:
        self.answer = answer
        self.incarnation = incarnation
        self.part = part
        self.until_s = until_s
        """When the receive is over at the latest, as was said first."""

    @property
    def is_open(self) -> bool:
        """Whether pages are locked for it: it waits for its Offer, or is being sent."""
        return self.part is not None and self.part.engine is not None

    @property
    def is_void(self) -> bool:
        """Whether its room is over and no Offer has come: an ask that comes again is a new one."""
        return self.part is not None and self.part.state is P.FORGOTTEN


@mypyc_attr(allow_interpreted_subclasses=True)
class PullTickets:
    """The asks of other nodes that were answered, for as long as they may be repeated."""

    def __init__(self) -> None:
        self.by_incarnation: dict[str, dict[int, PullTicket]] = {}

    def find(self, incarnation: str, ask: int) -> PullTicket | None:
        """What was said to it, if it is remembered and still true."""
        ticket = self.by_incarnation.get(incarnation, {}).get(ask)
        return None if ticket is None or ticket.is_void else ticket

    def add(self, ticket: PullTicket) -> None:
        """Remember it; the oldest that has no lock is forgotten first."""
        tickets = self.by_incarnation.setdefault(ticket.incarnation, {})
        tickets[ticket.answer.ask] = ticket
        if len(tickets) > MOST_TICKETS:
            # There is one: a peer has fewer pulls open than so many tickets.
            del tickets[next(ask for ask, ticket in tickets.items() if not ticket.is_open)]

    def forget_peer(self, incarnation: str) -> None:
        """That process is over."""
        self.by_incarnation.pop(incarnation, None)


@mypyc_attr(allow_interpreted_subclasses=True)
class PullSource:
    """What is pulled from this node, and how much of it at a time.

    What a pull locks is bounded: so many pulls, and so many pages, of one peer and of all. A lock
    ends with its Offer's handoff, with its peer, or ``pull_offer_s`` after the last time that it
    was asked for where no Offer has come, and until that comes it gives way to engines of this
    node. Asking again prolongs it to the deadline that was said first, and no further.
    """

    def __init__(
        self, settings: Settings, leases: LeaseTable, sends: Prefiller, out: Outbox
    ) -> None:
        self.tickets = PullTickets()
        self._open: list[PullTicket] = []
        """Those with a lock, and some whose lock is over."""
        self._settings = settings
        self._leases = leases
        self._sends = sends
        self._out = out
        self._last_room = MAX_ROOM

    def open_pulls(self) -> list[PullTicket]:
        """Those that lock pages now, oldest first."""
        self._open = [ticket for ticket in self._open if ticket.is_open]
        return self._open

    def prefix_asked(self, peer: Peer, message: AskPrefix, not_serving: Refusal | None) -> None:
        """What is cached here of a prompt, and a room in which it is sent; or why it is not."""
        ticket = self.tickets.find(peer.incarnation, message.ask)
        if ticket is None:
            found = not_serving or self._unpulled(message) or self._open_pull(peer, message)
            if isinstance(found, Refusal):
                answer = self._prefix(peer, message.ask, refusal=found)
                found = PullTicket(answer, peer.incarnation, None)
            self.tickets.add(ticket := found)
        else:
            self._keep_on(ticket)
        self._out.send(peer.link, ticket.answer)

    def _keep_on(self, ticket: PullTicket) -> None:
        """Its puller waits for memory, and lives: it says so by asking again."""
        part = ticket.part
        if part is not None and part.state is P.AWAIT_OFFER:
            longer_s = self._out.at_s + self._settings.pull_offer_s
            part.deadline_s = max(part.deadline_s, min(longer_s, ticket.until_s))

    def _unpulled(self, message: AskPrefix) -> Refusal | None:
        """Why nothing is looked up for it."""
        side = self._settings.name
        if self._settings.cache_mode is not CacheMode.RADIX:
            why = f'cache.mode of {side} is "{self._settings.cache_mode.value}": nothing is cached'
            return Refusal(Code.NOT_SUPPORTED, why, side=side)
        tokens = check_tokens(message.tokens, max_tokens=self._settings.max_prompt_tokens)
        return tokens if isinstance(tokens, Refusal) else unfit(self._leases, side)

    def _open_pull(self, peer: Peer, message: AskPrefix) -> PullTicket | Refusal:
        """Lock what is cached, and send it from the daemon itself: no engine takes part."""
        tokens = Tokens(message.tokens)
        n_tokens = self._leases.tree.probe(tokens, message.namespace)
        if n_tokens <= message.have_tokens:
            answer = self._prefix(peer, message.ask, n_tokens=n_tokens)
            return PullTicket(answer, peer.incarnation, None)
        refusal = self._too_many(peer, n_tokens)
        if refusal is not None:
            return refusal
        tokens = Tokens(tokens[: n_tokens * ID_BYTES])
        lease = self._lock(peer, tokens, message.namespace)
        if isinstance(lease, Refusal):
            return lease
        part = self._sends.new_part(lease.room, P.AWAIT_OFFER)
        self._sends.rooms.add_part(part)
        part.history.add_line(self._out.at_s, f"opened by a pull of {peer.name}")
        part.awaited.destination = peer.name
        digest = prompt_digest(tokens, message.namespace)
        part.engine = SendingEngine(session=0, lease=lease, tokens=tokens, digest=digest)
        part.prompt_tokens = part.cursor_tokens = n_tokens
        wait_s = min(message.deadline_s, self._settings.pull_offer_s)
        part.deadline_s = self._sends.deadline_of(wait_s)
        part.is_numbered, part.aux = False, b""
        holder = f"send {part.id}"
        self._leases.hold_for_send(lease, holder, n_tokens)
        self._leases.release(lease, PULLER, "pull")
        self._leases.let_give_way(lease, holder)
        answer = self._prefix(peer, message.ask, room=lease.room, n_tokens=n_tokens)
        until_s = self._sends.deadline_of(message.deadline_s)
        ticket = PullTicket(answer, peer.incarnation, part, until_s)
        self._open.append(ticket)
        return ticket

    def _too_many(self, peer: Peer, n_tokens: int) -> Refusal | None:
        """Why no further pull is opened."""
        opened, mine = self.open_pulls(), self._settings
        own = [ticket for ticket in opened if ticket.incarnation == peer.incarnation]
        # Each keeps its tokens here.
        kept = sum([ticket.part.prompt_tokens for ticket in own if ticket.part is not None])
        most = MOST_PROMPTS * mine.max_prompt_tokens
        if kept + n_tokens > most:
            return Refusal(
                Code.NO_ROOM,
                f"pulls of {peer.name} have {kept} tokens open at {mine.name}, {n_tokens} more "
                f"are above the limit of {most}: compute it, or ask again when one of them is over",
                side=mine.name,
                numbers={"tokens": kept + n_tokens, "limit": most, "open": len(own)},
            )
        for n_open, limit, whose in (
            (len(own), mine.max_peer_pulls, peer.name),
            (len(opened), mine.max_pulls, "all peers"),
        ):
            if n_open >= limit:
                return Refusal(
                    Code.NO_ROOM,
                    f"{n_open} pulls of {whose} are open at {mine.name}, the limit is {limit}: "
                    "compute it, or ask again when one of them is over",
                    side=mine.name,
                    numbers={"open": n_open, "limit": limit},
                )
        return None

    def _lock(self, peer: Peer, tokens: Tokens, namespace: str) -> LeaseRecord | Refusal:
        """A lease of these cached tokens, if no more than its share is locked with it."""
        claim = Claim(
            session=0,
            call=0,
            reason=f"pull of {peer.name}",
            room=self._pull_room(),
            namespace=namespace,
            tokens=tokens,
            reserve_tokens=0,
            priority=0,
            cache=True,
            holder=PULLER,
        )
        evictable_pages = self._leases.tree.evictable_pages
        lease = self._leases.open_prefix(claim)
        if isinstance(lease, Shortage):  # of what is cached, where it is promised to a lease
            why = f"{lease.missing_pages} pages of {lease.budget} are short"
            return Refusal(Code.NO_ROOM, why, side=self._settings.name)
        # What is locked by others already is locked by this one at no cost: so are prefixes that
        # many peers pull at once.
        if self._leases.tree.evictable_pages == evictable_pages:
            return lease
        refusal = self._too_large(peer, lease)
        if refusal is not None:
            self._leases.release(lease, PULLER, refusal.code.value)
            return refusal
        return lease

    def _too_large(self, peer: Peer, lease: LeaseRecord) -> Refusal | None:
        """Why pulls would lock too much with this lease; where nothing else is open it may."""
        mine, pages = self._settings, self._leases.capacity_pages
        opened = self.open_pulls()
        own = [ticket for ticket in opened if ticket.incarnation == peer.incarnation]
        for others, share, whose in (
            (own, mine.peer_pull_share, peer.name),
            (opened, mine.pull_share, "all peers"),
        ):
            leases = [
                ticket.part.engine.lease for ticket in others if ticket.part and ticket.part.engine
            ]
            locked = locked_pages([*leases, lease])
            limit = int(share * pages)
            if others and locked > limit:
                return Refusal(
                    Code.NO_ROOM,
                    f"pulls of {whose} would lock {locked} of {pages} pages of {mine.name}, the "
                    f"limit is {limit}: compute it, or ask again when one of them is over",
                    side=mine.name,
                    numbers={"locked_pages": locked, "limit": limit, "open": len(others)},
                )
        return None

    def _prefix(
        self,
        peer: Peer,
        ask: int,
        *,
        room: int = NO_ROOM,
        n_tokens: int = 0,
        refusal: Refusal | None = None,
    ) -> PrefixFound:
        return PrefixFound(
            source=self._settings.incarnation,
            target=peer.incarnation,
            ask=ask,
            room=room,
            n_tokens=n_tokens,
            refusal=refusal,
        )

    def _pull_room(self) -> int:
        """A room that nobody has: from the top, where routers draw one in 2**63."""
        while True:
            self._last_room -= 1
            if self._last_room not in self._sends.rooms.by_room:
                return self._last_room

    def outlived(self, incarnation: str) -> None:
        """The puller's daemon restarted."""
        self._end_pulls(incarnation, reader_restarted(incarnation, self._settings))

    def peer_lost(self, peer: Peer) -> None:
        """The puller is silent."""
        refusal = reader_silent(peer, self._out.at_s, self._settings)
        self._end_pulls(peer.incarnation, refusal)

    def end_unreadable(self, peers: Peers) -> None:
        """What a peer may pull has changed: what it may not any more is not sent to its end."""
        for ticket in self.open_pulls():
            part = ticket.part
            if part is None or part.engine is None:
                continue
            namespace = name_in(part.engine.lease.namespace)
            refusal = peers.not_to_read(part.awaited.destination, namespace)
            if refusal is not None:
                self._sends.give_up_send(part, refusal)

    def _end_pulls(self, incarnation: str, refusal: Refusal) -> None:
        """A peer that has not offered pages for what it pulls will not."""
        for ticket in self.open_pulls():
            part = ticket.part
            is_its = part is not None and ticket.incarnation == incarnation
            if is_its and part is not None and part.state is P.AWAIT_OFFER:
                self._sends.give_up_send(part, refusal)
        self.tickets.forget_peer(incarnation)


def locked_pages(leases: list[LeaseRecord]) -> int:
    """Pages of the tree that these lock together, each counted once."""
    seen, n_pages = set(), 0
    for lease in leases:
        step = lease.anchor
        while step is not None and step.parent is not None and step.id not in seen:
            seen.add(step.id)
            n_pages += count(step.pages)
            step = step.parent
    return n_pages
