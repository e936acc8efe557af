"""Descriptors run out: of a daemon, which lets operators in all the same, and of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import time

import pytest

import kvd.client
from kvd.client import KvdError
from tests.support.daemons import Daemon, Place, one_daemon

SMALL = {"pool.layers": "1", "pool.heads": "1", "pool.head_dim": "8", "pool.pages": "64"}
FEW = Place(prefix=("bash", "-c", 'ulimit -n 80; exec "$@"', "kvd"))


def test_engines_that_would_take_the_last_descriptors_are_refused_with_the_numbers(tmp_path):
    daemon = Daemon("d", tmp_path, SMALL, FEW)
    sessions = []
    try:
        daemon.start()
        daemon.wait_ready()

        def fill():
            for number in range(60):
                sessions.append(kvd.client.connect_sync(daemon.client, name=f"e{number}"))
                assert sessions[-1].lease([1] * 16).prefix_len == 0

        with pytest.raises(KvdError) as refused:
            fill()
        assert refused.value.code == "no-room"
        assert "of 80 descriptors of d are open" in str(refused.value)
        assert len(sessions) > 8
        assert len(daemon.snapshot().clients) == len(sessions), "operators are let in"

        sessions.pop().close()
        daemon.wait_for(lambda: len(daemon.snapshot().clients) == len(sessions), "one has left", 10)
        sessions.append(kvd.client.connect_sync(daemon.client, name="again"))
        assert "Traceback" not in daemon.quoted_log()
    finally:
        for one in sessions:
            one.close()
        daemon.stop()


def open_descriptors():
    """Of this process; nodes of other tests may look for their daemon, to say goodbye to it."""
    counts = []
    for _ in range(5):
        time.sleep(0.01)
        counts.append(len(os.listdir("/proc/self/fd")))
    return min(counts)


@contextlib.contextmanager
def descriptors_left(number):
    """This process may open so many more; other tests may have left numbers in use anywhere."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = (at for at in itertools.count() if not os.path.lexists(f"/proc/self/fd/{at}"))
    limit = next(itertools.islice(free, number, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def leave_again(endpoint):
    node = await kvd.client.connect(endpoint, name="e")
    await node.close()


@pytest.mark.parametrize("how", ["connect_sync", "connect", "join"])
def test_an_engine_without_descriptors_is_told_so_and_loses_none(tmp_path, how):
    with (
        one_daemon(tmp_path, SMALL) as daemon,
        kvd.client.connect_sync(daemon.client, name="first") as first,
        asyncio.Runner() as runner,
    ):
        token = first.token
        ways = {
            "connect_sync": lambda: kvd.client.connect_sync(daemon.client, name="e").close(),
            "connect": lambda: runner.run(leave_again(daemon.client)),
            "join": lambda: kvd.client.join(daemon.client, token=token).close(),
        }
        ways[how]()  # whatever is made once in a process is made
        before, said = open_descriptors(), []
        for left in range(10):
            try:
                with descriptors_left(left):
                    ways[how]()
                said.append("in")
            except KvdError as error:
                said.append(str(error))
            # What a daemon has not read yet of a leave keeps one for a moment.
            end_s = time.monotonic() + 10
            while (left := open_descriptors()) != before:
                assert time.monotonic() < end_s, f"{left} descriptors, {before} before"
        known = ("no descriptor is left", "Too many open files")
        assert all(one == "in" or any(words in one for words in known) for one in said), said
        assert "in" not in said[:2]
        assert said[-1] == "in"
        daemon.wait_for(lambda: len(daemon.snapshot().clients) == 1, "sessions are left", 10)
