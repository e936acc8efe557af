"""A daemon that ends and is back: what goes on by itself, what does not, and what is said."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvd.client
from kvd.client import EventsLost, HandoffError, KvdError
from kvd.errors import Code, Refusal
from kvd.types import Tokens, pack_ids
from kvd.wire import client as wire
from kvd.wire.events import Evicted
from tests.client.conftest import POOL
from tests.support.pools import build_pool

if TYPE_CHECKING:
    from collections.abc import Iterator

    Daemon = Any
    """``conftest.Daemon``."""


def script(request: Any, _: bytes) -> list[wire.Reply]:
    """Leases are numbered by their calls, from 71 on."""
    match request:
        case wire.OpenLease(call):
            return [wire.Leased(call, 70 + call, 8, pack_ids([4, 5]))]
        case wire.MatchPrefix(call):
            return [wire.MatchReply(call, 8, 0, 0)]
        case wire.SendRequest(call):
            return [wire.Sending(call, 12)]
        case wire.ReleaseLease(call, 71) | wire.CommitAndRelease(call, 72) | wire.Subscribe(call):
            return [wire.Done(call)]
    return []


@pytest.fixture
def other_memory() -> Iterator[Any]:
    placed = build_pool(POOL)
    yield placed
    for one in placed:
        one.arena.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - another thread brings it about
            await asyncio.sleep(0.002)


async def refusal(verb: Any) -> str:
    with pytest.raises(KvdError) as caught:
        await verb
    return caught.value.code


# ---- the same memory -----------------------------------------------------------------------------


async def test_an_engine_goes_on_by_itself_with_the_same_memory(daemon: Daemon) -> None:
    daemon.script = script
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        k, _ = node.pool("main").layer(0)
        k[4].fill_(2.5)
        before = (node.session, node.token)
        descriptors = node._attachment._fds

        daemon.hang_up()
        daemon.restart()

        assert (await node.match([1])).tokens == 8
        assert (node.session, node.token) == before
        assert node.incarnation == "2" * 32
        assert node._attachment._fds is descriptors
        again, _ = node.pool("main").layer(0)
        assert again.data_ptr() == k.data_ptr()
        assert torch.equal(again[4], k[4])
        async with kvd.client.connect(daemon.endpoint, name="other") as other:
            assert float(other.pool("main").layer(0)[0][4, 0, 0, 0]) == 2.5


async def test_nobody_goes_back_before_the_copies_of_before_are_over(daemon: Daemon) -> None:
    daemon.script = script
    copies = SimpleNamespace(is_quiet=False, has_blocks=False, doubt=None)
    async with kvd.client.connect(daemon.endpoint, name="engine") as node:
        node._attachment.copies = copies
        before = node.incarnation
        daemon.hang_up()
        daemon.restart()
        await until(lambda: node.is_away)
        await asyncio.sleep(0.1)
        assert node.incarnation == before
        copies.is_quiet = True
        assert (await node.match([1] * 8)).tokens == 8
        assert node.incarnation != before


async def test_a_copy_in_doubt_ends_the_session_over_a_restart(daemon: Daemon) -> None:
    doubt = Refusal(Code.POST_FAILED, "a device is lost: end this process", side="client")
    async with kvd.client.connect(daemon.endpoint, name="engine") as node:
        node._attachment.copies = SimpleNamespace(is_quiet=False, has_blocks=False, doubt=doubt)
        daemon.hang_up()
        daemon.restart()
        await until(lambda: node.end is not None)
        assert await refusal(node.match([1])) == Code.POST_FAILED.value


async def test_a_lease_of_before_keeps_its_pages_and_can_only_be_released(daemon: Daemon) -> None:
    daemon.script = script
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        lease = await node.lease([1])
        daemon.hang_up()
        daemon.restart(keep=[71])
        await node.match([1])
        daemon.got.clear()

        verbs = [
            lease.extend(1),
            lease.slide(1),
            lease.fetch([0]),
            lease.commit([1]),
            lease.retract(),
            lease.resume(),
            node.send(5, [1], lease=lease),
        ]
        assert [await refusal(verb) for verb in verbs] == ["before-restart"] * 7
        with pytest.raises(KvdError, match="release it and open a new one"):
            await lease.extend(1)
        assert (lease.id, lease.prefix_len, lease.pages.tolist()) == (71, 8, [4, 5])
        assert daemon.returns == [(1, (71,))]

        await lease.release([1, 2])
        await lease.release()

        assert [type(one) for one in daemon.got] == [wire.ReleaseLease]
        assert lease.is_released
        with pytest.raises(KvdError, match="lease 71 was released"):
            _ = lease.pages


async def test_a_release_while_the_daemon_is_away_is_not_named_when_it_is_back(
    daemon: Daemon,
) -> None:
    daemon.script = script
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        leases = [await node.lease([1]) for _ in range(3)]
        daemon.hang_up()
        await until(lambda: node.is_away)

        await leases[1].release()
        assert leases[1].is_released
        daemon.restart(keep=[71, 72, 73])
        await node.match([1])

        assert daemon.returns == [(1, (71, 73))]
        assert daemon.asked(wire.ReleaseLease) == []


async def test_a_release_under_way_when_the_daemon_dies_has_its_effect(daemon: Daemon) -> None:
    daemon.script = lambda request, _: (
        [] if isinstance(request, wire.CommitAndRelease) else script(request, _)
    )
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        lease = await node.lease([1])
        releasing = asyncio.create_task(lease.release([1]))
        await until(lambda: daemon.asked(wire.CommitAndRelease))

        daemon.hang_up()
        await releasing
        daemon.restart(keep=[71])
        await node.match([1])

        assert lease.is_released
        assert daemon.returns == [(1, ())]


async def test_the_pages_of_a_lease_are_not_said_when_its_commit_was_never_answered(
    daemon: Daemon,
) -> None:
    """The daemon may have put equal cached pages in their place, and freed them."""
    daemon.script = script
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        lease = await node.lease([1])
        committing = asyncio.create_task(refusal(lease.commit()))
        await until(lambda: daemon.asked(wire.CommitLease))
        daemon.hang_up()
        daemon.restart(keep=[71])
        assert await committing == "unreachable"
        await node.match([1])

        with pytest.raises(KvdError, match=r"^before-restart: .* may be someone else's by now"):
            _ = lease.pages
        await lease.release()

        assert len(daemon.asked(wire.ReleaseLease)) == 1


async def test_a_lease_that_is_not_kept_has_no_pages_and_its_release_says_nothing(
    daemon: Daemon,
) -> None:
    daemon.script = script
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        lease = await node.lease([1])
        daemon.hang_up()
        daemon.restart(keep=[])
        await node.match([1])

        with pytest.raises(KvdError, match=r"^before-restart: .* may be someone else's by now"):
            _ = lease.pages
        await lease.release()

        assert daemon.asked(wire.ReleaseLease) == []


async def test_a_daemon_that_knows_no_session_gives_a_new_one_and_keeps_no_lease(
    daemon: Daemon,
) -> None:
    daemon.script = script
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        lease, token = await node.lease([1]), node.token
        daemon.hang_up()
        daemon.restart(keep=[71], knows_sessions=False)

        assert (await node.match([1])).tokens == 8

        assert node.token != token
        assert daemon.returns == []
        assert await refusal(lease.commit()) == "before-restart"
        with pytest.raises(KvdError, match="someone else's"):
            _ = lease.pages


async def test_a_lease_outlives_two_restarts(daemon: Daemon) -> None:
    daemon.script = script
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        lease = await node.lease([1])
        for _ in range(2):
            daemon.hang_up()
            daemon.restart(keep=[71])
            await node.match([1])
            younger = await node.lease([2])
        await lease.release()

        assert daemon.returns[0] == (1, (71,))
        assert daemon.returns[1][1][0] == 71
        assert len(daemon.returns[1][1]) == 2
        assert daemon.asked(wire.ReleaseLease)[0].lease == 71
        assert younger.pages.tolist() == [4, 5]


# ---- calls and handoffs --------------------------------------------------------------------------


async def test_a_call_made_while_the_daemon_is_away_waits_for_it(daemon: Daemon) -> None:
    daemon.script = script
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        daemon.hang_up()
        await until(lambda: node.is_away)
        calls = [asyncio.create_task(node.match([1])) for _ in range(3)]
        cancelled = asyncio.create_task(node.lease([1]))
        await asyncio.sleep(0.05)
        cancelled.cancel()

        daemon.restart()

        assert [(await call).tokens for call in calls] == [8] * 3
        assert not node.is_away
        assert daemon.asked(wire.OpenLease) == []


async def test_a_call_gives_up_after_the_time_the_engine_set_and_the_node_does_not(
    daemon: Daemon,
) -> None:
    daemon.script = script
    async with kvd.client.connect(daemon.endpoint, name="decode-0", return_within_s=0.05) as node:
        daemon.hang_up()
        await until(lambda: node.is_away)

        began_s = time.monotonic()
        with pytest.raises(KvdError, match=r"^unreachable: the daemon .* within 0.1 s") as caught:
            await node.match([1])
        assert time.monotonic() - began_s < 1
        assert caught.value.retryable

        daemon.restart()
        await until(lambda: not node.is_away)
        assert (await node.match([1])).tokens == 8


async def test_what_was_sent_to_the_daemon_before_does_not_reach_the_one_that_is_back(
    daemon: Daemon,
) -> None:
    """An engine that is busy on its loop, and asks before it has heard of the end."""
    daemon.script = script
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        daemon.hang_up()
        port = node._port
        late = port.connection.begin(wire.OpenLease(port.connection.next_call()), Tokens(b""))
        port._channel.flush()
        daemon.restart()

        assert (await node.match([1])).tokens == 8
        assert isinstance(late.answer.value, Refusal)
        assert daemon.asked(wire.OpenLease) == []
        assert daemon.strangers == 0


async def test_handoffs_of_before_are_over_and_nothing_is_said_about_them(daemon: Daemon) -> None:
    """The daemon that is back numbers its handoffs from 1 again: those are others."""
    daemon.script = lambda request, _: (
        [wire.Receiving(request.call, 11, 8)]
        if isinstance(request, wire.ReceiveRequest)
        else script(request, _)
    )
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        receive = await node.receive(1, [1], "prefill-0")
        send = await node.send(1, [1], lease=await node.lease([1]))
        daemon.hang_up()
        daemon.restart(keep=[72])
        await node.match([1])
        daemon.got.clear()

        with pytest.raises(HandoffError, match="node-a hung up"):
            await receive.done()
        await receive.cancel()
        with pytest.raises(HandoffError, match="node-a hung up"):
            await send.accepted()
        with pytest.raises(HandoffError, match="node-a hung up"):
            await send.advance(1)
        assert await refusal(send.finish()) == "unreachable"
        await send.abort("too late")

        assert daemon.got == []


async def test_a_prompt_that_was_delivered_before_is_there(daemon: Daemon) -> None:
    daemon.script = lambda request, _: (
        [wire.Receiving(request.call, 11, 8), wire.Received(11, 71, pack_ids([6]), b"aux")]
        if isinstance(request, wire.ReceiveRequest)
        else script(request, _)
    )
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        receive = await node.receive(1, [1, 2], "prefill-0")
        await until(lambda: receive._state.outcome.value is not None)
        daemon.hang_up()
        daemon.restart(keep=[71])
        await node.match([1])

        await receive.done()

        assert (receive.lease.pages.tolist(), receive.lease.kv_len) == ([6], 2)
        assert await refusal(receive.lease.commit([3])) == "before-restart"
        await receive.lease.release()
        assert [one.lease for one in daemon.asked(wire.ReleaseLease)] == [71]


async def test_a_stream_of_events_names_the_restart_and_goes_on(daemon: Daemon) -> None:
    first, second = (
        Evicted(7, 0.0, pages=1, nodes=1, reason="room"),
        Evicted(1, 0.0, pages=1, nodes=1, reason="room"),
    )
    daemon.script = script
    async with kvd.client.connect(daemon.endpoint, name="console") as node:
        events = node.events()
        waiting = asyncio.create_task(events.__anext__())
        await until(lambda: daemon.asked(wire.Subscribe))
        daemon.push(wire.Events(0, (first,)))
        assert await waiting == first

        daemon.hang_up()
        assert await events.__anext__() == EventsLost(0, is_restart=True)
        daemon.restart()
        waiting = asyncio.create_task(events.__anext__())
        await until(lambda: len(daemon.asked(wire.Subscribe)) == 2)
        daemon.push(wire.Events(0, (second,)))

        assert await waiting == second
        await events.aclose()


# ---- the end of a node ---------------------------------------------------------------------------


async def test_other_memory_ends_the_node_and_leaves_what_is_mapped(
    daemon: Daemon, other_memory: Any
) -> None:
    daemon.script = script
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        lease = await node.lease([1])
        k, _ = node.pool("main").layer(0)
        k[4].fill_(2.5)
        events = node.events()
        reading = asyncio.create_task(events.__anext__())
        await until(lambda: daemon.asked(wire.Subscribe))
        daemon.hang_up()
        await until(lambda: node.is_away)
        waiting = asyncio.create_task(node.match([1]))
        assert await reading == EventsLost(0, is_restart=True)
        daemon.take_memory(other_memory)
        daemon.restart(keep=[71])

        assert await refusal(waiting) == "pool-changed"
        assert await refusal(events.__anext__()) == "pool-changed"
        with pytest.raises(KvdError, match=r"restarted and its pool is other memory .* anew") as no:
            await node.match([1])
        assert not no.value.retryable
        await lease.release()
        assert float(k[4].sum()) == 2.5 * 64
        assert lease.is_released
        await until(lambda: daemon.ended)
        async with kvd.client.connect(daemon.endpoint, name="decode-0") as anew:
            assert (await anew.match([1])).tokens == 8


async def test_who_is_sent_away_does_not_come_back(daemon: Daemon) -> None:
    """Its leases were released there and then: to go on as if they were not would be wrong."""
    deaf = Refusal(Code.CLIENT_GONE, "session 1 left everything unread", side="node-a")
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        daemon.send_away(1, deaf)
        await until(lambda: node._port.connection.end is not None)

        assert await refusal(node.match([1])) == "client-gone"
        assert daemon.returns == []


async def test_a_node_that_is_closed_while_the_daemon_is_away_stays_away(daemon: Daemon) -> None:
    node = await kvd.client.connect(daemon.endpoint, name="decode-0")
    daemon.hang_up()
    await until(lambda: node.is_away)
    waiting = asyncio.create_task(node.match([1]))
    await asyncio.sleep(0)

    await node.close()
    daemon.restart()

    assert await refusal(waiting) == "unreachable"
    # It is heard of once more, to say goodbye, and keeps nothing.
    await until(lambda: daemon.awaited() == {})
    assert daemon.returns == [(1, ())]


async def test_a_daemon_that_dies_again_while_it_is_asked_is_asked_again(daemon: Daemon) -> None:
    daemon.script = script
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        for _ in range(5):
            daemon.hang_up()
            daemon.restart()

        assert (await node.match([1])).tokens == 8
