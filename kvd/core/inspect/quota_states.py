"""Who has how much of the pool and of a tier beside its quota, who is over, whose floor was taken.

What the bounds mean is in ``cache.quotas``; here they get words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd.core.cache.evictions import SOON_S
from kvd.core.cache.namespaces import NO_NAMESPACE
from kvd.core.tiers.store_writes import WrittenShare
from kvd.wire.snapshot import IN_POOL, QuotaState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvd.core.cache.left_prefix import QuotaReason
    from kvd.core.cache.quotas import QuotaShare
    from kvd.core.inspect.view import NodeView

OTHERS: Final = "(all others)"


def quota_states(node: NodeView) -> tuple[QuotaState, ...]:
    """Of the pool, then of each tier where any namespace has one."""
    found: list[QuotaState] = []
    quotas = node.leases.evictor.quotas
    if quotas is not None and len(quotas.shares) > 1:
        found += _states(node, IN_POOL, quotas.shares, node.leases.page_bytes)
    for tier in node.tiers.each:
        of_tier = tier.writes or tier.index
        if of_tier.has_quotas:
            found += _states(node, tier.name, of_tier.shares, tier.settings.object_bytes)
    return tuple(found)


def _states(
    node: NodeView, place: str, shares: Sequence[QuotaShare], page_bytes: int
) -> Iterator[QuotaState]:
    for share in shares:
        quota = share.quota
        most = quota.ceiling_pages if quota is not None else None
        yield QuotaState(
            namespace=OTHERS if quota is None else quota.namespace or NO_NAMESPACE,
            place=place,
            pages=share.n_pages,
            page_bytes=page_bytes,
            floor_pages=quota.floor_pages if quota is not None else 0,
            ceiling_pages=most,
            over_pages=0 if most is None else max(0, share.n_pages - most),
            went_over_pages=share.over_pages,
            taken_pages=share.taken_pages,
            taken_ago_s=node.out.at_s - share.taken_at_s if share.taken_at_s else None,
            why=_words(share, node.out.at_s),
        )


def _store_words(share: WrittenShare) -> str:
    """What is so now where this node may write no more."""
    if share.room > 0:
        return ""
    return "at its ceiling: nothing of it is written until what this node wrote is older than ttl_s"


def _words(share: QuotaShare, now_s: float) -> str:
    """What is so now, and what went of a floor within a minute."""
    quota = share.quota
    if quota is None:
        return ""
    if isinstance(share, WrittenShare):
        return _store_words(share)
    most = quota.ceiling_pages
    if most is not None and share.n_pages > most:
        return f"over its ceiling by {share.n_pages - most} pages, the next to go"
    if share.taken_at_s and now_s - share.taken_at_s <= SOON_S:
        return (
            f"{now_s - share.taken_at_s:.1f} s ago pages of its floor went, as nothing else could "
            "be evicted: the pool is too small for what leases hold and all floors"
        )
    return ""


def out_of_turn(reason: QuotaReason) -> str:
    """Why a prefix went out of its turn; empty where it did not."""
    name = repr(reason.namespace) if reason.namespace else NO_NAMESPACE
    beyond_pages = reason.beyond_pages
    if beyond_pages > 0:
        return f"{name} was over its ceiling of {reason.limit_pages} pages by {beyond_pages}"
    if beyond_pages < 0:
        return (
            f"{-beyond_pages} pages were of the floor of {name}, {reason.limit_pages}: nothing "
            "else could be evicted"
        )
    return ""
