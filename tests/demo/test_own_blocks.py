"""A lease seen as blocks of an engine's own: what is loaded, what is saved, whose a block is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from kvd.demo.cache import Lengths
from kvd.demo.layout import PoolPart
from kvd.demo.leased import LeasedSequence, last_logits
from kvd.demo.own_blocks import BlockLease
from kvd.errors import KvdError
from tests.demo.played import PAGES, Played
from tests.demo.reference import ROUNDING, model_of, own_cache, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=["llama", "deepseek", "gemma"])
def played(request) -> Iterator[Played]:
    made = Played(request.param)
    yield made
    made.daemon.close()


def test_what_one_engine_saves_another_lease_goes_on_from(played: Played) -> None:
    """In chunks of 40, which end within pages; then from 100 tokens on, in other blocks."""
    model, prompt = model_of(played.row.name), tokens(160)[0].tolist()
    lease = played.lease(10)
    first = played.saved_in_chunks(model, lease, prompt)
    taken = first.pages_of("kv").copy()
    held = played.own.take("kv")
    saved_bytes = first.close()

    second = BlockLease(played.own, lease, kept_tokens=96)
    again = LeasedSequence(model, played.views, second, Lengths(100, 96), step_tokens=400)
    pages_bytes = played.row.pool.bytes_of(dict.fromkeys(played.views.parts, 1))
    assert second.load(100) == 7 * pages_bytes
    found = again.compute(prompt[100:])
    second.save(160)
    second.close()

    assert first.saved_tokens == 160
    assert saved_bytes == 12 * pages_bytes, "ten pages, and two twice: a chunk ended in them"
    assert held not in taken
    assert set(second.pages_of("kv").tolist()).isdisjoint({0, held})
    theirs = own_cache(model)
    last_logits(model, prompt[:100], theirs)
    assert (found - last_logits(model, prompt[100:], theirs)).abs().max() <= ROUNDING


def test_pages_that_were_cached_are_not_saved_again(played: Played) -> None:
    lease = played.lease(8)
    seen = BlockLease(played.own, lease, kept_tokens=64)
    for part in played.views.parts:
        seen.pages_of(part.value)

    seen.save(64)
    seen.save(128)
    seen.close()

    (order,) = played.begun()
    assert {(part.component, part.first_page, part.n_pages) for part in order.parts} == {
        (part.value, 4, 4) for part in played.views.parts
    }
    assert (order.to_pages, order.upto_tokens, seen.saved_tokens) == (True, 128, 128)


def test_a_save_that_is_under_way_counts_for_nothing(played: Played) -> None:
    seen = BlockLease(played.own, played.lease(4), kept_tokens=0)
    seen.pages_of("kv")
    played.daemon.hold()

    seen.save(32)
    seen.save(64)
    assert seen.saved_tokens == 0

    played.daemon.answer()
    seen.close()
    assert seen.saved_tokens == 64


def test_blocks_of_window_pages_that_went_back_are_anothers() -> None:
    played = Played("gemma")
    try:
        lease = played.lease(20, step=24)
        seen = BlockLease(played.own, lease, kept_tokens=0)
        before = seen.pages_of("swa").copy()
        seen.slide(200)
        after = seen.pages_of("swa").copy()
        assert (after != 0).tolist() == (lease.rows["swa"] != 0).tolist()
        assert np.count_nonzero(before) == 2
        # No more blocks than pages, however often it slides.
        for upto in range(200, 296, 24):
            seen.slide(upto)
            seen.pages_of("swa")
        seen.close()
        assert sorted(played.own._free["swa"]) == list(range(1, PAGES))
    finally:
        played.daemon.close()


def test_a_load_that_is_refused_is_said() -> None:
    played = Played("llama")
    try:
        played.daemon.hang_up()
        seen = BlockLease(played.own, played.lease(4), kept_tokens=0)
        seen.pages_of("kv")
        with pytest.raises(KvdError):
            seen.load(64)
    finally:
        played.daemon.close()


def test_a_model_with_states_has_no_blocks() -> None:
    with pytest.raises(KvdError, match="states change in place"):
        Played("mamba")


def test_damage_to_the_pool_changes_what_is_loaded(played: Played) -> None:
    """What makes the demo's negative control one of the copies too."""
    lease = played.lease(4)
    for views in played.pool.layers:
        for tensor in views:
            tensor[:] = torch.randn(tensor.shape)
    seen = BlockLease(played.own, lease, kept_tokens=64)
    row = seen.pages_of("kv")
    played.pool.damage(PoolPart.KV, int(lease.pages_of("kv")[1]))
    seen.load(64)

    found = next(
        tensors[0]
        for (name, _), tensors in zip(played.own._tensors, played.views.layers, strict=True)
        if name == "kv"
    )
    assert not found[row[1]].any()
    assert found[row[0]].any()
    seen.close()
