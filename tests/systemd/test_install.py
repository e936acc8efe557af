"""``kvd systemd`` on a system that runs: what it makes, what it refuses, and what it leaves."""

from __future__ import annotations

import shutil
import stat

import pytest

from tests.systemd.guest import PYTHON


def lines(done, word):
    return [line for line in done.stdout.splitlines() if line.startswith(word)]


def test_install_makes_the_user_and_the_directories_and_a_second_one_nothing(guest):
    """The guest comes with kvd installed."""
    passwd = guest.path("/etc/passwd").read_text().splitlines()
    entry = next(line for line in passwd if line.startswith("kvd:"))
    uid, gid = map(int, entry.split(":")[2:4])
    assert entry.endswith(":KV transfer daemon:/:/usr/sbin/nologin")
    found = guest.path("/run/kvd").stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (uid, gid, 0o750)

    again = guest.kvd("systemd", "install")

    assert lines(again, "new") == lines(again, "changed") == lines(again, "removed") == []
    assert lines(again, "run") == [
        "run        systemd-sysusers /etc/sysusers.d/kvd.conf",
        "run        systemd-tmpfiles --create /etc/tmpfiles.d/kvd.conf",
        "run        systemctl daemon-reload",
    ]


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("/root/venv", "lies under /root, which the unit hides (ProtectHome=yes)"),
        ("/tmp/venv", "lies under /tmp, which the unit hides (PrivateTmp=yes)"),
        ("/srv/closed/venv", "lies under /srv/closed, which user kvd may not enter (mode 0700)"),
    ],
)
def test_an_interpreter_that_the_daemon_cannot_reach_is_refused_with_the_fix(guest, place, why):
    guest.path("/srv/closed").mkdir(mode=0o700, exist_ok=True)
    shutil.copytree(guest.path(PYTHON.parent.parent), guest.path(place), symlinks=True)

    try:
        done = guest.kvd("systemd", "install", "--python", f"{place}/bin/python", check=False)
    finally:
        shutil.rmtree(guest.path(place))

    assert done.returncode == 1
    assert f"the interpreter, {place}/bin/python, {why}" in done.stderr
    assert "/usr/bin/python3 -m venv /opt/kvd/venv" in done.stderr
    assert done.stdout == ""


def test_only_root_installs(guest):
    done = guest.kvd("systemd", "install", user="engine", check=False)

    assert done.returncode == 1
    assert "only root can write to /etc: use sudo" in done.stderr


def test_uninstall_waits_for_the_daemon_to_be_stopped_and_leaves_the_configuration(idle):
    idle.systemctl("enable", "kvd")
    idle.systemctl("start", "kvd")
    refused = idle.kvd("systemd", "uninstall", check=False)
    assert refused.returncode == 1
    assert "still up: kvd.service: systemctl disable --now kvd.service" in refused.stderr
    idle.systemctl("stop", "kvd")

    try:
        done = idle.kvd("systemd", "uninstall")

        assert idle.show("kvd", "LoadState") == "not-found"
        assert not idle.path("/etc/systemd/system/multi-user.target.wants/kvd.service").exists()
        assert not idle.path("/etc/systemd/system/kvd.service.d").exists()
        assert done.stdout.splitlines()[-1] == (
            "left in place: /etc/kvd, /var/lib/kvd, /run/kvd, the user and its group"
        )
        assert idle.path("/etc/kvd/kvd.toml").exists()
    finally:
        idle.kvd("systemd", "install")
