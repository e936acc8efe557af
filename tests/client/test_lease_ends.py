"""A lease of a session that is over has no pages in the client; keys say whose page numbers are."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import kvd.client
from kvd.client import KvdError, LeaseKey
from kvd.errors import Code, Refusal
from kvd.types import pack_ids
from kvd.wire import client as wire
from tests.client.conftest import POOL, until
from tests.support.pools import build_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Daemon = Any
    """``conftest.Daemon``."""


def script(request: Any, _: bytes) -> list[wire.Reply]:
    """Leases 71 and on have pages 4 and 5, an arena has 6 and 7, a receive brings page 3."""
    match request:
        case wire.OpenLease(call):
            return [wire.Leased(call, 70 + call, 8, pack_ids([4, 5]))]
        case wire.OpenArena(call):
            return [wire.Leased(call, 90 + call, 0, pack_ids([6, 7]))]
        case wire.ReceiveRequest(call):
            return [
                wire.Receiving(call, call, 0),
                wire.Received(call, 60 + call, pack_ids([3]), b""),
            ]
        case wire.MatchPrefix(call):
            return [wire.MatchReply(call, 8, 0, 0)]
        case wire.CommitLease(call):
            return [wire.PageTable(call, 0, pack_ids([4, 9]))]
        case wire.ExtendLease(call):
            return [wire.PageTable(call, 2, pack_ids([8]))]
        case wire.RetractLease(call):
            return [wire.Retracted(call, 0, 0)]
        case wire.ResumeLease(call):
            return [wire.Resumed(call, 0, 0, 0, pack_ids([4, 5]))]
        case wire.ReleaseLease(call):
            return [wire.Done(call)]
    return []


@pytest.fixture
def other_memory() -> Iterator[Any]:
    placed = build_pool(POOL)
    yield placed
    for one in placed:
        one.arena.close()


def other_pool(daemon: Daemon, _: Any, memory: Any) -> None:
    daemon.hang_up()
    daemon.take_memory(memory)
    daemon.restart(keep=[71, 93, 60])


def sent_away(daemon: Daemon, _: Any, __: Any) -> None:
    daemon.send_away(1, Refusal(Code.CLIENT_GONE, "session 1 left everything unread", "node-a"))


def closed(_: Daemon, node: Any, __: Any) -> None:
    node.close()


ENDS = [(other_pool, "pool-changed"), (sent_away, "client-gone"), (closed, "unreachable")]


@pytest.mark.parametrize(("end", "code"), ENDS, ids=[code for _, code in ENDS])
def test_nothing_of_a_session_that_is_over_gives_page_numbers(
    daemon: Daemon, other_memory: Any, end: Any, code: str
) -> None:
    daemon.script = script
    node = kvd.client.connect_sync(daemon.endpoint, name="decode-0")
    pool = node.pool("main")
    pool.layer(0)
    lease, arena = node.lease([1]), node.arena(2)
    receive = node.receive(5, [1], source="prefill-0")
    receive.done()
    waiting = node.receive(5, [1], source="prefill-0")
    key = lease.key
    assert (receive.lease.pages.tolist(), arena.pages.tolist()) == ([3], [6, 7])
    assert node.owns(key)
    assert node.end is None
    node.match([1])  # behind what was said of the second receive, which is read by then

    end(daemon, node, other_memory)
    with pytest.raises(KvdError):
        node.match([1])

    numbers: list[Callable[[], object]] = [
        lambda: lease.pages,
        lambda: lease.pages_of("kv"),
        lambda: lease.key,
        lambda: receive.lease.pages,
        lambda: arena.pages,
        lambda: arena.first_page,
        lambda: waiting.poll().pages,  # type: ignore[union-attr]
    ]
    for number in numbers:
        with pytest.raises(KvdError, match="may be another engine's by now") as caught:
            number()
        assert caught.value.code == code
    assert node.end is not None
    assert node.end.code == code
    assert not node.owns(key)
    for view in (lambda: node.pool("main"), lambda: pool.layer(0), lambda: pool.layer(1)):
        with pytest.raises(KvdError) as caught:
            view()
        assert caught.value.code in {code, "wrong-state"}
    lease.release()
    assert lease.is_released
    arena.close()
    node.close()


async def test_an_engine_on_a_loop_gets_no_numbers_either(
    daemon: Daemon, other_memory: Any
) -> None:
    daemon.script = script
    async with kvd.client.connect(daemon.endpoint, name="decode-0") as node:
        lease = await node.lease([1])
        other_pool(daemon, node, other_memory)
        with pytest.raises(KvdError, match=r"^pool-changed"):
            await node.match([1])
        with pytest.raises(KvdError, match=r"^pool-changed: the session of lease 71 is over"):
            _ = lease.pages
        await lease.release(())
        async with kvd.client.connect(daemon.endpoint, name="decode-0") as anew:
            assert (await anew.match([1])).tokens == 8
            assert not anew.owns(LeaseKey(1, node.incarnation, 71, 0))


def test_a_key_stands_for_the_pages_that_were_read_with_it(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        lease = node.lease([1])
        first = lease.key
        lease.extend(4)
        assert lease.key == first, "what it had stays where it was"
        lease.commit()
        with pytest.raises(KvdError, match=r"^wrong-state: lease 71 has other pages by now"):
            node.check(first)
        swapped = lease.key
        assert node.owns(swapped)
        lease.retract()
        assert not node.owns(swapped)
        lease.resume()
        resumed = lease.key
        assert resumed.version > swapped.version
        assert pickle.loads(pickle.dumps(resumed)) == resumed
        packed = msgspec.msgpack.encode(resumed)
        assert msgspec.msgpack.decode(packed, type=LeaseKey) == resumed
        lease.release()
        with pytest.raises(KvdError, match=r"^unknown-lease: lease 71 is over"):
            node.check(resumed)


def test_a_key_of_a_kept_lease_is_of_the_life_that_is_now(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        kept, given_away = node.lease([1]), node.lease([2])
        before = kept.key
        daemon.hang_up()
        daemon.restart(keep=[71])
        node.match([1])

        assert node.owns(kept.key)
        with pytest.raises(KvdError, match=r"^before-restart: this order is for lease 71"):
            node.check(before)
        with pytest.raises(KvdError, match=r"^before-restart: lease 72"):
            _ = given_away.key


def test_a_worker_copies_for_its_own_session_as_it_is_now_and_for_no_other(
    daemon: Daemon,
) -> None:
    daemon.script = script
    with (
        kvd.client.connect_sync(daemon.endpoint, name="tp-0") as node,
        kvd.client.connect_sync(daemon.endpoint, name="other") as other,
        kvd.client.join(daemon.endpoint, token=node.token) as worker,
    ):
        lease, foreign = node.lease([1]), other.lease([1]).key
        before = lease.key
        worker.check(before)
        with pytest.raises(KvdError, match=r"^unknown-session: .* session 2, and .* session 1"):
            worker.check(foreign)

        daemon.hang_up()
        with pytest.raises(KvdError, match=r"^unreachable: .* nothing is copied") as away:
            worker.check(before)
        assert away.value.retryable
        daemon.restart(keep=[71])
        node.match([1])
        until(lambda: worker.owns(lease.key))

        with pytest.raises(KvdError, match=r"^before-restart: "):
            worker.check(before)


def test_a_worker_that_is_back_and_cannot_be_heard_yet_copies_nothing(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it ordered in between would be refused with what ended the connection of before."""
    daemon.script = script
    with (
        kvd.client.connect_sync(daemon.endpoint, name="tp-0") as node,
        kvd.client.join(daemon.endpoint, token=node.token) as worker,
    ):
        lease, owned, renewed = node.lease([1]), [], worker._words.renewed

        def looked() -> None:
            owned.append(worker.owns(LeaseKey(worker.session, worker.incarnation, 71, 0)))
            renewed()

        monkeypatch.setattr(worker._words, "renewed", looked)
        daemon.hang_up()
        daemon.restart(keep=[71])
        node.match([1])
        until(lambda: worker.owns(lease.key))
    assert owned == [False]


