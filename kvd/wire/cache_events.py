"""What becomes of cached prefixes, as events; all of them together are in ``events``."""

from __future__ import annotations

from kvd.wire.numbered_event import NumberedEvent


class PinBegan(NumberedEvent, frozen=True, kw_only=True, tag="pin-began"):
    """A cached prefix is kept for somebody, softly, under that lease."""

    pin: int
    owner: str
    lease: int
    tokens: int
    ttl_s: float


class PinLeftPool(NumberedEvent, frozen=True, kw_only=True, tag="pin-left-pool"):
    """The pages of a pin in the pool were needed: it goes on in a tier, which has all of it."""

    pin: int
    owner: str
    tokens: int
    tier: str
    why: str


class PinEnded(NumberedEvent, frozen=True, kw_only=True, tag="pin-ended"):
    """That is over; what it kept is cached as before."""

    pin: int
    owner: str
    tokens: int
    age_s: float
    why: str


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
    tier: str = ""
    """Where they were removed from, ``need`` says for what; empty: they left the pool."""


class FloorBroken(NumberedEvent, frozen=True, kw_only=True, tag="floor-broken"):
    """Pages of a namespace's floor were evicted, as nothing else could be; told when that begins.

    ``namespace`` is that of the quota, which has ``left_pages`` of ``floor_pages`` now; ``session``
    needed the pages, for ``need`` (0: kvd itself or an operator).
    """

    namespace: str
    taken_pages: int
    left_pages: int
    floor_pages: int
    session: int
    need: str
