"""Where a value came from, and what is wrong with it.

Plain values: nothing here reads or decides anything.
"""

from __future__ import annotations

import enum

import msgspec


class ValueSource(enum.Enum):
    """The places a value can come from, weakest first."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    SET = "set"


class ValueOrigin(msgspec.Struct, frozen=True):
    """One place. ``name``: file, variable or ``--set`` text; ``line`` 0 if there is none."""

    source: ValueSource
    name: str = ""
    line: int = 0

    @property
    def place(self) -> str:
        """The place as an operator would look for it: ``/etc/kvd/kvd.toml:12``."""
        match self.source:
            case ValueSource.DEFAULT:
                return "default"
            case ValueSource.FILE:
                return f"{self.name}:{self.line}" if self.line else self.name
            case ValueSource.ENVIRONMENT:
                return self.name
            case ValueSource.SET:
                return f"--set {self.name}"


DEFAULT = ValueOrigin(ValueSource.DEFAULT)


class ConfigError(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong: where, which key, the value found, the rule, and what to do.

    ``key`` and ``value`` are empty where there is none to name (a file that is no TOML).
    """

    where: str
    key: str = ""
    value: str = ""
    rule: str
    fix: str

    @property
    def sentence(self) -> str:
        """One line for people."""
        subject = f"{self.key} = {self.value}" if self.value else self.key
        head = f"{self.where}: {subject}" if subject else self.where
        return f"{head}: {self.rule}; {self.fix}"
