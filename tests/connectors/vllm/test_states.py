"""Layers with states: a page has that of its last token, and a request goes on behind one alone.

vLLM gives the blocks of all states but the last ones to others; what lies in one is written again
with each token until its block is full.
"""

from __future__ import annotations

import pytest

from kvd.connectors.vllm.under_way import OrdersUnderWay
from tests.connectors.vllm.stand_ins import Request
from tests.connectors.vllm.world import BLOCK, World, WorldEngine

PROMPT = list(range(100, 140))
N_BLOCKS = len(PROMPT) // BLOCK


@pytest.fixture
def world():
    return World(has_states=True)


def engine_of(world, **more):
    engine = WorldEngine(world, **({"chunk": 8, "reserve_tokens": 8} | more))
    engine.steps(2)
    return engine


def cached(world, tokens):
    return sum(1 for key in world.cached if key[2:] == tuple(tokens[: len(key) - 2]))


def test_each_page_has_the_state_of_its_last_token_and_one_is_loaded(world):
    engine = engine_of(world)
    first = engine.add(Request(1, PROMPT))
    engine.steps(N_BLOCKS + 1)
    assert cached(world, PROMPT) == N_BLOCKS
    engine.finish(first)
    engine.add(Request(2, [*PROMPT, 7]))
    engine.step()
    whole, states = engine.blocks["r2"]
    assert 0 not in whole[:N_BLOCKS]
    assert states[:N_BLOCKS].count(0) == N_BLOCKS - 1
    engine.steps(3)
    assert engine.loaded_tokens == len(PROMPT)
    engine.settle()


@pytest.mark.parametrize("n_tokens", [33, 35, 36, 40])
def test_a_hit_ends_at_the_end_of_a_page_before_the_last_token(world, n_tokens):
    """Of a prompt that is cached whole its last token is computed: not behind its own state."""
    engine = engine_of(world)
    first = engine.add(Request(1, PROMPT))
    engine.steps(N_BLOCKS + 1)
    engine.finish(first)
    request = engine.add(Request(2, PROMPT[:n_tokens]))
    engine.steps(4)
    assert engine.loaded_tokens == (n_tokens - 1) // BLOCK * BLOCK
    assert request.num_computed_tokens == n_tokens
    engine.settle()


def test_what_is_generated_is_cached_too(world):
    engine = engine_of(world)
    request = engine.add(Request(1, PROMPT[:18]))
    engine.steps(8)
    for token in range(300, 309):
        request.all_token_ids.append(token)
        engine.step()
    engine.finish(request)
    engine.steps(3)
    said = list(request.all_token_ids)
    assert cached(world, said) == (len(said) - 1) // BLOCK
    engine.add(Request(2, [*said, 7]))
    engine.steps(4)
    assert engine.loaded_tokens == (len(said) - 1) // BLOCK * BLOCK
    engine.settle()


def test_of_a_prompt_that_another_node_sent_whole_pages_are_loaded(world):
    """The state that came with its last page, which is not full, is of no use."""
    world.rooms.add(7)
    engine = engine_of(world)
    params = {"do_remote_prefill": True, "kvd": {"peer": "n1", "room": "7"}}
    request = engine.add(Request(1, PROMPT[:18], params))
    engine.steps(6)
    assert engine.loaded_tokens == 16
    assert request.num_computed_tokens == 18
    for token in range(300, 303):
        request.all_token_ids.append(token)
        engine.step()
    engine.steps(2)
    engine.finish(request)
    engine.steps(3)
    assert cached(world, request.all_token_ids) == 5
    engine.settle()


def test_a_preempted_request_goes_on_behind_its_last_whole_page(world):
    engine = engine_of(world)
    request = engine.add(Request(1, PROMPT[:38]))
    engine.steps(11)
    assert request.num_computed_tokens == 38
    request.all_token_ids.append(300)
    engine.step()
    engine.preempt(request)
    engine.steps(4)
    assert engine.loaded_tokens == 36
    engine.settle()


def test_what_vllm_has_itself_and_kvd_has_not_is_not_saved_in_part(world):
    """Of the states before vLLM has none."""
    engine = engine_of(world)
    engine.local["r1"] = 20
    engine.add(Request(1, PROMPT))
    engine.steps(N_BLOCKS)
    assert not world.cached
    assert not engine.half.counts.went_alone
    engine.settle()


def test_a_hit_that_ends_within_a_page_is_noticed_here(world, monkeypatch):
    monkeypatch.setattr(OrdersUnderWay, "has_states", False)
    with pytest.raises(AssertionError, match="KV that is not its own"):
        test_a_hit_ends_at_the_end_of_a_page_before_the_last_token(world, 40)
