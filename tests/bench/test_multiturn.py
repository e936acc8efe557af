"""``benchmarks multiturn`` at its smallest: real daemons, engines, NIXL."""

from __future__ import annotations

from benchmarks.multiturn import run
from benchmarks.multiturn_load import Shape


def test_run_sends_what_the_decode_node_had_not_seen_when_two_conversations_share_a_start():
    """Every turn reuses all that was said before (scenario A39)."""
    shape = Shape(2, 2, 1, system_tokens=40, user_tokens=30, output_tokens=3)

    result = run(shape, lambda _: None)

    page_bytes = 16 * 8192
    # 70 tokens each, then 103: the first two pages are shared, and four whole ones were cached
    # after the first turn (72 tokens of KV).
    assert (result.on.requests, result.off.requests) == (8, 8)
    assert result.on.sent_bytes == result.on.bound_bytes == 2 * (5 + 3 + 3 + 3) * page_bytes
    assert result.off.sent_bytes == result.off.bound_bytes == 2 * (5 + 5 + 7 + 7) * page_bytes
