"""``benchmarks shards`` in small: real transfer processes, every case, what it says of them."""

from __future__ import annotations

import asyncio

from benchmarks.shard_moves import CASES, PAGE_BYTES, Plan, goals_of, measure


def test_every_case_moves_its_share_of_the_pages_and_is_verified():
    steps: list[str] = []

    result = asyncio.run(measure(Plan(pages=2, repeats=1), steps.append))

    halves = {"second stage of 2 to 1", "second rank of 2 to 1"}
    assert [(one.name, one.moved_bytes) for one in result.cases] == [
        (case.name, 2 * PAGE_BYTES // (2 if case.name in halves else 1)) for case in CASES
    ]
    assert all(one.rates.raw > 0 and one.rates.kvd > 0 for one in result.cases)
    packed = {one.name: one.pieces for one in result.cases if one.is_packed}
    assert packed == {
        "1 to 2": 2 * 2 * 1024,
        "2 to 1": 2 * 2 * 1024,
        "2 to 4": 2 * 4 * 1024,
        "4 to 2": 2 * 4 * 1024,
    }
    assert steps == ["starting", *(case.name for case in CASES)]
    assert goals_of(list(result.cases)) == result.goals
