"""What engines of these tests share: an environment that can run them, and models."""

from __future__ import annotations

import subprocess

import pytest

from tests.engines.environment import PYTHON, flaw
from tests.engines.forks import HERE, Forks

MODELS = """
import json, sys
from pathlib import Path
import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

root = Path(sys.argv[1])
shape = dict(hidden_size=256, intermediate_size=688, num_attention_heads=8, num_key_value_heads=4,
             vocab_size=4096, max_position_embeddings=4096, tie_word_embeddings=False)
for name, seed, layers in (("model", 0, 8), ("other", 1, 8), ("shallow", 2, 4)):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **shape))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(3)  # logits far enough apart that every prompt has tokens of its own
    model.save_pretrained(root / name)
for name, seed in (("adapter", 1), ("adapter-2", 2)):
    (root / name).mkdir()
    draw = torch.Generator().manual_seed(seed)
    made = {}
    for layer in range(8):
        for of, n in (("q_proj", 256), ("k_proj", 128), ("v_proj", 128)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{of}"
            made[f"{at}.lora_A.weight"] = torch.randn(8, 256, generator=draw) * 0.3
            made[f"{at}.lora_B.weight"] = torch.randn(n, 8, generator=draw) * 0.3
    safetensors.torch.save_file(made, root / name / "adapter_model.safetensors")
    (root / name / "adapter_config.json").write_text(json.dumps(dict(
        peft_type="LORA", r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj"],
        base_model_name_or_path="model", task_type="CAUSAL_LM", bias="none", lora_dropout=0.0)))
"""


@pytest.fixture(scope="session")
def able():
    """The environment can run these tests; if not, what to do is said."""
    why = flaw()
    if why:
        pytest.fail(why, pytrace=False)


@pytest.fixture(scope="module")
def forks(able, tmp_path_factory):
    """Engines that start in seconds."""
    made = Forks(tmp_path_factory.mktemp("forks"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def models(able, tmp_path_factory):
    """A folder: ``model``, ``other``, ``shallow`` of random weights; ``adapter``, ``adapter-2``."""
    directory = tmp_path_factory.mktemp("models")
    subprocess.run([PYTHON, "-c", MODELS, str(directory)], check=True, cwd=directory)
    return directory


@pytest.fixture(scope="session")
def families(able, tmp_path_factory):
    """A folder with a small model of each kind of KV cache: see ``families.py``."""
    directory = tmp_path_factory.mktemp("families")
    subprocess.run([PYTHON, str(HERE / "families.py"), str(directory)], check=True)
    return directory
