"""``benchmarks multiturn`` at its smallest, and its load: what a node has seen, page by page."""

from __future__ import annotations

from itertools import pairwise

from benchmarks.multiturn import Conversation, SeenPages, TalkShape, measure_talks
from kvd.types import Tokens, pack_ids

PAGE = 4


def tokens(*ids: int) -> Tokens:
    return Tokens(pack_ids(list(ids)))


def test_unseen_pages_counts_whole_and_partial_pages_when_nothing_was_seen():
    seen = SeenPages(PAGE)

    assert [seen.unseen_pages(tokens(*range(n))) for n in (1, 4, 5, 8)] == [1, 1, 2, 2]


def test_unseen_pages_ends_reuse_at_the_first_page_that_differs():
    seen = SeenPages(PAGE)
    seen.add(tokens(0, 1, 2, 3, 4, 5, 6, 7, 8, 9))

    same = tokens(0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    other_start = tokens(9, 1, 2, 3, 4, 5, 6, 7)
    other_middle = tokens(0, 1, 2, 3, 4, 9, 6, 7, 8)

    assert seen.unseen_pages(same) == 1  # its partial page was never cached
    assert seen.unseen_pages(other_start) == 2
    assert seen.unseen_pages(other_middle) == 2


def test_conversation_asks_with_all_that_was_said_before():
    shape = TalkShape(1, 3, 1, system_tokens=5, user_tokens=3, output_tokens=2)
    talk = Conversation(tokens(*range(5)), shape, (1, 2))

    prompts = []
    for _ in range(shape.turns):
        prompts.append(talk.ask())
        talk.answered(tokens(7, 8))

    assert [len(prompt) // 4 for prompt in prompts] == [8, 13, 18]
    assert all(later.startswith(before + tokens(7, 8)) for before, later in pairwise(prompts))


def test_measured_is_what_the_decode_node_had_not_seen_when_two_conversations_share_a_start():
    """Every turn reuses all that was said before (scenario A39); real daemons, engines, NIXL."""
    shape = TalkShape(2, 2, 1, system_tokens=40, user_tokens=30, output_tokens=3)

    found = measure_talks(shape, lambda _: None)

    on, off = found.tables[0].rows
    page_bytes = 16 * 8192
    # 70 tokens each, then 103: the first two pages are shared, and four whole ones were cached
    # after the first turn (72 tokens of KV).
    assert (on["requests"], off["requests"]) == (8, 8)
    assert on["sent_bytes"] == on["bound_bytes"] == 2 * (5 + 3 + 3 + 3) * page_bytes
    assert off["sent_bytes"] == off["bound_bytes"] == 2 * (5 + 5 + 7 + 7) * page_bytes
