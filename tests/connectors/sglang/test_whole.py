"""Two whole engines of SGLang's, prefill and decode, beside one that does both: the same tokens.

Played is nothing but the weights of the model, which are random, and kernels that a machine without
a GPU has not. It runs where ``KVD_SGLANG_PYTHON`` names a Python with SGLang.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.connectors.sglang.pd_pair import PYTHON, ROOT, nodes_for, prompt
from tests.connectors.sglang.world import nothing_is_held
from tests.support.daemons import free_port

pytestmark = [
    pytest.mark.skipif(
        not PYTHON, reason="set KVD_SGLANG_PYTHON to a Python with SGLang 0.5.23 to run its engine"
    ),
    pytest.mark.timeout(600),
]

LAYERS, HEADS, HEAD_DIM = 2, 2, 16

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

PAGE_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * 2 * 16

PLUGIN = "[sglang.srt.plugins]\nkvd = kvd.connectors.sglang:register\n"

STAND_IN = "from tests.connectors.sglang import absent_engine\n"


class WholeEngine:
    """A process with SGLang's engine, and its children."""

    def __init__(self, role, port, directory, endpoint) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{directory}/site:{ROOT}",
            "KVD_SGLANG": json.dumps({"kvd.endpoint": endpoint, "kvd.weights": "played"}),
        }
        module = "tests.connectors.sglang.whole_engine"
        self._log = directory / f"{role}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [PYTHON, "-W", "ignore", "-m", module, role, str(port), f"{directory}/model"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def ask(self, tokens, room) -> None:
        self._process.stdin.write(f"{json.dumps([tokens, room])}\n")
        self._process.stdin.flush()

    def hear(self):
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError(f"the engine has ended: {self._log.read_text()[-2000:]}")

    def close(self) -> None:
        with self._process as process:
            process.stdin.close()
            process.wait(30)


def made(directory) -> None:
    """A model's configuration, the plugin as it is installed, and what stands in for kernels."""
    model, site = directory / "model", directory / "site"
    plugin = site / "kvd-0.1.0.dist-info"
    for path in (model, plugin):
        path.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: kvd\nVersion: 0.1.0\n")
    (plugin / "entry_points.txt").write_text(PLUGIN)
    (site / "sitecustomize.py").write_text(STAND_IN)


def test_the_same_tokens_as_one_engine():
    """Of prompts of several chunks; the second time what the decode engine's node has is its."""
    with tempfile.TemporaryDirectory(prefix="kvd-sgl-") as name, nodes_for(PAGE_BYTES) as nodes:
        directory, port = Path(name), free_port()
        made(directory)
        endpoints = {"null": "", "prefill": nodes.prefill.client, "decode": nodes.decode.client}
        engines = {
            role: WholeEngine(role, port, directory, endpoint)
            for role, endpoint in endpoints.items()
        }
        try:
            assert all(engine.hear() == {"ready": True} for engine in engines.values())
            for room, seed in enumerate((1, 2, 1), 500):
                tokens = [3 + token % 250 for token in prompt(9, seed)]
                for engine in engines.values():
                    engine.ask(tokens, room)
                said = {role: engine.hear() for role, engine in engines.items()}
                assert len(said["null"]["came"]) == 8
                assert said["decode"]["came"] == said["null"]["came"], said
                assert said["prefill"]["came"] == said["null"]["came"][:1], said
        finally:
            for engine in engines.values():
                engine.close()
        for daemon in (nodes.prefill, nodes.decode):
            nothing_is_held(daemon)
