"""The source of a pull: it is asked what it has cached of a prompt, locks that, and sends it.

No engine of this node takes part: the daemon opens the room, for the peer that asked alone. What
was said to an ask is remembered (``PullTickets``), because the ask may come again.

What must not live here: the asking side (``pull``), what a send does (``send``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import Claim, Shortage
from kvd.core.handoff.offer import prompt_digest
from kvd.core.handoff.parts import SendingEngine
from kvd.core.handoff.protocol import Prefill
from kvd.core.handoff.pull import NO_ROOM, unfit
from kvd.core.handoff.refusals import reader_restarted, reader_silent
from kvd.core.settings import CacheMode
from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, MAX_ROOM, Tokens
from kvd.wire.codec import check_tokens
from kvd.wire.peer import AskPrefix, PrefixFound

if TYPE_CHECKING:
    from kvd.core.handoff.parts import SendPart
    from kvd.core.handoff.send import Prefiller
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.outbox import Outbox
    from kvd.core.peers.peer import Peer
    from kvd.core.settings import Settings

P = Prefill

PULLER: Final = "pull"
"""Who holds the lease of a source until its send does."""

MOST_TICKETS: Final = 1024
"""Of one peer at a time."""


@mypyc_attr(allow_interpreted_subclasses=True)
class PullTicket:
    """What a peer was told of one ask, and the send that it got; none where there is nothing."""

    __slots__ = ("answer", "part")

    def __init__(self, answer: PrefixFound, part: SendPart | None) -> None:
        self.answer = answer
        self.part = part


@mypyc_attr(allow_interpreted_subclasses=True)
class PullTickets:
    """The asks of other nodes that were answered, for as long as they may be repeated."""

    def __init__(self) -> None:
        self.by_incarnation: dict[str, dict[int, PullTicket]] = {}

    def find(self, incarnation: str, ask: int) -> PullTicket | None:
        """What was said to it, if it is remembered."""
        return self.by_incarnation.get(incarnation, {}).get(ask)

    def open(self, incarnation: str) -> list[SendPart]:
        """The sends of one peer that wait for its Offer, or are under way."""
        return [
            one.part
            for one in self.by_incarnation.get(incarnation, {}).values()
            if one.part is not None
        ]

    def add(self, incarnation: str, ticket: PullTicket) -> None:
        """Remember it; the oldest is forgotten first, and its repetition is a new ask."""
        tickets = self.by_incarnation.setdefault(incarnation, {})
        tickets[ticket.answer.ask] = ticket
        if len(tickets) > MOST_TICKETS:
            del tickets[next(iter(tickets))]

    def forget_peer(self, incarnation: str) -> None:
        """That process is over."""
        self.by_incarnation.pop(incarnation, None)


@mypyc_attr(allow_interpreted_subclasses=True)
class PullSource:
    """What is pulled from this node."""

    def __init__(
        self, settings: Settings, leases: LeaseTable, sends: Prefiller, out: Outbox
    ) -> None:
        self.tickets = PullTickets()
        self._settings = settings
        self._leases = leases
        self._sends = sends
        self._out = out
        self._last_room = MAX_ROOM

    def prefix_asked(self, peer: Peer, message: AskPrefix, not_serving: Refusal | None) -> None:
        """What is cached here of a prompt, and a room in which it is sent; or why it is not."""
        ticket = self.tickets.find(peer.incarnation, message.ask)
        if ticket is None:
            found = not_serving or self._unpulled(message) or self._open_pull(peer, message)
            if isinstance(found, Refusal):
                found = PullTicket(self._prefix(peer, message.ask, refusal=found), None)
            self.tickets.add(peer.incarnation, ticket := found)
        self._out.send(peer.link, ticket.answer)

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
            return PullTicket(self._prefix(peer, message.ask, n_tokens=n_tokens), None)
        claim = Claim(
            session=0,
            call=0,
            reason=f"pull of {peer.name}",
            room=self._pull_room(),
            namespace=message.namespace,
            tokens=Tokens(tokens[: n_tokens * ID_BYTES]),
            reserve_tokens=0,
            priority=0,
            cache=True,
            holder=PULLER,
        )
        lease = self._leases.open_prefix(claim)
        if isinstance(lease, Shortage):  # of what is cached nothing is short
            why = f"{lease.needed_pages} pages of {lease.budget} are short"
            return Refusal(Code.NO_ROOM, why, side=self._settings.name)
        part = self._sends.new_part(claim.room, P.AWAIT_OFFER)
        self._sends.rooms.add_part(part)
        part.history.add_line(self._out.at_s, f"opened by a pull of {peer.name}")
        part.awaited.destination = peer.name
        digest = prompt_digest(claim.tokens, claim.namespace)
        part.engine = SendingEngine(session=0, lease=lease, tokens=claim.tokens, digest=digest)
        part.prompt_tokens = part.cursor_tokens = n_tokens
        part.deadline_s = self._sends.deadline_of(message.deadline_s)
        part.is_numbered, part.aux = False, b""
        self._leases.hold_for_send(lease, f"send {part.id}", n_tokens)
        self._leases.release(lease, PULLER, "pull")
        answer = self._prefix(peer, message.ask, room=claim.room, n_tokens=n_tokens)
        return PullTicket(answer, part)

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

    def _end_pulls(self, incarnation: str, refusal: Refusal) -> None:
        """A peer that has not offered pages for what it pulls will not."""
        for part in self.tickets.open(incarnation):
            if part.state is P.AWAIT_OFFER:
                self._sends.give_up_send(part, refusal)
        self.tickets.forget_peer(incarnation)
