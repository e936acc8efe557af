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
from kvd.types import amount

if TYPE_CHECKING:
    from kvd.core.layout.spec import PoolSpec
    from kvd.families.model import Model

PREFILL_ONLY = "prefill-only"


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
        f"{amount(page_bytes(first))}"
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
            "engine.workload",
            "each decoded token reads the KV of those before it",
            "set embedding or scoring",
            allowed=("embedding", "scoring"),
        ),
        RefusedKey(
            "engine.chunk_tokens",
            "the second chunk of a prompt reads the KV of the first",
            "set -1, the whole prompt",
            allowed=(-1, 0),  # 0 is refused in any mode, in other words
        ),
        RefusedKey(
            "engine.mixed_chunk", "a batch that decodes reads KV", "set false", allowed=(False,)
        ),
        RefusedKey(
            "engine.context_parallel",
            "ranks that share a prompt write its KV to read each other's part",
            "set 1",
            allowed=(1,),
        ),
        RefusedKey(
            "engine.attention",
            "paged attention reads K and V from the pool",
            "set varlen if the engine can",
            allowed=("varlen",),
        ),
        RefusedKey(
            "pool.scale_dtype",
            "quantising KV stores its scales, and nothing may be written",
            allowed=(None,),
        ),
        RefusedKey(
            "pool.index_dim", "an index is read to choose KV, and there is none", allowed=(None,)
        ),
        RefusedKey(
            "radix.policy", "a prefix that is matched must be readable, so nothing is cached"
        ),
        RefusedKey("pool.saved_size", "there is nothing to save of a lease", allowed=(None,)),
        RefusedKey("transfer.integrity", "there is no page whose bytes could be compared"),
        RefusedKey("peers.connect", "nothing can be sent to a peer, nor received"),
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
