"""Models and their own caches, which the paged ones are compared with."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache

from kvd.demo.cache import forward
from kvd.demo.models import ARCHITECTURES, build_model

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

ROUNDING = 5e-5
"""Of a logit in float32: a paged cache is attended over in another order. 1.6e-5 was seen."""


@functools.cache
def model_of(name: str, dtype: str = "float32") -> PreTrainedModel:
    """The model of one row of the registry."""
    torch.set_num_threads(1)
    return build_model(ARCHITECTURES[name], seed=1, dtype=dtype)


@torch.inference_mode()
def run(model: PreTrainedModel, cache: Cache, pieces: list[torch.Tensor]) -> torch.Tensor:
    """The logits of all tokens of ``pieces``, computed piece by piece."""
    return torch.cat([forward(model, cache, input_ids=piece).logits for piece in pieces], 1)


def own_cache(model: PreTrainedModel) -> Cache:
    """The cache that transformers would use."""
    return DynamicCache(config=model.config)


def tokens(count: int, seed: int = 7) -> torch.Tensor:
    """(1, count) random tokens."""
    return torch.randint(2048, (1, count), generator=torch.Generator().manual_seed(seed))


def pieces_of(prompt: torch.Tensor, chunk: int, singles: int) -> list[torch.Tensor]:
    """Chunks, and the last ``singles`` tokens one at a time, as a decode would compute them."""
    count = prompt.shape[1] - singles
    body = [prompt[:, start : min(start + chunk, count)] for start in range(0, count, chunk)]
    return [*body, *(prompt[:, at : at + 1] for at in range(count, prompt.shape[1]))]
