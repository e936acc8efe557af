"""What only a real transfer process can show: its life, its death, its start, late bytes."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pathlib
import resource
import select
import signal
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest
import uvloop

from kvd.core.effects import Doubt, LoadAgent, Quiesce, Verify
from kvd.core.inputs import (
    AgentFailed,
    AgentLoaded,
    Copied,
    PostDone,
    PostFailed,
    Quiet,
    Verified,
    WritePath,
)
from kvd.core.layout.geometry import Geometry, PieceRow
from kvd.core.layout.seal import Seal
from kvd.transfer import nixl, process
from kvd.transfer.metadata import pack, unpack
from kvd.transfer.orders import Alive, Collapsed, Probe, RegionPlan
from kvd.transfer.process import TransferProcess, TransportDown
from kvd.types import Pages, pack_ids
from kvd.wire.peer import Integrity
from tests.support.descriptors import none_left

EVERYTHING = list(range(1, 25))


async def test_bytes_still_in_our_socket_after_the_peer_dropped_land_before_quiet(real, tcp):
    """A lagging receiver: what makes ``AgentDropped`` alone no proof between hosts."""
    sender, receiver = await real.pair(tcp)
    memory = receiver.memories["kv"]
    for post in range(1, 60):
        sender.post(post, receiver, EVERYTHING, EVERYTHING)
    await sender.until(lambda: sender.heard(PostDone))
    _halt(receiver.transport.pid)
    sender.transport.order(LoadAgent(receiver.name, 1, receiver.ready.metadata))
    loads = await sender.until(  # the turn that answers has posted a handle nobody can confirm
        lambda: sender.heard(AgentLoaded) if len(sender.heard(AgentLoaded)) == 2 else []
    )

    dropped = await sender.drop(receiver)
    receiver.transport.order(Quiesce(1, Doubt.SENT))
    os.kill(receiver.transport.pid, signal.SIGCONT)
    await receiver.hears(Quiet)
    at_rest = memory.bytes.copy()

    assert [load.path for load in loads] == [WritePath.NETWORK, WritePath.NETWORK]
    assert dropped.unconfirmed_bytes > 0
    receiver.transport.order(Quiesce(2, Doubt.ARRIVED))
    await receiver.hears(Quiet, lease=2)
    assert np.array_equal(memory.bytes, at_rest)


async def test_bytes_of_failed_handles_are_unacknowledged_when_the_peer_died(real, tcp):
    """What a failed handle had sent may have landed: ``AgentDropped`` must not deny it."""
    sender, receiver = await real.pair(tcp)
    posts = range(1, 60)
    for post in posts:
        sender.post(post, receiver, EVERYTHING, EVERYTHING)
    await sender.until(lambda: sender.heard(PostDone))
    await receiver.transport.stop()
    for post in posts:
        await sender.outcome(post)

    dropped = await sender.drop(receiver)

    assert sender.heard(PostFailed)
    assert dropped.unconfirmed_bytes > 0


async def test_a_peer_with_little_scratch_memory_is_still_found_to_be_across_a_network(real, tcp):
    sender, receiver = await asyncio.gather(real.node("sender", tcp), real.node("receiver", tcp))
    told = msgspec.structs.replace(unpack(receiver.ready.metadata), scratch_bytes=4096)

    sender.transport.order(LoadAgent("receiver", 1, pack(told)))

    assert (await sender.hears(AgentLoaded)).path is WritePath.NETWORK


async def test_a_blob_with_a_name_that_is_no_text_fails_its_load_and_no_other(real):
    sender, receiver = await asyncio.gather(real.node("sender"), real.node("receiver"))
    told = unpack(receiver.ready.metadata)
    name = told.agent.encode()
    spoilt = told.blob.replace(name, b"\xff" + name[1:])
    assert spoilt != told.blob

    bad = msgspec.structs.replace(told, blob=spoilt)
    sender.transport.order(LoadAgent("bad", 1, pack(bad)))
    failed = await sender.hears(AgentFailed)
    await sender.load(receiver)

    assert failed.incarnation == "bad"
    assert "UnicodeDecodeError" in failed.why


async def test_a_bug_in_the_builder_ends_the_process_and_says_which(real, monkeypatch):
    receiver = await real.node("receiver")
    run_instead(monkeypatch, "tests.transfer.broken_worker")
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parents[2]))
    sender = await real.node("sender")

    sender.transport.order(LoadAgent("receiver", 1, receiver.ready.metadata))
    await sender.until(lambda: sender.exits)

    (why,) = sender.exits
    assert why.endswith("exited with status 1: thread builder ended by TypeError: a bug")


async def test_a_bug_in_the_copier_ends_the_process_and_says_which(real, monkeypatch):
    run_instead(monkeypatch, "tests.transfer.broken_worker")
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parents[2]))
    node = await real.node("node")

    node.copy(1, "kv", [1], "kv.saved", [1])
    await node.until(lambda: node.exits)

    (why,) = node.exits
    assert why.endswith("exited with status 1: thread copier ended by TypeError: a bug")


async def test_posts_go_on_beside_a_long_copy(real):
    sender, receiver = await real.pair()

    for ticket in range(200):
        sender.copy(ticket, "kv", list(range(1, 9)), "kv.saved", list(range(1, 9)))
    sender.post(1, receiver, [1], [1])
    await sender.copied(199)

    ended = [one for one in sender.reports if isinstance(one, PostDone | Copied)]
    assert isinstance(ended[-1], Copied)
    assert any(isinstance(one, PostDone) for one in ended)


@pytest.mark.parametrize(
    ("babble", "why"),
    [
        (b"\xff\xff\xff\xff", "it sent frame of 4294967295 bytes on the order socket"),
        (b"\x03\0\0\0abcand on and on", "it sent 3 bytes that cannot be read"),
    ],
)
async def test_a_process_that_babbles_is_ended_and_says_what(real, monkeypatch, babble, why):
    run_instead(monkeypatch, "tests.transfer.babbling_worker")
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parents[2]))
    sender = await real.node("sender")

    sender.transport.order(LoadAgent("receiver", 1, babble))
    await sender.until(lambda: sender.exits)

    (said,) = sender.exits
    assert f"was killed by SIGKILL: {why}" in said


async def test_post_over_tcp_is_whole_and_says_which_way_it_went(real, tcp):
    sender, receiver = await real.pair(tcp)

    sender.post(1, receiver, EVERYTHING, EVERYTHING[::-1])
    outcome = await sender.outcome(1)

    assert isinstance(outcome, PostDone)
    assert [report.path for report in sender.heard(AgentLoaded)] == [WritePath.NETWORK]
    ours, theirs = (node.memories["kv"] for node in (sender, receiver))
    row = theirs.shape.rows[0]
    assert all(
        np.array_equal(
            theirs.bytes[theirs.piece(row, 25 - page)], ours.bytes[ours.piece(row, page)]
        )
        for page in EVERYTHING
    )


async def test_a_peer_that_dies_while_idle_fails_the_next_post_only(real):
    sender, receiver = await real.pair()
    await receiver.transport.stop()

    sender.post(1, receiver, [1], [1])

    assert isinstance(await sender.outcome(1), PostFailed)
    assert sender.exits == []


async def test_regions_are_collapsed_or_it_is_said_why_not(real):
    node = await real.node("alone")

    for name in ("kv", "layered"):
        report = await node.hears(Collapsed, region=name)
        size = node.memories[name].bytes.size
        assert report.huge_bytes == size or report.why


async def test_a_region_larger_than_its_file_stops_the_start():
    row = PieceRow(0, 4096, 4096)
    fd = os.memfd_create("short")
    os.ftruncate(fd, 8192)
    region = RegionPlan("kv", fd, Geometry(3, 4096, (row,), ()))
    process = TransferProcess("short-1", [region], environment={})

    with pytest.raises(TransportDown, match="3 pages ending at byte 12288, its file has 8192"):
        await process.start(lambda _: None, lambda _: None)

    os.close(fd)
    assert _is_reaped(process.pid)


async def test_a_process_spawned_before_there_is_a_loop_serves_once_it_is_started():
    process = TransferProcess("early-1", [], environment={})
    await asyncio.to_thread(process.spawn)
    heard: asyncio.Queue[object] = asyncio.Queue()

    ready = await process.start(lambda reports: heard.put_nowait(reports[-1]), lambda _: None)
    process.order(Probe(7))

    assert ready.metadata
    assert await asyncio.wait_for(heard.get(), 10) == Alive(7)
    await process.stop()
    assert _is_reaped(process.pid)


async def test_a_process_that_was_spawned_and_is_not_wanted_is_reaped():
    process = TransferProcess("early-2", [], environment={})
    process.spawn()

    await process.stop()

    assert _is_reaped(process.pid)


async def test_a_process_that_cannot_start_nixl_says_why():
    process = TransferProcess("bad-1", [], environment={"UCX_TLS": "nonsense"})

    with pytest.raises(TransportDown, match="UCX_TLS is 'nonsense': try without it"):
        await process.start(lambda _: None, lambda _: None)

    assert _is_reaped(process.pid)


async def test_a_device_that_is_not_here_is_named_with_those_that_are():
    process = TransferProcess("bad-2", [], environment={"UCX_NET_DEVICES": "nope0:1"})
    why = r"UCX_NET_DEVICES names nope0, and this host has .*lo.*: correct it in \[transfer.ucx\]"
    with pytest.raises(TransportDown, match=why):
        await process.start(lambda _: None, lambda _: None)


def test_too_few_descriptors_are_told_with_their_numbers(monkeypatch):
    monkeypatch.setattr(nixl.resource, "getrlimit", lambda _: (10, 10))
    said = nixl.no_backend()
    assert "of 10 descriptors are open" in said
    assert "raise LimitNOFILE of the unit, or ulimit -n" in said


async def test_a_cancelled_start_leaves_no_process():
    process = TransferProcess("cancelled-1", [], environment={})
    starting = asyncio.create_task(process.start(lambda _: None, lambda _: None))
    await asyncio.sleep(0)
    starting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await starting

    assert _is_reaped(process.pid)


async def test_a_start_that_is_cancelled_just_as_the_process_is_ready_leaves_no_process():
    """Its ``Ready`` is heard when nobody waits for it any more."""
    unexpected: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: unexpected.append(told))
    process = TransferProcess("cancelled-2", [], environment={})
    starting = asyncio.create_task(process.start(lambda _: None, lambda _: None))
    await asyncio.sleep(0)
    assert select.select([process._socket], [], [], 30.0)[0]
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - nothing else runs
    starting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(starting, 5.0)

    assert unexpected == []
    assert _is_reaped(process.pid)


async def test_a_process_that_this_host_has_no_descriptors_for_cannot_serve():
    """So the daemon tries again later, as after any other start that failed."""
    process = TransferProcess("starved-1", [], environment={})
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with none_left():
        spare = os.dup(0)
        os.close(spare)
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 3, limits[1]))
        try:
            with pytest.raises(TransportDown, match="Too many open files"):
                await process.start(lambda _: None, lambda _: None)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    await process.stop()


async def test_a_lock_is_held_until_the_process_is_gone(tmp_path):
    holder = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    process = TransferProcess("locked-1", [], environment={}, keep_open=[holder])
    await process.start(lambda _: None, lambda _: None)
    os.close(holder)
    other = os.open(tmp_path / "lock", os.O_RDWR)

    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    await process.stop()
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

    os.close(other)


def test_start_kill_and_stop_work_on_uvloop():
    async def life() -> list[str]:
        ended: asyncio.Queue[str] = asyncio.Queue()
        crashing = TransferProcess("uv-1", [], environment={})
        await crashing.start(lambda _: None, ended.put_nowait)
        os.kill(crashing.pid, signal.SIGKILL)
        since_s = time.monotonic()
        why = await ended.get()
        stopping = TransferProcess("uv-2", [], environment={})
        await stopping.start(lambda _: None, ended.put_nowait)
        await stopping.stop()
        assert _is_reaped(crashing.pid)
        assert _is_reaped(stopping.pid)
        assert time.monotonic() - since_s < 5
        return [why, *(ended.get_nowait() for _ in range(ended.qsize()))]

    (why,) = uvloop.run(life())
    assert why.endswith("was killed by SIGKILL")


def test_the_process_dies_with_a_daemon_that_is_killed():
    daemon = subprocess.Popen(
        [sys.executable, "-c", _DAEMON], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    child = os.pidfd_open(int(daemon.stdout.readline()))
    daemon.kill()
    daemon.wait()
    daemon.stdout.close()

    ended, _, _ = select.select([child], [], [], 5)
    os.close(child)
    assert ended


def test_the_daemon_side_loads_neither_nixl_nor_torch():
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, kvd.transfer.process; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()

    assert not [name for name in loaded if name.startswith(("nixl", "torch"))]


_DAEMON = """
import asyncio
from kvd.transfer.process import TransferProcess

async def serve():
    process = TransferProcess("orphan-1", [], environment={})
    await process.start(lambda _: None, lambda _: None)
    print(process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


def run_instead(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Have transfer processes run that."""
    kind = msgspec.structs.replace(process.TRANSFER, module=module)
    monkeypatch.setattr(process, "TRANSFER", kind)


def _halt(pid: int) -> None:
    """Stop a child; on return every thread of it stands."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def _is_reaped(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_many_verifications_do_not_hold_up_a_post(real):
    """Each of all pages; a post of one page, ordered after them, is back before the last."""
    sender, receiver = await real.pair()
    seal = Seal(Integrity.FULL, b"k" * 16, 0, len(EVERYTHING))
    pages, sums = Pages(pack_ids(EVERYTHING)), b"\0" * 8 * len(EVERYTHING)

    for ticket in range(20):
        sender.transport.order(Verify(ticket, "kv", seal, pages, sums))
    sender.post(1, receiver, [1], [2], seal=seal)
    await sender.outcome(1)
    await sender.until(lambda: len(sender.heard(Verified)) == 20)

    told = [type(one) for one in sender.reports]
    assert told.index(PostDone) < len(told) - 1 - told[::-1].index(Verified)
