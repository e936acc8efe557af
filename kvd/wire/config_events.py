"""What becomes of a configuration that is read again."""

from __future__ import annotations

import msgspec


class ConfigReloaded(msgspec.Struct, frozen=True, tag="config-reloaded"):
    """The configuration was read again: what holds from here on, and what waits for a restart.

    Each as ``key: before -> after``.
    """

    seq: int
    at_s: float
    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]


class ConfigRefused(msgspec.Struct, frozen=True, tag="config-refused"):
    """The configuration was read again and is invalid: nothing was changed."""

    seq: int
    at_s: float
    errors: tuple[str, ...]


ConfigEvent = ConfigReloaded | ConfigRefused
