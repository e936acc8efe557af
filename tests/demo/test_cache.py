"""The paged cache against the model's own cache: the same tokens, the same logits, no copy kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import DynamicCache

from kvd.core.geometry import geometry
from kvd.core.spec import Component, Mha, Order
from kvd.demo.cache import LayerViews, paged_cache
from kvd.demo.models import ARCHITECTURES, build_model, weight_digest

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

LLAMA = ARCHITECTURES["llama"]
PAGE = 16
PAGES = 64


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.set_num_threads(1)
    return build_model(LLAMA, seed=1, dtype="float32")


def pool(order: Order) -> list[LayerViews]:
    """The views that an engine gets of a pool, over memory full of junk."""
    shape = LLAMA.shape
    layout = Mha(shape.kv_heads, shape.head_dim, shape.head_dim, "float32")
    component = Component("kv", shape.layers, layout, PAGE)
    where = geometry(component, pages=PAGES, order=order)
    memory = torch.full((where.total_bytes // 4,), 1e9)
    views = [
        torch.as_strided(
            memory,
            (PAGES, *place.page_shape),
            (place.page_stride_bytes // 4, shape.kv_heads * shape.head_dim, shape.head_dim, 1),
            place.offset_bytes // 4,
        )
        for place in where.tensors
    ]
    return list(zip(views[::2], views[1::2], strict=True))


def tokens(count: int, seed: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(LLAMA.shape.vocabulary, (1, count), generator=generator)


@torch.inference_mode()
def run(model: PreTrainedModel, cache: Cache, pieces: list[torch.Tensor]) -> torch.Tensor:
    """The logits of all tokens of ``pieces``, computed piece by piece."""
    return torch.cat(
        [model(input_ids=piece, past_key_values=cache).logits for piece in pieces], dim=1
    )


def pieces_of(prompt: torch.Tensor, chunk: int, singles: int) -> list[torch.Tensor]:
    """Chunks, and the last ``singles`` tokens one at a time, as a decode would compute them."""
    count = prompt.shape[1] - singles
    body = [prompt[:, start : min(start + chunk, count)] for start in range(0, count, chunk)]
    return [*body, *(prompt[:, at : at + 1] for at in range(count, prompt.shape[1]))]


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("count", [1, 15, 16, 17, 100, 112])
def test_paged_cache_equals_a_dynamic_cache(
    model: PreTrainedModel, order: Order, count: int
) -> None:
    """Chunked prefill and decode, scattered pages, a partial last page: equal logits."""
    pages = torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(3)) + 1
    pieces = pieces_of(tokens(count), chunk=24, singles=min(5, count - 1))
    cache = paged_cache(
        pool(order), pages[: -(-count // PAGE)].tolist(), written_tokens=0, shared_tokens=0
    )

    mine = run(model, cache, pieces)
    theirs = run(model, DynamicCache(config=model.config), pieces)

    assert (mine - theirs).abs().max().item() <= 1e-6
    assert cache.get_seq_length() == count


@pytest.mark.parametrize("order", list(Order))
def test_paged_cache_reads_another_sequences_prefix_in_place(
    model: PreTrainedModel, order: Order
) -> None:
    """scenario A2: 64 of 100 tokens come from pages that a first sequence wrote."""
    layers = pool(order)
    prompt = tokens(100)
    first = paged_cache(layers, [9, 4, 30, 2, 11, 12, 13], written_tokens=0, shared_tokens=0)
    whole = run(model, first, [prompt])
    before = [(k[[9, 4, 30, 2]].clone(), v[[9, 4, 30, 2]].clone()) for k, v in layers]

    second = paged_cache(layers, [9, 4, 30, 2, 40, 41, 42], written_tokens=64, shared_tokens=64)
    rest = run(model, second, [prompt[:, 64:]])

    assert (rest - whole[:, 64:]).abs().max().item() <= 1e-4
    for (k, v), (k_before, v_before) in zip(layers, before, strict=True):
        assert torch.equal(k[[9, 4, 30, 2]], k_before)
        assert torch.equal(v[[9, 4, 30, 2]], v_before)


@pytest.mark.parametrize("order", list(Order))
def test_paged_cache_writes_nothing_when_the_last_token_is_recomputed_after_a_full_hit(
    model: PreTrainedModel, order: Order
) -> None:
    """scenario A6: the first output is computed, the shared page stays as it is, bit for bit."""
    layers = pool(order)
    prompt = tokens(96)
    whole = run(
        model, paged_cache(layers, range(1, 7), written_tokens=0, shared_tokens=0), [prompt]
    )
    before = [(k.clone(), v.clone()) for k, v in layers]

    again = paged_cache(layers, range(1, 7), written_tokens=95, shared_tokens=96)
    last = run(model, again, [prompt[:, 95:]])

    assert (last[:, 0] - whole[:, 95]).abs().max().item() <= 1e-4
    for (k, v), (k_before, v_before) in zip(layers, before, strict=True):
        assert torch.equal(k, k_before)
        assert torch.equal(v, v_before)


def test_paged_cache_refuses_a_token_beyond_the_lease(model: PreTrainedModel) -> None:
    cache = paged_cache(pool(Order.PAGE_FIRST), [5], written_tokens=0, shared_tokens=0)

    with pytest.raises(IndexError, match="token 16 has no page: the lease covers 1 pages of 16"):
        run(model, cache, [tokens(17)])


def test_output_depends_on_every_page_of_the_prompt(model: PreTrainedModel) -> None:
    """The negative control: were the model blind to its context, equal tokens would say nothing."""
    prompt = tokens(100)
    for page in range(1, 7):
        layers = pool(Order.PAGE_FIRST)
        cache = paged_cache(layers, range(1, 8), written_tokens=0, shared_tokens=0)
        good = run(model, cache, [prompt])[:, -1]
        for k, v in layers:
            k[page] = 0
            v[page] = 0

        damaged = paged_cache(layers, range(1, 8), written_tokens=99, shared_tokens=99)
        bad = run(model, damaged, [prompt[:, 99:]])[:, -1]

        assert (good - bad).abs().max().item() > 0.1


def test_weights_are_the_same_for_the_same_seed(model: PreTrainedModel) -> None:
    assert weight_digest(build_model(LLAMA, seed=1, dtype="float32")) == weight_digest(model)
    assert weight_digest(build_model(LLAMA, seed=2, dtype="float32")) != weight_digest(model)
