"""A receive from its engine's call to its Offers: it waits for memory and for its sources.

While it waits nothing is held and nobody else knows of it; with its pages it is OFFERED, and from
then on ``receive`` has it.

What must not live here: the edges behind OFFERED (``receive``), a receive without a room
(``pull``), one that comes again (``retries``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import ARRIVAL, Claim, Lent
from kvd.core.cache.lease_record import LeaseRecord
from kvd.core.handoff.message_sizes import page_id_bytes
from kvd.core.handoff.parts import ReceiveAttempt, ReceivePart, is_wanted
from kvd.core.handoff.protocol import DecodeTrigger
from kvd.core.leases.admission import Admission, Waiter
from kvd.core.leases.receive_tier import DEVICE
from kvd.core.tiers.words import NOW
from kvd.types import ID_BYTES, Pages, Tokens, count
from kvd.wire import client
from kvd.wire.peer import Offer, ReceiveOutcome, Withdrawn

if TYPE_CHECKING:
    from kvd.core.handoff.parts import NamedRequest
    from kvd.core.handoff.receive import Decoder
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.outbox import Outbox
    from kvd.core.peers.registry import Peers
    from kvd.core.settings import Settings
    from kvd.core.tiers.promotion import Promotions, TierWait
    from kvd.errors import Refusal

T = DecodeTrigger


@mypyc_attr(allow_interpreted_subclasses=True)
class ReceiveAsker:
    """A receive in the queue: it waits for memory, and for its sources."""

    __slots__ = ("_attempt", "_call", "_requests", "_waited")

    def __init__(
        self,
        requests: ReceiveRequests,
        attempt: ReceiveAttempt,
        call: int,
        waited: TierWait | None,
    ) -> None:
        self._requests = requests
        self._attempt = attempt
        self._call = call
        self._waited = waited

    def admitted(self, lease: LeaseRecord) -> None:
        """There is room, and every source is ready."""
        self._requests.queued_to_offered(self._attempt, lease, self._call, self._waited)

    def refused(self, refusal: Refusal) -> None:
        """There will be none."""
        self._requests.queued_to_closed(self._attempt, refusal, self._call)

    def blocked(self) -> str | None:
        """A source of it, unless the Offers can go out."""
        return self._requests.offers.blocked(self._attempt)

    def awaits(self) -> tuple[str, ...]:
        """The names of the same."""
        return self._requests.offers.awaits(self._attempt)


@mypyc_attr(allow_interpreted_subclasses=True)
class ReceiveRequests:
    """Receives that are asked for, and those that have no pages yet."""

    def __init__(
        self,
        settings: Settings,
        leases: LeaseTable,
        admission: Admission,
        promotions: Promotions,
        peers: Peers,
        receives: Decoder,
        out: Outbox,
    ) -> None:
        self.offers = receives.offers
        self._settings = settings
        self._leases = leases
        self._admission = admission
        self._promotions = promotions
        self._peers = peers
        self._receives = receives
        self._out = out

    def rename(self, address: str, name: str) -> None:
        """Who was known by an address has said its name: what waits for it waits for that."""
        for part in self._receives.open.parts.values():
            if part.peer == address:
                part.peer = name

    def receive(
        self,
        session: int,
        message: client.ReceiveRequest,
        tokens: Tokens,
        *,
        request: NamedRequest | None = None,
        is_pulled: bool = False,
        waited: TierWait | None = None,
    ) -> ReceiveAttempt:
        """The engine wants a prompt's KV from known peers: queue for room.

        ``waited``: of one that is pulled, what it has waited for in a tier before it was asked for.
        """
        attempt = self._new_attempt(session, message, count(tokens), request)
        attempt.is_pulled, attempt.is_open = is_pulled, message.is_open
        attempt.as_it_comes = message.as_it_comes
        fresh = self._leases.components.fresh_tokens(attempt.prompt_tokens, cached=message.cache)
        claim = Claim(
            session=session,
            call=message.call,
            reason=f"{attempt.verb} from {attempt.sources}",
            room=message.room,
            namespace=message.namespace,
            tokens=tokens,
            reserve_tokens=message.reserve_tokens,
            promise_tokens=message.promise_tokens,
            priority=message.priority,
            cache=message.cache,
            # Not ENGINE: until it is verified a remote writes these pages, and no call of the
            # engine may touch, commit or retract them.
            holder=ARRIVAL,
            fresh_tokens=fresh,
            step_tokens=message.step_tokens,
        )
        if message.arena:
            claim = self._into_arena(claim, attempt, message)
        # First of all: the Offer says how much is here, and what a tier has is not sent then.
        if message.tiers != NOW and not is_pulled:
            waited = self._promotions.wait_for(claim, attempt.deadline_s)
        # The common case, without the queue: its sources are ready, and there is room.
        is_ready = (waited is None or not waited.awaits()) and not self.offers.awaits(attempt)
        lease = self._admission.at_once(claim) if is_ready else None
        if isinstance(lease, LeaseRecord):
            self.queued_to_offered(attempt, lease, message.call, waited)
            return attempt
        asker = ReceiveAsker(self, attempt, message.call, waited)
        # The waiter is what says that it is queued: set before ``submit``, which may refuse or
        # admit it in this call.
        attempt.waiter = Waiter(claim, attempt.deadline_s, asker, waited)
        self._admission.submit(attempt.waiter, lease)
        return attempt

    def _into_arena(
        self, claim: Claim, attempt: ReceiveAttempt, message: client.ReceiveRequest
    ) -> Claim:
        """The claim of pages that the engine has named, behind what it has already."""
        first_page = message.have_tokens // self._leases.page_size
        return msgspec.structs.replace(
            claim,
            reason=f"{claim.reason} into arena {message.arena}",
            cache=False,
            lent=Lent(message.arena, attempt.id, first_page),
            pages=Pages(message.pages),
        )

    def lent(self, arena: int) -> list[ReceiveAttempt]:
        """The receives of an arena that wait or are under way."""
        found = []
        for attempt in self._receives.open.attempts.values():
            lent = attempt.waiter.claim.lent if attempt.waiter is not None else None
            if attempt.lease is not None:
                lent = attempt.lease.lent
            if lent is not None and lent.arena == arena:
                found.append(attempt)
        return found

    def queued_to_offered(
        self,
        attempt: ReceiveAttempt,
        lease: LeaseRecord,
        call: int,
        waited: TierWait | None = None,
    ) -> None:
        """ADMITTED: prefix locked, delta pages held; send the Offers.

        To CLOSED where an Offer, or the Settled that it asks for, would be longer than is read.
        """
        # First of all: with a waiter it counts as queued, and a cancel would withdraw it from a
        # queue in which it is no longer.
        attempt.waiter = None
        attempt.lease = lease
        attempt.prefix_tokens = lease.prefix_tokens
        attempt.as_it_comes = self._receives.arriving.can_tell(attempt, lease)
        for part in attempt.parts:
            part.incarnation = self._peers.by_name[part.peer].incarnation
            # Assigned in the step in which the Offer goes out, so ids grow with the Offers and the
            # floor (``offer_floor``) never passes one that is still to come.
            part.handoff = self._receives.open.next_handoff()
        self.offers.write_offers(attempt, lease)
        # Before anything is registered or sent: afterwards it could only be given up by draining.
        refusal = self.offers.unsendable(attempt)
        if refusal is not None:
            # No Offer has left, so nobody can write: the pages are free at once.
            attempt.lease = None
            self._leases.holders.release(lease, ARRIVAL, refusal.code.value)
            self.queued_to_closed(attempt, refusal, call)
            return
        self._receives.open.offered(attempt)
        for part in attempt.parts:
            self._receives.move_part(part, T.ADMITTED, _wanted(part))
        # Before the Offers among the effects: the engine knows the number before anybody can say
        # anything about it.
        answer = client.Receiving(
            call=call,
            receive=attempt.id,
            prefix_tokens=attempt.prefix_tokens,
            prompt_tokens=attempt.prompt_tokens if attempt.is_pulled else None,
            promised_tokens=lease.promised_tokens,
            promoted_tokens=0 if waited is None else waited.told(lease.prefix_tokens),
        )
        self._out.answer(attempt.session, answer)
        for part in attempt.parts:
            part.resend_gap_s = self._settings.resend_s
            self._receives.resend(part)

    def queued_to_closed(self, attempt: ReceiveAttempt, why: Refusal, call: int) -> None:
        """GIVEN_UP before anything was held or offered."""
        attempt.waiter = None
        for part in attempt.parts:
            self._receives.move_part(part, T.GIVEN_UP, why.message)
        self._out.answer(attempt.session, client.Failed(call, why))
        # Before any room is withdrawn: withdrawing asks whether another receive of ours still
        # wants that room, and this one does not.
        self._receives.open.drop(attempt)
        self._receives.open.unname(attempt)
        for part in attempt.parts:
            self.withdraw_room(part.room, part.peer, why)
            self._receives.tell_ended(part, ReceiveOutcome.REFUSED, why)
        attempt.parts = ()

    def unqueue(self, attempt: ReceiveAttempt, why: str) -> None:
        """One that waits will be asked for otherwise: it is gone, and nobody hears of it."""
        assert attempt.waiter is not None
        self._admission.withdraw(attempt.waiter)
        attempt.waiter = None
        for part in attempt.parts:
            self._receives.move_part(part, T.GIVEN_UP, why)
        self._receives.open.drop(attempt)
        attempt.parts = ()

    def withdraw_room(self, room: int, source: str, why: Refusal) -> None:
        """Nothing is offered: an engine that waits for it over there need not wait longer."""
        peer = self._peers.by_name.get(source)
        if (
            peer
            and peer.incarnation
            and not is_wanted(room, source, self._receives.open.parts.values())
        ):
            mine, code = self._settings.incarnation, why.code.value
            self._out.send(
                peer.link, Withdrawn(source=mine, target=peer.incarnation, room=room, reason=code)
            )

    def _new_attempt(
        self,
        session: int,
        message: client.ReceiveRequest,
        n_tokens: int,
        request: NamedRequest | None,
    ) -> ReceiveAttempt:
        numbers = [self._receives.open.next_number() for _ in message.source]
        at_s = self._out.at_s
        attempt = ReceiveAttempt(
            numbers[0],
            room=message.room,
            session=session,
            since_s=at_s,
            deadline_s=at_s + min(self._settings.max_deadline_s, message.deadline_s),
            prompt_tokens=n_tokens,
            is_preloaded=message.tier == DEVICE,
            request=request,
        )
        parts = []
        for number, source in zip(numbers, message.source, strict=True):
            # By its node name, which its Hello will bear, whatever address the engine wrote.
            peer = self._peers.find(source) or source
            part = ReceivePart(number, peer, attempt)
            part.history.add_line(at_s, f"asked for by session {session}")
            parts.append(part)
        attempt.parts = tuple(parts)
        self._receives.open.add(attempt)
        return attempt


def _wanted(part: ReceivePart) -> str:
    """What it asks for."""
    offer = part.unanswered
    assert isinstance(offer, Offer)
    n_pages = page_id_bytes(offer) // ID_BYTES
    return f"has {part.attempt.prefix_tokens} tokens, {n_pages} pages wanted"
