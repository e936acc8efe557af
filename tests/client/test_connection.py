"""The protocol without sockets: frames made by the codec go in, frames come out."""

from __future__ import annotations

import msgspec
import pytest

from kvd.client.connection import UNDONE, Call, Connection
from kvd.client.state import EventsLost, LeaseView
from kvd.errors import Code, KvdError, Refusal
from kvd.types import Tokens, pack_ids
from kvd.wire import client as wire
from kvd.wire.codec import CLIENT_REPLIES, CLIENT_REQUESTS
from kvd.wire.events import Evicted

REFUSED = Refusal(Code.NO_ROOM, "8 pages needed, 3 free", side="node-a")
GONE = Refusal(Code.UNREACHABLE, "the daemon is gone", side="client")


def connection() -> Connection:
    return Connection(max_frame_bytes=1024)


def begin(own: Connection, request: wire.Request, lease: LeaseView | None = None) -> Call:
    call = own.begin(request, Tokens(b"") if type(request) in wire.TAKES_TOKENS else None, lease)
    own.take_outgoing()
    return call


def feed(own: Connection, *messages: wire.Reply | wire.Several) -> None:
    for message in messages:
        own.feed([CLIENT_REPLIES.encode(message)])


def sent(own: Connection) -> list[object]:
    """What goes out now, decoded."""
    return [CLIENT_REQUESTS.decode(out.frames[0]) for out in own.take_outgoing()]


def lease_of(pages: list[int]) -> LeaseView:
    return LeaseView(7, prefix_tokens=0, pages=pack_ids(pages))


# ---- calls ---------------------------------------------------------------------------------------


def test_answers_find_their_calls_in_any_order() -> None:
    own = connection()
    calls = [begin(own, wire.MatchPrefix(own.next_call())) for _ in range(3)]

    feed(own, wire.MatchReply(3, 30, 0, 0), wire.Failed(1, REFUSED), wire.MatchReply(2, 20, 0, 0))

    assert [call.answer.value for call in calls] == [
        REFUSED,
        wire.MatchReply(2, 20, 0, 0),
        wire.MatchReply(3, 30, 0, 0),
    ]


def test_several_answers_and_pushes_in_one_message_do_what_they_do_alone() -> None:
    """In their order: the push names what the answer before it has told of."""
    refused = wire.ReceiveFailed(11, REFUSED)
    told = (
        wire.Receiving(1, 11, 64),
        wire.Receiving(2, 12, 0),
        wire.Received(12, 7, pack_ids([3]), b"aux"),
        refused,
        wire.MatchReply(3, 30, 0, 0),
    )
    seen = []
    for messages in (told, (wire.Several(told),)):
        own = connection()
        calls = [
            begin(own, wire.ReceiveRequest(own.next_call(), 7, ("p",))),
            begin(own, wire.ReceiveRequest(own.next_call(), 8, ("p",))),
            begin(own, wire.MatchPrefix(own.next_call())),
        ]
        feed(own, *messages)
        receives = [call.receive.outcome.value for call in calls[:2]]
        seen.append(([call.answer.value for call in calls], receives, own.is_waiting))

    assert seen[0] == seen[1]
    assert seen[1][1] == [REFUSED, told[2]]


def test_a_request_goes_out_as_header_and_tokens() -> None:
    own = connection()
    request = wire.OpenLease(own.next_call(), "ns", 3, 1, 5.0, cache=False)

    own.begin(request, Tokens(pack_ids([1, 2])))

    (out,) = own.take_outgoing()
    assert (out.call, CLIENT_REQUESTS.decode(out.frames[0]), out.frames[1]) == (
        1,
        request,
        pack_ids([1, 2]),
    )
    assert own.take_outgoing() == []


def test_a_field_of_the_wrong_type_is_found_before_it_is_sent() -> None:
    """The daemon could not say whose request it was."""
    own = connection()

    with pytest.raises(KvdError, match=r"ExtendLease cannot be sent: .*Expected `int`, got `str`"):
        own.begin(wire.ExtendLease(own.next_call(), 1, "two"))  # type: ignore[arg-type]
    with pytest.raises(KvdError, match=r"SendRequest cannot be sent"):
        own.begin(wire.SendRequest(own.next_call(), 2**70, 1), Tokens(b""))

    assert own.take_outgoing() == []


