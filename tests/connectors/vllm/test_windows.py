"""Layers with windows beside others: whose blocks vLLM takes back while their request goes on.

A page has a block of each group of layers. What is loaded is what vLLM has blocks for; what is
saved is saved whole, before the window has moved on, or not at all.
"""

from __future__ import annotations

import pytest

from kvd.connectors.vllm.windows import KEPT_S, WindowBlocks
from tests.connectors.vllm.stand_ins import Request
from tests.connectors.vllm.world import BLOCK, LAYERS, World, WorldEngine

WINDOW = 7
PROMPT = list(range(100, 140))
N_BLOCKS = len(PROMPT) // BLOCK


@pytest.fixture
def world():
    return World()


def engine_of(world, **more):
    engine = WorldEngine(world, **({"chunk": 8, "window": WINDOW, "reserve_tokens": 8} | more))
    engine.steps(2)
    return engine


def cached(world, tokens):
    return sum(1 for key in world.cached if key[2:] == tuple(tokens[: len(key) - 2]))


def test_all_of_a_prompt_is_saved_and_of_a_window_the_last_blocks_are_loaded(world):
    engine = engine_of(world)
    first = engine.add(Request(1, PROMPT))
    engine.steps(6)
    assert engine.blocks["r1"][1][:7] == [0] * 7
    assert cached(world, PROMPT) == N_BLOCKS
    engine.finish(first)
    engine.add(Request(2, [*PROMPT, 7]))
    engine.step()
    whole, windowed = engine.blocks["r2"]
    assert 0 not in whole
    # Of 40 tokens the next one attends to those from 34 on.
    assert windowed[:9].count(0) == 8
    engine.steps(3)
    assert engine.loaded_tokens == len(PROMPT)  # each of them was looked at
    engine.settle()


def test_blocks_are_kept_until_their_request_has_pages(world):
    engine = engine_of(world)
    world.holds = True
    request = Request(1, PROMPT)
    engine.add(request)
    engine.computes_all = True  # it is not waited for, and is half computed when its lease comes
    engine.steps(4)
    assert request.num_computed_tokens == 32
    assert engine.counted.needed, "blocks that nobody keeps"
    assert not world.copies
    assert engine.half.has_work
    world.holds = False
    engine.steps(4)
    assert cached(world, PROMPT) == N_BLOCKS
    engine.settle()


def test_blocks_are_not_kept_for_ever(world):
    engine = engine_of(world)
    world.holds = True
    engine.add(Request(1, PROMPT))
    engine.computes_all = True
    engine.steps(2)
    assert engine.counted.needed
    engine.clock_s += KEPT_S
    engine.steps(2)
    assert not engine.counted.needed
    world.holds = False
    engine.steps(4)
    assert not cached(world, PROMPT)
    engine.settle()


@pytest.mark.parametrize("how", ["finish", "preempt", "reset", "restart"])
def test_blocks_are_not_kept_for_who_is_not_saved(world, how):
    engine = engine_of(world)
    world.holds = True
    request = engine.add(Request(1, PROMPT))
    engine.computes_all = True
    engine.steps(2)
    assert engine.counted.needed
    if how == "finish":
        engine.finish(request)
        engine.clock_s += KEPT_S
    elif how == "preempt":
        engine.preempt(request)
        engine.waiting.remove(request)
    elif how == "reset":
        engine.update_weights()
    else:
        world.kill()
    engine.steps(2)
    assert not engine.counted.needed
    if how == "restart":
        world.start(same_memory=False)
    if how == "preempt":
        engine.waiting.append(request)
    engine.settle()


def test_a_request_that_is_over_before_its_pages_come_is_saved_whole(world):
    engine = engine_of(world)
    world.holds = True
    request = engine.add(Request(1, PROMPT))
    engine.computes_all = True
    engine.steps(5)
    assert request.num_computed_tokens == len(PROMPT)
    engine.finish(request)
    world.holds = False
    engine.steps(4)
    assert cached(world, PROMPT) == N_BLOCKS
    engine.settle()


def test_what_vllm_has_itself_and_kvd_has_not_is_not_saved_in_part(world):
    """Of a layer with a window vLLM has the last blocks: those before are nobody's."""
    engine = engine_of(world)
    engine.local["r1"] = 20
    request = engine.add(Request(1, PROMPT))
    engine.steps(6)
    assert request.num_computed_tokens == len(PROMPT)
    assert not world.cached
    assert not engine.half.counts.went_alone
    # Where the window reaches the beginning, all of it is there.
    engine.local["r2"] = 4
    engine.add(Request(2, [1, *PROMPT]))
    engine.steps(7)
    assert cached(world, [1, *PROMPT]) == N_BLOCKS
    engine.settle()


def test_what_vllm_has_itself_goes_on_where_kvd_has_the_beginning(world):
    engine = engine_of(world)
    first = engine.add(Request(1, PROMPT[:24]))
    engine.steps(5)
    engine.finish(first)
    engine.local["r2"] = 20
    engine.add(Request(2, PROMPT))
    engine.steps(6)
    assert cached(world, PROMPT) == N_BLOCKS
    engine.settle()


def test_a_preempted_request_comes_back_from_its_own_pages(world):
    engine = engine_of(world)
    request = engine.add(Request(1, PROMPT))
    engine.steps(4)
    assert request.num_computed_tokens == 32
    engine.preempt(request)
    engine.steps(4)
    assert engine.loaded_tokens >= 24
    assert request.num_computed_tokens == len(PROMPT)
    engine.settle()


def test_a_prompt_whose_windows_moved_on_is_handed_to_nobody(world):
    engine = engine_of(world)
    engine.local["r1"] = 20
    request = engine.add(Request(1, PROMPT, {"do_remote_decode": True}))
    engine.steps(6)
    assert engine.finish(request) is None
    engine.settle()


def test_where_blocks_cannot_be_held_nothing_is_saved(world):
    engine = engine_of(world, can_be_held=False)
    engine.add(Request(1, PROMPT))
    engine.steps(6)
    assert not world.cached
    assert not engine.half.counts.went_alone
    engine.settle()


def test_what_is_kept_costs_nothing_where_no_layer_has_a_window(world, monkeypatch):
    monkeypatch.setattr(WindowBlocks, "keep", lambda *_: pytest.fail("it looked"))
    engine = WorldEngine(world, chunk=8)
    engine.steps(2)
    engine.add(Request(1, PROMPT))
    engine.steps(6)
    assert cached(world, PROMPT) == N_BLOCKS
    engine.settle()


def test_there_are_layers_of_both_kinds_here():
    assert LAYERS == 2
