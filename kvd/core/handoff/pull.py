"""Pull: a receive without a room. The source is asked what it has, and sends that.

No engine of the source takes part. It locks what is cached there of the prompt, names a room, and
what follows is a handoff like any other, of so many tokens::

    decode side                                   prefill side
    engine: receive(tokens, source)
    PullAsk   -- AskPrefix(tokens, have) ------>  a lease of what is cached: ``pull of DECODE``
              <------ PrefixFound(room, n) -----  a send of n tokens in that room, all computed
    a receive of n tokens in that room            AWAIT_OFFER, for this node alone
              -- Offer ---------------------->    ... as in ``protocol``

What a tier of this node is known to have is read before the question, so it is neither read over
there nor sent; not where that takes longer than a request waits for a tier, as measured. Where the
source has no more than is cached here, no room is named, and the lease is had at once, or when a
store that both could ask has been asked.
``AskPrefix`` is repeated until it is answered; the source answers a repetition with what it said
before (``PullTickets``). A receive that has to wait for memory here goes on asking, more rarely:
so its source keeps the room, or says what it has now, and then the receive is made anew. Who has
given up says ``Withdrawn`` for the room, and the lock over there goes at once; without that it goes
soon, or with the link.

This file is the decode side of it, ``pull_source`` the other.

What must not live here: what a receive does (``receive_requests``, ``receive``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import Claim
from kvd.core.cache.lease_record import LeaseRecord
from kvd.core.cache.namespaces import epoch_in, name_in, quoted
from kvd.core.handoff.message_sizes import MESSAGE_BYTES
from kvd.core.leases.admission import Admission, MemoryAsker, Waiter
from kvd.core.tiers.words import NOW
from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, Tokens, amount, count
from kvd.wire import client
from kvd.wire.peer import AskPrefix, PrefixFound, Withdrawn

if TYPE_CHECKING:
    from kvd.core.handoff.parts import ReceiveAttempt
    from kvd.core.handoff.receive import Decoder
    from kvd.core.handoff.receive_requests import ReceiveRequests
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.outbox import Outbox
    from kvd.core.peers.peer import Peer
    from kvd.core.peers.registry import Peers
    from kvd.core.settings import Settings
    from kvd.core.tiers.promotion import Promotions, TierWait

NO_ROOM: Final = 0
"""In a receive: there is none yet. In an answer: nothing is sent."""

PULLER: Final = "pull"
"""Who holds the lease of what is cached, until it is known what becomes of a pull."""

MOST_ASKS = 1024
"""Of this node at a time; each keeps its prompt."""

ASKS_WHILE_QUEUED = 4
"""In the time that a source keeps a room for which no Offer has come, by this node's figure."""


def unfit(leases: LeaseTable, side: str) -> Refusal | None:
    """Why nothing can be pulled from this pool, nor into it."""
    beside = [keeper.component.name for keeper in leases.components.each]
    if not beside:
        return None
    return Refusal(
        Code.NOT_SUPPORTED,
        f"pool {leases.pool.name} of {side} has {', '.join(beside)} beside its first component: a "
        "prefix of it cannot be pulled; have an engine of the source send it",
        side=side,
    )


