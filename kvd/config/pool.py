"""From the configured pool to its spec: the components of the family, and how many pages fit."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvd.core.spec import Component, Device, Mha, Order, PoolSpec, page_bytes

if TYPE_CHECKING:
    from kvd.config.pool_sections import PoolSection
    from kvd.config.schema import Config

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"([0-9]{1,12}) ?(KiB|MiB|GiB|TiB)")


def size_bytes(size: str) -> int | None:
    """Bytes of ``256MiB``; None if it is not written so."""
    match = _SIZE.fullmatch(size)
    return None if match is None else int(match[1]) * _UNITS[match[2]]


def component(pool: PoolSection) -> Component:
    """What one page of the pool holds."""
    v_dim = pool.head_dim if pool.v_dim is None else pool.v_dim
    layout = Mha(heads=pool.heads, k_dim=pool.head_dim, v_dim=v_dim, dtype=pool.dtype)
    return Component(
        name="kv",
        layers=pool.layers,
        layout=layout,
        page_size=pool.page_size,
        tier=Device(pool.device),
    )


def page_count(pool: PoolSection) -> int:
    """Pages of the pool, the null page included: as configured, or as many as fit its size."""
    if pool.pages is not None:
        return pool.pages
    return (size_bytes(pool.size or "") or 0) // page_bytes(component(pool))


USUAL_SAVED_SHARE = 8
"""A pool that runs full retracts a few of its leases at a time, not a half of them."""
USUAL_SAVED_BYTES = 2**30
"""At most, unless asked for: memory is reserved at the start, which takes a second per GiB."""


def saved_page_count(pool: PoolSection) -> int:
    """Pages for retracted leases, a null page included; 0 where there is not room for one more."""
    block = page_bytes(component(pool))
    size = size_bytes(pool.saved_size) if pool.saved_size is not None else None
    if size is None:
        size = min(page_count(pool) * block // USUAL_SAVED_SHARE, USUAL_SAVED_BYTES)
    pages = min(size // block, 2**31 - 1)
    return pages if pages > 1 else 0


def pool_spec(config: Config) -> PoolSpec:
    """The spec of the configured pool."""
    pool = config.pool
    return PoolSpec(
        name=pool.name,
        family=pool.family,
        order=Order(pool.order),
        components=(component(pool),),
        pages=(page_count(pool),),
        saved_pages=(saved_page_count(pool),),
    )
