"""The components that families are made of, each from the keys that say what it holds.

As one shard has it: its layers and heads are those that this node holds. The keys that a component
needs must be there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.layout.spec import Component, Device, Layout, Mha, Mla, Nowhere, Raw, Tier, shard_of
from kvd.families.sharding import held

if TYPE_CHECKING:
    from kvd.families.keys import PoolSection


def kv(pool: PoolSection, tier: Tier | None = None) -> Component:
    """KV of every token, which is matched: latents, or K and V per head."""
    if pool.counts_tokens:
        return Component("kv", layers=0, layout=Raw(0), page_size=1, tier=Nowhere())
    layout: Layout
    if pool.keeps_latents:
        layout = Mla(pool.latent_dim or 0, pool.rope_dim or 0, pool.dtype)
    else:
        layout = Mha(
            heads=pool.heads,
            k_dim=pool.head_dim,
            v_dim=v_dim(pool),
            dtype=pool.dtype,
        )
    whole = Component(
        "kv",
        layers=pool.layers,
        layout=layout,
        page_size=pool.page_size,
        tier=tier or Device(pool.device),
    )
    here = held(pool)
    return whole if here is None else shard_of(whole, here.shards[0])


def v_dim(pool: PoolSection) -> int:
    """Elements of one V head; 0 where K has them too."""
    return pool.head_dim if pool.v_dim is None else pool.v_dim


def companions(pool: PoolSection, first: Component) -> tuple[Component, ...]:
    """What goes in lockstep with ``first``: the index of its keys, the scales of its elements."""
    return (*_index(pool), *_scales(pool, first))


def _index(pool: PoolSection) -> tuple[Component, ...]:
    if pool.index_dim is None:
        return ()
    layout = Mha(
        heads=1 if pool.index_heads is None else pool.index_heads,
        k_dim=pool.index_dim,
        v_dim=0,
        dtype=pool.index_dtype or pool.dtype,
    )
    page = pool.index_page_size or pool.page_size
    # On the device even where its KV is in host memory: it is read to choose what is fetched.
    tier = Device(pool.device)
    return (Component("index", layers=pool.layers, layout=layout, page_size=page, tier=tier),)


def _scales(pool: PoolSection, first: Component) -> tuple[Component, ...]:
    if pool.scale_dtype is None or not pool.layers:
        return ()
    layout: Layout = Mha(heads=pool.heads, k_dim=1, v_dim=1, dtype=pool.scale_dtype)
    if pool.keeps_latents:
        layout = Mla(1, 0, pool.scale_dtype)
    return (
        Component(
            "scale",
            layers=pool.layers,
            layout=layout,
            page_size=pool.page_size,
            tier=first.tier,
        ),
    )