def test_a_frame_that_the_daemon_would_not_read_is_refused_with_numbers() -> None:
    own = connection()

    with pytest.raises(KvdError) as tokens:
        own.begin(wire.MatchPrefix(own.next_call()), Tokens(bytes(1028)))
    with pytest.raises(KvdError) as header:
        own.begin(wire.Finish(own.next_call(), 1, bytes(2000)))

    assert tokens.value.code == "too-large"
    assert tokens.value.numbers == {"bytes": 1028, "limit": 1024}
    assert (header.value.code, header.value.numbers["limit"]) == ("too-large", 1024)


def test_a_call_fails_when_its_message_cannot_be_sent() -> None:
    own = connection()
    call = own.begin(wire.MatchPrefix(own.next_call()), Tokens(b""))

    own.not_sent(own.take_outgoing()[0], GONE)

    assert call.answer.value == GONE


def test_every_call_ends_when_the_daemon_can_read_nothing_of_us() -> None:
    """An unknown session, or another version: no call number comes back."""
    own = connection()
    calls = [begin(own, wire.MatchPrefix(own.next_call())) for _ in range(2)]

    feed(own, wire.Failed(-1, REFUSED))

    assert [call.answer.value for call in calls] == [REFUSED, REFUSED]


def test_a_lease_that_is_granted_after_all_calls_were_ended_is_given_back() -> None:
    """The refusal named no call, so it may have been the answer to another one."""
    own = connection()
    opening = begin(own, wire.OpenLease(own.next_call()))
    receiving = begin(own, wire.ReceiveRequest(own.next_call(), 1, ("p",)))
    feed(own, wire.Failed(-1, REFUSED))
    cancelled = sent(own)

    feed(own, wire.Failed(-1, REFUSED))
    feed(own, wire.Leased(opening.request.call, 7, 0, b"", ()))
    feed(own, wire.Receiving(receiving.request.call, 9, 0))

    assert [call.answer.value for call in (opening, receiving)] == [REFUSED, REFUSED]
    assert [(type(one), one.of) for one in cancelled] == [
        (wire.CancelCall, opening.request.call),
        (wire.CancelCall, receiving.request.call),
    ]
    released, ended = sent(own)
    assert (type(released), released.lease) == (wire.ReleaseLease, 7)
    assert (type(ended), ended.receive) == (wire.CancelReceive, 9)


def test_garbage_and_unknown_numbers_change_nothing() -> None:
    own = connection()
    call = begin(own, wire.MatchPrefix(own.next_call()))

    own.feed([b"\xc1 garbage"])
    feed(own, wire.Done(99), wire.Accepted(99, 0), wire.SendFailed(99, REFUSED))
    feed(own, wire.ReceiveFailed(99, REFUSED))

    assert (call.answer.value, own.unreadable_messages, sent(own)) == (None, 1, [])


def test_a_row_replaces_the_pages_from_its_first_on() -> None:
    own = connection()
    lease = lease_of([1, 2, 3, 4])
    before = lease.pages
    begin(own, wire.CommitLease(own.next_call(), 7), lease)
    begin(own, wire.ExtendLease(own.next_call(), 7, 4), lease)

    feed(own, wire.PageTable(1, 1, pack_ids([8, 9, 4])), wire.PageTable(2, 4, pack_ids([5])))

    assert lease.pages.tolist() == [1, 8, 9, 4, 5]
    assert before.tolist() == [1, 2, 3, 4]
    assert not lease.pages.flags.writeable


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [(wire.ReleaseLease, ()), (wire.CommitAndRelease, ()), (wire.ReleaseUpTo, (4,))],
)
def test_a_lease_is_over_once_its_release_is_answered(
    kind: type[wire.ReleaseLease | wire.CommitAndRelease | wire.ReleaseUpTo],
    numbers: tuple[int, ...],
) -> None:
    own = connection()
    lease = lease_of([1])
    begin(own, kind(own.next_call(), 7, *numbers), lease)
    begin(own, kind(own.next_call(), 7, *numbers), lease)

    feed(own, wire.Failed(1, REFUSED))
    assert not lease.is_released
    feed(own, wire.Done(2))
    assert lease.is_released


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("kind", ["hand-over", "finish-release"])
def test_a_lease_is_over_once_what_was_handed_over_with_it_is_answered(
    kind: str, ends: bool
) -> None:
    own = connection()
    lease = lease_of([1])

    def request() -> wire.HandOver | wire.FinishAndRelease:
        if kind == "hand-over":
            return wire.HandOver(own.next_call(), 5, 7, ends_lease=ends)
        return wire.FinishAndRelease(own.next_call(), 12)

    begin(own, request(), lease if ends else None)
    begin(own, request(), lease if ends else None)

    feed(own, wire.Failed(1, REFUSED))
    assert not lease.is_released
    feed(own, wire.Finished(2, REFUSED, 0, 0, 0))
    assert lease.is_released is ends


