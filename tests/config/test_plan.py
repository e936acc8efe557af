"""From public model configurations to pools: the figures are closed forms, worked out by hand."""

from __future__ import annotations

import json
import tomllib
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from kvd.cli.config import config_group
from kvd.config import Config, load, pool_spec
from kvd.config.plan import FamilyPlan, Unsuited, gpu_node, plans
from kvd.core.layout.spec import page_bytes
from kvd.families import FAMILIES, PlanRequest
from kvd.families.model import Model, NotPlanned, model_of
from tests.config.pools import HOST

if TYPE_CHECKING:
    from pathlib import Path

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
DEEPSEEK_V32 = {
    **DEEPSEEK_V3,
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
GEMMA_3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 64,
    "hidden_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "sliding_window": 128,
}
MIMO_V2_FLASH = {
    "head_dim": 192,
    "hidden_size": 4096,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1] * 9,
    "max_position_embeddings": 262144,
    "model_type": "mimo_v2_flash",
    "num_attention_heads": 64,
    "num_hidden_layers": 45,
    "num_key_value_heads": 4,
    "sliding_window": 128,
    "swa_head_dim": 192,
    "swa_num_key_value_heads": 8,
    "swa_v_head_dim": 128,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
GEMMA_4 = {
    "model_type": "gemma4",
    "text_config": {
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_size": 2560,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
        "model_type": "gemma4_text",
        "num_attention_heads": 8,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 42,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
        "sliding_window": 512,
    },
    "torch_dtype": "bfloat16",
}
MISTRAL_7B_V01 = {
    "hidden_size": 4096,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
QWEN2_7B = {
    "hidden_size": 3584,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
MAMBA_2_8B = {
    "conv_kernel": 4,
    "expand": 2,
    "hidden_size": 2560,
    "intermediate_size": 5120,
    "model_type": "mamba",
    "num_hidden_layers": 64,
    "state_size": 16,
    "torch_dtype": "bfloat16",
}
CODESTRAL_MAMBA = {
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 64,
    "hidden_size": 4096,
    "model_type": "mamba2",
    "n_groups": 8,
    "num_heads": 128,
    "num_hidden_layers": 64,
    "state_size": 128,
    "torch_dtype": "bfloat16",
}
GRANITE_4_TINY = {
    "hidden_size": 1536,
    "layer_types": ["attention" if layer in {5, 15, 25, 35} else "mamba" for layer in range(40)],
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "num_attention_heads": 12,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "torch_dtype": "bfloat16",
}
BGE_LARGE = {
    "architectures": ["BertModel"],
    "hidden_size": 1024,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "torch_dtype": "float32",
}

GIB = 2**30


def planned(
    config: dict[str, object], context: int, memory: str = "80GiB"
) -> dict[str, FamilyPlan]:
    wanted = PlanRequest(memory, "160GiB", context, 16, 4096)
    return {
        one.family: one for one in plans(model_of(config), wanted) if isinstance(one, FamilyPlan)
    }


# ---- what a configuration says -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            LLAMA_3_8B,
            Model("llama", "bfloat16", 8192, layers=32, heads=8, head_dim=128, v_dim=128),
        ),
        (
            DEEPSEEK_V3,
            Model("deepseek_v3", "bfloat16", 163840, layers=61, latent_dim=512, rope_dim=64),
        ),
        (
            DEEPSEEK_V32,
            Model(
                *("deepseek_v32", "bfloat16", 163840),
                layers=61,
                latent_dim=512,
                rope_dim=64,
                index_dim=132,
                index_topk=2048,
            ),
        ),
        (
            GEMMA_3_27B,
            Model(
                *("gemma3_text", "bfloat16", 131072),
                layers=10,
                heads=16,
                head_dim=128,
                v_dim=128,
                window_layers=52,
                window_tokens=1024,
            ),
        ),
        (
            GPT_OSS_20B,
            Model(
                *("gpt_oss", "bfloat16", 131072),
                layers=12,
                heads=8,
                head_dim=64,
                v_dim=64,
                window_layers=12,
                window_tokens=128,
            ),
        ),
        (
            MIMO_V2_FLASH,
            Model(
                *("mimo_v2_flash", "bfloat16", 262144),
                layers=9,
                heads=4,
                head_dim=192,
                v_dim=128,
                window_layers=36,
                window_tokens=128,
                window_heads=8,
                window_head_dim=192,
                window_v_dim=128,
            ),
        ),
        (
            GEMMA_4,
            Model(
                *("gemma4_text", "bfloat16", 0),
                layers=4,
                heads=2,
                head_dim=512,
                v_dim=512,
                window_layers=20,
                window_tokens=512,
                window_heads=2,
                window_head_dim=256,
                window_v_dim=256,
            ),
        ),
        (
            MISTRAL_7B_V01,
            Model(
                *("mistral", "bfloat16", 32768),
                heads=8,
                head_dim=128,
                v_dim=128,
                window_layers=32,
                window_tokens=4096,
            ),
        ),
        (
            QWEN2_7B,
            Model("qwen2", "bfloat16", 131072, layers=28, heads=4, head_dim=128, v_dim=128),
        ),
        (
            MAMBA_2_8B,
            Model(
                *("mamba", "bfloat16", 0),
                state_layers=64,
                state={"conv": "bfloat16[5120,3]", "ssm": "float32[5120,16]"},
            ),
        ),
        (
            CODESTRAL_MAMBA,
            Model(
                *("mamba2", "bfloat16", 0),
                state_layers=64,
                state={"conv": "bfloat16[10240,3]", "ssm": "float32[128,64,128]"},
            ),
        ),
        (
            GRANITE_4_TINY,
            Model(
                *("granitemoehybrid", "bfloat16", 131072),
                layers=4,
                heads=4,
                head_dim=128,
                v_dim=128,
                state_layers=36,
                state={"conv": "bfloat16[3328,3]", "ssm": "float32[48,64,128]"},
            ),
        ),
        (
            BGE_LARGE,
            Model(
                *("bert", "float32", 512),
                is_encoder=True,
                layers=24,
                heads=16,
                head_dim=64,
                v_dim=64,
            ),
        ),
    ],
    ids=lambda one: one.name if isinstance(one, Model) else "",
)
def test_a_public_configuration_is_read_as_its_layers(config, expected) -> None:
    assert model_of(config) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"model_type": "qwen3_next", "num_hidden_layers": 48, "full_attention_interval": 4}
            | {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
            | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
            | {"linear_conv_kernel_dim": 4, "hidden_size": 2048, "num_attention_heads": 16}
            | {"num_key_value_heads": 2, "head_dim": 256, "torch_dtype": "bfloat16"},
            (12, 36, {"conv": "bfloat16[8192,3]", "ssm": "float32[32,128,128]"}),
        ),
        (
            {"model_type": "jamba", "num_hidden_layers": 32, "attn_layer_period": 8}
            | {"attn_layer_offset": 4, "mamba_expand": 2, "hidden_size": 4096}
            | {"mamba_d_conv": 4, "mamba_d_state": 16, "num_attention_heads": 32}
            | {"num_key_value_heads": 8, "torch_dtype": "bfloat16"},
            (4, 28, {"conv": "bfloat16[8192,3]", "ssm": "float32[8192,16]"}),
        ),
        (
            {"model_type": "nemotron_h", "num_hidden_layers": 6, "mamba_ssm_dtype": "bfloat16"}
            | {"hybrid_override_pattern": "M-M*-M", "mamba_num_heads": 128, "mamba_head_dim": 64}
            | {"n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "hidden_size": 4096}
            | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
            (1, 3, {"conv": "bfloat16[10240,3]", "ssm": "bfloat16[128,64,128]"}),
        ),
        (
            {"model_type": "falcon_h1", "num_hidden_layers": 36, "hidden_size": 2048}
            | {"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 256}
            | {"mamba_d_conv": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
            | {"torch_dtype": "bfloat16"},
            (36, 36, {"conv": "bfloat16[3584,3]", "ssm": "float32[48,64,256]"}),
        ),
    ],
    ids=["qwen3_next", "jamba", "nemotron_h", "falcon_h1"],
)
def test_hybrids_have_layers_of_both_kinds(config, expected) -> None:
    model = model_of(config)

    assert (model.layers, model.state_layers, model.state) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "model_type is missing"),
        ({"num_hidden_layers": None}, "num_hidden_layers or n_layer or .* is missing"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers = '32' is no whole number"),
        ({"num_key_value_heads": -8}, "num_key_value_heads = -8 is no whole number"),
        ({"hidden_size": None}, "hidden_size or n_embd or d_model or dim is missing"),
        (
            {"sliding_window": 64, "layer_types": ["sliding_attention", "gated"]},
            "layer_types holds gated, of which nothing is known",
        ),
        ({"compress_ratios": [0, 4, 128]}, "compress_ratios: KV that is compressed over tokens"),
        ({"num_kv_shared_layers": 32}, "num_kv_shared_layers = 32 leaves none of 32 layers"),
    ],
)
def test_a_configuration_that_does_not_say_enough_is_refused_by_its_key(changes, message) -> None:
    with pytest.raises(NotPlanned, match=message):
        model_of({**LLAMA_3_8B, **changes})


