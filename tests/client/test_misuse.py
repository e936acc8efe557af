"""Handles given to another node, processes that were forked, calls that must not wait."""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

import kvd.client
from kvd.client import KvdError
from kvd.client.prompt import PromptAddress
from kvd.types import pack_ids
from kvd.wire import client as wire

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Daemon = Any
    """``conftest.Daemon``."""


def script(request: Any, _: bytes) -> list[wire.Reply]:
    asked = request.request if isinstance(request, wire.AboutPrompt) else request
    match asked:
        case wire.OpenLease(call):
            return [wire.Leased(call, 71, 8, pack_ids([4, 5]))]
        case wire.MatchPrefix(call):
            return [wire.MatchReply(call, 8, 0, 0)]
        case wire.ReleaseLease(call) | wire.CancelCall(call):
            return [wire.Done(call)]
    return []


# ---- handles of another node ---------------------------------------------------------------------


def test_a_prompt_of_another_node_is_refused_at_once(daemon: Daemon) -> None:
    daemon.script = script
    with (
        kvd.client.connect_sync(daemon.endpoint, name="a") as mine,
        kvd.client.connect_sync(daemon.endpoint, name="b") as other,
    ):
        prompt, lease = other.prompt([1, 2, 3]), mine.lease([1])
        arena = mine.arena
        assert arena is not None
        uses: list[Callable[[], object]] = [
            lambda: mine.match(prompt),
            lambda: mine.lease(prompt),
            lambda: mine.lease(prompt, hold="prefix"),
            lambda: mine.receive(prompt, source="p"),
            lambda: mine.receive(5, prompt, "p"),
            lambda: mine.send(5, prompt, lease=lease),
            lambda: mine.hand_over(5, prompt, lease=lease),
            lambda: mine.begin_match(prompt).poll(),
        ]
        daemon.got.clear()
        began_s = time.monotonic()
        for use in uses:
            with pytest.raises(KvdError, match=r"^bad-request: this Prompt .* session 1 of node-a"):
                use()
        assert time.monotonic() - began_s < 1
        assert daemon.got == []
        assert other.match(prompt).tokens == 8


def test_a_prompt_of_a_session_that_is_over_is_refused_by_the_next_one(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="a") as node:
        prompt = node.prompt([1, 2, 3])
    with (
        kvd.client.connect_sync(daemon.endpoint, name="a") as node,
        pytest.raises(KvdError, match=r"^bad-request: this Prompt"),
    ):
        node.match(prompt)


async def test_a_lease_of_another_node_is_not_sent(daemon: Daemon) -> None:
    """Its number is another lease there, or will be."""
    daemon.script = script
    async with (
        kvd.client.connect(daemon.endpoint, name="a") as mine,
        kvd.client.connect(daemon.endpoint, name="b") as other,
    ):
        lease = await other.lease([1])
        daemon.got.clear()
        for verb in (mine.send(5, lease=lease), mine.hand_over(5, lease=lease)):
            with pytest.raises(KvdError, match=r"^bad-request: this lease was made by another"):
                await verb
        assert daemon.got == []


# ---- who must not wait ---------------------------------------------------------------------------


def test_a_deadline_of_0_is_over_at_once_where_nobody_answers(daemon: Daemon) -> None:
    with kvd.client.connect_sync(daemon.endpoint, name="a") as node:
        daemon.script = script
        lease = node.lease([1])
        daemon.script = lambda request, tokens: []
        verbs: list[Callable[[], object]] = [
            lambda: node.lease([1], deadline_s=0),
            lambda: node.receive(5, [1], "p", deadline_s=0),
            lambda: node.send(5, lease=lease, deadline_s=0),
            lambda: node.hand_over(6, lease=lease, deadline_s=0),
        ]
        for verb in verbs:
            began_s = time.monotonic()
            with pytest.raises(KvdError, match=r"^deadline: no answer .* within 0.25 s") as late:
                verb()
            assert late.value.retryable
            assert time.monotonic() - began_s < 2
        daemon.script = script
        daemon.push(wire.Leased(2, 72, 0, pack_ids([6])))
        for _ in range(2):  # what the first one reads is said before the second
            node.match([1])
        assert [one.lease for one in daemon.asked(wire.ReleaseLease)] == [72]


async def test_a_loop_waits_no_longer_for_a_deadline_of_0(daemon: Daemon) -> None:
    async with kvd.client.connect(daemon.endpoint, name="a") as node:
        began_s = time.monotonic()
        with pytest.raises(KvdError, match=r"^deadline: no answer .* within 0.25 s"):
            await node.lease([1], deadline_s=0)
        assert time.monotonic() - began_s < 2
        loop = asyncio.get_running_loop()
        assert loop.is_running()


