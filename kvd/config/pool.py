"""From the configured pool to its spec: the components of its family, and the pages of each."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from kvd.config.families import counts_tokens, keeps_latents
from kvd.config.pool_pages import page_counts, saved_counts
from kvd.config.sharding import held
from kvd.core.layout.spec import (
    DTYPE_BYTES,
    Buffer,
    Component,
    Device,
    Host,
    Layout,
    Mha,
    Mla,
    Nowhere,
    PageOrder,
    PerRequest,
    PoolSpec,
    Raw,
    State,
    StateTensor,
    Tail,
    shard_of,
)

if TYPE_CHECKING:
    from kvd.config.pool_sections import PoolSection
    from kvd.config.schema import Config

PREFILL_ONLY = "prefill-only"

_TENSOR = re.compile(r"([a-z0-9_]+)\[([0-9]{1,9}(?:, ?[0-9]{1,9}){0,5})\]")
_MAX_STATE_ELEMENTS = 2**31


def state_tensor(name: str, text: str) -> StateTensor | None:
    """One tensor of ``float32[64,128]``; None if it is not written so."""
    match = _TENSOR.fullmatch(text)
    if match is None or match[1] not in DTYPE_BYTES:
        return None
    shape = tuple(int(one) for one in match[2].split(","))
    return (
        StateTensor(name, shape, match[1]) if 0 < math.prod(shape) <= _MAX_STATE_ELEMENTS else None
    )


def components(pool: PoolSection) -> tuple[Component, ...]:
    """What the family of ``pool`` keeps: kv, its companions, and what has a budget beside it.

    As one shard has it: its layers and heads are those that this node holds.
    The keys that the family needs must be there.
    """
    kv = _kv(pool)
    parts = [kv]
    if pool.index_dim is not None:
        heads = 1 if pool.index_heads is None else pool.index_heads
        layout = Mha(heads, pool.index_dim, 0, pool.index_dtype or pool.dtype)
        page = pool.index_page_size or pool.page_size
        parts.append(Component("index", pool.layers, layout, page, tier=Device(pool.device)))
    if pool.scale_dtype is not None and pool.layers:
        scales: Layout = Mha(pool.heads, 1, 1, pool.scale_dtype)
        if keeps_latents(pool):
            scales = Mla(1, 0, pool.scale_dtype)
        parts.append(Component("scale", pool.layers, scales, pool.page_size, tier=kv.tier))
    match pool.family:
        case "swa":
            parts.append(_windows(pool))
        case "hisparse":
            extent = Buffer(pool.buffer_tokens or 0)
            tier = Device(pool.device)
            parts.append(Component("buffer", kv.layers, kv.layout, kv.page_size, extent, tier))
        case "recurrent":
            parts.append(_states(pool))
        case "mha" | "mla":
            pass
    return tuple(parts)


def _kv(pool: PoolSection) -> Component:
    if counts_tokens(pool):
        return Component("kv", 0, Raw(0), 1, tier=Nowhere())
    layout: Layout
    if keeps_latents(pool):
        layout = Mla(pool.latent_dim or 0, pool.rope_dim or 0, pool.dtype)
    else:
        layout = Mha(pool.heads, pool.head_dim, pool.v_dim or pool.head_dim, pool.dtype)
    tier = Host() if pool.family == "hisparse" else Device(pool.device)
    whole = Component("kv", pool.layers, layout, pool.page_size, tier=tier)
    here = held(pool)
    return whole if here is None else shard_of(whole, here.shards[0])


def _windows(pool: PoolSection) -> Component:
    v_dim = pool.window_v_dim or pool.window_head_dim or pool.v_dim or pool.head_dim
    return Component(
        name="swa",
        layers=pool.window_layers or 0,
        layout=Mha(
            heads=pool.window_heads or pool.heads,
            k_dim=pool.window_head_dim or pool.head_dim,
            v_dim=v_dim,
            dtype=pool.dtype,
        ),
        page_size=pool.page_size,
        extent=Tail(pool.window_tokens or 0),
        tier=Device(pool.device),
    )


def _states(pool: PoolSection) -> Component:
    """Wide elements first, so that each lies at a multiple of its size; then by name."""
    tensors = [one for name, text in pool.state.items() if (one := state_tensor(name, text))]
    tensors.sort(key=lambda one: (-DTYPE_BYTES[one.dtype], one.name))
    return Component(
        name="state",
        layers=pool.state_layers or 0,
        layout=State(tuple(tensors)),
        page_size=1,
        extent=PerRequest(),
        tier=Device(pool.device),
    )


def pool_spec(config: Config) -> PoolSpec:
    """The spec of the configured pool.

    Prefill-only counts the tokens that the pool would have held, and has memory for none of them.
    """
    pool = config.pool
    parts = components(pool)
    counts = page_counts(pool, parts)
    if config.cache.mode == PREFILL_ONLY:
        kv = parts[0]
        nowhere = Component(kv.name, kv.layers, kv.layout, kv.page_size, tier=Nowhere())
        return PoolSpec(pool.name, PREFILL_ONLY, PageOrder(pool.order), (nowhere,), counts[:1])
    return PoolSpec(
        name=pool.name,
        family=pool.family,
        order=PageOrder(pool.order),
        components=parts,
        pages=counts,
        saved_pages=saved_counts(pool, parts, counts),
        held=held(pool),
    )
