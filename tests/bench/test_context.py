"""``benchmarks cp`` at its smallest: real daemons, real ranks, NIXL."""

from __future__ import annotations

from benchmarks.context import PAGE_TOKENS, TOKEN_BYTES, Case, due_bytes, run
from benchmarks.context_rank import Strategy


def test_run_sends_from_every_daemon_what_it_had_to():
    """160 tokens are 10 pages, 5 of which the decode side has the second time."""
    result = run((160,), (2,), 1, lambda _: None)

    page = PAGE_TOKENS * TOKEN_BYTES
    assert [one.case for one in result.cases] == [Case(2, 160, 0), Case(2, 160, 80)]
    assert [[one.sent_bytes for one in case.outcomes] for case in result.cases] == [
        [(5 * page, 5 * page), (10 * page, 0), (10 * page, 0)],
        [(3 * page, 2 * page), (5 * page, 0), (5 * page, 0)],
    ]
    assert all(goal.is_met for goal in result.goals)
    for case in result.cases:
        for one in case.outcomes:
            assert one.took_ms > one.gathered_ms >= 0
            assert (one.ratio == 1) == (one.strategy is Strategy.NO_GATHER)


def test_due_bytes_leave_the_last_rank_without_any_of_too_few_pages():
    page = PAGE_TOKENS * TOKEN_BYTES

    assert due_bytes(Case(4, 96, 48), Strategy.SHARES) == (page, page, page, 0)
    assert due_bytes(Case(4, 96, 48), Strategy.ONE) == (3 * page, 0, 0, 0)
