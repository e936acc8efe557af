"""What the embedding demo calls a failure, and how it says so."""

from __future__ import annotations

import msgspec
import pytest

from kvd.demo.embedding import (
    Batch,
    EmbeddingMemory,
    EmbeddingReport,
    problems,
    told,
    verdict,
)

MEMORY = EmbeddingMemory(
    pages=129,
    counted_pages=129,
    pool_bytes=129 * 131072,
    pool_bytes_expected=129 * 131072,
    counted_pool_bytes=0,
    placeholder_bytes=131072,
    pages_still_held=0,
)
REPORT = EmbeddingReport(
    ok=True,
    problems=(),
    weights="0",
    torch="2",
    transformers="5",
    seed=1,
    dtype="float32",
    tolerance=1e-5,
    batches=(Batch(8, 1000, 100.0, 110.0, 0.0), Batch(8, 1200, 100.0, 130.0, 1e-7)),
    alone_difference=5e-8,
    read_back_difference=0.0,
    damaged_difference=0.014,
    memory=MEMORY,
    refused={"map": "not-supported", "send": "not-supported"},
    throughput_ratio=1.2,
    seconds=12.3,
)


def change(**fields: object) -> EmbeddingReport:
    return msgspec.structs.replace(REPORT, **fields)


def with_memory(**fields: int) -> EmbeddingReport:
    return change(memory=msgspec.structs.replace(MEMORY, **fields))


def test_problems_finds_none_when_everything_is_as_it_must_be() -> None:
    assert problems(REPORT) == ()


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        (
            change(batches=(Batch(8, 1000, 1.0, 1.0, 0.0), Batch(8, 1000, 1.0, 1.0, 0.5))),
            "batch 2, with KV written: the embeddings differ by 0.5, more than 1e-05",
        ),
        (
            change(alone_difference=float("nan")),
            "batch 1, text by text: the embeddings differ by nan, more than 1e-05",
        ),
        (
            change(read_back_difference=1e-4),
            "batch 1, read back from the pool: the embeddings differ by 0.0001, more than 1e-05",
        ),
        (
            change(damaged_difference=2e-6),
            "negative control: a page was zeroed, yet no embedding differs by more than 2.0e-06: "
            "equal embeddings would prove nothing",
        ),
        (
            change(refused={"map": "not-supported", "send": "not refused"}),
            "send on a node without KV: not refused, it must be not-supported",
        ),
        (with_memory(pool_bytes_expected=1), "pool: 16908288 bytes, not 1"),
        (
            with_memory(counted_pool_bytes=4096),
            "the pool without KV takes 4096 bytes, not 0",
        ),
        (with_memory(counted_pages=128), "128 pages counted, 129 written"),
        (
            with_memory(placeholder_bytes=0),
            "placeholder: 0 bytes are not one page of the pool",
        ),
        (with_memory(pages_still_held=3), "3 pages held although every lease was released"),
    ],
)
def test_problems_names_what_is_wrong(report: EmbeddingReport, problem: str) -> None:
    assert problems(report) == (problem,)


def test_verdict_says_what_is_the_same_and_what_is_saved() -> None:
    assert verdict(REPORT) == (
        "OK: embeddings of 16 texts are the same with KV and without (largest difference 1e-07, "
        "1e-05 allowed); 16.0 MiB saved of 16.1 MiB; 80 texts/s, 1.20 times those with KV "
        "written; 12 s"
    )
    assert verdict(REPORT.judged(("a", "b"))) == "FAILED: a (and 1 more)"


def test_told_gives_the_spread_of_the_ratio_and_the_placeholder() -> None:
    lines = told(REPORT)

    assert lines[0] == (
        "throughput without KV: 1.20 times that with KV written, the median of 2 batches; half of "
        "them from 1.05 to 1.35"
    )
    assert lines[1] == (
        "memory: a pool of 129 pages takes 16.1 MiB; without KV 129 pages are counted in 0 bytes; "
        "an engine that must have tensors needs one page of them, 128 KiB"
    )
