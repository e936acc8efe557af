"""Pins below the pool: what a pin keeps is written to the tiers of this node, and goes last there.

As soon as something is pinned it is written, whatever the policy of a tier says, but for
``never``: a pin gives way in the pool, and its pages may be gone before anybody could write them.
So a pin goes on in a tier that has all of it, until it ends; whatever is found there comes back as
all else does, and is pinned in the pool no more.

A store that nodes share lets nothing stay for longer than its lifetime, whosever it is. So what is
pinned is written there again in time (``StoreWrites``): out of the pool, and what is not there any
more is read from a tier first, as what will be asked for is.

All pins together have half of a tier, or of the share of it that they are of: else what is written
for one would push out another, for ever.

What must not live here: who wants a pin, and when it ends (``leases.pins``).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from kvd.core.cache.eviction import path_of
from kvd.core.settings import Demotion
from kvd.core.tiers.keys import KEY_BYTES, each_key
from kvd.core.tiers.moves import joined
from kvd.wire.snapshot import PinKeptState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.outbox import Outbox
    from kvd.core.tiers.demotion import Demoter
    from kvd.core.tiers.index import ObjectShare
    from kvd.core.tiers.node_keys import KeysAtNodes
    from kvd.core.tiers.promotion import Promotions
    from kvd.core.tiers.store_writes import StoreWrites
    from kvd.core.tiers.tier import StorageTier
    from kvd.types import Tokens

FOR_PIN = " for a pin"
"""Behind the reason of the leases."""

ASK_S: Final = 1.0
ASKS: Final = 64
"""What is to be written again and is not in the pool is read after so long, or that part of a
lifetime, once more."""


@mypyc_attr(allow_interpreted_subclasses=True)
class PinInStore:
    """What is known of one pin in a store, between two looks at all of its pages."""

    __slots__ = ("ask_at_s", "due_s", "lost", "until_s", "upto")

    def __init__(self) -> None:
        self.until_s = 0.0
        """All of it lies there until then; 0: some page does not."""
        self.due_s = 0.0
        """When any of it is written again."""
        self.upto = 0
        """So many of its first pages are not due, as long as ``due_s`` has passed."""
        self.lost = 0
        """What was known when that was found out (``StoreWrites.lost``)."""
        self.ask_at_s = 0.0
        """When what is not in the pool is read once more."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TierPin:
    """What one pin keeps: ``keys`` of all pages of it, in their order.

    ``lease`` has it in the pool, until it has given way.
    """

    __slots__ = ("in_store", "keys", "lease", "namespace", "tokens")

    def __init__(self, lease: LeaseRecord, keys: bytes) -> None:
        self.lease = lease
        self.namespace = lease.namespace
        self.tokens: Tokens = lease.tokens
        self.keys = keys
        self.in_store: dict[str, PinInStore] = {}
        """By tier, of those that nodes share."""

    @property
    def key(self) -> bytes:
        """Of the last page."""
        return self.keys[-KEY_BYTES:]

    @property
    def n_pages(self) -> int:
        """How many."""
        return len(self.keys) // KEY_BYTES

    def key_at(self, place: int) -> bytes:
        """Of one page."""
        return self.keys[place * KEY_BYTES : (place + 1) * KEY_BYTES]


