"""Which objects lie in one tier: by namespace and key, and which of them goes next.

The tier is bounded by its number of objects, which are all of one size. Room is made before it is
taken: ``reserve`` names what must go, its caller orders that first, and the storage process obeys
in order; so what lies on disk never is more than the bound, whatever of it is known here.

The least recently used goes first, and of a prompt the last page: a page is of no use without those
before it. So each object knows the one before it, only what nothing follows may go, and what was
before it is as young as it was. A use is noted at the last page that was used, and nowhere else.

What was found on disk, or is left of a prompt of which a page was bad, is linked to nothing: it
goes by its age alone, until it is used again as a part of a prompt.

What must not live here: what is written and read (``demotion``, ``promotion``), bytes.

Invariant: n_objects = the sum over namespaces.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

HEAP_SLACK = 1024
"""Entries that are out of date, beside one for each object, before the heap is made anew."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TierObject:
    """One object that is there. ``before``: the key of the one before it, if that was there."""

    __slots__ = ("before", "followers", "used")

    def __init__(self, used: int) -> None:
        self.used = used
        """By the clock of the index: its last use, or that of what followed it."""
        self.before = b""
        self.followers = 0
        """Objects that are there and were linked to it."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TierIndex:
    """The objects of one tier, as far as it has said so."""

    __slots__ = ("_by_namespace", "_clock", "_last", "capacity", "n_objects", "reserved")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """So many objects at most, those that are being written among them."""
        self.n_objects = 0
        self.reserved = 0
        """Of objects that were ordered and are not said to be there yet."""
        self._by_namespace: dict[str, dict[bytes, TierObject]] = {}
        self._clock = 0
        self._last: list[tuple[int, bytes, str]] = []
        """A heap of those that nothing follows, each by a use of it that may not be the last."""

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
        objects = self._by_namespace.setdefault(namespace, {})
        self._clock = used = self._clock + 1
        known = None
        for key in keys:
            known = objects.get(key)
            if known is None:
                known = objects[key] = TierObject(used)
                self.n_objects += 1
            known.used = used
            if before and known.before != before:
                above = objects.get(before)
                if above is not None:
                    known.before = before
                    above.followers += 1
            before = key
        if known is not None and not known.followers:
            self._push(used, before, namespace)

    def found(self, namespace: str, keys: Iterable[bytes]) -> None:
        """These lie there since before, linked to nothing; the first was used longest ago."""
        for key in keys:
            self.add(namespace, (key,))

    def touch(self, namespace: str, key: bytes) -> None:
        """A prompt was used as far as this."""
        objects = self._by_namespace.get(namespace)
        known = objects.get(key) if objects is not None else None
        if known is not None:
            self._clock = known.used = self._clock + 1

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
        n_objects = len(self._by_namespace.pop(namespace, ()))
        self.n_objects -= n_objects
        return n_objects

    def clear(self) -> None:
        """Nothing is known of what lies there, nor is anything being written."""
        self._by_namespace = {}
        self._last = []
        self.n_objects = self.reserved = 0

    def reserve(self, n_objects: int) -> dict[str, list[bytes]]:
        """Keep room for so many that will be written; what goes for them, by namespace.

        No more than ``capacity`` may be kept together; ``release`` gives it back.
        """
        self.reserved += n_objects
        return self.shrink()

    def release(self, n_objects: int) -> None:
        """So many are written, and are added next, or never will be."""
        self.reserved -= n_objects

    def shrink(self) -> dict[str, list[bytes]]:
        """What is beyond the bound goes; by namespace, in the order of going."""
        gone: dict[str, list[bytes]] = {}
        while self.n_objects and self.n_objects + self.reserved > self.capacity:
            if not self._last:
                self._make_anew()
            used, key, namespace = self._last[0]
            objects = self._by_namespace.get(namespace)
            known = objects.get(key) if objects is not None else None
            if known is None or objects is None or known.followers:
                # Gone, or followed since: nobody searched the heap for it then.
                heappop(self._last)
            elif known.used != used:
                heapreplace(self._last, (known.used, key, namespace))
            else:
                heappop(self._last)
                self._remove(namespace, objects, key)
                gone.setdefault(namespace, []).append(key)
        return gone

    def _remove(self, namespace: str, objects: dict[bytes, TierObject], key: bytes) -> None:
        known = objects.pop(key)
        self.n_objects -= 1
        above = objects.get(known.before)
        # One that was bad and has come again does not know of all that follow it.
        if above is not None and above.followers:
            above.followers -= 1
            above.used = max(above.used, known.used)
            if not above.followers:
                self._push(above.used, known.before, namespace)
        if not objects:
            del self._by_namespace[namespace]

    def _push(self, used: int, key: bytes, namespace: str) -> None:
        if len(self._last) > 2 * self.n_objects + HEAP_SLACK:
            self._make_anew()
        heappush(self._last, (used, key, namespace))

    def _make_anew(self) -> None:
        """The heap, without what is out of date."""
        self._last = self._unfollowed()
        if not self._last:
            # Each is followed by another: no hashes make such a circle, but whoever wants room
            # must not wait for one.
            for objects in self._by_namespace.values():
                for known in objects.values():
                    known.followers = 0
            self._last = self._unfollowed()
        heapify(self._last)

    def _unfollowed(self) -> list[tuple[int, bytes, str]]:
        return [
            (known.used, key, namespace)
            for namespace, objects in self._by_namespace.items()
            for key, known in objects.items()
            if not known.followers
        ]
