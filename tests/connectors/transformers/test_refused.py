"""What goes as without kvd, and why; and which models and versions are refused."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, T5Config, T5ForConditionalGeneration

from kvd.client import KvdError
from kvd.connectors.transformers import generate, node
from kvd.connectors.transformers.layout import shape_of
from kvd.demo.models import ARCHITECTURES, build_model
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
    "output_hidden_states is True": {"output_hidden_states": True},
    "output_attentions is True": {"output_attentions": True},
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


@pytest.mark.parametrize("name", ["dynamic", "hybrid"])
@pytest.mark.parametrize("place", ["argument", "configuration", "model"])
def test_a_cache_that_is_named_as_it_would_be_anyway_is_served(monkeypatch, name, place) -> None:
    """``hybrid`` is what the published settings of Gemma 2 and 3 say."""
    model, ids = model_of("llama"), prompt(40)
    how = {"max_new_tokens": 4, "do_sample": False}
    if place == "model":
        monkeypatch.setattr(model.generation_config, "cache_implementation", name)
    elif place == "configuration":
        how = {"generation_config": GenerationConfig(cache_implementation=name, **how)}
    else:
        how["cache_implementation"] = name
    wanted = type(model).generate(model, ids, **how)
    with daemon_for(model) as daemon, served(model, daemon) as made:
        for _ in range(2):
            assert torch.equal(model.generate(ids, **how), wanted)
        assert (made.counts.hit_tokens, made.counts.alone) == (32, {})


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


def plain(model, ids, **how):
    return type(model).generate(model, ids, **{"max_new_tokens": 20, "do_sample": False, **how})


def test_what_transformers_masks_by_itself_is_left_alone() -> None:
    """Padding is known by its number, where no mask is given and no answer ends with it."""
    model, ids = model_of("llama"), prompt(60)
    ids[0, 10:20] = 5
    masked, everything = {"pad_token_id": 5, "eos_token_id": 7}, torch.ones_like(ids)
    assert not torch.equal(plain(model, ids, **masked), plain(model, ids))
    with daemon_for(model) as daemon, served(model, daemon) as made:
        for _ in range(2):
            assert torch.equal(answered(model, ids, **masked), plain(model, ids, **masked))
        assert made.counts.alone == {"its prompt has the padding token, and no attention_mask": 2}
        for how in (
            masked | {"attention_mask": everything},
            {"pad_token_id": 5, "eos_token_id": 5},
        ):
            assert torch.equal(answered(model, ids, **how), plain(model, ids, **how))
        assert made.counts.prompts == 2
        assert made.counts.hit_tokens == 48


def test_a_cache_that_is_given_back_goes_on_from_anything() -> None:
    model, ids = model_of("llama"), prompt(60)
    behind = model.get_input_embeddings()(prompt(3))
    with daemon_for(model) as daemon, served(model, daemon):
        argument, found = shape_of(model).argument, []
        for of in (model.generate, plain_of(model)):
            out = of(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
            found.append(model(inputs_embeds=behind, **{argument: out.past_key_values}).logits)
        assert torch.equal(*found)


def plain_of(model):
    return functools.partial(type(model).generate, model)


def copied(model):
    return copy.deepcopy(model)


def sent(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("how", [copied, sent])
def test_a_copy_of_the_model_is_a_model_of_its_own(how) -> None:
    model, ids = build_model(ARCHITECTURES["llama"], seed=3), prompt(60)
    with daemon_for(model) as daemon, served(model, daemon) as made:
        answered(model, ids)
        other = how(model)
        with torch.no_grad():
            other.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        assert torch.equal(answered(other, ids), plain(other, ids))
        assert made.counts.prompts == 1
        with served(other, daemon) as others:
            assert torch.equal(answered(other, ids), plain(other, ids))
            assert others.counts.prompts == 1


def test_a_node_is_entered_again_once_it_was_left_and_not_before() -> None:
    model, ids = model_of("llama"), prompt(60)
    with daemon_for(model) as daemon:
        made = served(model, daemon)
        for _ in range(2):
            with made:
                answered(model, ids)
                with pytest.raises(KvdError, match="is entered already"):
                    made.__enter__()
        assert made.counts.hit_tokens == 48
        assert model.generate == plain_of(model).func.__get__(model)


@pytest.mark.parametrize("left_first", [0, 1, 2])
def test_nodes_of_a_model_that_are_left_in_any_order_leave_it_as_it_was(left_first) -> None:
    """While one of them is entered it is served, by the one that was entered last."""
    model, other = build_model(ARCHITECTURES["llama"], seed=3), model_of("llama")
    own = model.generate = functools.partial(type(model).generate, model)
    with node(other, NOWHERE):
        entered = [node(model, NOWHERE).__enter__() for _ in range(3)]
        for left in (left_first, 0, 0):
            entered.pop(left).__exit__()
            model.generate(IDS, max_new_tokens=1)
            assert all(made.counts.alone for made in entered[-1:])
            for made in entered:
                made.counts.alone.clear()
    assert vars(model).get("generate") is own
    assert "init_continuous_batching" not in vars(model)
    assert "generate" not in vars(other)


def test_what_a_model_computes_is_counted_by_one_of_its_nodes() -> None:
    """Counted twice it was saved as the KV of a prompt whose last tokens stand there twice."""
    model = model_of("llama")
    ids = torch.full((1, 200), 37)
    how = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    wanted = type(model).generate(model, ids, **how)
    twice = torch.cat([ids, ids[:, 192:], wanted[:, 200:].repeat_interleave(2, dim=1)], dim=1)
    with daemon_for(model) as daemon, served(model, daemon) as outer:
        model.generate(ids, max_new_tokens=1)
        with served(model, daemon) as inner:
            assert torch.equal(model.generate(ids, **how), wanted)
            assert inner.counts.saved_tokens == 239 // 16 * 16 - 192
        for count in (209, 225, 241):
            longer = twice[:, :count]
            plain = type(model).generate(model, longer, **how)
            assert torch.equal(model.generate(longer, **how), plain)
        assert outer.counts.hit_tokens > 0


def test_what_goes_on_behind_the_with_asks_nobody_any_more() -> None:
    """An answer in another thread, or a ``generate`` that somebody has kept."""
    model, ids = model_of("llama"), prompt(60)
    with daemon_for(model) as daemon:
        with served(model, daemon) as made:
            kept = model.generate
            told = iter(range(40))

            def leave(*_: object, **__: object) -> torch.Tensor:
                if next(told) == 20:
                    made.__exit__()
                return torch.zeros(1, dtype=torch.bool)

            out = kept(ids, max_new_tokens=40, do_sample=False, stopping_criteria=[leave])
            assert torch.equal(out, plain(model, ids, max_new_tokens=40))
        assert torch.equal(kept(ids, max_new_tokens=20, do_sample=False), plain(model, ids))
        assert made.counts.alone == {"its node was left": 1}
        daemon.wait_for(lambda: not daemon.snapshot().clients, "a session is left", 30)