@mypyc_attr(allow_interpreted_subclasses=True)
class PullAsk:
    """A receive whose source has not said yet what it has, or that waits for memory since.

    ``attempt`` and ``room``: what its answer was made to, while that waits. ``waiter``: it waits
    for a tier of this node, and nobody was asked yet; ``waited``: so it did.
    """

    __slots__ = (
        "attempt",
        "deadline_s",
        "id",
        "message",
        "peer",
        "resend_gap_s",
        "resend_s",
        "room",
        "session",
        "since_s",
        "tokens",
        "waited",
        "waiter",
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
        self.attempt: ReceiveAttempt | None = None
        self.room = NO_ROOM
        self.waiter: Waiter | None = None
        self.waited: TierWait | None = None


@mypyc_attr(allow_interpreted_subclasses=True)
class PullAsks:
    """The questions of this node that have no answer yet."""

    def __init__(self, settings: Settings, leases: LeaseTable, peers: Peers, out: Outbox) -> None:
        self.by_id: dict[int, PullAsk] = {}
        self.queued: dict[int, PullAsk] = {}
        """Answered, and their receives wait for memory, or did a moment ago."""
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
                f"a prompt of {count(ask.tokens)} tokens makes a question of {amount(n_bytes)}, "
                f"{amount(n_bytes - peer.max_frame_bytes)} more than {peer.name} reads: "
                "raise limits.max_frame_bytes there",
                side=side,
                numbers={"bytes": n_bytes, "limit": peer.max_frame_bytes},
            )
        return None

    def answered(self, peer: Peer, message: PrefixFound) -> PullAsk | None:
        """The ask that a source has answered, taken out; None if nobody waits for it any more."""
        ask = self.by_id.get(message.ask)
        if ask is not None and ask.peer == peer.name:
            return self.by_id.pop(ask.id)
        if ask is not None:
            why = f"ask {ask.id} was put to {ask.peer}, and {peer.name} has answered it"
            refusal = Refusal(Code.BAD_REQUEST, why, side=self._settings.name)
            self._peers.reject(peer.link, peer.incarnation, refusal)
        return None

    def withdraw(self, peer: Peer, room: int, why: str) -> None:
        """The room that the source has opened will not be used."""
        mine = self._settings.incarnation
        self._out.send(
            peer.link, Withdrawn(source=mine, target=peer.incarnation, room=room, reason=why)
        )

    def give_up(self, ask: PullAsk, why: str) -> None:
        """Nobody waits for its answer any more, and its source may wait for a tier still."""
        if ask.waiter is not None or self._peers.not_ready(ask.peer) is not None:
            return  # it was not asked, or is asked no more, and answers to nobody
        peer, mine = self._peers.by_name[ask.peer], self._settings.incarnation
        told = Withdrawn(mine, peer.incarnation, room=NO_ROOM, reason=why, ask=ask.id)
        self._out.send(peer.link, told)

    def note_epochs(self, peer: Peer, ask: PullAsk, why: Refusal) -> None:
        """What a source has refused, where that is for our epoch."""
        self._peers.heard_epochs(peer, ask.message.namespace, why)

    def in_one_epoch(self, peer: Peer, ask: PullAsk) -> None:
        """A source has answered, whatever it has."""
        self._peers.in_one_epoch(peer, ask.message.namespace)

    def keep(self, ask: PullAsk, attempt: ReceiveAttempt, room: int) -> None:
        """What it was answered with waits for memory: its source is asked again now and then."""
        ask.attempt, ask.room = attempt, room
        ask.resend_gap_s = self._settings.pull_offer_s / ASKS_WHILE_QUEUED
        ask.resend_s = self._out.at_s + ask.resend_gap_s
        self.queued[ask.id] = ask

    def repeat_queued(self) -> None:
        """Ask again for what still waits for memory, where it is time; the others are over."""
        now_s = self._out.at_s
        for ask in list(self.queued.values()):
            if ask.attempt is None or ask.attempt.waiter is None:
                del self.queued[ask.id]
            elif ask.resend_s <= now_s:
                gap_s = ask.resend_gap_s
                self.say(ask)
                ask.resend_s, ask.resend_gap_s = now_s + gap_s, gap_s

    def unqueue(self, ask: PullAsk) -> ReceiveAttempt | None:
        """It is no longer among those; what of it still waits for memory."""
        del self.queued[ask.id]
        attempt, ask.attempt = ask.attempt, None
        return attempt if attempt is not None and attempt.waiter is not None else None

    def overdue(self) -> list[PullAsk]:
        """Those whose time is over, taken out."""
        now_s = self._out.at_s
        late = [ask for ask in self.by_id.values() if ask.deadline_s <= now_s]
        for ask in late:
            del self.by_id[ask.id]
        return late

    def due(self) -> list[PullAsk]:
        """Those to be asked again."""
        now_s = self._out.at_s
        asks = self.by_id.values()
        return [ask for ask in asks if ask.resend_s <= now_s and ask.waiter is None]

    def take_of_session(self, session: int, call: int | None = None) -> list[PullAsk]:
        """Those of a session, or of one call of it, taken out."""
        found = [
            ask
            for ask in self.by_id.values()
            if ask.session == session and call in {None, ask.message.call}
        ]
        for ask in found:
            del self.by_id[ask.id]
        return found

    def waits_for(self, ask: PullAsk) -> str:
        """In words."""
        if ask.waiter is not None and (why := ask.waiter.blocked()):
            return why
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


