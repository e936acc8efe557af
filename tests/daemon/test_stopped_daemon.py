"""An engine that must not wait does not wait for a daemon whose process was stopped."""

from __future__ import annotations

import os
import signal
import time

import pytest

import kvd.client
from kvd.client import KvdError
from tests.daemon.kv import SHAPE
from tests.support.daemons import Daemon


@pytest.fixture
def daemon(tmp_path):
    one = Daemon("solo", tmp_path, SHAPE)
    one.start()
    one.wait_ready()
    yield one
    one.stop()


def test_a_call_that_must_not_wait_ends_at_once_and_leaves_nothing(daemon):
    with kvd.client.connect_sync(daemon.client, name="engine") as node:
        lease = node.lease([1] * 64)
        pid = daemon.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            verbs = [
                lambda: node.lease([2] * 64, deadline_s=0),
                lambda: node.receive(5, [2] * 64, "p", deadline_s=0),
                lambda: node.send(6, lease=lease, deadline_s=0),
                lambda: node.hand_over(7, lease=lease, deadline_s=0),
            ]
            waits = []
            for verb in verbs:
                began_s = time.monotonic()
                with pytest.raises(KvdError, match=r"^deadline: "):
                    verb()
                waits.append(time.monotonic() - began_s)
        finally:
            os.kill(pid, signal.SIGCONT)
        # Not the 0.25 s of a daemon that may be busy.
        assert min(waits) < 0.1
        assert sorted(waits)[1] < 0.2
        node.match([1])  # what it grants by now goes back

        def is_clean():
            node.pump()
            return [one.id for one in daemon.snapshot().leases] == [lease.id]

        daemon.wait_for(is_clean, "still holds what was given up", 5.0)
