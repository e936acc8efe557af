"""How a model of transformers attends over the pages of a pool.

``transformers`` lets a function take the place of a model's attention. This one is given the
queries of the new tokens, whose K and V the cache has just written to its pages, and reads the K
and V of all tokens from there, by block table. Nobody makes a mask, and nobody gathers:

    layer.update(k, v)      the new K and V go to pages, and are handed through
    attend(module, q, ...)  layer.seen() says which pages, up to which token; see kvd.device

A layer of latents (MLA) keeps the latent of a token, from which each head would make its K and V.
Instead its queries are taken into the space of latents, and what they find back out of it; so every
head looks at the latents themselves:

    q (W c) = (q W) c        sum of weights * (W c) = W (sum of weights * c)

A cache without pages is left to the model's own attention.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec
import torch
from transformers import AttentionInterface

from kvd.device.attention import AttentionRule, BatchPages, is_latent, prefill

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import Cache, PreTrainedModel

ATTENTION = "kvd-pages"

CACHE_ARGUMENT = {"mamba2": "cache_params"}
"""What a model calls its cache, by its type, where that is not ``past_key_values``."""


class Seen(msgspec.Struct, frozen=True, eq=False):
    """What the new tokens of a sequence look at.

    They are runs of tokens that follow each other; each run is a sequence of ``pages``, up to its
    last token. ``starts``: (runs + 1,) int32, where each begins among the new tokens.
    """

    pages: BatchPages
    starts: torch.Tensor


@runtime_checkable
class Paged(Protocol):
    """A layer of a cache whose K and V lie in pages."""

    def seen(self) -> Seen:
        """What the tokens that were written last look at."""


def forward(model: PreTrainedModel, cache: Cache, **inputs: object) -> Any:
    """Call ``model`` over ``cache``, whether that has pages or not; what the model gives."""
    argument = CACHE_ARGUMENT.get(model.config.model_type, "past_key_values")
    if not any(isinstance(layer, Paged) for layer in cache.layers):
        return model(**{argument: cache}, **inputs)
    with _attending(model):
        return model(**{argument: cache}, kvd_layers=cache.layers, **inputs)


@contextmanager
def _attending(model: PreTrainedModel) -> Iterator[None]:
    """For now, its attention is the one below."""
    own = model.config._attn_implementation  # noqa: SLF001 - there is no public name for it
    model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(own)


def attend(  # noqa: PLR0913 - as transformers calls it
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kvd_layers: list[Paged],
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it.

    Args:
        module: the attention; its number among the layers tells which pages.
        query: (1, heads, new_tokens, head_dim).
        key: of the new tokens alone, and in the pages already.
        value: likewise.
        attention_mask: there is none: who sees whom follows from the lengths.
        kvd_layers: of the cache, as ``forward`` gives them.
        scaling: of scores.
        sliding_window: the tokens that are seen, the token itself among them.
        softcap: of scores.
        s_aux: (heads,) sinks.

    Returns:
        (1, new_tokens, heads, head_dim of V).
    """
    assert attention_mask is None, "who sees whom follows from the lengths"
    layer = module.layer_idx
    assert isinstance(layer, int)
    seen = kvd_layers[layer].seen()
    rule = AttentionRule(scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    packed = query[0].transpose(0, 1)
    if is_latent(seen.pages):
        weight = module.get_parameter("kv_b_proj.weight")
        return _attend_latents(weight, packed, seen, rule)[None], None
    return prefill(packed, seen.pages, rule, seen.starts)[None], None


AttentionInterface.register(ATTENTION, attend)


def _attend_latents(
    weight: torch.Tensor, query: torch.Tensor, seen: Seen, rule: AttentionRule
) -> torch.Tensor:
    """(tokens, heads, v_dim): attention over latents, of queries that know K and V.

    Args:
        weight: (heads * (plain + v_dim), latent_dim), which makes K and V of a latent.
        query: (tokens, heads, plain + rotated).
        seen: latents and rotated keys.
        rule: what a token sees.
    """
    _, heads, dim = query.shape
    latent_dim = seen.pages.v.shape[-1]
    rotated_dim = seen.pages.k.shape[-1] - latent_dim
    plain, rotated = query.tensor_split([dim - rotated_dim], dim=-1)
    to_k, to_v = weight.view(heads, -1, latent_dim).tensor_split([dim - rotated_dim], dim=1)
    latent = torch.cat([torch.einsum("thd,hdl->thl", plain, to_k), rotated], dim=-1)
    found = prefill(latent, seen.pages, rule, seen.starts)
    return torch.einsum("thl,hvl->thv", found, to_v)
