"""Who may attach, and how many."""

from __future__ import annotations

from typing import Final

import msgspec


class AttachLimits(msgspec.Struct, frozen=True):
    """Who may connect, and how much one daemon carries.

    ``mode`` and ``group`` are of the socket file; ``max_frame_bytes`` is announced to clients, so
    that they refuse a frame that the client socket would drop them for.
    """

    mode: int = 0o660
    group: str | None = None
    max_sessions: int = 256
    processes_per_session: int = 16
    request_within_s: float = 5.0
    max_frame_bytes: int = 16 * 1024 * 1024


DEFAULT_LIMITS: Final = AttachLimits()
