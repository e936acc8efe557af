"""What a check of ``kvd doctor`` says: how bad, what it found, and what to do about it."""

from __future__ import annotations

import enum
from pathlib import Path

import msgspec

from kvd.config.schema import Config


class Severity(enum.Enum):
    """``WRONG``: kvd will not work. ``POOR``: it works, slower or less safely than it could."""

    GOOD = "good"
    POOR = "poor"
    WRONG = "wrong"


class Finding(msgspec.Struct, frozen=True):
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


def good(check: str, what: str) -> Finding:
    """All is well."""
    return Finding(check, Severity.GOOD, what)


def poor(check: str, what: str, fix: str) -> Finding:
    """It works, but."""
    return Finding(check, Severity.POOR, what, fix)


def wrong(check: str, what: str, fix: str) -> Finding:
    """It will not work."""
    return Finding(check, Severity.WRONG, what, fix)
