"""Calls that come again: a request id names what its engine asked for before.

An engine, or the router before it, that does not know whether its call was heard makes it again
with the same request id. It is answered with what the first one has opened, and nothing is opened
twice. What an id names is one prompt in one namespace (with its epoch), asked for by one session
with one verb in one room; a call that asks for anything else under it is refused, and hears what
differs: the KV of one prompt must never answer for another.

What must not live here: what a send or a receive does (``send_requests``, ``receive_requests``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.cache.namespaces import quoted, told
from kvd.core.handoff.offer import prompt_digest
from kvd.core.handoff.parts import NamedRequest
from kvd.core.handoff.refusals import asked_again, other_tokens
from kvd.errors import Code, Number, Refusal
from kvd.types import Pages, Tokens, count
from kvd.wire import client

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.handoff.kept import KeptRooms
    from kvd.core.handoff.open_receives import OpenReceives
    from kvd.core.handoff.parts import ReceiveAttempt, SendPart
    from kvd.core.handoff.send import Prefiller
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.outbox import Outbox
    from kvd.core.settings import Settings


def sent_request(
    message: client.SendRequest | client.HandOver, digest: bytes, n_tokens: int
) -> NamedRequest:
    """What a send or a hand-over that has a request id is called."""
    return NamedRequest(
        message.request_id,
        verb="hand_over" if type(message) is client.HandOver else "send",
        namespace=message.namespace,
        digest=digest,
        n_tokens=n_tokens,
        lease=message.lease,
        pages=Pages(message.pages),
    )


def received_request(message: client.ReceiveRequest, tokens: Tokens) -> NamedRequest:
    """What a receive that has a request id is called."""
    return NamedRequest(
        message.request_id,
        verb="receive",
        namespace=message.namespace,
        digest=prompt_digest(tokens, message.namespace),
        n_tokens=count(tokens),
        lease=message.arena,
        pages=Pages(message.pages),
        have_tokens=message.have_tokens,
        cache=message.cache,
    )


def sends_prompt_of(lease: LeaseRecord, tokens: Tokens, namespace: str) -> bool:
    """Whether these tokens are the lease's, or the first of them: no others may be sent of it."""
    if not tokens or lease.namespace != namespace:
        return False
    # The very same ones where the engine has named none: comparing reads all of them.
    return tokens is lease.tokens or lease.tokens.startswith(tokens)


def other_request(first: NamedRequest, now: NamedRequest, room: int, side: str) -> Refusal | None:
    """Why a call is not the one that its request id names; None: it is."""
    numbers: dict[str, Number] = {"first_tokens": first.n_tokens, "tokens": now.n_tokens}
    code, what = Code.PROMPT_MISMATCH, ""
    if now.verb != first.verb:
        code, what = Code.DUPLICATE_ROOM, f"it was a {first.verb}, this is a {now.verb}"
        numbers |= {"first_verb": first.verb, "verb": now.verb}
    elif now.namespace != first.namespace:
        what = f"it was in namespace {quoted(first.namespace)}, this is in {quoted(now.namespace)}"
        numbers |= {"first_namespace": told(first.namespace), "namespace": told(now.namespace)}
    elif now.n_tokens != first.n_tokens:
        what = f"its prompt has {first.n_tokens} tokens, this one {now.n_tokens}"
    elif now.digest != first.digest:
        what = (
            f"both prompts have {now.n_tokens} tokens, but other ones (digests "
            f"{first.digest.hex()[:8]} and {now.digest.hex()[:8]})"
        )
        numbers |= {"first_digest": first.digest.hex(), "digest": now.digest.hex()}
    # Of an arena the pages are the engine's word: what was sent from others, or lands in others, is
    # no answer.
    elif (now.pages or first.pages) and (now.lease, now.pages) != (first.lease, first.pages):
        code, what = Code.BAD_PAGES, "it names other pages of an arena"
        numbers |= {"first_pages": count(first.pages), "pages": count(now.pages)}
    elif now.have_tokens != first.have_tokens:
        code, what = Code.BAD_PAGES, "the pages of its arena are for other tokens of the prompt"
        numbers |= {"first_have_tokens": first.have_tokens, "have_tokens": now.have_tokens}
    # One lease would be both: what the one keeps out of the cache the other puts into it.
    elif now.cache != first.cache:
        code, what = Code.DUPLICATE_ROOM, f"it said cache={first.cache}, this says {now.cache}"
    if not what:
        return None
    return Refusal(
        code,
        f"request {now.id} of room {room} was asked for before, and not so: {what}; give each "
        "request an id of its own",
        side=side,
        numbers=numbers,
    )


