"""Quotas: how much of a place a namespace keeps, and above how much it is the first to give way.

A quota is of a namespace in one place, the pool or a tier, in pages of that place. Its name means
what a namespace means elsewhere: the name of a base is that of all its members together, in every
epoch, the name of a member that one alone. A page counts for one quota, the nearest; what none
names is the *rest*.

What is there goes in this order, and among equals in the order of the place itself::

    OVER    its namespace has more there than its ceiling
    USUAL   all else
    FLOOR   without it its namespace would have less than its floor

So both bounds are soft, and neither is in the way of anybody who needs room. A ceiling drops
nothing for which nobody needs the room, and refuses nothing. A floor is not there for others as
long as there is anything else; then it is, so whatever can be evicted is headroom as without
quotas, nothing waits for a floor, and what is promised to leases is still there. What goes as a
whole is of the floor as a whole: of a floor at most one leaf more is kept.

What must not live here: which goes first among equals (``quota_order``, ``tiers.index``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from mypy_extensions import mypyc_attr

from kvd.core.cache.left_prefix import QuotaReason
from kvd.core.cache.namespaces import base_of, name_in

if TYPE_CHECKING:
    from kvd.core.layout.quota import Quota

OVER: Final = 0
USUAL: Final = 1
FLOOR: Final = 2

MOST_QUOTAS: Final = 64
"""Namespaces that may have one: each is a look for an eviction, and a label of metrics."""


@mypyc_attr(allow_interpreted_subclasses=True)
class QuotaShare:
    """What is there of one quota, or of the rest; and what came of its bounds."""

    __slots__ = ("n_pages", "over_pages", "quota", "taken_at_s", "taken_pages")

    def __init__(self, quota: Quota | None) -> None:
        self.quota = quota
        self.n_pages = 0
        self.over_pages = 0
        """That went because it was over its ceiling."""
        self.taken_pages = 0
        """That went although they were of its floor."""
        self.taken_at_s = 0.0
        """When the last of these did."""

    def turn(self, n_pages: int) -> int:
        """When it is the turn of so many of its pages, which go together."""
        return self.turn_at(self.n_pages, n_pages)

    def turn_at(self, there: int, n_pages: int) -> int:
        """The same where so many are ``there``."""
        quota = self.quota
        if quota is None:
            return USUAL
        if there - n_pages < quota.floor_pages:
            return FLOOR
        most = quota.ceiling_pages
        return OVER if most is not None and there > most else USUAL

    def come_after(self, before: QuotaShare | None) -> None:
        """It is in the place of one that had the same name: what was counted goes on."""
        if before is not None:
            self.over_pages, self.taken_pages = before.over_pages, before.taken_pages
            self.taken_at_s = before.taken_at_s

    def going(self, turn: int, n_pages: int) -> QuotaReason | None:
        """So many of its pages go at that turn; why, if that is for its quota."""
        quota = self.quota
        if turn == USUAL or quota is None:
            return None
        if turn == OVER:
            self.over_pages += n_pages
            limit = quota.ceiling_pages or 0
            return QuotaReason(quota.namespace, limit, self.n_pages - limit)
        taken = min(n_pages, n_pages - self.n_pages + quota.floor_pages)
        self.taken_pages += taken
        return QuotaReason(quota.namespace, quota.floor_pages, -taken)


S = TypeVar("S", bound=QuotaShare)


def share_of(key: str, by_namespace: dict[str, S], rest: S) -> S:
    """Whose the pages of that key of the tree are: of its name, else of its base, else the rest."""
    if not by_namespace:
        return rest
    share = by_namespace.get(name_in(key))
    return share if share is not None else by_namespace.get(base_of(key), rest)
