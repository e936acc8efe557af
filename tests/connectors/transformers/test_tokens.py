"""Tokens are those of the model alone, whatever the node had of the prompt."""

from __future__ import annotations

import functools

import pytest
import torch

from kvd.connectors.transformers.layout import shape_of
from kvd.core.layout.spec import PageOrder
from tests.connectors.transformers.world import (
    ARCHITECTURES,
    answered,
    daemon_for,
    model_of,
    nothing_is_held,
    prompt,
    served,
)

PAGE = 16
PROMPT = 150


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
@pytest.mark.parametrize("order", list(PageOrder))
def test_tokens_are_equal_cold_and_hit_and_in_the_next_turn(name: str, order: PageOrder) -> None:
    """Every family: nothing cached, all of it, and a conversation that goes on in a new session."""
    if order is PageOrder.LAYER_FIRST and name not in {"llama", "gemma"}:
        pytest.skip("the order of a pool is seen in two families")
    model = model_of(name)
    first = prompt(PROMPT)
    alone = answered(model, first)
    second = torch.cat([alone, prompt(37, seed=8)], dim=1)
    alone_again = answered(model, second)
    step = 1 if name == "mamba" else PAGE
    last = (PROMPT - 1) // step * step
    with daemon_for(model, order=order.value) as daemon:
        with served(model, daemon) as node:
            assert torch.equal(answered(model, first), alone)
            assert node.counts.hit_tokens == 0
            assert node.counts.saved_tokens >= last

            assert torch.equal(answered(model, first), alone)
            assert node.counts.hit_tokens == last
        nothing_is_held(daemon)

        with served(model, daemon) as node:
            assert torch.equal(answered(model, second), alone_again)
            # The last token of an answer has no KV.
            assert node.counts.hit_tokens == (alone.shape[1] - 1) // step * step
        nothing_is_held(daemon)
    assert "generate" not in vars(model), "the model is as it was"


def test_a_cached_prompt_is_not_computed(monkeypatch) -> None:
    """The model is given what is behind the hit, and no more."""
    model, ids, given = model_of("llama"), prompt(100), []
    forward = type(model).forward

    @functools.wraps(forward)  # a hook would have it computed without kvd
    def look(*args, **how):
        given.append(how["input_ids"].shape[1])
        return forward(*args, **how)

    with daemon_for(model) as daemon, served(model, daemon):
        answered(model, ids)
        monkeypatch.setattr(type(model), "forward", look)
        answered(model, ids, max_new_tokens=3)

    assert given == [4, 1, 1]


@pytest.mark.parametrize("count", [2, 15, 16, 17, 32, 33])
def test_prompts_that_end_at_and_beside_pages(count: int) -> None:
    model, ids = model_of("qwen"), prompt(count)
    alone = answered(model, ids)
    with daemon_for(model) as daemon, served(model, daemon) as node:
        for _ in range(2):
            assert torch.equal(answered(model, ids), alone)
        assert node.counts.hit_tokens == (count - 1) // PAGE * PAGE


@pytest.mark.parametrize("name", ["gemma", "gptoss"])
def test_windows_are_whole_wherever_a_prompt_ends(name: str) -> None:
    """Prompts about a page, a window and two: what was saved of the windows is what is loaded."""
    model = model_of(name)
    with daemon_for(model) as daemon, served(model, daemon) as node:
        for count in (17, 71, 97, 112, 113, 209, 300):
            ids = prompt(count, seed=count)
            alone = type(model).generate(model, ids, max_new_tokens=4, do_sample=False)
            assert torch.equal(answered(model, ids, max_new_tokens=4), alone)
            before = node.counts.hit_tokens
            assert torch.equal(answered(model, ids, max_new_tokens=4), alone)
            assert node.counts.hit_tokens - before == (count - 1) // PAGE * PAGE


def test_sampling_draws_the_same_tokens() -> None:
    model, ids = model_of("llama"), prompt(80)

    def drawn():
        torch.manual_seed(5)
        return answered(model, ids, do_sample=True, top_k=50)

    alone = drawn()
    with daemon_for(model) as daemon, served(model, daemon):
        assert torch.equal(drawn(), alone)
        assert torch.equal(drawn(), alone)


def test_a_streamer_and_an_answer_with_its_cache_are_as_without() -> None:
    model, ids, said = model_of("llama"), prompt(40), []

    class Streamer:
        def put(self, found):
            said.extend(found.flatten().tolist())

        def end(self):
            said.append(-1)

    alone = answered(model, ids)
    with daemon_for(model) as daemon, served(model, daemon):
        answered(model, ids)
        out = answered(model, ids, streamer=Streamer(), return_dict_in_generate=True)

        assert said == [*alone[0].tolist(), -1]
        assert torch.equal(out.sequences, alone)
        # What came with the answer can be gone on from, as any other.
        longer = torch.cat([out.sequences, prompt(5)], dim=1)
        name = shape_of(model).argument
        again = answered(model, longer, **{name: out[name]})
    assert torch.equal(again, answered(model, longer))


@pytest.mark.parametrize(("save", "hit"), [("all", 96), ("prompt", 80), ("none", 0)])
def test_what_is_saved_can_be_chosen(save: str, hit: int) -> None:
    model, ids = model_of("llama"), prompt(90)
    with daemon_for(model) as daemon, served(model, daemon, save=save) as node:
        out = answered(model, ids)
        answered(model, torch.cat([out[:, :-1], prompt(9)], dim=1), max_new_tokens=1)
        assert node.counts.hit_tokens == hit


def test_a_page_that_is_damaged_changes_the_tokens() -> None:
    """The negative control: what is loaded is what the model looks at."""
    model, ids = model_of("llama"), prompt(100)
    alone = answered(model, ids)
    with daemon_for(model) as daemon, served(model, daemon) as node:
        answered(model, ids)
        copies = node._link._link.fit
        for pages in copies._fit.layers:
            pages.k[:], pages.v[:] = 0, 0
        assert not torch.equal(answered(model, ids), alone)
        del copies, pages
