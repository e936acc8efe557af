"""prefill-only: a mode of the cache rather than a value of pool.family, and a row all the same.

There is no KV in this mode, so an engine that needs any would find out in the middle of its first
request. Whatever would read, write, send or keep KV is refused, each thing by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.core.layout.spec import Component, Nowhere, page_bytes
from kvd.families.budget import one_budget
from kvd.families.components import kv
from kvd.families.family import PoolFamily, RefusedKey
from kvd.families.keys import PoolSection
from kvd.families.mha import plan_keys

if TYPE_CHECKING:
    from kvd.core.layout.spec import PoolSpec
    from kvd.families.model import Model

PREFILL_ONLY = "prefill-only"

_LEAVE = 'or set cache.mode = "radix"'


def _components(pool: PoolSection) -> tuple[Component, ...]:
    """The tokens that the pool would have held are counted; there is memory for none of them."""
    return (msgspec.structs.replace(kv(pool), tier=Nowhere()),)


def _unsuited(model: Model, asked: str | None) -> str | None:
    if model.is_encoder and not model.state_layers:
        return None
    if model.without_kv:
        return model.without_kv
    if model.latent_dim:
        return "its attention expands latents from the pool"
    if model.window_layers:
        return "its sliding layers have a window of the pool"
    if asked != PREFILL_ONLY:
        return "it decodes; where it only embeds or scores, ask for this family by name"
    return None


def _note(_model: Model, spec: PoolSpec) -> str:
    first = spec.components[0]
    return (
        f"tokens are counted and take no byte, which would be "
        f"{page_bytes(first) // first.page_size} each in family mha; a placeholder of one page has "
        f"{page_bytes(first)} bytes"
    )


FAMILY = PoolFamily(
    name=PREFILL_ONLY,
    is_mode=True,
    owns="nothing: tokens are counted",
    section=PoolSection,
    components=_components,
    divide=one_budget,
    refuses=(
        RefusedKey(
            key="engine.workload",
            why="each decoded token reads the KV of those before it",
            fix=f"set embedding or scoring, {_LEAVE}",
            allowed=("embedding", "scoring"),
        ),
        RefusedKey(
            key="engine.chunk_tokens",
            why="the second chunk of a prompt reads the KV of the first",
            fix=f"set -1, the whole prompt, {_LEAVE}",
            allowed=(-1, 0),  # 0 is refused in any mode, in other words
        ),
        RefusedKey(
            key="engine.mixed_chunk",
            why="a batch that decodes reads KV",
            fix=f"set false, {_LEAVE}",
            allowed=(False,),
        ),
        RefusedKey(
            key="engine.context_parallel",
            why="ranks that share a prompt write its KV to read each other's part",
            fix=f"set 1, {_LEAVE}",
            allowed=(1,),
        ),
        RefusedKey(
            key="engine.attention",
            why="paged attention reads K and V from the pool",
            fix=f"set varlen if the engine can, {_LEAVE}",
            allowed=("varlen",),
        ),
        RefusedKey(
            key="pool.scale_dtype",
            why="quantising KV stores its scales, and nothing may be written",
            fix=f"remove it, {_LEAVE}",
            allowed=(None,),
        ),
        RefusedKey(
            key="pool.index_dim",
            why="an index is read to choose KV, and there is none",
            fix=f"remove it, {_LEAVE}",
            allowed=(None,),
        ),
        RefusedKey(
            key="radix.policy",
            why="a prefix that is matched must be readable, so nothing is cached",
            fix=f"remove it, {_LEAVE}",
        ),
        RefusedKey(
            key="pool.saved_size",
            why="there is nothing to save of a lease",
            fix=f"remove it, {_LEAVE}",
            allowed=(None,),
        ),
        RefusedKey(
            key="transfer.integrity",
            why="there is no page whose bytes could be compared",
            fix=f"remove it, {_LEAVE}",
        ),
        RefusedKey(
            key="peers.connect",
            why="nothing can be sent to a peer, nor received",
            fix=f"remove it, {_LEAVE}",
        ),
    ),
    unsuited=_unsuited,
    plan_keys=plan_keys,
    plan_note=_note,
    shape={"layers": 2, "heads": 2, "head_dim": 16},
    with_sections={
        "cache": {"mode": PREFILL_ONLY},
        "engine": {"workload": "embedding", "attention": "varlen"},
    },
)
