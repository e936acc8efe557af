"""``benchmarks transformers``: a prompt that the node has, and one it has not.

One daemon, and a small Llama of random weights. A hit is compared with the same answer over a
``DynamicCache`` of transformers that was kept in the process, with the prompt in it: what a script
has that keeps its cache itself, for one conversation. A cold prompt that is saved is compared with
one that is computed without kvd. The same by continuous batching, where what is kept in the process
is what transformers keeps itself of prompts in its blocks. In turns; each prompt is a new one where
it must be cold.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import click
import torch
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from benchmarks.harness import benchmark
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most, figure
from kvd.connectors.transformers import node, pool_section
from kvd.harness.daemons import one_daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

    from kvd.bench.report import Measured, Told

P = ParamSpec("P")
R = TypeVar("R")

ANSWER: Final = 16
BLOCK: Final = 256
"""Tokens of a block of a batch: what transformers takes."""

BEHIND: Final = 16
"""Tokens that no cache has: what was said last."""

HIT: Final = "a hit, from the node"
KEPT: Final = "a DynamicCache kept in the process"
KEPT_BLOCKS: Final = "blocks kept in the process"
SAVED: Final = "cold, and saved"
COLD: Final = "cold, without kvd"

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


@contextlib.contextmanager
def batch_of(model: Any, tokens: int) -> Iterator[Callable[[torch.Tensor], list[int]]]:
    """A batch that goes on: a prompt after the other. It has room for four."""
    blocks = ContinuousBatchingConfig(
        num_blocks=4 * (-(-tokens // BLOCK) + 1), page_size=BLOCK, max_batch_tokens=512
    )
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=ANSWER, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    with model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=blocks
    ) as manager:

        def answer(ids: torch.Tensor) -> list[int]:
            name = manager.add_request(ids[0].tolist())
            while True:
                result = manager.get_result(name, timeout=600)
                if result is None or result.error:
                    raise click.ClickException(f"the batch ended: {result and result.error}")
                if result.is_finished():
                    found: list[int] = result.generated_tokens
                    return found

        answer(torch.tensor([[1, 2, 3]]))
        yield answer


class Times:
    """Seconds of the wall, and of all threads of this process, by what was done."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[float, float]]] = {}

    def of(self, what: str, act: Callable[P, R], *args: P.args, **how: P.kwargs) -> R:
        """What ``act`` returns."""
        wall_s, processor_s = time.perf_counter(), time.process_time()
        found = act(*args, **how)
        row = self._found.setdefault(what, [])
        row.append((time.perf_counter() - wall_s, time.process_time() - processor_s))
        return found

    def rows(self) -> tuple[Measured, ...]:
        """A row for each, as they came."""
        return tuple(row_of(what, found) for what, found in self._found.items())


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
    """Measure all four, in turns, by ``generate`` and in a batch."""
    torch.set_num_threads(1)
    model = small_llama(tokens)
    drawn = torch.Generator().manual_seed(2)

    def prompt() -> torch.Tensor:
        return torch.randint(4096, (1, tokens + BEHIND), generator=drawn)

    single, wrong = Times(), list[str]()
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
                wrong.extend(_unlike(single.of(HIT, answered, model, warm), alone))
                single.of(KEPT, answered, model, warm, past_key_values=kept)
                kept.crop(tokens - kept.get_seq_length())
                cold = prompt()
                single.of(SAVED, answered, model, cold)
                single.of(COLD, _without, model, cold)
            hits = served.counts.hit_tokens
        batch, found = in_a_batch(told, model, daemon.client, warm, prompt, rounds)
        wrong += found
    if hits < rounds * (tokens - 16):
        wrong.append(f"{hits} tokens were found in {rounds} rounds of {tokens}")
    return compared(tokens, single.rows(), batch.rows(), wrong)


def compared(
    tokens: int, single: tuple[Measured, ...], batch: tuple[Measured, ...], wrong: list[str]
) -> BenchmarkResult:
    """Hit, kept, saved and cold in each, in this order."""
    titles = {
        f"{tokens} tokens of a prompt, {BEHIND} behind them, {ANSWER} of an answer": single,
        f"The same in a batch that goes on, one prompt at a time, blocks of {BLOCK}": batch,
    }
    return BenchmarkResult(
        tables=tuple(
            ResultTable(title=title, columns=COLUMNS, rows=rows) for title, rows in titles.items()
        ),
        goals=(
            at_most("a hit over the cache kept in the process", 1.3, _ratio(*single[:2])),
            at_most("cold and saved over cold without", 1.05, _ratio(*single[2:])),
            at_most("in a batch: a hit over kept blocks", 1.3, _ratio(*batch[:2])),
            at_most("in a batch: cold and saved over cold", 1.05, _ratio(*batch[2:])),
        ),
        wrong=tuple(wrong),
    )


def in_a_batch(
    told: Told,
    model: PreTrainedModel,
    endpoint: str,
    warm: torch.Tensor,
    prompt: Callable[[], torch.Tensor],
    rounds: int,
) -> tuple[Times, list[str]]:
    """Measure the same four by continuous batching; and what was wrong."""
    times, wrong, hits = Times(), list[str](), 0
    tokens = warm.shape[1]
    with node(model, endpoint), batch_of(model, tokens) as answer:
        wanted = answer(warm)
    for number in range(rounds):
        told(f"round {number + 1} of {rounds}, in a batch")
        cold = prompt()
        with node(model, endpoint) as served, batch_of(model, tokens) as answer:
            found = [times.of(HIT, answer, warm), times.of(KEPT_BLOCKS, answer, warm)]
            saved = times.of(SAVED, answer, cold)
            hits += served.counts.hit_tokens
        with batch_of(model, tokens) as answer:
            alike = saved == times.of(COLD, answer, cold)
        if found != [wanted, wanted] or not alike:
            wrong.append("a prompt in a batch has other tokens than it has alone")
    if hits < rounds * ((tokens - 1) // BLOCK * BLOCK):
        wrong.append(f"{hits} tokens were found in {rounds} batches of {tokens}")
    return times, wrong


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
