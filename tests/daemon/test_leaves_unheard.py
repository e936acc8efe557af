"""Processes that leave while their daemon is dying: the next one does not wait for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import kvd.client
from tests.daemon.conftest import until
from tests.support.copies import PAGE, kept_daemon

HEARD_S = 20.0


@pytest.fixture
def daemon(tmp_path):
    with kept_daemon(tmp_path, pages=33) as made:
        yield made


def nobody_is_awaited(daemon):
    until(lambda: not daemon.snapshot().clients, within_s=HEARD_S)
    assert not daemon.snapshot().leases


def tokens():
    return np.arange(4 * PAGE, dtype=np.int32)


def test_a_node_that_is_closed_before_it_sees_that_its_daemon_is_dead(daemon):
    node = kvd.client.connect_sync(daemon.client, name="engine")
    node.lease(tokens())
    daemon.kill()

    node.close()

    daemon.start()
    daemon.wait_ready()
    nobody_is_awaited(daemon)


def test_a_node_that_is_closed_under_a_daemon_that_is_stopped_and_dies(daemon):
    node = kvd.client.connect_sync(daemon.client, name="engine")
    node.lease(tokens())
    os.kill(daemon.pid, signal.SIGSTOP)

    began_s = time.monotonic()
    node.close()
    took_s = time.monotonic() - began_s

    daemon.kill()
    daemon.start()
    daemon.wait_ready()
    nobody_is_awaited(daemon)
    assert took_s < 1


def test_a_key_is_free_when_a_daemon_that_was_held_up_has_read_that_its_node_is_closed(daemon):
    node = kvd.client.connect_sync(daemon.client, name="first", key="key")
    os.kill(daemon.pid, signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (daemon.pid, signal.SIGCONT)).start()

    node.close()

    with kvd.client.connect_sync(daemon.client, name="second", key="key") as second:
        assert second.session != node.session


WORKER = """
import sys
import kvd.client

worker = kvd.client.join(sys.argv[1], token=bytes.fromhex(sys.argv[2]), rank=1, ranks=2)
print("joined", flush=True)
sys.stdin.readline()
worker.close()
print("closed", flush=True)
sys.stdin.readline()
"""
"""It lives on when it is closed."""


@pytest.mark.parametrize("away_s", [0, 1])
def test_a_worker_that_is_closed_while_its_daemon_is_dead(daemon, away_s):
    with kvd.client.connect_sync(daemon.client, name="engine", return_within_s=60) as node:
        node.lease(tokens())
        command = [sys.executable, "-c", WORKER, daemon.client, node.token.hex()]
        with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as worker:
            worker.stdout.readline()
            assert set(pids(daemon)) == {os.getpid(), worker.pid}
            daemon.kill()
            time.sleep(away_s)  # it sees at once that the daemon is dead, or has seen it

            print(file=worker.stdin, flush=True)
            worker.stdout.readline()

            daemon.start()
            daemon.wait_ready()
            node.match(tokens())
            until(lambda: pids(daemon) == (os.getpid(),), within_s=HEARD_S)
            assert worker.poll() is None
            print(file=worker.stdin, flush=True)


def pids(daemon):
    [client] = daemon.snapshot().clients
    return client.pids


@pytest.mark.parametrize("says", ["by itself", "by a worker too"])
def test_a_session_that_other_memory_has_ended_is_awaited_by_nobody_once_that_of_before_is_back(
    daemon, says
):
    """A pool's section is changed and changed back, and the engine lives: it holds nothing."""
    shape, before = dict(daemon._settings), daemon.client
    node = kvd.client.connect_sync(before, name="engine", on_unreachable="miss")
    workers = [kvd.client.join(before, token=node.token)] if "worker" in says else []
    node.lease(tokens())
    daemon.kill()
    del daemon._settings["pool.directory"]
    daemon._settings["pool.backing"] = "anon"
    daemon.start()
    daemon.wait_ready()
    until(lambda: node.pump() is not None and node.end is not None, within_s=HEARD_S)
    until(lambda: all(worker.end is not None for worker in workers), within_s=HEARD_S)
    for one in (node, *workers):
        one.close()
    assert str(node.end).startswith("pool-changed")
    until(lambda: not daemon.snapshot().clients, within_s=HEARD_S)

    daemon.stop()
    daemon._settings = shape
    daemon.start()
    daemon.wait_ready()
    assert [client.name for client in daemon.snapshot().clients] == ["engine"]
    with kvd.client.connect_sync(before, name="engine anew") as anew:
        workers = [kvd.client.join(before, token=anew.token) for _ in workers]
        until(
            lambda: [client.name for client in daemon.snapshot().clients] == ["engine anew"],
            within_s=HEARD_S,
        )
        assert not daemon.snapshot().leases
        for worker in workers:
            worker.close()
