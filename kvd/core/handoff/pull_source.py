"""The source of a pull: it is asked what it has cached of a prompt, locks that, and sends it.

No engine of this node takes part: the daemon opens the room, for the peer that asked alone. What
was said to an ask is remembered (``PullTickets``), because the ask may come again.

What a tier here is known to have behind that is read first, as for a lease: the pull waits for it
beside the queue, holds nothing meanwhile, and goes on with what there is when that wait is over.

What must not live here: the asking side (``pull``), what a send does (``send``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import Claim, Shortage
from kvd.core.cache.namespaces import name_in
from kvd.core.handoff.offer import prompt_digest
from kvd.core.handoff.parts import SendingEngine
from kvd.core.handoff.protocol import Prefill
from kvd.core.handoff.pull import NO_ROOM, PULLER, unfit
from kvd.core.handoff.refusals import reader_restarted, reader_silent
from kvd.core.leases.admission import Admission, MemoryAsker, Waiter
from kvd.core.peers.peer import Life
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
    from kvd.core.tiers.promotion import Promotions

P = Prefill

MOST_PROMPTS = 4
"""The open pulls of one peer have no more tokens than so many of the longest prompts."""

MOST_TICKETS = 1024
"""Of one peer at a time: answers that are remembered, of which few have a room."""

MOST_WAITING = 64
"""Pulls of all peers that wait for a tier; they stand in the queue that engines wait in too."""


@mypyc_attr(allow_interpreted_subclasses=True)
class PullTicket:
    """What a peer was told of one ask, and the send that it got; none where there is nothing."""

    __slots__ = ("answer", "ask", "incarnation", "part", "peer", "until_s", "waiter")

    def __init__(self, peer: Peer, ask: int, until_s: float = 0.0) -> None:
        self.peer = peer
        self.ask = ask
        self.incarnation = peer.incarnation
        self.until_s = until_s
        """When the receive is over at the latest, as was said first."""
        self.answer: PrefixFound | None = None
        """None: it waits for a tier."""
        self.part: SendPart | None = None
        self.waiter: Waiter | None = None

    @property
    def is_open(self) -> bool:
        """Whether it has a place here: it waits for a tier or its Offer, or is being sent."""
        is_sent = self.part is not None and self.part.engine is not None
        return is_sent or self.waiter is not None

    @property
    def n_tokens(self) -> int:
        """Of its prompt, what is kept for it."""
        if self.waiter is not None:
            return count(self.waiter.claim.tokens)
        return 0 if self.part is None else self.part.prompt_tokens

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
        tickets[ticket.ask] = ticket
        if len(tickets) > MOST_TICKETS:
            # There is one: a peer has fewer pulls open than so many tickets.
            del tickets[next(ask for ask, ticket in tickets.items() if not ticket.is_open)]

    def forget_peer(self, incarnation: str) -> None:
        """That process is over."""
        self.by_incarnation.pop(incarnation, None)


@mypyc_attr(allow_interpreted_subclasses=True)
class SourceAsker(MemoryAsker):
    """A pull at its source while it waits for a tier."""

    __slots__ = ("_have_tokens", "_source", "_ticket")

    def __init__(self, source: PullSource, ticket: PullTicket, have_tokens: int) -> None:
        self._source = source
        self._ticket = ticket
        self._have_tokens = have_tokens

    def admitted(self, lease: LeaseRecord) -> None:
        """What is cached by now is locked."""
        self._source.tier_waited(self._ticket, lease, self._have_tokens)

    def refused(self, refusal: Refusal) -> None:
        """Its time is over, or this node gives nothing any more."""
        self._source.refuse(self._ticket, refusal)


@mypyc_attr(allow_interpreted_subclasses=True)
class PullSource:
    """What is pulled from this node, and how much of it at a time.

    What a pull locks is bounded: so many pulls, and so many pages, of one peer and of all. A lock
    ends with its Offer's handoff, with its peer, or ``pull_offer_s`` after the last time that it
    was asked for where no Offer has come, and until that comes it gives way to engines of this
    node. Asking again prolongs it to the deadline that was said first, and no further.
    """

    def __init__(
        self,
        settings: Settings,
        leases: LeaseTable,
        admission: Admission,
        promotions: Promotions,
        sends: Prefiller,
        out: Outbox,
    ) -> None:
        self.tickets = PullTickets()
        self._open: list[PullTicket] = []
        """Those with a place, and some that have left it."""
        self._settings = settings
        self._leases = leases
        self._admission = admission
        self._promotions = promotions
        self._sends = sends
        self._out = out
        self._last_room = MAX_ROOM

    def open_pulls(self) -> list[PullTicket]:
        """Those that lock pages now or wait for a tier, oldest first."""
        self._open = [ticket for ticket in self._open if ticket.is_open]
        return self._open

    def puller_of(self, waiter: Waiter) -> str:
        """The peer whose pull waits so for a tier; empty: it is none."""
        names = [ticket.peer.name for ticket in self._open if ticket.waiter is waiter]
        return names[0] if names else ""

    def prefix_asked(self, peer: Peer, message: AskPrefix, not_serving: Refusal | None) -> None:
        """What is cached here of a prompt, and a room in which it is sent; or why it is not."""
        ticket = self.tickets.find(peer.incarnation, message.ask)
        if ticket is None:
            until_s = self._sends.deadline_of(message.deadline_s)
            ticket = PullTicket(peer, message.ask, until_s)
            refusal = not_serving or self._unpulled(message) or self._open_pull(ticket, message)
            if refusal is not None:
                ticket.answer = self._prefix(ticket, refusal=refusal)
            self.tickets.add(ticket)
        else:
            self._keep_on(ticket)
        if ticket.answer is not None:
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

    def _open_pull(self, ticket: PullTicket, message: AskPrefix) -> Refusal | None:
        """Lock what is cached and send it, now or when a tier has been read; or why not."""
        peer, tokens = ticket.peer, Tokens(message.tokens)
        n_tokens = self._leases.tree.probe(tokens, message.namespace)
        if self._wait_for_tier(ticket, message, n_tokens):
            return None
        if n_tokens <= message.have_tokens:
            ticket.answer = self._prefix(ticket, n_tokens=n_tokens)
            return None
        refusal = self._too_many(peer, n_tokens)
        if refusal is not None:
            return refusal
        tokens = Tokens(tokens[: n_tokens * ID_BYTES])
        lease = self._lock(peer, tokens, message.namespace)
        if isinstance(lease, Refusal):
            return lease
        self._send_cached(ticket, lease)
        return None

    def _wait_for_tier(self, ticket: PullTicket, message: AskPrefix, cached_tokens: int) -> bool:
        """Whether it waits for what a tier is known to have, and neither side has in its pool."""
        tokens, namespace = Tokens(message.tokens), message.namespace
        found = self._promotions.look(tokens, namespace, cached_tokens)
        here_tokens = max(cached_tokens, message.have_tokens)
        if found is None or self._promotions.end_tokens(found) <= here_tokens:
            return False
        n_waiting = sum([other.waiter is not None for other in self.open_pulls()])
        # With as many tokens as it may come to: it is not asked again when the wait is over.
        if n_waiting >= MOST_WAITING or self._too_many(ticket.peer, count(tokens)) is not None:
            return False
        claim = self._claim(ticket.peer, tokens, namespace, NO_ROOM)
        waited = self._promotions.wait_on(claim, found, ticket.until_s)
        if waited is None:
            return False
        asker = SourceAsker(self, ticket, message.have_tokens)
        ticket.waiter = Waiter(claim, ticket.until_s, asker, waited)
        self._open.append(ticket)
        self._admission.enter(ticket.waiter)
        return True

    def tier_waited(self, ticket: PullTicket, lease: LeaseRecord, have_tokens: int) -> None:
        """Send what is cached by now: what came from a tier, or what there was without it."""
        ticket.waiter, peer = None, ticket.peer
        refusal = self._too_large(peer, lease)
        if peer.life is Life.LOST:
            refusal = reader_silent(peer, self._out.at_s, self._settings)
        if refusal is not None:
            self._leases.holders.release(lease, PULLER, refusal.code.value)
            self.refuse(ticket, refusal)
            return
        if lease.prefix_tokens <= have_tokens:
            ticket.answer = self._prefix(ticket, n_tokens=lease.prefix_tokens)
            self._leases.holders.release(lease, PULLER, "pull")
        else:
            lease.room = self._pull_room()
            self._send_cached(ticket, lease)
        assert ticket.answer is not None
        self._out.send(peer.link, ticket.answer)

    def refuse(self, ticket: PullTicket, refusal: Refusal) -> None:
        """Nothing is sent for it, and nothing is held."""
        ticket.waiter = None
        ticket.answer = self._prefix(ticket, refusal=refusal)
        self._out.send(ticket.peer.link, ticket.answer)

    def _send_cached(self, ticket: PullTicket, lease: LeaseRecord) -> None:
        """A send of all that the lease locks, from the daemon itself: no engine takes part."""
        peer, tokens, n_tokens = ticket.peer, lease.tokens, lease.prefix_tokens
        part = self._sends.new_part(lease.room, P.AWAIT_OFFER)
        self._sends.rooms.add_part(part)
        part.history.add_line(self._out.at_s, f"opened by a pull of {peer.name}")
        part.awaited.destination = peer.name
        digest = prompt_digest(tokens, lease.namespace)
        part.engine = SendingEngine(session=0, lease=lease, tokens=tokens, digest=digest)
        part.prompt_tokens = part.cursor_tokens = n_tokens
        part.deadline_s = min(ticket.until_s, self._out.at_s + self._settings.pull_offer_s)
        part.is_numbered, part.aux = False, b""
        holder = f"send {part.id}"
        self._leases.holders.hold_for_send(lease, holder, n_tokens)
        self._leases.holders.release(lease, PULLER, "pull")
        self._leases.giving_way.let_give_way(lease, holder)
        ticket.answer = self._prefix(ticket, room=lease.room, n_tokens=n_tokens)
        ticket.part = part
        self._open.append(ticket)

    def _too_many(self, peer: Peer, n_tokens: int) -> Refusal | None:
        """Why no further pull is opened."""
        opened, mine = self.open_pulls(), self._settings
        own = [ticket for ticket in opened if ticket.incarnation == peer.incarnation]
        # Each keeps its tokens here.
        kept = sum([ticket.n_tokens for ticket in own])
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

    def _claim(self, peer: Peer, tokens: Tokens, namespace: str, room: int) -> Claim:
        return Claim(
            session=0,
            call=0,
            reason=f"pull of {peer.name}",
            room=room,
            namespace=namespace,
            tokens=tokens,
            reserve_tokens=0,
            priority=0,
            cache=True,
            holder=PULLER,
            only_cached=True,
        )

    def _lock(self, peer: Peer, tokens: Tokens, namespace: str) -> LeaseRecord | Refusal:
        """A lease of these cached tokens, if no more than its share is locked with it."""
        claim = self._claim(peer, tokens, namespace, self._pull_room())
        evictable_pages = self._leases.tree.evictable_pages
        lease = self._leases.grants.open_prefix(claim)
        if isinstance(lease, Shortage):  # of what is cached, where it is promised to a lease
            return Refusal(Code.NO_ROOM, lease.words, side=self._settings.name)
        # What is locked by others already is locked by this one at no cost: so are prefixes that
        # many peers pull at once.
        if self._leases.tree.evictable_pages == evictable_pages:
            return lease
        refusal = self._too_large(peer, lease)
        if refusal is not None:
            self._leases.holders.release(lease, PULLER, refusal.code.value)
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
            if leases and locked > limit:
                return Refusal(
                    Code.NO_ROOM,
                    f"pulls of {whose} would lock {locked} of {pages} pages of {mine.name}, the "
                    f"limit is {limit}: compute it, or ask again when one of them is over",
                    side=mine.name,
                    numbers={"locked_pages": locked, "limit": limit, "open": len(leases)},
                )
        return None

    def _prefix(
        self,
        ticket: PullTicket,
        *,
        room: int = NO_ROOM,
        n_tokens: int = 0,
        refusal: Refusal | None = None,
    ) -> PrefixFound:
        return PrefixFound(
            source=self._settings.incarnation,
            target=ticket.incarnation,
            ask=ticket.ask,
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

    def withdrawn(self, peer: Peer, ask: int) -> None:
        """Who asked has given up before it was answered."""
        ticket = self.tickets.find(peer.incarnation, ask)
        if ticket is not None:
            self._stop_waiting(ticket)

    def _stop_waiting(self, ticket: PullTicket) -> None:
        waiter, ticket.waiter = ticket.waiter, None
        if waiter is not None:
            self._admission.withdraw(waiter)

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
            part, waiter = ticket.part, ticket.waiter
            if waiter is not None:
                refusal = peers.not_to_read(ticket.peer.name, name_in(waiter.claim.namespace))
                if refusal is not None:
                    self._admission.turn_away([waiter], refusal)
            elif part is not None and part.engine is not None:
                namespace = name_in(part.engine.lease.namespace)
                refusal = peers.not_to_read(part.awaited.destination, namespace)
                if refusal is not None:
                    self._sends.give_up_send(part, refusal)

    def _end_pulls(self, incarnation: str, refusal: Refusal) -> None:
        """A peer that has not offered pages for what it pulls will not."""
        for ticket in self.open_pulls():
            if ticket.incarnation != incarnation:
                continue
            self._stop_waiting(ticket)
            part = ticket.part
            if part is not None and part.state is P.AWAIT_OFFER:
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
