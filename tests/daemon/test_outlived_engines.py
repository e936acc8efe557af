"""Processes that outlive the one that opened their session: they are named as what holds it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from kvd.cli import kvd as command
from kvd.cli.doctor.finding import Severity, Subject
from kvd.cli.doctor.service import outlived as doctors_outlived
from kvd.client.admin import AdminClient
from kvd.config.load import load
from kvd.config.schema import Config
from kvd.wire import admin
from kvd.wire.console import Query, Table
from tests.daemon.conftest import until
from tests.support.copies import kept_daemon

FORKER = """
import os, sys, time
from kvd.client import connect_sync

node = connect_sync(sys.argv[1], name="forker")
lease = node.lease(list(range(100)))
for _ in range(int(sys.argv[2])):
    child = os.fork()
    if not child:
        break
    print(child, flush=True)
time.sleep(120)
"""

OPENER = """
import subprocess, sys, time
from kvd.client import connect_sync

node = connect_sync(sys.argv[1], name="opener")
lease = node.lease(list(range(100)))
worker = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1], node.token.hex()])
print(worker.pid, flush=True)
time.sleep(120)
"""

WORKER = """
import sys, time
import kvd.client

with kvd.client.join(sys.argv[1], token=bytes.fromhex(sys.argv[2]), rank=1, ranks=2):
    print("joined", flush=True)
    time.sleep(120)
