"""Pull: a receive without a room. The source is asked what it has, and sends that.

No engine of the source takes part. It locks what is cached there of the prompt, names a room, and
what follows is a handoff like any other, of so many tokens::

    decode side                                   prefill side
    engine: receive(tokens, source)
    PullAsk   -- AskPrefix(tokens, have) ------>  a lease of what is cached: ``pull of DECODE``
              <------ PrefixFound(room, n) -----  a send of n tokens in that room, all computed
    a receive of n tokens in that room            AWAIT_OFFER, for this node alone
              -- Offer ---------------------->    ... as in ``protocol``

Where the source has no more than is cached here, no room is named, and the lease is had at once.
``AskPrefix`` is repeated until it is answered; the source answers a repetition with what it said
before (``PullTickets``). Who has given up says ``Withdrawn`` for the room, and the lock over there
goes at once; without that it goes at the deadline, or with the link.

What must not live here: what a receive or a send does (``receive``, ``send``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from kvd.core.cache.namespaces import epoch_in, name_in, quoted
from kvd.core.handoff.message_sizes import MESSAGE_BYTES
from kvd.errors import Code, Refusal
from kvd.types import count
from kvd.wire.peer import AskPrefix, PrefixFound, Withdrawn

if TYPE_CHECKING:
    from kvd.core.handoff.parts import SendPart
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.outbox import Outbox
    from kvd.core.peers.peer import Peer
    from kvd.core.peers.registry import Peers
    from kvd.core.settings import Settings
    from kvd.types import Tokens
    from kvd.wire import client

NO_ROOM: Final = 0
"""In a receive: there is none yet. In an answer: nothing is sent."""

PULLER: Final = "pull"
"""Who holds the lease of a source until its send does."""

MOST_ASKS: Final = 1024
"""Of this node at a time; each keeps its prompt."""

MOST_TICKETS: Final = 1024
"""Of one peer at a time."""


def unfit(leases: LeaseTable, side: str) -> Refusal | None:
    """Why nothing can be pulled from this pool, nor into it."""
    beside = [one.component.name for one in leases.components.each]
    if not beside:
        return None
    return Refusal(
        Code.NOT_SUPPORTED,
        f"pool {leases.pool.name} of {side} has {', '.join(beside)} beside its first component: a "
        "prefix of it cannot be pulled; have an engine of the source send it",
        side=side,
    )


# ---- the decode side -----------------------------------------------------------------------------


@mypyc_attr(allow_interpreted_subclasses=True)
class PullAsk:
    """A receive whose source has not said yet what it has."""

    __slots__ = (
        "deadline_s",
        "id",
        "message",
        "peer",
        "resend_gap_s",
        "resend_s",
        "session",
        "since_s",
        "tokens",
    )

    def __init__(
        self,
        ask_id: int,
        *,
        session: int,
        message: client.ReceiveRequest,
        tokens: Tokens,
        peer: str,
        since_s: float,
        deadline_s: float,
    ) -> None:
        self.id = ask_id
        self.session = session
        self.message = message
        self.tokens = tokens
        self.peer = peer
        self.since_s = since_s
        self.deadline_s = deadline_s
        self.resend_s = since_s
        self.resend_gap_s = 0.0


@mypyc_attr(allow_interpreted_subclasses=True)
class PullAsks:
    """The questions of this node that have no answer yet."""

    def __init__(self, settings: Settings, leases: LeaseTable, peers: Peers, out: Outbox) -> None:
        self.by_id: dict[int, PullAsk] = {}
        self._settings = settings
        self._leases = leases
        self._peers = peers
        self._out = out
        self._last = 0

    def begin(
        self, session: int, message: client.ReceiveRequest, tokens: Tokens
    ) -> PullAsk | Refusal:
        """Ask the source; whoever takes the answer takes the ask out."""
        refusal = unfit(self._leases, self._settings.name)
        if refusal is not None:
            return refusal
        if len(self.by_id) >= MOST_ASKS:
            return Refusal(
                Code.NO_ROOM,
                f"{MOST_ASKS} pulls of this node wait for the word of their source",
                side=self._settings.name,
                numbers={"limit": MOST_ASKS},
            )
        self._last += 1
        at_s = self._out.at_s
        ask = PullAsk(
            self._last,
            session=session,
            message=message,
            tokens=tokens,
            peer=self._peers.find(message.source[0]) or message.source[0],
            since_s=at_s,
            deadline_s=at_s + min(self._settings.max_deadline_s, message.deadline_s),
        )
        ask.resend_gap_s = self._settings.resend_s
        self.by_id[ask.id] = ask
        return ask

    def say(self, ask: PullAsk) -> Refusal | None:
        """Ask, now or again; why it need not be asked any more."""
        ask.resend_s = self._out.at_s + ask.resend_gap_s
        ask.resend_gap_s = min(2 * ask.resend_gap_s, self._settings.max_resend_s)
        if self._peers.not_ready(ask.peer) is not None:
            return None  # asked again when it may be
        peer = self._peers.by_name[ask.peer]
        refusal = self._unaskable(peer, ask)
        if refusal is not None:
            return refusal
        ask_for = AskPrefix(
            source=self._settings.incarnation,
            target=peer.incarnation,
            ask=ask.id,
            namespace=name_in(ask.message.namespace),
            tokens=ask.tokens,
            have_tokens=self.have_tokens(ask),
            deadline_s=ask.deadline_s - self._out.at_s,
            epoch=epoch_in(ask.message.namespace),
        )
        self._out.send(peer.link, ask_for)
        return None

    def have_tokens(self, ask: PullAsk) -> int:
        """What of its prompt is cached here now."""
        return self._leases.tree.probe(ask.tokens, ask.message.namespace)

    def _unaskable(self, peer: Peer, ask: PullAsk) -> Refusal | None:
        side = self._settings.name
        if not peer.serves_pulls:
            return Refusal(
                Code.NOT_SUPPORTED,
                f"{peer.name} cannot be asked for a prefix, its kvd is older than that: receive in "
                "a room that an engine there sends to",
                side=side,
            )
        # It would look for what it has in epoch 0, of whatever weights that is.
        if not peer.knows_epochs and epoch_in(ask.message.namespace):
            return Refusal(
                Code.NOT_SUPPORTED,
                f"{peer.name} cannot be asked for a prefix of {quoted(ask.message.namespace)}, its "
                "kvd is older than epochs that nodes tell each other: upgrade it",
                side=side,
            )
        n_bytes = MESSAGE_BYTES + len(ask.tokens)
        if n_bytes > peer.max_frame_bytes:
            return Refusal(
                Code.TOO_LARGE,
                f"a prompt of {count(ask.tokens)} tokens makes a question of {n_bytes} bytes, "
                f"{peer.name} reads {peer.max_frame_bytes}: raise limits.max_frame_bytes there",
                side=side,
                numbers={"bytes": n_bytes, "limit": peer.max_frame_bytes},
            )
        return None

    def answered(self, peer: Peer, message: PrefixFound) -> PullAsk | None:
        """The ask that a source has answered, taken out; None if nobody waits for it any more."""
        ask = self.by_id.get(message.ask)
        if ask is not None and ask.peer == peer.name:
            return self.by_id.pop(ask.id)
        if message.room != NO_ROOM:
            # The lock over there is for nobody.
            self.withdraw(peer, message.room, Code.CANCELLED.value)
        return None

    def withdraw(self, peer: Peer, room: int, why: str) -> None:
        """The room that the source has opened will not be used."""
        mine = self._settings.incarnation
        self._out.send(
            peer.link, Withdrawn(source=mine, target=peer.incarnation, room=room, reason=why)
        )

    def overdue(self) -> list[PullAsk]:
        """Those whose time is over, taken out."""
        now_s = self._out.at_s
        late = [one for one in self.by_id.values() if one.deadline_s <= now_s]
        for one in late:
            del self.by_id[one.id]
        return late

    def due(self) -> list[PullAsk]:
        """Those to be asked again."""
        now_s = self._out.at_s
        return [one for one in self.by_id.values() if one.resend_s <= now_s]

    def take_of_session(self, session: int, call: int | None = None) -> list[PullAsk]:
        """Those of a session, or of one call of it, taken out."""
        found = [
            one
            for one in self.by_id.values()
            if one.session == session and call in {None, one.message.call}
        ]
        for one in found:
            del self.by_id[one.id]
        return found

    def waits_for(self, ask: PullAsk) -> str:
        """In words."""
        not_ready = self._peers.not_ready(ask.peer)
        return not_ready or f"the word of {ask.peer} on what it has of the prompt"

    def late(self, ask: PullAsk) -> Refusal:
        """Why it is over."""
        return Refusal(
            Code.DEADLINE,
            f"a pull of {count(ask.tokens)} tokens from {ask.peer} waited "
            f"{self._out.at_s - ask.since_s:.1f} s for {self.waits_for(ask)}",
            side=self._settings.name,
        )


# ---- the prefill side ----------------------------------------------------------------------------


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
