"""What a rule over several keys says."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvd.config.schema import Config


class Finding(msgspec.Struct, frozen=True):
    """What a rule holds against ``key``, or against one ``entry`` of a table."""

    key: str
    rule: str
    fix: str
    entry: str | None = None


class Rule(msgspec.Struct, frozen=True):
    """``check`` reads only the keys in ``needs``."""

    check: Callable[[Config], list[Finding]]
    needs: frozenset[str]
