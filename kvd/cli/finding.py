"""What a check of ``kvd doctor`` says: how bad, what it found, and what to do about it."""

from __future__ import annotations

import enum

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
    """What every check may look at: the configuration, and the environment it came with."""

    config: Config
    environ: dict[str, str]


def good(check: str, what: str) -> Finding:
    """All is well."""
    return Finding(check, Severity.GOOD, what)


def poor(check: str, what: str, fix: str) -> Finding:
    """It works, but."""
    return Finding(check, Severity.POOR, what, fix)


def wrong(check: str, what: str, fix: str) -> Finding:
    """It will not work."""
    return Finding(check, Severity.WRONG, what, fix)
