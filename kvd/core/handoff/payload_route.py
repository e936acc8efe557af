"""Along which way a grant of an Offer goes: from a shard of one node to a shard of the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    from kvd.core.layout.shards import ShardRoute
    from kvd.wire.peer import Offer


@mypyc_attr(allow_interpreted_subclasses=True)
class PayloadRoute:
    """One grant of an Offer, from shard to shard; ``grant`` is its place among the grants."""

    __slots__ = ("grant", "shard_route")

    def __init__(self, grant: int, shard_route: ShardRoute) -> None:
        self.grant = grant
        self.shard_route = shard_route


def routes_of(offer: Offer, shard_routes: tuple[ShardRoute, ...]) -> tuple[PayloadRoute, ...]:
    """The routes of what an Offer grants, between the shards of two nodes, in both sides' order."""
    return tuple(
        [
            PayloadRoute(grant, shard_route)
            for grant in range(len(offer.grants))
            for shard_route in shard_routes
        ]
    )
