"""What a decode side says of the prompts that it is sent: Offer, Abort, Withdrawn, Closed.

An Offer meets the engine that waits for it, waits for one, is one more receive of a room that is
kept, or is refused. Whichever it is, its handoff id is answered for from then on (``settled``).
What is asked of it, in this order, and where the answer is:

    has it come before?           ``settled.find_part``; answered as then, if ``offer.differs`` not
    is it ahead of its Hello?     ``peer.generation``; it will be repeated
    is there a record for it?     ``settled.is_full``; it will be repeated
    may anything begin here?      ``drain``
    is it of this time?           ``offer.outdated``
    may this peer have the room?  ``rooms.refusal``
    is it an Offer at all?        ``offer.unacceptable``
    is the room over?             ``rooms.ExpiredRooms``, ``served``; where no engine is there
    was it open before?           ``offer.is_open``; likewise
    is there a place left?        ``kept.not_for_taker``; of a room that is kept
    do the prompts agree?         ``offer.disagreement``

After the first three nothing of it is kept; from the fourth on a refusal is its Settled.

What must not live here: transitions (``send``), whether an Offer is one (``offer``), who has a room
(``rooms``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.handoff.kept import note_taken
from kvd.core.handoff.message_sizes import page_id_bytes
from kvd.core.handoff.offer import differs, disagreement, outdated, unacceptable
from kvd.core.handoff.protocol import Prefill, PrefillTrigger
from kvd.core.handoff.rooms import may_offer_still, turned_away
from kvd.errors import Code, Refusal
from kvd.wire.bounds import MAX_REASON
from kvd.wire.peer import Abort, Closed, Offer, ReceiveOutcome, Withdrawn

if TYPE_CHECKING:
    from kvd.core.handoff.kept import KeptRooms
    from kvd.core.handoff.parts import SendPart
    from kvd.core.handoff.payload import Payload
    from kvd.core.handoff.send import Prefiller
    from kvd.core.outbox import Outbox
    from kvd.core.peers.peer import Peer
    from kvd.core.peers.registry import Peers
    from kvd.core.settings import Settings

P, T = Prefill, PrefillTrigger


@mypyc_attr(allow_interpreted_subclasses=True)
class OfferReader:
    """The prefill side: what becomes of a decode side's messages."""

    def __init__(
        self,
        settings: Settings,
        payload: Payload,
        peers: Peers,
        sends: Prefiller,
        kept: KeptRooms,
        out: Outbox,
    ) -> None:
        self._settings = settings
        self._payload = payload
        self._peers = peers
        self._sends = sends
        self._kept = kept
        self._out = out

    def offered(self, peer: Peer, message: Offer, not_serving: Refusal | None) -> None:
        """Destination pages, for a room that an engine has opened or will open.

        ``not_serving``: why this node begins nothing new now, if it does not.
        """
        known = self._sends.settled_sends.find_part(peer.incarnation, message.handoff)
        if known is not None:
            refusal = differs(known, message, self._settings.name)
            # An Offer that comes again is answered as the first one was, even while this node
            # drains; one that names other pages is a bug over there, never a new handoff.
            if refusal is None:
                self._sends.answer_again(peer, known)
            else:
                self._peers.reject(peer.link, peer.incarnation, refusal)
            return
        # Our agent leads to the older transfer process over there: its pages are not these.
        # Asked after a repetition is answered: that needs no agent, and must stay as it was.
        if message.generation > peer.generation:
            self._peers.ask_hello(peer)  # the Offer will be repeated
            return
        kept_bytes = page_id_bytes(message)
        # Asked before anything of it is kept; the Offer is repeated, and taken when there is room.
        if self._sends.settled_sends.is_full(peer, message.handoff, kept_bytes):
            return
        part = self._sends.rooms.by_room.get(message.room)
        refusal = not_serving or self._unserved(peer, message, part)
        if refusal is not None:
            # A part of its own, and not the room's: the refusal settles this handoff id for good,
            # so that a repetition is answered alike, and whoever has the room goes on.
            stranger = self._sends.new_part(message.room, P.AWAIT_ENGINE)
            self._sends.join_peer(stranger, peer, message.handoff)
            self._sends.refuse_part(stranger, refusal)
            return
        keeper = part if part is not None and part.keeping is not None else None
        # The engine is still to come: each peer's Offer waits as a part of its own (``rooms``). So
        # is each that takes a room that is kept.
        if part is None or part.state is P.AWAIT_ENGINE or keeper is not None:
            part = self._sends.new_part(message.room, P.AWAIT_ENGINE)
            # Until an engine opens the room the receiver's deadline is the only one there is.
            part.deadline_s = self._sends.deadline_of(message.deadline_s)
            self._sends.rooms.add_part(part)
        self._sends.join_peer(part, peer, message.handoff)
        self._sends.settled_sends.keep_offer(part, message, kept_bytes)
        # Before the edge to STREAMING, which posts by the plan in the same step.
        self._sends.posts.plan_part(part, message, peer)
        if keeper is not None:
            self._kept.take_room(keeper, part)
        elif part.state is P.AWAIT_OFFER:
            if not part.session:
                # A pull waits for its Offer for a while, and from now on as long as who receives.
                part.deadline_s = self._sends.deadline_of(message.deadline_s)
            self._sends.await_engine_or_await_offer_to_streaming(part, T.OFFERED)

    def _unserved(self, peer: Peer, offer: Offer, part: SendPart | None) -> Refusal | None:
        """Why an Offer is not served; ``part`` has its room."""
        refusal = (
            # The cheap and certain ones first: an Offer of a time that is over is told so, whatever
            # else is wrong with it.
            outdated(offer, peer, self._settings.name)
            or self._sends.rooms.refusal(offer.room, peer.name)
            or unacceptable(offer, peer, self._payload, self._settings)
        )
        if refusal is not None:
            return refusal
        if part is None or part.engine is None:
            # By when the receiver began to wait, not by when this Offer came: it may be a
            # repetition.
            now_s, asked_s = self._out.at_s, self._out.at_s - offer.waited_s
            expired = self._sends.expired_rooms.refusal(offer.room, asked_s)
            served = self._sends.served_rooms.refusal(offer.room, asked_s, now_s)
            return expired or served or (self._nobodys(offer) if offer.is_open else None)
        if part.keeping is not None:
            return self._kept.not_for_taker(part, peer.name, offer)
        refusal = disagreement(offer, peer.name, part.engine, self._payload, self._settings.name)
        if refusal is not None:
            turned_away(part, peer.name, refusal, self._out.at_s)
        return refusal

    def _nobodys(self, offer: Offer) -> Refusal:
        """No engine has the room, and none is to come."""
        side = self._settings.name
        return Refusal(
            Code.UNKNOWN_HANDOFF,
            f"no engine of {side} has room {offer.room} open, which it was when its number was "
            f"told: {side} has begun anew since, or it is long over: compute the prompt",
            side=side,
            numbers={"room": str(offer.room)},
        )

    def aborted(self, peer: Peer, message: Abort) -> None:
        """The decode side no longer wants it, and waits for our last word."""
        part = self._sends.settled_sends.find_part(peer.incarnation, message.handoff)
        said = message.reason[:MAX_REASON]  # our Settled quotes it, and must stay readable
        why = Refusal(Code.ABORTED, f"{peer.name} gave up: {said}", side=peer.name)
        # Below the floor no Offer can come any more, so the answer is true without a tombstone.
        if part is None and message.handoff < peer.offer_floor:
            self._sends.settled_sends.answer_below_floor(peer, message.handoff)
            return
        if part is None:
            # The Abort has overtaken its Offer, or that is lost. It leaves a tombstone, because
            # Settled must stay true: an Offer that comes later must not be served.
            if self._sends.settled_sends.is_full(peer, message.handoff):
                return
            part = self._sends.new_part(message.room, P.AWAIT_ENGINE)
            part.in_doubt = self._sends.settled_sends.is_doubtful(peer.incarnation, message.handoff)
            self._sends.join_peer(part, peer, message.handoff)
        if part.state in {P.AWAIT_ENGINE, P.STREAMING, P.FLUSHING}:
            # Set before the edge: from AWAIT_ENGINE it settles in this call, and Settled tells the
            # outcome.
            part.outcome = ReceiveOutcome.ABORTED
            self._sends.end_part(part, T.ABORTED, said, why)
        else:
            self._sends.answer_again(peer, part)

    def withdrawn(self, peer: Peer, message: Withdrawn) -> None:
        """The decode side gave a room up before it had pages for it: it will not come."""
        part = self._sends.rooms.by_room.get(message.room)
        # It is lossy and comes without a handoff id: an Offer that has come meanwhile is worth
        # more.
        if part is None or part.state is not P.AWAIT_OFFER:
            return
        refusal = self._sends.rooms.refusal(message.room, peer.name)
        if refusal is not None:
            self._peers.reject(peer.link, peer.incarnation, refusal)
            return
        why = f"{peer.name} gave up before it offered pages: {message.reason}"
        part.awaited.withdrawn[peer.name] = message.reason[:MAX_REASON]
        # One stranger must not end the wait of an engine that names nobody: all of them must.
        others = may_offer_still(part, self._peers)
        if part.keeping is not None:  # one receive less, and the next may come
            part.history.add_line(self._out.at_s, why)
            return
        if others:
            part.history.add_line(
                self._out.at_s, f"{why}; {', '.join(others[:8])} may offer them still"
            )
            return
        part.outcome = ReceiveOutcome.ABORTED
        self._sends.give_up_send(part, Refusal(Code.ABORTED, why, side=peer.name))

    def closed(self, peer: Peer, message: Closed) -> None:
        """How it ended over there."""
        part = self._sends.settled_sends.closed(peer, message)
        # Of a pull no engine opened the room, and nobody will ask who has had it.
        if part is None or not part.session:
            return
        keeper, has_room = part.kept_by, self._sends.rooms.by_room.get(part.room)
        now_s = self._out.at_s
        is_last = keeper is not None and note_taken(keeper, part, now_s)
        self._sends.served_rooms.remember(part, now_s)
        part.kept_by = None
        # It may be over already, by its time or its engine.
        if keeper is None or has_room is not keeper:
            return
        if not is_last:
            self._kept.note_received(keeper)
        else:
            why = f"room {part.room} was received by all that it was open for"
            self._sends.end_kept(keeper, Refusal(Code.ABORTED, why, side=self._settings.name))
