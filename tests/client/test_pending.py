"""Calls that are begun and go on by themselves, polled by an engine that never blocks."""

from __future__ import annotations

import select
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import kvd.client
from kvd.client import (
    HandoffError,
    KvdError,
    Outcome,
    PendingCall,
    SyncArena,
    SyncArenaReceive,
    SyncLease,
    SyncNode,
    SyncReceive,
    SyncSend,
)
from kvd.client.connection import UNDONE
from kvd.client.sync import SyncArrival
from kvd.errors import Code, Refusal
from kvd.types import pack_ids
from kvd.wire import client as wire
from kvd.wire.events import Evicted

if TYPE_CHECKING:
    from collections.abc import Callable

    Daemon = Any
    """``conftest.Daemon``."""

ABORTED = Refusal(Code.ABORTED, "the prefill engine failed", side="node-b")
REFUSED = Refusal(Code.NO_ROOM, "8 pages needed, 3 free", side="node-a", numbers={"free": 3})


def script(request: Any, _: bytes) -> list[wire.Reply]:
    match request:
        case wire.OpenLease(call):
            return [wire.Leased(call, 70, 8, pack_ids([4, 5]))]
        case wire.MatchPrefix(call):
            return [wire.MatchReply(call, 8, 0, 0)]
        case wire.SendRequest(call):
            return [wire.Sending(call, 12)]
        case wire.ReceiveRequest(call):
            return [wire.Receiving(call, 11, 8)]
        case wire.CommitLease(call):
            return [wire.PageTable(call, 0, pack_ids([3, 5]))]
        case wire.Finish(call):
            return [wire.Finished(call, None, 8, 3, 300)]
    return [wire.Done(request.call)]


def silent(_request: Any, _tokens: bytes) -> list[wire.Reply]:
    return []


def outcome_of(call: PendingCall[Any], within_s: float = 5.0) -> Any:
    """Poll it, as a scheduler does between its steps."""
    end_s = time.monotonic() + within_s
    while (outcome := call.poll()) is None:
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.001)
    return outcome


def pumped(node: SyncNode, condition: Callable[[], object], within_s: float = 5.0) -> list[Any]:
    """Pump until it is so; what ended meanwhile."""
    ended = []
    end_s = time.monotonic() + within_s
    while not condition():
        ended += node.pump()
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.001)
    return ended


def is_readable(node: SyncNode, within_s: float = 0.0) -> bool:
    ready = select.poll()
    ready.register(node, select.POLLIN)
    return bool(ready.poll(1000 * within_s))


# ---- every verb ----------------------------------------------------------------------------------


KINDS = [SyncNode, SyncLease, SyncReceive, SyncSend, SyncArena, SyncArenaReceive]


@pytest.mark.parametrize("kind", KINDS)
def test_every_verb_can_be_begun(kind: type) -> None:
    waits = {
        *("lease", "receive", "send", "hand_over", "keep_room", "match", "snapshot"),
        *("flush", "new_epoch", "arena", "close", "safe"),
        *("extend", "slide", "fetch", "written", "commit", "retract", "resume", "release"),
        *("done", "cancel", "accepted", "advance", "finish", "abort"),
        *("renew", "end", "pin", "unpin", "prefetch"),
    }
    own = vars(kind) if kind is not SyncReceive else vars(SyncArrival) | vars(kind)
    verbs = {name for name, found in own.items() if callable(found)}
    begun = {name.removeprefix("begin_") for name in verbs if name.startswith("begin_")}

    if kind is SyncNode:  # to leave waits for nobody
        verbs.remove("close")
    assert begun == waits & verbs
    for name in begun:
        verb = own[name]
        assert verb.__doc__.startswith(f"``begin_{name}``, blocking")
        assert verb.__name__ == name
        assert verb.__qualname__.endswith(f".{name}")


