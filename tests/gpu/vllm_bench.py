"""What each part of ``tests.gpu.vllm`` is given: models, daemons and engines."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.engines import families
from tests.engines.engine import VllmEngine
from tests.gpu.shapes import MODEL_8B
from tests.support.daemons import one_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.gpu.results import Setting

GIB: Final = 2**30
FAMILIES: Final = Path(families.__file__)

SMALL: Final = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
}
WINDOWS: Final = {"num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 6}
"""Of the model with windows, as far as pages go."""

MODELS: Final = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
root, shape = Path(sys.argv[1]), json.loads(sys.argv[2])
draw = torch.Generator().manual_seed(7)
H, F, V, d = (shape[k] for k in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"))
q, kv = shape["num_attention_heads"] * d, shape["num_key_value_heads"] * d
def made(rows, columns, scale=1.0):
    return torch.randn(rows, columns, generator=draw) * scale / columns**0.5
w = {"model.embed_tokens.weight": torch.randn(V, H, generator=draw),
     "lm_head.weight": made(V, H, 2.0), "model.norm.weight": torch.ones(H)}
for layer in range(shape["num_hidden_layers"]):
    at = f"model.layers.{layer}."
    for name, rows, columns, scale in (
        ("self_attn.q_proj", q, H, 2.0), ("self_attn.k_proj", kv, H, 2.0),
        ("self_attn.v_proj", kv, H, 2.0), ("self_attn.o_proj", H, q, 2.0),
        ("mlp.gate_proj", F, H, 1.0), ("mlp.up_proj", F, H, 1.0), ("mlp.down_proj", H, F, 1.0),
    ):
        w[f"{at}{name}.weight"] = made(rows, columns, scale)
    for name in ("input_layernorm", "post_attention_layernorm"):
        w[f"{at}{name}.weight"] = torch.ones(H)
save_file(w, root / "model.safetensors", metadata={"format": "pt"})
"""
"""Weights of which every token depends on the whole prompt; vLLM's own dummy ones are too small."""

ENGINE_VARIABLES: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CACHE_ROOT": "/tmp/vllm_cache",
    "TRITON_CACHE_DIR": "/tmp/triton_cache",
}


class Bench(NamedTuple):
    """What every part is given."""

    setting: Setting
    python: str
    environment: dict[str, str]
    directory: Path
    backend: str

    @property
    def block(self) -> int:
        """Tokens: vLLM for the CPU has no blocks of 16."""
        return self.setting.of(16, 32)

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.setting.of((2000, 8000, 32000), (100, 400))

    @property
    def large(self) -> dict[str, int]:
        return self.setting.of(MODEL_8B, SMALL)

    def model(self, shape: dict[str, int], *, has_weights: bool) -> Path:
        """A folder with its configuration; and weights, or vLLM's dummy ones are loaded."""
        where = self.directory / f"llama-{shape['hidden_size']}-{has_weights}"
        if where.exists():
            return where
        where.mkdir()
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "float32" if has_weights else "bfloat16",
            **shape,
        }
        (where / "config.json").write_text(json.dumps(config))
        if has_weights:
            subprocess.run(
                [self.python, "-c", MODELS, str(where), json.dumps(shape)],
                env=self.environment,
                check=True,
                timeout=120,
            )
        return where

    def windows(self) -> Path:
        """A folder with a model that has windows of 64 tokens in four layers of six."""
        made = subprocess.run(
            [self.python, str(FAMILIES), str(self.directory), "gemma"],
            check=False,
            env=self.environment,
            timeout=120,
            capture_output=True,
            text=True,
        )
        if made.returncode:
            raise RuntimeError(f"no model with windows was made:\n{made.stderr[-2000:]}")
        return self.directory / "gemma"

    def pool(self, shape: dict[str, int], width: int, pages: int) -> dict[str, str]:
        """Settings of one whose pages are blocks of that shape, of elements so wide."""
        page_bytes = 2 * self.block * shape["num_key_value_heads"] * shape["head_dim"] * width
        return {
            "pool.family": "raw",
            "pool.layers": str(shape["num_hidden_layers"]),
            "pool.page_size": str(self.block),
            "pool.page_bytes": str(page_bytes),
            "pool.pages": str(pages),
        }

    def place(self) -> Path:
        """A folder of its own."""
        return Path(tempfile.mkdtemp(prefix="d-", dir=self.directory))

    @contextlib.contextmanager
    def daemon(self, shape: dict[str, int], width: int, pages: int) -> Iterator[str]:
        """The client socket of one with that pool."""
        with one_daemon(self.place(), self.pool(shape, width, pages)) as daemon:
            yield daemon.client

    @contextlib.contextmanager
    def engine(
        self, name: str, model: Path, endpoint: str | None, **engine: object
    ) -> Iterator[VllmEngine]:
        """One that serves; without an ``endpoint``, vLLM alone."""
        options = {"kvd.endpoint": endpoint, "kvd.namespace": "gpu", "kvd.weights": model.name}
        if self.setting.is_rehearsal:
            options["kvd.probe_wait_s"] = 0.25
        how: dict[str, object] = {"block_size": self.block, "max_num_seqs": 64, "seed": 0, **engine}
        made = VllmEngine(
            self.python,
            model,
            self.directory / f"{name}.log",
            options=None if endpoint is None else options,
            engine=how,
            environment=self.environment,
        )
        try:
            made.ready()
            yield made
        finally:
            made.close()

    def on_device(self, kv_cache_gib: int, share: float, backend: str) -> dict[str, object]:
        """Arguments of LLM that a CPU has no use for; so much of the device must be free."""
        memory = {"kv_cache_memory_bytes": kv_cache_gib * GIB, "gpu_memory_utilization": share}
        return self.setting.of({**memory, "attention_config": {"backend": backend}}, {})

    @property
    def small(self) -> dict[str, object]:
        """Of the small model, in float32: FlashAttention knows 16 bits only."""
        lengths = {"max_model_len": 4096, "max_num_batched_tokens": 2048}
        return {**lengths, **self.on_device(1, 0.4, "TRITON_ATTN")}