@mypyc_attr(allow_interpreted_subclasses=True)
class SendRetries:
    """Sends and hand-overs that come again."""

    def __init__(
        self,
        settings: Settings,
        leases: LeaseTable,
        sends: Prefiller,
        kept: KeptRooms,
        out: Outbox,
    ) -> None:
        self._settings = settings
        self._leases = leases
        self._sends = sends
        self._kept = kept
        self._out = out

    def asked_before(
        self, session: int, message: client.SendRequest | client.HandOver, tokens: Tokens
    ) -> SendPart | Refusal | None:
        """The send that this session has opened with the same request id.

        A refusal: it was served, or is not what is asked for now. None: there is none.
        """
        room, sends = message.room, self._sends
        part = sends.rooms.by_room.get(room)
        if part is None or part.session != session or not _is_called(part, message.request_id):
            part = sends.settled_sends.named.get((session, room, message.request_id))
        if part is not None:
            first = part.request
            assert first is not None
            refusal = self._other(first, message, session, tokens)
            return refusal or self._unwritten(part, first, message) or part
        served = sends.served_rooms.by_room.get(room)
        if served is None or served.request is None or served.request.id != message.request_id:
            return None
        return sends.served_rooms.served(room, self._out.at_s)

    def _other(
        self,
        first: NamedRequest,
        message: client.SendRequest | client.HandOver,
        session: int,
        tokens: Tokens,
    ) -> Refusal | None:
        """Why the call is another one than the first with its request id."""
        # Without tokens the lease of the first call stands for the prompt that it had then: it may
        # know more by now, or be over and have taken its tokens along. Its number is never given
        # again.
        digest, n_tokens = first.digest, first.n_tokens
        if tokens or message.lease != first.lease:
            lease, side = self._leases.leases.get(message.lease), self._settings.name
            if lease is not None and lease.session == session and not lease.is_arena:
                tokens = tokens or lease.tokens
                if not sends_prompt_of(lease, tokens, message.namespace):
                    return other_tokens(lease, tokens, message.namespace, side)
            if not tokens:
                return Refusal(
                    Code.UNKNOWN_LEASE,
                    f"lease {message.lease} is not one of this session's, and request "
                    f"{message.request_id} was asked for with lease {first.lease}",
                    side=side,
                    numbers={"lease": message.lease, "first_lease": first.lease},
                )
            digest, n_tokens = prompt_digest(tokens, message.namespace), count(tokens)
        now = sent_request(message, digest, n_tokens)
        return other_request(first, now, message.room, self._settings.name)

    def _unwritten(
        self, part: SendPart, first: NamedRequest, message: client.SendRequest | client.HandOver
    ) -> Refusal | None:
        """Why a send that is still written cannot go on from another lease.

        What its engine says to have written from here on would be in pages that are not sent.
        """
        if part.aux is not None or message.lease == first.lease:
            return None
        return Refusal(
            Code.DUPLICATE_ROOM,
            f"request {first.id} of room {message.room} is written in lease {first.lease} and sent "
            f"from there, this call names lease {message.lease}: abort send {part.id} before it is "
            "written anew",
            side=self._settings.name,
            numbers={"first_lease": first.lease, "lease": message.lease, "send": part.id},
        )

    def answer_again(self, part: SendPart, message: client.SendRequest | client.HandOver) -> None:
        """The call is answered as the first one is."""
        if type(message) is not client.HandOver:
            self._out.answer(part.session, client.Sending(message.call, part.id, part.finishes))
            return
        # Its end is told once, to the call that came last.
        if part.finish_call is not None:
            earlier = asked_again(message, self._settings.name)
            self._out.answer(part.session, client.Failed(part.finish_call, earlier))
            if self._sends.handed_over.pop((part.session, part.finish_call), None) is not None:
                self._sends.handed_over[part.session, message.call] = part
        part.finish_call = message.call
        self._kept.answer_finish(part)


@mypyc_attr(allow_interpreted_subclasses=True)
class ReceiveRetries:
    """Receives that come again."""

    def __init__(self, settings: Settings, receives: OpenReceives) -> None:
        self._settings = settings
        self._receives = receives

    def asked_before(
        self, session: int, room: int, now: NamedRequest
    ) -> ReceiveAttempt | Refusal | None:
        """The receive that this session has asked for with the same request id, if it lives.

        A refusal: it was delivered, and its engine has the lease, or it is another one.
        """
        receives, side = self._receives, self._settings.name
        attempt = receives.named.get((session, room, now.id))
        if attempt is None:
            return None
        lease = receives.lease_of_ready(attempt)
        # One that was given up or has failed, and is drained: the call that comes again is anew.
        if lease is None and attempt.ended is not None:
            return None
        assert attempt.request is not None
        other = other_request(attempt.request, now, room, side)
        if other is not None or lease is None:
            return other or attempt
        return Refusal(
            Code.DUPLICATE_ROOM,
            f"request {now.id} has received room {room} already: lease {lease} has its KV "
            "until it is released",
            side=side,
            numbers={"lease": lease},
        )


def _is_called(part: SendPart, request_id: str) -> bool:
    return part.request is not None and part.request.id == request_id
