"""What goes wrong under systemd, and what the unit was given so that it goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path

CLIENT = "ipc:///run/kvd/client.sock"


def transfer_pid(guest):
    """Of the transfer process of kvd.service, as this host counts."""
    group = guest.path("/sys/fs/cgroup/system.slice/kvd.service/cgroup.procs")
    for pid in group.read_text("ascii").split():
        with contextlib.suppress(OSError):  # it may end meanwhile
            if b"kvd.transfer.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
    return None


def replaced(guest, before):
    """The daemon is the same one, and its transfer process another."""
    guest.until(
        lambda: (
            transfer_pid(guest) not in {None, before}
            and guest.show("kvd", "StatusText").startswith("serving")
        ),
        "no new transfer process",
    )


def test_a_killed_transfer_process_is_replaced_by_the_daemon(service):
    main, before = service.show("kvd", "MainPID"), transfer_pid(service)
    restarts = service.show("kvd", "NRestarts")

    os.kill(before, signal.SIGKILL)

    replaced(service, before)
    assert service.show("kvd", "MainPID") == main
    assert service.show("kvd", "NRestarts") == restarts
    assert service.engine("lease", CLIENT)["pages"] == 20


def test_a_transfer_process_that_hangs_is_replaced_by_the_daemon(idle):
    idle.drop_in("kvd.service", "[Service]\nEnvironment=KVD_TRANSFER__SILENT_S=1\n")
    idle.systemctl("start", "kvd")
    main, before = idle.show("kvd", "MainPID"), transfer_pid(idle)

    os.kill(before, signal.SIGSTOP)

    replaced(idle, before)
    assert idle.show("kvd", "MainPID") == main


def test_the_key_of_the_node_stays_with_root_and_reaches_the_daemon(idle):
    """Written into kvd.toml as kvd keygen says; the unit's copy of it is what counts."""
    idle.kvd("keygen")
    keyed = idle.path("/etc/kvd/conf.d/keyed.toml")
    keyed.write_text('[peers]\nlisten = "tcp://*:7402"\nsecret_key_file = "/etc/kvd/peer.secret"\n')
    try:
        keyless = idle.run("systemctl", "start", "kvd", check=False)
        assert keyless.returncode == 1
        assert "/etc/kvd/peer.secret" in idle.journal("kvd")

        idle.kvd("systemd", "install")
        idle.systemctl("reset-failed", "kvd")
        idle.systemctl("start", "kvd")

        assert idle.show("kvd", "ActiveState") == "active"
        secret = idle.path("/etc/kvd/peer.secret").stat()
        assert (secret.st_uid, secret.st_mode & 0o777) == (0, 0o600)
    finally:
        keyed.unlink()
        for name in ("peer.secret", "peer.public"):
            idle.path(f"/etc/kvd/{name}").unlink()
        idle.systemctl("stop", "kvd")
        idle.kvd("systemd", "install")


def test_a_daemon_that_may_read_memory_of_others_is_a_matter_of_one_rename(idle):
    example = idle.path("/etc/systemd/system/kvd.service.d/cma.conf.example")
    chosen = example.with_suffix("")
    shutil.copy(example, chosen)
    try:
        idle.systemctl("daemon-reload")

        capabilities = idle.show("kvd", "AmbientCapabilities").split()
        assert capabilities == ["cap_ipc_lock", "cap_sys_ptrace"]
    finally:
        chosen.unlink()
