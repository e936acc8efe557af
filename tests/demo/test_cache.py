"""The paged caches against the models' own: the same tokens, the same logits, no copy kept."""

from __future__ import annotations

import pytest
import torch

from kvd.core.layout.spec import PageOrder
from kvd.demo.layout import PoolPart, places
from kvd.demo.models import ARCHITECTURES, build_model, weight_digest
from tests.demo.memory import JUNK, PAGE, cache_over, pool, rows_for, scattered
from tests.demo.reference import ROUNDING, model_of, own_cache, pieces_of, run, tokens

EVERY = pytest.mark.parametrize("name", sorted(ARCHITECTURES))
WITH_PREFIX = pytest.mark.parametrize("name", ["llama", "deepseek", "gemma", "gptoss"])


@EVERY
@pytest.mark.parametrize(
    ("order", "count"),
    [*((PageOrder.PAGE_FIRST, count) for count in (1, 17, 112, 300)), (PageOrder.LAYER_FIRST, 300)],
)
def test_paged_cache_equals_the_models_own_cache(name: str, order: PageOrder, count: int) -> None:
    """Chunked prefill and decode, scattered pages, a partial last page: equal logits.

    300 tokens are far beyond a window, and chunks of 24 begin it anywhere in a page.
    """
    model = model_of(name)
    pieces = pieces_of(tokens(count), chunk=24, singles=min(5, count - 1))
    _, views = pool(ARCHITECTURES[name], order=order)
    cache = cache_over(views, rows_for(count))

    mine = run(model, cache, pieces)
    theirs = run(model, own_cache(model), pieces)

    assert (mine - theirs).abs().max().item() <= ROUNDING


@EVERY
def test_paged_cache_equals_the_models_own_cache_in_double_precision(name: str) -> None:
    model = model_of(name, "float64")
    pieces = pieces_of(tokens(140), chunk=24, singles=5)
    _, views = pool(ARCHITECTURES[name], dtype="float64")

    mine = run(model, cache_over(views, rows_for(140)), pieces)
    theirs = run(model, own_cache(model), pieces)

    # The router of DeepSeek and the scan of Mamba are in single precision, whatever the dtype.
    tolerance = 1e-5 if name in ("deepseek", "mamba") else 1e-10
    assert (mine - theirs).abs().max().item() <= tolerance


@WITH_PREFIX
@pytest.mark.parametrize("order", list(PageOrder))
def test_paged_cache_reads_another_sequences_prefix_in_place(name: str, order: PageOrder) -> None:
    """scenario A2: 64 of 200 tokens come from pages that a first sequence wrote."""
    model = model_of(name)
    memory, views = pool(ARCHITECTURES[name], order=order)
    prompt = tokens(200)
    rows = rows_for(200)
    whole = run(model, cache_over(views, rows), [prompt])
    shared = {part: row[:4] for part, row in rows.items() if part in views.parts}
    before = memory.pages(shared)

    fresh = scattered(40, 8)
    others = [page for page in fresh if not any(page in row for row in rows.values())]
    mixed = {part: row[:4] + others[: len(row) - 4] for part, row in rows.items()}
    second = cache_over(views, mixed, written=64, shared=64)
    rest = run(model, second, [prompt[:, 64:]])

    assert (rest - whole[:, 64:]).abs().max().item() <= 1e-4
    after = memory.pages(shared)
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_paged_cache_writes_nothing_when_the_last_token_is_recomputed_after_a_full_hit(
    name: str,
) -> None:
    """scenario A6: the first output is computed, the shared page stays as it is, bit for bit."""
    model = model_of(name)
    memory, views = pool(ARCHITECTURES[name])
    prompt = tokens(96)
    rows = rows_for(96)
    whole = run(model, cache_over(views, rows), [prompt])
    before = memory.pages(rows)

    last = run(model, cache_over(views, rows, written=95, shared=96), [prompt[:, 95:]])

    assert (last[:, 0] - whole[:, 95]).abs().max().item() <= 1e-4
    after = memory.pages(rows)
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("name", ["llama", "deepseek", "gemma"])
def test_layer_gathers_nothing(name: str) -> None:
    """What it is given is what it returns; what is seen are the pages themselves."""
    _, views = pool(ARCHITECTURES[name])
    cache = cache_over(views, rows_for(100))
    run(model_of(name), cache, [tokens(90)])
    layer, (k, v) = cache.layers[0], views.layers[0]
    if name == "deepseek":
        new = torch.ones(1, 1, 3, v.shape[-1]), torch.ones(1, 1, 3, k.shape[-1] - v.shape[-1])
    else:
        new = torch.ones(1, *k.shape[2:3], 3, k.shape[-1]), torch.ones(1, *k.shape[2:3], 3, 32)

    returned = layer.update(*new)
    seen = layer.seen()

    assert returned[0] is new[0]
    assert returned[1] is new[1]
    assert (seen.pages.k.data_ptr(), seen.pages.v.data_ptr()) == (k.data_ptr(), v.data_ptr())
    assert (seen.pages.lengths.tolist(), seen.starts.tolist()) == ([93], [0, 3])


def test_paged_cache_refuses_a_token_beyond_the_lease() -> None:
    _, views = pool(ARCHITECTURES["llama"])
    cache = cache_over(views, {PoolPart.KV: [5]})

    with pytest.raises(IndexError, match="token 16 has no page: the lease covers 1 pages of 16"):
        run(model_of("llama"), cache, [tokens(17)])


@EVERY
def test_output_depends_on_every_page_of_the_prompt(name: str) -> None:
    """The negative control: were a model blind to its context, equal tokens would say nothing."""
    model = model_of(name)
    prompt = tokens(100)
    rows = rows_for(100)
    parts = sorted({place.part for place in places(ARCHITECTURES[name].shape)}, key=str)
    for part in parts:
        for page in rows[part][:6] if part is not PoolPart.STATE else [5]:
            _, views = pool(ARCHITECTURES[name])
            run(model, cache_over(views, rows), [prompt])
            good = run(model, cache_over(views, rows, written=100, shared=100), [prompt[:, 99:]])
            _, views = pool(ARCHITECTURES[name])
            run(model, cache_over(views, rows), [prompt])
            views.damage(part, page)

            bad = run(model, cache_over(views, rows, written=100, shared=100), [prompt[:, 99:]])

            seen = part is not PoolPart.WINDOW or rows[part].index(page) * PAGE + PAGE > 101 - (
                ARCHITECTURES[name].shape.window_tokens
            )
            assert ((good - bad).abs().max().item() > 0.05) == seen, (part, page)


@EVERY
def test_null_page_is_neither_read_nor_written(name: str) -> None:
    memory, views = pool(ARCHITECTURES[name])

    run(model_of(name), cache_over(views, rows_for(100)), pieces_of(tokens(100), 24, 3))

    for part in views.parts:
        assert all(bool((tensor == JUNK).all()) for tensor in memory.page(part, 0))


@EVERY
def test_weights_are_the_same_for_the_same_seed(name: str) -> None:
    row = ARCHITECTURES[name]

    assert weight_digest(build_model(row, seed=1, dtype="float32")) == weight_digest(model_of(name))
    assert weight_digest(build_model(row, seed=2, dtype="float32")) != weight_digest(model_of(name))
