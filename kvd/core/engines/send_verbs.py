"""Sends: a prompt that this node has computed goes to the node that decodes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace
from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import ENGINE
from kvd.core.engines.verbs import Verbs
from kvd.core.handoff.offer import prompt_digest
from kvd.core.handoff.parts import SendingEngine, SendPart
from kvd.core.handoff.refusals import bad_room, other_tokens, rank_gone, unknown_handoff
from kvd.core.handoff.retries import SendRetries, sends_prompt_of
from kvd.core.leases.arenas import bad_pages
from kvd.core.leases.written import say_advanced, tokens_of_ranks, why_unwritten
from kvd.errors import Code, Refusal
from kvd.types import Pages, Tokens, count
from kvd.wire import client

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.node_parts import NodeParts


@mypyc_attr(allow_interpreted_subclasses=True)
class SendVerbs(Verbs):
    """What a prefill engine asks of prompts that it computes for others."""

    def __init__(self, node: NodeParts) -> None:
        super().__init__(node)
        self._copies = node.engine_copies
        self._kept_rooms = node.kept_rooms
        self._retries = SendRetries(
            node.settings, node.leases, node.prefiller, node.kept_rooms, node.out
        )

    def send(self, session: int, message: client.SendRequest, tokens: Tokens) -> Refusal | None:
        """A prompt that is still being computed is sent as it is written."""
        # Before its lease is looked at, which the first of them may have ended.
        if message.request_id:
            before = self._retries.asked_before(session, message, tokens)
            if isinstance(before, Refusal):
                return before
            if before is not None:
                self._retries.answer_again(before, message)
                return None
        engine = self._sending_engine(session, message, tokens)
        if isinstance(engine, Refusal):
            return engine
        refusal = self._never_written(session, message.room, engine)
        return refusal or self._sends.open_send(message, engine)

    def _never_written(self, session: int, room: int, engine: SendingEngine) -> Refusal | None:
        """Why a send would wait in vain: for the word of a rank that is gone."""
        lease = engine.lease
        for rank, dead in self._sessions.by_id[session].dead_ranks.items():
            # What was leased later may be written by a new process of that rank.
            is_its_own = lease.since_s < dead.at_s and len(lease.said) == dead.ranks
            if not is_its_own or dead.ranks == 1:
                continue
            upto = tokens_of_ranks(lease)[rank]
            if upto < engine.prompt_tokens:
                what = f"a send in room {room}"
                refusal = rank_gone(dead.why, rank, upto, engine.prompt_tokens, what)
                return replace(refusal, side=self._name)
        return None

    def hand_over(self, session: int, message: client.HandOver, tokens: Tokens) -> Refusal | None:
        """A prompt that is written is sent as a whole."""
        if message.after and message.ends_lease:
            return self._wrong("a lease that ends before the event of its last tokens has come")
        if message.request_id:
            before = self._retries.asked_before(session, message, tokens)
            if isinstance(before, Refusal):
                return before
            if before is not None:
                return self._hand_over_again(session, message, before)
        engine = self._sending_engine(session, message, tokens)
        if isinstance(engine, Refusal):
            return engine
        refusal = why_unwritten(engine.lease, engine.prompt_tokens)
        refusal = refusal or self._sends.hand_over(message, engine)
        if refusal is None:
            _say_of_lease(engine.lease, engine.prompt_tokens, message.after)
            if message.ends_lease:
                self._end_sent(engine.lease)
        return refusal

    def _hand_over_again(
        self, session: int, message: client.HandOver, before: SendPart
    ) -> Refusal | None:
        """It is answered as the first; the lease that it brings is ended as it says."""
        lease = None
        # The first call may have ended it already: a call that is repeated word for word.
        own = self._leases.leases.get(message.lease)
        if message.ends_lease and own is not None and ENGINE in own.holders:
            found = self._owners.running_lease_of(session, message.lease)
            # What cannot be ended is not answered either: its engine would take it for ended.
            if isinstance(found, Refusal):
                return found
            if found.is_arena:
                return self._wrong("a send of an arena does not end the arena")
            lease = found
        n_tokens = before.request.n_tokens if before.request is not None else before.prompt_tokens
        self._retries.answer_again(before, message)
        if lease is not None:
            if why_unwritten(lease, n_tokens) is None:
                _say_of_lease(lease, n_tokens, b"")
            self._end_sent(lease)
        return None

    def _sending_engine(
        self, session: int, message: client.SendRequest | client.HandOver, tokens: Tokens
    ) -> SendingEngine | Refusal:
        """Who sends, of which lease; the caller opens the room."""
        refusal = bad_room(message.room, self._name) or self._drainer.refusal()
        if refusal is not None:
            return refusal
        if message.pages:
            return self._sending_from_arena(session, message, tokens)
        lease = self._owners.running_lease_of(session, message.lease)
        if isinstance(lease, Refusal):
            return lease
        tokens = tokens or lease.tokens
        if not sends_prompt_of(lease, tokens, message.namespace):
            return other_tokens(lease, tokens, message.namespace, self._name)
        digest = prompt_digest(tokens, message.namespace)
        return SendingEngine(session=session, lease=lease, tokens=tokens, digest=digest)

    def _sending_from_arena(
        self, session: int, message: client.SendRequest | client.HandOver, tokens: Tokens
    ) -> SendingEngine | Refusal:
        """The same of pages that the engine has named; it alone knows what is in them."""
        arena = self._owners.arena_of(session, message.lease)
        if isinstance(arena, Refusal):
            return arena
        if not tokens or (type(message) is client.HandOver and message.ends_lease):
            return self._wrong("a send of an arena names its tokens, and does not end the arena")
        pages = Pages(message.pages)
        refusal = bad_pages(arena, pages, self._leases.pages_for(count(tokens)), self._leases)
        if refusal is not None:
            return refusal
        key = message.namespace
        digest = prompt_digest(tokens, key)
        return SendingEngine(session, arena, tokens, digest, pages, namespace=key)

    def advance(self, session: int, message: client.Advance, _: Tokens) -> Refusal | None:
        """So much of the prompt is written."""
        part = self._part(session, message.send)
        if isinstance(part, Refusal):
            return part
        refusal = _unwritten(part, message.upto_tokens)
        refusal = refusal or self._sends.advance_send(part, message.upto_tokens, message.after)
        if refusal is None:
            # Only if the send took it: a refused number must not be a word about the lease.
            _say_of_lease(_lease_of(part), message.upto_tokens, message.after)
            self._out.answer(session, client.Done(message.call))
        return refusal

    def finish(self, session: int, message: client.Finish, _: Tokens) -> Refusal | None:
        """All of it is written; the answer tells how the handoff ended."""
        part = self._part(session, message.send)
        if isinstance(part, Refusal):
            # It hears now that it failed, and nobody else will ask for it.
            failed = self._prefiller.forget_failed(session, message.send)
            # The handoff failed, and the prompt was computed all the same: it stays cached here.
            if failed is not None:
                lease = self._leases.leases.get(failed.lease)
                if lease is not None and why_unwritten(lease, failed.prompt_tokens) is None:
                    _say_of_lease(lease, failed.prompt_tokens, message.after)
            return part
        lease = _lease_of(part)  # a part that settles at once lets go of it
        refusal = _unwritten(part, part.prompt_tokens)
        refusal = refusal or self._sends.finish_send(part, message.call, message.aux, message.after)
        if refusal is None:
            _say_of_lease(lease, part.prompt_tokens, message.after)
        return refusal

    def finish_and_release(
        self, session: int, message: client.FinishAndRelease, _: Tokens
    ) -> Refusal | None:
        """The same, and the lease of the prompt ends."""
        part = self._part(session, message.send)
        failed = self._prefiller.failed.get(message.send)
        if isinstance(part, Refusal):
            if failed is None or failed.session != session:
                return part
            number, prompt_tokens = failed.lease, failed.prompt_tokens
        else:
            assert part.engine is not None  # by_send has those with an engine
            number, prompt_tokens = part.engine.lease.id, part.prompt_tokens
        # First, because what cannot be released is not finished either.
        lease = self._owners.running_lease_of(session, number)
        if isinstance(lease, Refusal):
            return lease
        refusal = why_unwritten(lease, prompt_tokens)
        if refusal is not None:
            return refusal
        if isinstance(part, Refusal):
            self._prefiller.forget_failed(session, message.send)
            self._out.answer(session, _unsent(message.call, part))
        else:
            refusal = self._sends.finish_send(part, message.call, message.aux)
            if refusal is not None:
                return refusal
        _say_of_lease(lease, prompt_tokens, b"")
        self._end_sent(lease)
        return None

    def _end_sent(self, lease: LeaseRecord) -> None:
        """Its engine has said that the prompt is written, and lets go: what was said is kept."""
        # No commit, which counts also what a longer send of it still awaits an event for.
        lease.is_whole = self._copies.is_whole(lease)
        self._sessions.end_lease(lease, "normal")

    def keep_room(self, session: int, message: client.KeepRoom, _: Tokens) -> Refusal | None:
        """A room stays open for a decode engine that comes later."""
        return self._kept_rooms.keep_room(session, message)

    def abort_send(self, session: int, message: client.AbortSend, _: Tokens) -> Refusal | None:
        """Its engine gives it up; the decode side hears the reason."""
        part = self._part(session, message.send)
        if isinstance(part, Refusal):
            if self._prefiller.forget_failed(session, message.send) is None:
                return part
            self._out.answer(session, client.Done(message.call))
            return None
        # Answered first, as a cancel is.
        self._out.answer(session, client.Done(message.call))
        self._prefiller.abandon_send(
            part,
            Refusal(Code.ABORTED, f"the prefill engine gave up: {message.reason}", self._name),
        )
        return None

    def _part(self, session: int, send: int) -> SendPart | Refusal:
        part = self._prefiller.by_send.get(send)
        if part is not None and part.session == session:
            return part
        failed = self._prefiller.failed.get(send)
        if failed is not None and failed.session == session:
            return failed.refusal
        return unknown_handoff("send", send, self._name)


def _lease_of(part: SendPart) -> LeaseRecord | None:
    return part.engine.lease if part.engine is not None else None


def _unwritten(part: SendPart, upto_tokens: int) -> Refusal | None:
    """Why a send may not be told that so much of its prompt is written."""
    lease = _lease_of(part)
    return None if lease is None else why_unwritten(lease, upto_tokens)


def _say_of_lease(lease: LeaseRecord | None, upto_tokens: int, after: bytes) -> None:
    """What a send is told of its prompt holds for its lease."""
    if lease is not None:
        say_advanced(lease, upto_tokens, after)


def _unsent(call: int, refusal: Refusal) -> client.Finished:
    """The answer to the end of a send that had failed before."""
    return client.Finished(
        call=call, failure=refusal, decode_prefix_len=0, sent_pages=0, sent_bytes=0
    )
