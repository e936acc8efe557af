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

import enum
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


LOOK_S: Final = 1.0
"""So often it is looked why a pin is not written."""


class PinWait(enum.Enum):
    """Why a tier has not all of a pin, or has it and does not write it again in time."""

    NEVER = "never"
    """Nothing is written there."""
    AWAY = "away"
    """Nothing is written there now."""
    NO_ROOM = "no-room"
    """In the half of a tier, or of a share of it, that pins have."""
    CEILING = "ceiling"
    """Of its namespace, in a store."""
    MOVING = "moving"
    """It is being written."""
    LEFT_POOL = "left-pool"
    """What is to be written is not in the pool."""
    TURN = "turn"
    """Others are being written."""


@mypyc_attr(allow_interpreted_subclasses=True)
class UnwrittenPin:
    """Why, and since when."""

    __slots__ = ("since_s", "why")

    def __init__(self, why: PinWait, since_s: float) -> None:
        self.why = why
        self.since_s = since_s


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

    __slots__ = ("in_store", "keys", "lease", "namespace", "tokens", "unwritten")

    def __init__(self, lease: LeaseRecord, keys: bytes) -> None:
        self.lease = lease
        self.namespace = lease.namespace
        self.tokens: Tokens = lease.tokens
        self.keys = keys
        self.in_store: dict[str, PinInStore] = {}
        """By tier, of those that nodes share."""
        self.unwritten: dict[str, UnwrittenPin] = {}
        """By tier, why it has not all of it."""

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

    __slots__ = ("_demoters", "_keys", "_look_at_s", "_out", "_promotions", "by_id")

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
        self._look_at_s = 0.0
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
        self._look_at_s = 0.0
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
        """What each tier has of it, and why not more."""
        kept = self.by_id.get(pin)
        if kept is None:
            return []
        return [self._kept_in(kept, demoter) for demoter in self._demoters]

    def _kept_in(self, kept: TierPin, demoter: Demoter) -> PinKeptState:
        tier = demoter.tier
        n_pages, known = self._leading(kept, tier), kept.in_store.get(tier.name)
        left_s = due_in_s = for_s = None
        why = ""
        if n_pages < kept.n_pages:
            words = f"tier {tier.name} has {n_pages} of {kept.n_pages} pages"
        else:
            words = f"tier {tier.name} has all of it"
            if known is not None and not math.isinf(known.until_s):
                left_s = known.until_s - self._out.at_s
                due_in_s = max(0.0, known.due_s - self._out.at_s)
                words += f" for {left_s:.0f} s, and it is written again in {due_in_s:.0f} s"
        unwritten = kept.unwritten.get(tier.name)
        if unwritten is not None and (n_pages < kept.n_pages or due_in_s == 0):
            why, for_s = self._why(kept, demoter, unwritten.why), self._out.at_s - unwritten.since_s
            again = " again" if known is not None and n_pages == kept.n_pages else ""
            words += f"; not written{again} for {for_s:.0f} s: {why}"
        return PinKeptState(
            tier=tier.name,
            pages=n_pages,
            of_pages=kept.n_pages,
            left_s=left_s,
            due_in_s=due_in_s,
            why=why,
            for_s=for_s,
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

    # ---- why it is not there -----------------------------------------------------------------

    def _look(self) -> None:
        """Note of each pin why a tier has not all of it, and since when."""
        now_s = self._out.at_s
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_S
        for demoter in self._demoters:
            tier, moving = demoter.tier, demoter.keys_on_their_way()
            fit = {id(kept) for kept in self._that_fit(demoter)}
            for kept in self.by_id.values():
                known = kept.in_store.get(tier.name)
                if self._has_all(kept, tier) and (known is None or now_s < known.due_s):
                    kept.unwritten.pop(tier.name, None)
                    continue
                why = self._waits_for(kept, demoter, moving, fits=id(kept) in fit)
                before = kept.unwritten.get(tier.name)
                if before is None or before.why is not why:
                    kept.unwritten[tier.name] = UnwrittenPin(why, now_s)

    def _waits_for(
        self, kept: TierPin, demoter: Demoter, moving: set[bytes], *, fits: bool
    ) -> PinWait:
        tier, writes = demoter.tier, demoter.tier.writes
        found = PinWait.TURN
        if tier.settings.demotion is Demotion.NEVER:
            found = PinWait.NEVER
        elif not tier.is_written:
            found = PinWait.AWAY
        elif not fits:
            found = PinWait.NO_ROOM
        elif not moving.isdisjoint(each_key(kept.keys)):
            found = PinWait.MOVING
        elif writes and writes.is_full(kept.namespace) and not self._has_all(kept, tier):
            found = PinWait.CEILING
        elif self._in_pool(kept) < kept.n_pages:
            found = PinWait.LEFT_POOL
        return found

    def _in_pool(self, kept: TierPin) -> int:
        """How many of its first pages."""
        along = self._keys.along(kept.tokens, kept.namespace)
        return min(kept.n_pages, sum([node.n_pages for node in along]))

    def _why(self, kept: TierPin, demoter: Demoter, why: PinWait) -> str:
        """The same in words, with what is so now."""
        tier = demoter.tier
        index, writes = tier.index, tier.writes
        said = ""
        match why:
            case PinWait.NEVER:
                said = f'tiers.{tier.name}.demote is "never"'
            case PinWait.AWAY:
                said = f"the tier is {tier.word}{': ' if tier.why else ''}{tier.why}"
            case PinWait.NO_ROOM:
                share = (writes or index).share_of(kept.namespace)
                most = min(index.capacity, tier.room_by_share()[share]) // 2
                what = f"the quota of {share.quota.namespace}" if share.quota else "it"
                said = f"all pins may have {most} pages there, half of {what}, and they need more"
            case PinWait.CEILING:
                said = self._ceiling_words(kept, writes)
            case PinWait.MOVING:
                said = "it is being written"
            case PinWait.LEFT_POOL:
                n_away = kept.n_pages - self._in_pool(kept)
                then = "are read into it first" if writes else "are not written until they are"
                said = f"{n_away} pages of it are not in the pool, and {then}"
            case PinWait.TURN:
                n_moving = len(demoter.keys_on_their_way())
                said = f"it waits its turn, {n_moving} other pages are on their way"
        return said

    def _ceiling_words(self, kept: TierPin, writes: StoreWrites | None) -> str:
        if writes is None:
            return "its namespace was at its ceiling"
        share = writes.share_of(kept.namespace)
        most, in_s = writes.room_of(share), writes.room_in_s(share)
        return (
            f"its namespace is at its ceiling there, {most} pages, and the next of these are as "
            f"old as they get in {in_s:.0f} s"
        )

    # ---- what is written ---------------------------------------------------------------------

    def dues(self) -> list[float]:
        """When something of them is to be written to a store again; in the past what is late."""
        return [known.due_s for kept in self.by_id.values() for known in kept.in_store.values()]

    def turn(self) -> None:
        """Order what is pinned and not there yet, or not for long."""
        if not self.by_id:
            return
        self._order()
        self._look()

    def _order(self) -> None:
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
