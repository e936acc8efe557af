"""Daemons behind ssh: the same link, by a child that forwards their socket."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.wire.admin import Evict
from tests.tui.links import Watched, running
from tui import link as link_module
from tui.endpoint import Remote
from tui.model.mirror import LinkConnecting

SSH = """#!{python}
# Forwards as ssh -N -L LOCAL:REMOTE does: one connection after the other, each way.
import os, socket, sys, threading
if os.environ.get("KVD_TEST_SSH_SAYS"):
    sys.exit(os.environ["KVD_TEST_SSH_SAYS"])
local, remote = sys.argv[sys.argv.index("-L") + 1].split(":")
open(os.environ["KVD_TEST_SSH_LOG"], "a").write(f"{{os.getpid()}} {{' '.join(sys.argv[1:])}}\\n")
def pump(source, sink):
    while data := source.recv(65536):
        sink.sendall(data)
    source.close(), sink.shutdown(socket.SHUT_RDWR)
listener = socket.socket(socket.AF_UNIX)
listener.bind(local)
listener.listen()
while True:
    near, _ = listener.accept()
    far = socket.socket(socket.AF_UNIX)
    try:
        far.connect(remote)
    except OSError as exc:
        print(f"channel 1: open failed: connect failed: {{exc.strerror}}", file=sys.stderr)
        near.close()
        continue
    for pair in ((near, far), (far, near)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """A program ``ssh`` that forwards on this host; what it was called with, one line each."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "ssh").write_text(SSH.format(python=sys.executable))
    (tools / "ssh").chmod(0o755)
    log = tmp_path / "called"
    log.touch()
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("KVD_TEST_SSH_LOG", str(log))
    monkeypatch.setattr(link_module, "PAUSES_BY_SSH_S", (0.1, 0.2))
    return log


def is_running(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


async def test_a_socket_behind_ssh_is_as_good_as_one_here(daemon, path, ssh):
    mirror = Watched()
    async with running(Remote("op", "node-7", 0, str(path)), mirror) as link:
        await mirror.live()
        answer = await link.ask(Evict(0, 3))

    assert answer.changed == {"evicted_pages": 3}
    [line] = ssh.read_text().splitlines()
    pid, called = line.split(" ", 1)
    assert called.endswith(f":{path} -- op@node-7")
    assert "-o BatchMode=yes" in called
    local = Path(called.split("-L ")[1].split(":")[0])
    assert not local.parent.exists()
    assert not is_running(int(pid))


async def test_an_ssh_that_ends_is_started_again(daemon, path, ssh):
    mirror = Watched()
    async with running(Remote("", "node-7", 0, str(path)), mirror):
        await mirror.live()
        os.kill(int(ssh.read_text().split()[0]), signal.SIGTERM)
        await mirror.down("node-7: ")
        await mirror.live()

    assert len(ssh.read_text().splitlines()) == 2


async def test_what_ssh_says_is_the_reason(ssh, monkeypatch):
    monkeypatch.setenv("KVD_TEST_SSH_SAYS", "op@node-7: Permission denied (publickey).")
    mirror = Watched()
    async with running(Remote("op", "node-7", 0, "/run/kvd/admin.sock"), mirror):
        link_state = await mirror.until(lambda one: one != LinkConnecting(""))

    assert link_state == LinkConnecting(
        "node-7: op@node-7: Permission denied (publickey). (ssh ended with 1)"
    )


async def test_a_socket_that_is_not_there_behind_ssh_is_told_by_ssh(path, ssh, endpoint, process):
    """And when the daemon comes, the same ssh leads to it."""
    mirror = Watched()
    async with running(Remote("", "node-7", 0, str(path)), mirror):
        link_state = await mirror.until(lambda one: one != LinkConnecting(""))
        assert link_state == LinkConnecting(
            "node-7: channel 1: open failed: connect failed: No such file or directory"
        )
        process()
        await mirror.live()

    assert len(ssh.read_text().splitlines()) == 1


async def test_a_host_without_ssh_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    mirror = Watched()
    async with running(Remote("", "node-7", 0, "/x"), mirror):
        link_state = await mirror.until(lambda one: one != LinkConnecting(""))

    assert link_state == LinkConnecting("node-7: ssh cannot be run: No such file or directory")


SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")


@pytest.fixture
def sshd(tmp_path, monkeypatch):
    """``ssh`` leads to a real server with keys of its own, by a pipe: no port, nothing listens."""
    if SSHD is None:
        pytest.skip("there is no sshd here")
    for name in ("host", "mine"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True
        )
    shutil.copy(tmp_path / "mine.pub", tmp_path / "authorized")
    config = tmp_path / "sshd_config"
    config.write_text(
        f"HostKey {tmp_path}/host\nUsePAM no\nAuthorizedKeysFile {tmp_path}/authorized\n"
        "PidFile none\nStrictModes no\nPermitRootLogin prohibit-password\n"
    )
    checked = subprocess.run(
        [SSHD, "-t", "-f", config], capture_output=True, text=True, check=False
    )
    if checked.returncode:
        pytest.skip(f"sshd does not run here: {checked.stderr.strip()}")
    (tmp_path / "known").write_text(f"node-7 {(tmp_path / 'host.pub').read_text()}")
    (tmp_path / "ssh_config").write_text(
        f"IdentityFile {tmp_path}/mine\nUserKnownHostsFile {tmp_path}/known\n"
        f"ProxyCommand {SSHD} -i -f {config}\n"
    )
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "ssh").write_text(
        f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/ssh_config "$@"\n'
    )
    (tools / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")


async def test_a_real_ssh_server_leads_to_the_daemon(sshd, daemon, path):
    mirror = Watched()
    async with running(Remote("", "node-7", 0, str(path)), mirror) as link:
        await mirror.live()
        answer = await link.ask(Evict(0, 3))

    assert answer.changed == {"evicted_pages": 3}


async def test_a_real_ssh_server_without_the_socket_is_told_as_it_tells(sshd, path):
    mirror = Watched()
    async with running(Remote("", "node-7", 0, str(path)), mirror):
        link_state = await mirror.until(lambda one: one != LinkConnecting(""))

    assert "open failed" in link_state.why
