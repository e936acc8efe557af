"""What goes as without kvd, and why; and which models and versions are refused."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, T5Config, T5ForConditionalGeneration

from kvd.client import KvdError
from kvd.connectors.transformers import generate, node
from kvd.connectors.transformers.layout import shape_of
from tests.connectors.transformers.world import answered, daemon_for, model_of, prompt, served

IDS = prompt(20)
NOWHERE = "ipc:///tmp/kvd-there-is-none/client.sock"


@pytest.fixture
def alone():
    """A model that is entered, and no daemon: what would be served is counted as that."""
    with node(model_of("llama"), NOWHERE) as made:
        yield made


def drop(**how):
    """The settings that the model's own generate is given too."""
    return {name: value for name, value in how.items() if name != "ids"}


CASES = {
    "several sequences": {"ids": torch.cat([IDS, IDS])},
    "num_beams is 2": {"num_beams": 2},
    "num_return_sequences is 2": {"num_return_sequences": 2, "do_sample": True},
    "use_cache is False": {"use_cache": False},
    "cache_implementation is 'static'": {"cache_implementation": "static"},
    "prompt_lookup_num_tokens is 3": {"prompt_lookup_num_tokens": 3},
    "its prompt has one token": {"ids": IDS[:, :1]},
    "its attention_mask masks": {
        "attention_mask": torch.cat([IDS[:, :1] * 0, IDS[:, 1:] * 0 + 1], 1)
    },
}


@pytest.mark.parametrize("why", CASES)
def test_it_is_computed_as_without_kvd(alone, why) -> None:
    model, how = model_of("llama"), CASES[why]
    ids, more = how.get("ids", IDS), {"max_new_tokens": 3, **drop(**how)}
    torch.manual_seed(1)
    wanted = type(model).generate(model, ids, **more)
    torch.manual_seed(1)
    assert torch.equal(model.generate(ids, **more), wanted)
    assert why in next(iter(alone.counts.alone))


def test_a_configuration_that_is_given_counts_as_arguments_do(alone) -> None:
    config = GenerationConfig(num_beams=2, max_new_tokens=2)
    model_of("llama").generate(IDS, config)
    assert list(alone.counts.alone) == ["num_beams is 2"]


def test_a_cache_of_the_scripts_own_is_left_to_it(alone) -> None:
    model = model_of("llama")
    mine = DynamicCache(config=model.config)
    name = shape_of(model).argument
    answered(model, IDS, **{name: mine})
    assert list(alone.counts.alone) == [f"it brings {name}"]
    assert mine.get_seq_length() == IDS.shape[1] + 19


def test_a_model_that_is_given_more_than_tokens_is_left_alone(alone) -> None:
    model = model_of("llama")
    positions = torch.arange(IDS.shape[1])[None]
    answered(model, IDS, position_ids=positions)
    assert list(alone.counts.alone) == ["the model is given position_ids beside token ids"]


def test_what_is_asked_by_name_and_masks_nothing_is_served() -> None:
    model = model_of("llama")
    wanted = answered(model, IDS)
    with daemon_for(model) as daemon, served(model, daemon) as made:
        for _ in range(2):
            out = model.generate(
                input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=20
            )
            assert torch.equal(out, wanted)
        assert made.counts.hit_tokens == 16


def test_training_is_left_alone(alone) -> None:
    model = model_of("llama")
    model.train()
    try:
        answered(model, IDS)
    finally:
        model.eval()
    assert list(alone.counts.alone) == ["the model is in training mode"]


def test_a_model_with_an_encoder_is_refused_in_words() -> None:
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    model = T5ForConditionalGeneration(config).eval()
    with pytest.raises(KvdError, match=r"no pages for the cache of T5For.*it has an encoder"):
        node(model, NOWHERE)


def test_another_version_is_served_where_that_is_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(f"{generate.__name__}.transformers.__version__", "6.1.0")
    model = model_of("llama")
    with daemon_for(model) as daemon, served(model, daemon, any_version=True) as made:
        answered(model, IDS)
        assert made.counts.saved_tokens == 32


def test_what_cannot_be_saved_is_an_error_at_once() -> None:
    with pytest.raises(ValueError, match="save is 'some'"):
        node(model_of("llama"), NOWHERE, save="some")


def test_the_model_is_as_it_was_however_a_block_ends() -> None:
    model = model_of("llama")
    before = dict(vars(model))
    with pytest.raises(ZeroDivisionError), node(model, NOWHERE):
        raise ZeroDivisionError
    assert vars(model) == before
    assert not model._forward_pre_hooks
