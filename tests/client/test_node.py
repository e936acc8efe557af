"""The asynchronous client over real sockets, against a daemon that answers by a script."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import uvloop

import kvd.client
from kvd.client import EventsLost, HandoffError, KvdError, Outcome
from kvd.client.connection import UNDONE
from kvd.errors import Code, Refusal
from kvd.types import pack_ids
from kvd.wire import client as wire
from kvd.wire.events import Evicted
from tests.client.conftest import answering

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.wire.client import Reply

    Daemon = Any
    """``conftest.Daemon``; a test module cannot import it."""

REFUSED = Refusal(Code.NO_ROOM, "8 pages needed, 3 free", side="node-a", numbers={"free": 3})
ABORTED = Refusal(Code.ABORTED, "the prefill engine failed", side="node-b")


def done(request: Any) -> list[Reply]:
    return [wire.Done(request.call)]


async def until(condition: Callable[[], bool], *, within_s: float = 5.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        await asyncio.sleep(0.002)


# ---- connecting ----------------------------------------------------------------------------------


async def test_connect_is_a_context_that_leaves_the_session(daemon: Daemon) -> None:
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        assert (node.name, node.session, node.incarnation) == ("node-a", 1, "1" * 32)
        assert daemon.ended == []

    await until(lambda: daemon.ended == [1])


async def test_connect_can_be_awaited(daemon: Daemon) -> None:
    daemon.script = answering(MatchPrefix=lambda r: [wire.MatchReply(r.call, 8, 2, 100)])
    node = await kvd.client.connect(daemon.endpoint, name="router")

    found = await node.match([1, 2, 3], namespace="lora-a")

    assert found == kvd.client.Matched(tokens=8, load=2, free=100)
    assert daemon.got == [wire.MatchPrefix(1, "lora-a")]
    assert daemon.tokens == [pack_ids([1, 2, 3])]
    await node.close()
    await node.close()


def test_the_client_works_on_uvloop(daemon: Daemon) -> None:
    daemon.script = answering(MatchPrefix=lambda r: [wire.MatchReply(r.call, r.call, 0, 0)])

    async def run() -> list[int]:
        async with kvd.client.connect(daemon.endpoint, name="router") as node:
            return [(await node.match([1])).tokens for _ in range(201)]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(run()) == list(range(1, 202))


async def test_connect_says_what_to_do_when_there_is_no_daemon(tmp_path: Any) -> None:
    with pytest.raises(KvdError, match=r"no daemon at .*attach.sock: start it") as caught:
        await kvd.client.connect(f"ipc://{tmp_path}/client.sock", name="decode-0")

    assert (caught.value.code, caught.value.retryable) == ("unreachable", True)


async def test_many_calls_may_be_under_way_at_once(daemon: Daemon) -> None:
    daemon.script = answering(
        MatchPrefix=lambda r: [wire.MatchReply(r.call, len(r.namespace), 0, 0)]
    )

    async with kvd.client.connect(daemon.endpoint, name="router") as node:
        found = await asyncio.gather(*(node.match([1], namespace="x" * n) for n in range(200)))

    assert [one.tokens for one in found] == list(range(200))


# ---- leases --------------------------------------------------------------------------------------


async def test_a_lease_says_how_far_it_is_and_commits_so_far(daemon: Daemon) -> None:
    daemon.script = answering(
        OpenLease=lambda r: [wire.Leased(r.call, 70, 0, pack_ids([4, 5, 6]))],
        SayWritten=done,
        CommitUpTo=lambda r: (
            [wire.PageTable(r.call, 0, pack_ids([1, 5, 3]))]
            if r.swaps
            else [wire.PageTable(r.call, 3, b"")]
        ),
        ReleaseUpTo=done,
    )

    async with kvd.client.connect(daemon.endpoint, name="prefill-0") as node:
        lease = await node.lease(np.arange(10))
        await lease.written(np.int64(6))
        await lease.written(8, rank=1, ranks=2)
        assert (await lease.commit([10], swap=False)).shape == (0, 2)
        assert lease.pages.tolist() == [4, 5, 6]
        assert (await lease.commit(upto_tokens=8)).tolist() == [[4, 1], [6, 3]]
        assert lease.pages.tolist() == [1, 5, 3]
        await lease.release([11], 12)
        assert lease.is_released
        again = await node.lease(np.arange(10))
        await again.release(upto_tokens=0)

    assert daemon.got == [
        wire.OpenLease(1),
        wire.SayWritten(2, 70, 6),
        wire.SayWritten(3, 70, 8, 1, 2),
        wire.CommitUpTo(4, 70, None, swaps=False),
        wire.CommitUpTo(5, 70, 8),
        wire.ReleaseUpTo(6, 70, 12),
        wire.OpenLease(7),
        wire.ReleaseUpTo(8, 70, 0),
    ]
    assert [daemon.tokens[n] for n in (3, 4, 5, 7)] == [pack_ids([10]), b"", pack_ids([11]), b""]


async def test_a_lease_from_its_prefix_to_its_release(daemon: Daemon) -> None:
    daemon.script = answering(
        OpenLease=lambda r: [wire.Leased(r.call, 70, 8, pack_ids([4, 5, 6]))],
        ExtendLease=lambda r: [wire.PageTable(r.call, 3, pack_ids([7]))],
        CommitLease=lambda r: [wire.PageTable(r.call, 2, pack_ids([3, 7]))],
        CommitAndRelease=done,
    )

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        lease = await node.lease(
            np.arange(10), namespace="n", reserve_tokens=2, priority=1, deadline_s=3, cache=False
        )
        assert (lease.id, lease.prefix_len, lease.pages.tolist()) == (70, 8, [4, 5, 6])
        await lease.extend(4)
        assert lease.pages_of("kv").tolist() == [4, 5, 6, 7]
        await lease.commit([10, 11])
        assert lease.pages.tolist() == [4, 5, 3, 7]
        await lease.release(())
        with pytest.raises(KvdError, match="lease 70 was released"):
            _ = lease.pages

    assert daemon.got == [
        wire.OpenLease(1, "n", 2, 1, 3, cache=False),
        wire.ExtendLease(2, 70, 4),
        wire.CommitLease(3, 70),
        wire.CommitAndRelease(4, 70),
    ]
    assert daemon.tokens == [pack_ids(list(range(10))), b"", pack_ids([10, 11]), b""]


async def test_a_promise_is_asked_for_and_what_an_older_daemon_grants_without_goes_back(
    daemon: Daemon,
) -> None:
    daemon.script = answering(
        OpenLease=lambda r: [
            wire.Leased(r.call, 70, 0, pack_ids([4]), (), r.promise_tokens if r.priority else 0)
        ],
        ReceiveRequest=lambda r: [wire.Receiving(r.call, 5, 0)],
        ReleaseLease=done,
        CancelReceive=lambda r: [
            wire.Done(r.call),
            wire.ReceiveFailed(5, Refusal(Code.CANCELLED, "the decode engine cancelled it")),
        ],
    )

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        lease = await node.lease([1], promise_tokens=64, priority=1)
        await lease.release()
        with pytest.raises(KvdError, match="0 of 64 tokens were promised") as raised:
            await node.lease([1], promise_tokens=64)
        assert raised.value.code == "not-supported"
        with pytest.raises(KvdError, match="the daemon is older") as raised:
            await node.receive(9, [1], "p", promise_tokens=64)
        assert raised.value.code == "not-supported"
        with pytest.raises(KvdError, match="64 promised"):
            await node.lease([1], hold="prefix", promise_tokens=64)

    kinds = [type(one) for one in daemon.got]
    assert kinds == [
        *(wire.OpenLease, wire.ReleaseLease),
        *(wire.OpenLease, wire.ReleaseLease),
        *(wire.ReceiveRequest, wire.CancelReceive),
    ]
    assert daemon.got[0].promise_tokens == 64


async def test_a_lease_is_retracted_and_resumed_on_other_pages(daemon: Daemon) -> None:
    daemon.script = answering(
        OpenLease=lambda r: [wire.Leased(r.call, 70, 4, pack_ids([4, 5]))],
        RetractLease=lambda r: [wire.Retracted(r.call, 2, 512)],
        ResumeLease=lambda r: [wire.Resumed(r.call, 4, 3, 7, pack_ids([4, 6]))],
    )

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        lease = await node.lease([1, 2, 3, 4, 5])
        assert (lease.kv_len, lease.is_retracted) == (4, False)
        assert await lease.retract([6, 7]) == kvd.client.Retraction(2, 512)
        assert lease.is_retracted
        with pytest.raises(KvdError, match="lease 70 is retracted: it has no pages until resume"):
            _ = lease.pages
        assert await lease.resume(deadline_s=3) == kvd.client.Resumption(4, 3, 7)
        assert (lease.prefix_len, lease.kv_len, lease.pages.tolist()) == (4, 7, [4, 6])
        assert not lease.is_retracted

    assert daemon.got[1:3] == [wire.RetractLease(2, 70, "host"), wire.ResumeLease(3, 70, 3)]
    assert daemon.tokens[1:3] == [pack_ids([6, 7]), b""]


async def test_a_refused_retraction_leaves_the_lease_as_it_was(daemon: Daemon) -> None:
    daemon.script = answering(
        OpenLease=lambda r: [wire.Leased(r.call, 70, 4, pack_ids([4, 5]))],
        RetractLease=lambda r: [wire.Failed(r.call, REFUSED)],
    )

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        lease = await node.lease([1, 2, 3, 4, 5])
        with pytest.raises(KvdError, match="8 pages needed, 3 free"):
            await lease.retract(keep="nothing")
        assert lease.pages.tolist() == [4, 5]

    assert daemon.got[1] == wire.RetractLease(2, 70, "nothing")


async def test_release_commits_only_when_it_is_told_to(daemon: Daemon) -> None:
    daemon.script = answering(
        OpenLease=lambda r: [wire.Leased(r.call, 70, 0, b"")],
        ReleaseLease=done,
        CommitAndRelease=done,
    )

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        for new_tokens in (None, (), [5]):
            await (await node.lease([1])).release(new_tokens)

    assert [type(one).__name__ for one in daemon.got[1::2]] == [
        "ReleaseLease",
        "CommitAndRelease",
        "CommitAndRelease",
    ]
    assert daemon.tokens[1::2] == [b"", b"", pack_ids([5])]


async def test_a_refusal_is_raised_with_its_code_and_numbers(daemon: Daemon) -> None:
    daemon.script = answering(OpenLease=lambda r: [wire.Failed(r.call, REFUSED)])

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        with pytest.raises(KvdError) as caught:
            await node.lease([1, 2])

    assert caught.value.refusal == REFUSED
    assert (caught.value.code, caught.value.retryable) == ("no-room", True)


async def test_bad_arguments_are_refused_here_and_send_nothing(daemon: Daemon) -> None:
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        for wrong, code in [
            (node.lease([1, -1]), "bad-tokens"),
            (node.lease([1], deadline_s=-1), "bad-request"),
            (node.lease([1], deadline_s=float("nan")), "bad-request"),
            (node.lease([1], namespace=7), "bad-request"),  # type: ignore[arg-type]
            (node.lease(np.zeros(2**19, np.int32)), "too-large"),
            (node.receive(0, [1], "p"), "bad-room"),
            (node.receive(2**63, [1], "p"), "bad-room"),
        ]:
            with pytest.raises(KvdError) as caught:
                await wrong
            assert caught.value.code == code

    assert daemon.got == []


async def test_a_cancelled_lease_is_given_back_when_it_comes(daemon: Daemon) -> None:
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        task = asyncio.create_task(node.lease([1]))
        await until(lambda: len(daemon.got) == 1)

        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        daemon.push(wire.Leased(1, 70, 0, b""))
        await until(lambda: len(daemon.got) == 3)

    assert daemon.got[1:] == [wire.CancelCall(2, 1), wire.ReleaseLease(3, 70)]


async def test_a_call_without_an_answer_ends_in_words(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.client.port.MARGIN_S", 0.05)

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        with pytest.raises(KvdError, match=r"^deadline: no answer from the daemon within 0.1 s"):
            await node.lease([1], deadline_s=0.05)
        daemon.push(wire.Leased(1, 70, 0, b""))
        await until(lambda: len(daemon.got) == 3)

    assert daemon.got[1:] == [wire.CancelCall(2, 1), wire.ReleaseLease(3, 70)]


# ---- handoffs ------------------------------------------------------------------------------------


async def test_a_receive_from_offer_to_lease(daemon: Daemon) -> None:
    daemon.script = answering(ReceiveRequest=lambda r: [wire.Receiving(r.call, 11, 8)])

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        handoff = await node.receive(9117, [1, 2, 3], "prefill-0", deadline_s=7, tier="host")
        assert handoff.prefix_len == 8
        for early in (lambda: handoff.lease, lambda: handoff.aux):
            with pytest.raises(KvdError, match=r"await done\(\) first"):
                early()

        waiting = asyncio.create_task(handoff.done())
        await asyncio.sleep(0)
        daemon.push(wire.Received(11, 70, pack_ids([4, 5]), b"first token"))
        await waiting
        await handoff.done()

        assert (handoff.aux, handoff.lease.id) == (b"first token", 70)
        assert (handoff.lease.prefix_len, handoff.lease.pages.tolist()) == (8, [4, 5])
        assert handoff.lease is handoff.lease

    assert daemon.got == [
        wire.ReceiveRequest(1, 9117, ("prefill-0",), deadline_s=7, tier="host"),
    ]


async def test_a_receive_that_fails_raises_what_the_other_side_said(daemon: Daemon) -> None:
    """Also when the push came in the same breath as the answer, before anyone waited."""
    daemon.script = answering(
        ReceiveRequest=lambda r: [wire.Receiving(r.call, 11, 8), wire.ReceiveFailed(11, ABORTED)]
    )

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        handoff = await node.receive(1, [1], ["prefill-0", "prefill-1"])
        for _ in range(2):
            with pytest.raises(HandoffError) as caught:
                await handoff.done()
            assert caught.value.refusal == ABORTED
        await handoff.cancel()

    assert daemon.got == [wire.ReceiveRequest(1, 1, ("prefill-0", "prefill-1"))]


async def test_cancel_leaves_nothing_held_even_when_it_loses_the_race(daemon: Daemon) -> None:
    daemon.script = answering(
        ReceiveRequest=lambda r: [wire.Receiving(r.call, 11, 8)],
        CancelReceive=lambda r: [
            wire.Received(11, 70, b"", b""),
            wire.Failed(r.call, Refusal(Code.WRONG_STATE, "delivered")),
        ],
        ReleaseLease=done,
    )

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        handoff = await node.receive(1, [1], "prefill-0")
        await handoff.cancel()
        with pytest.raises(HandoffError, match="delivered after it was cancelled"):
            await handoff.done()
        await until(lambda: len(daemon.got) == 3)

    assert daemon.got[1:] == [wire.CancelReceive(2, 11), wire.ReleaseLease(3, 70)]


async def test_cancel_releases_what_was_delivered_and_not_taken(daemon: Daemon) -> None:
    daemon.script = answering(
        ReceiveRequest=lambda r: [wire.Receiving(r.call, 11, 8), wire.Received(11, 70, b"", b"")],
        MatchPrefix=lambda r: [wire.MatchReply(r.call, 0, 0, 0)],
        ReleaseLease=done,
    )

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        handoff = await node.receive(1, [1], "prefill-0")
        await node.match([1])  # answered after the push
        await handoff.cancel()
        await handoff.cancel()

    assert daemon.got[2:] == [wire.ReleaseLease(3, 70)]


async def test_cancel_leaves_a_lease_in_the_engines_hands_alone(daemon: Daemon) -> None:
    daemon.script = answering(
        ReceiveRequest=lambda r: [wire.Receiving(r.call, 11, 8), wire.Received(11, 70, b"", b"")],
    )

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        handoff = await node.receive(1, [1], "prefill-0")
        await handoff.done()
        with pytest.raises(KvdError, match="was delivered: release its lease"):
            await handoff.cancel()

    assert len(daemon.got) == 1


async def test_a_cancelled_receive_call_cancels(daemon: Daemon) -> None:
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        task = asyncio.create_task(node.receive(1, [1], "prefill-0"))
        await until(lambda: len(daemon.got) == 1)

        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        daemon.push(wire.Receiving(1, 11, 0))
        await until(lambda: len(daemon.got) == 3)

    assert daemon.got[1:] == [wire.CancelCall(2, 1), wire.CancelReceive(3, 11)]


async def test_a_cancelled_send_call_aborts(daemon: Daemon) -> None:
    daemon.script = answering(OpenLease=lambda r: [wire.Leased(r.call, 70, 0, b"")])
    async with kvd.client.connect(daemon.endpoint, name="prefill-0") as node:
        lease = await node.lease([1])
        task = asyncio.create_task(node.send(1, [1], lease=lease))
        await until(lambda: len(daemon.got) == 2)

        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        daemon.push(wire.Sending(2, 12))
        await until(lambda: len(daemon.got) == 3)

    assert daemon.got[2] == wire.AbortSend(3, 12, UNDONE)


SENDING = answering(
    OpenLease=lambda r: [wire.Leased(r.call, 70, 0, pack_ids([4]))],
    SendRequest=lambda r: [wire.Sending(r.call, 12)],
    Advance=done,
    AbortSend=done,
)


async def test_a_send_from_its_first_token_to_the_other_sides_word(daemon: Daemon) -> None:
    daemon.script = SENDING

    async with kvd.client.connect(daemon.endpoint, name="prefill-0") as node:
        lease = await node.lease([1, 2])
        send = await node.send(9117, [1, 2], lease=lease, deadline_s=7, to="decode-0")
        await send.advance(1)
        with pytest.raises(KvdError, match=r"await accepted\(\) first"):
            _ = send.decode_prefix_len
        daemon.push(wire.Accepted(12, 0))
        await send.accepted()
        assert send.decode_prefix_len == 0

        finishing = asyncio.create_task(send.finish(aux=b"token"))
        await until(lambda: len(daemon.got) == 4)
        daemon.push(wire.Finished(4, None, 0, 1, 4096))
        assert await finishing == Outcome(True, None, 0, 1, 4096)

    assert daemon.got[1:] == [
        wire.SendRequest(2, 9117, 70, deadline_s=7, peer="decode-0"),
        wire.Advance(3, 12, 1),
        wire.Finish(4, 12, b"token"),
    ]


async def test_finish_returns_why_the_decode_side_did_not_commit(daemon: Daemon) -> None:
    daemon.script = SENDING

    async with kvd.client.connect(daemon.endpoint, name="prefill-0") as node:
        send = await node.send(1, [1], lease=await node.lease([1]))
        finishing = asyncio.create_task(send.finish())
        await until(lambda: len(daemon.got) == 3)
        daemon.push(wire.SendFailed(12, ABORTED), wire.Finished(3, ABORTED, 0, 0, 0))

        assert await finishing == Outcome(False, ABORTED, 0, 0, 0)


async def test_a_failed_send_stops_the_engine_at_its_next_word(daemon: Daemon) -> None:
    """There is no need to compute the rest; and ``finish`` still tells, whatever the daemon says
    about a send that it has forgotten."""
    daemon.script = SENDING
    forgotten = Refusal(Code.UNKNOWN_HANDOFF, "no send 12")

    async with kvd.client.connect(daemon.endpoint, name="prefill-0") as node:
        send = await node.send(1, [1], lease=await node.lease([1]))
        daemon.push(wire.SendFailed(12, ABORTED))
        with pytest.raises(HandoffError, match="the prefill engine failed"):
            await send.accepted()
        with pytest.raises(HandoffError, match="the prefill engine failed"):
            await send.advance(1)
        await send.abort("too late")
        finishing = asyncio.create_task(send.finish())
        await until(lambda: len(daemon.got) == 3)
        daemon.push(wire.Failed(3, forgotten))

        assert await finishing == Outcome(False, ABORTED, 0, 0, 0)

    assert [type(one).__name__ for one in daemon.got] == ["OpenLease", "SendRequest", "Finish"]


async def test_a_hand_over_is_one_request_and_the_other_sides_word(daemon: Daemon) -> None:
    daemon.script = SENDING

    async with kvd.client.connect(daemon.endpoint, name="prefill-0") as node:
        lease = await node.lease([1, 2])
        handing = asyncio.create_task(
            node.hand_over(9117, lease=lease, aux=b"t", deadline_s=7, to="decode-0", release=True)
        )
        await until(lambda: len(daemon.got) == 2)
        assert not lease.is_released
        daemon.push(wire.Finished(2, None, 8, 1, 4096))

        assert await handing == Outcome(True, None, 8, 1, 4096)
        assert lease.is_released
        with pytest.raises(KvdError, match="rooms are 1 to"):
            await node.hand_over(0, [1], lease=lease)
        with pytest.raises(KvdError, match="a prompt of 0 tokens for room 3"):
            await node.hand_over(3, [], lease=lease)

    assert daemon.got[1:] == [
        wire.HandOver(
            call=2,
            room=9117,
            lease=70,
            deadline_s=7,
            peer="decode-0",
            aux=b"t",
            ends_lease=True,
        )
    ]


async def test_a_cancelled_hand_over_is_given_up(daemon: Daemon) -> None:
    daemon.script = SENDING

    async with kvd.client.connect(daemon.endpoint, name="prefill-0") as node:
        lease = await node.lease([1])
        task = asyncio.create_task(node.hand_over(1, [1], lease=lease))
        await until(lambda: len(daemon.got) == 2)

        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: len(daemon.got) == 3)

    assert daemon.got[2] == wire.CancelCall(3, 2)


async def test_a_finish_that_releases_is_one_request(daemon: Daemon) -> None:
    daemon.script = SENDING

    async with kvd.client.connect(daemon.endpoint, name="prefill-0") as node:
        lease = await node.lease([1])
        send = await node.send(1, [1], lease=lease)
        with pytest.raises(KvdError, match="exclude one another"):
            await send.finish(after=bytes(64), release=True)
        finishing = asyncio.create_task(send.finish(b"t", release=True))
        await until(lambda: len(daemon.got) == 3)
        daemon.push(wire.SendFailed(12, ABORTED), wire.Finished(4, ABORTED, 0, 0, 0))

        assert await finishing == Outcome(False, ABORTED, 0, 0, 0)
        assert lease.is_released

    assert daemon.got[2:] == [wire.FinishAndRelease(4, 12, b"t")]


async def test_abort_tells_the_daemon_why(daemon: Daemon) -> None:
    daemon.script = SENDING

    async with kvd.client.connect(daemon.endpoint, name="prefill-0") as node:
        send = await node.send(1, [1], lease=await node.lease([1]))
        await send.abort("out of memory")

    assert daemon.got[-1] == wire.AbortSend(3, 12, "out of memory")


# ---- the daemon's end ----------------------------------------------------------------------------


async def test_everything_that_waits_ends_at_once_when_the_daemon_dies(daemon: Daemon) -> None:
    daemon.script = answering(
        ReceiveRequest=lambda r: [wire.Receiving(r.call, 11, 8)],
        OpenLease=lambda r: [wire.Leased(r.call, 70, 0, b"")],
        SendRequest=lambda r: [wire.Sending(r.call, 12)],
    )

    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        handoff = await node.receive(1, [1], "prefill-0")
        send = await node.send(1, [1], lease=await node.lease([1]))
        verbs = (node.match([1]), handoff.done(), send.accepted(), send.finish())
        waiting = [asyncio.create_task(verb) for verb in verbs]
        await until(lambda: len(daemon.got) == 5)

        began_s = time.monotonic()
        daemon.hang_up()
        ends = await asyncio.gather(*waiting, return_exceptions=True)

        assert time.monotonic() - began_s < 1
        words = "unreachable: node-a hung up: the daemon ended or was restarted"
        assert [str(end)[: len(words)] for end in ends] == [words] * 4
        await handoff.cancel()
        await send.abort("it is over")
        with pytest.raises(HandoffError, match="node-a hung up"):
            await send.advance(1)


# ---- events, state, memory -----------------------------------------------------------------------


async def test_events_are_pushed_in_order_and_a_gap_is_an_item(daemon: Daemon) -> None:
    first, second = (
        Evicted(5, 0.0, pages=1, nodes=1, reason="room"),
        Evicted(9, 0.0, pages=1, nodes=1, reason="room"),
    )
    daemon.script = answering(
        Subscribe=lambda r: [wire.Done(r.call), wire.Events(0, (first,)), wire.Events(3, (second,))]
    )

    async with kvd.client.connect(daemon.endpoint, name="console") as node:
        taken = []
        async for event in node.events():
            taken.append(event)
            if len(taken) == 3:
                break
        later = node.events()
        waiting = asyncio.create_task(later.__anext__())
        await asyncio.sleep(0)
        daemon.push(wire.Events(0, (Evicted(10, 0.0, pages=1, nodes=1, reason="room"),)))
        assert await waiting == Evicted(10, 0.0, pages=1, nodes=1, reason="room")
        await later.aclose()
        await until(lambda: len(daemon.got) == 2)

    assert taken == [first, EventsLost(3), second]
    assert daemon.got == [wire.Subscribe(1), wire.Unsubscribe(2)]


async def test_two_sessions_see_the_same_memory(daemon: Daemon) -> None:
    async with (
        kvd.client.connect(daemon.endpoint, name="a") as one,
        kvd.client.connect(daemon.endpoint, name="b") as other,
    ):
        k, v = one.pool("main").layer(1)
        assert (tuple(k.shape), k.dtype) == ((8, 4, 2, 8), torch.bfloat16)
        k[3].fill_(2.5)

        (k_there, v_there) = other.pool("main").view("kv", layer=1, shard=0)
        assert torch.equal(k_there[3], torch.full((4, 2, 8), 2.5, dtype=torch.bfloat16))
        assert not v_there.any()
        with pytest.raises(KvdError, match="drop every view"):
            one.pool("main").close()
    assert not v.any()
    k[3, 0, 0, 0] = 1.0


async def test_what_a_pool_does_not_have_is_refused_with_what_it_has(daemon: Daemon) -> None:
    async with kvd.client.connect(daemon.endpoint, name="a") as node:
        pool = node.pool("main")
        assert (pool.name, pool.page_size, pool.memory.match_page_tokens) == ("main", 4, 4)
        refused: list[tuple[Callable[[], object], str]] = [
            (lambda: node.pool("other"), "there is no pool 'other'; there is main"),
            (lambda: pool.layer(2), "main.kv has 2 layers .* there is no layer 2"),
            (lambda: pool.view("swa", layer=0), "no component 'swa'; it has kv"),
            (lambda: pool.view("kv", layer=0, shard=1), "one shard, number 0; not 1"),
        ]
        for wrong, words in refused:
            with pytest.raises(KvdError, match=words):
                wrong()
    with pytest.raises(KvdError, match="this session was closed"):
        pool.layer(0)
    with pytest.raises(KvdError, match="this node was closed"):
        await node.match([1])


async def test_a_worker_keeps_the_session_and_sees_its_memory(daemon: Daemon) -> None:
    async with kvd.client.connect(daemon.endpoint, name="a") as node:
        worker = kvd.client.join(daemon.endpoint, token=node.token)
        node.pool("main").layer(0)[0][1].fill_(4.0)
        assert float(worker.pool("main").layer(0)[0][1].sum()) == 4.0 * 64

    await asyncio.sleep(0.05)
    assert daemon.ended == []
    worker.close()
    await until(lambda: daemon.ended == [1])
    with pytest.raises(KvdError, match="unknown-session"):
        kvd.client.join(daemon.endpoint, token=node.token)
