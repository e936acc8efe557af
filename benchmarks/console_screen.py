"""One real ``kvd-tui`` on a pseudo-terminal, and what its frames cost it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import signal
import struct
import sys
import termios
import time
from typing import TYPE_CHECKING, Final

import msgspec

from kvd.bench.memory import busy_s

if TYPE_CHECKING:
    from types import TracebackType

COLUMNS: Final = 180
LINES: Final = 50
FPS: Final = 10
SCREENS: Final = (
    "overview",
    "pools",
    "radix",
    "handoffs",
    "peers",
    "events",
    "inspect",
    "clients",
)
START_S: Final = 30.0
SETTLE_S: Final = 1.5


class Screen(msgspec.Struct, frozen=True):
    """One screen at work: frames were asked for at ``FPS``."""

    name: str
    frame_ms: float
    frames: int
    terminal_bytes: float
    """Per frame."""


class Terminal:
    """A terminal with a console on it, for as long as the block lasts."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._seen = 0
        self._is_stopped = False

    def __enter__(self) -> Terminal:
        self._began_s = time.monotonic()
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            command = ["-m", "tui", "--connect", self._endpoint, "--fps", str(FPS)]
            environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
            os.execve(sys.executable, [sys.executable, *command], environment)
        size = struct.pack("HHHH", LINES, COLUMNS, 0, 0)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, size)
        os.set_blocking(self._fd, False)
        self._text = b""
        asyncio.get_running_loop().add_reader(self._fd, self._read)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGCONT)
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._fd)

    async def first_frame(self) -> float:
        """Seconds from its start until the node's state is on the screen.

        Raises:
            TimeoutError: it never was; the message has what was shown.
        """
        while b"serving" not in self._text and b"LIVE" not in self._text:
            if time.monotonic() - self._began_s > START_S:
                raise TimeoutError(f"no frame in {START_S:g} s: {self._text[-2000:]!r}")
            await asyncio.sleep(0.005)
        return time.monotonic() - self._began_s

    async def screens(self, seconds: float) -> tuple[Screen, ...]:
        """Each of them for so long."""
        found = []
        for number, name in enumerate(SCREENS, start=1):
            os.write(self._fd, str(number).encode())
            await asyncio.sleep(SETTLE_S)
            seen, busy, began_s = self._seen, busy_s(self._pid), time.monotonic()
            await asyncio.sleep(seconds)
            frames = FPS * (time.monotonic() - began_s)
            found.append(
                Screen(
                    name,
                    1e3 * (busy_s(self._pid) - busy) / frames,
                    round(frames),
                    (self._seen - seen) / frames,
                )
            )
        os.write(self._fd, b"1")
        await asyncio.sleep(SETTLE_S)
        return tuple(found)

    def pause(self) -> None:
        """Stop it as Ctrl-Z would."""
        os.kill(self._pid, signal.SIGSTOP)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            data = os.read(self._fd, 1 << 16)
            self._seen += len(data)
            if len(self._text) < 1 << 20:
                self._text += data