def test_an_abandoned_hand_over_is_cancelled_and_its_late_answer_still_ends_the_lease() -> None:
    own = connection()
    lease = lease_of([1])
    call = begin(own, wire.HandOver(own.next_call(), 5, 7, ends_lease=True), lease)
    own.take_outgoing()

    own.abandon(call)

    assert sent(own) == [wire.CancelCall(2, 1)]
    feed(own, wire.Finished(1, REFUSED, 0, 0, 0))
    assert lease.is_released
    assert sent(own) == []


# ---- handles -------------------------------------------------------------------------------------


def test_pushes_are_kept_when_they_come_before_anyone_waits() -> None:
    own = connection()
    receive = begin(own, wire.ReceiveRequest(own.next_call(), 5, ("p",)))
    send = begin(own, wire.SendRequest(own.next_call(), 5, 7))
    received = wire.Received(11, 70, pack_ids([4]), b"aux")

    feed(own, wire.Receiving(1, 11, 8), received, wire.Sending(2, 12), wire.Accepted(12, 64))

    assert receive.receive is not None
    assert send.send is not None
    assert (receive.receive.prefix_tokens, receive.receive.outcome.value) == (8, received)
    assert send.send.accepted.value == wire.Accepted(12, 64)


def test_a_failed_send_says_so_to_whoever_waits_and_to_whoever_comes_later() -> None:
    own = connection()
    call = begin(own, wire.SendRequest(own.next_call(), 5, 7))
    feed(own, wire.Sending(1, 12))
    state = call.send
    assert state is not None
    woken: list[str] = []
    state.accepted.wake_with(lambda: woken.append("woken"))

    feed(own, wire.SendFailed(12, REFUSED), wire.SendFailed(12, GONE))

    assert (woken, state.accepted.value, state.failure) == (["woken"], REFUSED, REFUSED)


def test_everything_ends_when_the_daemon_is_gone() -> None:
    own = connection()
    queue = own.open_events()
    receive = begin(own, wire.ReceiveRequest(own.next_call(), 5, ("p",)))
    send = begin(own, wire.SendRequest(own.next_call(), 5, 7))
    feed(own, wire.Receiving(1, 11, 8), wire.Sending(2, 12))
    pending = begin(own, wire.Finish(own.next_call(), 12))

    own.fail_all(GONE)
    own.fail_all(REFUSED)

    assert pending.answer.value == GONE
    assert receive.receive is not None
    assert send.send is not None
    assert receive.receive.outcome.value == GONE
    assert (send.send.accepted.value, send.send.failure) == (GONE, GONE)
    assert queue.end == GONE
    with pytest.raises(KvdError, match="the daemon is gone"):
        own.begin(wire.GetSnapshot(own.next_call()))


# ---- callers that went away ----------------------------------------------------------------------


@pytest.mark.parametrize("abandoned_first", [True, False], ids=["before", "after"])
def test_a_lease_nobody_waits_for_is_released(abandoned_first: bool) -> None:
    """Scenario: the task is cancelled just before, or just after, the answer is read."""
    own = connection()
    call = begin(own, wire.OpenLease(own.next_call()))

    if abandoned_first:
        own.abandon(call)
        assert sent(own) == [wire.CancelCall(2, 1)]
        feed(own, wire.Leased(1, 70, 0, b""))
        assert sent(own) == [wire.ReleaseLease(3, 70)]
    else:
        feed(own, wire.Leased(1, 70, 0, b""))
        own.abandon(call)
        assert sent(own) == [wire.ReleaseLease(2, 70)]
    feed(own, wire.Done(2))
    assert sent(own) == []


