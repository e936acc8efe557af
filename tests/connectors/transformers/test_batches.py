"""Prompts of ``generate_batch`` with the node's cache: tokens are those that a prompt has alone."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import cache as paged
from transformers.generation.continuous_batching.cache_allocators import (
    FULL_ATTENTION,
    FullAttentionCacheAllocator,
)

from kvd.connectors.transformers.copies import PageCopies
from kvd.demo.models import ARCHITECTURES, build_model
from tests.connectors.transformers.world import (
    ANSWER,
    answered,
    daemon_for,
    model_of,
    nothing_is_held,
    prompt,
    served,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

LENGTHS = (10, 33, 100, 200)
SETTINGS = GenerationConfig(max_new_tokens=ANSWER, do_sample=False, eos_token_id=-1, pad_token_id=0)


def of_blocks(page_size: int = 32, tokens: int = 1024, **more: object) -> ContinuousBatchingConfig:
    """Blocks of so many tokens, for so many in all."""
    blocks = -(-tokens // page_size)
    return ContinuousBatchingConfig(
        page_size=page_size, num_blocks=blocks, max_batch_tokens=96, **more
    )


def prompts_of(*lengths: int) -> list[list[int]]:
    return [prompt(n, seed=n)[0].tolist() for n in lengths]


def batched(
    model: PreTrainedModel, prompts: list[list[int]], blocks: ContinuousBatchingConfig | None = None
) -> list[list[int]]:
    """What each is answered with, in their order."""
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=SETTINGS,
        continuous_batching_config=blocks or of_blocks(),
        progress_bar=False,
    )
    in_order = sorted(outputs, key=lambda name: int(name.rsplit("_", 1)[1]))
    return [outputs[name].generated_tokens for name in in_order]


def alone(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """What each is answered with by a ``generate`` of its own."""
    found = []
    for one in prompts:
        out = answered(model, torch.tensor([one]), eos_token_id=None)
        found.append(out[0, len(one) :].tolist())
    return found


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return model_of("llama")


@pytest.mark.parametrize("page_size", [4, 24, 32])
def test_batches_and_single_prompts_find_what_the_other_has_cached(llama, page_size) -> None:
    """Blocks of a part of a page, of a page, of several, and of pages in part."""
    prompts = prompts_of(*LENGTHS)
    wanted = alone(llama, prompts)
    longer = [[*one, *answer[:5]] for one, answer in zip(prompts, wanted, strict=True)]
    with daemon_for(llama) as daemon:
        with served(llama, daemon) as made:
            assert batched(llama, prompts, of_blocks(page_size)) == wanted
            assert made.counts.hit_tokens == 0
            # All that is computed but the last token, in whole blocks, in whole pages.
            wholes = [(n + ANSWER - 1) // page_size * page_size // 16 * 16 for n in LENGTHS]
            assert made.counts.saved_tokens == sum(wholes)
            before = made.counts.hit_tokens
            assert alone(llama, longer) == alone_of(wanted, 5, llama, longer)
            assert made.counts.hit_tokens > before
            before = made.counts.hit_tokens
            assert batched(llama, longer, of_blocks(page_size)) == alone(llama, longer)
            assert made.counts.hit_tokens > before
        nothing_is_held(daemon)


def alone_of(wanted, skipped, model, longer) -> list[list[int]]:
    """Answers that go on where the first ones did, computed without a node."""
    found = []
    for first, one in zip(wanted, longer, strict=True):
        plain = type(model).generate(
            model,
            torch.tensor([one]),
            max_new_tokens=ANSWER,
            do_sample=False,
            eos_token_id=None,
        )
        answer = plain[0, len(one) :].tolist()
        assert answer[: len(first) - skipped] == first[skipped:]
        found.append(answer)
    return found


def test_a_batch_that_has_not_room_for_all_asks_once_for_each_prompt(llama) -> None:
    """They wait for blocks, are put out of them, and begin anew."""
    prompts = prompts_of(*range(60, 84))
    wanted = alone(llama, prompts)
    with daemon_for(llama) as daemon, served(llama, daemon) as made:
        for _ in range(2):
            assert batched(llama, prompts, of_blocks(16, tokens=320)) == wanted
        assert made.counts.hit_tokens > 0
        # Those that were put out begin anew, and are asked for again then.
        assert 2 * len(prompts) <= made.counts.prompts <= 8 * len(prompts)
        nothing_is_held(daemon)


def test_prompts_of_one_batch_share_blocks_and_children_of_one_prompt_too(llama) -> None:
    stem = prompts_of(96)[0]
    prompts = [[*stem, *tail] for tail in prompts_of(5, 9, 40)] + [stem, stem]
    wanted = alone(llama, prompts)
    children = GenerationConfig(
        max_new_tokens=ANSWER, do_sample=True, num_return_sequences=3, eos_token_id=-1
    )
    with daemon_for(llama) as daemon, served(llama, daemon) as made:
        assert batched(llama, prompts) == wanted
        outputs = llama.generate_batch(
            inputs=prompts,
            generation_config=children,
            continuous_batching_config=of_blocks(tokens=4096),
            progress_bar=False,
        )
        assert len(outputs) == 3 * len(prompts)
        # What they have left in the node is what a single prompt computes.
        for one in outputs.values():
            longer = [*one.prompt_ids, *one.generated_tokens]
            before = made.counts.hit_tokens
            assert alone(llama, [longer]) == alone_of([[]], 0, llama, [longer])
            assert made.counts.hit_tokens > before
        nothing_is_held(daemon)


def test_a_daemon_that_dies_hangs_or_comes_again_costs_no_token(llama) -> None:
    prompts = prompts_of(*LENGTHS)
    wanted = alone(llama, prompts)
    with daemon_for(llama) as daemon, served(llama, daemon) as made:
        assert batched(llama, prompts) == wanted
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            assert batched(llama, prompts) == wanted
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        daemon.kill()
        assert batched(llama, prompts) == wanted
        daemon.start()
        before, end_s = made.counts.hit_tokens, time.monotonic() + 60
        while made.counts.hit_tokens == before:
            assert time.monotonic() < end_s
            assert batched(llama, prompts) == wanted


@pytest.mark.parametrize("moment", ["tokens_of", "write_tokens"])
@pytest.mark.parametrize("how", ["killed", "fails"])
def test_what_ends_in_the_middle_of_a_copy_costs_no_token_and_no_block(
    llama, monkeypatch, moment, how
) -> None:
    prompts = prompts_of(*LENGTHS)
    wanted = alone(llama, prompts)
    plain, calls = getattr(PageCopies, moment), []
    with daemon_for(llama) as daemon, served(llama, daemon) as made:

        def ends(*args: object) -> object:
            calls.append(args)
            if len(calls) == 3:
                if how == "fails":
                    raise RuntimeError("no memory")
                daemon.kill()
            return plain(*args)

        if moment == "tokens_of":
            assert batched(llama, prompts) == wanted
        monkeypatch.setattr(PageCopies, moment, ends)
        assert batched(llama, prompts, of_blocks(tokens=512)) == wanted
        assert len(calls) >= 3
        # Every block is there again: as many prompts as before have room.
        assert batched(llama, prompts, of_blocks(tokens=512)) == wanted
        if how == "fails":
            nothing_is_held(daemon)
            assert made.counts.saved_tokens > 0


@contextlib.contextmanager
def stepping(model: PreTrainedModel) -> Iterator[object]:
    """A batch that goes on between prompts."""
    with model.continuous_batching_context_manager(
        generation_config=SETTINGS, continuous_batching_config=of_blocks()
    ) as manager:

        def answer(tokens: list[int]) -> list[int]:
            name = manager.add_request(tokens)
            while True:
                result = manager.get_result(name, timeout=60)
                assert result is not None
                if result.is_finished():
                    return result.generated_tokens

        yield answer


def test_weights_that_change_under_a_batch_end_its_part_in_the_node() -> None:
    model = build_model(ARCHITECTURES["llama"], seed=3)
    one = prompts_of(100)[0]
    with daemon_for(model) as daemon, served(model, daemon) as made:
        with stepping(model) as answer:
            answer(one)
            saved = made.counts.saved_tokens
            assert saved > 0
            with torch.no_grad():
                model.lm_head.weight.add_(0.01)
                model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
            answer(prompts_of(120)[0])
            assert made.counts.saved_tokens == saved
        # The batch that begins now has the new weights, and finds nothing of the old ones.
        before = made.counts.hit_tokens
        assert batched(model, [one]) == alone_of([[]], 0, model, [one])
        assert made.counts.hit_tokens == before


def test_another_model_finds_nothing_and_each_has_its_own_blocks(llama) -> None:
    other = build_model(ARCHITECTURES["llama"], seed=5)
    prompts = prompts_of(*LENGTHS)
    wanted, others = alone(llama, prompts), alone(other, prompts)
    assert wanted != others
    with daemon_for(llama) as daemon:
        one, two = served(llama, daemon), served(other, daemon)
        one.__enter__()
        two.__enter__()
        assert batched(llama, prompts) == wanted
        assert batched(other, prompts) == others
        assert two.counts.hit_tokens == 0
        one.__exit__()
        assert batched(other, prompts) == others
        assert two.counts.hit_tokens > 0
        assert one.counts.prompts == len(prompts)
        two.__exit__()
    assert paged.ATTN_TYPE_TO_ALLOCATOR[FULL_ATTENTION] is FullAttentionCacheAllocator


@pytest.mark.parametrize("save", ["prompt", "none"])
def test_a_batch_saves_all_or_nothing(llama, save) -> None:
    """Where an answer begins is not told to the blocks."""
    prompts = prompts_of(100)
    with daemon_for(llama) as daemon:
        with served(llama, daemon, save=save) as made:
            batched(llama, prompts)
            assert made.counts.saved_tokens == 0
        with served(llama, daemon) as made:
            batched(llama, prompts)
        with served(llama, daemon, save=save) as made:
            assert batched(llama, prompts) == alone_of([[]], 0, llama, prompts)
            assert made.counts.hit_tokens == 96


@pytest.mark.parametrize(
    ("name", "blocks", "why"),
    [
        ("gemma", {}, "a batch of a model whose layers are not all alike"),
        ("llama", {"allow_block_sharing": False}, "allow_block_sharing is off for a batch"),
    ],
)
def test_a_batch_that_cannot_be_served_is_computed_alone_and_counted(name, blocks, why) -> None:
    model = model_of(name)
    prompts = prompts_of(40, 60)
    with daemon_for(model) as daemon, served(model, daemon) as made:
        assert batched(model, prompts, of_blocks(**blocks)) == alone_of([[], []], 0, model, prompts)
        assert made.counts.alone == {why: 1}
        assert made.counts.prompts == 0


def test_models_with_one_configuration_have_their_own_blocks(llama) -> None:
    """A batch is told a configuration; whose it is does not follow from that."""
    other = build_model(ARCHITECTURES["llama"], seed=5)
    other.config = llama.config
    prompts = prompts_of(*LENGTHS)
    wanted, others = alone(llama, prompts), alone(other, prompts)
    assert wanted != others
    with daemon_for(llama) as daemon, served(llama, daemon) as made:
        assert batched(llama, prompts) == wanted
        saved = made.counts.saved_tokens
        assert batched(other, prompts) == others
        assert made.counts.saved_tokens == saved
        with served(other, daemon) as two:
            assert batched(llama, prompts) == wanted
            assert batched(other, prompts) == others
            assert (two.counts.hit_tokens, two.counts.prompts) == (0, len(prompts))


def test_a_long_queue_is_asked_for_once_each_and_when_there_is_room(llama) -> None:
    prompts = prompts_of(*(20 + number % 60 for number in range(300)))
    few, settings = prompts[:60], GenerationConfig(max_new_tokens=1, eos_token_id=-1)
    with daemon_for(llama, size="64MiB") as daemon, served(llama, daemon) as made:

        def ask() -> None:
            llama.generate_batch(
                inputs=prompts,
                generation_config=settings,
                continuous_batching_config=of_blocks(16, tokens=320),
                progress_bar=False,
            )

        batched(llama, few, of_blocks(16, tokens=2048))
        before = made.counts.prompts
        ask()
        # One that was put out of its blocks begins anew, and is asked for again.
        assert len(prompts) <= made.counts.prompts - before <= 1.5 * len(prompts)
        # Whole blocks of all 60 are there; transformers has some of these itself once they came.
        in_blocks = sum((len(one) - 1) // 16 * 16 for one in few)
        assert made.counts.hit_tokens >= 0.9 * in_blocks
        nothing_is_held(daemon)


def test_weights_that_change_and_are_as_before_end_it_too() -> None:
    """What was computed meanwhile is of others."""
    model = build_model(ARCHITECTURES["llama"], seed=3)
    before, one = copy.deepcopy(model.state_dict()), prompts_of(100)[0]
    hidden = copy.deepcopy(before)
    hidden["model.layers.0.self_attn.k_proj.weight"].mul_(1.5)
    with daemon_for(model) as daemon, served(model, daemon) as made:
        with stepping(model) as answer:
            answer(one)
            saved = made.counts.saved_tokens
            for weights in (hidden, before):
                model.load_state_dict(weights)
            answer(prompts_of(120)[0])
            assert made.counts.saved_tokens == saved
        assert batched(model, [one]) == alone_of([[]], 0, model, [one])
        assert made.counts.hit_tokens > 0


def test_a_manager_of_before_the_node_is_left_to_itself(llama) -> None:
    prompts = prompts_of(*LENGTHS)
    wanted = sorted(alone(llama, prompts))

    def answers() -> list[list[int]]:
        outputs = llama.generate_batch(
            inputs=prompts,
            generation_config=SETTINGS,
            continuous_batching_config=of_blocks(),
            progress_bar=False,
            persistent_manager=True,
        )
        return sorted(one.generated_tokens for one in outputs.values())

    with daemon_for(llama) as daemon:
        try:
            with served(llama, daemon) as made:
                assert [answers(), answers()] == [wanted, wanted]
                assert made.counts.prompts == 2 * len(prompts)
            assert answers() == wanted
            with served(llama, daemon) as made:
                assert answers() == wanted
                assert made.counts.alone == {"a batch in blocks of before the node was entered": 1}
        finally:
            llama.destroy_cached_continuous_batching_manager()
