"""Where a daemon puts its sockets: whose they are, and what it leaves alone."""

from __future__ import annotations

import grp
import os
import stat

import pytest

from tests.daemon.kv import SHAPE
from tests.support.daemons import Daemon, DaemonFailed, one_daemon

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to a group")


def test_second_daemon_leaves_the_admin_socket_to_its_owner(tmp_path):
    with one_daemon(tmp_path, SHAPE, name="first") as first:
        second = Daemon("second", tmp_path, {**SHAPE, "sockets.admin": first.admin})
        second.start()
        with pytest.raises(DaemonFailed) as failed:
            second.wait_ready()

        assert f"a process listens on {first.directory}/admin.sock" in str(failed.value)
        assert first.snapshot().node == "first"


def test_stopping_daemon_leaves_a_socket_that_is_not_its_own(tmp_path):
    with one_daemon(tmp_path, SHAPE, name="first") as first:
        path = first.directory / "admin.sock"
        path.unlink()
        path.write_text("someone else's")

    assert path.read_text() == "someone else's"
    assert not (first.directory / "client.sock").exists()


@needs_root
def test_directory_that_a_daemon_makes_is_open_to_the_group_of_its_sockets(tmp_path):
    group = next(one for one in grp.getgrall() if one.gr_gid != os.getegid())
    there, made = tmp_path / "there", tmp_path / "made"
    there.mkdir(mode=0o700)
    settings = {
        **SHAPE,
        "sockets.group": group.gr_name,
        "sockets.client": f"ipc://{made}/client.sock",
        "sockets.admin": f"ipc://{there}/admin.sock",
    }

    with one_daemon(tmp_path, settings):
        found = {
            path.name: (path.stat().st_gid, stat.S_IMODE(path.stat().st_mode))
            for path in (made, made / "client.sock", there, there / "admin.sock")
        }

    assert found == {
        "made": (group.gr_gid, 0o750),
        "client.sock": (group.gr_gid, 0o660),
        "there": (os.getegid(), 0o700),
        "admin.sock": (group.gr_gid, 0o660),
    }
