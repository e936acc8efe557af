"""Which objects lie in one tier: by namespace and key, and which of them goes next.

The tier is bounded by its number of objects, which are all of one size. Room is made before it is
taken: ``reserve`` names what must go, its caller orders that first, and the storage process obeys
in order; so what lies on disk never is more than the bound, whatever of it is known here.

The least recently used goes first, and of a prompt the last page: a page is of no use without those
before it. So each object knows the one before it, only what nothing follows may go, and what was
before it is as young as it was. A use is noted at the last page that was used, and nowhere else.

What is pinned goes after all else of its share, and so does what is before it. A pin is of the last
page that it keeps, there or not.

What was found on disk, or is left of a prompt of which a page was bad, is linked to nothing: it
goes by its age alone, until it is used again as a part of a prompt.

What must not live here: what is written and read (``demotion``, ``promotion``), bytes.

Invariant: n_objects = the sum over namespaces = the sum over shares.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Protocol

from mypy_extensions import mypyc_attr

from kvd.core.cache.quotas import QuotaShare, share_of
from kvd.core.tiers.removed import RemovedObjects, side_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvd.core.layout.quota import Quota

LastObject = tuple[int, bytes, str]
"""A use of an object, which may not be its last; its key and namespace."""

PINNED = 2**60
"""Beyond any use: what is added to that of what is pinned."""

HEAP_SLACK = 1024
"""Entries that are out of date, beside one for each object, before the heap is made anew."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TierObject:
    """One object that is there. ``before``: the key of the one before it, if that was there."""

    __slots__ = ("before", "followers", "used")

    def __init__(self, used: int) -> None:
        self.used = used
        """By the clock of the index: its last use, or that of what followed it; ``PINNED`` later
        for what is pinned."""
        self.before = b""
        self.followers = 0
        """Objects that are there and were linked to it."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ObjectShare(QuotaShare):
    """A share of a tier, with a heap of those of its objects that nothing follows."""

    __slots__ = ("last",)

    def __init__(self, quota: Quota | None) -> None:
        super().__init__(quota)
        self.last: list[LastObject] = []


class ObjectWatch(Protocol):
    """Whoever tells others of what lies in a tier."""

    def left(self, keys: Iterable[bytes]) -> None:
        """These are not there any more."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TierIndex:
    """The objects of one tier, as far as it has said so."""

    __slots__ = (
        "_by_namespace",
        "_by_quota",
        "_clock",
        "_pinned",
        "_share",
        "capacity",
        "n_objects",
        "removed",
        "reserved",
        "rest",
        "watch",
    )

    def __init__(self, capacity: int, quotas: Iterable[Quota] = ()) -> None:
        self.capacity = capacity
        """So many objects at most, those that are being written among them."""
        self.watch: ObjectWatch | None = None
        """Who is told what goes, if anybody."""
        self.n_objects = 0
        self.removed = RemovedObjects(capacity)
        self.reserved = 0
        """Of objects that were ordered and are not said to be there yet."""
        self._by_namespace: dict[str, dict[bytes, TierObject]] = {}
        self._clock = 0
        self._pinned: dict[tuple[str, bytes], int] = {}
        """How many pins end with that page."""
        self._by_quota: dict[str, ObjectShare] = {}
        self.rest = ObjectShare(None)
        self._share: dict[str, ObjectShare] = {}
        """By namespace, of those that have an object."""
        self.share_out(quotas)

    @property
    def shares(self) -> list[ObjectShare]:
        """Those of quotas, as they were configured, and the rest."""
        return [*self._by_quota.values(), self.rest]

    def share_out(self, quotas: Iterable[Quota]) -> None:
        """These are the quotas from now on; what came of those before is still known."""
        known = self._by_quota
        self._by_quota = {quota.namespace: ObjectShare(quota) for quota in quotas}
        for namespace, share in self._by_quota.items():
            share.come_after(known.get(namespace))
        self.rest = ObjectShare(None)
        self._share = {name: self.share_of(name) for name in self._by_namespace}
        for name, objects in self._by_namespace.items():
            self._share[name].n_pages += len(objects)
        for share in self.shares:
            share.last = self._unfollowed(share)
            heapify(share.last)

    @property
    def quotas(self) -> tuple[Quota, ...]:
        """Those of now."""
        return tuple([share.quota for share in self.shares if share.quota is not None])

    @property
    def has_quotas(self) -> bool:
        """Whether any namespace has one here."""
        return bool(self._by_quota)

    def share_of(self, namespace: str) -> ObjectShare:
        """Whose its objects are, there or not."""
        return share_of(namespace, self._by_quota, self.rest)

    def room_of(self, share: ObjectShare) -> int:
        """Objects that are there of a share in any case, if nobody else had less than a floor."""
        quotas = [other.quota for other in self._by_quota.values() if other is not share]
        room = self.capacity - sum([quota.floor_pages for quota in quotas if quota is not None])
        most = share.quota.ceiling_pages if share.quota is not None else None
        return max(1, room if most is None else min(room, most))

    def has(self, namespace: str, key: bytes) -> bool:
        """Whether that object is there."""
        objects = self._by_namespace.get(namespace)
        return objects is not None and key in objects

    def leading(self, namespace: str, keys: Sequence[bytes]) -> int:
        """How many of the first of ``keys`` are there."""
        objects = self._by_namespace.get(namespace)
        if objects is None:
            return 0
        for place, key in enumerate(keys):
            if key not in objects:
                return place
        return len(keys)

    def namespaces(self) -> list[str]:
        """Those that have an object."""
        return list(self._by_namespace)

    def objects_of(self, namespace: str) -> int:
        """How many it has."""
        return len(self._by_namespace.get(namespace, ()))

    # ---- what comes and is used --------------------------------------------------------------

    def add(self, namespace: str, keys: Sequence[bytes], before: bytes = b"") -> None:
        """These are there and were used now; they follow each other, the first one ``before``."""
        if not keys:
            return
        objects = self._by_namespace.get(namespace)
        if objects is None:
            objects = self._by_namespace[namespace] = {}
            self._share[namespace] = self.share_of(namespace)
        share = self._share[namespace]
        self._clock = used = self._clock + 1
        known = None
        for key in keys:
            known = objects.get(key)
            if known is None:
                known = objects[key] = TierObject(used)
                self.n_objects += 1
                share.n_pages += 1
            known.used = self._use(namespace, key)
            if before and known.before != before:
                above = objects.get(before)
                if above is not None:
                    known.before = before
                    above.followers += 1
            before = key
        if known is not None and not known.followers:
            self._push(share, (known.used, before, namespace))

    def found(self, namespace: str, keys: Iterable[bytes]) -> None:
        """These lie there since before, linked to nothing; the first was used longest ago."""
        for key in keys:
            self.add(namespace, (key,))

    def touch(self, namespace: str, key: bytes) -> None:
        """A prompt was used as far as this."""
        objects = self._by_namespace.get(namespace)
        known = objects.get(key) if objects is not None else None
        if known is not None:
            self._clock += 1
            known.used = self._use(namespace, key)

    def _use(self, namespace: str, key: bytes) -> int:
        """What a use of it now counts as."""
        pinned = self._pinned
        return self._clock + PINNED if pinned and (namespace, key) in pinned else self._clock

    # ---- what is pinned ----------------------------------------------------------------------

    def pin(self, namespace: str, key: bytes) -> None:
        """What ends with that page goes last, from now on and as often as it is pinned."""
        self._pinned[namespace, key] = self._pinned.get((namespace, key), 0) + 1
        self.touch(namespace, key)

    def unpin(self, namespace: str, key: bytes) -> None:
        """One pin of it is over; after the last one it is as what was used now."""
        n_pins = self._pinned.pop((namespace, key)) - 1
        if n_pins:
            self._pinned[namespace, key] = n_pins
            return
        self.touch(namespace, key)
        known = self._by_namespace.get(namespace, {}).get(key)
        if known is not None and not known.followers:
            # Its place in the heap is behind all others.
            self._push(self._share[namespace], (known.used, key, namespace))

    # ---- what goes ---------------------------------------------------------------------------

    def forget(self, namespace: str, keys: Iterable[bytes]) -> list[bytes]:
        """They are not there, or of no use; those that were."""
        objects = self._by_namespace.get(namespace)
        if objects is None:
            return []
        gone = [key for key in keys if key in objects]
        for key in gone:
            self._remove(namespace, objects, key)
        return gone

    def forget_namespace(self, namespace: str) -> int:
        """All of it; how many objects that were."""
        gone = self._by_namespace.pop(namespace, {})
        n_objects = len(gone)
        if self.watch is not None:
            self.watch.left(gone)
        self.n_objects -= n_objects
        if n_objects:
            self._share.pop(namespace).n_pages -= n_objects
        return n_objects

    def clear(self) -> None:
        """Nothing is known of what lies there, nor is anything being written."""
        for objects in self._by_namespace.values():
            if self.watch is not None:
                self.watch.left(objects)
        self._by_namespace = {}
        self.n_objects = self.reserved = 0
        self.share_out(self.quotas)

    def reserve(
        self, n_objects: int, needed_by: str | None = None, at_s: float = 0.0
    ) -> dict[str, list[bytes]]:
        """Keep room for so many that will be written; what goes for them, as ``shrink``.

        No more than ``capacity`` may be kept together; ``release`` gives it back.
        """
        self.reserved += n_objects
        return self.shrink(needed_by, at_s)

    def release(self, n_objects: int) -> None:
        """So many are written, and are added next, or never will be."""
        self.reserved -= n_objects

    def shrink(self, needed_by: str | None = None, at_s: float = 0.0) -> dict[str, list[bytes]]:
        """What is beyond the bound goes; by namespace, in the order of going.

        ``needed_by``: the namespace whose writes need the room, for ``removed``; None: what goes
        is not entered there.
        """
        gone: dict[str, list[bytes]] = {}
        if self.n_objects + self.reserved <= self.capacity:
            return gone
        side = "" if needed_by is None else side_of(needed_by, self.share_of(needed_by))
        shares = self.shares
        fronts: list[tuple[int, LastObject, int]] = []
        for number in range(len(shares)):
            self._put_front(fronts, shares, number)
        while fronts and self.n_objects + self.reserved > self.capacity:
            turn, (_, key, namespace), number = heappop(fronts)
            share = shares[number]
            reason = share.going(turn, 1)
            heappop(share.last)
            if needed_by is not None:
                hurt = side_of(namespace, share)
                self.removed.pushed_out(key, hurt, side, reason, at_s)
            self._remove(namespace, self._by_namespace[namespace], key)
            gone.setdefault(namespace, []).append(key)
            self._put_front(fronts, shares, number)
        return gone

    def _put_front(
        self, fronts: list[tuple[int, LastObject, int]], shares: list[ObjectShare], number: int
    ) -> None:
        """What goes next of that share, if it has anything, among that of the others."""
        share = shares[number]
        while share.n_pages:
            if not share.last:
                self._make_anew(share)
            used, key, namespace = share.last[0]
            objects = self._by_namespace.get(namespace)
            known = objects.get(key) if objects is not None else None
            if known is None or known.followers:
                # Gone, or followed since: nobody searched the heap for it then.
                heappop(share.last)
            elif known.used != used:
                heapreplace(share.last, (known.used, key, namespace))
            else:
                heappush(fronts, (share.turn(1), share.last[0], number))
                return

    def _remove(self, namespace: str, objects: dict[bytes, TierObject], key: bytes) -> None:
        known, share = objects.pop(key), self._share[namespace]
        if self.watch is not None:
            self.watch.left((key,))
        self.n_objects -= 1
        share.n_pages -= 1
        above = objects.get(known.before)
        # One that was bad and has come again does not know of all that follow it.
        if above is not None and above.followers:
            above.followers -= 1
            # What is left of a pinned prompt is not pinned.
            used = min(known.used, self._clock)
            above.used = max(above.used, used)
            if not above.followers:
                self._push(share, (above.used, known.before, namespace))
        if not objects:
            del self._by_namespace[namespace], self._share[namespace]

    def _push(self, share: ObjectShare, last: LastObject) -> None:
        if len(share.last) > 2 * share.n_pages + HEAP_SLACK:
            self._make_anew(share)
        heappush(share.last, last)

    def _make_anew(self, share: ObjectShare) -> None:
        """The heap, without what is out of date."""
        share.last = self._unfollowed(share)
        if not share.last:
            # Each is followed by another: no hashes make such a circle, but whoever wants room
            # must not wait for one.
            for namespace in self._namespaces_of(share):
                for known in self._by_namespace[namespace].values():
                    known.followers = 0
            share.last = self._unfollowed(share)
        heapify(share.last)

    def _unfollowed(self, share: ObjectShare) -> list[LastObject]:
        return [
            (known.used, key, namespace)
            for namespace in self._namespaces_of(share)
            for key, known in self._by_namespace[namespace].items()
            if not known.followers
        ]

    def _namespaces_of(self, share: ObjectShare) -> list[str]:
        return [namespace for namespace, one in self._share.items() if one is share]

    def counted(self) -> bool:
        """Whether all that is counted of shares is what it should be: for the audit."""
        found = dict.fromkeys(self.shares, 0)
        for namespace, objects in self._by_namespace.items():
            found[self.share_of(namespace)] += len(objects)
        n_objects = sum(found.values())
        return n_objects == self.n_objects and all(
            share.n_pages == n_pages for share, n_pages in found.items()
        )
