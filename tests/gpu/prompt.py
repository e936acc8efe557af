"""A long prompt found in the pool, beside computing it: a model of 8B's shape, by transformers.

The weights are random, which changes no time. Its KV is copied out of transformers' cache into
blocks as vLLM keeps them (a tensor a layer, K and V of 16 tokens beside each other), saved, and
loaded into other blocks; then the next token is computed from both, and must be the same.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most, figure
from tests.gpu.engine import COPIED_WITHIN_S, PAGE_TOKENS, copying_engine
from tests.gpu.results import PartSkipped
from tests.gpu.shapes import MODEL_8B

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import DynamicCache, LlamaForCausalLM

    from kvd.bench.report import Measured
    from tests.gpu.engine import CopyingEngine
    from tests.gpu.results import Setting

ROUNDS: Final = 5
PREFILLS: Final = 2
REHEARSED: Final = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
COLUMNS = (
    ResultColumn("tokens", "tokens", ","),
    ResultColumn("kv_mib", "KV, MiB", ","),
    ResultColumn("prefill_ms", "computed, ms", ".1f"),
    ResultColumn("save_ms", "saved, ms", ".1f"),
    ResultColumn("lease_ms", "lease, ms", ".2f"),
    ResultColumn("found_ms", "found: lease to the last block, ms", ".1f"),
    ResultColumn("sooner", "times sooner", ".1f"),
)


class KvShape(NamedTuple):
    """Of one block of one layer: K and V, the tokens of a page, heads, head_dim."""

    kv_heads: int
    head_dim: int
    itemsize: int

    @property
    def block_bytes(self) -> int:
        return 2 * PAGE_TOKENS * self.kv_heads * self.head_dim * self.itemsize


def found(setting: Setting) -> BenchmarkResult:
    """All of it, for each length."""
    try:
        import transformers  # noqa: PLC0415 - seconds, and may be missing
    except ImportError as error:
        raise PartSkipped(f"transformers is not installed: {error}") from error
    if not setting.is_rehearsal and not torch.cuda.is_available():
        raise PartSkipped(f"torch {torch.__version__} finds no device")
    shape = setting.of(MODEL_8B, REHEARSED)
    lengths = setting.of((2048, 8192, 32768), (64, 256))
    where = torch.device("cuda:0") if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    config = transformers.LlamaConfig(
        **shape, max_position_embeddings=2 * max(lengths), rope_theta=500000.0
    )
    torch.manual_seed(1)
    # Made where it computes: 8B weights from a processor would take most of the time there is.
    with where:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model = transformers.LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)
    kv = KvShape(shape["num_key_value_heads"], shape["head_dim"], dtype.itemsize)
    pages = sum(lengths) // PAGE_TOKENS
    rows, wrong = [], []
    with copying_engine(
        layers=shape["num_hidden_layers"],
        piece_bytes=kv.block_bytes,
        pages=pages,
        blocks=2 * max(lengths) // PAGE_TOKENS,
    ) as engine:
        for length in lengths:
            row, is_same = _of_length(model, engine, kv, length)
            rows.append(row)
            if not is_same:
                wrong.append(f"{length} tokens that were loaded are others than were saved")
    goals = ()
    if lengths[-1] == 32768:
        ms = figure(rows[-1], "found_ms")
        goals = (at_most("ms from lease to the last block of 32,768 tokens", 110.0, ms),)
    return BenchmarkResult(
        tables=(
            ResultTable("a prompt found in the pool, beside computing it", COLUMNS, tuple(rows)),
        ),
        goals=goals,
        wrong=tuple(wrong),
        notes=(f"{_told(shape)}, {str(dtype).removeprefix('torch.')}, random weights",),
    )


def _told(shape: dict[str, int]) -> str:
    return (
        f"a Llama of {shape['num_hidden_layers']} layers, {shape['num_key_value_heads']} KV heads "
        f"of {shape['head_dim']}"
    )


def _of_length(
    model: LlamaForCausalLM, engine: CopyingEngine, kv: KvShape, length: int
) -> tuple[Measured, bool]:
    tokens = np.random.default_rng(length).integers(
        0, model.config.vocab_size, length + 1, np.int32
    )
    ids = torch.from_numpy(tokens[:-1].astype(np.int64))[None].to(model.device)
    following = torch.tensor([[int(tokens[-1])]], device=model.device)
    prefill_ms = []
    for _ in range(PREFILLS + 1):
        cache, took_ms = _prefill(model, ids)
        prefill_ms.append(took_ms)
    pages = length // PAGE_TOKENS
    order = engine.scattered(2 * pages, seed=length)
    ours, others = order[:pages], order[pages:]
    _out_of(cache, engine, kv, ours)
    _settle()

    prompt = tokens[:-1]
    lease = engine.node.lease(prompt)
    began_s = time.perf_counter()
    engine.save(lease, ours).result(COPIED_WITHIN_S)
    save_ms = (time.perf_counter() - began_s) * 1e3
    lease.release(())

    lease_ms, found_ms = [], []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        hit = engine.node.lease(prompt)
        leased_s = time.perf_counter()
        load = engine.load(hit, others)
        load.result(COPIED_WITHIN_S)
        found_ms.append((time.perf_counter() - began_s) * 1e3)
        lease_ms.append((leased_s - began_s) * 1e3)
        is_hit = hit.prefix_len == length
        hit.release()

    is_same = is_hit and _is_same(model, cache, engine, kv, others, following)
    computed = statistics.median(prefill_ms[1:])
    in_pool = statistics.median(found_ms)
    return {
        "tokens": length,
        "kv_mib": pages * engine.page_bytes // 2**20,
        "prefill_ms": computed,
        "save_ms": save_ms,
        "lease_ms": statistics.median(lease_ms),
        "found_ms": in_pool,
        "sooner": computed / in_pool,
    }, is_same


@torch.inference_mode()
def _prefill(model: LlamaForCausalLM, ids: torch.Tensor) -> tuple[DynamicCache, float]:
    from transformers import DynamicCache  # noqa: PLC0415 - as above

    cache = DynamicCache(config=model.config)
    _settle()
    began_s = time.perf_counter()
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    _settle()
    return cache, (time.perf_counter() - began_s) * 1e3


def _out_of(cache: DynamicCache, engine: CopyingEngine, kv: KvShape, blocks: Sequence[int]) -> None:
    """Copy the KV of whole pages into these blocks."""
    for number, layer in enumerate(cache.layers):
        packed = torch.stack([_by_page(layer.keys, kv), _by_page(layer.values, kv)], dim=1)
        packed = packed.contiguous()
        _settle()
        for page, block in enumerate(blocks):
            at = engine.addresses[number] + int(block) * kv.block_bytes
            engine.runtime.copy(at, packed[page].data_ptr(), kv.block_bytes)
    engine.runtime.synchronize()


def _by_page(states: torch.Tensor, kv: KvShape) -> torch.Tensor:
    """(pages, page_size, kv_heads, head_dim) of (1, kv_heads, tokens, head_dim)."""
    tokens = states[0].transpose(0, 1)
    return tokens.reshape(-1, PAGE_TOKENS, kv.kv_heads, kv.head_dim)


@torch.inference_mode()
def _is_same(
    model: LlamaForCausalLM,
    cache: DynamicCache,
    engine: CopyingEngine,
    kv: KvShape,
    blocks: Sequence[int],
    following: torch.Tensor,
) -> bool:
    """Whether these blocks hold what the cache does, and the next token follows from both alike."""
    from transformers import DynamicCache  # noqa: PLC0415 - as above

    loaded = DynamicCache(config=model.config)
    for number, layer in enumerate(cache.layers):
        like = torch.stack([_by_page(layer.keys, kv), _by_page(layer.values, kv)], dim=1)
        there = torch.empty_like(like, memory_format=torch.contiguous_format)
        for page, block in enumerate(blocks):
            at = engine.addresses[number] + int(block) * kv.block_bytes
            engine.runtime.copy(there[page].data_ptr(), at, kv.block_bytes)
        engine.runtime.synchronize()
        if not torch.equal(there, like):
            return False
        k, v = (
            part.reshape(1, -1, kv.kv_heads, kv.head_dim).transpose(1, 2).contiguous()
            for part in (there[:, 0], there[:, 1])
        )
        loaded.update(k, v, number)
    ours, theirs = (
        model(input_ids=following, past_key_values=one, logits_to_keep=1).logits
        for one in (loaded, cache)
    )
    # The same bytes; in 16 bits, other strides may choose another kernel.
    return bool((ours - theirs).abs().max() <= 0.02 * theirs.abs().max())


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
