"""The process that ``kvd doctor`` judges: the running daemon of the configuration, else itself.

A daemon under systemd has other limits and other CPUs than the shell that asks, and what counts is
what the daemon has. Its lock file says who it is.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

import msgspec

from kvd.config.address import ipc_path

if TYPE_CHECKING:
    from kvd.cli.finding import Subject


class Judged(msgspec.Struct, frozen=True):
    """``pid`` is 0 for the asking process; ``who`` is the subject of a sentence."""

    pid: int
    who: str

    @property
    def proc(self) -> str:
        """Its directory below the root."""
        return f"proc/{self.pid or 'self'}"


def judged(subject: Subject) -> Judged:
    """The daemon that serves from the configured sockets, or this process where none does."""
    pid = _holder(ipc_path(subject.config.sockets.client) or "")
    if pid and (subject.root / f"proc/{pid}").is_dir():
        return Judged(pid, f"the running daemon (pid {pid})")
    return Judged(0, "a daemon started from here")


def _holder(socket: str) -> int:
    """Who holds the lock beside a client socket; 0 for nobody.

    A shared lock is tried and dropped at once: a daemon that starts in this moment tries again.
    """
    try:
        descriptor = os.open(f"{socket}.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        words = os.pread(descriptor, 64, 0).decode(errors="replace").split()
        return int(words[0]) if words and words[0].isdecimal() else 0
    finally:
        os.close(descriptor)
    return 0
