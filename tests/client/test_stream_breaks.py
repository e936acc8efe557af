"""The client socket breaks while the daemon lives, or is not read: who hears of it, and what."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kvd.client
from kvd.client import KvdError, blocking
from kvd.client.session_sockets import SessionSockets
from kvd.client.sync import MISS
from kvd.types import pack_ids
from kvd.wire import client as wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    Daemon = Any
    """``conftest.Daemon``."""


def script(request: Any, _: bytes) -> list[wire.Reply]:
    match request:
        case wire.MatchPrefix(call):
            return [wire.MatchReply(call, 8, 0, 0)]
        case wire.CancelCall(call) | wire.ReleaseLease(call):
            return [wire.Done(call)]
    return []


@pytest.fixture
def deaf(daemon: Daemon) -> Iterator[Daemon]:
    """A daemon that lives and takes no connection on its client socket."""
    daemon.script = script
    path = daemon.endpoint.removeprefix("ipc://")
    daemon.break_stream()
    os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(path)
        listening.listen(1)
        yield daemon
    os.unlink(path)
    daemon.listen_again()


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - another thread brings it about
            await asyncio.sleep(0.002)


async def test_a_call_that_the_daemon_may_have_read_ends_and_what_it_grants_goes_back(
    daemon: Daemon,
) -> None:
    daemon.script = script
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        leasing = asyncio.create_task(node.lease([1]))
        await until(lambda: daemon.asked(wire.OpenLease))

        daemon.break_stream()
        daemon.listen_again()

        with pytest.raises(KvdError, match=r"^unreachable: the connection to the daemon broke"):
            await leasing
        assert not node.is_away
        await until(lambda: daemon.asked(wire.CancelCall))
        daemon.push(wire.Leased(1, 70, 0, pack_ids([4])))
        await until(lambda: daemon.asked(wire.ReleaseLease))
        assert (await node.match([1])).tokens == 8
        assert daemon.lives == 1


async def test_what_is_asked_while_nobody_listens_is_answered_once_somebody_does(
    daemon: Daemon,
) -> None:
    daemon.script = script
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        await node.match([1])
        daemon.break_stream()
        await until(lambda: node._port._channel._sockets.stream.fileno() < 0)
        matching = asyncio.create_task(node.match([1]))
        await asyncio.sleep(0.15)
        assert not matching.done()

        daemon.listen_again()

        assert (await matching).tokens == 8


NOBODY = r"^unreachable: nobody listens at ipc://.*client.sock \(.*\), and node-a lives and answers"


async def test_a_client_socket_that_is_gone_is_said_when_connecting(daemon: Daemon) -> None:
    daemon.break_stream()
    try:
        with pytest.raises(KvdError, match=NOBODY):
            kvd.client.connect_sync(daemon.endpoint, name="a")
        with pytest.raises(KvdError, match=NOBODY):
            await kvd.client.connect(daemon.endpoint, name="a")
        await until(lambda: len(daemon.ended) == 2)
    finally:
        daemon.listen_again()


async def test_calls_end_with_words_while_nobody_listens_and_go_on_once_somebody_does(
    daemon: Daemon,
) -> None:
    daemon.script = script
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        await node.match([1])
        daemon.break_stream()
        began_s = time.monotonic()
        with pytest.raises(KvdError, match=NOBODY) as told:
            await node.lease([1])
        assert told.value.retryable
        assert time.monotonic() - began_s < 2
        began_s = time.monotonic()
        with pytest.raises(KvdError, match=NOBODY):
            await node.match([1])
        assert time.monotonic() - began_s < 0.05

        daemon.listen_again()

        await until(lambda: daemon.asked(wire.CancelCall))
        assert (await node.match([1])).tokens == 8
        assert daemon.lives == 1


def test_a_begun_call_ends_with_words_while_nobody_listens(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="prefill-0") as node:
        node.match([1])
        daemon.break_stream()
        leasing = node.begin_lease([1])
        began_s = time.monotonic()
        while not node.pump():
            assert time.monotonic() - began_s < 2
            time.sleep(0.01)
        with pytest.raises(KvdError, match=NOBODY):
            leasing.poll()
        daemon.listen_again()
        began_s = time.monotonic()
        while True:
            try:
                assert node.match([1]).tokens == 8
            except KvdError:
                assert time.monotonic() - began_s < 2
            else:
                break


def test_the_blocking_client_dials_again_and_nobody_notices(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="prefill-0") as node:
        node.match([1])
        daemon.break_stream()
        daemon.listen_again()

        assert node.match([1]).tokens == 8
        assert daemon.lives == 1


def test_a_blocking_call_that_the_daemon_has_read_ends_when_the_stream_breaks(
    daemon: Daemon,
) -> None:
    with kvd.client.connect_sync(daemon.endpoint, name="prefill-0") as node:

        def breaks() -> None:
            while not daemon.asked(wire.OpenLease):
                time.sleep(0.002)
            daemon.break_stream()
            daemon.listen_again()

        breaking = threading.Thread(target=breaks)
        breaking.start()
        with pytest.raises(KvdError, match="the connection to the daemon broke"):
            node.lease([1])
        breaking.join()


def test_calls_to_a_daemon_that_does_not_read_end_in_words(
    deaf: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.client.stream.BACKLOG_MESSAGES", 8)

    async def ask() -> list[str]:
        async with kvd.client.connect(deaf.endpoint, name="decode-0") as node:
            calls = [asyncio.create_task(node.match([1])) for _ in range(20)]
            await until(lambda: sum(call.done() for call in calls) == 12)
            for call in calls:
                call.cancel()
            ends = await asyncio.gather(*calls, return_exceptions=True)
            return [str(end)[:37] for end in ends]

    began_s = time.monotonic()
    ends = asyncio.run(ask())

    assert time.monotonic() - began_s < 5
    assert ends == [""] * 8 + ["unreachable: the daemon does not read"] * 12


def test_a_call_that_nobody_reads_ends_at_its_deadline(
    deaf: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.client.port.MARGIN_S", 0.05)
    with (
        kvd.client.connect_sync(deaf.endpoint, name="prefill-0") as node,
        pytest.raises(KvdError, match="deadline: no answer"),
    ):
        node.lease([1], deadline_s=0.05)


async def test_more_than_the_kernel_takes_is_sent_though_it_was_asked_before_the_first_handshake(
    daemon: Daemon,
) -> None:
    daemon.script = script
    prompt = np.zeros(200_000, np.int32)
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        async with asyncio.timeout(10):
            found = await asyncio.gather(*(node.match(prompt) for _ in range(12)))

    assert [one.tokens for one in found] == [8] * 12


def test_more_than_the_kernel_takes_is_sent_by_a_thread_that_only_pumps(daemon: Daemon) -> None:
    daemon.script = script
    prompt = np.zeros(200_000, np.int32)
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        calls = [node.begin_match(prompt) for _ in range(12)]
        end_s = time.monotonic() + 10
        while not all(call.is_done for call in calls):
            node.pump()
            assert time.monotonic() < end_s

        assert [call.result().tokens for call in calls] == [8] * 12


# ---- begun, and nobody pumps ---------------------------------------------------------------------


def until_asked(daemon: Daemon, kind: type, times: int = 1) -> None:
    end_s = time.monotonic() + 5
    while len(daemon.asked(kind)) < times:
        assert time.monotonic() < end_s, f"{times} of {kind.__name__} did not come"
        time.sleep(0.002)


def test_the_first_begun_call_leaves_when_it_is_begun(daemon: Daemon) -> None:
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        node.begin_lease([1])
        until_asked(daemon, wire.OpenLease)


def test_the_first_begun_call_leaves_after_a_restart_too(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0", on_unreachable="miss") as node:
        for life in (1, 2, 3):
            node.begin_lease([1])
            until_asked(daemon, wire.OpenLease, life)
            daemon.hang_up()
            daemon.restart()
            end_s = time.monotonic() + 5
            # Asking notices that it is away, and then that it is back; nothing is pumped.
            while node.match([1]) == MISS or node.is_away:
                assert time.monotonic() < end_s


def test_a_begun_call_leaves_though_the_stream_has_broken_since(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        node.match([1])
        daemon.break_stream()
        daemon.listen_again()
        node.begin_lease([1])
        until_asked(daemon, wire.OpenLease)


def test_an_engine_that_must_not_wait_waits_for_no_handshake(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking, "MEET_WITHIN_S", 1.0)
    daemon.script = script
    path = daemon.endpoint.removeprefix("ipc://")
    with (
        kvd.client.connect_sync(daemon.endpoint, name="a", on_unreachable="miss") as node,
        kvd.client.connect_sync(daemon.endpoint, name="b") as patient,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mute,
    ):
        assert [one.match([1]).tokens for one in (node, patient)] == [8, 8]
        daemon.break_stream()
        os.unlink(path)
        mute.bind(path)
        mute.listen(2)
        for one, waits in ((patient, True), (node, False)):
            began_s = time.monotonic()
            call = one.begin_match([1])
            assert (time.monotonic() - began_s > 0.9) is waits
            assert not call.is_done
        os.unlink(path)
        daemon.listen_again()
        mute.close()
        assert call.result(5).tokens == 8


def test_a_begun_call_waits_for_no_daemon_that_takes_no_connection(deaf: Daemon) -> None:
    with kvd.client.connect_sync(deaf.endpoint, name="decode-0") as node:
        began_s = time.monotonic()
        calls = [node.begin_match([number]) for number in range(100)]
        assert time.monotonic() - began_s < 1
        assert not any(call.is_done for call in calls)


@pytest.mark.parametrize(("on_unreachable", "most_s"), [("wait", 0.005), ("miss", 0.0002)])
def test_a_begun_call_waits_for_a_handshake_no_longer_than_its_engine_may(
    deaf: Daemon, monkeypatch: pytest.MonkeyPatch, on_unreachable: Any, most_s: float
) -> None:
    waited: list[float] = []
    meet = SessionSockets.meet

    def noted(sockets: SessionSockets, within_s: float) -> None:
        waited.append(within_s)
        meet(sockets, within_s)

    with kvd.client.connect_sync(
        deaf.endpoint, name="decode-0", on_unreachable=on_unreachable
    ) as node:
        monkeypatch.setattr(SessionSockets, "meet", noted)
        node.begin_match([1])
        assert waited == [most_s]
