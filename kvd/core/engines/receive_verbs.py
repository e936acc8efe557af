"""Receives: a prompt whose KV comes from other nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.engines.verbs import Verbs
from kvd.core.handoff.pull import NO_ROOM
from kvd.core.handoff.refusals import asked_again, bad_room, unknown_handoff
from kvd.core.handoff.retries import ReceiveRetries, received_request
from kvd.core.leases.arenas import bad_pages, in_use
from kvd.core.leases.receive_tier import bad_tier
from kvd.core.tiers.words import bad_word
from kvd.errors import Code, Refusal
from kvd.types import Pages, Tokens, count
from kvd.wire import client
from kvd.wire.bounds import MAX_SOURCES

if TYPE_CHECKING:
    from kvd.core.handoff.parts import ReceiveAttempt
    from kvd.core.node_parts import NodeParts


@mypyc_attr(allow_interpreted_subclasses=True)
class ReceiveVerbs(Verbs):
    """What a decode engine asks of prompts that others have computed."""

    def __init__(self, node: NodeParts) -> None:
        super().__init__(node)
        self._receives = node.receives
        self._pulls = node.pulls
        self._peers = node.peers
        self._retries = ReceiveRetries(node.settings, node.decoder.open)
        self._spec = node.settings.spec

    def receive(
        self, session: int, message: client.ReceiveRequest, tokens: Tokens
    ) -> Refusal | None:
        """A prompt comes in a room from its sources, or is pulled without one."""
        if message.room == NO_ROOM:
            return self._pull(session, message, tokens)
        refusal = bad_room(message.room, self._name)
        if refusal is not None:
            return refusal
        request = before = None
        if message.request_id:
            request = received_request(message, tokens)
            before = self._retries.asked_before(session, message.room, request)
        if isinstance(before, Refusal):
            return before
        if before is not None and before.waiter is None:
            return self._answer_again(session, message, before)
        refusal = self._drainer.refusal() or self._bad_receive(message, tokens)
        if refusal is None and (message.arena or message.pages):
            refusal = self._not_into_arena(session, message, tokens, before)
        if refusal is None:
            self._receives.receive(session, message, tokens, request=request)
            # Behind the new one, so that no source hears that nobody wants the room.
            if before is not None:
                self._decoder.cancel_attempt(before, asked_again(message, self._name))
            return None
        # The writers are told too: an engine may have opened a send for this room already.
        for source in message.source[:MAX_SOURCES]:
            self._receives.withdraw_room(message.room, self._peers.find(source) or source, refusal)
        return refusal

    def _answer_again(
        self, session: int, message: client.ReceiveRequest, before: ReceiveAttempt
    ) -> Refusal | None:
        """It is answered as the first."""
        promised = 0 if before.lease is None else before.lease.promised_tokens
        if message.promise_tokens > promised:
            # Not answered with less: its engine would cancel that, and the first call's with it.
            return self._wrong(
                f"request {message.request_id} was promised {promised} tokens by its first call, "
                f"this one asks for {message.promise_tokens}"
            )
        answer = client.Receiving(
            message.call, before.id, before.prefix_tokens, promised_tokens=promised
        )
        self._out.answer(session, answer)
        return None

    def _not_into_arena(
        self,
        session: int,
        message: client.ReceiveRequest,
        tokens: Tokens,
        before: ReceiveAttempt | None,
    ) -> Refusal | None:
        """Why the pages that the engine has named cannot be written."""
        arena = self._owners.arena_of(session, message.arena)
        if isinstance(arena, Refusal):
            return arena
        size, have, n_tokens = self._leases.page_size, message.have_tokens, count(tokens)
        if have % size or not 0 <= have <= n_tokens:
            return self._wrong(
                f"have_tokens={have} of a prompt of {n_tokens}: whole pages of {size} tokens, and "
                "no more than the prompt"
            )
        beyond = message.reserve_tokens or message.promise_tokens
        if beyond or message.tier or len(message.source) != 1:
            what = "a receive into an arena has one source, no reserve, no promise and no tier"
            return self._wrong(what)
        pages = Pages(message.pages)
        n_pages = self._leases.pages_for(n_tokens) - have // size
        waiting = [
            receive
            for receive in self._receives.lent(arena.id)
            if receive.waiter and receive is not before
        ]
        queued = [
            (f"receive {receive.id}", receive.waiter.claim.pages)
            for receive in waiting
            if receive.waiter
        ]
        return bad_pages(arena, pages, n_pages, self._leases) or in_use(
            arena.id, pages, [*queued, *self._sends.reads_of(arena)]
        )

    def _pull(self, session: int, message: client.ReceiveRequest, tokens: Tokens) -> Refusal | None:
        """What one source has cached of the prompt; nobody else takes part."""
        refusal = self._drainer.refusal() or self._bad_receive(message, tokens)
        if refusal is None and (message.arena or message.pages):
            return self._wrong("a pull lands in pages that kvd places: receive it in a room")
        if refusal is None and len(message.source) != 1:
            refusal = self._wrong(
                f"a receive without a room from {', '.join(message.source)}: one source is asked "
                "what it has"
            )
        return refusal or self._pulls.pull(session, message, tokens)

    def _bad_receive(self, message: client.ReceiveRequest, tokens: Tokens) -> Refusal | None:
        least = min(message.reserve_tokens, message.promise_tokens, message.step_tokens)
        if not tokens or least < 0:
            return self._wrong(
                f"receive of {count(tokens)} tokens, {message.reserve_tokens} in reserve and "
                f"{message.promise_tokens} promised, {message.step_tokens} at a time"
            )
        n_tokens = count(tokens)
        refusal = bad_word(message.tiers, self._name)
        refusal = refusal or bad_tier(message.tier, n_tokens, self._spec, self._name)
        return refusal or self._decoder.offers.unfit_sources(message.source, n_tokens)

    def cancel_receive(
        self, session: int, message: client.CancelReceive, _: Tokens
    ) -> Refusal | None:
        """Its engine wants it no longer."""
        attempt = self._decoder.open.attempts.get(message.receive)
        if attempt is None or attempt.session != session:
            return unknown_handoff("receive", message.receive, self._name)
        # Answered first: what the cancel answers after it belongs to the receive, not to this call.
        self._out.answer(session, client.Done(message.call))
        self._decoder.cancel_attempt(
            attempt, Refusal(Code.CANCELLED, "the decode engine cancelled it", side=self._name)
        )
        return None
