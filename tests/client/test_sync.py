"""The blocking client: the same verbs over the same protocol."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

import kvd.client
from kvd.client import EventsLost, HandoffError, KvdError, Outcome
from kvd.client.stream import ClientStream
from kvd.errors import Code, Refusal
from kvd.types import pack_ids
from kvd.wire import client as wire
from kvd.wire.events import Evicted

if TYPE_CHECKING:
    from collections.abc import Callable

    Daemon = Any
    """``conftest.Daemon``; a test module cannot import it."""

ABORTED = Refusal(Code.ABORTED, "the prefill engine failed", side="node-b")

ANSWERS: dict[type, Callable[[Any], list[wire.Reply]]] = {
    wire.OpenLease: lambda r: [wire.Leased(r.call, 70, 8, pack_ids([4, 5]))],
    wire.ExtendLease: lambda r: [wire.PageTable(r.call, 2, pack_ids([6]))],
    wire.CommitLease: lambda r: [wire.PageTable(r.call, 0, pack_ids([3, 5, 6]))],
    wire.CommitUpTo: lambda r: [wire.PageTable(r.call, 0, pack_ids([3, 5, 9]))],
    wire.RetractLease: lambda r: [wire.Retracted(r.call, 2, 512)],
    wire.ResumeLease: lambda r: [wire.Resumed(r.call, 4, 3, 7, pack_ids([4, 6, 8]))],
    wire.ReceiveRequest: lambda r: [
        wire.Receiving(r.call, 11, 8),
        wire.Received(11, 71, pack_ids([9]), b"aux"),
    ],
    wire.SendRequest: lambda r: [wire.Sending(r.call, 12), wire.Accepted(12, 8)],
    wire.Finish: lambda r: [wire.Finished(r.call, ABORTED, 8, 3, 300)],
    wire.HandOver: lambda r: [wire.Finished(r.call, None, 8, 3, 300)],
    wire.MatchPrefix: lambda r: [wire.MatchReply(r.call, 8, 1, 2)],
    wire.Subscribe: lambda r: [
        wire.Done(r.call),
        wire.Events(
            0,
            (
                Evicted(1, 0.0, pages=1, nodes=1, reason="room"),
                Evicted(3, 0.0, pages=1, nodes=1, reason="room"),
            ),
        ),
    ],
}


def script(request: wire.Request, _: bytes) -> list[wire.Reply]:
    if type(request) in ANSWERS:
        return ANSWERS[type(request)](request)
    return [wire.Done(request.call)]


def test_every_verb_has_its_blocking_twin(daemon: Daemon) -> None:
    daemon.script = script

    with kvd.client.connect_sync(daemon.endpoint, name="prefill-0") as node:
        assert (node.name, node.session, len(node.token)) == ("node-a", 1, 17)
        lease = node.lease([1, 2], reserve_tokens=1)
        assert (lease.id, lease.prefix_len, lease.pages.tolist()) == (70, 8, [4, 5])
        lease.extend(4)
        assert lease.pages_of("kv").tolist() == [4, 5, 6]
        assert lease.retract([8], keep="host") == kvd.client.Retraction(2, 512)
        assert lease.is_retracted
        assert lease.resume() == kvd.client.Resumption(4, 3, 7)
        assert (lease.kv_len, lease.pages.tolist()) == (7, [4, 6, 8])
        lease.commit([3])
        assert lease.pages.tolist() == [3, 5, 6]
        lease.written(3)
        assert lease.commit(upto_tokens=3).tolist() == [[6, 9]]

        send = node.send(5, [1, 2], lease=lease)
        send.advance(2)
        send.accepted()
        assert (send.id, send.decode_prefix_len) == (12, 8)
        assert send.finish(b"aux") == Outcome(False, ABORTED, 8, 3, 300)
        node.send(6, [1, 2], lease=lease, to="decode-0").abort("because")
        assert node.hand_over(8, lease=lease) == Outcome(True, None, 8, 3, 300)
        lease.release(())

        handoff = node.receive(7, [1, 2], "prefill-1")
        assert (handoff.id, handoff.prefix_len) == (11, 8)
        handoff.done()
        assert (handoff.aux, handoff.lease.id, handoff.lease.pages.tolist()) == (b"aux", 71, [9])
        handoff.lease.release()
        node.receive(8, [1], "prefill-1").cancel()
        assert node.match([1]).tokens == 8
        k, _ = node.pool("main").layer(0)
        assert tuple(k.shape) == (8, 4, 2, 8)

    assert [type(one).__name__ for one in daemon.got] == [
        *("OpenLease", "ExtendLease", "RetractLease", "ResumeLease", "CommitLease"),
        *("SayWritten", "CommitUpTo"),
        *("SendRequest", "Advance", "Finish", "SendRequest"),
        *("AbortSend", "HandOver", "CommitAndRelease"),
        *("ReceiveRequest", "ReleaseLease", "ReceiveRequest"),
        *(type(one).__name__ for one in daemon.got[17:]),
    ]
    assert {type(one).__name__ for one in daemon.got[17:]} <= {
        *("CancelReceive", "ReleaseLease", "MatchPrefix"),
    }


def test_events_are_an_iterator(daemon: Daemon) -> None:
    daemon.script = script

    with kvd.client.connect_sync(daemon.endpoint, name="console") as node:
        events = node.events()
        taken = [next(events) for _ in range(3)]
        events.close()

    assert taken == [
        Evicted(1, 0.0, pages=1, nodes=1, reason="room"),
        EventsLost(1),
        Evicted(3, 0.0, pages=1, nodes=1, reason="room"),
    ]


def test_events_can_be_polled(daemon: Daemon) -> None:
    event = Evicted(1, 0.0, pages=1, nodes=1, reason="room")
    with kvd.client.connect_sync(daemon.endpoint, name="console") as node:
        with node.events() as events:
            assert events.poll() is None  # nobody has answered yet, and it does not wait for that
            asked = polled(lambda: daemon.asked(wire.Subscribe))
            daemon.push(wire.Done(asked[0].call), wire.Events(0, (event,)))
            assert polled(events.poll) == event
            assert events.poll() is None
            daemon.push(wire.Events(2, (replace(event, seq=4),)))
            assert polled(events.poll) == EventsLost(2)
            assert next(events) == replace(event, seq=4)
        assert list(events) == []
        assert events.poll() is None
        assert polled(lambda: daemon.asked(wire.Unsubscribe))

        refused = node.events()
        refused.poll()
        asked = polled(lambda: daemon.asked(wire.Subscribe)[1:])
        daemon.push(wire.Failed(asked[0].call, ABORTED))
        for _ in range(2):
            with pytest.raises(KvdError, match=r"^aborted"):
                polled(refused.poll)
        refused.close()


def polled(look: Callable[[], Any]) -> Any:
    end_s = time.monotonic() + 5
    while not (found := look()):
        assert time.monotonic() < end_s, "it did not come"
        time.sleep(0.002)
    return found


def test_a_commit_may_extend_in_the_same_message(daemon: Daemon) -> None:
    daemon.script = lambda request, tokens: (
        [wire.PageTable(request.call, 1, pack_ids([5, 6, 7]))]
        if isinstance(request, wire.CommitAndExtend)
        else script(request, tokens)
    )
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        lease = node.lease([1, 2])
        assert lease.commit([3], 2, swap=False, extend=8).tolist() == []
        assert lease.pages.tolist() == [4, 5, 6, 7]
        assert lease.begin_commit(extend=4).result(5).tolist() == []
    assert daemon.asked(wire.CommitAndExtend) == [
        wire.CommitAndExtend(2, 70, 8, 2, swaps=False),
        wire.CommitAndExtend(3, 70, 4),
    ]


def test_what_is_gathered_leaves_together_or_before_a_wait(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="engine") as node:
        written: list[int] = []
        of_one, of_all = ClientStream.write_one, ClientStream.write

        def write_one(stream: ClientStream, frames: Any, call: int) -> Any:
            written.append(1)
            return of_one(stream, frames, call)

        def write(stream: ClientStream) -> None:
            written.append(len(stream._unsent))
            of_all(stream)

        monkeypatch.setattr(ClientStream, "write_one", write_one)
        monkeypatch.setattr(ClientStream, "write", write)
        node.match([1, 2])
        assert written == [1]

        written.clear()
        node.gather()
        calls = [node.begin_match([n]) for n in range(3)]
        assert written == []
        assert [call.poll() for call in calls] == [None] * 3
        node.send_gathered()
        node.send_gathered()
        assert written == [3]
        assert [call.result(5.0).tokens for call in calls] == [8] * 3

        written.clear()
        node.gather()
        first, second = node.begin_match([1]), node.begin_match([2])
        assert first.result(5.0).tokens == second.result(5.0).tokens == 8
        assert written == [2]
        node.match([3])
        assert written == [2, 1], "behind a wait what is said leaves at once"


def test_a_blocked_call_ends_when_the_daemon_dies(daemon: Daemon) -> None:
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        killer = threading.Timer(0.1, daemon.hang_up)
        killer.start()
        began_s = time.monotonic()
        with pytest.raises(KvdError, match="node-a hung up") as caught:
            node.lease([1], deadline_s=30)
        killer.join()

    assert time.monotonic() - began_s < 1.1
    assert caught.value.code == "unreachable"


def test_a_blocked_call_ends_at_its_deadline_and_is_undone_later(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.client.port.MARGIN_S", 0.05)

    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        with pytest.raises(KvdError, match="deadline: no answer"):
            node.lease([1], deadline_s=0)
        daemon.script = script
        daemon.push(wire.Leased(1, 70, 0, b""))
        node.match([1])
        node.match([1])

    released = [request for request in daemon.got if isinstance(request, wire.ReleaseLease)]
    assert wire.CancelCall(2, 1) in daemon.got
    assert [request.lease for request in released] == [70]


def test_a_failed_handoff_raises(daemon: Daemon) -> None:
    daemon.script = lambda request, _: [
        wire.Receiving(request.call, 11, 8),
        wire.ReceiveFailed(11, ABORTED),
    ]

    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        handoff = node.receive(7, [1], "prefill-1")
        with pytest.raises(HandoffError, match="the prefill engine failed"):
            handoff.done()


@pytest.mark.parametrize("end", ["received", "failed", "cancelled"])
def test_what_has_come_of_a_receive_is_told_until_it_has_ended(daemon: Daemon, end: str) -> None:
    row = pack_ids([4, 5, 6])
    daemon.script = lambda request, _: [
        wire.Receiving(request.call, 11, 8)
        if isinstance(request, wire.ReceiveRequest)
        else wire.Done(request.call)
    ]

    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        handoff = node.receive(7, list(range(40)), "prefill-1", as_it_comes=True)
        assert handoff.arriving is None
        daemon.push(wire.Arriving(11, 70, 16, row))
        daemon.push(wire.Arriving(11, 70, 32))
        until_read(node, lambda: handoff.arriving is not None and handoff.arriving.n_tokens == 32)
        come = handoff.arriving
        assert come is not None
        assert come.pages.tolist() == [4, 5, 6]
        assert (come.key.lease, come.key.session) == (70, node.session)
        node.check(come.key)
        if end == "cancelled":
            handoff.cancel()
        else:
            over = wire.Received(11, 70, row, b"")
            daemon.push(over if end == "received" else wire.ReceiveFailed(11, ABORTED))
            until_read(node, lambda: handoff.wrapped.is_ended)
        assert handoff.arriving is None
        if end == "failed":
            with pytest.raises(KvdError, match="unknown-lease"):
                node.check(come.key)

    assert isinstance(daemon.got[0], wire.ReceiveRequest)
    assert daemon.got[0].as_it_comes


def until_read(node: kvd.client.SyncNode, is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end_s, "it never comes"
        node.pump()


def test_connect_says_what_to_do_when_there_is_no_daemon(tmp_path: Any) -> None:
    with pytest.raises(KvdError, match=r"no daemon at .*attach.sock: start it"):
        kvd.client.connect_sync(f"ipc://{tmp_path}/client.sock", name="decode-0")


def test_torch_is_loaded_by_the_first_view_and_by_nothing_before(daemon: Daemon) -> None:
    """A router or a scheduler process talks to kvd without paying seconds for torch."""
    daemon.script = script
    program = """
import sys
import kvd.client
heavy = {"torch", "nixl", "textual", "structlog", "uvloop", "click", "zmq", "nacl"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
with kvd.client.connect_sync(sys.argv[1], name="router") as node:
    lease = node.lease([1, 2])
    lease.pages.tolist()
    lease.release()
    node.pool("main").memory
    assert not heavy & set(sys.modules), heavy & set(sys.modules)
    node.pool("main").layer(0)
    assert "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program, daemon.endpoint], check=True, timeout=60)