def test_an_abandoned_call_that_is_refused_leaves_nothing_to_undo() -> None:
    own = connection()
    call = begin(own, wire.OpenLease(own.next_call()))
    own.abandon(call)
    assert sent(own) == [wire.CancelCall(2, 1)]

    feed(own, wire.Failed(1, REFUSED))

    assert sent(own) == []


def test_an_abandoned_resumption_leaves_the_queue_and_its_lease_is_as_the_daemon_says() -> None:
    own = connection()
    lease = LeaseView(7, prefix_tokens=0, pages=b"")
    lease.retracted()
    call = begin(own, wire.ResumeLease(own.next_call(), 7), lease=lease)
    own.abandon(call)
    assert sent(own) == [wire.CancelCall(2, 1)]

    feed(own, wire.Resumed(1, 4, 3, 7, pack_ids([4, 6])))

    assert sent(own) == []
    assert (lease.is_retracted, lease.pages.tolist()) == (False, [4, 6])


def test_an_abandoned_receive_is_cancelled_and_a_lease_that_came_all_the_same_goes_back() -> None:
    own = connection()
    call = begin(own, wire.ReceiveRequest(own.next_call(), 5, ("p",)))
    own.abandon(call)
    assert sent(own) == [wire.CancelCall(2, 1)]

    feed(own, wire.Receiving(1, 11, 8))
    assert sent(own) == [wire.CancelReceive(3, 11)]
    feed(own, wire.Received(11, 70, b"", b""), wire.Failed(3, REFUSED))
    assert sent(own) == [wire.ReleaseLease(4, 70)]


def test_an_abandoned_receive_that_was_delivered_already_gives_its_lease_back() -> None:
    """Both messages were read in one go, and then the waiting task was cancelled."""
    own = connection()
    call = begin(own, wire.ReceiveRequest(own.next_call(), 5, ("p",)))
    feed(own, wire.Receiving(1, 11, 8), wire.Received(11, 70, b"", b""))

    own.abandon(call)

    assert sent(own) == [wire.ReleaseLease(2, 70)]


def test_an_abandoned_receive_that_failed_already_needs_nothing() -> None:
    own = connection()
    call = begin(own, wire.ReceiveRequest(own.next_call(), 5, ("p",)))
    feed(own, wire.Receiving(1, 11, 8), wire.ReceiveFailed(11, REFUSED))

    own.abandon(call)

    assert sent(own) == []


def test_an_abandoned_send_is_aborted() -> None:
    own = connection()
    call = begin(own, wire.SendRequest(own.next_call(), 5, 7))
    own.abandon(call)

    feed(own, wire.Sending(1, 12))

    assert sent(own) == [wire.AbortSend(2, 12, UNDONE)]


@pytest.mark.parametrize("gone", [0, 1], ids=["the first", "the one that came again"])
@pytest.mark.parametrize("is_delivered", [False, True])
def test_what_was_asked_for_again_is_undone_when_the_last_caller_has_gone(
    gone: int, *, is_delivered: bool
) -> None:
    """A lease that one caller uses must not be given back for the sake of another."""
    own = connection()
    request = wire.ReceiveRequest(0, 5, ("p",), request_id="r")
    calls = [begin(own, msgspec.structs.replace(request, call=own.next_call())) for _ in range(2)]
    feed(own, wire.Receiving(1, 11, 8), wire.Receiving(2, 11, 8))
    if is_delivered:
        feed(own, wire.Received(11, 70, pack_ids([4]), b""))
    own.take_outgoing()

    own.abandon(calls[gone])
    own.abandon(calls[gone])

    assert sent(own) == []
    state = calls[1 - gone].receive
    assert state is not None
    if not is_delivered:
        feed(own, wire.Received(11, 70, pack_ids([4]), b""))
    assert state.lease is not None
    assert (state.lease.number, state.lease.is_released) == (70, False)
    assert sent(own) == []
    own.abandon(calls[1 - gone])
    assert sent(own) == [wire.ReleaseLease(3, 70)]


