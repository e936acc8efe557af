"""Pools as ``kvd config plan`` prints them, and as a refusal does: real engines start on them."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

import pytest

from tests.engines.environment import PYTHON
from tests.support.daemons import one_daemon

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="KVD_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(600),
]

MODELS = """
import sys
from pathlib import Path
import torch
from transformers import (DeepseekV3Config, DeepseekV3ForCausalLM, Gemma3ForCausalLM,
                          Gemma3TextConfig, MistralConfig, MistralForCausalLM, Qwen3Config,
                          Qwen3ForCausalLM)

root = Path(sys.argv[1])
shape = dict(hidden_size=256, intermediate_size=512, vocab_size=4096, max_position_embeddings=4096,
             head_dim=64, tie_word_embeddings=False)
made = {
    "mla": DeepseekV3ForCausalLM(DeepseekV3Config(
        **shape, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=96,
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        moe_intermediate_size=128, n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=2,
        n_group=1, topk_group=1, first_k_dense_replace=3)),
    "qwen": Qwen3ForCausalLM(Qwen3Config(
        **shape, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4)),
    "gemma": Gemma3ForCausalLM(Gemma3TextConfig(
        **shape, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
        sliding_window=64, query_pre_attn_scalar=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2)),
    "mistral": MistralForCausalLM(MistralConfig(
        **shape, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        sliding_window=128)),
}
for name, model in made.items():
    model.save_pretrained(root / name)
"""

IDS = list(range(100, 400))

ASKS = [{"ids": IDS[:5]}, {"ids": IDS}]
"""The session is joined with the first step, and a load waits for that no longer than 50 ms."""

ON_ANY_PROCESSOR = {"mla": {"attention_backend": "CPU_MLA"}}
"""One with AMX has another kernel, with blocks and types of its own."""

PATIENT = {"kvd.probe_wait_s": 0.25}
"""What is looked for here is whether it is found, on a machine that does other things too."""


@pytest.fixture(scope="module")
def kinds(models, tmp_path_factory):
    """A folder of models of several kinds; ``model`` is a llama."""
    directory = tmp_path_factory.mktemp("kinds")
    subprocess.run([PYTHON, "-c", MODELS, str(directory)], check=True, cwd=directory)
    (directory / "model").symlink_to(models / "model")
    return directory


def plan(model, *args):
    command = [sys.executable, "-m", "kvd", "config", "plan", "--engine", "vllm", str(model)]
    told = subprocess.run(
        [*command, "--memory", "64MiB", "--format", "json", *args],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(told.stdout)


def as_sets(toml):
    """Without what a test's daemon has no place for."""
    pool = tomllib.loads(toml)["pool"]
    pool.pop("backing", None)
    return {f"pool.{key}": str(value) for key, value in pool.items()}


def as_engine(arguments):
    """What ``vllm serve`` is told, as ``LLM`` takes it."""
    words = iter(arguments)
    found = {}
    for word in words:
        key = word.removeprefix("--").replace("-", "_")
        found[key] = next(words)
    return found | {"block_size": int(found["block_size"])}


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("model", ["--block-size", "32", "--dtype", "float32"]),
        ("model", ["--block-size", "64"]),  # in half precision, though it is saved as float32
        ("qwen", ["--block-size", "128", "--dtype", "float16"]),
        ("mla", ["--block-size", "16", "--dtype", "float32"]),
        ("gemma", ["--block-size", "32", "--dtype", "float32"]),
        ("mistral", ["--block-size", "32", "--dtype", "float32"]),
    ],
)
def test_an_engine_starts_on_what_was_planned_and_finds_what_another_cached(
    kinds, forks, tmp_path, name, args
):
    made = plan(kinds / name, *args)
    engine = as_engine(made["arguments"]) | ON_ANY_PROCESSOR.get(name, {})
    with one_daemon(tmp_path, as_sets(made["toml"])) as daemon:
        _, first = forks.answers(kinds / name, daemon, ASKS, PATIENT, **engine)
        _, again = forks.answers(kinds / name, daemon, ASKS, PATIENT, **engine)
    assert first["cached"] == 0
    assert again["cached"] == 300 // engine["block_size"] * engine["block_size"], forks.told
    assert again["tokens"] == first["tokens"]


@pytest.mark.parametrize(("name", "block_size"), [("model", 32), ("mla", 16)])
def test_a_pool_that_does_not_fit_is_refused_with_one_on_which_the_engine_starts(
    kinds, forks, tmp_path, name, block_size
):
    wrong = {"pool.family": "raw", "pool.page_bytes": "512", "pool.pages": "4000"}
    for folder in ("wrong", "right"):
        (tmp_path / folder).mkdir()
    ask = {"asks": ASKS, "options": PATIENT, "block_size": block_size}
    ask |= ON_ANY_PROCESSOR.get(name, {})
    with one_daemon(tmp_path / "wrong", wrong) as daemon:
        refused, log = forks.run(kinds / name, daemon, **ask)
    section = refused["error"].partition("\n\n")[2]
    assert section.startswith("[pool]\n")
    # The log has it too, once; and whatever vLLM makes of the error.
    assert log.count("ERROR") >= 1
    assert "[pool]\nfamily = " in log
    with one_daemon(tmp_path / "right", as_sets(section)) as daemon:
        for cached in (0, 288):
            _, found = forks.answers(kinds / name, daemon, **ask)
            assert found["cached"] == cached, forks.told
