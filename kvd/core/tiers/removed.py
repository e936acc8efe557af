"""What was removed from a tier lately, for whose writes, and who asked for it again.

A table has the last objects by their keys, each with its *removal*: objects of one side that went
for one reason, for the writes of one side, within a second. A side is a namespace with a quota of
its own there, or else the base of a namespace. A prompt that goes on with an object of the table
has been *hurt* by its removal: that is computed anew.

Who is hurt by whom is counted by pairs of sides. A pair *thrashes* where requests of one, and not
just a few, miss a good part of what the writes of the other pushed out, each soon after it went:
a tier of twice the size would have had it. A disk fills in minutes or days, so soon is counted in
what was removed since, and in time only for what is asked for a day later.

All of it is bounded: of what is beyond the table, or of removals before the last ones, nothing is
known.

What must not live here: what goes (``index``), names of engines and words (``inspect.removed``).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from struct import Struct
from typing import TYPE_CHECKING, Final

import msgspec
from mypy_extensions import mypyc_attr

from kvd.core.cache.evictions import MOST_MISSED, MOST_THRASHING, NO_QUOTA
from kvd.core.cache.flushed_before import FlushedBefore
from kvd.core.cache.namespaces import base_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.core.cache.left_prefix import QuotaReason
    from kvd.core.cache.quotas import QuotaShare

MOST_REMOVED: Final = 2**15
"""Objects of which it is known with which removal they went: half a MiB."""

MOST_REMOVALS: Final = 4096

_SLOT: Final = MOST_REMOVED - 1
_ROW: Final = Struct("<QQ")
"""The first bytes of a key; the number of its removal, doubled, and 1 if it was asked for since."""
_DIGEST_BYTES: Final = 8

TOGETHER_S: Final = 1.0
"""Objects that went within this are one removal."""

TOGETHER_PART: Final = 4
"""And before one in so many of what the tier holds went: a small one turns over within that."""

SOON_AGAIN_S: Final = 3600.0
"""What is asked for later than this is no sign of thrash, however little was removed meanwhile."""

QUIET_S: Final = 600.0
"""A pair of which nobody was hurt for so long thrashes no more."""

THRASH_REQUESTS: Final = 4
"""So many were hurt at least."""

THRASH_PART: Final = 4
"""One in so many of the objects that went is asked for again soon; half of that goes on with it."""

MOST_DROPPED: Final = 64
"""Removals of a whole namespace, and of what was found at a start, that are remembered."""

OLDEST: Final = "oldest"
BAD: Final = "bad"
BEYOND: Final = "beyond"
"""More than the tier holds lay there when its process began."""
FLUSH: Final = "flush"
EPOCH: Final = "epoch"
FOREIGN: Final = "foreign"
"""What lay there at the beginning and is no object of this pool: of another layout, cut short."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Removal:
    """Objects of ``hurt`` that went together, for writes of ``needed_by`` where that is the reason.

    ``reason`` is of the first that went out of its turn.
    """

    __slots__ = (
        *("at_s", "first", "hurt", "last", "n_objects", "needed_by", "number", "reason", "why"),
    )

    def __init__(self, number: int, why: str, hurt: str, needed_by: str, at_s: float) -> None:
        self.number = number
        self.why = why
        self.hurt = hurt
        self.needed_by = needed_by
        self.at_s = at_s
        self.reason: QuotaReason = NO_QUOTA
        self.n_objects = 0
        self.first = self.last = 0
        """Of all objects that were removed from the tier, which its first and last one were."""


class DroppedObjects(msgspec.Struct, frozen=True, gc=False):
    """All objects of one namespace went, or what was found and is none; ``detail`` of the first."""

    why: str
    namespace: str
    """As the tree has it."""
    n_objects: int
    at_s: float
    detail: str = ""


class MissedObjects(msgspec.Struct, frozen=True):
    """A request of ``session`` would have had these, from ``start_tokens`` of its prompt on."""

    removal: Removal
    """Of the first of them."""
    namespace: str
    """As the tree has it."""
    session: int
    start_tokens: int
    n_objects: int
    at_s: float


