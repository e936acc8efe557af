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
    words = tier_thrash_words(tier, pair, page_size)
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


def tier_thrash_words(tier: StorageTier, pair: TierPair, page_size: int) -> str:
    """Both sides, how much, and what to do; without since when."""
    last = pair.last
    assert last is not None
    return (
        f"writes of {_side(pair.needed_by)} push out what {_side(pair.hurt)} asks for again: "
        f"{pair.rounds} requests missed "
        f"{pair.n_objects * page_size} tokens ({pair.n_objects} pages), the last "
        f"{last.at_s - last.removal.at_s:.1f} s after they had gone; {_remedies(tier, pair)}"
    )


def _remedies(tier: StorageTier, pair: TierPair) -> str:
    name, hurt = tier.name, _side(pair.hurt)
    quota = tier.index.share_of(pair.hurt).quota
    found = [f"a larger tiers.{name}.size"]
    if quota is not None and quota.ceiling_pages is not None:
        found.insert(0, f"a higher ceiling of {hurt} in quotas.{name}")
    elif pair.needed_by != pair.hurt:
        found.append(
            f"in quotas.{name} a floor for {hurt} or a ceiling for {_side(pair.needed_by)}"
        )
    if tier.settings.demotion is Demotion.ALWAYS:
        found.append(f'tiers.{name}.demote = "second-use", so that less is written')
    return f"what helps: {'; or '.join(found)}"


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
