"""What vLLM's configuration looks like, as JSON: for tests that have no vLLM.

Run by the interpreter of an environment that has it::

    PYTHONPATH=$PWD $KVD_VLLM_PYTHON tests/engines/vllm_record.py \
        > tests/connectors/vllm/recorded.json

``fields``: those of every class that the identity of an engine reads. ``config``: the values of an
engine with a small model, without those that are left out of an identity: they differ by host.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "dtype": "float32",
}


def encoded(value, apart=frozenset()):
    """A value with what is needed to make one like it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return {"enum": [type(value).__name__, value.name]}
    if "to_dict" in dir(type(value)):
        left_out = {"transformers_version", "_name_or_path"}
        found = {k: v for k, v in value.to_dict().items() if k not in left_out}
        return {"transformers": {k: encoded(v) for k, v in sorted(found.items())}}
    if dataclasses.is_dataclass(value):
        names = [one.name for one in dataclasses.fields(value) if one.name not in apart]
        found = {name: encoded(getattr(value, name)) for name in names}
        return {"dataclass": [type(value).__name__, found]}
    if isinstance(value, dict):
        return {"dict": {str(k): encoded(v) for k, v in sorted(value.items())}}
    if isinstance(value, list | tuple):
        return [encoded(one) for one in value]
    return {"text": [type(value).__name__, str(value)]}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch  # noqa: PLC0415 - reads the environment
    import vllm  # noqa: PLC0415
    from vllm import config as configs  # noqa: PLC0415
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
    from vllm.lora.request import LoRARequest  # noqa: PLC0415
    from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: PLC0415

    from kvd.connectors.vllm import identity  # noqa: PLC0415

    apart = {
        "model_config": identity.MODEL_APART - {"dtype", "quantization", "quantization_config"},
        "cache_config": identity.CACHE_APART,
        "load_config": identity.LOAD_APART,
        "attention_config": frozenset(),
        "lora_config": identity.LORA_APART,
        "mamba_config": frozenset(),
    }
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(MODEL))
        real = EngineArgs(
            directory,
            skip_tokenizer_init=True,
            dtype="float32",
            block_size=32,
            max_model_len=2048,
            enable_lora=True,
            max_lora_rank=8,
        ).create_engine_config()
        config = {name: encoded(getattr(real, name), left_out) for name, left_out in apart.items()}
        for name in ("hf_config", "hf_text_config"):
            config["model_config"]["dataclass"][1][name] = encoded(getattr(real.model_config, name))
    read = [
        configs.VllmConfig,
        configs.ModelConfig,
        configs.CacheConfig,
        configs.LoadConfig,
        configs.AttentionConfig,
        configs.LoRAConfig,
        configs.ParallelConfig,
        configs.SpeculativeConfig,
        configs.MultiModalConfig,
        configs.MambaConfig,
        FullAttentionSpec,
    ]
    spec = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=64, dtype=torch.float32)
    found = {
        "version": vllm.__version__,
        "fields": {
            one.__name__: sorted(field.name for field in dataclasses.fields(one)) for one in read
        }
        | {"LoRARequest": sorted(LoRARequest.__struct_fields__)},
        "config": config,
        "block_spec": encoded(spec),
    }
    answers.write(json.dumps(found, indent=1, sort_keys=True) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