_UNWANTED: Final = Refusal(Code.CANCELLED, "nobody waits for the answer of that ask any more")


@mypyc_attr(allow_interpreted_subclasses=True)
class PullAsker(MemoryAsker):
    """A pull that waits for a tier of this node, before its source is asked."""

    __slots__ = ("_ask", "_pulls")

    def __init__(self, pulls: Pulls, ask: PullAsk) -> None:
        self._pulls = pulls
        self._ask = ask

    def admitted(self, lease: LeaseRecord) -> None:
        """It waits no more, and what has come is cached."""
        self._pulls.tier_waited(self._ask, lease)

    def refused(self, refusal: Refusal) -> None:
        """Its time is over, or this node begins nothing any more."""
        self._pulls.refuse_unasked(self._ask, refusal)


@mypyc_attr(allow_interpreted_subclasses=True)
class CachedAsker(MemoryAsker):
    """A pull for which nothing has to come: it waits for memory, and for a store that was asked."""

    __slots__ = ("_ask", "_pulls", "_receive")

    def __init__(self, pulls: Pulls, ask: PullAsk, receive: int) -> None:
        self._pulls = pulls
        self._ask = ask
        self._receive = receive

    def admitted(self, lease: LeaseRecord) -> None:
        """Answer with the lease."""
        self._pulls.received_cached(self._ask, self._receive, lease)

    def refused(self, refusal: Refusal) -> None:
        """Answer with the reason."""
        self._pulls.end_pull(self._ask, refusal)


