"""What an object of an engine has, where versions differ. Needs no package: see ``versions``."""

from __future__ import annotations

from typing import Any


def attribute(value: Any, name: str) -> Any:
    """None where it has none: another version's, or one that is never set."""
    try:
        return getattr(value, name)
    except AttributeError:
        return None
