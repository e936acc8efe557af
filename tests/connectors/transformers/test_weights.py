"""No two models whose KV differs have one namespace; two that are alike have."""

from __future__ import annotations

import copy

import pytest
import torch

from kvd.connectors.transformers.layout import shape_of
from kvd.connectors.transformers.weights import WeightWatch, identity_of_model
from kvd.demo.models import ARCHITECTURES, build_model
from tests.connectors.transformers.world import answered, daemon_for, prompt, served


@pytest.fixture
def model():
    return build_model(ARCHITECTURES["llama"])


def name_of(model, **how):
    given = {"weights": "", "partition": "", **how}
    return identity_of_model(model, shape_of(model), **given).namespace


def test_equal_models_have_one_name(model) -> None:
    assert name_of(model) == name_of(build_model(ARCHITECTURES["llama"]))
    assert name_of(model).startswith("LlamaForCausalLM:float32:")


def test_the_name_says_the_path_and_the_commit(model) -> None:
    model.config._name_or_path = "meta-llama/Llama-3.1-8B"
    model.config._commit_hash = "0e9e39f249a16976918f6564b8830bc894c89659"
    assert name_of(model).startswith("Llama-3.1-8B@0e9e39f249:float32:")


def one_number(model):
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[3, 4] += 1e-6


def another_type(model):
    model.to(torch.bfloat16)


def another_base(model):
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize("change", [one_number, another_type, another_base])
def test_whatever_changes_kv_changes_the_name(model, change) -> None:
    before = name_of(model)
    change(model)
    assert name_of(model) != before


@pytest.mark.parametrize("how", [{"weights": "v1"}, {"partition": "mine"}])
def test_what_the_user_says_changes_the_name(model, how) -> None:
    assert name_of(model, **how) != name_of(model)


def test_weights_that_are_nowhere_are_nobody_elses(model) -> None:
    model.lm_head.weight = torch.nn.Parameter(torch.empty((2048, 256), device="meta"))
    shape = shape_of(build_model(ARCHITECTURES["llama"]))
    names = {identity_of_model(model, shape, weights="", partition="").namespace for _ in range(2)}
    assert len(names) == 2


def test_a_watch_sees_what_torch_counts(model) -> None:
    watch = WeightWatch(model)
    model(prompt(3))
    assert not watch.has_changed()
    one_number(model)
    assert watch.has_changed()
    assert not watch.has_changed()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert watch.has_changed()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    assert watch.has_changed()


def test_a_model_that_is_trained_finds_nothing_of_before(model) -> None:
    ids = prompt(60)
    with daemon_for(model) as daemon, served(model, daemon) as node:
        answered(model, ids)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.01)
        wanted = type(model).generate(model, ids, max_new_tokens=20, do_sample=False)
        assert torch.equal(answered(model, ids), wanted)
        assert node.counts.hit_tokens == 0
        for weight in model.parameters():
            weight.data.mul_(1.01)
        node.reread()
        wanted = type(model).generate(model, ids, max_new_tokens=20, do_sample=False)
        assert torch.equal(answered(model, ids), wanted)
        assert node.counts.hit_tokens == 0


def test_an_adapter_that_can_be_switched_is_left_alone(model, monkeypatch) -> None:
    monkeypatch.setattr(type(model.lm_head), "__module__", "peft.tuners.lora.layer")
    ids = prompt(60)
    with daemon_for(model) as daemon, served(model, daemon) as node:
        answered(model, ids)
        assert list(node.counts.alone) == [
            "it has an adapter that can be switched (peft.tuners.lora.layer)"
        ]
