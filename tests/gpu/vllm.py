"""vLLM itself on a GPU, through real daemons: python -m tests.gpu.vllm [--json FILE] [--rehearse].

Run by an interpreter that can run a daemon; the engines are processes of ``--python``, with the
module path ``--engine-path``, where vLLM 0.32 and this checkout are. In this order:

=======  ===========================================================================================
tier     a small Llama in float32: tokens cold, and found after vLLM dropped its own cache, equal
         those of vLLM alone
two      two engines on one device at once: what the first computed, the second finds
handoff  two engines on one device, a daemon for each: the first computes prompts, the second gets
         their KV from the other daemon and decodes
windows  sliding windows beside full attention: several groups of blocks
ranks    two devices, tensor parallel ranks on each; skipped where there is one
ttft     a Llama of 8B's shape: time to the first token computed, of vLLM's own cache, of kvd's
beside   the same engine without kvd: what saves take of a prefill, and of decoding beside
=======  ===========================================================================================

``--rehearse`` does it with vLLM for the CPU and small models: that this command works, and nothing
of a GPU; no figure of it is written. ``python -m benchmarks store gpu_vllm --json FILE`` keeps it.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most, show
from kvd.client import KvdError
from kvd.device.cuda import Runtime
from kvd.device.cuda_library import load
from tests.engines.engine import TO_DECODE
from tests.gpu.results import (
    PartOutcome,
    PartSkipped,
    Setting,
    file_of,
    flaws,
    place_told,
    said,
    without_figures,
)
from tests.gpu.vllm_bench import ENGINE_VARIABLES, SMALL, WINDOWS, Bench
from tests.support.daemons import DaemonFailed, one_daemon, two_daemons

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd.bench.report import Measured
    from tests.engines.engine import VllmEngine

FAILURES: Final = (
    DaemonFailed,
    KvdError,
    RuntimeError,
    OSError,
    subprocess.SubprocessError,
    AssertionError,
)
REPEATS: Final = 3
TWO: Final = 2
SETTLE_S: Final = 0.3
"""A save that was begun with the last step is over by then."""

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


def handoff(bench: Bench) -> BenchmarkResult:
    """One engine prefills, another decodes, each with a daemon of its own."""
    model, prompts = bench.model(SMALL, has_weights=True), _prompts(bench)
    with bench.engine("alone", model, None, **bench.small) as alone:
        wanted = alone.ask_all(prompts, 16)
    pool = bench.pool(SMALL, 4, 2000)
    with (
        two_daemons(bench.place(), pool) as pair,
        bench.engine("prefills", model, pair.prefill.client, **bench.small) as prefills,
        bench.engine("decodes", model, pair.decode.client, **bench.small) as decodes,
    ):
        found = []
        for ids in prompts:
            told = prefills.ask(ids, 1, TO_DECODE)["params"]
            found.append(decodes.ask(ids, 16, told))
        moved = pair.decode.snapshot().totals.received_bytes
    # The last token's page is sent too: vLLM computes that token again.
    pages = sum(-(-len(ids) // bench.block) for ids in prompts)
    due = pages * int(pool["pool.page_bytes"]) * int(pool["pool.layers"])
    row = _tokens_row("the second decodes", found, wanted)
    wrong = [f"{moved:,} bytes came from the other daemon, not {due:,}"] if moved != due else []
    result = _tokens("a handoff", [row], hits=(), prompts=prompts, block=bench.block)
    return msgspec.structs.replace(result, wrong=(*result.wrong, *wrong))


def windows(bench: Bench) -> BenchmarkResult:
    """A model whose layers are in several groups, each with blocks of its own."""
    model, prompts = bench.windows(), _prompts(bench)
    with bench.engine("windows-alone", model, None, **bench.small) as alone:
        wanted = alone.ask_all(prompts, 16)
    rows = []
    with (
        bench.daemon(WINDOWS, 4, 2000) as endpoint,
        bench.engine("windows", model, endpoint, **bench.small) as engine,
    ):
        for phase, reset in (("computed", False), ("kvd's cache", True)):
            found = engine.ask_all(prompts, 16, reset=reset)
            rows.append(_tokens_row(phase, found, wanted))
            time.sleep(SETTLE_S)
    return _tokens("windows", rows, hits=("kvd's cache",), prompts=prompts, block=bench.block)


def ranks(bench: Bench) -> BenchmarkResult:
    """One engine of two ranks, each on a device of its own with its share of the heads."""
    runtime = load()
    n_devices = runtime.device_count() if isinstance(runtime, Runtime) else 0
    if n_devices < TWO and not bench.setting.is_rehearsal:
        raise PartSkipped(f"{n_devices} devices: two ranks need two")
    model, prompts = bench.model(SMALL, has_weights=True), _prompts(bench)
    parallel = {**bench.small, "tensor_parallel_size": TWO}
    with bench.engine("ranks-alone", model, None, **parallel) as alone:
        wanted = alone.ask_all(prompts, 16)
    rows = []
    shard = SMALL | {"num_key_value_heads": SMALL["num_key_value_heads"] // TWO}
    pool = bench.pool(shard, 4, 2000) | {"pool.tp_size": str(TWO)}
    with (
        one_daemon(bench.place(), pool) as daemon,
        bench.engine("ranks", model, daemon.client, **parallel) as engine,
    ):
        for phase, reset in (("computed", False), ("kvd's cache", True)):
            found = engine.ask_all(prompts, 16, reset=reset)
            rows.append(_tokens_row(phase, found, wanted))
            time.sleep(SETTLE_S)
    return _tokens("two ranks", rows, hits=("kvd's cache",), prompts=prompts, block=bench.block)


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


PARTS: Final = {
    "tier": tier,
    "two": two,
    "handoff": handoff,
    "windows": windows,
    "ranks": ranks,
    "ttft": ttft,
    "beside": beside,
}


def outcome_of(measure: Callable[[Bench], BenchmarkResult], bench: Bench) -> PartOutcome:
    """Run a part."""
    began_s = time.monotonic()
    try:
        found = measure(bench)
    except PartSkipped as why_not:
        return PartOutcome(skipped=str(why_not), seconds=time.monotonic() - began_s)
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
