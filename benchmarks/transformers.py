"""``benchmarks transformers``: at ``generate``, a prompt that the node has, and one it has not.

One daemon, and a small Llama of random weights. A hit is compared with the same answer over a
``DynamicCache`` of transformers that was kept in the process, with the prompt in it: what a script
has that keeps its cache itself, for one conversation. A cold prompt that is saved is compared with
one that is computed without kvd. In turns; each prompt is a new one where it must be cold.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.harness import benchmark
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most, figure
from kvd.connectors.transformers import node, pool_section
from kvd.harness.daemons import one_daemon

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from kvd.bench.report import Measured, Told

ANSWER: Final = 16
BEHIND: Final = 16
"""Tokens that no cache has: what was said last."""

COLUMNS: Final = (
    ResultColumn("what", "what"),
    ResultColumn("p50_ms", "p50 ms", ".1f"),
    ResultColumn("best_ms", "best ms", ".1f"),
    ResultColumn("processor_ms", "processor p50 ms", ".1f"),
    ResultColumn("processor_best_ms", "processor best ms", ".1f"),
)


def small_llama(tokens: int) -> LlamaForCausalLM:
    """So small that its copies count: 16 KiB of KV a token."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2 * tokens,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    torch.nn.Module.eval(model)
    return model


def answered(model: Any, ids: torch.Tensor, **how: object) -> torch.Tensor:
    """What a script calls."""
    out: torch.Tensor = model.generate(ids, max_new_tokens=ANSWER, do_sample=False, **how)
    return out


def timed(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the wall, and of all threads of this process."""
    wall_s, processor_s = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - wall_s, time.process_time() - processor_s


def row_of(what: str, found: list[tuple[float, float]]) -> Measured:
    """Medians and the least."""
    walls, processors = zip(*found, strict=True)
    return {
        "what": what,
        "p50_ms": statistics.median(walls) * 1e3,
        "best_ms": min(walls) * 1e3,
        "processor_ms": statistics.median(processors) * 1e3,
        "processor_best_ms": min(processors) * 1e3,
    }


def settings_of(model: PreTrainedModel) -> dict[str, str]:
    """Of a pool for some of its prompts."""
    lines = pool_section(model, "512MiB").splitlines()[1:]
    pairs = (line.split(" = ") for line in lines)
    return {f"pool.{key}": value.strip('"') for key, value in pairs}


def run(told: Told, *, tokens: int, rounds: int) -> BenchmarkResult:
    """Measure all four, in turns."""
    torch.set_num_threads(1)
    model = small_llama(tokens)
    drawn = torch.Generator().manual_seed(2)

    def prompt() -> torch.Tensor:
        return torch.randint(4096, (1, tokens + BEHIND), generator=drawn)

    rows: dict[str, list[tuple[float, float]]] = {}

    def measure(what: str, act: Callable[[], object]) -> None:
        rows.setdefault(what, []).append(timed(act))

    wrong: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as name,
        one_daemon(Path(name), settings_of(model)) as daemon,
    ):
        warm = prompt()
        kept = DynamicCache(config=model.config)
        with torch.no_grad():
            model(warm[:, :tokens], past_key_values=kept, logits_to_keep=1)
        alone = answered(model, warm, past_key_values=kept)
        kept.crop(tokens - kept.get_seq_length())
        with node(model, daemon.client, save="prompt") as served:
            answered(model, warm[:, :tokens])
            for number in range(rounds):
                told(f"round {number + 1} of {rounds}")
                measure("hit", lambda: wrong.extend(_unlike(answered(model, warm), alone)))
                measure("kept", lambda: answered(model, warm, past_key_values=kept))
                kept.crop(tokens - kept.get_seq_length())
                cold = prompt()
                measure("saved", partial(answered, model, cold))
                measure("cold", partial(_without, model, cold))
            hits = served.counts.hit_tokens
    if hits < rounds * (tokens - 16):
        wrong.append(f"{hits} tokens were found in {rounds} rounds of {tokens}")
    table = [
        row_of("a hit, from the node", rows["hit"]),
        row_of("a DynamicCache kept in the process", rows["kept"]),
        row_of("cold, and saved", rows["saved"]),
        row_of("cold, without kvd", rows["cold"]),
    ]
    return BenchmarkResult(
        tables=(
            ResultTable(
                title=f"{tokens} tokens of a prompt, {BEHIND} behind them, {ANSWER} of an answer",
                columns=COLUMNS,
                rows=tuple(table),
            ),
        ),
        goals=(
            at_most("a hit over the cache kept in the process", 1.3, _ratio(table[0], table[1])),
            at_most("cold and saved over cold without", 1.05, _ratio(table[2], table[3])),
        ),
        wrong=tuple(wrong),
    )


def _unlike(found: torch.Tensor, wanted: torch.Tensor) -> list[str]:
    return [] if torch.equal(found, wanted) else ["a hit has other tokens than the kept cache"]


def _without(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """As if nobody had entered a node."""
    plain = type(model).generate
    found: torch.Tensor = plain(model, ids, max_new_tokens=ANSWER, do_sample=False)
    return found


def _ratio(row: Measured, reference: Measured) -> float:
    """Of processor time: the wall counts what else the machine does."""
    return figure(row, "processor_best_ms") / figure(reference, "processor_best_ms")


command = benchmark(
    "transformers",
    run,
    click.option("--tokens", default=4000, show_default=True, help="Of the prompt."),
    click.option("--rounds", default=5, show_default=True, help="To take the least of."),
)