def test_longer_deadlines_have_the_margin_that_they_need() -> None:
    assert [kvd.client.port.within(given) for given in (0, 0.25, 1, 30)] == [0.25, 2.75, 6, 35]


async def test_a_daemon_that_accepts_and_says_nothing_is_waited_for_as_long_as_told(
    tmp_path: Path,
) -> None:
    endpoint = f"ipc://{tmp_path}/client.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(tmp_path / "attach.sock"))
        listening.listen(8)
        for within_s in (0, 0.05):
            began_s = time.monotonic()
            words = rf"^unreachable: .* gave no answer for {within_s:g} s"
            with pytest.raises(KvdError, match=words):
                kvd.client.connect_sync(endpoint, name="a", within_s=within_s)
            with pytest.raises(KvdError, match=words):
                await kvd.client.connect(endpoint, name="a", within_s=within_s)
            assert time.monotonic() - began_s < 1


# ---- forks ---------------------------------------------------------------------------------------


def in_child(*uses: Callable[[], object]) -> list[str]:
    """What each of these comes to in a forked child, by its code."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        ends = []
        for use in uses:
            try:
                ends.append(f"ok {use()}"[:2])
            except KvdError as error:
                ends.append(error.code)
            except Exception as error:  # noqa: BLE001 - told to the parent
                ends.append(repr(error))
        os.write(writing, ",".join(ends).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os.close(writing)
    with os.fdopen(reading, "rb") as found:
        return found.read().decode().split(",")


def test_a_forked_child_is_refused_and_its_parent_notices_nothing(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="a") as node:
        lease = node.lease([1])
        pending = node.begin_match([1])
        descriptor = node.fileno()
        ends = in_child(
            lambda: node.match([1]),
            lambda: node.begin_lease([1]).result(1),
            pending.poll,
            lambda: pending.result(1),
            node.pump,
            lease.release,
            lambda: next(node.events()),
            pending.cancel,
            node.close,
            lambda: node.match([1]),
        )
        assert ends == ["wrong-state"] * 7 + ["ok", "ok", "wrong-state"]
        assert descriptor == node.fileno()
        assert pending.result(5).tokens == 8
        assert [node.match([number]).tokens for number in range(20)] == [8] * 20
        lease.release()
        assert daemon.ended == []
        asked = [type(one) for one in daemon.got]
        assert asked.count(wire.CancelCall) == 0
        assert asked.count(wire.MatchPrefix) == 21
        # What watches the parent's sockets watches them still.
        daemon.hang_up()
        daemon.restart()
        assert node.match([1]).tokens == 8


def test_a_forked_child_that_is_on_no_way_back_says_so(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="a", return_within_s=0.1) as node:
        daemon.hang_up()
        with pytest.raises(KvdError, match=r"^unreachable"):
            node.match([1])
        assert in_child(lambda: node.match([1]), node.close) == ["wrong-state", "ok"]
        daemon.restart()
        assert node.match([1]).tokens == 8


def test_a_forked_child_says_nothing_for_a_worker(daemon: Daemon) -> None:
    daemon.script = script
    with (
        kvd.client.connect_sync(daemon.endpoint, name="a") as node,
        kvd.client.join(daemon.endpoint, token=node.token, rank=0, ranks=1) as worker,
    ):
        key = node.lease([1]).key
        ends = in_child(lambda: worker.written(71, 4), lambda: worker.check(key), worker.close)
        assert ends == ["wrong-state", "wrong-state", "ok"]
        assert worker.owns(key)
        assert worker.end is None
        assert daemon.ended == []
        daemon.hang_up()
        daemon.restart()
        assert node.match([1]).tokens == 8
        end_s = time.monotonic() + 5
        while worker.incarnation != node.incarnation:
            assert time.monotonic() < end_s
            time.sleep(0.002)


def test_a_child_of_a_loop_says_no_goodbye_for_its_parent(daemon: Daemon) -> None:
    daemon.script = script

    async def serve() -> int:
        async with kvd.client.connect(daemon.endpoint, name="a") as node:
            await node.match([1])

            def close() -> None:
                node._port.close()

            assert in_child(close) == ["ok"]
            return (await node.match([1])).tokens

    assert asyncio.run(serve()) == 8


# ---- requests that cannot be sent ----------------------------------------------------------------


def test_what_cannot_be_sent_is_named_as_the_engine_named_it(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="a") as node:
        prompt = node.prompt([1, 2])
        said: list[tuple[Callable[[], object], str, str]] = [
            (lambda: node.lease([]), "bad-request", "a lease of 0 tokens would have no page"),
            (lambda: node.receive([], source="p"), "bad-request", "a receive of 0 tokens"),
            (
                lambda: node.match([1], namespace="n" * 300),
                "bad-request",
                "MatchPrefix cannot be sent: namespace has 300 characters, 256 are taken at most",
            ),
            (
                lambda: node.match(prompt, namespace="n" * 300),
                "bad-request",
                "MatchPrefix cannot be sent: namespace has 300 characters, 256 are taken at most",
            ),
            (
                lambda: node.receive(5, [1], ["p", "q" * 200]),
                "bad-request",
                "source[1] has 200 characters",
            ),
            (
                lambda: node.lease([1], cache="yes"),  # type: ignore[arg-type]
                "bad-request",
                "cache is 'yes': Expected `bool`, got `str`",
            ),
            (
                lambda: node.lease([1], deadline_s="soon"),  # type: ignore[arg-type]
                "bad-request",
                "deadline_s is 'soon'",
            ),
        ]
        daemon.got.clear()
        for use, code, words in said:
            with pytest.raises(KvdError) as caught:
                use()
            assert caught.value.code == code
            assert words in str(caught.value)
        assert daemon.got == []


ODD = (object(), "\ud800", [1], {1: "a"}, 1e30, 2**70, -(2**70), float("nan"))
"""Nothing that any field of any request takes, but for the numbers where it is a number."""

FREE = {"self", "tokens", "new_tokens", "keys", "extra_keys", "swap", "release"}
"""What has tests of its own, or is a yes or no here and is never sent as it is."""


def verbs_of(node: Any) -> list[tuple[Callable[..., object], dict[str, Any]]]:
    """Each verb that sends what it is given, with arguments that are right."""
    lease = node.lease([1, 2])
    send = node.send(6, [1], lease=lease)
    return [
        (node.lease, {"tokens": [1]}),
        (node.match, {"tokens": [1]}),
        (node.receive, {"room": 5, "tokens": [1], "source": "p", "deadline_s": 1}),
        (node.send, {"room": 5, "tokens": [1], "lease": lease}),
        (node.hand_over, {"room": 5, "tokens": [1], "lease": lease}),
        (node.keep_room, {"room": 5, "ttl_s": 1}),
        (node.arena, {"pages": 1}),
        (node.new_epoch, {"namespace": "n"}),
        (node.flush, {}),
        (lease.extend, {"n_tokens": 1}),
        (lease.written, {"upto_tokens": 1}),
        (lease.commit, {}),
        (lease.release, {}),
        (lease.slide, {"upto_tokens": 1}),
        (send.advance, {"upto_tokens": 1}),
        (send.finish, {}),
    ]


def test_whatever_is_given_for_a_field_is_refused_by_its_name(daemon: Daemon) -> None:
    def opens(request: Any, tokens: bytes) -> list[wire.Reply]:
        if isinstance(request, wire.SendRequest):
            return [wire.Sending(request.call, 12)]
        return script(request, tokens)

    daemon.script = opens
    tried = 0
    with kvd.client.connect_sync(daemon.endpoint, name="a") as node:
        verbs = verbs_of(node)
        daemon.got.clear()
        for verb, right in verbs:
            for name in set(inspect.signature(verb).parameters) - FREE:
                for odd in ODD:
                    if isinstance(odd, int | float) and name.endswith("_s"):
                        continue
                    with pytest.raises(KvdError) as caught:
                        verb(**{**right, name: odd})
                    assert name.split("_")[0] in str(caught.value), (verb, name, odd)
                    assert caught.value.code.startswith("bad-")
                    tried += 1
        assert daemon.got == []
    assert tried > 400


def test_what_is_no_key_of_a_lease_is_nobodys(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="a") as node:
        for odd in (None, 7, "key", object()):
            assert not node.owns(odd)  # type: ignore[arg-type]
            with pytest.raises(KvdError, match="it is the key of a lease"):
                node.check(odd)  # type: ignore[arg-type]


@pytest.mark.parametrize("odd", [0, "", [], (), False])
def test_a_salt_that_is_no_bytes_is_refused_even_where_it_is_false(odd: Any) -> None:
    with pytest.raises(KvdError, match="extra_keys are bytes"):
        PromptAddress(8, [1], extra_keys=odd)
    with pytest.raises(KvdError, match="extra keys beside page keys"):
        PromptAddress(8, None, keys=[bytes(16)], extra_keys=odd)


def test_no_salt_is_none() -> None:
    frames = {PromptAddress(8, [1], extra_keys=none).frame for none in (None, b"", {})}
    assert frames == {PromptAddress(8, [1]).frame}


def test_extra_keys_are_those_of_when_they_were_given() -> None:
    extra = {0: b"red", 1: b"red"}
    address = PromptAddress(8, range(12), extra_keys=extra)
    extra[1] = b"blue"

    same = PromptAddress(8, range(12), extra_keys={0: b"red", 1: b"red"})
    assert address.following([12, 13]) == same.following([12, 13])
