"""What stands in for a model in the examples here: KV that can be told from any other.

KV of a token depends on all tokens before it, so here it is a sum over them, another one for each
tensor. Its memory is a list of arrays (pages or blocks, tokens of one, heads, head_dim), as a pool
has them, or an engine's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvd.client import Pool

Memory = list[np.ndarray]

NAMESPACE = "played-model"
"""Whose KV it is: of a real one its weights, their version, its types, all that changes KV."""


def memory_of(pool: Pool) -> Memory:
    """The daemon's own memory, mapped here: K and V of each layer."""
    layers = {place.layer for place in pool.component("kv").tensors}
    return [part for layer in sorted(layers) for part in pool.arrays("kv", layer=layer).values()]


def memory_like(pool: Pool, blocks: int) -> Memory:
    """As much for each token, in so many blocks of the engine's own."""
    return [np.zeros((blocks, *part.shape[1:]), part.dtype) for part in memory_of(pool)]


def compute(
    memory: Memory, places: np.ndarray, tokens: np.ndarray, first: int, upto: int | None = None
) -> None:
    """Write KV of ``tokens[first:upto]``; ``places``: the page or block of each stretch of them."""
    size = memory[0].shape[1]
    at = np.arange(first, len(tokens) if upto is None else upto)
    for number, part in enumerate(memory):
        part[places[at // size], at % size] = _kv(tokens, number, part)[at, None, None]


def wrong(memory: Memory, places: np.ndarray, tokens: np.ndarray) -> int:
    """Of how many tokens the KV is not their own: what a model would say wrong things by."""
    size = memory[0].shape[1]
    at = np.arange(len(tokens))
    is_own = [
        (part[places[at // size], at % size] == _kv(tokens, number, part)[at, None, None])
        for number, part in enumerate(memory)
    ]
    return len(tokens) - int(np.logical_and.reduce(is_own).all(axis=(1, 2)).sum())


def _kv(tokens: np.ndarray, number: int, like: np.ndarray) -> np.ndarray:
    return (np.cumsum(tokens) * (number + 1) % 251).astype(like.dtype)
