"""``benchmarks shards`` in small: real transfer processes, every case, what it says of them."""

from __future__ import annotations

from benchmarks.shards import CASES, PAGE_BYTES, run


def test_every_case_moves_its_share_of_the_pages_and_is_verified():
    steps: list[str] = []

    found = run(steps.append, pages=2, repeats=1, seed=1, tls="")

    rows = found.tables[0].rows
    halves = {"second stage of 2 to 1", "second rank of 2 to 1"}
    assert [(row["shards"], row["moved_bytes"]) for row in rows] == [
        (case.name, 2 * PAGE_BYTES // (2 if case.name in halves else 1)) for case in CASES
    ]
    assert all(row["raw"] > 0 and row["kvd"] > 0 for row in rows)
    packed = {row["shards"]: row["pieces"] for row in rows if row["is_packed"]}
    assert packed == {
        "1 to 2": 2 * 2 * 1024,
        "2 to 1": 2 * 2 * 1024,
        "2 to 4": 2 * 4 * 1024,
        "4 to 2": 2 * 4 * 1024,
    }
    assert steps == ["starting", *(case.name for case in CASES)]
    assert [goal.got for goal in found.goals] == [row["to_raw"] for row in rows if row["is_packed"]]