@mypyc_attr(allow_interpreted_subclasses=True)
class TierPins:
    """The pins of a node in its tiers, by number."""

    __slots__ = ("_demoters", "_keys", "_out", "_promotions", "by_id")

    def __init__(
        self,
        demoters: Sequence[Demoter],
        promotions: Promotions,
        keys: KeysAtNodes,
        out: Outbox,
    ) -> None:
        self._demoters = tuple(demoters)
        self._promotions = promotions
        self._keys = keys
        self._out = out
        self.by_id: dict[int, TierPin] = {}

    # ---- begin and end -----------------------------------------------------------------------

    def keep(self, pin: int, lease: LeaseRecord) -> None:
        """What that lease locks is pinned from now on."""
        anchor = lease.anchor
        if anchor is None or not self._demoters:
            return
        path = reversed([*path_of(anchor)])
        keys = joined([key for node in path for key in self._keys.of(node)])
        self.by_id[pin] = kept = TierPin(lease, keys)
        for demoter in self._demoters:
            tier = demoter.tier
            tier.index.pin(kept.namespace, kept.key)
            if tier.writes is not None:
                tier.writes.pin(each_key(keys))
                # Another pin may have it there: that is found out at the first look.
                kept.in_store[tier.name] = known = PinInStore()
                known.lost = -1

    def end(self, pin: int) -> None:
        """It is over."""
        kept = self.by_id.pop(pin, None)
        if kept is None:
            return
        for demoter in self._demoters:
            tier = demoter.tier
            tier.index.unpin(kept.namespace, kept.key)
            if tier.writes is not None:
                tier.writes.unpin(each_key(kept.keys))

    def link(self, tier: StorageTier) -> None:
        """What was found there is linked to nothing: what is pinned is a prompt as a whole."""
        for kept in self.by_id.values():
            self._link(kept, tier)

    def _link(self, kept: TierPin, tier: StorageTier) -> None:
        tier.index.add(kept.namespace, each_key(kept.keys)[: self._leading(kept, tier)])

    def namespaces(self) -> set[str]:
        """Those that have a pin."""
        return {kept.namespace for kept in self.by_id.values()}

    def forget_namespace(self, tier: StorageTier, namespace: str) -> None:
        """It was flushed: nothing of it is to be found there."""
        if tier.writes is not None:
            for kept in self.by_id.values():
                if kept.namespace == namespace:
                    tier.writes.forget(each_key(kept.keys))

    # ---- what is there -----------------------------------------------------------------------

    def alone_in(self, tier: StorageTier) -> dict[ObjectShare, int]:
        """Objects of pins that the pool has no more, by share."""
        found: dict[ObjectShare, int] = {}
        for kept in self.by_id.values():
            if kept.lease.anchor is None:
                share = tier.index.share_of(kept.namespace)
                found[share] = found.get(share, 0) + self._leading(kept, tier)
        return found

    def tier_of(self, pin: int) -> str:
        """The first tier that has all of it; empty if none has."""
        kept = self.by_id.get(pin)
        if kept is None:
            return ""
        tiers = [demoter.tier for demoter in self._demoters]
        has = [tier.name for tier in tiers if self._has_all(kept, tier)]
        return has[0] if has else ""

    def is_lost(self, pin: int) -> bool:
        """Whether it is known that no tier has it."""
        # Of a disk without a process nobody knows what lies there.
        return not self.tier_of(pin) and all(
            one.tier.generation or one.tier.writes is not None for one in self._demoters
        )

    def kept(self, pin: int) -> list[PinKeptState]:
        """What each tier has of it that has any."""
        kept = self.by_id.get(pin)
        if kept is None:
            return []
        found = [self._kept_in(kept, demoter.tier) for demoter in self._demoters]
        return [one for one in found if one.pages]

    def _kept_in(self, kept: TierPin, tier: StorageTier) -> PinKeptState:
        n_pages, known = self._leading(kept, tier), kept.in_store.get(tier.name)
        left_s = due_in_s = None
        if n_pages < kept.n_pages:
            words = f"tier {tier.name} has {n_pages} of {kept.n_pages} pages"
        else:
            words = f"tier {tier.name} has all of it"
            if known is not None and not math.isinf(known.until_s):
                left_s = known.until_s - self._out.at_s
                due_in_s = max(0.0, known.due_s - self._out.at_s)
                words += f" for {left_s:.0f} s, and it is written again in {due_in_s:.0f} s"
        return PinKeptState(
            tier=tier.name,
            pages=n_pages,
            of_pages=kept.n_pages,
            left_s=left_s,
            due_in_s=due_in_s,
            words=words,
        )

    def words(self, pin: int) -> str:
        """The same in words."""
        return "; ".join([kept.words for kept in self.kept(pin)])

    def _has_all(self, kept: TierPin, tier: StorageTier) -> bool:
        if tier.writes is None:
            return tier.index.has(kept.namespace, kept.key)
        return self._known(kept, tier.name, tier.writes).until_s > self._out.at_s

    def _leading(self, kept: TierPin, tier: StorageTier) -> int:
        """How many of its first pages are there."""
        keys, writes = each_key(kept.keys), tier.writes
        if writes is None:
            # The last one may be there, and one before it not.
            return tier.index.leading(kept.namespace, keys)
        if self._has_all(kept, tier):
            return kept.n_pages
        return next((at for at, key in enumerate(keys) if not writes.is_there(key)), len(keys))

    def _known(self, kept: TierPin, name: str, writes: StoreWrites) -> PinInStore:
        """The same of a store, as it is now."""
        known = kept.in_store[name]
        if known.lost != writes.lost:
            known.lost, known.upto = writes.lost, 0
            self._note(kept, known, writes)
        return known

    def _note(self, kept: TierPin, known: PinInStore, writes: StoreWrites) -> None:
        known.until_s = min([writes.until_s(key) for key in each_key(kept.keys)])
        known.due_s = writes.due_s(known.until_s) if known.until_s else 0.0

    # ---- what is written ---------------------------------------------------------------------

    def turn(self) -> None:
        """Order what is pinned and not there yet, or not for long."""
        if not self.by_id:
            return
        for demoter in self._demoters:
            tier = demoter.tier
            if not tier.is_written or tier.settings.demotion is Demotion.NEVER:
                continue
            if tier.writes is None:
                self._write(demoter)
            else:
                self._renew(demoter, tier.writes)

    def _that_fit(self, demoter: Demoter) -> Iterator[TierPin]:
        """Those for which there is room in their half of a tier, and of their share of it."""
        index, writes = demoter.tier.index, demoter.tier.writes
        room, by_share = index.capacity // 2, demoter.tier.room_by_share()
        by_share = {share: n_objects // 2 for share, n_objects in by_share.items()}
        for kept in self.by_id.values():
            share = (writes or index).share_of(kept.namespace)
            room -= kept.n_pages
            by_share[share] -= kept.n_pages
            if room >= 0 and by_share[share] >= 0:
                yield kept

    def _write(self, demoter: Demoter) -> None:
        index, left = demoter.tier.index, demoter.room()
        under_way = {node_id for node_id, _ in demoter.under_way()}
        for kept in self._that_fit(demoter):
            anchor = kept.lease.anchor
            if anchor is None or index.has(kept.namespace, kept.key):
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

    def _renew(self, demoter: Demoter, writes: StoreWrites) -> None:
        left, now_s = demoter.room(), self._out.at_s
        if left <= 0:
            return
        under_way = {node_id for node_id, _ in demoter.under_way()}
        for kept in self._that_fit(demoter):
            known = self._known(kept, demoter.tier.name, writes)
            if now_s < known.due_s:
                continue
            while known.upto < kept.n_pages and not writes.is_due(kept.key_at(known.upto)):
                known.upto += 1
            if known.upto == kept.n_pages:
                self._note(kept, known, writes)
                known.upto = 0
                continue
            if left <= 0:
                return
            left -= self._renew_from_pool(kept, demoter, writes, under_way, left)

    def _renew_from_pool(
        self, kept: TierPin, demoter: Demoter, writes: StoreWrites, under_way: set[int], left: int
    ) -> int:
        """Order up to ``left`` of its pages, and have read what is not in the pool; how many."""
        n_ordered = n_pages = 0
        fresh = kept.in_store[demoter.tier.name].upto
        for node in self._keys.along(kept.tokens, kept.namespace):
            n_pages += node.n_pages
            if n_pages <= fresh or node.id in under_way or n_ordered >= left:
                continue
            keys = demoter.keys_of(node)
            places = [at for at, key in enumerate(keys) if writes.is_due(key)][: left - n_ordered]
            if places and demoter.can_lock(node):
                # At a ceiling none that is not there: those behind it must not wait for that.
                n_ordered += demoter.begin(node, places, FOR_PIN)
                under_way.add(node.id)
        if n_pages < kept.n_pages:
            self._read(kept, demoter.tier, writes)
        return n_ordered

    def _read(self, kept: TierPin, tier: StorageTier, writes: StoreWrites) -> None:
        known, now_s = kept.in_store[tier.name], self._out.at_s
        if now_s < known.ask_at_s:
            return
        known.ask_at_s = now_s + max(ASK_S, writes.lifetime_s / ASKS)
        # Of a store it was forgotten what lies there, as it is once in a lifetime.
        self._link(kept, tier)
        tier.index.shrink()
        self._promotions.prefetch(0, 0, kept.tokens, kept.namespace)
