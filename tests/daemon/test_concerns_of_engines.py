"""Engines that die in a real daemon's hands: what an operator is told of them, and how soon."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from kvd.client.admin import AdminClient
from kvd.wire import admin
from kvd.wire.console import Query, Table
from tests.daemon.kv import SHAPE
from tests.support.daemons import one_daemon

TOLD_S = 5.0

FORKER = """
import os, sys, time
from kvd.client import connect_sync

node = connect_sync(sys.argv[1], name="forker")
lease = node.lease(list(range(100)))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


def rows_of(client: AdminClient, view: str) -> list[dict[str, object]]:
    frame = client.request(admin.Look(1, (Query(view),)))
    assert isinstance(frame, admin.Frame)
    table = msgspec.msgpack.decode(frame.answers[0], type=Table)
    names = [column.name for column in table.columns]
    return [dict(zip(names, row.cells, strict=True)) for row in table.rows]


def told(client: AdminClient, n_rows: int) -> list[dict[str, object]]:
    """The concerns, once there are so many."""
    deadline_s = time.monotonic() + TOLD_S
    while len(rows := rows_of(client, "concerns")) != n_rows:
        assert time.monotonic() < deadline_s, f"after {TOLD_S} s: {rows}"
        time.sleep(0.1)
    return rows


@pytest.fixture
def forked(tmp_path):
    """A daemon, and an engine that has forked: the child inherited its connection."""
    with (
        one_daemon(tmp_path, SHAPE) as daemon,
        subprocess.Popen(
            [sys.executable, "-c", FORKER, daemon.client], stdout=subprocess.PIPE
        ) as engine,
    ):
        child = 0
        try:
            child = int(engine.stdout.readline())
            yield daemon, engine, child
        finally:
            engine.kill()
            if child:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)


def test_pages_of_a_dead_engine_whose_child_lives_are_told_until_they_are_free(forked):
    daemon, engine, child = forked
    with AdminClient(daemon.admin) as client:
        assert told(client, 0) == []
        engine.kill()
        [found] = told(client, 1)
        assert (found["severity"], found["kind"], found["subject"]) == (
            *("medium", "client-gone", "client:1"),  # high once a request waits for pages
        )
        said = f"forker is kept by pid {child}, forked from pid {engine.pid}, which ended"
        assert said in str(found["evidence"])
        assert [row["state"] for row in rows_of(client, "clients")] == ["outlived"]

        os.kill(child, signal.SIGKILL)

        assert told(client, 0) == []
        assert rows_of(client, "leases") == []
