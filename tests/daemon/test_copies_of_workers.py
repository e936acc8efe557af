"""A worker that is stopped in the middle of a copy: nobody is given what it may still write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kvd.client
from tests.support.copies import BYTES, LAYERS, PAGE, kept_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvd.client import SyncLease, SyncNode
    from tests.support.daemons import Daemon

BLOCKS, POOL = 40, 33

WORKER = f"""
import os, signal, sys, time
import numpy as np
import kvd.client
from kvd.client.mover.host_lane import HostLane

begin = HostLane.begin

def stops_first(lane, columns, *, to_pages):
    print("moving", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.2)  # this thread may go on for a moment
    return begin(lane, columns, to_pages=to_pages)

HostLane.begin = stops_first
endpoint, key = sys.argv[1:3]
worker = kvd.client.join(endpoint, key=key, rank=0, ranks=1)
own = np.full(({LAYERS}, {BLOCKS}, {BYTES}), 0xEE, np.uint8)
blocks = worker.blocks(dict(enumerate(own)), block_size={PAGE})
print("joined", flush=True)
from kvd.client.lease_key import LeaseKey
import json
order = json.loads(sys.stdin.readline())
save = blocks.begin_save(LeaseKey(**order["key"]), {{"kv": [1, 2]}}, pages={{"kv": order["pages"]}})
try:
    save.result(60)
    print("counted", flush=True)
except kvd.client.KvdError as error:
    print(error.code, flush=True)
sys.stdin.readline()
worker.close()
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with kept_daemon(tmp_path, pages=POOL) as made:
        yield made


@pytest.fixture
def begun(daemon: Daemon) -> Iterator[tuple[SyncNode, SyncLease, subprocess.Popen[str]]]:
    """A session whose worker is stopped with a save of two pages begun."""
    with (
        subprocess.Popen(
            [sys.executable, "-c", WORKER, daemon.client, "engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as worker,
        kvd.client.connect_sync(
            daemon.client, name="main", key="engine", return_within_s=30
        ) as node,
    ):
        try:
            assert worker.stdin is not None
            assert worker.stdout is not None
            assert worker.stdout.readline() == "joined\n"
            lease = node.lease(tokens_of(2))
            key = {name: getattr(lease.key, name) for name in lease.key.__struct_fields__}
            order = {"key": key, "pages": lease.pages.tolist()}
            worker.stdin.write(json.dumps(order) + "\n")
            worker.stdin.flush()
            assert worker.stdout.readline() == "moving\n"
            os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)
            yield node, lease, worker
        finally:
            worker.kill()


def tokens_of(pages: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, pages * PAGE, dtype=np.int32)


def takes(node: SyncNode, n: int, seed: int) -> set[int]:
    """Pages of so many leases."""
    leases = [node.lease(tokens_of(1, seed=seed + number), deadline_s=0.5) for number in range(n)]
    return {page for lease in leases for page in lease.pages.tolist()}


def test_its_pages_are_nobodys_until_it_goes_on(daemon, begun):
    _, lease, worker = begun
    mine = set(lease.pages.tolist())
    lease.release()
    with kvd.client.connect_sync(daemon.client, name="other") as other:
        assert not mine & takes(other, POOL - 3, 100)
        with pytest.raises(kvd.client.KvdError, match="0 obtainable"):
            other.lease(tokens_of(1, seed=999), deadline_s=0.2)

        os.kill(worker.pid, signal.SIGCONT)
        last = other.lease(tokens_of(2, seed=998), deadline_s=10)
        assert set(last.pages.tolist()) == mine


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGCONT])
def test_nor_over_a_restart_of_the_daemon(daemon, begun, end):
    node, lease, worker = begun
    mine = set(lease.pages.tolist())
    before = node.incarnation
    daemon.kill()
    daemon.start()
    daemon.wait_ready()
    lease.release()
    assert node.match(tokens_of(1, seed=5)).tokens == 0
    assert node.incarnation != before
    with kvd.client.connect_sync(daemon.client, name="other") as other:
        assert not mine & takes(other, POOL - 3, 100)
        with pytest.raises(kvd.client.KvdError, match="0 obtainable"):
            other.lease(tokens_of(1, seed=999), deadline_s=0.2)

        os.kill(worker.pid, end)
        last = other.lease(tokens_of(2, seed=998), deadline_s=10)
        assert set(last.pages.tolist()) == mine
    if end is signal.SIGCONT:
        assert worker.stdout.readline() == "unreachable\n"