def test_a_receive_that_is_asked_for_again_and_abandoned_before_the_answer_goes_on() -> None:
    own = connection()
    request = wire.ReceiveRequest(0, 5, ("p",), request_id="r")
    first = begin(own, msgspec.structs.replace(request, call=own.next_call()))
    feed(own, wire.Receiving(1, 11, 8))
    again = begin(own, msgspec.structs.replace(request, call=own.next_call()))
    own.abandon(again)
    assert sent(own)[-1] == wire.CancelCall(3, 2)

    feed(own, wire.Receiving(2, 11, 8))

    assert sent(own) == []
    own.abandon(first)
    assert sent(own) == [wire.CancelReceive(4, 11)]


def test_a_send_that_is_asked_for_again_is_aborted_when_nobody_wants_it() -> None:
    own = connection()
    request = wire.SendRequest(0, 5, 7, request_id="r")
    calls = [begin(own, msgspec.structs.replace(request, call=own.next_call())) for _ in range(2)]
    feed(own, wire.Sending(1, 12), wire.Sending(2, 12))
    own.take_outgoing()
    own.abandon(calls[1])
    assert sent(own) == []
    feed(own, wire.Accepted(12, 64))
    assert calls[0].send is not None
    assert calls[0].send.accepted.value == wire.Accepted(12, 64)
    own.abandon(calls[0])
    assert sent(own) == [wire.AbortSend(3, 12, UNDONE)]


def test_a_kept_room_that_is_handed_over_again_is_ended_when_nobody_wants_it() -> None:
    own = connection()
    request = wire.HandOver(0, 5, 7, ttl_s=9.0, request_id="r")
    calls = [begin(own, msgspec.structs.replace(request, call=own.next_call())) for _ in range(2)]
    kept = wire.Finished(1, None, 0, 0, 0, kept_s=9.0)
    feed(own, kept)
    own.take_outgoing()
    own.abandon(calls[1])
    assert sent(own) == [wire.CancelCall(3, 2)]
    feed(own, msgspec.structs.replace(kept, call=2))
    assert sent(own) == []
    own.abandon(calls[0])
    assert sent(own) == [wire.KeepRoom(4, 5, 0.0)]


def test_an_abandoned_commit_still_moves_the_pages() -> None:
    """The daemon swapped them: an engine that kept the old ones would write into others' pages."""
    own = connection()
    lease = lease_of([1, 2])
    call = begin(own, wire.CommitLease(own.next_call(), 7), lease)
    own.abandon(call)

    feed(own, wire.PageTable(1, 0, pack_ids([8, 2])))

    assert (lease.pages.tolist(), sent(own)) == ([8, 2], [])


def test_an_abandoned_slide_still_moves_the_window() -> None:
    """The daemon has given the pages behind it to others."""
    own = connection()
    rows = (pack_ids([5, 6, 0]),)
    lease = LeaseView(7, prefix_tokens=0, pages=pack_ids([1, 2, 3]), beside=rows)
    call = begin(own, wire.SlideLease(own.next_call(), 7, 8), lease)
    own.abandon(call)

    feed(own, wire.PageTable(1, 3, b"", (pack_ids([0, 6, 5]),)))

    assert lease.pages.tolist() == [1, 2, 3]
    assert [row.tolist() for row in lease.beside] == [[0, 6, 5]]
    assert sent(own) == []


def test_an_abandoned_fetch_leaves_nothing_to_undo() -> None:
    own = connection()
    call = begin(own, wire.FetchPages(own.next_call(), 7, pack_ids([0])), lease_of([1]))
    own.abandon(call)

    feed(own, wire.FetchReply(1, pack_ids([4]), 0, 1, 64))

    assert sent(own) == []


def test_nothing_is_undone_with_a_daemon_that_is_gone() -> None:
    own = connection()
    call = begin(own, wire.OpenLease(own.next_call()))
    feed(own, wire.Leased(1, 70, 0, b""))
    own.fail_all(GONE)

    own.abandon(call)

    assert sent(own) == []


# ---- events --------------------------------------------------------------------------------------


def event(seq: int) -> Evicted:
    return Evicted(seq, 0.0, pages=1, nodes=1, reason="room")


def test_events_come_in_order_with_their_gaps_named() -> None:
    own = connection()
    queue = own.open_events()

    feed(own, wire.Events(3, (event(10), event(11))), wire.Events(2, (event(14),)))

    taken = [queue.take() for _ in range(6)]
    assert taken == [EventsLost(3), event(10), event(11), EventsLost(2), event(14), None]


