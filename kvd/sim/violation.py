"""What ends a seed: something that must never be was seen."""

from __future__ import annotations


class Violated(AssertionError):
    """The message says what was seen and where; the seed makes it happen again."""


def require(holds: object, what: str) -> None:
    """Raise ``Violated`` with ``what`` unless it holds."""
    if not holds:
        raise Violated(what)
