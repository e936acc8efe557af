"""From public model configurations to pools for vLLM's blocks: closed forms, worked out by hand."""

from __future__ import annotations

import json
import tomllib

import pytest
from click.testing import CliRunner

from kvd.cli.config import config_group
from kvd.config import Config, load, pool_spec
from kvd.config.vllm_plan import VllmPlanRequest, vllm_plan
from kvd.core.layout.spec import page_bytes
from kvd.families.model import NotPlanned
from tests.config.pools import HOST
from tests.config.test_plan import (
    BGE_LARGE,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GEMMA_3_27B,
    GEMMA_4,
    GPT_OSS_20B,
    GRANITE_4_TINY,
    LLAMA_3_8B,
    MIMO_V2_FLASH,
    MISTRAL_7B_V01,
)

QWEN_3_32B = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 5120,
    "max_window_layers": 64,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}


@pytest.mark.parametrize(
    ("config", "how", "layers", "of_a_layer", "arguments"),
    [
        (LLAMA_3_8B, {}, 32, 16 * 8 * 2 * 128 * 2, "--block-size 16 --dtype bfloat16"),
        (
            QWEN_3_32B,
            {"block_size": 64, "kv_cache_dtype": "fp8"},
            *(64, 64 * 8 * 2 * 128),
            "--block-size 64 --dtype bfloat16 --kv-cache-dtype fp8",
        ),
        (
            LLAMA_3_8B,
            {"dtype": "float", "ranks": 4},
            *(32, 16 * 2 * 2 * 128 * 4),
            "--block-size 16 --dtype float32 --tensor-parallel-size 4",
        ),
        # Each stage of a pipeline has its layers, and a shard for each of its ranks.
        (
            LLAMA_3_8B,
            {"ranks": 2, "stages": 4},
            *(8, 16 * 4 * 2 * 128 * 2),
            "--block-size 16 --dtype bfloat16 --tensor-parallel-size 2 --pipeline-parallel-size 4",
        ),
        # More ranks than heads: neighbours have the same one.
        (
            LLAMA_3_8B,
            {"ranks": 16},
            *(32, 16 * 2 * 128 * 2),
            "--block-size 16 --dtype bfloat16 --tensor-parallel-size 16",
        ),
        # A latent is one, and every rank has it.
        (
            DEEPSEEK_V3,
            {"ranks": 8},
            *(61, 16 * 576 * 2),
            "--block-size 16 --dtype bfloat16 --tensor-parallel-size 8",
        ),
        (
            GEMMA_3_27B,
            {},
            *(62, 16 * 16 * 2 * 128 * 2),
            "--block-size 16 --dtype bfloat16",
        ),
        (
            GPT_OSS_20B,
            {},
            *(24, 16 * 8 * 2 * 64 * 2),
            "--block-size 16 --dtype bfloat16",
        ),
        # Windows in every layer: a block of each is in a page all the same.
        (MISTRAL_7B_V01, {}, 32, 16 * 8 * 2 * 128 * 2, "--block-size 16 --dtype bfloat16"),
        # vLLM computes in half precision what is saved as float32.
        (
            LLAMA_3_8B | {"torch_dtype": "float32"},
            {},
            32,
            65536,
            "--block-size 16 --dtype bfloat16",
        ),
    ],
)
def test_a_pool_whose_pages_are_blocks(config, how, layers, of_a_layer, arguments, tmp_path):
    asked = VllmPlanRequest(**{"block_size": 16, "memory_bytes": 2**36} | how)

    made = vllm_plan(config, asked)

    assert (made.layers, made.page_bytes) == (layers, of_a_layer)
    shards = asked.ranks * asked.stages
    assert made.block_bytes == layers * of_a_layer * shards
    assert made.pages == 2**36 // made.block_bytes
    assert " ".join(made.arguments) == arguments
    file = tmp_path / "kvd.toml"
    file.write_text(made.toml)
    loaded = load(file, {}, [], host=HOST)
    assert isinstance(loaded, Config)
    spec = pool_spec(loaded)
    assert (spec.family, spec.pages) == ("raw", (made.pages,))
    (part,) = spec.components
    assert page_bytes(part) == layers * of_a_layer
    assert (0 if spec.held is None else len(spec.held.shards)) == shards * (shards > 1)
    assert loaded.pool.backing == ("shm" if shards == 1 else "anon")


