"""Both sides of a handoff in the engine's hands."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvd.client.arguments import opaque, seconds, whole
from kvd.client.device_event import handle_of
from kvd.client.lease import Lease
from kvd.client.lease_key import LeaseKey
from kvd.client.port import ANSWER_WITHIN_S, Port, confused, within
from kvd.client.prompt import perform_about
from kvd.errors import Code, HandoffError, KvdError, Refusal
from kvd.types import MAX_ROOM
from kvd.wire import client as wire
from kvd.wire.bounds import MAX_REASON

if TYPE_CHECKING:
    from kvd.client.connection import Call
    from kvd.client.device_event import WhenWritten
    from kvd.client.pool import Pools
    from kvd.client.prompt import PromptAddress
    from kvd.client.state import LeaseView, ReceiveState, SendState


class ArrivingPages(msgspec.Struct, frozen=True, eq=False):
    """What of a prompt has come so far: an order to load from its pages may be made of it.

    The KV of the first ``n_tokens`` is in ``pages``, which are those of all of the prompt. ``key``
    goes with their numbers in an order. What was loaded counts once the receive is ``done``: until
    then the rest may fail to come, and then none of it is the prompt's KV.
    """

    n_tokens: int
    pages: NDArray[np.int32]
    key: LeaseKey


class Receive:
    """The decode side: pages are held, KV is on its way."""

    def __init__(
        self,
        port: Port,
        pools: Pools,
        state: ReceiveState,
        *,
        prompt: PromptAddress,
        within_s: float,
    ) -> None:
        self._port = port
        self._pools = pools
        self._state = state
        if state.prompt_tokens is not None:
            prompt.cut(state.prompt_tokens)
        self._prompt = prompt
        """Its lease's, which grows with that one."""
        self._n_tokens = prompt.n_tokens
        self._within_s = within_s
        self._delivered: wire.Received | None = None
        self._lease: Lease | None = None

    @property
    def id(self) -> int:
        """The receive's number within the daemon."""
        return self._state.number

    @property
    def prefix_len(self) -> int:
        """Tokens that were cached here already and are not sent; page aligned."""
        return self._state.prefix_tokens

    @property
    def promoted_len(self) -> int:
        """Tokens of ``prefix_len`` that came out of a tier below the pool for it."""
        return self._state.promoted_tokens

    @property
    def n_tokens(self) -> int:
        """Tokens of the prompt that are there after ``done``: all, or those that a pull found."""
        return self._n_tokens

    @property
    def arriving(self) -> ArrivingPages | None:
        """What has come, as far as was read, of one ``as_it_comes``; None: nothing, or it is over.

        It grows by whole pages, and none of them becomes another one.
        """
        state, come = self._state, self._state.arriving
        if come is None or state.outcome.value is not None or state.is_unwanted:
            return None
        key = self._pools.key_of(come.number, come.version)
        return ArrivingPages(state.arrived_tokens, come.pages, key)

    @property
    def is_ended(self) -> bool:
        """Whether ``done`` returns or raises at once."""
        return self._state.outcome.value is not None

    @property
    def lease(self) -> Lease:
        """The prompt's pages, committed; yours to release. After ``done``.

        Raises:
            KvdError: ``wrong-state`` before, and of a receive into an arena, which has none.
        """
        if self._lease is None and self._state.safe is not None:
            raise _not_yet(f"receive {self.id} has no lease: its KV is in pages of an arena")
        if self._lease is None:
            raise _not_yet(f"receive {self.id} has no lease yet: await done() first")
        return self._lease

    @property
    def aux(self) -> bytes:
        """What the prefill engine gave to ``finish``. After ``done``.

        Raises:
            KvdError: ``wrong-state`` before.
        """
        if self._delivered is None:
            raise _not_yet(f"receive {self.id} has no aux yet: await done() first")
        return self._delivered.aux

    async def done(self) -> None:
        """Wait until the prompt's KV is here and committed; repeatable.

        Raises:
            HandoffError: it ended otherwise; nothing is held for it any more.
        """
        what = f"receive {self.id}"
        outcome = await self._port.arrived(self._state.outcome, self._within_s, what)
        match outcome:
            case Refusal():
                raise HandoffError(outcome)
            case wire.Received():
                self._take(outcome)

    @property
    def is_safe(self) -> bool:
        """Whether no remote can write any more for it: ``safe`` returns at once."""
        safe = self._state.safe
        return self.is_ended if safe is None else safe.value is not None

    async def safe(self) -> None:
        """Wait until no remote write can land any more in the pages of an arena that it was given.

        After ``done`` that is so. After a failure, or ``cancel``, it is when the writer has said
        that it writes no more, is proven gone, or was fenced: then the pages are the engine's
        again. Pages of a lease need nobody who waits: kvd keeps them until then. Repeatable.

        Raises:
            KvdError: ``unreachable``: the daemon has ended. Nothing can land once ``Node`` is back.
        """
        safe = self._state.safe
        if safe is None:
            return
        told = await self._port.arrived(safe, math.inf, f"the end of writes for receive {self.id}")
        if isinstance(told, Refusal):
            raise KvdError(told)

    async def cancel(self) -> None:
        """Give it up; repeatable. When this returns nothing is held for it.

        Of an arena the pages are the engine's again when it is ``safe``.

        Raises:
            KvdError: ``wrong-state`` after ``done``: release its lease instead.
        """
        if self._lease is not None:
            if self._lease.is_released:
                return
            raise _not_yet(f"receive {self.id} was delivered: release its lease")
        match self._state.outcome.value:
            case None:
                await self._give_up()
            case wire.Received() as delivered:
                self._take(delivered)
                if self._lease is not None:
                    await self._lease.release()
            case Refusal():
                pass

    async def _give_up(self) -> None:
        self._state.is_unwanted = True
        request = wire.CancelReceive(self._port.connection.next_call(), self.id)
        try:
            await self._port.ask(request, wire.Done, about=self._state)
        except KvdError:
            # Delivered or ended while we asked: the record says so, and nothing is held.
            if self._state.outcome.value is None:
                raise

    def _take(self, delivered: wire.Received) -> None:
        state = self._state.lease
        self._delivered = delivered
        if self._lease is None and state is not None:
            state.kv_tokens = self._n_tokens
            self._lease = Lease(self._port, self._pools, state, self._prompt)


