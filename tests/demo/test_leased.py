"""Sequences of a lease: window pages that turn along, states that are copied on write."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvd.demo.cache import Lengths
from kvd.demo.layout import PoolPart
from kvd.demo.leased import LeasedSequence, last_logits
from kvd.demo.models import ARCHITECTURES
from tests.demo.memory import JUNK, PAGE, PAGES, SlidingLease, cache_over, pool
from tests.demo.reference import ROUNDING, model_of, own_cache, run, tokens

SLIDING = pytest.mark.parametrize("name", ["gemma", "gptoss"])
CHUNK = 24


@SLIDING
def test_sequence_that_slides_computes_what_the_models_own_cache_does(name: str) -> None:
    """300 tokens in chunks and 40 one by one, with no more pages than a window and a step need."""
    model, row = model_of(name), ARCHITECTURES[name]
    memory, views = pool(row)
    window = row.shape.window_tokens
    prompt = tokens(340)[0].tolist()
    lease = SlidingLease(memory, tokens=340, step=CHUNK, window=window)
    mine = LeasedSequence(model, views, lease, Lengths(0, 0), step_tokens=CHUNK)
    theirs = own_cache(model)

    borders = [*range(0, 300, CHUNK), *range(300, 341)]
    for start, end in itertools.pairwise(borders):
        piece = prompt[start:end]
        difference = mine.compute(piece) - last_logits(model, piece, theirs)
        assert difference.abs().max().item() <= ROUNDING, start

    layout = row.pool
    assert lease.slid == [*range(CHUNK, 300, CHUNK), 312, 336]
    assert window // PAGE < mine.peak_window_pages <= layout.most_window_pages(CHUNK) < 340 // PAGE
    assert all(bool((one == JUNK).all()) for part in views.parts for one in memory.page(part, 0))


@SLIDING
@pytest.mark.parametrize("count", [65, 200, 208, 300])
def test_sequence_goes_on_from_the_window_alone(name: str, count: int) -> None:
    """After a handoff the window pages before the tail are none; what was there is junk."""
    model, row = model_of(name), ARCHITECTURES[name]
    memory, views = pool(row)
    layout = row.pool
    prompt = tokens(count + 20)
    rows = {
        part: SlidingLease(memory, tokens=count + 20, step=400, window=400)
        .pages_of(part.value)
        .tolist()
        for part in views.parts
    }
    run(model, cache_over(views, rows), [prompt[:, :count]])
    gone = layout.window_start(count) // PAGE
    for page in rows[PoolPart.WINDOW][:gone]:
        views.damage(PoolPart.WINDOW, page)
    rows[PoolPart.WINDOW][:gone] = [0] * gone

    mine = cache_over(views, rows, written=count, shared=count)
    theirs = own_cache(model)
    run(model, theirs, [prompt[:, :count]])

    assert mine.get_seq_length() == count
    for at in range(count, count + 20):
        one = prompt[:, at : at + 1]
        assert (run(model, mine, [one]) - run(model, theirs, [one])).abs().max().item() <= 1e-4


@SLIDING
def test_layer_with_a_window_refuses_what_has_no_page(name: str) -> None:
    """Looking too far back, or computing ahead of what is mapped: never the null page."""
    row = ARCHITECTURES[name]
    memory, views = pool(row)
    lease = SlidingLease(memory, tokens=300, step=CHUNK, window=row.shape.window_tokens)
    rows = {part: lease.pages_of(part.value).tolist() for part in views.parts}

    with pytest.raises(IndexError, match="token 32 has no window page: the lease has none so far"):
        run(model_of(name), cache_over(views, rows), [tokens(100)])

    assert all(bool((one == JUNK).all()) for one in memory.page(PoolPart.WINDOW, 0))


def test_window_of_two_pages_crosses_page_borders_anywhere() -> None:
    """Restored at every token of two pages: the first token looked at is right each time."""
    name = "gemma"
    model, row = model_of(name), ARCHITECTURES[name]
    window = row.shape.window_tokens
    prompt = tokens(240)
    memory, views = pool(row)
    lease = SlidingLease(memory, tokens=240, step=400, window=400)
    rows = {part: lease.pages_of(part.value).tolist() for part in views.parts}
    whole = run(model, own_cache(model), [prompt])
    run(model, cache_over(views, rows), [prompt])

    for at in range(190, 190 + 2 * PAGE):
        kept = dict(rows)
        first = (at - window + 1) // PAGE
        kept[PoolPart.WINDOW] = [0] * first + rows[PoolPart.WINDOW][first:]
        mine = cache_over(views, kept, written=at, shared=240)
        one = run(model, mine, [prompt[:, at : at + 1]])
        assert (one[:, 0] - whole[:, at]).abs().max().item() <= 1e-4, at


def test_state_is_copied_before_it_is_written() -> None:
    """Two sequences go on from one state: it stays as it is, and both are right."""
    model, row = model_of("mamba"), ARCHITECTURES["mamba"]
    memory, views = pool(row)
    prompt = tokens(120)
    run(model, cache_over(views, {PoolPart.STATE: [0, 7]}), [prompt[:, :64], prompt[:, 64:100]])
    before = memory.page(PoolPart.STATE, 7)

    for own, seed in ((8, 1), (9, 2)):
        rest = torch.cat([prompt[:, 100:], tokens(30, seed)], dim=1)
        mine = run(model, cache_over(views, {PoolPart.STATE: [7, own]}, written=100), [rest])
        theirs = run(model, own_cache(model), [torch.cat([prompt[:, :100], rest], dim=1)])
        assert (mine - theirs[:, 100:]).abs().max().item() <= 1e-4

    assert all(map(torch.equal, memory.page(PoolPart.STATE, 7), before))
    others = set(range(PAGES)) - {7, 8, 9}
    assert all(
        bool((one == JUNK).all()) for page in others for one in memory.page(PoolPart.STATE, page)
    )


def test_state_lies_in_its_page_after_every_step() -> None:
    """What a handoff reads: the page alone, without asking the engine, is where one goes on."""
    model, row = model_of("mamba"), ARCHITECTURES["mamba"]
    _, views = pool(row)
    prompt = tokens(70)
    whole = run(model, own_cache(model), [prompt])
    first = cache_over(views, {PoolPart.STATE: [0, 7]})

    for start, end in ((0, 3), (3, 40), (40, 41), (41, 42), (42, 69)):
        run(model, first, [prompt[:, start:end]])
        _, elsewhere = pool(row)
        for here, there in zip(views.layers, elsewhere.layers, strict=True):
            there.conv[3], there.scan[3] = here.conv[7], here.scan[7]
        received = cache_over(elsewhere, {PoolPart.STATE: [0, 3]}, written=end)
        one = run(model, received, [prompt[:, end : end + 1]])
        assert (one[:, 0] - whole[:, end]).abs().max().item() <= 1e-4, end
