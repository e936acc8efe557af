"""The blocking client and the workers of a session over a restart of the daemon."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import kvd.client
from kvd.client import EventsLost, KvdError
from kvd.client.blocking import attach
from kvd.client.endpoint import attach_path
from kvd.client.returning import LONGEST_PAUSE_S, WayBack
from kvd.types import pack_ids
from kvd.wire import client as wire
from kvd.wire.attach import Attach
from kvd.wire.events import Evicted
from tests.client.conftest import POOL, until
from tests.support.pools import build_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Daemon = Any
    """``conftest.Daemon``."""


def script(request: Any, _: bytes) -> list[wire.Reply]:
    match request:
        case wire.OpenLease(call):
            return [wire.Leased(call, 71, 8, pack_ids([4, 5]))]
        case wire.MatchPrefix(call):
            return [wire.MatchReply(call, 8, 0, 0)]
        case wire.ReleaseLease(call, 71):
            return [wire.Done(call)]
        case wire.Subscribe(call):
            return [
                wire.Done(call),
                wire.Events(0, (Evicted(7, 0.0, pages=1, nodes=1, reason="room"),)),
            ]
    return []


@pytest.fixture
def other_memory() -> Iterator[Any]:
    placed = build_pool(POOL)
    yield placed
    for one in placed:
        one.arena.close()


def later(action: Callable[[], object], after_s: float = 0.1) -> threading.Timer:
    timer = threading.Timer(after_s, action)
    timer.start()
    return timer


# ---- the blocking client -------------------------------------------------------------------------


def test_the_first_call_after_a_restart_is_answered_as_ever(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="prefill-0") as node:
        lease = node.lease([1])
        k, _ = node.pool("main").layer(0)
        token = node.token
        daemon.hang_up()
        daemon.restart(keep=[71])

        assert node.match([1]).tokens == 8

        assert (node.session, node.token, node.incarnation) == (1, token, "2" * 32)
        assert node.pool("main").layer(0)[0].data_ptr() == k.data_ptr()
        with pytest.raises(KvdError, match=r"^before-restart: lease 71 is of before"):
            lease.commit([2])
        lease.release([2])
        assert daemon.returns == [(1, (71,))]
        assert len(daemon.asked(wire.ReleaseLease)) == 1


def test_a_lease_is_known_to_be_of_before_by_its_first_verb_after_the_restart(
    daemon: Daemon,
) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="prefill-0") as node:
        lease = node.lease([1])
        daemon.hang_up()
        daemon.restart(keep=[71])

        with pytest.raises(KvdError, match=r"^before-restart: "):
            lease.extend(1)
        lease.release()
        node.match([1])

        assert daemon.returns == [(1, ())]


def test_a_call_waits_while_the_daemon_is_away_and_then_gives_up(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="prefill-0", return_within_s=0.5) as node:
        daemon.hang_up()
        began_s = time.monotonic()
        with pytest.raises(KvdError, match=r"^unreachable: the daemon .* within 0.5 s"):
            node.match([1])
        assert 0.45 < time.monotonic() - began_s < 2
        assert node.is_away
        timer = later(daemon.restart, 0.05)

        assert node.match([1]).tokens == 8

        timer.join()
        assert not node.is_away


def test_other_memory_ends_a_blocking_node(daemon: Daemon, other_memory: Any) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="prefill-0") as node:
        lease = node.lease([1])
        daemon.hang_up()
        daemon.take_memory(other_memory)
        daemon.restart(keep=[71])

        for _ in range(2):
            with pytest.raises(KvdError, match=r"^pool-changed: .* connect anew"):
                node.match([1])
        lease.release()

    assert daemon.asked(wire.ReleaseLease) == []


def test_an_iterator_of_events_names_the_restart_and_goes_on(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="console") as node:
        events = node.events()
        taken = [next(events)]
        daemon.hang_up()
        daemon.restart()
        taken += [next(events) for _ in range(2)]
        events.close()

    event = Evicted(7, 0.0, pages=1, nodes=1, reason="room")
    assert taken == [event, EventsLost(0, is_restart=True), event]


def test_a_forked_child_does_not_take_the_session_of_its_parent(daemon: Daemon) -> None:
    daemon.script = script
    with kvd.client.connect_sync(daemon.endpoint, name="prefill-0") as node:
        way = WayBack(
            attach_path(daemon.endpoint),
            node.wrapped._attachment,
            lambda: Attach("child", resumes=node.token),
        )
        child = os.fork()
        if child == 0:
            try:
                way.step()
            except KvdError as error:
                os._exit(0 if error.code == "wrong-state" else 2)
            os._exit(3)
        assert os.waitpid(child, 0)[1] == 0
        assert daemon.returns == []


def test_pauses_grow_to_half_a_second_and_a_full_queue_is_a_reason_to_wait(
    daemon: Daemon, tmp_path: Any
) -> None:
    pauses = []
    with kvd.client.connect_sync(daemon.endpoint, name="decode-0") as node:
        attachment = node.wrapped._attachment
        way = WayBack(str(tmp_path / "nobody.sock"), attachment, lambda: Attach("nobody"))
        for _ in range(8):
            assert not way.step()
            pauses.append(way.pause_s)

    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, *[LONGEST_PAUSE_S] * 3]


# ---- workers -------------------------------------------------------------------------------------


def workers() -> set[threading.Thread]:
    """Those of this process that sleep until their daemon hangs up."""
    return {thread for thread in threading.enumerate() if thread.name == "kvd-worker"}


def test_a_worker_joins_again_once_its_session_is_back(daemon: Daemon) -> None:
    daemon.script = script
    before = workers()
    with (
        kvd.client.connect_sync(daemon.endpoint, name="tp-0") as node,
        kvd.client.join(daemon.endpoint, token=node.token) as worker,
    ):
        worker.pool("main").layer(0)[0][4].fill_(2.5)
        daemon.hang_up()
        daemon.restart()
        until(lambda: daemon.refusals)
        assert daemon.refusals[0].value == "unreachable"

        node.match([1])

        until(lambda: daemon.joins == [1, 1])
        assert float(worker.pool("main").layer(0)[0][4].sum()) == 2.5 * 64
        assert worker.end is None
        daemon.hang_up()
    assert workers() <= before


def test_a_worker_ends_with_words_when_the_pool_is_other_memory(
    daemon: Daemon, other_memory: Any
) -> None:
    with kvd.client.connect_sync(daemon.endpoint, name="tp-0") as node:
        worker = kvd.client.join(daemon.endpoint, token=node.token)
        k, _ = worker.pool("main").layer(0)
        daemon.hang_up()
        daemon.take_memory(other_memory)
        daemon.restart()
        main = attach(daemon.endpoint, Attach("tp-0", resumes=node.token))

        until(lambda: worker.end is not None)

        with pytest.raises(KvdError, match=r"^pool-changed: "):
            worker.pool("main")
        k[4].fill_(1.0)
        worker.close()
        worker.close()
        main.close()


def test_a_worker_whose_session_is_over_says_so(daemon: Daemon) -> None:
    with kvd.client.connect_sync(daemon.endpoint, name="tp-0") as node:
        worker = kvd.client.join(daemon.endpoint, token=node.token)
        daemon.hang_up()
        daemon.restart(knows_sessions=False)

        until(lambda: worker.end is not None)

        with pytest.raises(KvdError, match=r"^unknown-session: "):
            worker.pool("main")
        worker.close()


def test_closing_a_worker_does_not_wait_for_a_daemon_that_is_away(daemon: Daemon) -> None:
    with kvd.client.connect_sync(daemon.endpoint, name="tp-0") as node:
        worker = kvd.client.join(daemon.endpoint, token=node.token)
        daemon.hang_up()
        time.sleep(0.2)
        began_s = time.monotonic()

        worker.close()

        assert time.monotonic() - began_s < 0.5