@mypyc_attr(allow_interpreted_subclasses=True)
class Pulls:
    """What engines of this node pull: the question, and the receive that its answer makes of it."""

    def __init__(
        self,
        settings: Settings,
        leases: LeaseTable,
        admission: Admission,
        promotions: Promotions,
        peers: Peers,
        receives: Decoder,
        requests: ReceiveRequests,
        out: Outbox,
    ) -> None:
        self.asks = PullAsks(settings, leases, peers, out)
        self._settings = settings
        self._leases = leases
        self._admission = admission
        self._promotions = promotions
        self._receives = receives
        self._requests = requests
        self._out = out

    def pull(self, session: int, message: client.ReceiveRequest, tokens: Tokens) -> Refusal | None:
        """The engine wants what one peer has cached of a prompt: look here, and ask it."""
        ask = self.asks.begin(session, message, tokens)
        if isinstance(ask, Refusal):
            return ask
        if message.tiers == NOW or not self._wait_for_tier(ask):
            self._say_pull(ask)
        return None

    def _wait_for_tier(self, ask: PullAsk) -> bool:
        """Whether it waits for what a tier of this node is known to have."""
        whole = self._claim(ask, count(ask.tokens))
        claim = msgspec.structs.replace(whole, holder=PULLER, only_cached=True)
        ask.waited = self._promotions.wait_in_time(claim, ask.deadline_s)
        if ask.waited is None:
            return False
        ask.waiter = Waiter(claim, ask.deadline_s, PullAsker(self, ask), ask.waited)
        self._admission.enter(ask.waiter)
        return True

    def tier_waited(self, ask: PullAsk, lease: LeaseRecord) -> None:
        """Ask for what is behind that: what has come counts as what is cached here."""
        ask.waiter = None
        self._leases.holders.release(lease, PULLER, "pull")
        self._say_pull(ask)

    def refuse_unasked(self, ask: PullAsk, refusal: Refusal) -> None:
        """It waits for a tier no more, and nobody was asked."""
        ask.waiter = None
        del self.asks.by_id[ask.id]
        self.end_pull(ask, refusal)

    def rename(self, address: str, name: str) -> None:
        """Who was known by an address has said its name: what is asked of it goes to that."""
        for ask in self.asks.by_id.values():
            if ask.peer == address:
                ask.peer = name

    def prefix_found(self, peer: Peer, message: PrefixFound) -> None:
        """The source of a pull has said what it has, and waits for an Offer in that room."""
        queued = self.asks.queued.get(message.ask)
        if queued is not None and queued.peer == peer.name:
            if message.room == queued.room:
                return  # it is kept, and waits for our Offer
            ask = self._unqueued(queued)
        else:
            ask = self.asks.answered(peer, message)
        if ask is None:
            if message.room != NO_ROOM:
                self._requests.withdraw_room(message.room, peer.name, _UNWANTED)
            return
        if message.refusal is not None:
            why = message.refusal
            self.asks.note_epochs(peer, ask, why)
            said = f"{peer.name} sends nothing of the prompt: {why.message}"
            self.end_pull(ask, Refusal(why.code, said, side=peer.name, numbers=why.numbers))
            return
        self.asks.in_one_epoch(peer, ask)
        n_tokens, have_tokens = message.n_tokens, self.asks.have_tokens(ask)
        refusal = self._no_prefix(ask, message)
        if refusal is not None:
            self.asks.withdraw(peer, message.room, refusal.code.value)
            self.end_pull(ask, refusal)
        elif message.room == NO_ROOM or n_tokens <= have_tokens:
            if message.room != NO_ROOM:
                self.asks.withdraw(peer, message.room, "it has come meanwhile")
            self._receive_cached(ask, have_tokens)
        else:
            rest_s = ask.deadline_s - self._out.at_s
            known = _upto(ask, n_tokens, message.room, rest_s)
            tokens = Tokens(ask.tokens[: n_tokens * ID_BYTES])
            attempt = self._requests.receive(
                ask.session, known, tokens, is_pulled=True, waited=ask.waited
            )
            if attempt.waiter is not None:
                self.asks.keep(ask, attempt, message.room)

    def _unqueued(self, ask: PullAsk) -> PullAsk | None:
        """The source has another answer now than the one that a receive waits for memory with.

        Not where the receive has its memory by now, or is over.
        """
        attempt = self.asks.unqueue(ask)
        if attempt is None:
            return None
        self._requests.unqueue(attempt, f"{ask.peer} does not keep room {ask.room} any more")
        return ask

    def outlived(self, name: str) -> None:
        """The daemon of that name was restarted, and knows none of its rooms: it is asked anew."""
        for ask in [one for one in self.asks.queued.values() if one.peer == name]:
            attempt = self.asks.unqueue(ask)
            if attempt is not None:
                self._requests.unqueue(attempt, f"{name} was restarted")
                ask.resend_s, ask.resend_gap_s = self._out.at_s, self._settings.resend_s
                self.asks.by_id[ask.id] = ask

    def _no_prefix(self, ask: PullAsk, message: PrefixFound) -> Refusal | None:
        """Why what the source sends is no first part of what it was asked for, in whole pages."""
        n_tokens, most = message.n_tokens, count(ask.tokens)
        size = self._leases.tree.match_page_tokens
        if message.room == NO_ROOM or (n_tokens <= most and not n_tokens % size):
            return None
        what = f"of {most} that it was asked for, in whole pages of {size}"
        return Refusal(
            Code.BAD_PREFIX,
            f"{ask.peer} sends {n_tokens} tokens {what}",
            side=self._settings.name,
            numbers={"n_tokens": n_tokens, "asked_tokens": most, "page_size": size},
        )

    def _say_pull(self, ask: PullAsk) -> None:
        refusal = self.asks.say(ask)
        if refusal is not None:
            del self.asks.by_id[ask.id]
            self.end_pull(ask, refusal)

    def end_pull(self, ask: PullAsk, refusal: Refusal) -> None:
        """Nothing came of a pull, and nothing is held for it."""
        if ask.waiter is not None:
            self._admission.withdraw(ask.waiter)
            ask.waiter = None
        self._out.answer(ask.session, client.Failed(ask.message.call, refusal))

    def _claim(self, ask: PullAsk, n_tokens: int) -> Claim:
        """For the first tokens of its prompt, with room for the rest."""
        message, rest = ask.message, count(ask.tokens) - n_tokens
        return Claim(
            session=ask.session,
            call=message.call,
            reason=f"pull from {ask.peer}",
            room=NO_ROOM,
            namespace=message.namespace,
            tokens=Tokens(ask.tokens[: n_tokens * ID_BYTES]),
            reserve_tokens=message.reserve_tokens + rest,
            promise_tokens=message.promise_tokens,
            priority=message.priority,
            cache=message.cache,
        )

    def _receive_cached(self, ask: PullAsk, n_tokens: int) -> None:
        """Nothing has to come: what is cached here is all there is, and the lease has it.

        Unless a store has more: whoever computed that is not asked for it.
        """
        asker = CachedAsker(self, ask, self._receives.open.next_number())
        claim, waited = self._claim(ask, n_tokens), None
        # Once: what it has waited for before it asked is here, or takes longer than that.
        if ask.message.tiers != NOW and ask.waited is None:
            whole = self._claim(ask, count(ask.tokens))
            ask.waited = waited = self._promotions.wait_for(whole, ask.deadline_s)
            claim = claim if waited is None else whole
        lease = self._admission.at_once(claim) if waited is None else None
        if isinstance(lease, LeaseRecord):
            asker.admitted(lease)
        else:
            self._admission.submit(Waiter(claim, ask.deadline_s, asker, waited), lease)

    def received_cached(self, ask: PullAsk, receive: int, lease: LeaseRecord) -> None:
        """The lease of a pull for which nothing had to come."""
        # Less than when it was asked for, if it had to wait and others needed the room: what is not
        # there any more it must not be said to know.
        n_tokens = lease.prefix_tokens
        lease.tokens = Tokens(lease.tokens[: n_tokens * ID_BYTES])
        self._out.answer(
            ask.session,
            client.Receiving(
                call=ask.message.call,
                receive=receive,
                prefix_tokens=lease.prefix_tokens,
                prompt_tokens=n_tokens,
                promised_tokens=lease.promised_tokens,
                promoted_tokens=0 if ask.waited is None else ask.waited.told(n_tokens),
            ),
        )
        self._out.answer(
            ask.session,
            client.Received(receive=receive, lease=lease.id, pages=lease.page_table, aux=b""),
        )

    def cancel_call(self, session: int, call: int, refusal: Refusal) -> None:
        """Nobody waits for what this call pulls."""
        for ask in self.asks.take_of_session(session, call):
            self.asks.give_up(ask, refusal.code.value)
            self.end_pull(ask, refusal)

    def cancel_session(self, session: int, refusal: Refusal) -> int:
        """End all pulls of a session that is over; how many they were."""
        asks = self.asks.take_of_session(session)
        for ask in asks:
            self.asks.give_up(ask, refusal.code.value)
            self.end_pull(ask, refusal)
        return len(asks)

    def tick(self) -> None:
        """Deadlines and repetitions."""
        for ask in self.asks.overdue():
            self.end_pull(ask, self.asks.late(ask))
        for ask in self.asks.due():
            self._say_pull(ask)
        self.asks.repeat_queued()


def _upto(ask: PullAsk, n_tokens: int, room: int, deadline_s: float) -> client.ReceiveRequest:
    """A pull as a receive of the first tokens of its prompt, with room for the rest."""
    rest = count(ask.tokens) - n_tokens
    return msgspec.structs.replace(
        ask.message,
        room=room,
        source=(ask.peer,),
        reserve_tokens=ask.message.reserve_tokens + rest,
        deadline_s=deadline_s,
    )