def test_a_reader_that_lags_is_told_how_many_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.client.state.MAX_EVENTS", 2)
    own = connection()
    queue = own.open_events()

    feed(own, wire.Events(0, tuple(event(seq) for seq in range(1, 6))))
    first = [queue.take() for _ in range(3)]
    feed(own, wire.Events(0, (event(6),)))

    assert first == [event(1), event(2), None]
    assert [queue.take() for _ in range(3)] == [EventsLost(3), event(6), None]


def test_each_reader_has_its_own_queue_and_a_closed_one_gets_nothing() -> None:
    own = connection()
    first, second = own.open_events(), own.open_events()
    own.close_events(first)

    feed(own, wire.Events(0, (event(1),)))

    assert (first.take(), second.take()) == (None, event(1))


# ---- the daemon ends, and is back ----------------------------------------------------------------


def opened(own: Connection, *leases: int) -> list[LeaseView]:
    """Leases in the hands of an engine."""
    states = []
    for number in leases:
        call = begin(own, wire.OpenLease(own.next_call()))
        feed(own, wire.Leased(call.request.call, number, 0, pack_ids([number])))
        assert call.lease is not None
        states.append(call.lease)
    return states


def test_leases_stay_and_everything_else_ends_when_the_daemon_ends() -> None:
    own = connection()
    (lease,) = opened(own, 70)
    receive = begin(own, wire.ReceiveRequest(own.next_call(), 5, ("p",)))
    send = begin(own, wire.SendRequest(own.next_call(), 5, 70))
    feed(own, wire.Receiving(2, 11, 8), wire.Sending(3, 12))
    waiting = begin(own, wire.MatchPrefix(own.next_call()))

    own.lost(GONE)
    own.lost(REFUSED)

    assert receive.receive is not None
    assert send.send is not None
    assert waiting.answer.value == GONE
    assert (receive.receive.outcome.value, receive.receive.lost) == (GONE, GONE)
    assert (send.send.accepted.value, send.send.lost) == (GONE, GONE)
    assert lease.lost is not None
    assert (lease.lost.code, lease.pages.tolist(), lease.is_kept) == (
        Code.BEFORE_RESTART,
        [70],
        True,
    )
    assert own.unreleased() == (70,)
    assert (own.end, own.away) == (None, GONE)
    with pytest.raises(KvdError, match="the daemon is gone"):
        own.begin(wire.GetSnapshot(own.next_call()))


@pytest.mark.parametrize(
    ("kind", "is_known"),
    [
        (wire.CommitLease, False),
        (wire.CommitUpTo, False),
        (wire.CommitAndExtend, False),
        (wire.SlideLease, False),
        (wire.ExtendLease, True),
        (wire.SayWritten, True),
    ],
)
def test_a_row_is_not_known_after_a_call_that_gives_pages_away_was_cut_short(
    kind: type[
        wire.CommitLease
        | wire.CommitUpTo
        | wire.CommitAndExtend
        | wire.SlideLease
        | wire.ExtendLease
        | wire.SayWritten
    ],
    is_known: bool,
) -> None:
    own = connection()
    lease, other = opened(own, 70, 71)
    numbers = () if kind is wire.CommitLease else (8,)
    begin(own, kind(own.next_call(), 70, *numbers), lease)

    own.lost(GONE)
    own.returned((70, 71), max_frame_bytes=1024)

    assert (lease.is_kept, lease.is_row_known, other.is_row_known) == (True, is_known, True)


def test_what_is_told_to_a_daemon_that_is_away_is_not_said_when_it_is_back() -> None:
    own = connection()
    own.lost(GONE)

    own.tell(wire.CancelReceive(own.next_call(), 11))
    own.returned((), max_frame_bytes=1024)

    assert sent(own) == []


def test_a_lease_released_after_it_was_named_is_released_when_the_daemon_is_back() -> None:
    own = connection()
    lease, other = opened(own, 70, 71)
    own.lost(GONE)
    assert own.unreleased() == (70, 71)

    assert not own.forget_lease(lease)
    own.returned((70, 71), max_frame_bytes=1024)

    assert sent(own) == [wire.ReleaseLease(3, 70)]
    assert (lease.is_released, other.is_released, other.is_kept) == (True, False, True)