async def sending(
    port: Port, request: wire.SendRequest, prompt: PromptAddress | None, lease: LeaseView
) -> Send:
    """Open a send of ``lease``; ``prompt`` None: of all that it knows."""
    within_s = within(request.deadline_s)
    call = await perform_about(
        port, request, prompt, about=lease, within_s=min(within_s, ANSWER_WITHIN_S)
    )
    answer = call.answer.value
    if call.send is None or not isinstance(answer, wire.Sending):
        raise confused(request, answer)
    send = Send(port, call.send, lease, room=request.room, within_s=within_s)
    if request.when_written and not answer.finishes:
        await send.abort("it cannot finish by itself")
        why = "the daemon is older than this client, and finishes no send by itself: "
        why += "send without when_written, and call finish; or upgrade it"
        raise KvdError(Refusal(Code.NOT_SUPPORTED, why, side="client"))
    return send


class Outcome(msgspec.Struct, frozen=True):
    """What the decode side said of a finished send: ``reason`` is None when it committed.

    ``kept_s``: nothing yet, its room is kept for so many seconds (``send`` with ``ttl_s``).
    """

    committed: bool
    reason: Refusal | None
    decode_prefix_len: int
    sent_pages: int
    sent_bytes: int
    kept_s: float = 0.0


class Taken(msgspec.Struct, frozen=True):
    """A receive of a kept room that was committed by node ``peer``, ``ago_s`` seconds ago."""

    peer: str
    decode_prefix_len: int
    sent_pages: int
    sent_bytes: int
    ago_s: float


class KeptRoom(msgspec.Struct, frozen=True):
    """A room that is kept: for ``left_s`` seconds more; 0 of one that has just been ended.

    ``takers``: receives that were committed; ``taken`` has the last 64, oldest first. ``taking``:
    those under way.
    """

    left_s: float
    takers: int
    taking: int
    taken: tuple[Taken, ...]


def room_of(request_id: str) -> int:
    """A room for a request id: the same one in every process, one of 2**63 by a hash.

    For routers whose requests have an id of text that both engines know.
    """
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "little") % MAX_ROOM


def room_number(room: int) -> int:
    """The room, if it is one.

    Raises:
        KvdError: ``bad-room``.
    """
    number = room if type(room) is int else whole(room, "room")
    if not 1 <= number <= MAX_ROOM:
        raise KvdError(
            Refusal(
                Code.BAD_ROOM,
                f"room {number} is none: rooms are 1 to {MAX_ROOM}, chosen by the router",
                side="client",
                numbers={"room": str(number)},
            )
        )
    return number


