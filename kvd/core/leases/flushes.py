"""Flushes of namespaces, as far as a tier may still have what was there before them.

Nobody can be sure that all of it is removed: the storage process may be dead, the disk read-only,
and a store that nodes share is not this node's. So a flush does not hold by what is removed.

- Each flush has a *stamp* that no other flush has, of this daemon or of one before. What is written
  to a tier of this node alone bears the stamp of the last flush of its namespace (``tiers.tier``),
  and what bears another one is of before: it is not found, and removed where it is met.
- Of a store that nodes share nothing of the namespace is asked for until what was there then has
  gone by its age (``tiers.probes``).

Like an epoch a flush counts from its step, and is answered when it is on disk (``kept_answers``).
What was written behind one that the daemon did not live to keep bears a stamp that the next one
does not know: it goes, though it need not, and that costs hits.

The flush of a base takes the place of those of its members, and one of everything that of all. So
the last flush of a namespace is that of its name, or else of its base, or else of everything.

What must not live here: what lies in a tier (``tiers``), files.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec
from mypy_extensions import mypyc_attr

from kvd.core.cache.namespaces import names_of
from kvd.core.effects import KeptFlush

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvd.core.settings import TierSettings

MOST_FLUSHES: Final = 4096
"""Names that are known; one more is a flush of everything that lies in a tier."""

_STAMP_BYTES: Final = 8


class FlushStamp(msgspec.Struct, frozen=True):
    """One flush: what nothing of before bears, and when it was."""

    stamp: str
    at_s: float


def last_flush(
    flushes: Mapping[str | None, FlushStamp], namespace: str | None
) -> FlushStamp | None:
    """The last one that is about a namespace, by its name or key; None: about everything."""
    names = (None,) if namespace is None else (*names_of(namespace), None)
    for name in names:
        found = flushes.get(name)
        if found is not None:
            return found
    return None


@mypyc_attr(allow_interpreted_subclasses=True)
class Flushes:
    """The last flush of each name."""

    __slots__ = ("_count", "_keep_s", "_life", "by_name")

    def __init__(self, life: str, tiers: Iterable[TierSettings]) -> None:
        """``life``: a name of this process that no other one has."""
        self.by_name: dict[str | None, FlushStamp] = {}
        """None: of everything."""
        self._life = life
        self._count = 0
        # What a node's own disk has of before may lie there for ever, as far as anybody knows.
        self._keep_s = max(
            [tier.lifetime_s if tier.is_shared and tier.lifetime_s else math.inf for tier in tiers],
            default=0.0,
        )

    def has_room(self, namespace: str | None, now_s: float) -> bool:
        """Whether one more can be told from others."""
        by_name = self.by_name
        if namespace not in by_name and len(by_name) >= MOST_FLUSHES:
            # No sooner: a disk that this daemon has not may be there for the next one.
            for name in [name for name, of in by_name.items() if now_s - of.at_s >= self._keep_s]:
                del by_name[name]
        return namespace in by_name or len(by_name) < MOST_FLUSHES

    def note(self, namespace: str | None, now_s: float) -> None:
        """This one and its members were flushed, or everything."""
        by_name = self.by_name
        for name in list(by_name):
            if namespace is None or (name is not None and namespace in names_of(name)):
                del by_name[name]
        self._count += 1
        told = f"{self._life} {self._count}".encode()
        stamp = blake2b(told, digest_size=_STAMP_BYTES).hexdigest()
        by_name[namespace] = FlushStamp(stamp, now_s)

    def last(self, namespace: str) -> FlushStamp | None:
        """The last one that was about it, given by its name or key."""
        return last_flush(self.by_name, namespace) if self.by_name else None

    def stamp_of(self, namespace: str) -> str:
        """What its objects bear, in a tier of this node alone; empty: it was never flushed."""
        found = self.last(namespace)
        return found.stamp if found is not None else ""

    # ---- over restarts -----------------------------------------------------------------------

    def found(self, flushes: Iterable[KeptFlush], now_s: float) -> None:
        """What the daemon before has kept; before anything else happens."""
        for kept in flushes:
            self.by_name[kept.namespace] = FlushStamp(kept.stamp, now_s - kept.ago_s)

    def to_keep(self, now_s: float) -> tuple[KeptFlush, ...]:
        """All of them, for the next daemon."""
        return tuple(
            [
                KeptFlush(namespace=name, stamp=of.stamp, ago_s=now_s - of.at_s)
                for name, of in self.by_name.items()
            ]
        )
