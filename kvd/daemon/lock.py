"""One daemon per runtime directory, and the proof that the one before is over.

The lock is held by the daemon *and* by its transfer process, which is given the descriptor. So who
gets the lock knows that no older transfer process of this node can write any more, and may announce
a new incarnation.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import secrets
import time
from pathlib import Path
from typing import Final, NamedTuple

from kvd.daemon.whole_file import write_whole

WAIT_S = 3.0
"""A killed daemon's transfer process ends within milliseconds; three seconds is somebody alive."""

LOOK_S = 0.02

_BIRTH: Final = ".birth"
_HOME: Final = re.compile("[0-9a-f]{32}")


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
            raise AlreadyRunning(_why_locked(path, owner)) from None
        break
    return descriptor


def _why_locked(path: str, owner: str) -> str:
    """In words; ``owner``: the process id that the last daemon here has written down."""
    if owner.isdecimal() and not os.path.exists(f"/proc/{owner}"):
        pids = " and ".join(map(str, _holders(path))) or "unknown"
        return (
            f"{path} is locked by pid {pids}, which kvd {owner} has left behind: it was killed and "
            "has not ended, as where the disk of a tier does not answer; what it may still write "
            "to the pool's memory is over when it has"
        )
    return (
        f"{path} is locked by pid {owner}: another kvd serves from this directory; "
        "stop it, or set sockets.client and sockets.admin to another one"
    )


def _holders(path: str) -> list[int]:
    """Processes that have this file open, as far as this user may see it."""
    wanted = os.stat(path)
    found = set()
    # By thread: of a process that is ending the first one has let go of its files.
    for link in glob.iglob("/proc/[0-9]*/task/[0-9]*/fd/*"):
        # It may end meanwhile, or be somebody else's.
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(link), wanted):
                found.add(int(link.split("/")[2]))
    return sorted(found)


class Birth(NamedTuple):
    """When a process was born, ns since the epoch, and in which home: births of one are ordered.

    A home is a lock: of the processes that share one, each has reaped the one before. It is made
    anew where its file is gone, as after a reboot that emptied ``/run``: who was born there before
    is then in no order with us.
    """

    at_ns: int
    home: str


def next_birth(descriptor: int, path: str) -> Birth:
    """The birth of this process, later than every one before it in this home.

    ``descriptor``: of the lock file ``path``, which stays as it is, because whoever holds the lock
    has it open. The last birth is remembered beside it, in a file that is whole or not there, so
    that neither a clock that was set back nor a process that is killed here can make a new process
    look older than its predecessor.

    Raises:
        OSError: the directory cannot be written.
    """
    last = _last_birth(descriptor, path)
    home = last.home or secrets.token_hex(16)
    # Peers refuse an incarnation that is older than one they know.
    birth = Birth(max(time.time_ns(), last.at_ns + 1), home)
    write_whole(Path(f"{path}{_BIRTH}"), f"{birth.at_ns} {birth.home}\n".encode())
    # For people, and for versions of kvd that look for births here.
    line = f"{os.getpid()} {birth.at_ns}\n".encode()
    os.pwrite(descriptor, line, 0)
    os.ftruncate(descriptor, len(line))
    return birth


def _last_birth(descriptor: int, path: str) -> Birth:
    """Of the process before; 0 and no home where there was none, or nothing of it can be read."""
    kept = os.pread(descriptor, 64, 0).decode(errors="replace").split()
    in_lock = int(kept[1]) if len(kept) > 1 and kept[1].isdecimal() else 0
    try:
        with open(f"{path}{_BIRTH}", "rb") as file:
            at_ns, home = file.read(128).decode("ascii").split()
    except (FileNotFoundError, ValueError):
        return Birth(in_lock, "")
    if not at_ns.isdecimal() or not _HOME.fullmatch(home):
        return Birth(in_lock, "")
    return Birth(max(int(at_ns), in_lock), home)
