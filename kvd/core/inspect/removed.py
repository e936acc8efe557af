"""Why it is in a tier no more: what was removed, for whose writes, who missed it, what thrashes.

What is known of that is in ``tiers.removed``; here it gets names, ages and words.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from kvd.core.cache.namespaces import NO_NAMESPACE, told
from kvd.core.inspect.quota_states import out_of_turn
from kvd.core.leases.owners import name_of
from kvd.core.settings import Demotion
from kvd.core.tiers.removed import BAD, BEYOND, EPOCH, FLUSH, FOREIGN, OLDEST, SOON_AGAIN_S
from kvd.types import amount
from kvd.wire.snapshot import EvictedPrefix, MissedAgain, ThrashState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.core.cache.left_prefix import LeftPrefix
    from kvd.core.inspect.view import NodeView
    from kvd.core.tiers.removed import DroppedObjects, MissedObjects, Removal, TierPair
    from kvd.core.tiers.tier import StorageTier

ROWS_SHOWN: Final = 20
"""Of each tier: its last removals, and the last requests that missed one."""

_WHY: Final = {
    OLDEST: "as the oldest",
    BAD: "as the first of them was damaged or not there",
    BEYOND: "as more lay there than its size when it began",
    FLUSH: "by a flush",
    EPOCH: "as their epoch is over",
    FOREIGN: "when it began, as they are none of this pool",
}


def tier_thrash_states(node: NodeView, tier: StorageTier) -> list[ThrashState]:
    """The pairs of namespaces that do so there now."""
    return [
        _thrash_state(node, tier, pair) for pair in tier.index.removed.thrashing_at(node.out.at_s)
    ]


def _thrash_state(node: NodeView, tier: StorageTier, pair: TierPair) -> ThrashState:
    last, page_size = pair.last, node.leases.page_size
    assert last is not None
    now_s, gone = node.out.at_s, last.removal
    words = tier_thrash_words(tier, pair, page_size, now_s)
    return ThrashState(
        needed_by=_side(pair.needed_by),
        hurt=_side(pair.hurt),
        rounds=pair.rounds,
        since_s=now_s - pair.since_s,
        last=MissedAgain(
            missed_by=name_of(node, last.session),
            after_s=last.at_s - gone.at_s,
            ago_s=now_s - last.at_s,
            evicted=EvictedPrefix(
                prefix="",
                namespace=told(last.namespace),
                start_tokens=last.start_tokens,
                end_tokens=last.start_tokens + last.n_objects * page_size,
                pages=last.n_objects,
                hits=0,
                wrote="",
                needed_by=_side(pair.needed_by),
                need=f"demotion to {tier.name}",
                tier="",
                ago_s=now_s - gone.at_s,
                unused_s=0.0,
                because=out_of_turn(gone.reason),
            ),
        ),
        why=f"{tier.name} thrashes for {now_s - pair.since_s:.1f} s: {words}",
        place=tier.name,
        tokens=pair.n_objects * page_size,
    )


def _side(namespace: str) -> str:
    return namespace or NO_NAMESPACE


# ---- in words ------------------------------------------------------------------------------------


def tier_thrash_words(tier: StorageTier, pair: TierPair, page_size: int, now_s: float) -> str:
    """Both sides, how much, and what to do; without since when."""
    last = pair.last
    assert last is not None
    return (
        f"writes of {_side(pair.needed_by)} push out what {_side(pair.hurt)} asks for again: "
        f"{pair.rounds} requests missed "
        f"{pair.n_objects * page_size} tokens ({pair.n_objects} pages), the last "
        f"{last.at_s - last.removal.at_s:.1f} s after they had gone; {_remedies(tier, pair, now_s)}"
    )


def _remedies(tier: StorageTier, pair: TierPair, now_s: float) -> str:
    """What is not so already, with what is."""
    name, hurt, n_bytes = tier.name, _side(pair.hurt), tier.settings.capacity_bytes
    found = [
        f"a larger tiers.{name}.size than {amount(n_bytes)}: {amount(2 * n_bytes)} would have "
        "had it"
    ]
    quota = tier.index.share_of(pair.hurt).quota
    if quota is not None and quota.ceiling_pages is not None:
        now = _said_of(tier, quota.ceiling_pages)
        found.insert(0, f"a higher ceiling of {hurt} in quotas.{name} than {now}")
    elif pair.needed_by != pair.hurt:
        found.append(f"in quotas.{name} {_floor_words(tier, pair)} or {_ceiling_words(tier, pair)}")
    if tier.settings.demotion is Demotion.ALWAYS:
        found.append(f'tiers.{name}.demote = "second-use", so that less is written')
    said = f"what helps: {'; or '.join(found)}"
    last, shared_out_s = pair.last, tier.shared_out_s
    if shared_out_s is not None and last is not None and last.at_s <= shared_out_s:
        said += (
            f". Its quotas changed {now_s - shared_out_s:.1f} s ago, and no request has missed "
            "anything since"
        )
    return said


def _floor_words(tier: StorageTier, pair: TierPair) -> str:
    """A floor for who is hurt, or a higher one."""
    hurt, share = _side(pair.hurt), tier.index.share_of(pair.hurt)
    if share.quota is None or not share.quota.floor_pages:
        return f"a floor for {hurt}"
    floor_pages = share.quota.floor_pages
    has = f"{hurt} has {share.n_pages}"
    if share.n_pages < floor_pages:
        has += ", and what it writes up to there stays"
    return f"a higher floor of {hurt} than {_said_of(tier, floor_pages)} ({has})"


def _ceiling_words(tier: StorageTier, pair: TierPair) -> str:
    """A ceiling for who writes, or a lower one."""
    writer, share = _side(pair.needed_by), tier.index.share_of(pair.needed_by)
    if share.quota is None or share.quota.ceiling_pages is None:
        return f"a ceiling for {writer}"
    now = _said_of(tier, share.quota.ceiling_pages)
    return f"a lower ceiling of {writer} than {now} ({writer} has {share.n_pages})"


def _said_of(tier: StorageTier, n_pages: int) -> str:
    return f"{n_pages} pages, {amount(n_pages * tier.settings.object_bytes)}"


def removal_words(removal: Removal) -> str:
    """Why it went, and for whom."""
    why = out_of_turn(removal.reason) or _WHY[removal.why]
    return f"{why}, for writes of {_side(removal.needed_by)}" if removal.why == OLDEST else why


def removed_facts(node: NodeView) -> Iterator[str]:
    """Of all tiers: who missed what was removed there, then what was, the last first."""
    for tier in node.tiers.each:
        removed = tier.index.removed
        for missed in islice(reversed(removed.missed), ROWS_SHOWN):
            yield _missed_words(node, tier, missed)
        gone: list[tuple[float, str]] = [
            (removal.at_s, _gone_words(node, tier, removal))
            for removal in islice(reversed(removed.removals.values()), ROWS_SHOWN)
        ]
        gone += [(one.at_s, _dropped_words(node, tier, one)) for one in removed.dropped]
        gone.sort(key=lambda row: -row[0])
        yield from [words for _, words in gone[:ROWS_SHOWN]]


def _missed_words(node: NodeView, tier: StorageTier, missed: MissedObjects) -> str:
    now_s, removal = node.out.at_s, missed.removal
    end_tokens = missed.start_tokens + missed.n_objects * node.leases.page_size
    return (
        f"{now_s - missed.at_s:.1f} s ago {name_of(node, missed.session)} missed tokens "
        f"{missed.start_tokens} to {end_tokens} of {_side(told(missed.namespace))}, which had been "
        f"removed from tier {tier.name} {missed.at_s - removal.at_s:.1f} s before, "
        f"{removal_words(removal)}"
    )


def _gone_words(node: NodeView, tier: StorageTier, removal: Removal) -> str:
    return (
        f"{node.out.at_s - removal.at_s:.1f} s ago {removal.n_objects} pages of "
        f"{_side(removal.hurt)} went from tier {tier.name}, {removal_words(removal)}"
    )


def _dropped_words(node: NodeView, tier: StorageTier, dropped: DroppedObjects) -> str:
    ago = f"{node.out.at_s - dropped.at_s:.1f} s ago"
    if dropped.why == FOREIGN:
        what = f"{dropped.n_objects} things that lay in tier {tier.name} went"
        return f"{ago} {what} {_WHY[FOREIGN]}: {dropped.detail}"
    what = f"all {dropped.n_objects} pages of {_side(told(dropped.namespace))}"
    return f"{ago} {what} went from tier {tier.name}, {_WHY[dropped.why]}"


def became_words(node: NodeView, left: LeftPrefix) -> str:
    """Where it lies that has left the pool, or why it does no more."""
    tier = node.tiers.named(left.tier)
    if tier is None:
        return "dropped"
    key, namespace = tier.left.get(left.node), left.namespace.decode()
    if key is None:
        return f"tier {tier.name} had it then"
    if tier.index.has(namespace, key):
        return f"tier {tier.name} has it"
    for dropped in reversed(tier.index.removed.dropped):
        is_of_it = dropped.namespace == namespace and dropped.why != FOREIGN
        if is_of_it and dropped.at_s >= left.at_s:
            return f"tier {tier.name} had it: all of its namespace went {_WHY[dropped.why]}"
    removal = tier.index.removed.find(key)
    if removal is None:
        return f"tier {tier.name} had it, and has not all of it now"
    ago_s = node.out.at_s - removal.at_s
    return (
        f"tier {tier.name} had it until {ago_s:.1f} s ago, when its end was removed "
        f"{removal_words(removal)}"
    )


def last_removal_words(node: NodeView) -> str:
    """Of all tiers: how much was removed, and how much of that was asked for again."""
    said = []
    for tier in node.tiers.each:
        removed = tier.index.removed
        if removed.n_removed:
            said.append(
                f"{removed.n_removed} pages were removed from tier {tier.name}, "
                f"{removed.n_missed} of these were asked for again, {removed.n_missed_soon} of "
                f"these within {SOON_AGAIN_S / 60:.0f} minutes and before as much as it holds had "
                "gone"
            )
    return "; ".join(said)
