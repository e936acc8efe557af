"""A real daemon under a service manager: what it says and when, and what it takes over."""

from __future__ import annotations

import os
import signal
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import kvd.client
from tests.daemon.conftest import until
from tests.daemon.kv import SHAPE
from tests.daemon.manager import Manager
from tests.support.daemons import HERE, Daemon, DaemonFailed, Place, one_daemon

HANDING = str(Path(__file__).with_name("handing.py"))
WATCHDOG_S = 1.5
DOORS = ("client.sock", "attach.sock", "admin.sock")


@pytest.fixture
def manager(tmp_path, monkeypatch):
    with Manager.at(tmp_path) as one:
        monkeypatch.setenv("NOTIFY_SOCKET", one.address)
        yield one


@pytest.fixture
def watched(manager, tmp_path, monkeypatch):
    monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_S * 1e6)))
    with one_daemon(tmp_path, {**SHAPE, "transfer.silent_s": "1"}) as daemon:
        yield daemon


def handed(tmp_path, *words):
    """A place that is started with descriptors."""
    return Place(prefix=(sys.executable, HANDING, *words, "--"))


def environment(pid):
    return {
        one.partition(b"=")[0] for one in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    }


def test_ready_is_said_last_and_stopping_first(manager, tmp_path):
    with one_daemon(tmp_path, {**SHAPE, "recorder.enabled": "true"}) as daemon:
        ready = manager.expect("READY")
        assert ready.lines == {"READY": "1", "STATUS": "serving"}
        until(lambda: daemon.snapshot().recorder.state == "recording")
        children = (daemon.transfer_pid(), daemon.recorder_pid())
        assert not any(b"NOTIFY_SOCKET" in environment(pid) for pid in children)
        status = manager.expect("STATUS").lines["STATUS"]
        daemon.stop()

        manager.expect("STOPPING")
    assert status == (
        "serving; peers 0/0 up, clients 0, pages 0 cached 256 free, handoffs 0 in flight"
    )
    # A busy machine is told how it serves before it is told that it does.
    said = [one.lines for one in manager.told if one.lines != {"STATUS": status}]
    assert said[:5] == [
        {"EXTEND_TIMEOUT_USEC": "60000000"},
        {"STATUS": "reserving 0.0 GiB"},
        {"EXTEND_TIMEOUT_USEC": "60000000"},
        {"STATUS": "registering 0.0 GiB"},
        {"READY": "1", "STATUS": "serving"},
    ]
    assert said[-1] == {"STOPPING": "1", "STATUS": "stopping"}


def test_daemon_that_cannot_serve_says_why_and_never_that_it_is_ready(manager, tmp_path):
    with one_daemon(tmp_path, SHAPE, name="first") as first:
        manager.forget()
        second = Daemon("second", tmp_path, {**SHAPE, "sockets.admin": first.admin})
        second.start()

        stopping = manager.expect("STOPPING")

        assert stopping.lines["STATUS"].startswith("cannot serve: a process listens on ")
        assert sum("READY" in one.lines for one in manager.told) == 1
        with pytest.raises(DaemonFailed):
            second.wait_ready()


def test_watchdog_is_fed_three_times_as_often_as_it_wants(manager, watched):
    times = [manager.expect("WATCHDOG").at_s for _ in range(6)]

    assert times[-1] - times[0] == pytest.approx(5 * WATCHDOG_S / 3, abs=0.4)


def test_watchdog_of_a_stopped_loop_starves(manager, watched):
    manager.expect("WATCHDOG")
    os.kill(watched.pid, signal.SIGSTOP)
    try:
        manager.forget()
        with pytest.raises(AssertionError, match="nothing of WATCHDOG"):
            manager.expect("WATCHDOG", within_s=WATCHDOG_S)
    finally:
        os.kill(watched.pid, signal.SIGCONT)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_transfer_process_that_ends_or_hangs_is_replaced_and_the_watchdog_fed_on(
    manager, watched, number
):
    before = watched.transfer_pid()
    generation = watched.snapshot().generation
    os.kill(before, number)

    until(lambda: watched.snapshot().generation > generation)

    assert watched.transfer_pid() != before
    fed = [one.at_s for one in manager.told if "WATCHDOG" in one.lines]
    gaps = [later - earlier for earlier, later in pairwise(fed)]
    assert max(gaps, default=0.0) < WATCHDOG_S
    assert not any("not fed" in one.lines.get("STATUS", "") for one in manager.told)


async def test_sockets_that_systemd_listens_on_are_served_and_left(manager, tmp_path):
    here = tmp_path / "node"
    place = handed(
        tmp_path,
        f"kvd.socket=stream:{here}/client.sock",
        f"kvd.socket=seqpacket:{here}/attach.sock",
        f"kvd.socket=stream:{here}/admin.sock",
        "old.kv=memory:4096",
    )
    daemon = Daemon("node", tmp_path, SHAPE, place)
    daemon.start()
    try:
        daemon.wait_ready()
        inodes = {name: (here / name).stat().st_ino for name in DOORS}
        async with kvd.client.connect(daemon.client, name="engine") as node:
            lease = await node.lease([1, 2, 3])
            assert [one.owner for one in daemon.snapshot().leases] == ["engine"]
            await lease.release()
    finally:
        daemon.stop()

    assert {name: (here / name).stat().st_ino for name in DOORS} == inodes
    assert manager.expect("FDSTOREREMOVE").lines["FDNAME"] == "old.kv"
    assert "what systemd handed over as 'old.kv' is of no use here" in daemon.quoted_log()


def status_of(tmp_path, place=HERE, **settings):
    """How a daemon ends that cannot come up, and the end of its log."""
    daemon = Daemon("node", tmp_path, {**SHAPE, **settings}, place)
    daemon.start()
    with pytest.raises(DaemonFailed) as failed:
        daemon.wait_ready()
    return daemon._process.returncode, str(failed.value)


def test_socket_unit_that_listens_elsewhere_ends_with_78(tmp_path):
    place = handed(tmp_path, f"client=stream:{tmp_path}/elsewhere.sock")

    status, log = status_of(tmp_path, place)

    assert status == 78
    assert "make the socket unit and [sockets] equal" in log


def test_pool_larger_than_the_host_ends_with_78(tmp_path):
    status, log = status_of(tmp_path, **{"pool.pages": "2147483647"})

    assert status == 78
    assert "lower pool.pages" in log


def test_directory_of_another_user_ends_with_78(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)

    status, log = status_of(tmp_path, **{"sockets.admin": f"ipc://{tmp_path}/open/admin.sock"})

    assert status == 78
    assert "chmod o-w" in log


def test_address_that_is_taken_ends_with_1(tmp_path):
    with one_daemon(tmp_path, SHAPE, name="first") as first:
        status, log = status_of(tmp_path, **{"peers.listen": first.peers})

    assert status == 1
    assert f"cannot listen on {first.peers}" in log


def test_secret_that_others_may_read_ends_with_78(tmp_path):
    secret = tmp_path / "peer.secret"
    secret.write_text("x" * 40)
    secret.chmod(0o644)

    status, log = status_of(tmp_path, **{"peers.secret_key_file": str(secret)})

    assert status == 78
    assert "peers.secret_key_file" in log
