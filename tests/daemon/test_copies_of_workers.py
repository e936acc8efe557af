"""A worker that is stopped or dies at a step of a copy: nobody is given what it may still write."""

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
    from kvd.wire.snapshot import LeaseState
    from tests.support.daemons import Daemon

BLOCKS, POOL = 40, 33

WORKER = f"""
import os, signal, sys, time
import numpy as np
import kvd.client
from kvd.client.attachment import Attachment
from kvd.client.mover.host_lane import HostLane
from kvd.wire.attach import CopyBegins, CopyEnds

endpoint, key, step = sys.argv[1:4]
begin, say = HostLane.begin, Attachment.say

def stop(at):
    if at == step:
        print(step, flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.2)  # this thread may go on for a moment

def begins(lane, columns, *, to_pages):
    stop("moving")
    return begin(lane, columns, to_pages=to_pages)

def says(attachment, word):
    if isinstance(word, CopyEnds):
        stop("moved")
    say(attachment, word)
    if isinstance(word, CopyBegins):
        stop("asked")

HostLane.begin, Attachment.say = begins, says
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


@pytest.fixture(params=["moving"])
def begun(
    daemon: Daemon, request: pytest.FixtureRequest
) -> Iterator[tuple[SyncNode, SyncLease, subprocess.Popen[str]]]:
    """A session whose worker is stopped at a step of a save of two pages."""
    with (
        subprocess.Popen(
            [sys.executable, "-c", WORKER, daemon.client, "engine", request.param],
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
            assert worker.stdout.readline() == f"{request.param}\n"
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


@pytest.mark.parametrize("begun", ["asked", "moving", "moved"], indirect=True)
def test_what_a_dead_worker_had_begun_comes_back_and_counts_for_nothing(daemon, begun):
    """Be all of its bytes there or none: nobody has said that they are."""
    node, lease, worker = begun
    mine = set(lease.pages.tolist())
    daemon.wait_for(lambda: "copy" in state_of(daemon, lease).holders, "has no copy", 5.0)
    os.kill(worker.pid, signal.SIGKILL)
    daemon.wait_for(lambda: "copy" not in state_of(daemon, lease).holders, "keeps it", 5.0)
    assert state_of(daemon, lease).written_tokens == 0
    lease.commit()
    assert node.match(tokens_of(2)).tokens == 0
    lease.release()
    with kvd.client.connect_sync(daemon.client, name="other") as other:
        assert mine <= takes(other, POOL - 1, 100)


def state_of(daemon: Daemon, lease: SyncLease) -> LeaseState:
    (found,) = [state for state in daemon.snapshot().leases if state.id == lease.id]
    return found