@mypyc_attr(allow_interpreted_subclasses=True)
class TierPair:
    """Two sides, which may be one: writes of ``needed_by`` push out what is of ``hurt``."""

    __slots__ = (
        "hurt",
        "is_thrashing",
        "last",
        "n_missed",
        "n_objects",
        "n_removed",
        "needed_by",
        "removal",
        "rounds",
        "since_s",
    )

    def __init__(self, needed_by: str, hurt: str, removal: Removal) -> None:
        self.needed_by = needed_by
        self.hurt = hurt
        self.removal = removal
        """The last one."""
        self.n_removed = 0
        self.n_missed = 0
        """Of these so many were asked for again soon; halved together as the tier turns over."""
        self.rounds = 0
        """Requests that were hurt since ``since_s``, and how many objects they missed."""
        self.n_objects = 0
        self.since_s = 0.0
        self.last: MissedObjects | None = None
        self.is_thrashing = False

    def missed(self, missed: MissedObjects) -> bool:
        """A request was hurt; whether the pair begins to thrash by that."""
        before, at_s = self.last, missed.at_s
        if before is None or at_s - before.at_s > QUIET_S:
            self.rounds = self.n_objects = 0
            self.since_s, self.is_thrashing = at_s, False
        self.last = missed
        self.rounds += 1
        self.n_objects += missed.n_objects
        self.n_missed += missed.n_objects
        was, part = self.is_thrashing, 2 * THRASH_PART if self.is_thrashing else THRASH_PART
        self.is_thrashing = (
            self.rounds >= THRASH_REQUESTS and self.n_missed * part >= self.n_removed
        )
        return self.is_thrashing and not was


