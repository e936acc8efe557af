"""A console on a real terminal, and what the terminal shows: as much of one as Textual needs.

A pseudo-terminal with the console on its other side, and a screen that understands where the
cursor goes and what is written there. Colours are read over.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from typing import TYPE_CHECKING

from rich.cells import cell_len

if TYPE_CHECKING:
    from collections.abc import Callable

# A string (title, answers), a sequence with its numbers, a two-letter sequence, or a run of text.
TOKEN = re.compile(
    r"\x1b[\]P_^].*?(?:\x07|\x1b\\)|\x1b\[([<-?]?)([0-9;:]*)([ -/]*)([@-~])|\x1b[ -/]*[0-~]"
    r"|[\x00-\x1f]|[^\x00-\x1f]+",
    re.DOTALL,
)
UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]P_^](?:(?!\x07|\x1b\\).)*)?\Z", re.DOTALL)
LIMIT_S = 40.0
"""What a machine that does much else needs at most for anything."""
ALTERNATE_SCREEN, CURSOR, WRAPPING = "1049", "25", "7"


class Grid:
    """The cells of a terminal; ``modes``: the private ones that are set."""

    def __init__(self, columns: int, lines: int) -> None:
        self.modes: set[str] = {CURSOR, WRAPPING}
        self._rest = ""
        self.resize(columns, lines)

    def resize(self, columns: int, lines: int) -> None:
        """Another size, and nothing on it."""
        self.columns, self.lines = columns, lines
        self._cells = [[" "] * columns for _ in range(lines)]
        self._x = self._y = 0

    def text(self) -> str:
        """What stands on it, without blanks at the ends of lines."""
        return "\n".join("".join(line).rstrip() for line in self._cells)

    def feed(self, sent: str) -> None:
        """Show what was sent; what is not whole yet waits for the rest."""
        sent = self._rest + sent
        cut = UNFINISHED.search(sent)
        self._rest = sent[cut.start() :] if cut else ""
        for token in TOKEN.finditer(sent[: cut.start()] if cut else sent):
            if token[4] is not None:
                self._obey(token[4], token[1], token[2])
            elif token[0] == "\r":
                self._x = 0
            elif token[0] == "\n":
                self._y = min(self._y + 1, self.lines - 1)
            elif token[0] >= " ":
                self._write(token[0])

    def _obey(self, what: str, mark: str, numbers: str) -> None:
        counts = [int(one) if one.isdecimal() else 0 for one in numbers.split(";")]
        match what:
            case "h" | "l" if mark == "?":
                modes = set(numbers.split(";"))
                self.modes = self.modes | modes if what == "h" else self.modes - modes
            case "H" | "f":
                row, column = (*counts, 1)[:2]
                self._y = min(max(row, 1), self.lines) - 1
                self._x = min(max(column, 1), self.columns) - 1
            case "J" if counts[0] == 2:
                self._cells = [[" "] * self.columns for _ in range(self.lines)]
            case "A" | "B" | "C" | "D":
                step = max(1, counts[0])
                self._y += {"A": -step, "B": step}.get(what, 0)
                self._x += {"C": step, "D": -step}.get(what, 0)

    def _write(self, text: str) -> None:
        for sign in text:
            if 0 <= self._x < self.columns and 0 <= self._y < self.lines:
                self._cells[self._y][self._x] = sign
            self._x += cell_len(sign)


def _set_size(fd: int, columns: int, lines: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


class Terminal:
    """A console that runs on a terminal of this size, for as long as the block lasts."""

    def __init__(self, columns: int, lines: int, *options: str) -> None:
        self.grid = Grid(columns, lines)
        self._options = options
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __enter__(self) -> Terminal:
        self.began_s = time.monotonic()
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
            for name in ("COLUMNS", "LINES"):  # of whoever runs the tests: not of this terminal
                environment.pop(name, None)
            _set_size(0, self.grid.columns, self.grid.lines)
            os.execve(sys.executable, [sys.executable, "-m", "tui", *self._options], environment)
        self.at_first = termios.tcgetattr(self._fd)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._fd)

    def resize(self, columns: int, lines: int) -> None:
        """Another size; the console is told."""
        self.grid.resize(columns, lines)
        _set_size(self._fd, columns, lines)

    def press(self, keys: str) -> None:
        self.send(keys.encode())

    def send(self, raw: bytes) -> None:
        """What a keyboard of any encoding sends."""
        os.write(self._fd, raw)

    def until(self, is_so: Callable[[str], object], what: str, within_s: float = LIMIT_S) -> float:
        """Read until the screen says so; seconds since now.

        Raises:
            AssertionError: it never did; the message has the screen.
        """
        begun_s = time.monotonic()
        while not is_so(self.grid.text()):
            waited_s = time.monotonic() - begun_s
            assert waited_s < within_s, f"{what} not within {within_s:g} s:\n{self.grid.text()}"
            assert self._read(), f"the console ended before {what}:\n{self.grid.text()}"
        return time.monotonic() - begun_s

    def end(self, within_s: float = LIMIT_S) -> int:
        """Read what it still says, until it ends; its exit status."""
        end_s = time.monotonic() + within_s
        while self._read():
            assert time.monotonic() < end_s, f"it does not end:\n{self.grid.text()}"
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def modes_of_line(self) -> object:
        """How the line between the keyboard and the program is set."""
        return termios.tcgetattr(self._fd)

    def _read(self) -> bool:
        """Whether the console is still there; what it has said is shown."""
        if not select.select([self._fd], [], [], 0.1)[0]:
            return True
        try:
            sent = os.read(self._fd, 1 << 16)
        except OSError:  # the other side is closed
            return False
        self.grid.feed(self._decoder.decode(sent))
        return True
