"""vLLM itself on a GPU, through real daemons: python -m tests.gpu.vllm [--json FILE] [--rehearse].

Run by an interpreter that can run a daemon; the engines are processes of ``--python``, with the
module path ``--engine-path``, where vLLM 0.32 and this checkout are. In this order:

=======  ===========================================================================================
tier     a small Llama in float32: tokens cold, and found after vLLM dropped its own cache, equal
         those of vLLM alone
two      two engines on one device at once: what the first computed, the second finds
ttft     a Llama of 8B's shape: time to the first token computed, of vLLM's own cache, of kvd's
beside   the same engine without kvd: what saves take of a prefill, and of decoding beside
=======  ===========================================================================================

``--rehearse`` does it with vLLM for the CPU and small models: that this command works, and nothing
of a GPU; no figure of it is written. ``python -m benchmarks store gpu_vllm --json FILE`` keeps it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most, show
from kvd.client import KvdError
from kvd.device.cuda_library import load
from tests.engines.engine import VllmEngine
from tests.gpu.results import (
    PartOutcome,
    Setting,
    file_of,
    flaws,
    place_told,
    said,
    without_figures,
)
from tests.support.daemons import DaemonFailed, one_daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvd.bench.report import Measured

FAILURES: Final = (
    DaemonFailed,
    KvdError,
    RuntimeError,
    OSError,
    subprocess.SubprocessError,
    AssertionError,
)
GIB: Final = 2**30
REPEATS: Final = 3
SETTLE_S: Final = 0.3
"""A save that was begun with the last step is over by then."""

SMALL: Final = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
}
LARGE: Final = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
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
TOKEN_COLUMNS = (
    ResultColumn("phase", "phase"),
    ResultColumn("prompts", "prompts"),
    ResultColumn("cached", "tokens cached", ","),
    ResultColumn("is_equal", "tokens as vLLM alone"),
)
TTFT_COLUMNS = (
    ResultColumn("tokens", "tokens", ","),
    ResultColumn("cold_ms", "computed and saved, ms", ".0f"),
    ResultColumn("own_ms", "own hit, ms", ".0f"),
    ResultColumn("kvd_ms", "kvd's hit, ms", ".0f"),
    ResultColumn("sooner", "times sooner than computed", ".1f"),
    ResultColumn("is_equal", "tokens equal"),
)
BESIDE_COLUMNS = (
    ResultColumn("work", "work"),
    ResultColumn("alone_ms", "vLLM alone, ms", ".0f"),
    ResultColumn("saving_ms", "beside saves, ms", ".0f"),
    ResultColumn("ratio", "over alone", ".3f"),
)


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
        return self.setting.of(LARGE, SMALL)

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

    @contextlib.contextmanager
    def daemon(self, shape: dict[str, int], width: int, pages: int) -> Iterator[str]:
        """The client socket of one whose pages are blocks of that shape, of elements so wide."""
        page_bytes = 2 * self.block * shape["num_key_value_heads"] * shape["head_dim"] * width
        settings = {
            "pool.family": "raw",
            "pool.layers": str(shape["num_hidden_layers"]),
            "pool.page_size": str(self.block),
            "pool.page_bytes": str(page_bytes),
            "pool.pages": str(pages),
        }
        place = Path(tempfile.mkdtemp(prefix="d-", dir=self.directory))
        with one_daemon(place, settings) as daemon:
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


def prompt(length: int, seed: int, vocabulary: int) -> list[int]:
    """The same for the same arguments."""
    return np.random.default_rng(seed).integers(3, vocabulary, length).tolist()


def tier(bench: Bench) -> BenchmarkResult:
    """Tokens of one engine: computed, and found."""
    model, prompts = bench.model(SMALL, has_weights=True), _prompts(bench)
    with bench.engine("alone", model, None, **bench.small) as alone:
        wanted = alone.ask_all(prompts, 16)
    rows = []
    with (
        bench.daemon(SMALL, 4, 2000) as endpoint,
        bench.engine("tier", model, endpoint, **bench.small) as engine,
    ):
        for phase, reset in (("computed", False), ("own cache", False), ("kvd's cache", True)):
            found = engine.ask_all(prompts, 16, reset=reset)
            rows.append(_tokens_row(phase, found, wanted))
            time.sleep(SETTLE_S)
    return _tokens("one engine", rows, hits=("kvd's cache",), prompts=prompts, block=bench.block)


def two(bench: Bench) -> BenchmarkResult:
    """Two engines on one device: one computes, the other finds it."""
    model, prompts = bench.model(SMALL, has_weights=True), _prompts(bench)
    with (
        bench.daemon(SMALL, 4, 2000) as endpoint,
        bench.engine("first", model, endpoint, **bench.small) as first,
        bench.engine("second", model, endpoint, **bench.small) as second,
    ):
        computed = first.ask_all(prompts, 16)
        time.sleep(SETTLE_S)
        found = second.ask_all(prompts, 16)
        rows = [
            _tokens_row("the first computes", computed, computed),
            _tokens_row("the second finds", found, computed),
        ]
    return _tokens(
        "two engines", rows, hits=("the second finds",), prompts=prompts, block=bench.block
    )


def _prompts(bench: Bench) -> list[list[int]]:
    length = bench.setting.of(600, 200)
    return [prompt(length + 7 * one, one, SMALL["vocab_size"]) for one in range(4)]


def _tokens_row(
    phase: str, found: Sequence[dict[str, object]], wanted: Sequence[dict[str, object]]
) -> Measured:
    return {
        "phase": phase,
        "prompts": len(found),
        "cached": sum(int(str(one["cached"])) for one in found),
        "is_equal": [one["tokens"] for one in found] == [one["tokens"] for one in wanted],
    }


def _tokens(
    what: str,
    rows: list[Measured],
    *,
    hits: Sequence[str],
    prompts: Sequence[Sequence[int]],
    block: int,
) -> BenchmarkResult:
    """Whole blocks before the last token of each prompt must have been found."""
    due = sum((len(ids) - 1) // block * block for ids in prompts)
    wrong = [f"{what}, {row['phase']}: other tokens" for row in rows if not row["is_equal"]]
    wrong += [
        f"{what}, {row['phase']}: {row['cached']} tokens were found, not {due}"
        for row in rows
        if row["phase"] in hits and row["cached"] != due
    ]
    table = ResultTable(f"tokens of {what}", TOKEN_COLUMNS, tuple(rows))
    return BenchmarkResult(tables=(table,), wrong=tuple(wrong))


def _large(bench: Bench) -> dict[str, object]:
    return bench.setting.of(
        {
            "load_format": "dummy",
            "dtype": "bfloat16",
            "max_model_len": 40000,
            "max_num_batched_tokens": 8192,
            **bench.on_device(16, 0.85, bench.backend),
        },
        {"max_model_len": 1024, "max_num_batched_tokens": 512},
    )


def _ms(answer: dict[str, object]) -> float:
    return float(str(answer["took_s"])) * 1e3


def ttft(bench: Bench) -> BenchmarkResult:
    """One token of a prompt: computed, of vLLM's own cache, of kvd's after that was dropped."""
    is_dummy = not bench.setting.is_rehearsal
    model = bench.model(bench.large, has_weights=not is_dummy)
    rows: list[Measured] = []
    pages = sum(bench.lengths) * (REPEATS + 1) // bench.block
    with (
        bench.daemon(bench.large, 2 if is_dummy else 4, pages) as endpoint,
        bench.engine("ttft", model, endpoint, **_large(bench)) as engine,
    ):
        _warm_up(bench, engine)
        for length in bench.lengths:
            times: dict[str, list[float]] = {"cold_ms": [], "own_ms": [], "kvd_ms": []}
            is_equal = True
            for seed in range(REPEATS):
                ids = prompt(length, 100 * length + seed, bench.large["vocab_size"])
                first = engine.ask(ids, 1)
                time.sleep(SETTLE_S)
                own = engine.ask(ids, 1)
                by_kvd = engine.ask(ids, 1, reset=True)
                for key, answer in (("cold_ms", first), ("own_ms", own), ("kvd_ms", by_kvd)):
                    times[key].append(_ms(answer))
                is_equal &= first["tokens"] == own["tokens"] == by_kvd["tokens"]
                is_equal &= by_kvd["cached"] == (length - 1) // bench.block * bench.block
            row: Measured = {"tokens": length, "is_equal": is_equal}
            row |= {key: statistics.median(took) for key, took in times.items()}
            row["sooner"] = statistics.median(times["cold_ms"]) / statistics.median(times["kvd_ms"])
            rows.append(row)
    last = rows[-1]
    beyond_own = float(str(last["kvd_ms"])) - float(str(last["own_ms"]))
    return BenchmarkResult(
        tables=(ResultTable("time to the first token", TTFT_COLUMNS, tuple(rows)),),
        # Under a millisecond is as good as none, and no figure is nothing.
        goals=(
            at_most(
                f"ms of kvd's hit beyond vLLM's own, {last['tokens']:,} tokens",
                90.0,
                max(beyond_own, 0.1),
            ),
        ),
        wrong=tuple(
            f"{row['tokens']} tokens: other tokens, or not found"
            for row in rows
            if not row["is_equal"]
        ),
    )


def _warm_up(bench: Bench, engine: VllmEngine) -> None:
    """What is compiled or loaded at its first use."""
    for seed in range(2):
        length = min(3000, bench.lengths[-1])
        engine.ask(prompt(length, seed, bench.large["vocab_size"]), 2)


def beside(bench: Bench) -> BenchmarkResult:
    """The same prompts with kvd, whose saves go on beside, over vLLM alone."""
    is_dummy = not bench.setting.is_rehearsal
    model = bench.model(bench.large, has_weights=not is_dummy)
    length = bench.lengths[-1]
    batch_length, tokens = bench.setting.of((1500, 128), (100, 8))
    pages = (length * (REPEATS + 1) + 16 * (batch_length + tokens) * (REPEATS + 1)) // bench.block

    def measured(engine: VllmEngine) -> tuple[float, float]:
        _warm_up(bench, engine)
        vocabulary = bench.large["vocab_size"]
        prefill_ms, batch_ms = [], []
        for seed in range(REPEATS):
            prefill_ms.append(_ms(engine.ask(prompt(length, 7000 + seed, vocabulary), 1)))
            batch = [prompt(batch_length, 100 * seed + one, vocabulary) for one in range(16)]
            batch_ms.append(_ms(engine.ask_all(batch, tokens)[0]))
        return statistics.median(prefill_ms), statistics.median(batch_ms)

    with bench.engine("plain", model, None, **_large(bench)) as plain:
        alone = measured(plain)
    with (
        bench.daemon(bench.large, 2 if is_dummy else 4, pages) as endpoint,
        bench.engine("beside", model, endpoint, **_large(bench)) as engine,
    ):
        saving = measured(engine)
    works = (
        f"a prompt of {length:,} tokens",
        f"16 x {batch_length:,} tokens and {tokens} more each",
    )
    rows: list[Measured] = [
        {"work": work, "alone_ms": one, "saving_ms": other, "ratio": other / one}
        for work, one, other in zip(works, alone, saving, strict=True)
    ]
    return BenchmarkResult(
        tables=(ResultTable("computing beside saves", BESIDE_COLUMNS, tuple(rows)),),
        goals=tuple(
            at_most(f"{row['work']}, over vLLM alone", 1.05, float(str(row["ratio"])))
            for row in rows
        ),
    )


PARTS: Final = {"tier": tier, "two": two, "ttft": ttft, "beside": beside}


def outcome_of(measure: Callable[[Bench], BenchmarkResult], bench: Bench) -> PartOutcome:
    """Run a part."""
    began_s = time.monotonic()
    try:
        found = measure(bench)
    except FAILURES as error:
        why = f"{type(error).__name__}: {error}"
        return PartOutcome(failed=why, seconds=time.monotonic() - began_s)
    wrong = "; ".join([*found.wrong, *flaws(found)])
    return PartOutcome(found, failed=wrong, seconds=time.monotonic() - began_s)


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    words.add_argument("--python", default=os.environ.get("KVD_VLLM_PYTHON") or sys.executable)
    words.add_argument("--engine-path", default=os.environ.get("PYTHONPATH", ""), metavar="PATHS")
    words.add_argument("--backend", default="FLASH_ATTN", help="attention of the large model")
    words.add_argument("--only", nargs="+", choices=PARTS, default=tuple(PARTS), metavar="PART")
    words.add_argument("--rehearse", action="store_true", help="with vLLM for the CPU")
    asked = words.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    environment = {**os.environ, **ENGINE_VARIABLES, "PYTHONPATH": asked.engine_path}
    if not asked.rehearse:
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one import, one CUDA context
    where, began_s = place_told(load()), time.monotonic()
    outcomes: dict[str, PartOutcome] = {}
    with tempfile.TemporaryDirectory(prefix="kvd-vllm-") as directory:
        setting = Setting(asked.rehearse)
        bench = Bench(setting, asked.python, environment, Path(directory), asked.backend)
        for name in asked.only:
            sys.stdout.write(f"\n== {name}\n")
            outcomes[name] = outcome_of(PARTS[name], bench)
            if (found := outcomes[name].found) is not None:
                show(without_figures(found) if asked.rehearse else found)
            sys.stdout.write(f"{said(outcomes[name])}\n")
            sys.stdout.flush()
            if asked.json is not None:
                content = file_of(
                    "gpu_vllm",
                    where,
                    outcomes,
                    is_rehearsal=asked.rehearse,
                    seconds=time.monotonic() - began_s,
                )
                text = msgspec.json.format(msgspec.json.encode(content), indent=1)
                asked.json.write_bytes(text + b"\n")
    return 1 if any(outcome.failed for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
