"""What a namespace keeps of a place, and above what it goes first there: the figures alone.

What they mean is in ``cache.quotas``.
"""

from __future__ import annotations

import msgspec


class Quota(msgspec.Struct, frozen=True):
    """In pages of one place, the pool or a tier; the name as in ``cache.quotas``."""

    namespace: str
    floor_pages: int = 0
    ceiling_pages: int | None = None
    """None: it has none."""