@mypyc_attr(allow_interpreted_subclasses=True)
class RemovedObjects:
    """The record of one tier, which holds ``capacity`` objects."""

    __slots__ = (
        "_rows",
        "capacity",
        "dropped",
        "flushed",
        "missed",
        "n_missed",
        "n_missed_soon",
        "n_removed",
        "pairs",
        "removals",
    )

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._rows = bytearray()
        """By the low bits of the digest, the newest in its place; made with the first."""
        self.flushed = FlushedBefore()
        """Of removals."""
        self.removals: OrderedDict[int, Removal] = OrderedDict()
        """By number; those that began last at the end."""
        self.pairs: OrderedDict[tuple[str, str], TierPair] = OrderedDict()
        """By whose writes and who lost by them; the one that did so last at the end."""
        self.dropped: deque[DroppedObjects] = deque(maxlen=MOST_DROPPED)
        self.missed: deque[MissedObjects] = deque(maxlen=MOST_MISSED)
        self.n_removed = 0
        """Objects, one by one."""
        self.n_missed = 0
        """Objects that requests asked for after they had been removed, once each."""
        self.n_missed_soon = 0

    # ---- what goes ---------------------------------------------------------------------------

    def pushed_out(
        self, key: bytes, hurt: str, needed_by: str, reason: QuotaReason | None, at_s: float
    ) -> None:
        """An object went for the bound, for writes of that side; why, where out of its turn."""
        pair = self.pairs.pop((needed_by, hurt), None)
        removal = pair.removal if pair is not None else None
        given = reason if reason is not None else NO_QUOTA
        if (
            removal is None
            or at_s - removal.at_s > TOGETHER_S
            or (self.n_removed - removal.first) * TOGETHER_PART >= self.capacity
            # It goes on no more.
            or removal.number <= self.flushed.last
            or (removal.reason.beyond_pages > 0) is not (given.beyond_pages > 0)
        ):
            removal = self._begin(OLDEST, hurt, needed_by, at_s)
            removal.reason = given
        if pair is None:
            pair = TierPair(needed_by, hurt, removal)
        self.pairs[needed_by, hurt] = pair
        if len(self.pairs) > MOST_THRASHING:
            self.pairs.popitem(last=False)
        pair.removal = removal
        pair.n_removed += 1
        if pair.n_removed > self.capacity:
            pair.n_removed //= 2
            pair.n_missed //= 2
        self._enter(removal, key)

    def went(self, why: str, keys: Sequence[bytes], hurt: str, at_s: float) -> None:
        """These went for another reason, which nobody's writes are."""
        if keys:
            removal = self._begin(why, hurt, "", at_s)
            for key in keys:
                self._enter(removal, key)

    def went_as_a_whole(
        self, why: str, namespace: str, n_objects: int, at_s: float, detail: str = ""
    ) -> None:
        """All objects of a namespace, or so many that were none."""
        if n_objects:
            self.dropped.append(
                DroppedObjects(
                    why=why, namespace=namespace, n_objects=n_objects, at_s=at_s, detail=detail
                )
            )

    def note_flush(self, namespace: str | None) -> None:
        """Of this one, or of all, nobody wants what is there, nor what has gone before."""
        self.flushed.note(namespace, next(reversed(self.removals), 0))

    def _begin(self, why: str, hurt: str, needed_by: str, at_s: float) -> Removal:
        number = next(reversed(self.removals)) + 1 if self.removals else 1
        removal = self.removals[number] = Removal(number, why, hurt, needed_by, at_s)
        removal.first = self.n_removed + 1
        if len(self.removals) > MOST_REMOVALS:
            self.removals.popitem(last=False)
        return removal

    def _enter(self, removal: Removal, key: bytes) -> None:
        if not self._rows:
            self._rows = bytearray(_ROW.size * MOST_REMOVED)
        self.n_removed = removal.last = self.n_removed + 1
        removal.n_objects += 1
        digest = int.from_bytes(key[:_DIGEST_BYTES], "little")
        _ROW.pack_into(self._rows, (digest & _SLOT) * _ROW.size, digest, 2 * removal.number)

    # ---- what is asked for -------------------------------------------------------------------

    def has_hurt(self, side: str) -> bool:
        """Whether anything of that side was pushed out lately."""
        return any(hurt == side for _, hurt in self.pairs)

    def find(self, key: bytes) -> Removal | None:
        """With which removal that object went last, as far as that is known."""
        return self.removals.get(self._row(key)[0] // 2)

    def _row(self, key: bytes) -> tuple[int, int]:
        """What its row says, 0 for none; and where that is."""
        if not self._rows:
            return 0, 0
        digest = int.from_bytes(key[:_DIGEST_BYTES], "little")
        at = (digest & _SLOT) * _ROW.size
        known, told = _ROW.unpack_from(self._rows, at)
        return (told if known == digest else 0), at

    def ask(self, key: bytes, namespace: str) -> Removal | None:
        """A request misses it: with which removal it went. None: unknown, or asked for before."""
        told, at = self._row(key)
        removal = self.removals.get(told // 2)
        if removal is None or told % 2:
            return None
        # What would not be there in any case is nobody's loss.
        if self.flushed.has(namespace, removal.number):
            return None
        _ROW.pack_into(self._rows, at, int.from_bytes(key[:_DIGEST_BYTES], "little"), told + 1)
        return removal

    def hurt(self, missed: MissedObjects) -> TierPair | None:
        """A request missed these, each of which was asked for; the pair that begins to thrash."""
        self.missed.append(missed)
        self.n_missed += missed.n_objects
        removal = missed.removal
        pair = self.pairs.get((removal.needed_by, removal.hurt))
        is_soon = (
            missed.at_s - removal.at_s <= SOON_AGAIN_S
            and self.n_removed - removal.last <= self.capacity
        )
        if removal.why != OLDEST or not is_soon:
            return None
        self.n_missed_soon += missed.n_objects
        return pair if pair is not None and pair.missed(missed) else None

    def thrashing_at(self, now_s: float) -> list[TierPair]:
        """The pairs that do, those that pushed something out last first."""
        return [
            pair
            for pair in reversed(self.pairs.values())
            if pair.is_thrashing and pair.last is not None and now_s - pair.last.at_s <= QUIET_S
        ]


def side_of(namespace: str, share: QuotaShare) -> str:
    """Whose the objects of a namespace are, as the tree has it: of its quota's, or its base's."""
    return share.quota.namespace if share.quota is not None else base_of(namespace)
