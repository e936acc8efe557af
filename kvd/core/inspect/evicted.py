"""Why it is not cached any more: what was evicted, for whom, who missed it since, who thrashes.

What is known of that is in ``cache.evictions``; here it gets names, ages and words.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from kvd.core.cache.evictions import FLUSH, OPERATOR, SOON_S
from kvd.core.cache.left_prefix import QuotaReason
from kvd.core.cache.namespaces import told
from kvd.core.inspect.explanation import Explanation, links_of
from kvd.core.inspect.quota_states import out_of_turn
from kvd.core.inspect.removed import (
    became_words,
    last_removal_words,
    removed_facts,
    tier_thrash_states,
)
from kvd.core.leases.owners import name_of
from kvd.wire.snapshot import EvictedPrefix, EvictionState, MissedAgain, ThrashState

if TYPE_CHECKING:
    from kvd.core.cache.left_prefix import LeftPrefix, MissedPrefix, Thrashing
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.inspect.view import NodeView

ROWS_SHOWN: Final = 20
"""Of the last evictions, and of the last requests that they hurt."""


def eviction_state(node: NodeView) -> EvictionState:
    """The counters, the last rows of either kind, the last first, and who thrashes now."""
    kept = node.leases.evictor.evictions
    return EvictionState(
        prefixes=kept.n_left,
        hurt=kept.n_hurt,
        hurt_soon=kept.n_soon,
        evicted=tuple([_row(node, left) for left in kept.last_left(ROWS_SHOWN)]),
        missed=tuple([_missed(node, one) for one in islice(reversed(kept.missed), ROWS_SHOWN)]),
        thrashing=(
            *[_told(node, pair) for pair in kept.thrashing_at(node.out.at_s)],
            *[pair for tier in node.tiers.each for pair in tier_thrash_states(node, tier)],
        ),
    )


def _row(node: NodeView, left: LeftPrefix) -> EvictedPrefix:
    now_s = node.out.at_s
    return EvictedPrefix(
        prefix=f"{left.digest:016x}",
        namespace=told(left.namespace.decode()),
        start_tokens=left.start_tokens,
        end_tokens=left.end_tokens,
        pages=left.n_pages,
        hits=left.hits,
        wrote=_writer(node, left),
        needed_by=name_of(node, left.session),
        need=left.need,
        tier=left.tier,
        ago_s=now_s - left.at_s,
        unused_s=left.at_s - left.touched_at,
        because=out_of_turn(QuotaReason(left.quota, left.limit_pages, left.beyond_pages)),
    )


def _missed(node: NodeView, missed: MissedPrefix) -> MissedAgain:
    return MissedAgain(
        missed_by=name_of(node, missed.session),
        after_s=missed.at_s - missed.left.at_s,
        ago_s=node.out.at_s - missed.at_s,
        evicted=_row(node, missed.left),
    )


def thrash_state(node: NodeView, pair: Thrashing) -> ThrashState:
    """One pair of engines that does; ``why`` is left to who tells it."""
    return ThrashState(
        needed_by=name_of(node, pair.session),
        hurt=name_of(node, pair.hurt),
        rounds=pair.rounds,
        since_s=node.out.at_s - pair.since_s,
        last=_missed(node, pair.last),
    )


def _told(node: NodeView, pair: Thrashing) -> ThrashState:
    state = thrash_state(node, pair)
    return replace(state, why=f"thrashing for {state.since_s:.1f} s: {thrash_words(state)}")


def _writer(node: NodeView, left: LeftPrefix) -> str:
    return name_of(node, left.writer) if left.writer else "kvd"


# ---- in words ------------------------------------------------------------------------------------


def of_evictions(node: NodeView) -> Explanation:
    """The whole record in a sentence, then who thrashes, who was hurt, and what left last."""
    kept, state = node.leases.evictor.evictions, eviction_state(node)
    sentence = "nothing was evicted or flushed since this daemon began"
    if kept.n_left:
        sentence = (
            f"{node.leases.evictor.evicted_pages} pages were evicted since this daemon began; "
            f"{kept.n_left} prefixes have left the pool, {kept.n_hurt} were asked for again by a "
            f"request that found them gone, {kept.n_soon} of these within {SOON_S:.0f} s"
        )
    below = last_removal_words(node)
    sentence += f"; {below}" if below else ""
    facts = [pair.why for pair in state.thrashing]
    facts += [_missed_words(row) for row in state.missed]
    last = kept.last_left()
    facts += [_left_words(node, left) for left in last[:ROWS_SHOWN]]
    facts += removed_facts(node)
    clients = Counter(left.session for left in last if left.session)
    refs = [f"client:{number}" for number, _ in clients.most_common(ROWS_SHOWN)]
    return Explanation(sentence, tuple(facts), links_of(*refs))


def thrash_words(pair: ThrashState) -> str:
    """Both sides, and what to do; without since when."""
    sides = f"{pair.needed_by} and {pair.hurt}"
    whose = f"{pair.needed_by} needs pages, and {pair.hurt} asks for what left"
    if pair.needed_by == pair.hurt:
        sides, whose = pair.hurt, f"{pair.hurt} asks for what left for its own pages"
    evicted = pair.last.evicted
    return (
        f"{whose}, {pair.rounds} times the same prefix within "
        f"{SOON_S:.0f} s; last {evicted.pages} pages{_of(evicted.namespace)}: the pool is smaller "
        f"than what {sides} work with"
    )


def _of(namespace: str) -> str:
    return f" of {namespace}" if namespace else ""


def _missed_words(row: MissedAgain) -> str:
    left = row.evicted
    return (
        f"{row.ago_s:.1f} s ago {row.missed_by} missed {_span(left)}, "
        f"which had gone {row.after_s:.1f} s before for {_for(left)}"
    )


def _span(left: EvictedPrefix) -> str:
    return f"tokens {left.start_tokens} to {left.end_tokens}{_of(left.namespace)} ({left.prefix})"


def _for(left: EvictedPrefix) -> str:
    if left.need == FLUSH:
        return "a flush"
    if left.need == OPERATOR:
        return "an operator"
    return f"a {left.need} of {left.needed_by}"


def _left_words(node: NodeView, kept: LeftPrefix) -> str:
    left = _row(node, kept)
    return (
        f"{left.ago_s:.1f} s ago {_span(left)} left, {left.pages} pages, written by {left.wrote}, "
        f"for {_for(left)}; hits: {left.hits}, unused for {left.unused_s:.1f} s: "
        f"{left.because or f'{node.settings.policy.value} chose it'}; {became_words(node, kept)}"
    )


def of_free_page(node: NodeView, what: str, page: int) -> Explanation:
    """What it held last, as far as that is known."""
    left = node.leases.evictor.evictions.of_page(page) if page else None
    if left is None:
        return Explanation(f"{what} is free")
    return Explanation(f"{what} is free", (f"it was cached: {_left_words(node, left)}",))


def told_of_node(node: NodeView, edge: RadixNode) -> list[str]:
    """Who brought what is cached there, and how often it went too early before."""
    said = [f"written by {name_of(node, edge.writer)}"] if edge.writer else []
    rounds = node.leases.evictor.evictions.rounds_of(edge)
    if rounds:
        said.append(f"it was evicted and asked for again within {SOON_S:.0f} s, {rounds} times")
    return said
