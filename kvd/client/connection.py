"""The client's half of the protocol, without a socket: calls out, answers and pushes in.

Shared by the asynchronous and the blocking client. Nothing here waits or reads a clock: whoever
owns the socket gives every arriving message to ``feed`` and sends what ``take_outgoing`` returns.

Theory of operation. ``begin`` numbers a request and keeps a ``Call`` until its answer has come. The
answer opens the record of a handle; pushes fill it, whether or not anyone waits there yet. A caller
may go away at any moment (cancelled, out of time): ``abandon`` then undoes what the call did or is
going to do::

    the answer is          undone by
    still to come          CancelCall, for a request that waits there; then as below
    Leased                 ReleaseLease
    Receiving              CancelReceive, and ReleaseLease if Received comes all the same
    Sending                AbortSend
    anything else          nothing: its effect on a handle's record is applied as usual

What was asked for again, with its request id, is the answer of several calls: it is undone when the
last of their callers has gone away. Before that it is in use, and so are its pages.

The daemon may end, and be back later in another life, which knows no call and no handoff of ours::

    here --lost--> away --returned--> here        calls begin only here
      |              |
      +---fail_all---+--> ended                   for good: every call ends with the same refusal

``lost`` ends every call and every handoff, and leaves the leases to their engine: their pages stay
its own, and ``unreleased`` names them to the daemon that is back. Their release is all that is
possible then; while the daemon is away it takes effect by not being named. ``fail_all`` ends the
leases too: nobody keeps their pages for this engine any more.

Invariants: each call is answered or failed at most once; a lease that the daemon granted is either
in the hands of the caller, or its release is on the way; call numbers never repeat, in no life; no
request about a handle of one life reaches another, except the release of a lease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from kvd.client.frames import frames_of
from kvd.client.state import (
    EventQueue,
    LeaseTiers,
    LeaseView,
    News,
    ReceiveState,
    SendState,
    Slot,
)
from kvd.errors import Code, KvdError, Refusal
from kvd.wire import client as wire
from kvd.wire.codec import CLIENT_REPLIES, CLIENT_REQUESTS, readable_replies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvd.client.state import Answer
    from kvd.types import Tokens

CHANGES_ROWS = (
    wire.CommitLease
    | wire.CommitUpTo
    | wire.CommitAndExtend
    | wire.RetractLease
    | wire.ResumeLease
    | wire.SlideLease
)
"""Calls by which a lease gives pages away: a commit does, for equal ones that are cached."""

ENDS_SENDS = frozenset({wire.Finish, wire.AbortSend, wire.FinishAndRelease})
"""Calls behind whose answer a send is over."""

RELEASES = frozenset({wire.ReleaseLease, wire.CommitAndRelease, wire.ReleaseUpTo})
"""Calls that end a lease and do nothing else: they have no answer but that it is over."""

ENDS_LEASES = RELEASES | {wire.FinishAndRelease}
"""Calls behind whose answer a lease is over; so it is behind some hand-overs."""

WAITS = wire.OpenLease | wire.ReceiveRequest | wire.ResumeLease | wire.HandOver
"""Calls that wait at the daemon, for room or for a peer, and can be cancelled there."""

UNDONE = "the engine no longer waits for it"
"""Why an abandoned send was aborted, for whoever reads its story."""

MOST_KEPT_ROOMS = 4096
"""Kept rooms of which it is known how many calls were told of them; the oldest is forgotten."""


class KnownPrompt(msgspec.Struct, frozen=True):
    """A prompt that the daemon keeps: its number, and so many tokens that need not be told."""

    number: int
    n_tokens: int


class Outgoing(msgspec.Struct, frozen=True):
    """A message to send, and the call that fails if it cannot be."""

    call: int
    frames: list[bytes]


class Call:
    """One request under way. ``lease`` is the record that its answer changes or opens, if any.

    ``receive`` and ``send`` are the records that its answer opened.
    """

    receive: ReceiveState | None = None
    send: SendState | None = None
    is_abandoned = False
    releases_anyway = False
    """Whether its lease is to be released, too, where this is refused."""

    def __init__(self, request: wire.Request, lease: LeaseView | None) -> None:
        self.request = request
        self.lease = lease
        self.answer: Slot[Answer | Refusal] = Slot()


class Connection:
    """One session's calls and handles."""

    def __init__(self, *, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._last_call = 0
        self._calls: dict[int, Call] = {}
        self._receives: dict[int, ReceiveState] = {}
        self._in_doubt: dict[int, ReceiveState] = {}
        """Receives into an arena that have failed, while a remote may still write its pages."""
        self._sends: dict[int, SendState] = {}
        self._kept_rooms: dict[tuple[int, str], int] = {}
        """By room and request id of a hand-over, how many callers want the room that it keeps."""
        self._leases: dict[int, LeaseView] = {}
        self._readers: list[EventQueue] = []
        self.queued: list[Outgoing] = []
        """To be sent, in order; see ``take_outgoing``."""
        self.end: Refusal | None = None
        """Why no call can begin any more; None while one can."""
        self._away: Refusal | None = None
        self.back: Slot[News] | None = None
        """While the daemon is away: filled when it is back, or never will be."""
        self.unreadable_messages = 0
        # What is no answer to a call. Looked up, because matching costs a case per class: Any,
        # because each takes its own type of message.
        self._takers: dict[type, Callable[[Any], None]] = {
            wire.Failed: self._failed,
            wire.Received: self._received,
            wire.Arriving: self._arriving,
            wire.ReceiveFailed: self._received,
            wire.PagesBack: self._pages_back,
            wire.Accepted: self._accepted,
            wire.SendFailed: self._send_failed,
            wire.LeaseLost: self._lease_lost,
            wire.Events: self._happened,
        }
        # What an answer changes, beside its call; those that are not here change nothing.
        self._appliers: dict[type, Callable[[Call, Any], None]] = {
            wire.Leased: self._leased,
            wire.PageTable: self._paged,
            wire.Done: self._ended,
            wire.Receiving: self._receiving,
            wire.Sending: self._sending,
            wire.Finished: self._finished,
            wire.Retracted: self._retracted,
            wire.Resumed: self._resumed,
        }

    @property
    def away(self) -> Refusal | None:
        """Why the daemon is not there now; None while it is, or once all is over."""
        return self._away

    @property
    def is_waiting(self) -> bool:
        """Whether the daemon still owes an answer, or the end of a handoff."""
        return bool(self._calls or self._receives or self._sends or self._in_doubt)

    def next_call(self) -> int:
        """A number for the next request."""
        self._last_call += 1
        return self._last_call

    def begin(
        self,
        request: wire.Request,
        tokens: Tokens | None = None,
        lease: LeaseView | None = None,
        known: KnownPrompt | None = None,
    ) -> Call:
        """Queue a request for sending.

        Args:
            request: its ``call`` comes from ``next_call``.
            tokens: the tokens frame of a request that has one.
            lease: the record that a ``Row`` or the end of the lease changes.
            known: where ``tokens`` go on with a prompt that the daemon keeps.

        Raises:
            KvdError: the daemon is gone; or the request has a field of the wrong type, or is too
                long, which is found here because the daemon could not say whose it was.
        """
        why_not = self.end or self._away
        if why_not is not None:
            raise KvdError(why_not)
        asked = request
        if known is not None:
            assert isinstance(request, wire.ABOUT_PROMPTS)
            asked = wire.AboutPrompt(request.call, known.number, known.n_tokens, request)
        frames = frames_of(asked, tokens, self._max_frame_bytes)
        call = Call(request, lease)
        self._calls[request.call] = call
        self.queued.append(Outgoing(request.call, frames))
        return call

    def abandon(self, call: Call) -> None:
        """Nobody wants the answer any more: undo it, now or when it comes; repeatable."""
        if call.is_abandoned:
            return
        call.is_abandoned = True
        if call.request.call not in self._calls:
            if call.answer.value is not None:
                self._undo(call, call.answer.value)
        elif isinstance(call.request, WAITS):
            self.tell(wire.CancelCall(self.next_call(), call.request.call))

    def take_outgoing(self) -> list[Outgoing]:
        """What is to be sent, in order; the caller sends it."""
        out, self.queued = self.queued, []
        return out

    def not_sent(self, outgoing: Outgoing, refusal: Refusal) -> None:
        """That message could not be sent: its call fails."""
        self._settle(outgoing.call, refusal)

    def open_events(self) -> EventQueue:
        """A queue that gets every event pushed from now on."""
        queue = EventQueue()
        self._readers.append(queue)
        return queue

    def close_events(self, queue: EventQueue) -> bool:
        """That reader is done; returns whether it was the last."""
        self._readers.remove(queue)
        return not self._readers

    def under_way(self) -> set[int]:
        """The numbers of all calls that have no answer yet."""
        return set(self._calls)

    def unanswered(self, refusal: Refusal, calls: set[int]) -> None:
        """No answer of these can be relied on: they end with this, and are undone if one comes."""
        for number in sorted(calls & self._calls.keys()):
            call = self._calls[number]
            if not call.is_abandoned:
                # The daemon may have read it all the same: what it grants is of nobody here.
                call.answer.put(refusal)
                self._release_anyway(call)
                self.abandon(call)

    # ---- the ends of the daemon ------------------------------------------------------------------

    def fail_all(self, refusal: Refusal) -> None:
        """It is over for good: every call and every handle ends with this; repeatable."""
        if self.end is not None:
            return
        self.end, self._away = refusal, None
        self._fail(refusal)
        leases, self._leases = self._leases, {}
        for lease in leases.values():
            lease.over = refusal
        for queue in self._readers:
            queue.close(refusal)
        self._wake()

    def lost(self, refusal: Refusal) -> None:
        """The daemon has ended, and may be back; what it was asked ended with it; repeatable."""
        if self.end is not None or self._away is not None:
            return
        self._away, self.back = refusal, Slot()
        for call in self._calls.values():
            if call.lease is not None and isinstance(call.request, CHANGES_ROWS):
                call.lease.is_row_known = False
        self._fail(refusal)
        for lease in self._leases.values():
            lease.lose()
        for queue in self._readers:
            queue.restarted()

    def unreleased(self) -> tuple[int, ...]:
        """The leases whose pages the engine still uses; to be named to the daemon that is back."""
        return tuple(self._leases)

    def returned(self, kept: Iterable[int], *, max_frame_bytes: int) -> None:
        """The daemon is back and keeps these leases for us; another life of it begins."""
        self._max_frame_bytes = max_frame_bytes
        self._away = None
        keeps = frozenset(kept)
        for number in keeps - self._leases.keys():  # released while we were waiting for its word
            self.tell(wire.ReleaseLease(self.next_call(), number))
        for number in self._leases.keys() - keeps:
            self._leases.pop(number).is_kept = False
        if self._readers:
            self.tell(wire.Subscribe(self.next_call()))
        self._wake()

    def forget_lease(self, lease: LeaseView) -> bool:
        """The engine uses a lost lease no more; whether the daemon is there and must be told."""
        lease.is_released = True
        was_kept = self._leases.pop(lease.number, None) is not None
        return was_kept and self.end is None and self._away is None

    def has_lease(self, number: int) -> LeaseView | None:
        """The lease of that number whose pages are this engine's, or are kept for it, or come."""
        coming = (receive.arriving for receive in self._receives.values() if receive.arriving)
        return self._leases.get(number) or next((c for c in coming if c.number == number), None)

    def _fail(self, refusal: Refusal) -> None:
        """Every call and every handoff ends; a release has no less effect by being lost."""
        self.queued.clear()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if self._away is not None and call.lease is not None and _ends_lease(call.request):
                self._lease_ended(call.lease)
                if type(call.request) in RELEASES:
                    call.answer.put(wire.Done(call.request.call))
            call.answer.put(refusal)
        receives = [*self._receives.values(), *self._in_doubt.values()]
        self._receives, self._in_doubt = {}, {}
        for receive in receives:
            receive.lost = refusal
            receive.outcome.put(refusal)
            if receive.safe is not None:
                receive.safe.put(refusal)
        self._kept_rooms.clear()
        sends, self._sends = self._sends, {}
        for send in sends.values():
            send.lost = refusal
            send.fail(refusal)

    def _wake(self) -> None:
        """Whoever waits for the return can go on."""
        back, self.back = self.back, None
        if back is not None:
            back.put(News.CAME)

    # ---- what comes in ---------------------------------------------------------------------------

    def feed(self, frames: list[bytes]) -> None:
        """One message from the daemon; what of it cannot be read is counted and changes nothing."""
        message = CLIENT_REPLIES.decode(frames[0])
        if type(message) is Refusal:
            replies, unreadable = readable_replies(frames[0])
            self.unreadable_messages += unreadable
            message = wire.Several(tuple(replies))
        for reply in message.replies if type(message) is wire.Several else (message,):
            taker = self._takers.get(type(reply))
            if taker is None:
                self._settle(reply.call, reply)  # type: ignore[union-attr, arg-type]
            else:
                taker(reply)

    def _accepted(self, push: wire.Accepted) -> None:
        if push.send in self._sends:
            self._sends[push.send].accepted.put(push)

    def _send_failed(self, push: wire.SendFailed) -> None:
        if push.send in self._sends:
            self._sends.pop(push.send).fail(push.refusal)

    def _lease_lost(self, push: wire.LeaseLost) -> None:
        lease = self._leases.get(push.lease)
        if lease is not None:
            lease.condemned = push.refusal

    def _happened(self, push: wire.Events) -> None:
        for queue in self._readers:
            queue.push(push.lost, push.events)

    def _failed(self, answer: wire.Failed) -> None:
        """A refused call; -1 says that nothing of this session can be read, so all of it ends."""
        if answer.call >= 0:
            self._settle(answer.call, answer.refusal)
        else:
            self.unanswered(answer.refusal, self.under_way())

    def _settle(self, number: int, answer: Answer | Refusal) -> None:
        """The answer of a call: apply it to the records, then hand it over or undo it."""
        call = self._calls.pop(number, None)
        if call is None:
            return
        apply = self._appliers.get(type(answer))
        if apply is not None:
            try:
                apply(call, answer)
            except Exception:
                # Whoever reads the socket gets the bug; whoever waits for the call, an end.
                call.answer.put(_not_applied(call.request, answer))
                raise
        call.answer.put(answer)
        if call.is_abandoned:
            self._undo(call, answer)
        elif type(answer) is Refusal:
            self._release_anyway(call)

    def _leased(self, call: Call, answer: wire.Leased) -> None:
        call.lease = lease = self._leases[answer.lease] = LeaseView(
            answer.lease,
            prefix_tokens=answer.prefix_tokens,
            pages=answer.pages,
            beside=answer.beside,
        )
        if answer.promoted_tokens or answer.tier_tokens:  # as of few leases
            lease.tiers = LeaseTiers(answer.promoted_tokens, answer.tier_tokens, answer.tier_ms)

    def _paged(self, call: Call, answer: wire.PageTable) -> None:
        if call.lease is not None:
            call.lease.replace(answer.first, answer.pages, answer.beside)

    def _retracted(self, call: Call, _: wire.Retracted) -> None:
        if call.lease is not None:
            call.lease.retracted()

    def _resumed(self, call: Call, answer: wire.Resumed) -> None:
        if call.lease is not None:
            call.lease.resumed(answer)

    def _receiving(self, call: Call, answer: wire.Receiving) -> None:
        # Asked again with its request id it is the same one, and its outcome comes once.
        number = answer.receive
        known = self._receives.get(number)
        is_in_arena = isinstance(call.request, wire.ReceiveRequest) and call.request.arena
        call.receive = known or ReceiveState(
            number, answer.prefix_tokens, answer.prompt_tokens, is_in_arena=bool(is_in_arena)
        )
        self._receives[number] = call.receive
        call.receive.promoted_tokens = answer.promoted_tokens
        call.receive.callers += 1

    def _sending(self, call: Call, answer: wire.Sending) -> None:
        call.send = self._sends.get(answer.send) or SendState(answer.send)
        self._sends[answer.send] = call.send
        call.send.callers += 1

    def _finished(self, call: Call, answer: wire.Finished) -> None:
        if answer.kept_s:
            self._note_kept(call.request)
        self._ended(call, answer)

    def _ended(self, call: Call, _: wire.Done | wire.Finished) -> None:
        """What the request was about is over: its record is no longer fed."""
        request, lease = call.request, call.lease
        if type(request) in ENDS_SENDS:
            self._sends.pop(request.send, None)  # type: ignore[union-attr]
        if lease is not None and _ends_lease(request):
            self._lease_ended(lease)

    def _lease_ended(self, lease: LeaseView) -> None:
        lease.is_released = True
        self._leases.pop(lease.number, None)

    def _release_anyway(self, call: Call) -> None:
        if call.releases_anyway and call.lease is not None:
            self.tell(wire.ReleaseLease(self.next_call(), call.lease.number))

    def _received(self, push: wire.Received | wire.ReceiveFailed) -> None:
        """A receive ended. A lease that nobody asked for any more goes back at once."""
        state = self._receives.pop(push.receive, None)
        match push:
            case wire.Received() if state is not None and state.safe is not None:
                # In the engine's own pages: there is no lease that could be given back.
                state.outcome.put(push)
                state.safe.put(push)
            case wire.Received(_, lease, pages, beside=beside):
                if state is not None and not state.is_unwanted:
                    state.lease = self._leases[lease] = LeaseView(
                        lease, prefix_tokens=state.prefix_tokens, pages=pages, beside=beside
                    )
                    state.lease.tiers = LeaseTiers(state.promoted_tokens)
                    state.outcome.put(push)
                    return
                self.tell(wire.ReleaseLease(self.next_call(), lease))
                if state is not None:
                    state.outcome.put(_given_back(state.number))
            case wire.ReceiveFailed(refusal=refusal):
                if state is not None:
                    state.outcome.put(refusal)
                    if state.safe is not None:
                        self._in_doubt[state.number] = state
            case _:
                assert_never(push)

    def _arriving(self, push: wire.Arriving) -> None:
        state = self._receives.get(push.receive)
        if state is None:
            return
        if state.arriving is None:
            # No lease of this engine's: nothing of it is released, and it is nobody's to name.
            prefix = state.prefix_tokens
            state.arriving = LeaseView(push.lease, prefix_tokens=prefix, pages=push.pages)
        state.arrived_tokens = max(state.arrived_tokens, push.tokens)

    def _pages_back(self, push: wire.PagesBack) -> None:
        state = self._in_doubt.pop(push.receive, None)
        if state is not None and state.safe is not None:
            state.safe.put(push)

    # ---- undoing ---------------------------------------------------------------------------------

    def _undo(self, call: Call, answer: Answer | Refusal) -> None:
        match answer:
            case wire.Leased(lease=lease):
                self._give_back(lease)
            case wire.Receiving() if call.receive is not None:
                self._undo_receive(call.receive)
            case wire.Sending(send=number) if call.send is not None and call.send.lost is None:
                call.send.callers -= 1
                if not call.send.callers:
                    self._sends.pop(number, None)
                    self.tell(wire.AbortSend(self.next_call(), number, UNDONE))
            # Its engine has let go of the call, and nobody else ends the room before its time.
            case wire.Finished(kept_s=kept_s) if kept_s and type(call.request) is wire.HandOver:
                if not self._is_kept_for_others(call.request):
                    self.tell(wire.KeepRoom(self.next_call(), call.request.room, 0.0))
            case _:
                pass

    def _note_kept(self, request: wire.Request) -> None:
        """One call more was told that its room is kept; only a request id makes them several."""
        if type(request) is wire.HandOver and request.request_id:
            kept, named = self._kept_rooms, (request.room, request.request_id)
            # Out and in again: the oldest stands first.
            kept[named] = kept.pop(named, 0) + 1
            if len(kept) > MOST_KEPT_ROOMS:
                del kept[next(iter(kept))]

    def _is_kept_for_others(self, request: wire.HandOver) -> bool:
        """One caller less wants that room; whether there are others."""
        named = request.room, request.request_id
        callers = self._kept_rooms.pop(named, 1) - 1
        if callers:
            self._kept_rooms[named] = callers
        return callers > 0

    def _undo_receive(self, state: ReceiveState) -> None:
        state.callers -= 1
        if state.callers:
            return
        match state.outcome.value:
            case wire.Received(lease=lease):
                self._give_back(lease)
            case None:
                state.is_unwanted = True
                self.tell(wire.CancelReceive(self.next_call(), state.number))
            case Refusal():
                pass

    def _give_back(self, lease: int) -> None:
        if self._leases.pop(lease, None) is not None:
            self.tell(wire.ReleaseLease(self.next_call(), lease))

    def tell(self, request: wire.Request) -> None:
        """Queue a request whose answer nobody needs; one to a daemon that is away is dropped."""
        if self.end is None and self._away is None:
            self.queued.append(Outgoing(request.call, [CLIENT_REQUESTS.encode(request)]))


def _ends_lease(request: wire.Request) -> bool:
    if type(request) is wire.HandOver:
        return request.ends_lease
    return type(request) in ENDS_LEASES


def _not_applied(request: wire.Request, answer: object) -> Refusal:
    return Refusal(
        Code.INTERNAL,
        f"the answer of {type(request).__name__}, {type(answer).__name__}, could not be taken "
        "note of, which is a bug of kvd: close this node and connect anew, which releases all",
        side="client",
    )


def _given_back(number: int) -> Refusal:
    return Refusal(
        Code.CANCELLED,
        f"receive {number} was delivered after it was cancelled; its lease was given back",
        side="client",
    )
