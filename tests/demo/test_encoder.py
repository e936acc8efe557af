"""An encoder whose K and V go through a pool, and one that keeps none: the same embeddings."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AttentionInterface

from kvd.demo.encoder import ATTENTION, PoolAttention, embeddings, padded
from kvd.demo.models import ENCODERS, build_model
from tests.demo.memory import JUNK, PAGE, Memory, scattered

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEXTS = [tuple(range(5, 75)), tuple(range(100, 117)), (9, 8, 7)]


@functools.cache
def encoder(dtype: str) -> PreTrainedModel:
    torch.set_num_threads(1)
    return build_model(ENCODERS["embedding"], seed=1, dtype=dtype)


def leases() -> list[list[int]]:
    """Pages for each text, none shared."""
    free = scattered(40)
    rows = []
    for text in TEXTS:
        count = -(-len(text) // PAGE)
        rows.append(free[:count])
        free = free[count:]
    return rows


class Run:
    """One encoder over one pool."""

    def __init__(self, dtype: str = "float32") -> None:
        self.memory = Memory(ENCODERS["embedding"], dtype=dtype)
        layers = [tuple(self.memory.tensors("kv", layer=one).values()) for one in range(4)]
        self.attention = PoolAttention(layers)
        self.model = encoder(dtype)
        AttentionInterface.register(ATTENTION, self.attention)

    def embed(self, **how: bool) -> torch.Tensor:
        tokens, mask = padded(TEXTS)
        self.attention.write_nothing(mask)
        if how:
            self.attention.write_to(leases(), mask, **how)
        self.model.set_attn_implementation(ATTENTION)
        return embeddings(self.model, tokens, mask)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_embeddings_are_the_same_with_kv_written_read_back_and_without(dtype: str) -> None:
    run = Run(dtype)

    without = run.embed()
    written = run.embed(reads_back=False, damage=False)
    read_back = run.embed(reads_back=True, damage=False)

    assert torch.equal(without, written)
    assert torch.equal(without, read_back)
    run.model.set_attn_implementation("sdpa")
    alone = torch.cat([embeddings(run.model, *padded([text])) for text in TEXTS])
    assert (alone - without).abs().max().item() <= ENCODERS["embedding"].tolerance.of(dtype)
    assert torch.allclose(without.norm(dim=-1), torch.ones(3, dtype=without.dtype))


def test_without_kv_nothing_is_written() -> None:
    run = Run()

    run.embed()

    assert all(bool((one == JUNK).all()) for page in range(64) for one in memory_of(run, page))


def test_written_kv_is_in_the_pages_of_the_texts_and_nowhere_else() -> None:
    run = Run()

    run.embed(reads_back=False, damage=False)

    for row, text in zip(leases(), TEXTS, strict=True):
        filled = [(one != JUNK).all(-1).all(-1).sum().item() for one in memory_of(run, row[-1])]
        assert filled == [len(text) - PAGE * (len(row) - 1)] * 8
    used = {page for row in leases() for page in row}
    others = set(range(64)) - used
    assert all(bool((one == JUNK).all()) for page in others for one in memory_of(run, page))


def test_damaged_page_changes_the_embedding_of_its_text_alone() -> None:
    run = Run()

    good = run.embed(reads_back=True, damage=False)
    bad = run.embed(reads_back=True, damage=True)

    assert [one > 1e-3 for one in (good - bad).abs().amax(-1).tolist()] == [True, False, False]


def memory_of(run: Run, page: int) -> list[torch.Tensor]:
    """What is in one page: K and V of each layer, (page_size, heads, head_dim)."""
    return [
        one[page] for layer in range(4) for one in run.memory.tensors("kv", layer=layer).values()
    ]