# ---- what a memory holds -------------------------------------------------------------------------


def test_a_dense_model_takes_k_and_v_of_each_layer_and_head() -> None:
    """2 x 32 layers x 8 heads x 128 x 2 bytes; a page of 16 tokens has 2 MiB, a request 512."""
    found = planned(LLAMA_3_8B, 8192)

    assert list(found) == ["mha"]
    (plan,) = found.values()
    assert plan.bytes_per_token == 131_072
    (kv,) = plan.parts
    assert (kv.page_bytes, kv.pages, kv.request_pages) == (2 * 2**20, 40_960, 512)
    assert (plan.tokens, plan.rooms, plan.request_bytes) == (655_344, 79, GIB)


def test_a_latent_model_takes_one_latent_of_each_layer() -> None:
    """61 layers x (512 + 64) x 2 bytes."""
    (plan,) = planned(DEEPSEEK_V3, 32768).values()

    assert (plan.family, plan.bytes_per_token) == ("mla", 70_272)
    assert plan.rooms == (80 * GIB // (16 * 70_272) - 1) // 2048 == 37


def test_hisparse_admits_what_host_memory_holds() -> None:
    """An index of 61 x 132 bytes a token stays on the device, and 4,096 tokens of each request."""
    found = planned(DEEPSEEK_V32, 65536)
    mla, hisparse = found["mla"], found["hisparse"]

    assert mla.bytes_per_token == hisparse.bytes_per_token == 61 * (576 * 2 + 132)
    kv, index, buffer = hisparse.parts
    assert [one.tier for one in hisparse.parts] == ["host", "device", "device"]
    assert index.pages == kv.pages
    assert index.total_bytes + buffer.total_bytes <= 80 * GIB
    assert kv.total_bytes <= 160 * GIB
    assert buffer.request_pages == 256
    assert hisparse.rooms == 160 * GIB // (65536 * 70_272) == 37
    assert mla.rooms == 16
    assert hisparse.gain == pytest.approx(37 / 16)


def test_windows_of_gemma_admit_about_five_times_the_requests_of_full_allocation() -> None:
    """5 of 6 layers hold 1,024 tokens: 62 x 32,768 slots against 10 x 32,768 + 52 x 1,056."""
    found = planned(GEMMA_3_27B, 32768, "640GiB")
    full, tail = found["mha"], found["swa"]
    layer = 2 * 16 * 128 * 2

    assert full.request_bytes == 62 * 32768 * layer
    assert tail.request_bytes == (10 * 32768 + 52 * (1024 + 32)) * layer
    assert [one.request_pages for one in tail.parts] == [2048, 66]
    closed_form = full.request_bytes / tail.request_bytes
    assert closed_form == pytest.approx(5.31, abs=0.01)
    assert (full.rooms, tail.rooms) == (41, 219)
    assert tail.gain == pytest.approx(closed_form, rel=0.02)


def test_windows_of_gpt_oss_halve_a_long_request() -> None:
    found = planned(GPT_OSS_20B, 131072)
    layer = 2 * 8 * 64 * 2

    assert found["mha"].bytes_per_token == 24 * layer == 49_152
    assert found["swa"].bytes_per_token == 12 * layer
    assert found["swa"].request_bytes == (12 * 131072 + 12 * (128 + 32)) * layer
    assert found["swa"].gain == pytest.approx(2.0, abs=0.08)


def test_sliding_layers_of_another_shape_are_compared_with_full_allocation_all_the_same() -> None:
    """9 layers of 4 heads, 36 of 8 with a window of 128: K has 192 elements, V 128."""
    (plan,) = planned(MIMO_V2_FLASH, 32768, "640GiB").values()
    full, window = 9 * 4 * 320 * 2, 36 * 8 * 320 * 2

    assert plan.family == "swa"
    assert [one.page_bytes for one in plan.parts] == [16 * full, 16 * window]
    assert plan.request_bytes == 32768 * full + (128 + 32) * window
    assert plan.gain == pytest.approx(32768 * (full + window) / plan.request_bytes, rel=0.03)


def test_a_model_of_states_takes_the_same_whatever_the_length() -> None:
    """64 layers x (5,120 x 16 x 4 + 5,120 x 3 x 2) bytes."""
    for context in (1024, 8192):
        (plan,) = planned(MAMBA_2_8B, context).values()
        kv, state = plan.parts
        assert (plan.family, state.page_bytes, kv.total_bytes) == ("recurrent", 22_937_600, 0)
        assert (plan.request_bytes, plan.bytes_per_token) == (22_937_600, 0)
        assert plan.rooms == 80 * GIB // 22_937_600 - 1 == 3743
        assert plan.tokens == plan.rooms * context


def test_a_hybrid_takes_both() -> None:
    """KV of 4 layers x 2 x 4 heads x 128; two states of 36 layers for each request."""
    (plan,) = planned(GRANITE_4_TINY, 32768).values()
    kv, state = plan.parts
    request = 32768 * 4 * 2 * 4 * 128 * 2
    states = 36 * (3328 * 3 * 2 + 48 * 64 * 128 * 4)

    assert (kv.page_bytes * kv.request_pages, state.page_bytes) == (request, states)
    assert plan.rooms == pytest.approx(80 * GIB / (request + 2 * states), rel=0.01)


def test_an_encoder_keeps_nothing() -> None:
    (plan,) = planned(BGE_LARGE, 512).values()

    assert (plan.family, plan.request_bytes, plan.bytes_per_token) == ("prefill-only", 0, 0)
    assert plan.parts[0].total_bytes == 0
    assert plan.note == (
        "tokens are counted and take no byte, which would be 196608 each in family mha; a "
        "placeholder of one page has 3.0 MiB"
    )


def test_a_model_that_decodes_is_prefill_only_when_it_is_asked_for() -> None:
    wanted = PlanRequest("80GiB", "160GiB", 8192, 16, 4096)
    model = model_of(LLAMA_3_8B)

    unasked = {one.family: one for one in plans(model, wanted)}
    asked = {one.family: one for one in plans(model, wanted, "prefill-only")}

    assert isinstance(unasked["prefill-only"], Unsuited)
    assert isinstance(asked["prefill-only"], FamilyPlan)


def test_each_family_that_does_not_suit_says_why() -> None:
    wanted = PlanRequest("80GiB", "160GiB", 8192, 16, 4096)

    why = {
        one.family: one.why
        for one in plans(model_of(MISTRAL_7B_V01), wanted)
        if isinstance(one, Unsuited)
    }

    assert why.keys() == FAMILIES.keys() - {"mha"}
    assert (
        why.items()
        >= {
            "mla": "it keeps K and V per head",
            "swa": "all its layers slide, and one must have KV of every token: it is held in full",
            "hisparse": "every token is read at every step: there is no index",
            "recurrent": "it has no recurrent state",
            "prefill-only": "its sliding layers have a window of the pool",
        }.items()
    )


def test_a_memory_that_is_too_small_is_refused_in_the_words_of_the_check() -> None:
    wanted = PlanRequest("1MiB", "2MiB", 8192, 16, 4096)

    (found, *_) = plans(model_of(LLAMA_3_8B), wanted)

    assert found == Unsuited(
        "mha",
        'pool.size = "1MiB" must hold at least 2 pages, and one page of this pool takes 2.0 MiB: '
        "give at least 4096KiB",
    )


@pytest.mark.parametrize(
    "config",
    [
        *(LLAMA_3_8B, DEEPSEEK_V32, GEMMA_3_27B, GPT_OSS_20B, MIMO_V2_FLASH, GEMMA_4),
        *(MAMBA_2_8B, GRANITE_4_TINY, BGE_LARGE),
    ],
    ids=lambda one: str(one["model_type"]),
)
def test_the_sections_to_paste_give_what_the_plan_says(config, tmp_path: Path) -> None:
    for plan in planned(config, 8192).values():
        file = tmp_path / "kvd.toml"
        file.write_text(plan.toml)
        assert tomllib.loads(plan.toml)["pool"]

        loaded = load(file, {}, [], host=HOST)

        assert isinstance(loaded, Config)
        spec = pool_spec(loaded)
        assert spec.pages == tuple(one.pages for one in plan.parts)
        assert spec.family == plan.family
        if plan.family != "prefill-only":
            sizes = [page_bytes(one) for one in spec.components]
            assert sizes == [one.page_bytes for one in plan.parts]


# ---- the command ---------------------------------------------------------------------------------


def run(tmp_path: Path, config: object, *args: str) -> tuple[int, str, str]:
    file = tmp_path / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    result = CliRunner().invoke(config_group, ["plan", "--model", str(file), *args])
    return result.exit_code, result.stdout, result.stderr.replace(str(file), "FILE")


def test_plan_prints_each_family_and_a_section_to_paste(tmp_path: Path) -> None:
    status, out, err = run(tmp_path, GEMMA_3_27B, "--memory", "640GiB", "--context", "32768")

    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == (
        "gemma3_text: 10 full layers, 52 layers with a window of 1024; requests of 32768 tokens, "
        "pages of 16, 640GiB"
    )
    assert [line.split() for line in lines if line.startswith(("mha", "swa"))] == [
        ["mha", "507904", "1352976", "15.5", "GiB", "41", "1.00x"],
        ["swa", "81920", "7184592", "2.9", "GiB", "219", "5.34x"],
    ]
    pasted = tomllib.loads("\n".join(lines[lines.index("[pool]") :]))
    assert (pasted["pool"]["family"], pasted["pool"]["size"]) == ("swa", "640GiB")


def test_plan_divides_the_memory_of_a_node_among_its_shards(tmp_path: Path) -> None:
    sizes = ("--memory", "80GiB", "--family", "mha")
    halves = ("--tp-size", "2")
    copies = (*halves, "--replicas", "2", "--stage", "0:16")

    one, two, four = (run(tmp_path, LLAMA_3_8B, *sizes, *more)[1] for more in ((), halves, copies))

    in_one = "kv: 40960 pages of 2.0 MiB (80.0 GiB device), 512 a request"
    assert in_one in one
    assert in_one.replace("2.0 MiB", "2.0 MiB in 2 shards") in two
    assert in_one.replace("2.0 MiB", "2.0 MiB in 4 shards") in four
    pasted = tomllib.loads(four[four.index("[pool]") :])["pool"]
    assert (pasted["tp_size"], pasted["stage"], pasted["replicas"]) == (2, "0:16", 2)


def test_plan_says_why_a_family_is_not_sharded(tmp_path: Path) -> None:
    status, _, err = run(
        tmp_path, GEMMA_3_27B, "--memory", "80GiB", "--family", "swa", "--tp-size", "2"
    )

    assert status == 1
    assert "pool.tp_size = 2 is refused with pool.family = swa" in err


def test_plan_prints_the_same_as_json(tmp_path: Path) -> None:
    status, out, err = run(tmp_path, LLAMA_3_8B, "--memory", "80GiB", "--format", "json")

    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["wanted"]["context_tokens"] == 8192
    assert [(one["family"], one["rooms"]) for one in found["plans"]] == [("mha", 79)]
    assert [one["family"] for one in found["unsuited"]] == [
        name for name in FAMILIES if name != "mha"
    ]


@pytest.mark.parametrize(
    ("config", "args", "message"),
    [
        ("[1]", [], "Error: FILE: holds no table of keys"),
        ("{", [], "Error: FILE: is not JSON: "),
        ({"model_type": "llama"}, [], "Error: FILE: num_hidden_layers or n_layer or"),
        (LLAMA_3_8B, ["--family", "swa"], "Error: FILE: no plan for swa: it has no sliding layers"),
        (LLAMA_3_8B, ["--dtype", "nvfp4"], "Error: FILE: no plan for any family: mha: pool.dtype"),
    ],
)
def test_plan_fails_with_the_reason(tmp_path: Path, config, args, message: str) -> None:
    status, out, err = run(tmp_path, config, "--memory", "80GiB", *args)

    assert (status, out) == (1, "")
    assert err.startswith(message)


def test_plan_wants_sizes_with_a_unit(tmp_path: Path) -> None:
    status, _, err = run(tmp_path, LLAMA_3_8B, "--memory", "80GB")

    assert status == 2
    assert "'80GB' is no size; write for example 80GiB" in err


# ---- beside GPUs ---------------------------------------------------------------------------------


def test_a_pool_beside_gpus_is_pinned_by_each_process_and_copied_in_pieces():
    """32 layers of 8 heads of 128, 2 bytes: 128 KiB a token, 64 KiB a layer of 16 tokens."""
    made = planned(LLAMA_3_8B, 32768)["mha"]

    cost = gpu_node(made, 2)

    assert cost.tokens_per_gib == 8192
    assert cost.pinned_bytes == 80 * GIB
    assert cost.registering_s == pytest.approx(4.8)
    assert cost.contexts_bytes == 2 * 518 * 2**20
    assert (cost.piece_bytes, cost.page_bytes) == (64 * 2**10, 2 * 2**20)
    assert (cost.copied_gb_s, cost.is_slow) == (41.0, False)
    assert cost.load_s == pytest.approx(4 * GIB / 41e9)


@pytest.mark.parametrize(
    ("page_size", "piece", "rate"), [(4, 16, 23.0), (1, 4, 9.6), (128, 512, 53.0), (2, 8, 9.6)]
)
def test_small_pieces_are_slow_and_said_to_be(page_size, piece, rate):
    wanted = PlanRequest("80GiB", "160GiB", 8192, page_size, 4096)
    (made,) = (
        one
        for one in plans(model_of(LLAMA_3_8B), wanted)
        if isinstance(one, FamilyPlan) and one.family == "mha"
    )

    cost = gpu_node(made, 1)

    assert (cost.piece_bytes, cost.copied_gb_s) == (piece * 2**10, rate)
    assert cost.is_slow == (piece < 64)


def test_the_command_says_what_a_pool_costs_beside_gpus(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_3_8B))
    asked = ["plan", "--model", str(file), "--memory", "80GiB", "--gpu-processes", "2"]

    told = CliRunner().invoke(config_group, asked)
    small = CliRunner().invoke(config_group, [*asked, "--page-size", "1"])
    found = CliRunner().invoke(config_group, [*asked, "--format", "json"])
    without = CliRunner().invoke(config_group, asked[:-2])

    assert "beside GPUs, for mha, 2 processes (measured on one H100):" in told.output
    assert "8192 tokens a GiB of host memory" in told.output
    assert "each process pins 80.0 GiB" in told.output
    assert "pieces below 64 KiB are slow" not in told.output
    assert "pieces below 64 KiB are slow" in small.output
    assert json.loads(found.output)["gpu"]["pinned_bytes"] == 80 * GIB
    assert "GPU" not in without.output
