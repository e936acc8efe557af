"""What becomes of cached prefixes, as events; all of them together are in ``events``."""

from __future__ import annotations

from kvd.wire.numbered_event import NumberedEvent


class CacheThrashing(NumberedEvent, frozen=True, kw_only=True, tag="cache-thrashing"):
    """The same prefixes are evicted and asked for again, each time soon; told when that begins.

    ``session`` needed the pages, for ``need``; ``hurt`` missed them ``after_s`` later; ``writer``
    had brought them. A session that is 0 is kvd itself. ``pages`` of the last such prefix.
    """

    session: int
    hurt: int
    writer: int
    need: str
    namespace: str
    pages: int
    after_s: float
