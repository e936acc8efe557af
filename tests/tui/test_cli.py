"""The command line of the console: refusals say what to write; one frame needs no terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest
from click.testing import CliRunner

from kvd.errors import Code, Refusal
from kvd.wire.admin import AdminFailed, Look
from tests.cli.admin_peer import Daemon
from tests.tui.frames import frame, table
from tui.cli import main


@pytest.fixture
def endpoint(tmp_path):
    return f"ipc://{tmp_path}/admin.sock"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--connect", "tcp://host:1"], "names no daemon; write ipc:///run/kvd/admin.sock"),
        (["--connect", "ipc:///x", "--size", "big"], "'big' is no size; write 132x40"),
        (["--connect", "ipc:///x", "--fps", "0"], "not in the range 0.2<=x<=20.0"),
        (["--connect", "ipc:///x", "--screen", "nowhere"], "'nowhere' is not one of"),
        (["--connect", "ipc:///x", "--theme", "nonsense"], "'nonsense' is none of"),
        (["--connect", "ipc:///x", "--open", "everything"], "expected what to open: lease:7"),
        (["--connect", "ipc:///x", "--after", "-1"], "not in the range 0.0<=x<=3600.0"),
    ],
)
def test_an_option_that_cannot_be_is_refused_with_what_to_write(options, says):
    done = CliRunner().invoke(main, options)
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())


def test_help_loads_no_textual():
    script = (
        "import sys; from tui.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'textual' not in sys.modules and 'zmq' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_one_frame_of_nobody_says_so_and_ends_with_1(endpoint, monkeypatch):
    monkeypatch.setattr("tui.cli.WAIT_S", 0.2)
    done = CliRunner().invoke(main, ["--connect", endpoint, "--once", "--size", "90x24"])
    assert done.exit_code == 1
    lines = done.output.splitlines()
    assert len(lines) == 24
    assert "CONNECTING there is no socket at" in lines[0]


def test_one_frame_of_a_daemon_is_printed_and_drawn(endpoint, tmp_path):
    daemon = Daemon(endpoint)
    daemon.answer = _answer
    try:
        options = ["--connect", endpoint, "--once", "--screen", "engines", "--size", "100x24"]
        done = CliRunner().invoke(main, [*options, "--screenshot", f"{tmp_path}/one.svg"])
        again = CliRunner().invoke(main, [*options, "--screenshot", f"{tmp_path}/one.svg"])
    finally:
        daemon.close()
    assert done.exit_code == 0, done.output
    assert "─ leases" in done.output
    assert (tmp_path / "one.svg").read_text().startswith("<svg")
    assert again.exit_code == 1
    assert "one.svg not written: File exists" in again.output


def test_what_is_to_be_open_is_open_on_its_page_in_a_frame_of_later(endpoint):
    daemon = Daemon(endpoint)
    daemon.answer = _answer
    try:
        options = ["--connect", endpoint, "--once", "--open", "lease:8", "--after", "0.7"]
        begun_s = time.monotonic()
        done = CliRunner().invoke(main, options)
    finally:
        daemon.close()
    assert done.exit_code == 0, done.output
    assert ">2 pools<" in done.output
    assert "━ only lease:8, Esc: all ━" in done.output
    assert "there is no lease 8" in done.output
    assert time.monotonic() - begun_s > 0.7


def _answer(request):
    match request:
        case Look(queries=queries):
            return frame(0, *[table() for _ in queries])
        case _:
            return AdminFailed(0, Refusal(Code.UNKNOWN_LEASE, "there is no lease 8"))


def on_a_terminal(endpoint, **env):
    """What the console sends to a real terminal of 100x24 until it has a picture; then q."""
    main_fd, side_fd = pty.openpty()
    fcntl.ioctl(side_fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-m", "tui", "--connect", endpoint],
        stdin=side_fd,
        stdout=side_fd,
        stderr=side_fd,
        env={**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", **env},
        start_new_session=True,
    )
    os.close(side_fd)
    sent, end_s = b"", time.monotonic() + 20.0
    try:
        while b"there is no socket" not in sent and time.monotonic() < end_s:
            if select.select([main_fd], [], [], 0.1)[0]:
                sent += os.read(main_fd, 65536)
        os.write(main_fd, b"q")
        while child.poll() is None and time.monotonic() < end_s:
            if select.select([main_fd], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    os.read(main_fd, 65536)
    finally:
        child.kill()
        os.close(main_fd)
    return sent, child.wait()


def colours_in(sent):
    """Every colour that was set, other than the terminal's own."""
    codes = re.findall(rb"\x1b\[([0-9;]*)m", sent)
    return [code for code in codes if re.search(rb"(^|;)([34][0-8]|9[0-7]|10[0-7])(;|$)", code)]


def test_it_runs_on_a_real_terminal_and_q_ends_it(endpoint):
    sent, status = on_a_terminal(endpoint)
    assert b"there is no socket" in sent
    assert colours_in(sent)
    assert status == 0


def test_no_color_means_that_no_colour_is_sent(endpoint):
    sent, status = on_a_terminal(endpoint, NO_COLOR="1")
    assert b"there is no socket" in sent
    assert not colours_in(sent)
    assert status == 0
