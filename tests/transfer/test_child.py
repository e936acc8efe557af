"""A transfer process that is started before anybody knows what it maps."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvd.core.layout.geometry import Geometry, PieceRow
from kvd.daemon.lock import AlreadyRunning, take
from kvd.transfer.child import MOST_DESCRIPTORS, WorkerChild
from kvd.transfer.orders import (
    NO_FD,
    BeginTransfer,
    Frames,
    RegionPlan,
    descriptors_of,
    order_of,
    with_descriptors,
)
from kvd.transfer.process import TransferProcess, TransportDown
from tests.support.descriptors import none_left

SHAPE = Geometry(3, 4096, (PieceRow(0, 4096, 4096),), ())


def test_a_child_that_nobody_takes_is_reaped_with_its_descriptors():
    with none_left():
        child = WorkerChild()

        child.end()
        child.end()

        assert child.process.returncode is not None


async def test_a_child_that_was_started_before_is_the_process_and_ending_it_is_not_its_starters():
    child = WorkerChild()
    process = TransferProcess("early-3", [], environment={}, child=child)

    ready = await process.start(lambda _: None, lambda _: None)
    child.end()

    assert ready.metadata
    assert process.pid == child.process.pid
    assert child.process.poll() is None
    await process.stop()
    assert child.process.poll() is not None


async def test_a_child_that_died_before_it_was_told_anything_is_a_transport_that_is_down():
    child = WorkerChild()
    child.process.kill()
    process = TransferProcess("early-4", [], environment={}, child=child)

    with pytest.raises(TransportDown, match="was killed by SIGKILL"):
        await process.start(lambda _: None, lambda _: None)


async def test_what_it_is_told_of_its_environment_is_what_its_transport_goes_by():
    child = WorkerChild()
    process = TransferProcess("early-5", [], environment={"UCX_TLS": "nonsense"}, child=child)

    with pytest.raises(TransportDown, match="UCX_TLS is 'nonsense': try without it"):
        await asyncio.wait_for(process.start(lambda _: None, lambda _: None), 60)


HOLDER = """
import os, socket, sys, time
from kvd.daemon.lock import take
from kvd.transfer.child import WorkerChild
child = WorkerChild("slow_to_load")
socket.send_fds(child.socket, [b"x"], [take(sys.argv[1])])
time.sleep(600)
"""


def test_what_a_killed_daemon_has_handed_to_a_child_that_still_loads_is_free_at_once(tmp_path):
    """The lock among it: until that child has ended no daemon can start."""
    lock, loads = str(tmp_path / "lock"), tmp_path / "loads"
    (tmp_path / "slow_to_load.py").write_text(
        f"import time\nopen({str(loads)!r}, 'w').close()\ntime.sleep(60)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, lock], env={**os.environ, "PYTHONPATH": path}
    )
    until_s = time.monotonic() + 60
    while not loads.exists():
        assert time.monotonic() < until_s
        time.sleep(0.01)
    with pytest.raises(AlreadyRunning):
        take(lock)

    holder.kill()
    holder.wait()

    os.close(take(lock))


def test_descriptors_get_the_numbers_that_they_have_where_they_arrive():
    regions = (
        RegionPlan("kv", 6, SHAPE),
        RegionPlan("dev", NO_FD, SHAPE, device=0),
        RegionPlan("saved", 4, SHAPE),
    )
    begin = BeginTransfer("n-1", (5, 9), regions, {})

    arrived = with_descriptors(begin, [20, 21, 22, 23])

    assert descriptors_of(begin) == [5, 9, 6, 4]
    assert arrived.kept == (20, 21)
    assert [one.fd for one in arrived.regions] == [22, NO_FD, 23]


class Unborn:
    """Stands for a child that has not loaded yet: what it is told waits on ``theirs``."""

    def __init__(self):
        self.socket, self.theirs = socket.socketpair()
        self.socket.settimeout(0.0)

    def take(self):
        return self


def test_more_descriptors_than_one_message_takes_arrive_in_order(tmp_path):
    fds = [os.open(tmp_path / str(number), os.O_CREAT | os.O_RDWR) for number in range(300)]
    plans = [RegionPlan(f"kv#{number}", fd, SHAPE) for number, fd in enumerate(fds)]
    child = Unborn()
    process = TransferProcess("many", plans, environment={}, child=child)

    process.spawn()

    frames, received, orders = Frames(), [], []
    while not orders:
        data, some, _, _ = socket.recv_fds(child.theirs, 2**20, MOST_DESCRIPTORS)
        received += some
        orders = [order_of(body) for body in frames.feed(data)]
    told = with_descriptors(orders[0], received)
    named = [Path(f"/proc/self/fd/{one.fd}").readlink().name for one in told.regions]
    assert named == [str(number) for number in range(300)]
    for fd in (*fds, *received, orders[0].kept[0]):
        os.close(fd)
    child.socket.close()
    child.theirs.close()
