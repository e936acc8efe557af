"""A text stream that never makes its writer wait: a thread writes, a bounded queue is between.

Whoever reads the log may stop reading: a pager, a stopped terminal, a full pipe. The loop of the
daemon must not stop with them. What does not fit is lost and counted, and told when there is room.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO

MAX_WAITING_CHARS = 4 * 2**20
"""Some twenty thousand lines."""


class Spill:
    """Writes text to ``stream`` in the order given, from a thread of its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting: deque[str] = deque()
        self._chars = 0
        self._lost = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        """Queue a line; lost, and counted, where the reader is too far behind."""
        with self._changed:
            if self._chars + len(text) > MAX_WAITING_CHARS:
                self._lost += 1
            else:
                self._waiting.append(text)
                self._chars += len(text)
                self._changed.notify()
        return len(text)

    def flush(self) -> None:
        """Nothing to do: the thread flushes what it writes."""

    def take_lost(self) -> int:
        """Lines lost since the last call."""
        with self._changed:
            lost, self._lost = self._lost, 0
        return lost

    def close(self, patience_s: float) -> None:
        """Write what is left, for ``patience_s`` at most."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(patience_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_closed:
                    self._changed.wait()
                lines = list(self._waiting)
                self._waiting.clear()
                if not lines:
                    return
            self._put(lines)

    def _put(self, lines: list[str]) -> None:
        """The lines count as waiting until they are written, for they are still in memory."""
        text = "".join(lines)
        try:
            self._stream.write(text)
            self._stream.flush()
            lost = 0
        except (OSError, ValueError):  # the reader hung up, the disk is full, the file is closed
            lost = len(lines)
        with self._changed:
            self._chars -= len(text)
            self._lost += lost
