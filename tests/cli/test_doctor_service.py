"""``kvd doctor``: the unit, as systemd tells of it, and the program that it would start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvd.cli.doctor import service
from kvd.cli.doctor.finding import Severity
from kvd.cli.systemd_reach import flaws, user_called
from tests.cli.inchild import subject, write

GOOD, POOR, WRONG = Severity.GOOD, Severity.POOR, Severity.WRONG

WELL = """\
WatchdogUSec=15s
NRestarts=0
User=kvd
FileDescriptorStoreMax=64
NFileDescriptorStore=2
LimitMEMLOCK=infinity
LimitNOFILE=1048576
LoadState=loaded
ActiveState=active
SubState=running
Result=success
UnitFileState=enabled
NeedDaemonReload=no
"""


def judged(root, text, *sets):
    unit = service.read_properties(text)
    return {one.check: one for one in service.judge(subject(*sets, root=root), unit)}


@pytest.fixture
def booted(tmp_path):
    """A host that systemd runs, with a ``systemctl`` that says what its file ``says`` has."""
    write(tmp_path, run__systemd__system__here="", says=WELL)
    tool = tmp_path / "bin" / "systemctl"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\ncat "{tmp_path}/says"\n')
    tool.chmod(0o755)
    return tmp_path


def test_a_host_without_systemd_needs_no_unit(tmp_path):
    [finding] = service.service(subject(root=tmp_path))

    assert finding.severity is GOOD
    assert service.interpreter(subject(root=tmp_path)) == []


def test_a_unit_that_runs_well_is_one_finding(booted, monkeypatch):
    monkeypatch.setenv("PATH", f"{booted}/bin:/usr/bin:/bin")

    [finding] = service.service(subject(root=booted))

    assert (finding.severity, finding.what) == (
        GOOD,
        "active (running), user kvd, 0 restarts, 2 of 64 stored descriptors",
    )


def test_a_host_with_systemd_and_no_systemctl_is_poor(booted, monkeypatch):
    monkeypatch.setenv("PATH", f"{booted}/nothing")

    [finding] = service.service(subject(root=booted))

    assert finding.severity is POOR
    assert "no systemctl" in finding.what


@pytest.mark.parametrize(
    ("before", "after", "check", "severity", "fix"),
    [
        ("LoadState=loaded", "LoadState=not-found", "service", POOR, "kvd systemd install"),
        ("ActiveState=active", "ActiveState=failed", "service", WRONG, "journalctl -u kvd"),
        ("ActiveState=active", "ActiveState=inactive", "service", POOR, "enable --now kvd"),
        ("UnitFileState=enabled", "UnitFileState=disabled", "service", POOR, "enable kvd"),
        ("NeedDaemonReload=no", "NeedDaemonReload=yes", "service files", POOR, "daemon-reload"),
        ("WatchdogUSec=15s", "WatchdogUSec=0", "watchdog", POOR, "WatchdogSec=20s"),
        ("StoreMax=64", "StoreMax=0", "fd store", POOR, "FileDescriptorStoreMax=512"),
    ],
)
def test_what_is_wrong_with_a_unit_is_said(tmp_path, before, after, check, severity, fix):
    assert before in WELL

    found = judged(tmp_path, WELL.replace(before, after))

    assert found[check].severity is severity
    assert fix in found[check].fix
    others = [one for name, one in found.items() if name != check]
    assert all(one.severity is GOOD for one in others)


def test_a_store_without_room_is_wrong_where_the_pool_is_to_lie_in_it(tmp_path):
    found = judged(tmp_path, WELL.replace("StoreMax=64", "StoreMax=0"), "pool.backing=fdstore")

    assert found["fd store"].severity is WRONG


def test_a_unit_that_may_pin_too_little_counts_where_a_device_pins(tmp_path):
    text = WELL.replace("LimitMEMLOCK=infinity", "LimitMEMLOCK=8388608")
    assert "service memlock" not in judged(tmp_path, text)
    write(tmp_path, sys__class__infiniband__mlx5_0__node_type="1: CA")

    assert judged(tmp_path, text)["service memlock"].severity is POOR


def test_the_interpreter_of_a_host_with_systemd_is_judged(booted, tmp_path):
    """Real modes; this Python may lie in somebody's home or not."""
    out_of_reach = flaws(Path(sys.executable), user_called("kvd"))

    [finding] = service.interpreter(subject(root=booted))

    assert finding.severity is (POOR if out_of_reach else GOOD)
    assert all(flaw in finding.what for flaw in out_of_reach)
    assert finding.fix.startswith("/usr/bin/python3 -m venv ") == bool(out_of_reach)