async def keep_room(port: Port, room: int, ttl_s: float) -> KeptRoom:
    """Keep a room of this session, or end it with 0."""
    request = wire.KeepRoom(port.connection.next_call(), room, seconds(ttl_s, "ttl_s"))
    answer = await port.ask(request, wire.RoomKept)
    taken = tuple(
        Taken(
            peer=one.peer,
            decode_prefix_len=one.decode_prefix_len,
            sent_pages=one.sent_pages,
            sent_bytes=one.sent_bytes,
            ago_s=one.ago_s,
        )
        for one in answer.taken
    )
    return KeptRoom(left_s=answer.left_s, takers=answer.takers, taking=answer.taking, taken=taken)


def outcome(request: wire.Finish | wire.FinishAndRelease | wire.HandOver, call: Call) -> Outcome:
    """What has become of what was sent.

    Raises:
        KvdError: ``internal``: the daemon answered something else.
    """
    answer = call.answer.value
    if not isinstance(answer, wire.Finished):
        raise confused(request, answer)
    return Outcome(
        committed=answer.failure is None and not answer.kept_s,
        reason=answer.failure,
        decode_prefix_len=answer.decode_prefix_len,
        sent_pages=answer.sent_pages,
        sent_bytes=answer.sent_bytes,
        kept_s=answer.kept_s,
    )


class Share(msgspec.Struct, frozen=True):
    """What one source sends: KV of ``tokens`` (a range ``[start, end)`` of the prompt).

    Number ``rank`` of the ``ranks`` sources that have the same layers and heads; with more ranks
    than pages the range of the last ones has length 0. A dummy has nothing of what the decode side
    keeps; it opens the room and finishes all the same. The aux of ``finish`` goes to the decode
    engine from the authoritative source, and is dropped by all others.
    """

    rank: int
    ranks: int
    tokens: tuple[int, int]
    is_dummy: bool
    is_authoritative: bool