@pytest.mark.parametrize(
    ("config", "how", "told"),
    [
        (GRANITE_4_TINY, {}, "layers carry a state: how many tokens.*any pool of family raw"),
        (BGE_LARGE, {}, "it reads a text at once"),
        (DEEPSEEK_V32, {}, "index_head_dim: the index .* start the engine with any pool"),
        (DEEPSEEK_V3 | {"model_type": "minicpm3"}, {}, "kv_lora_rank: whether vLLM keeps latents"),
        (MIMO_V2_FLASH, {}, "v_head_dim = 128 is not head_dim = 192"),
        (GEMMA_4, {}, "sliding layers have KV of another shape"),
        (LLAMA_3_8B | {"is_encoder_decoder": True}, {}, "is_encoder_decoder: vLLM takes no"),
        (LLAMA_3_8B, {"ranks": 3}, "8 KV heads cannot be divided among 3 ranks"),
        (LLAMA_3_8B, {"stages": 5}, "32 layers are no whole number for each of 5 stages"),
        (LLAMA_3_8B, {"dtype": "fp8"}, "fp8 is none of bfloat16, float16, float32"),
        (LLAMA_3_8B, {"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4 is none of"),
        (
            LLAMA_3_8B | {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}},
            {},
            "quantization_config.kv_cache_scheme: .* say which by --kv-cache-dtype",
        ),
        (
            LLAMA_3_8B | {"quantization_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}},
            {},
            "quantization_config.kv_cache_quant_algo",
        ),
        (LLAMA_3_8B, {"memory_bytes": 2**20}, "a block of 16 tokens has 2.0 MiB"),
    ],
)
def test_what_cannot_be_known_or_served_is_refused_and_not_guessed(config, how, told):
    asked = VllmPlanRequest(**{"block_size": 16, "memory_bytes": 2**36} | how)

    with pytest.raises(NotPlanned, match=told):
        vllm_plan(config, asked)


def test_chunks_of_local_attention_have_blocks_as_full_attention_has():
    asked = VllmPlanRequest(16, pages=10)
    assert vllm_plan(LLAMA_3_8B | {"attention_chunk_size": 8192}, asked) == vllm_plan(
        LLAMA_3_8B, asked
    )


def test_a_type_that_is_said_settles_what_the_checkpoint_leaves_open():
    config = LLAMA_3_8B | {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}

    made = vllm_plan(config, VllmPlanRequest(16, pages=10, kv_cache_dtype="fp8_e4m3"))

    assert (made.page_bytes, made.pages) == (16 * 8 * 2 * 128, 10)


# ---- the command ---------------------------------------------------------------------------------


def run(path, *args):
    return CliRunner().invoke(config_group, ["plan", *args, str(path)])


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return tmp_path


def test_the_command_takes_a_folder_or_a_file_and_prints_what_is_to_be_pasted(folder):
    asked = ("--engine", "vllm", "--memory", "16GiB", "--block-size", "32", "--dtype", "float16")

    told, same = (run(path, *asked) for path in (folder, folder / "config.json"))

    assert (told.exit_code, told.output) == (0, same.output)
    pasted = tomllib.loads(told.output[told.output.index("[pool]") :])["pool"]
    assert pasted == {
        "family": "raw",
        "layers": 32,
        "page_size": 32,
        "page_bytes": 131072,
        "pages": 4096,
        "backing": "shm",
    }
    assert "128.0 KiB in each of 32 layers, 4.0 MiB in all" in told.output
    assert "not known from here:" in told.output
    assert f"vllm serve {folder} " in told.output
    assert "    --block-size 32 --dtype float16 \\\n" in told.output


def test_the_command_prints_the_same_as_json(folder):
    asked = ("--engine", "vllm", "--pages", "100", "--tensor-parallel-size", "2")

    found = json.loads(run(folder, *asked, "--format", "json").output)

    assert tomllib.loads(found["toml"])["pool"]["tp_size"] == 2
    assert (found["pages"], found["tokens"], found["page_bytes"]) == (100, 99 * 16, 32768)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--engine", "vllm"], "say the --memory of the pool, like 80GiB, or how many --pages"),
        (["--engine", "vllm", "--memory", "1GiB", "--pages", "9"], "or how many --pages"),
        (["--engine", "vllm", "--memory", "1GiB", "--context", "9"], "--context is not for"),
        (["--memory", "1GiB", "--pipeline-parallel-size", "2"], "-size is for --engine"),
        ([], "say the --memory of the pool"),
        (["--memory", "1GiB", "--pages", "9"], "--pages is for --engine"),
        (["--memory", "1GiB", "--model", "FILE"], "name one model"),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_name(folder, asked, told):
    asked = [str(folder / "config.json") if one == "FILE" else one for one in asked]

    result = run(folder, *asked)

    assert result.exit_code == 2
    assert told in result.output


def test_a_folder_without_a_configuration_says_so(tmp_path):
    result = run(tmp_path, "--engine", "vllm", "--pages", "9")

    assert result.exit_code == 1
    assert "config.json is not there" in result.output
