"""What a check of ``kvd doctor`` looks at, whom it judges, and what it says.

A daemon under systemd has other limits and other CPUs than the shell that asks, and what counts is
what the daemon has: ``judged`` finds it by its lock file.
"""

from __future__ import annotations

import enum
import fcntl
import os
from pathlib import Path

import msgspec

from kvd.config.address import ipc_path
from kvd.config.schema import Config


class Severity(enum.Enum):
    """``WRONG``: kvd will not work. ``POOR``: it works, slower or less safely than it could."""

    GOOD = "good"
    POOR = "poor"
    WRONG = "wrong"


class DoctorFinding(msgspec.Struct, frozen=True):
    """One sentence about one thing; ``fix`` is empty where nothing needs fixing."""

    check: str
    severity: Severity
    what: str
    fix: str = ""


class Subject(msgspec.Struct, frozen=True):
    """What every check may look at: the configuration, and the environment it came with.

    ``root`` is where ``dev``, ``proc``, ``run`` and ``sys`` are; another directory in tests of
    hosts that have what this one has not.
    """

    config: Config
    environ: dict[str, str]
    root: Path = Path("/")

    @property
    def rdma(self) -> list[str]:
        """The RDMA devices of this host."""
        return [entry.name for entry in self.entries("sys/class/infiniband")]

    @property
    def ucx(self) -> dict[str, str]:
        """The environment that transfers run in: with what ``transfer.ucx`` sets."""
        return {**self.environ, **self.config.transfer.ucx}

    @property
    def has_systemd(self) -> bool:
        """Whether systemd runs this host, as sd_booted(3) says."""
        return (self.root / "run/systemd/system").is_dir()

    def text(self, path: str) -> str:
        """What the file at ``path`` under the root says, stripped; empty if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def entries(self, path: str) -> list[Path]:
        """What lies in the directory at ``path`` under the root, by name; nothing if none is."""
        try:
            return sorted((self.root / path).iterdir())
        except OSError:
            return []


def good(check: str, what: str) -> DoctorFinding:
    """Nothing is to be done about it."""
    return DoctorFinding(check, Severity.GOOD, what)


def poor(check: str, what: str, fix: str) -> DoctorFinding:
    """It works, but."""
    return DoctorFinding(check=check, severity=Severity.POOR, what=what, fix=fix)


def wrong(check: str, what: str, fix: str) -> DoctorFinding:
    """It will not work."""
    return DoctorFinding(check=check, severity=Severity.WRONG, what=what, fix=fix)


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


def status_line(subject: Subject, who: Judged, name: str) -> str:
    """One line of what the kernel says of the judged process; empty if it says none."""
    for line in subject.text(f"{who.proc}/status").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value.strip()
    return ""


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