class Send:
    """The prefill side: what is written may be sent, as soon as both sides have met."""

    def __init__(
        self, port: Port, state: SendState, lease: LeaseView, *, room: int, within_s: float
    ) -> None:
        self._port = port
        self._room = room
        self._state = state
        self._lease = lease
        self._within_s = within_s
        self._events: list[WhenWritten] = []
        self._outcome: Outcome | None = None

    @property
    def id(self) -> int:
        """The send's number within the daemon."""
        return self._state.number

    @property
    def decode_prefix_len(self) -> int:
        """Tokens that the decode side has cached and is not sent. After ``accepted``.

        Raises:
            KvdError: ``wrong-state`` before.
        """
        return self._accepted().decode_prefix_len

    @property
    def share(self) -> Share:
        """What of the prompt is to be sent from here. After ``accepted``.

        Raises:
            KvdError: ``wrong-state`` before; ``not-supported`` by an older daemon.
        """
        told = self._accepted().share
        if told is None:
            why = f"the daemon does not say which share send {self.id} has: it is of an older kvd"
            raise KvdError(Refusal(Code.NOT_SUPPORTED, why, side="client"))
        span = told.start_tokens, told.end_tokens
        return Share(
            rank=told.rank,
            ranks=told.ranks,
            tokens=span,
            is_dummy=told.is_dummy,
            is_authoritative=told.is_authoritative,
        )

    @property
    def outcome(self) -> Outcome | None:
        """What ``finish`` has returned, or why the handoff ended before it; None until then."""
        if self._outcome is None and self._state.failure is not None:
            return _failed(self._state.failure)
        return self._outcome

    def _accepted(self) -> wire.Accepted:
        accepted = self._state.accepted.value
        if isinstance(accepted, wire.Accepted):
            return accepted
        raise _not_yet(f"send {self.id} has not been accepted yet: await accepted() first")

    async def accepted(self) -> None:
        """Wait until the decode side's offer has come; optional, repeatable.

        Raises:
            HandoffError: the handoff ended before.
        """
        what = f"the offer for send {self.id}"
        outcome = await self._port.arrived(self._state.accepted, self._within_s, what)
        if isinstance(outcome, Refusal):
            raise HandoffError(outcome)

    async def advance(self, upto_tokens: int, *, after: WhenWritten | bytes | None = None) -> None:
        """The KV of all tokens below ``upto_tokens`` is written; legal before the offer has come.

        Less than before changes nothing: what is written stays written. It is a word about the
        lease as well, as ``Lease.written`` is: a commit of it without a number shares that much.
        With ``after`` only a commit does, which is for when the event has come.

        Leave those pages alone until ``finish`` has returned: they are summed while they travel,
        and a page that changes meanwhile may fail the handoff as ``corrupt``.

        Args:
            upto_tokens: counted from the start of the prompt.
            after: the KV is written when this event comes: a
                ``torch.cuda.Event(interprocess=True)`` recorded behind the kernels that write it,
                or the 64 bytes of an event's IPC handle.
                Pages are read after the latest event that was given. An event object is kept until
                the handoff is over; whoever gives bytes keeps its event for as long.

        Raises:
            HandoffError: the handoff has ended: there is no need to compute the rest for it.
            KvdError: ``bad-request`` when it is negative, or more than the prompt.
        """
        self._raise_if_ended()
        call = self._port.connection.next_call()
        handle = self._keep(after)
        request = wire.Advance(
            call=call, send=self.id, upto_tokens=whole(upto_tokens, "upto_tokens"), after=handle
        )
        try:
            await self._port.ask(request, wire.Done, about=self._state)
        except KvdError:
            self._raise_if_ended()
            raise

    async def finish(
        self,
        aux: bytes = b"",
        *,
        after: WhenWritten | bytes | None = None,
        release: bool = False,
    ) -> Outcome:
        """All KV of the prompt is written. Returns when the decode side has spoken.

        For a room that is kept it returns at once, with ``kept_s``: the time of ``ttl_s`` begins.

        A word about the lease too, as ``advance`` is: tokens that are computed behind the prompt
        are shared once ``Lease.written``, or an ``upto_tokens``, counts them.

        Until then leave the pages of the prompt alone, the last, partial one too.

        Args:
            aux: opaque bytes for the decode engine: first token, logprobs ...
            after: as in ``advance``.
            release: the lease too, in the same message. What was said to be written stays cached,
                and the lease is over, whatever becomes of the handoff. Not with ``after``.

        Returns:
            whether it committed, or why not; a handoff that failed is no exception here.

        Raises:
            KvdError: refused; then the lease is not released.
        """
        handle = self._keep(after)
        number = self._port.connection.next_call()
        request: wire.Finish | wire.FinishAndRelease
        request = wire.Finish(call=number, send=self.id, aux=opaque(aux, "aux"), after=handle)
        if release:
            _no_event(handle)
            request = wire.FinishAndRelease(number, self.id, opaque(aux, "aux"))
        lease = self._lease if release else None
        try:
            call = await self._port.perform(
                request, about=self._state, lease=lease, within_s=self._within_s
            )
        except KvdError:
            failure = self._state.failure
            # With ``release`` it is refused only where the lease cannot be released.
            if release or failure is None or failure.code is Code.UNREACHABLE:
                raise
            self._outcome = _failed(failure)
        else:
            self._outcome = outcome(request, call)
        return self._outcome

    async def abort(self, reason: str) -> None:
        """This engine failed or gave up: the decode side is told, nothing more is sent.

        Args:
            reason: for whoever reads its story; the first 1024 characters of it are.
        """
        if self._state.failure is not None:
            return
        told = reason[:MAX_REASON]
        request = wire.AbortSend(self._port.connection.next_call(), self.id, told)
        try:
            await self._port.ask(request, wire.Done, about=self._state)
        except KvdError:
            # The daemon ended, and the handoff with it: there is nobody to be told.
            if self._state.lost is None:
                raise

    async def renew(self, ttl_s: float) -> KeptRoom:
        """Keep the room for ``ttl_s`` from now on, and hear who has received it; ``finish`` or not.

        Raises:
            KvdError: ``unknown-handoff``: it is over, or was opened without ``ttl_s`` and
                ``takers``; ``duplicate-room``: it is over, and its numbers say who had it last.
        """
        return await keep_room(self._port, self._room, ttl_s)

    async def end(self) -> KeptRoom:
        """End a room that is kept: nobody else gets it, and who receives it now goes on.

        Before ``finish`` there is nothing that could go on: then it is ``abort``.

        Raises:
            KvdError: as ``renew``.
        """
        return await keep_room(self._port, self._room, 0.0)

    def _keep(self, after: WhenWritten | bytes | None) -> bytes:
        """The event's handle; an event that ends before it was waited for is undefined in CUDA."""
        if after is not None and not isinstance(after, bytes):
            self._events.append(after)
        return handle_of(after)

    def _raise_if_ended(self) -> None:
        if self._state.failure is not None:
            raise HandoffError(self._state.failure)


def _failed(refusal: Refusal) -> Outcome:
    return Outcome(committed=False, reason=refusal, decode_prefix_len=0, sent_pages=0, sent_bytes=0)


def _no_event(handle: bytes) -> None:
    """Refuse to let a lease go whose KV will be written when an event comes."""
    if handle:
        why = "release and after exclude one another: release the lease when the event has come"
        raise KvdError(Refusal(Code.BAD_REQUEST, why, side="client"))


def _not_yet(message: str) -> KvdError:
    return KvdError(Refusal(Code.WRONG_STATE, message, side="client"))
