"""``benchmarks cp`` at its smallest: real daemons, real ranks, NIXL."""

from __future__ import annotations

from benchmarks.context import PAGE_TOKENS, TOKEN_BYTES, PromptKind, run
from benchmarks.context_rank import Strategy


def test_run_sends_from_every_daemon_what_it_had_to():
    """160 tokens are 10 pages, 5 of which the decode side has the second time."""
    found = run(lambda _: None, tokens=(160,), repeats=1, ranks=(2,))

    page = PAGE_TOKENS * TOKEN_BYTES
    rows = found.tables[0].rows
    assert [
        (row["ranks"], row["tokens"], row["prefix_tokens"], row["sent_bytes"]) for row in rows
    ] == [
        (2, 160, 0, (5 * page, 5 * page)),
        (2, 160, 0, (10 * page, 0)),
        (2, 160, 0, (10 * page, 0)),
        (2, 160, 80, (3 * page, 2 * page)),
        (2, 160, 80, (5 * page, 0)),
        (2, 160, 80, (5 * page, 0)),
    ]
    assert all(goal.is_met for goal in found.goals)
    for row in rows:
        assert row["took_ms"] > (row["gathered_ms"] or 0) >= 0
        assert (row["ratio"] == 1) == (row["strategy"] == Strategy.NO_GATHER.value)
        assert (row["gathered_ms"] is None) == (row["strategy"] == Strategy.NO_GATHER.value)


def test_due_bytes_leave_the_last_rank_without_any_of_too_few_pages():
    page = PAGE_TOKENS * TOKEN_BYTES

    assert PromptKind(4, 96, 48).due_bytes(Strategy.SHARES) == (page, page, page, 0)
    assert PromptKind(4, 96, 48).due_bytes(Strategy.ONE) == (3 * page, 0, 0, 0)
