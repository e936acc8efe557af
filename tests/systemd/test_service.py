"""kvd as a service of a systemd that really runs: how it starts, is found, fails and ends."""

from __future__ import annotations

import json
import re
import stat

import pytest

SOCKETS = ("client.sock", "attach.sock", "admin.sock")
CLIENT = "ipc:///run/kvd/client.sock"


def main_pid(guest):
    return guest.show("kvd", "MainPID")


def test_the_limits_are_asked_for(service):
    """This systemd may lack the right to grant them: what counts is what the unit asks for."""
    asked = {
        "LimitMEMLOCK": "infinity",
        "LimitNOFILE": "1048576",
        "LimitCORE": "0",
        "OOMScoreAdjust": "-900",
        "WatchdogUSec": "20s",
        "FileDescriptorStoreMax": "512",
        "StartLimitIntervalUSec": "0",
    }

    assert {name: service.show("kvd", name) for name in asked} == asked


def test_start_returns_when_the_daemon_serves(service):
    """No client ever has to wait for a daemon that systemd calls active."""
    assert service.show("kvd", "ActiveState") == "active"

    status = json.loads(service.kvd("status", "--format", "json").stdout)

    assert status["pools"][0]["total_pages"] == 256


def test_systemctl_status_says_how_it_goes(service):
    line = re.compile(
        r"serving; peers 0/0 up, clients 0, pages \d+ cached \d+ free, handoffs 0 in flight"
    )

    service.until(
        lambda: line.fullmatch(service.show("kvd", "StatusText")) is not None,
        "no figures in the status line",
    )


def test_the_sockets_are_for_the_group_and_for_nobody_else(service):
    for name in SOCKETS:
        found = service.path(f"/run/kvd/{name}").stat()
        assert stat.filemode(found.st_mode) == "srw-rw----"
    assert stat.filemode(service.path("/run/kvd").stat().st_mode) == "drwxr-x---"

    assert service.kvd("status", user="engine").returncode == 0
    refused = service.kvd("status", user="stranger", check=False)
    assert refused.returncode == 3
    assert "permission denied on /run/kvd/admin.sock: join the group" in refused.stderr


def test_a_reload_ends_with_what_became_of_it(service):
    before = main_pid(service)
    changed = service.path("/etc/kvd/conf.d/changed.toml")
    try:
        changed.write_text("[log]\nlevel = 'debug'\n")
        service.systemctl("reload", "kvd")
        changed.write_text("[log]\nlevel = 'loud'\n")
        wrong = service.run("systemctl", "reload", "kvd", check=False)
    finally:
        changed.unlink()

    assert wrong.returncode == 1
    said = service.journal("kvd")
    assert '  log.level: "info" -> "debug"' in said
    assert "one error in the configuration\n/etc/kvd/conf.d/changed.toml:2: log.level" in said
    assert service.show("kvd", "ActiveState") == "active"
    assert main_pid(service) == before


def test_an_engine_of_the_group_leases_pages(service):
    answer = service.engine("lease", CLIENT)

    assert answer["pages"] == 20


def test_a_restart_makes_way_for_the_next_daemon(service):
    before = main_pid(service)

    service.systemctl("restart", "kvd")

    assert main_pid(service) != before
    assert service.show("kvd", "Result") == "success"
    assert service.engine("lease", CLIENT)["pages"] == 20


def test_stop_takes_everything_down_and_keeps_the_directory(service):
    service.systemctl("stop", "kvd")

    assert service.show("kvd", "Result") == "success"
    assert service.show("kvd", "ActiveState") == "inactive"
    left = sorted(path.name for path in service.path("/run/kvd").iterdir())
    assert left == ["client.sock.lock", "client.sock.lock.birth"]


def test_a_wrong_configuration_is_not_tried_again(idle):
    wrong = idle.path("/etc/kvd/conf.d/wrong.toml")
    wrong.write_text("[pool]\npages = -1\n")

    try:
        started = idle.run("systemctl", "start", "kvd", check=False)
    finally:
        wrong.unlink()

    assert started.returncode == 1
    assert idle.show("kvd", "ExecMainStatus") == "78"
    assert idle.show("kvd", "ActiveState") == "failed"
    assert idle.show("kvd", "NRestarts") == "0"
    assert "/etc/kvd/conf.d/wrong.toml:2: pool.pages = -1" in idle.journal("kvd")


def test_a_socket_unit_starts_the_daemon_and_keeps_the_sockets_over_its_restart(idle):
    idle.systemctl("start", "kvd.socket")
    inodes = [idle.path(f"/run/kvd/{name}").stat().st_ino for name in SOCKETS]
    assert idle.show("kvd", "ActiveState") == "inactive"

    assert idle.engine("lease", CLIENT)["pages"] == 20
    idle.until(lambda: idle.show("kvd", "ActiveState") == "active", "it is not active")
    idle.systemctl("restart", "kvd")
    assert idle.engine("lease", CLIENT)["pages"] == 20
    idle.systemctl("stop", "kvd")

    assert [idle.path(f"/run/kvd/{name}").stat().st_ino for name in SOCKETS] == inodes


A, B = "ipc:///run/kvd-a/client.sock", "ipc:///run/kvd-b/client.sock"


@pytest.fixture
def instances(idle):
    """The guest with two daemons that know each other."""
    ports = {"a": 7501, "b": 7502}
    for name, port in ports.items():
        others = "".join(f'{o} = "tcp://127.0.0.1:{p}"\n' for o, p in ports.items() if o != name)
        idle.path(f"/etc/kvd/{name}.toml").write_text(
            f'[node]\nname = "{name}"\n[peers]\nlisten = "tcp://127.0.0.1:{port}"\n'
            f'[peers.connect]\n{others}[http]\nlisten = "off"\n'
        )
    idle.systemctl("start", "kvd@a", "kvd@b")
    return idle


def test_two_instances_hand_kv_over_to_each_other(instances):
    assert instances.engine("handoff", A, B) == {"committed": True, "is_exact": True}


def test_stop_waits_for_the_handoff_under_way_and_begins_no_other(instances):
    with instances.running_engine("half", A, B) as go_on:
        instances.systemctl("stop", "--no-block", "kvd@a")
        instances.until(
            lambda: "draining" in instances.show("kvd@a", "StatusText"), "it does not drain"
        )
        refused = instances.engine("refused", A)
        assert instances.show("kvd@a", "ActiveState") == "deactivating"

        assert go_on() == {"committed": True, "is_exact": True}

        instances.until(
            lambda: instances.show("kvd@a", "ActiveState") == "inactive", "it does not end"
        )
    assert refused == {"code": "draining"}
    assert instances.show("kvd@a", "Result") == "success"
