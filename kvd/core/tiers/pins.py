"""Pins below the pool: what a pin keeps is written to the tiers of this node, and goes last there.

As soon as something is pinned it is written, whatever the policy of a tier says, but for
``never``: a pin gives way in the pool, and its pages may be gone before anybody could write them.
So a pin goes on in a tier that has all of it, until it ends; whatever is found there comes back as
all else does, and is pinned in the pool no more.

All pins together have half of a tier, or of the share of it that they are of: else what is written
for one would push out another, for ever. A tier that nodes share has the rules of its bucket.

What must not live here: who wants a pin, and when it ends (``leases.pins``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.cache.eviction import path_of
from kvd.core.settings import Demotion
from kvd.core.tiers.keys import KEY_BYTES, each_key
from kvd.core.tiers.moves import joined

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.tiers.demotion import Demoter
    from kvd.core.tiers.node_keys import KeysAtNodes
    from kvd.core.tiers.tier import StorageTier

FOR_PIN = " for a pin"
"""Behind the reason of the leases."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TierPin:
    """What one pin keeps: ``keys`` of all pages of it, in their order.

    ``lease`` has it in the pool, until it has given way.
    """

    __slots__ = ("keys", "lease", "namespace")

    def __init__(self, lease: LeaseRecord, namespace: str, keys: bytes) -> None:
        self.lease = lease
        self.namespace = namespace
        self.keys = keys

    @property
    def key(self) -> bytes:
        """Of the last page."""
        return self.keys[-KEY_BYTES:]

    @property
    def n_pages(self) -> int:
        """How many."""
        return len(self.keys) // KEY_BYTES


@mypyc_attr(allow_interpreted_subclasses=True)
class TierPins:
    """The pins of a node in its tiers, by number."""

    __slots__ = ("_demoters", "_keys", "by_id")

    def __init__(self, demoters: Sequence[Demoter], keys: KeysAtNodes) -> None:
        self._demoters = [one for one in demoters if not one.tier.settings.is_shared]
        self._keys = keys
        self.by_id: dict[int, TierPin] = {}

    def keep(self, pin: int, lease: LeaseRecord) -> None:
        """What that lease locks is pinned from now on."""
        anchor = lease.anchor
        if anchor is None or not self._demoters:
            return
        path = reversed([*path_of(anchor)])
        keys = joined([key for node in path for key in self._keys.of(node)])
        self.by_id[pin] = kept = TierPin(lease, lease.namespace, keys)
        for demoter in self._demoters:
            demoter.tier.index.pin(kept.namespace, kept.key)

    def end(self, pin: int) -> None:
        """It is over."""
        kept = self.by_id.pop(pin, None)
        if kept is not None:
            for demoter in self._demoters:
                demoter.tier.index.unpin(kept.namespace, kept.key)

    def link(self, tier: StorageTier) -> None:
        """What was found there is linked to nothing: what is pinned is a prompt as a whole."""
        for kept in self.by_id.values():
            keys = each_key(kept.keys)
            tier.index.add(kept.namespace, keys[: tier.index.leading(kept.namespace, keys)])

    def tier_of(self, pin: int) -> str:
        """The first tier that has all of it; empty if none has."""
        kept = self.by_id.get(pin)
        if kept is None:
            return ""
        tiers = [demoter.tier for demoter in self._demoters]
        has = [tier.name for tier in tiers if tier.index.has(kept.namespace, kept.key)]
        return has[0] if has else ""

    def is_lost(self, pin: int) -> bool:
        """Whether it is known that no tier has it."""
        # Of a tier without a process nobody knows what lies there.
        return not self.tier_of(pin) and all(one.tier.generation for one in self._demoters)

    def turn(self) -> None:
        """Order what is pinned and not there yet."""
        if not self.by_id:
            return
        for demoter in self._demoters:
            if demoter.tier.is_written and demoter.tier.settings.demotion is not Demotion.NEVER:
                self._write(demoter)

    def _write(self, demoter: Demoter) -> None:
        index, left = demoter.tier.index, demoter.room()
        under_way = {node_id for node_id, _ in demoter.under_way()}
        room = index.capacity // 2
        by_share = {share: index.room_of(share) // 2 for share in index.shares}
        for kept in self.by_id.values():
            share = index.share_of(kept.namespace)
            room -= kept.n_pages
            by_share[share] -= kept.n_pages
            anchor = kept.lease.anchor
            if anchor is None or index.has(kept.namespace, kept.key):
                continue
            if room < 0 or by_share[share] < 0:
                continue
            # The first page of the prompt first.
            for node in reversed([*path_of(anchor)]):
                if left <= 0:
                    return
                if node.id in under_way:
                    continue
                places = demoter.lacking(node, range(node.n_pages), left)
                if places:
                    demoter.begin(node, places, FOR_PIN)
                    under_way.add(node.id)
                    left -= len(places)