def test_a_worker_that_is_of_no_session_any_more_gives_no_views(
    daemon: Daemon, other_memory: Any
) -> None:
    daemon.script = script
    node = kvd.client.connect_sync(daemon.endpoint, name="tp-0")
    worker = kvd.client.join(daemon.endpoint, token=node.token)
    pool, key = worker.pool("main"), node.lease([1]).key
    pool.layer(0)
    other_pool(daemon, node, other_memory)
    with pytest.raises(KvdError, match=r"^pool-changed"):
        node.match([1])
    until(lambda: worker.end is not None)

    for use in (lambda: pool.layer(0), lambda: worker.pool("main"), lambda: worker.check(key)):
        with pytest.raises(KvdError):
            use()
    worker.close()
    node.close()
    with pytest.raises(KvdError, match="was closed"):
        pool.layer(0)


# ---- said by who goes on meanwhile ---------------------------------------------------------------


def refuses_commits(request: Any, tokens: bytes) -> list[wire.Reply]:
    if isinstance(request, wire.CommitUpTo | wire.ReleaseUpTo | wire.CommitAndRelease):
        return [wire.Failed(request.call, Refusal(Code.BAD_REQUEST, "no", side="node-a"))]
    return script(request, tokens)


def test_what_is_shared_and_left_waits_for_nothing(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        lease = node.lease([1, 2])
        lease.share([3], 2)
        lease.leave([4], 4)
        assert lease.is_released
        with pytest.raises(KvdError, match="was released"):
            lease.pages  # noqa: B018
        assert node.match([1]).tokens == 8
        (share,) = daemon.asked(wire.CommitUpTo)
        assert (share.lease, share.upto_tokens, share.swaps) == (71, 2, False)
        (leave,) = daemon.asked(wire.ReleaseUpTo)
        assert (leave.lease, leave.upto_tokens) == (71, 4)
        plain, committed = node.lease([1, 2]), node.lease([1, 2])
        plain.leave()
        committed.leave(())
        node.match([1])
        assert [one.lease for one in daemon.asked(wire.ReleaseLease)] == [plain.id]
        assert [one.lease for one in daemon.asked(wire.CommitAndRelease)] == [committed.id]


def test_a_lease_that_is_left_is_over_whatever_is_said_of_its_commit(daemon: Daemon) -> None:
    daemon.script = refuses_commits
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        lease = node.lease([1, 2])
        lease.share((), 2)
        lease.leave((), 2)
        until(lambda: [node.pump()] and daemon.asked(wire.ReleaseLease))
        assert [one.lease for one in daemon.asked(wire.ReleaseLease)] == [71]


def test_a_lease_that_is_left_while_the_daemon_is_away_is_not_named_when_it_is_back(
    daemon: Daemon,
) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="a", on_unreachable="miss") as node:
        kept, left, later = node.lease([1]), node.lease([1]), node.lease([1])
        daemon.hang_up()
        until(lambda: [node.pump()] and node.is_away)
        left.leave((), 1)
        with pytest.raises(KvdError, match="before-restart"):
            kept.share((), 1)
        daemon.restart(keep=[kept.id, left.id, later.id])
        until(lambda: [node.pump()] and not node.is_away)
        later.leave((), 1)
        until(lambda: [node.pump()] and daemon.asked(wire.ReleaseLease))
        assert [one.lease for one in daemon.asked(wire.ReleaseLease)] == [later.id]
        assert not daemon.asked(wire.ReleaseUpTo), "nothing of before can be committed"