@pytest.mark.parametrize("ends", [True, False])
def test_a_lease_handed_over_with_its_end_is_not_named_when_the_daemon_is_lost(ends: bool) -> None:
    """Its engine asked for it to be over; that the handoff failed is another thing, and is said."""
    own = connection()
    (lease,) = opened(own, 70)
    sending = begin(own, wire.SendRequest(own.next_call(), 5, 70))
    feed(own, wire.Sending(2, 12))
    call = begin(own, wire.HandOver(own.next_call(), 6, 70, ends_lease=ends), lease)
    finishing = begin(own, wire.FinishAndRelease(own.next_call(), 12), lease if ends else None)

    own.lost(GONE)

    assert call.answer.value == finishing.answer.value == GONE
    assert (own.unreleased(), lease.is_released) == (() if ends else (70,), ends)
    assert sending.send is not None
    assert sending.send.lost == GONE


def test_a_lease_that_came_for_nobody_is_not_named() -> None:
    own = connection()
    call = begin(own, wire.OpenLease(own.next_call()))
    feed(own, wire.Leased(1, 70, 0, b""))
    own.lost(GONE)

    own.abandon(call)

    assert own.unreleased() == ()


def test_undoing_a_send_of_before_says_nothing_about_one_of_the_same_number() -> None:
    own = connection()
    call = begin(own, wire.SendRequest(own.next_call(), 5, 7))
    feed(own, wire.Sending(1, 12))
    own.lost(GONE)
    own.returned((), max_frame_bytes=1024)

    own.abandon(call)

    assert sent(own) == []


def test_a_shorter_frame_limit_of_the_next_life_holds() -> None:
    own = connection()
    own.lost(GONE)
    own.returned((), max_frame_bytes=16)

    with pytest.raises(KvdError, match="the daemon reads at most 16"):
        own.begin(wire.MatchPrefix(own.next_call()), Tokens(bytes(20)))


def test_whoever_waits_for_the_return_is_woken_by_the_end_too() -> None:
    own = connection()
    own.lost(GONE)
    back = own.back
    assert back is not None

    own.fail_all(REFUSED)

    assert back.value is not None
    assert (own.end, own.away, own.back) == (REFUSED, None, None)


def test_a_reader_of_events_is_told_of_each_restart_once() -> None:
    own = connection()
    queue = own.open_events()
    feed(own, wire.Events(0, (event(10),)))
    for _ in range(2):
        own.lost(GONE)
        own.returned((), max_frame_bytes=1024)

    assert [type(one) for one in sent(own)] == [wire.Subscribe]
    feed(own, wire.Events(0, (event(13), event(15))))

    taken = [queue.take() for _ in range(6)]
    restart = EventsLost(0, is_restart=True)
    assert taken == [event(10), restart, event(13), EventsLost(1), event(15), None]


def test_an_answer_that_cannot_be_taken_note_of_ends_its_call_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def bug(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("kvd.client.connection.LeaseView", bug)
    own = connection()
    call = begin(own, wire.OpenLease(own.next_call()))

    with pytest.raises(RuntimeError, match="a bug"):
        feed(own, wire.Leased(1, 70, 0, b""))

    assert isinstance(call.answer.value, Refusal)
    assert call.answer.value.code is Code.INTERNAL
    assert not own.is_waiting


def test_a_lease_that_is_left_is_released_where_its_commit_is_refused_or_never_answered() -> None:
    for is_lost in (True, False):
        own = connection()
        call = begin(own, wire.ReleaseUpTo(own.next_call(), 7, 4), lease_of([1]))
        call.releases_anyway = True
        if is_lost:
            own.unanswered(GONE, own.under_way())
        else:
            feed(own, wire.Failed(call.request.call, REFUSED))
        (release,) = sent(own)
        assert isinstance(release, wire.ReleaseLease)
        assert release.lease == 7


def test_a_lease_that_is_left_and_committed_is_released_once() -> None:
    own = connection()
    call = begin(own, wire.ReleaseUpTo(own.next_call(), 7, 4), lease_of([1]))
    call.releases_anyway = True
    feed(own, wire.Done(call.request.call))
    assert not sent(own)
