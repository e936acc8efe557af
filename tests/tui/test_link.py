"""The link against admin sockets: daemons that are there, silent, gone, back, or behind ssh."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvd.errors import Code, Refusal
from kvd.wire.admin import AdminFailed, Because, Evict, Flush, Look, Report, Why
from kvd.wire.console import EventQuery
from tests.cli.admin_peer import Daemon
from tests.tui.frames import LEASES, frame, lease, table
from tui import link as link_module
from tui.endpoint import Local, Remote
from tui.link import Link
from tui.model.mirror import Connecting, Down, Live, Mirror, Wanted

LIMIT_S = 15.0
ROOT = Path(__file__).parents[2]
WANTED = Wanted((LEASES,), EventQuery(0))


class Watched(Mirror):
    """A mirror that says when something has come to it."""

    def __init__(self):
        super().__init__()
        self._news = asyncio.Event()

    def take(self, frame, heard_s):
        super().take(frame, heard_s)
        self._news.set()

    def failed(self, why, now_s):
        super().failed(why, now_s)
        self._news.set()

    def now(self):
        return self.standing(asyncio.get_running_loop().time(), 60.0)

    async def until(self, is_it):
        async with asyncio.timeout(LIMIT_S):
            while not is_it(self.now()):
                self._news.clear()
                await self._news.wait()
        return self.now()

    async def live(self):
        return await self.until(lambda one: isinstance(one, Live))

    async def down(self, words):
        return await self.until(lambda one: isinstance(one, Down) and words in one.why)


@contextlib.asynccontextmanager
async def running(endpoint, mirror, **options):
    """A link that runs; it must end when it is told to."""
    link = Link(endpoint, mirror, lambda: WANTED, fps=20.0, **options)
    task = asyncio.ensure_future(link.run())
    try:
        yield link
    finally:
        task.cancel()
        async with asyncio.timeout(LIMIT_S):
            with contextlib.suppress(asyncio.CancelledError):
                await task


@pytest.fixture
def path(tmp_path):
    return tmp_path / "admin.sock"


@pytest.fixture
def endpoint(path):
    return Local(f"ipc://{path}")


@pytest.fixture
def daemon(endpoint):
    """Answers looks with two leases, evictions with a report, and refuses the rest."""
    one = Daemon(endpoint.endpoint)

    def answer(request):
        match request:
            case Look(queries=queries):
                return frame(0, *[table(lease(1), lease(2)) for _ in queries])
            case Evict(pages=pages):
                return Report(0, {"evicted_pages": pages}, ())
            case _:
                return AdminFailed(0, Refusal(Code.UNKNOWN_LEASE, "there is no lease 8"))

    one.answer = answer
    yield one
    one.close()


@pytest.fixture
def process(endpoint):
    """Starts daemons in processes of their own."""
    started = []

    def start(incarnation="a" * 32):
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.tui.looked_at", endpoint.endpoint, incarnation],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        started.append(child)
        assert child.stdout.readline() == b"ready\n"
        return child

    yield start
    for child in started:
        child.kill()
        child.wait()
        child.stdout.close()


async def test_frames_come_to_the_mirror(daemon, endpoint):
    mirror = Watched()
    async with running(endpoint, mirror):
        await mirror.live()

    assert mirror.moment().sheet(LEASES).order == ("lease:1", "lease:2")
    assert daemon.asked[0] == Look(0, (LEASES,), EventQuery(0))


async def test_one_look_is_under_way_and_no_more_than_are_painted(daemon, endpoint):
    mirror = Watched()
    async with running(endpoint, mirror) as link:
        await mirror.live()
        link.fps = 5.0
        await asyncio.sleep(1.0)

    assert 3 <= mirror.frames <= 8


async def test_somebody_in_a_hurry_does_not_wait_for_the_next_frame(daemon, endpoint):
    mirror = Watched()
    async with running(endpoint, mirror) as link:
        link.fps = 0.01
        await mirror.live()
        for _ in range(20):
            before = mirror.frames
            link.hurry()
            await mirror.until(lambda _, before=before: mirror.frames > before)

    assert mirror.frames >= 20


def test_frames_come_more_rarely_where_painting_takes_long(endpoint):
    link = Link(endpoint, Mirror(), lambda: WANTED, fps=10.0)
    assert link.interval_s == 0.1

    for _ in range(50):
        link.painted(0.1)

    assert link.interval_s == pytest.approx(0.4, rel=0.01)


async def test_questions_and_verbs_are_answered_between_frames(daemon, endpoint):
    mirror = Watched()
    async with running(endpoint, mirror) as link:
        await mirror.live()
        evicted, refused = await asyncio.gather(
            link.ask(Evict(0, 100)), link.ask(Why(0, "lease", 8))
        )

    assert msgspec.structs.replace(evicted, call=0) == Report(0, {"evicted_pages": 100}, ())
    assert refused.refusal == Refusal(Code.UNKNOWN_LEASE, "there is no lease 8")


async def test_a_question_to_nobody_fails_at_once(endpoint):
    mirror = Watched()
    async with running(endpoint, mirror) as link:
        await mirror.until(lambda one: one != Connecting(""))
        answer = await link.ask(Flush(0))

    assert answer.refusal.message == "no daemon is connected, so nobody was asked"


async def test_a_daemon_that_is_not_there_is_waited_for(endpoint, path, process):
    mirror = Watched()
    async with running(endpoint, mirror):
        standing = await mirror.until(lambda one: one != Connecting(""))
        assert standing == Connecting(f"there is no socket at {path}")

        process()
        await mirror.live()


async def test_a_killed_daemon_is_down_and_its_successor_is_followed(endpoint, process):
    mirror = Watched()
    async with running(endpoint, mirror) as link:
        first = process("a" * 32)
        await mirror.live()

        first.kill()
        first.wait()
        await mirror.down("nobody listens on")
        assert isinstance(await link.ask(Why(0, "lease", 1)), AdminFailed)

        process("b" * 32)
        await mirror.live()

    assert mirror.vitals.incarnation == "b" * 32
    assert [one.kind for one in mirror.notices] == ["restart"]


async def test_a_stopped_daemon_is_said_to_be_silent_and_goes_on_by_itself(
    endpoint, process, monkeypatch
):
    """Nothing is heaped up for it: it has one question to answer when it goes on."""
    monkeypatch.setattr(link_module, "ANSWER_S", 0.3)
    mirror = Watched()
    async with running(endpoint, mirror) as link:
        child = process()
        await mirror.live()

        child.send_signal(signal.SIGSTOP)
        standing = await mirror.down("no answer for more than 0.3 s")
        unanswered = await link.ask(Why(0, "lease", 1), limit_s=0.2)
        assert unanswered.refusal.message == "no answer within 0.2 s; it may yet be done"
        before = mirror.frames
        assert mirror.now() == standing

        child.send_signal(signal.SIGCONT)
        await mirror.live()
        answer = await link.ask(Why(0, "lease", 1))

    assert mirror.frames > before
    assert msgspec.structs.replace(answer, call=0) == Because(0, "it is asked for", ())
    assert list(mirror.notices) == []


async def test_a_question_that_is_open_when_the_daemon_dies_ends(endpoint, process):
    mirror = Watched()
    async with running(endpoint, mirror) as link:
        child = process()
        await mirror.live()
        child.send_signal(signal.SIGSTOP)
        asked = asyncio.ensure_future(link.ask(Evict(0, 1), limit_s=LIMIT_S))
        await asyncio.sleep(0)

        child.kill()

        answer = await asked

    assert answer.refusal.message == (
        "the connection was lost before the answer; it may have been done"
    )


async def test_a_daemon_that_knows_no_looks_is_down_with_its_own_words(daemon, endpoint):
    daemon.answer = lambda _: AdminFailed(
        0, Refusal(Code.BAD_REQUEST, "no message of this socket: Invalid value 'look'")
    )
    mirror = Watched()
    async with running(endpoint, mirror):
        standing = await mirror.until(lambda one: one != Connecting(""))

    assert standing == Connecting(
        "the daemon refuses to be looked at: no message of this socket: Invalid value 'look'"
    )


# ---- behind ssh ----------------------------------------------------------------------------------

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
        standing = await mirror.until(lambda one: one != Connecting(""))

    assert standing == Connecting(
        "node-7: op@node-7: Permission denied (publickey). (ssh ended with 1)"
    )


async def test_a_socket_that_is_not_there_behind_ssh_is_told_by_ssh(path, ssh, endpoint, process):
    """And when the daemon comes, the same ssh leads to it."""
    mirror = Watched()
    async with running(Remote("", "node-7", 0, str(path)), mirror):
        standing = await mirror.until(lambda one: one != Connecting(""))
        assert standing == Connecting(
            "node-7: channel 1: open failed: connect failed: No such file or directory"
        )
        process()
        await mirror.live()

    assert len(ssh.read_text().splitlines()) == 1


async def test_a_host_without_ssh_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    mirror = Watched()
    async with running(Remote("", "node-7", 0, "/x"), mirror):
        standing = await mirror.until(lambda one: one != Connecting(""))

    assert standing == Connecting("node-7: ssh cannot be run: No such file or directory")


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
        standing = await mirror.until(lambda one: one != Connecting(""))

    assert "open failed" in standing.why
