"""One daemon per runtime directory, and the proof that the one before is over.

The lock is held by the daemon *and* by its transfer process, which is given the descriptor. So who
gets the lock knows that no older transfer process of this node can write any more, and may announce
a new incarnation.
"""

from __future__ import annotations

import fcntl
import os
import time

WAIT_S = 3.0
"""A killed daemon's transfer process ends within milliseconds; three seconds is somebody alive."""

LOOK_S = 0.02


class AlreadyRunning(Exception):
    """Another daemon serves from this runtime directory."""


def take(path: str) -> int:
    """Lock ``path``; returns the descriptor that holds the lock while it, or a copy, is open.

    Raises:
        AlreadyRunning: somebody else holds it, and still does after ``WAIT_S``.
        OSError: the directory cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end_s = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # The transfer process of a killed daemon holds a copy, and is about to end.
            if time.monotonic() < end_s:
                time.sleep(LOOK_S)
                continue
            kept = os.pread(descriptor, 64, 0).decode(errors="replace").split()
            owner = kept[0] if kept else "unknown"
            os.close(descriptor)
            raise AlreadyRunning(
                f"{path} is locked by pid {owner}: another kvd serves from this directory; "
                "stop it, or set sockets.client and sockets.admin to another one"
            ) from None
        break
    return descriptor


def next_birth(descriptor: int) -> int:
    """When this process was born, ns since the epoch, and later than every one before it here.

    The lock file remembers the last birth, so that a clock set back cannot make a new process look
    older than its predecessor.
    """
    kept = os.pread(descriptor, 64, 0).decode(errors="replace").split()
    last = int(kept[1]) if len(kept) > 1 and kept[1].isdecimal() else 0
    # Peers refuse an incarnation that is older than one they know.
    birth = max(time.time_ns(), last + 1)
    line = f"{os.getpid()} {birth}\n".encode()
    # Written over the last one and cut behind it: emptied first, a process that is killed between
    # the two would leave no birth behind, and a clock set back could go unseen.
    os.pwrite(descriptor, line, 0)
    os.ftruncate(descriptor, len(line))
    return birth