"""

HEARD_S = 20.0
"""A look at the processes comes each second; this host may be busy."""


@pytest.fixture
def daemon(tmp_path):
    with kept_daemon(tmp_path, pages=33) as daemon:
        yield daemon


@pytest.fixture
def run(daemon):
    """Starts an engine; returns it and the pids of the others that it started."""
    engines, others = [], []

    def start(source, argument, n_others):
        command = [sys.executable, "-c", source, daemon.client, argument]
        engine = subprocess.Popen(command, stdout=subprocess.PIPE)
        engines.append(engine)
        pids = [int(engine.stdout.readline()) for _ in range(n_others)]
        others.extend(pids)
        return engine, pids

    yield start
    for pid in others:
        end(pid)
    for engine in engines:
        engine.kill()
        engine.wait()
        engine.stdout.close()


def end(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def soon(is_so):
    until(is_so, within_s=HEARD_S)


def client_of(daemon):
    [client] = daemon.snapshot().clients
    return client


def words_of(because):
    return "\n".join([because.sentence, *because.facts])


def why(daemon, kind, number):
    return words_of(daemon.ask(admin.Why(1, kind, number), admin.Because))


def said(daemon, *words):
    found = CliRunner().invoke(command, [*words, "--connect", daemon.admin])
    assert found.exit_code == 0, found.output
    return " ".join(found.output.split())


def doctors(daemon):
    config = load(Path(os.devnull), {}, (f"sockets.admin={daemon.admin}",))
    assert isinstance(config, Config)
    return [
        (found.severity, found.what, found.fix) for found in doctors_outlived(Subject(config, {}))
    ]


def told_everywhere(daemon):
    """What is said of the one lease, its first page and its engine."""
    [lease] = daemon.snapshot().leases
    [pool] = daemon.snapshot().pools
    pages = range(1, pool.total_pages)
    page = next(page for page in pages if "held by lease" in why(daemon, "page", page))
    return {
        "page": why(daemon, "page", page),
        "lease": why(daemon, "lease", lease.id),
        "client": why(daemon, "client", 1),
        "waits": lease.waiting_for,
        "pid": lease.pid,
    }


def concerns_of(daemon):
    with AdminClient(daemon.admin) as client:
        frame = client.request(admin.Look(1, (Query("concerns"),)))
    table = msgspec.msgpack.decode(frame.answers[0], type=Table)
    names = [column.name for column in table.columns]
    return [dict(zip(names, row.cells, strict=True)) for row in table.rows]


def test_a_forked_child_of_a_killed_engine_is_named_as_the_holder(daemon, run):
    engine, [child] = run(FORKER, "1", 1)
    before = told_everywhere(daemon)
    assert before["pid"] == engine.pid
    assert before["waits"] == ""

    engine.kill()
    engine.wait()

    soon(lambda: client_of(daemon).pids == (child,))
    told = told_everywhere(daemon)
    holder = rf"pid {child}, forked from pid {engine.pid}, which ended \d+\.\d s ago"
    for kind in ("page", "lease", "client"):
        assert re.search(holder, told[kind]), kind
    assert re.search(rf"{holder}: stop pid {child}", told["waits"])
    assert told["pid"] == child
    status = said(daemon, "status")
    assert re.search(
        rf"forker: 1 leases with 7 pages are kept by {holder}: stop pid {child}", status
    )
    [(severity, what, fix)] = doctors(daemon)
    assert severity is Severity.POOR
    assert re.search(rf"7 pages of forker are kept by {holder}: stop pid {child}", what)
    assert "kvd why client 1" in fix
    [concern] = concerns_of(daemon)
    assert concern["kind"] == "client-gone"
    assert re.search(holder, concern["evidence"])
    assert concern["action"].startswith(f"kill {child}:")

    end(child)

    soon(lambda: not daemon.snapshot().clients)
    assert not daemon.snapshot().leases


def test_each_of_several_forked_children_is_named_until_it_ends(daemon, run):
    engine, children = run(FORKER, "2", 2)
    engine.kill()
    engine.wait()
    soon(lambda: sorted(client_of(daemon).pids) == sorted(children))

    end(children[0])

    soon(lambda: client_of(daemon).pids == (children[1],))
    assert f"stop pid {children[1]}" in told_everywhere(daemon)["waits"]


def test_an_engine_that_has_forked_and_lives_is_the_holder_itself(daemon, run):
    engine, [child] = run(FORKER, "1", 1)
    time.sleep(1.5)  # a look or two
    assert client_of(daemon).pids == (engine.pid,)

    end(child)

    time.sleep(1.5)
    assert (client_of(daemon).pids, client_of(daemon).outlived) == ((engine.pid,), "")


def test_a_rank_that_outlives_the_engine_is_named_as_the_holder(daemon, run):
    engine, [worker] = run(OPENER, WORKER, 1)
    soon(lambda: set(client_of(daemon).pids) == {engine.pid, worker})

    engine.kill()
    engine.wait()

    soon(lambda: client_of(daemon).pids == (worker,))
    told = told_everywhere(daemon)
    holder = rf"pid {worker}; pid {engine.pid}, which opened it, ended \d+\.\d s ago"
    for kind in ("page", "lease", "client"):
        assert re.search(holder, told[kind]), kind
    assert told["pid"] == worker
    assert f"stop pid {worker}" in told["waits"]
    [concern] = concerns_of(daemon)
    assert concern["action"].startswith(f"kill {worker}:")

    end(worker)

    soon(lambda: not daemon.snapshot().clients)


def test_an_engine_goes_on_when_a_rank_of_it_has_ended_and_names_itself(daemon, run):
    engine, [worker] = run(OPENER, WORKER, 1)
    soon(lambda: set(client_of(daemon).pids) == {engine.pid, worker})

    end(worker)

    soon(lambda: client_of(daemon).pids == (engine.pid,))
    assert client_of(daemon).outlived == ""
    assert told_everywhere(daemon)["waits"] == ""


def test_a_daemon_that_is_started_anew_keeps_what_a_forked_child_may_write(daemon, run):
    engine, [child] = run(FORKER, "1", 1)
    engine.kill()
    engine.wait()
    soon(lambda: client_of(daemon).pids == (child,))
    held = client_of(daemon).held_pages

    daemon.kill()
    daemon.start()
    daemon.wait_ready()

    time.sleep(1.5)
    now = client_of(daemon)
    assert (now.state, now.pids, now.held_pages) == ("awaited", (child,), held)
    end(child)
    soon(lambda: not daemon.snapshot().clients)
    assert not daemon.snapshot().leases
