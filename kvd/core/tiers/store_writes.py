"""What this node has written to a store that nodes share: how much of late, and what of pins when.

Nobody lists a store, and kvd removes nothing there: an object goes when it is as old as the store
keeps it, its *lifetime*, counted from when it was last written. So this is known of it:

- By namespace with a quota, how many objects this node has written within the last lifetime. No
  more of them lie there. At its ceiling nothing more of the namespace is written; what others have
  written, and what this node had before its daemon began, nobody counts.
- Of each page that is pinned, when this node wrote it last. What others wrote may be as old as it
  gets, so it counts as not there. What is there is written again before its time is over
  (``RENEW``), and takes the place of what it was: that needs no room.

What is counted is counted by ``SLOTS`` of the lifetime, and goes with the last of its slot.

What must not live here: what is written, and from where (``demotion``, ``pins``).

Invariants: n_pages of a share = the sum over its slots; none of these was over for longer than the
lifetime at the last look.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from kvd.core.cache.quotas import QuotaShare, share_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvd.core.layout.quota import Quota
    from kvd.core.outbox import Outbox

SLOTS: Final = 64
"""Of a lifetime."""

RENEW: Final = 0.75
"""Of the lifetime: what is pinned is written again when it is as old."""

UNLIMITED: Final = 2**60
"""The room of what has no quota."""


@mypyc_attr(allow_interpreted_subclasses=True)
class WrittenShare(QuotaShare):
    """What was written of one quota within the last lifetime, or of the rest.

    ``over_pages`` are those that left the pool and were not written, as it was at its ceiling.
    """

    __slots__ = ("moving", "slots")

    def __init__(self, quota: Quota | None) -> None:
        super().__init__(quota)
        self.moving = 0
        """Ordered, and not said to be there yet."""
        self.slots: deque[list[int]] = deque()
        """The number of each slot in which any were written, and how many; the oldest first."""

    @property
    def room(self) -> int:
        """So many more may be ordered."""
        most = self.quota.ceiling_pages if self.quota is not None else None
        return UNLIMITED if most is None else most - self.n_pages - self.moving

    def add(self, slot: int, n_objects: int) -> None:
        """So many were written now."""
        if n_objects:
            if not self.slots or self.slots[-1][0] != slot:
                self.slots.append([slot, 0])
            self.slots[-1][1] += n_objects
            self.n_pages += n_objects

    def take_back(self, slot: int) -> None:
        """One of that slot is written anew, and is in the place of what it was."""
        for entry in self.slots:
            if entry[0] == slot and entry[1]:
                entry[1] -= 1
                self.n_pages -= 1
                return

    def forget(self, before_slot: int) -> bool:
        """What is of earlier slots is gone; whether anything was."""
        slots, n_pages = self.slots, self.n_pages
        while slots and slots[0][0] < before_slot:
            self.n_pages -= slots.popleft()[1]
        return self.n_pages < n_pages


@mypyc_attr(allow_interpreted_subclasses=True)
class PinnedObject:
    """A page that is pinned: by how many pins, and when this node wrote it; less than 0: never."""

    __slots__ = ("at_s", "n_pins", "share")

    def __init__(self) -> None:
        self.n_pins = 0
        self.at_s = -1.0
        self.share: WrittenShare | None = None
        """By which that was counted."""


@mypyc_attr(allow_interpreted_subclasses=True)
class StoreWrites:
    """What one node has written to one store."""

    __slots__ = ("_by_quota", "_out", "_pinned", "lifetime_s", "lost", "rest")

    def __init__(self, lifetime_s: float, quotas: Iterable[Quota], out: Outbox) -> None:
        self.lifetime_s = lifetime_s
        """0: nothing there goes by its age, and what is counted was written since the start."""
        self.lost = 0
        """Grows when a page that is pinned is not there any more, as far as is known."""
        self._out = out
        self._pinned: dict[bytes, PinnedObject] = {}
        self._by_quota: dict[str, WrittenShare] = {}
        self.rest = WrittenShare(None)
        self.share_out(quotas)

    # ---- quotas ------------------------------------------------------------------------------

    @property
    def shares(self) -> list[WrittenShare]:
        """Those of quotas, as they were configured, and the rest."""
        return [*self._by_quota.values(), self.rest]

    @property
    def has_quotas(self) -> bool:
        """Whether any namespace has one here."""
        return bool(self._by_quota)

    def share_out(self, quotas: Iterable[Quota]) -> None:
        """These are the quotas from now on; a namespace that had none is counted from now on."""
        known = self._by_quota
        self._by_quota = {}
        for quota in quotas:
            share = known.get(quota.namespace) or WrittenShare(quota)
            share.quota = quota
            self._by_quota[quota.namespace] = share

    def share_of(self, namespace: str) -> WrittenShare:
        """Whose its objects are."""
        return share_of(namespace, self._by_quota, self.rest)

    def room_of(self, share: QuotaShare) -> int:
        """Objects that may lie there of a share."""
        most = share.quota.ceiling_pages if share.quota is not None else None
        return UNLIMITED if most is None else most

    def is_bounded(self, namespace: str) -> bool:
        """Whether there is a bound for it."""
        return self.has_quotas and self.share_of(namespace).room < UNLIMITED

    def is_full(self, namespace: str) -> bool:
        """Whether nothing that is not there may be written of it."""
        return self.has_quotas and self.share_of(namespace).room <= 0

    def allowed(self, namespace: str, keys: Sequence[bytes]) -> int:
        """How many of the first of these may be written now."""
        if not self.has_quotas:
            return len(keys)
        share = self.share_of(namespace)
        room = share.room
        for number, key in enumerate(keys):
            if self._counted(key, share) is None:
                if room <= 0:
                    return number
                room -= 1
        return len(keys)

    def kept_out(self, namespace: str, n_pages: int) -> bool:
        """So many pages leave the pool unwritten: whether that is for a ceiling; counts them."""
        if not self.is_full(namespace):
            return False
        self.share_of(namespace).over_pages += n_pages
        return True

    def look(self) -> bool:
        """Forget what was written longer ago than that; whether there is more room now."""
        if not self.lifetime_s:
            return False
        before = self._slot(self._out.at_s - self.lifetime_s)
        # A list: each of them forgets, whatever the one before it says.
        return True in [share.forget(before) for share in self.shares]

    def room_in_s(self, share: WrittenShare) -> float:
        """How long until the oldest that is counted of it is gone; 0 where none goes by age."""
        if not share.slots or not self.lifetime_s:
            return 0.0
        ends_s = (share.slots[0][0] + 1) * self.lifetime_s / SLOTS + self.lifetime_s
        return max(0.0, ends_s - self._out.at_s)

    def _slot(self, at_s: float) -> int:
        return math.floor(at_s * SLOTS / self.lifetime_s) if self.lifetime_s else 0

    # ---- what is written ---------------------------------------------------------------------

    def ordered(self, namespace: str, n_objects: int) -> WrittenShare:
        """So many are on their way; by what they are counted."""
        share = self.share_of(namespace)
        share.moving += n_objects
        return share

    def written(self, share: WrittenShare, n_ordered: int, keys: Sequence[bytes]) -> None:
        """An order of so many is over, and these are there."""
        now_s = self._out.at_s
        share.moving -= n_ordered
        for key in keys:
            counted = self._counted(key, share)
            if counted is not None:
                share.take_back(self._slot(counted.at_s))
            pinned = self._pinned.get(key)
            if pinned is not None:
                pinned.at_s, pinned.share = now_s, share
        share.add(self._slot(now_s), len(keys))

    def cut(self, share: WrittenShare, n_ordered: int) -> None:
        """The process that had an order is gone: what it wrote may be there, and counts."""
        share.moving -= n_ordered
        share.add(self._slot(self._out.at_s), n_ordered)

    def _counted(self, key: bytes, share: WrittenShare) -> PinnedObject | None:
        """What is known of a page that is there and pinned, if that share counts it."""
        pinned = self._pinned.get(key)
        return (
            pinned if pinned is not None and pinned.share is share and self.is_there(key) else None
        )

    # ---- what is pinned ----------------------------------------------------------------------

    def pin(self, keys: Iterable[bytes]) -> None:
        """These are pinned from now on, once more."""
        for key in keys:
            known = self._pinned.get(key)
            if known is None:
                known = self._pinned[key] = PinnedObject()
            known.n_pins += 1

    def unpin(self, keys: Iterable[bytes]) -> None:
        """One pin of these is over."""
        for key in keys:
            known = self._pinned[key]
            known.n_pins -= 1
            if not known.n_pins:
                del self._pinned[key]

    def forget(self, keys: Iterable[bytes]) -> None:
        """These are not there, or must not be found."""
        for key in keys:
            known = self._pinned.get(key)
            if known is not None and known.at_s >= 0:
                known.at_s = -1.0
                self.lost += 1

    def is_there(self, key: bytes) -> bool:
        """Whether it is pinned, and lies there as far as this node knows."""
        return self.until_s(key) > self._out.at_s

    def until_s(self, key: bytes) -> float:
        """Until when a page that is pinned lies there."""
        known = self._pinned.get(key)
        if known is None or known.at_s < 0:
            return 0.0
        return known.at_s + self.lifetime_s if self.lifetime_s else math.inf

    def is_due(self, key: bytes) -> bool:
        """Whether it is pinned, and is to be written now."""
        known = self._pinned.get(key)
        if known is None:
            return False
        return known.at_s < 0 or self._out.at_s >= self.due_s(self.until_s(key))

    def due_s(self, until_s: float) -> float:
        """When what lies there until then is written again."""
        return until_s - (1 - RENEW) * self.lifetime_s

    def are_counted(self, moving: Sequence[tuple[WrittenShare | None, int]]) -> bool:
        """Whether all that is counted is what it should be, beside these orders: for the audit."""
        found = dict.fromkeys(self.shares, 0)
        for share, n_objects in moving:
            if share in found:
                found[share] += n_objects
        return all(
            share.moving == n_moving
            and share.n_pages == sum([n_objects for _, n_objects in share.slots])
            for share, n_moving in found.items()
        )
