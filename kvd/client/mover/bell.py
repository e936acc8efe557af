"""What the mover's thread sleeps on: a bell that any thread rings, and the daemon's answer.

The answer wakes it without a ring: whoever says a word has it listened to (``listen``), also while
the thread sleeps. So an order that the engine's thread begins wakes the mover once, by the answer.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from typing import Final

NAP_S: Final = 0.001
"""Shorter sleeps are naps: the kernel counts milliseconds here."""

_ONCE: Final = select.EPOLLIN | select.EPOLLONESHOT


class Bell:
    """Wakes a thread that sleeps, from any other."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ready = select.epoll()
        self._ready.register(self._fd, select.EPOLLIN)
        self._nap = threading.Lock()
        self._nap.acquire()
        self._is_napping = False

    def ring(self) -> None:
        """Have it wake, or not fall asleep."""
        os.eventfd_write(self._fd, 1)
        if self._is_napping:
            with contextlib.suppress(RuntimeError):  # another ring was quicker
                self._nap.release()

    def listen(self, fd: int) -> None:
        """Have it wake once when that is readable, or now is; also while it sleeps."""
        # A descriptor that was closed is none any more, and another may have its number: whoever
        # closed it has said so to all who wait.
        with contextlib.suppress(OSError, ValueError):
            try:
                self._ready.modify(fd, _ONCE)
            except FileNotFoundError:
                self._ready.register(fd, _ONCE)

    def sleep(self, within_s: float, other: int = -1) -> None:
        """Until it rings, ``other`` is readable, or the time is up."""
        if within_s < NAP_S:
            self._is_napping = True
            self._nap.acquire(timeout=within_s)
            self._is_napping = False
            return
        if other >= 0:
            self.listen(other)
        if any(fd == self._fd for fd, _ in self._ready.poll(within_s)):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Nobody rings any more."""
        self._ready.close()
        os.close(self._fd)
