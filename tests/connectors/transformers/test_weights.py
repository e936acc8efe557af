"""No two models whose KV differs have one namespace; two that are alike have."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from transformers import StoppingCriteria

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


def changes_of(watch: WeightWatch, change) -> bool:
    before = watch.changes()
    change()
    return watch.changes() != before


def test_a_watch_sees_what_torch_counts(model) -> None:
    watch = WeightWatch(model)
    assert not changes_of(watch, lambda: model(prompt(3)))
    assert changes_of(watch, lambda: one_number(model))
    assert changes_of(watch, lambda: model.load_state_dict(copy.deepcopy(model.state_dict())))
    other = torch.nn.Parameter(model.lm_head.weight.clone())
    assert changes_of(watch, lambda: setattr(model.lm_head, "weight", other))


def test_a_weight_in_the_place_of_another_one_is_another_one(model) -> None:
    """Its address and its count are those of the one that is gone, if memory is used again."""
    at, watch = model.model.layers[0].self_attn.k_proj, WeightWatch(model)

    def replace() -> None:
        numbers = at.weight.detach().numpy().copy()
        at.weight = None
        at.weight = torch.nn.Parameter(torch.from_numpy(numbers * 1.3).clone())

    assert [changes_of(watch, replace) for _ in range(10)] == [True] * 10


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


def plain(model, ids, **how):
    """What it is answered with without kvd."""
    given = {"max_new_tokens": 20, "do_sample": False, **how}
    return type(model).generate(model, ids, **given)


class Scaled(torch.nn.Module):
    """As an adapter that is put around a part of a model."""

    def __init__(self, inner) -> None:
        super().__init__()
        self.inner = inner
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.inner(x) * self.scale


def adapter(model, monkeypatch):
    monkeypatch.setattr(Scaled, "__module__", "peft.tuners.lora.layer")
    attention = model.model.layers[0].self_attn
    attention.k_proj = Scaled(attention.k_proj)


def hook(model, monkeypatch):
    model.model.layers[1].register_forward_hook(lambda *told: told[-1] * 2)


def hook_before(model, monkeypatch):
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * -1,))


def replaced(model, monkeypatch):
    part = model.model.layers[0].self_attn.k_proj
    of_class = part.forward
    monkeypatch.setattr(part, "forward", functools.wraps(of_class)(lambda x: of_class(x) * 1.5))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (adapter, "it has an adapter that can be switched"),
        (hook, "it has a hook, which may change what is computed"),
        (hook_before, "it has a hook, which may change what is computed"),
        (replaced, "its forward was replaced"),
    ],
)
def test_what_no_digest_tells_apart_is_left_alone_from_then_on(
    model, monkeypatch, change, why
) -> None:
    ids = prompt(60)
    with daemon_for(model) as daemon, served(model, daemon) as node:
        answered(model, ids)
        change(model, monkeypatch)
        for count in (1, 2, 3):
            assert torch.equal(answered(model, ids), plain(model, ids))
            assert node.counts.alone == {why: count}


def test_hooks_of_libraries_that_change_nothing_are_let_be(model) -> None:
    """transformers has some where it is asked for hidden states."""
    ids = prompt(60)
    model(ids, output_hidden_states=True)
    assert any(part._forward_hooks for part in model.modules())
    with daemon_for(model) as daemon, served(model, daemon) as node:
        answered(model, ids)
        answered(model, ids)
        assert node.counts.hit_tokens > 0


def test_weights_that_are_not_counted_must_have_a_name() -> None:
    with torch.inference_mode():
        model = build_model(ARCHITECTURES["llama"])
    ids = prompt(60)
    with daemon_for(model) as daemon:
        with served(model, daemon) as node:
            answered(model, ids)
            assert [why.partition(",")[0] for why in node.counts.alone] == [
                "its weights are of inference mode"
            ]
        with served(model, daemon, weights="v1") as node:
            answered(model, ids)
            assert torch.equal(answered(model, ids), plain(model, ids))
            assert node.counts.hit_tokens == 48


def test_a_model_that_is_cast_is_left_alone_until_it_is_asked_for_anew(model) -> None:
    ids = prompt(60)
    with daemon_for(model) as daemon, served(model, daemon) as node:
        answered(model, ids)
        model.bfloat16()
        for count in (1, 2):
            assert torch.equal(answered(model, ids), plain(model, ids))
            assert node.counts.alone == {"it was cast or moved since node(model)": count}


class Changes(StoppingCriteria):
    """Changes the weights once so many tokens are answered."""

    def __init__(self, at: int, change) -> None:
        self.left, self.change = at, change

    def __call__(self, input_ids, scores, **_):
        self.left -= 1
        if not self.left:
            self.change()
        return torch.zeros(1, dtype=torch.bool)


@pytest.mark.parametrize("named_between", [False, True])
def test_an_answer_under_which_weights_change_is_nobodys(model, named_between) -> None:
    """Neither of the weights of before nor of those that are there when it is over."""
    ids, before = prompt(60), copy.deepcopy(model.state_dict())
    with daemon_for(model) as daemon, served(model, daemon) as node:

        def change() -> None:
            with torch.no_grad():
                model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
            if named_between:
                answered(model, prompt(40, seed=9), max_new_tokens=1)

        longer = answered(model, ids, stopping_criteria=[Changes(3, change)], max_new_tokens=40)
        assert torch.equal(answered(model, longer), plain(model, longer))
        model.load_state_dict(before)
        assert torch.equal(answered(model, longer), plain(model, longer))
        # Of its prompt all was computed before.
        assert node.counts.hit_tokens == 48