def test_a_scheduler_lives_a_whole_request_without_blocking(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        assert outcome_of(node.begin_match([1])).tokens == 8
        lease = outcome_of(node.begin_lease([1, 2], reserve_tokens=1))
        assert (lease.id, lease.pages.tolist()) == (70, [4, 5])
        assert outcome_of(lease.begin_written(2)) is lease
        assert outcome_of(lease.begin_commit([3])).tolist() == [[4, 3]]
        send = outcome_of(node.begin_send(5, [1, 2], lease=lease))
        assert send.outcome is None
        assert outcome_of(send.begin_finish(b"aux")) == Outcome(True, None, 8, 3, 300)
        assert send.outcome == Outcome(True, None, 8, 3, 300)
        assert outcome_of(lease.begin_release()) is lease
        assert lease.is_released

        receive = outcome_of(node.begin_receive(6, [1, 2], "prefill-0"))
        assert receive.poll() is None
        done = receive.begin_done()
        assert done.poll() is None
        daemon.push(wire.Received(11, 71, pack_ids([9]), b"aux"))
        got = outcome_of(done)
        assert (got.id, got.pages.tolist(), receive.aux) == (71, [9], b"aux")
        assert receive.poll() is got
        assert receive.lease is got

    kinds = [type(one).__name__ for one in daemon.got]
    assert kinds[:7] == [
        *("MatchPrefix", "OpenLease", "SayWritten", "CommitLease", "SendRequest", "Finish"),
        "ReleaseLease",
    ]


def test_begun_calls_are_under_way_at_once_and_end_in_any_order(daemon: Daemon) -> None:
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        calls = [node.begin_match([1]) for _ in range(100)]
        pumped(node, lambda: len(daemon.got) == 100)
        assert not any(call.is_done for call in calls)
        daemon.push(*(wire.MatchReply(1 + number, number, 0, 0) for number in reversed(range(100))))

        ended = pumped(node, lambda: all(call.is_done for call in calls))
        ended += node.pump()

        assert ended == list(reversed(calls))
        assert [call.result().tokens for call in calls] == list(range(100))
        assert node.pump() == []


def test_calls_that_are_over_are_forgotten_by_a_node_that_is_never_pumped(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        for _ in range(20):
            node.match([1])
            outcome_of(node.begin_match([1]))
            node.begin_match([1]).cancel()
        channel = node._channel
        kept = (channel._begun, channel._woken, channel._ended)

        assert [len(calls) for calls in kept] == [0, 0, 0]


# ---- how one ends --------------------------------------------------------------------------------


def test_a_refusal_is_raised_each_time_it_is_asked_for(daemon: Daemon) -> None:
    daemon.script = lambda request, _: [wire.Failed(request.call, REFUSED)]
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        call = node.begin_lease([1])
        for _ in range(2):
            with pytest.raises(KvdError, match="8 pages needed"):
                outcome_of(call)
        with pytest.raises(KvdError, match="8 pages needed"):
            call.result()
        assert not call.cancel()


def test_what_cannot_be_sent_has_an_outcome_at_once(daemon: Daemon) -> None:
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        call = node.begin_lease([-1])
        assert call.is_done
        with pytest.raises(KvdError, match="bad-tokens"):
            call.poll()
        assert daemon.got == []


def test_a_call_ends_at_its_deadline_whoever_looks(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.client.port.MARGIN_S", 0.05)
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        polled, pumped_only = (node.begin_lease([1], deadline_s=0) for _ in range(2))
        with pytest.raises(KvdError, match="deadline: no answer from the daemon"):
            outcome_of(polled)
        assert pumped(node, lambda: pumped_only.is_done) in ([], [pumped_only])
        pumped(node, lambda: len(daemon.asked(wire.CancelCall)) == 2)


@pytest.mark.parametrize("looks", ["poll", "result", "pump"])
def test_what_came_in_time_is_read_before_a_call_is_judged(daemon: Daemon, looks: str) -> None:
    """An engine computes for longer than the call may take, and the answer lies in the socket."""
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        call = node.begin_lease([1], deadline_s=0)
        while not daemon.asked(wire.OpenLease):
            assert call.poll() is None
        time.sleep(0.03)  # longer than a process that was stopped is waited for
        assert call.poll() is None
        daemon.push(wire.Leased(daemon.asked(wire.OpenLease)[0].call, 70, 0, pack_ids([4])))
        time.sleep(0.3)
        if looks == "pump":
            node.pump()
        lease = call.result() if looks == "result" else call.poll()
        assert lease is not None
        assert lease.id == 70


def test_a_result_that_is_not_there_in_time_can_be_asked_for_again(daemon: Daemon) -> None:
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        call = node.begin_match([1])
        began_s = time.monotonic()
        with pytest.raises(KvdError, match=r"^deadline: the call has no outcome after 0.1 s"):
            call.result(0.1)
        assert 0.1 <= time.monotonic() - began_s < 1
        timer = threading.Timer(0.1, lambda: daemon.push(wire.MatchReply(1, 5, 0, 0)))
        timer.start()
        assert call.result().tokens == 5
        timer.join()


def test_who_waits_for_a_call_waits_no_longer_than_it_says(daemon: Daemon) -> None:
    """Also where that is less than ``epoll`` counts."""
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        call = node.begin_match([1])
        taken = []
        for _ in range(20):
            began_s = time.perf_counter()
            assert call.wait(0.0002) is None
            taken.append(time.perf_counter() - began_s)
        assert 0.0002 <= statistics.median(taken) < 0.0008
        assert not call.is_done
        timer = threading.Timer(0.1, lambda: daemon.push(wire.MatchReply(1, 5, 0, 0)))
        timer.start()
        found = call.wait(5.0)
        assert found is not None
        assert found.tokens == 5
        timer.join()


def test_the_death_of_the_daemon_ends_what_was_begun(daemon: Daemon) -> None:
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        call = node.begin_lease([1])
        pumped(node, lambda: daemon.asked(wire.OpenLease))
        daemon.hang_up()
        with pytest.raises(KvdError, match="node-a hung up"):
            outcome_of(call)
        assert node.is_away


def test_a_closed_node_ends_what_was_begun(daemon: Daemon) -> None:
    node = kvd.client.connect_sync(daemon.endpoint, name="decode-0")
    call = node.begin_lease([1])
    node.close()
    with pytest.raises(KvdError, match="this node was closed"):
        call.poll()
    assert node.pump() == []


def test_a_blocking_verb_that_is_interrupted_is_undone(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        with monkeypatch.context() as patched:
            patched.setattr(node._channel, "block", interrupted)
            with pytest.raises(KeyboardInterrupt):
                node.lease([1])
        pumped(node, lambda: daemon.asked(wire.CancelCall))
        daemon.push(wire.Leased(1, 70, 0, pack_ids([4])))
        pumped(node, lambda: daemon.asked(wire.ReleaseLease))


# ---- cancelling ----------------------------------------------------------------------------------


def test_a_cancelled_lease_goes_back_when_it_comes(daemon: Daemon) -> None:
    daemon.script = silent
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        call = node.begin_lease([1])
        assert call.cancel()
        assert not call.cancel()
        with pytest.raises(KvdError, match="cancelled"):
            call.poll()
        pumped(node, lambda: daemon.asked(wire.CancelCall))
        daemon.push(wire.Leased(1, 70, 0, pack_ids([4])))
        pumped(node, lambda: daemon.asked(wire.ReleaseLease))

    assert [one.lease for one in daemon.asked(wire.ReleaseLease)] == [70]


@pytest.mark.parametrize("is_pumped", [False, True])
def test_a_lease_that_came_and_was_never_taken_goes_back(daemon: Daemon, is_pumped: bool) -> None:
    """The answer is here: not read yet, or read by a pump while nobody had asked for it."""
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        call = node.begin_lease([1])
        if is_pumped:
            pumped(node, lambda: call.is_done)
        assert call.cancel()
        with pytest.raises(KvdError, match="cancelled"):
            call.result()
        pumped(node, lambda: daemon.asked(wire.ReleaseLease))

    assert [one.lease for one in daemon.asked(wire.ReleaseLease)] == [70]


def test_a_lease_that_was_taken_is_its_engines(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        call = node.begin_lease([1])
        lease = outcome_of(call)
        assert not call.cancel()
        assert outcome_of(call) is lease
        node.match([1])

    assert daemon.asked(wire.ReleaseLease) == []


@pytest.mark.parametrize("is_pumped", [False, True])
def test_a_cancelled_receive_holds_nothing(daemon: Daemon, is_pumped: bool) -> None:
    daemon.script = script if is_pumped else silent
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        call = node.begin_receive(6, [1], "prefill-0")
        pumped(node, lambda: call.is_done if is_pumped else daemon.got)
        assert call.cancel()
        if not is_pumped:
            pumped(node, lambda: daemon.asked(wire.CancelCall))
            daemon.push(wire.Receiving(1, 11, 8))
        pumped(node, lambda: daemon.asked(wire.CancelReceive))
        daemon.push(wire.Received(11, 71, pack_ids([9]), b"aux"))
        pumped(node, lambda: daemon.asked(wire.ReleaseLease))

    assert [one.lease for one in daemon.asked(wire.ReleaseLease)] == [71]


@pytest.mark.parametrize("is_pumped", [False, True])
def test_a_cancelled_send_is_aborted(daemon: Daemon, is_pumped: bool) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="prefill-0") as node:
        lease = node.lease([1])
        call = node.begin_send(6, [1], lease=lease)
        if is_pumped:
            pumped(node, lambda: call.is_done)
        assert call.cancel()
        pumped(node, lambda: daemon.asked(wire.AbortSend))

    assert [(one.send, one.reason) for one in daemon.asked(wire.AbortSend)] == [(12, UNDONE)]


# ---- handoffs ------------------------------------------------------------------------------------


def test_a_receive_that_fails_raises_in_its_poll(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        receive = node.receive(6, [1], "prefill-0")
        daemon.push(wire.ReceiveFailed(11, ABORTED))
        pumped(node, lambda: receive.wrapped.is_ended)
        for _ in range(2):
            with pytest.raises(HandoffError, match="the prefill engine failed"):
                receive.poll()


def test_a_send_that_fails_before_its_finish_says_so(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="prefill-0") as node:
        send = node.send(6, [1], lease=node.lease([1]))
        assert send.outcome is None
        daemon.push(wire.SendFailed(12, ABORTED))
        pumped(node, lambda: send.outcome is not None)
        assert send.outcome == Outcome(False, ABORTED, 0, 0, 0)


# ---- the descriptor ------------------------------------------------------------------------------


def test_the_descriptor_is_readable_while_there_is_something_to_do(daemon: Daemon) -> None:
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        call = node.begin_match([1])
        pumped(node, lambda: daemon.got)
        fd = node.fileno()
        assert not is_readable(node, 0.02)
        daemon.push(wire.MatchReply(1, 5, 0, 0))

        assert is_readable(node, 5)
        assert node.pump() == [call]
        assert not is_readable(node)

        daemon.hang_up()
        assert is_readable(node, 5)
        node.pump()
        assert node.is_away
        daemon.restart()
        pumped(node, lambda: not node.is_away)
        assert node.fileno() == fd


def test_what_another_call_has_read_is_told_by_the_descriptor_too(daemon: Daemon) -> None:
    """No socket tells of it any more."""
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        assert node.fileno() >= 0
        call, other = node.begin_match([1]), node.begin_match([2])
        pumped(node, lambda: len(daemon.got) == 2)
        daemon.push(wire.MatchReply(1, 5, 0, 0), wire.MatchReply(2, 6, 0, 0))
        assert other.result().tokens == 6

        assert is_readable(node)
        assert node.pump() == [call]
        assert not is_readable(node)


def test_a_flood_of_events_is_pumped_in_turns_and_nothing_of_it_stays_unseen(
    daemon: Daemon,
) -> None:
    daemon.script = lambda request, _: (
        [wire.Done(request.call)]
        if isinstance(request, wire.Subscribe)
        else [wire.MatchReply(request.call, 8, 0, 0)]
    )
    events = [Evicted(seq, 0.0, pages=1, nodes=1, reason="room") for seq in range(1, 2001)]
    with kvd.client.connect_sync(daemon.endpoint, name="console") as node:
        following = node.events()
        daemon.script = lambda request, _: [
            wire.Done(request.call),
            *(wire.Events(0, (one,)) for one in events),
        ]
        assert next(following) == events[0]
        call = node.begin_match([1])
        daemon.push(wire.MatchReply(call_number(daemon, wire.MatchPrefix), 8, 0, 0))
        while not call.is_done:
            assert is_readable(node, 5)
            node.pump()
        assert [next(following) for _ in range(1999)] == events[1:]
        following.close()


def call_number(daemon: Daemon, kind: type) -> int:
    end_s = time.monotonic() + 5
    while not daemon.asked(kind):
        assert time.monotonic() < end_s
        time.sleep(0.001)
    return daemon.asked(kind)[0].call


# ---- a daemon that is not there ------------------------------------------------------------------


def test_a_scheduler_that_misses_pays_no_millisecond_for_a_dead_daemon(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0", on_unreachable="miss") as node:
        assert node.match([1]).tokens == 8
        daemon.hang_up()
        assert node.match([1]) == kvd.client.Matched(0, 0, 0)
        took_s = []
        for _ in range(100):
            began_s = time.perf_counter()
            assert node.match([1]) == kvd.client.Matched(0, 0, 0)
            assert node.begin_match([1]).poll() == kvd.client.Matched(0, 0, 0)
            with pytest.raises(KvdError, match=r"^unreachable: the daemon ended and is not back"):
                node.lease([1])
            call = node.begin_lease([1])
            assert call.is_done
            node.pump()
            took_s.append(time.perf_counter() - began_s)
        assert statistics.median(took_s) < 0.004
        assert node.is_away

        daemon.restart()
        pumped(node, lambda: not node.is_away)
        assert node.match([1]).tokens == 8


def test_calls_alone_bring_a_missing_node_back(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0", on_unreachable="miss") as node:
        daemon.hang_up()
        assert node.match([1]).tokens == 0
        daemon.restart()
        end_s = time.monotonic() + 5
        while not node.match([1]).tokens:
            assert time.monotonic() < end_s
            time.sleep(0.002)


def test_a_call_begun_while_the_daemon_is_away_waits_for_it_and_blocks_nobody(
    daemon: Daemon,
) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        daemon.hang_up()
        pumped(node, lambda: node.is_away)
        call = node.begin_match([1])
        cancelled = node.begin_lease([1])
        assert call.poll() is None
        assert cancelled.cancel()

        daemon.restart()

        assert pumped(node, lambda: call.is_done) in ([], [call])
        assert call.result().tokens == 8
        assert daemon.asked(wire.OpenLease) == []


def test_what_to_do_without_a_daemon_is_one_of_two(daemon: Daemon) -> None:
    with pytest.raises(KvdError, match="on_unreachable is 'retry': it is 'wait' or 'miss'"):
        kvd.client.connect_sync(daemon.endpoint, name="a", on_unreachable="retry")  # type: ignore[arg-type]
