"""The memory of a pool without a daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.pools.arena import check_free
from kvd.pools.build import PoolRegion, pool_regions, reserve_all, saved_regions, sizes

if TYPE_CHECKING:
    from kvd.core.layout.spec import PoolSpec


def build_pool(spec: PoolSpec) -> list[PoolRegion]:
    """Every region of the pool, then the saved areas, reserved as a daemon does it."""
    wanted = [*pool_regions(spec), *saved_regions(spec)]
    check_free(sizes(wanted))
    return reserve_all(spec, wanted, lambda _: None)
