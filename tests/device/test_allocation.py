"""What attention allocates: a block, whatever the size of the pool and the length of a sequence.

Counted where memory is allocated, inside the kernels of torch too.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kvd.device.attention import BLOCK_TOKENS, QUERY_TOKENS, Packed, decode, prefill
from tests.device.oracle import Pool, Shape, starts_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Count = "Callable[[Callable[[], torch.Tensor]], int]"


@pytest.fixture
def peak(tmp_path: Path) -> Count:
    """Counts the most bytes that a call has allocated at once, its result included."""
    torch.set_num_threads(1)

    def count(call: Callable[[], torch.Tensor]) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            call()
        seen.export_chrome_trace(str(tmp_path / "trace.json"))
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        changes = [one for one in events if one["name"] == "[memory]"]
        changes.sort(key=lambda one: one["ts"])
        total = most = 0
        for one in changes:
            total += one["args"]["Bytes"]
            most = max(most, total)
        return most

    return count


def test_the_count_sees_a_gathered_sequence(peak: Count) -> None:
    """Of the count itself: what is alive at once, not the sum of all."""
    view = torch.zeros(64, 16, 2, 32)

    gathered = peak(lambda: view[torch.arange(64)])
    in_turn = peak(lambda: torch.stack([view[torch.arange(32)].sum() for _ in range(4)]))

    assert view.nbytes <= gathered <= view.nbytes + 4096
    assert view.nbytes // 2 <= in_turn <= view.nbytes // 2 + 4096


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("new", [1, 300])
def test_allocation_depends_neither_on_the_pool_nor_on_the_length(
    peak: Count, dtype: str, *, latent: bool, new: int
) -> None:
    """Pools of 600 and 2,000 pages, six blocks more or less: the same bytes, in bounds."""
    shape = Shape(16, 1 if latent else 2, 8 if latent else 4, 96, 64, latent=latent, dtype=dtype)
    found = set()
    for pages in (600, 2000):
        for length in (2500, 2500 + 6 * BLOCK_TOKENS):
            pool = Pool(shape, pages, seed=1, layers=1)
            batch = pool.pages([length])
            q, rule = torch.stack(pool.queries(new)), pool.rule()
            decode(q, batch, rule)  # what libraries allocate for themselves, once
            found.add(peak(lambda q=q, batch=batch, rule=rule: decode(q, batch, rule)))

    (bytes_at_once,) = found
    widths = (4,) if dtype == "float32" else (4, 2)
    dims = 96 if latent else 96 + 64
    scratch = BLOCK_TOKENS * shape.kv_heads * dims * 4
    rows = min(new, QUERY_TOKENS) * 8
    work = 4 * rows * (1.5 * BLOCK_TOKENS + 3 * 96 + 3 * 64 + 8)
    result = new * 8 * 64 * widths[-1]
    narrow = BLOCK_TOKENS * shape.kv_heads * 96 * (2 if dtype == "bfloat16" else 0)
    assert scratch <= bytes_at_once <= scratch + narrow + work + result + 16384


def test_allocation_of_whole_texts_does_not_depend_on_their_length(peak: Count) -> None:
    """But for the result, which is as long as the queries."""
    extra = set()
    for length in (2048, 6144):
        pool = Pool(Shape(16), 2, seed=1)
        kv = Packed(pool.random(length, 2, 32), pool.random(length, 2, 32), starts_of([length]))
        (q,), rule = pool.queries(length), pool.rule()
        found = peak(lambda q=q, kv=kv, rule=rule: prefill(q, kv, rule, kv.starts))
        extra.add(found - q.nbytes)

    (bytes_at_once,) = extra
    assert bytes_at_once <= 4 * 1.75 * BLOCK_TOKENS * QUERY_TOKENS * 8
