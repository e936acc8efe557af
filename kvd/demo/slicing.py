"""Cuts a model down to what one rank computes: some heads of each layer, or some of the layers.

Tensor parallel, each rank computes its own query heads over its own heads of KV. Then the outputs
of all heads are exchanged, and every rank goes on with all of them. Sums are never split, so the
result is that of one process, to the bit where a rank has all queries of its heads of KV.
Everything but the attention is computed by every rank.

    hidden -> q, k, v of our heads -> attention -> exchange -> o_proj of all heads -> hidden

In a pipeline, a rank keeps its layers, numbered from 0; what it is given instead of embeddings is
what the layers before them made of the tokens.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from transformers import PreTrainedModel

    from kvd.demo.division import Heads
    from kvd.demo.layout import Shape

    Exchange = Callable[[torch.Tensor], torch.Tensor]
    """The outputs of a rank's heads in, those of all ranks beside each other out."""


class Per(enum.Enum):
    """What the rows of a projection are divided by."""

    QUERY = "query head"
    KV = "head of KV"


PROJECTIONS: Mapping[str, Mapping[str, Per]] = {
    "llama": {"q_proj": Per.QUERY, "k_proj": Per.KV, "v_proj": Per.KV},
    "qwen3": {"q_proj": Per.QUERY, "k_proj": Per.KV, "v_proj": Per.KV},
    # What comes before these is one latent, which every rank has.
    "deepseek_v3": {"q_b_proj": Per.QUERY, "kv_b_proj": Per.QUERY},
}
"""By the type of a model: the projections whose rows belong to heads."""


class Exchanged(nn.Module):
    """The projection behind an attention, whose heads were computed by several ranks."""

    def __init__(self, projection: nn.Module, exchange: Exchange) -> None:
        super().__init__()
        self.projection = projection
        self._exchange = exchange

    @override
    def forward(self, own: torch.Tensor) -> torch.Tensor:
        """Take (1, tokens, heads of this rank * head_dim); (1, tokens, hidden)."""
        hidden: torch.Tensor = self.projection(self._exchange(own))
        return hidden


def keep_heads(model: PreTrainedModel, shape: Shape, own: Heads, exchange: Exchange) -> None:
    """Leave ``model`` only those heads. ``shape`` is that of the whole model."""
    n_queries, n_kv = own.end_query - own.first_query, own.end_kv - own.first_kv
    for layer in model.model.layers:
        attention = layer.self_attn
        for name, per in PROJECTIONS[model.config.model_type].items():
            whole = cast("nn.Linear", attention.get_submodule(name))
            if per is Per.QUERY:
                rows = _rows(whole, shape.heads, own.first_query, own.end_query)
            else:
                rows = _rows(whole, shape.kv_heads, own.first_kv, own.end_kv)
            attention.set_submodule(name, rows)
        if not shape.latent_dim:
            attention.num_key_value_groups = n_queries // n_kv
        attention.o_proj = Exchanged(attention.o_proj, exchange)


def _rows(whole: nn.Linear, heads: int, first: int, end: int) -> nn.Linear:
    """The outputs of heads ``[first, end)`` of a projection to ``heads``."""
    each = whole.out_features // heads
    part = nn.Linear(whole.in_features, (end - first) * each, bias=False, dtype=whole.weight.dtype)
    part.weight = nn.Parameter(whole.weight[first * each : end * each], requires_grad=False)
    return part


def keep_layers(model: PreTrainedModel, first: int, end: int) -> None:
    """Leave ``model`` only layers ``[first, end)``; without the last one there is no final norm."""
    decoder = model.model
    is_last = end == len(decoder.layers)
    decoder.layers = nn.ModuleList(decoder.layers[first:end])
    model.config.num_hidden_layers = end - first
    for number, layer in enumerate(decoder.layers):
        layer.self_attn.layer_idx = number
    if not is_last:
        decoder.norm = nn.Identity()
