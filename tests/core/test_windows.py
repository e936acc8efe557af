"""Window pages beside the tree: who has them, what a slide gives back, and what is cached of them.

scenario C1, scenario C7, scenario C8, scenario C9, scenario C17, scenario C19, scenario C23,
scenario C24, scenario C26.
"""

from __future__ import annotations

import pytest

from kvd.core.cache.eviction import Policy
from kvd.core.cache.lease import Quarantine, Shortage, Writer
from kvd.core.cache.lease_record import LeaseSends
from kvd.core.layout.spec import Component, PageOrder, PoolSpec, Raw, Tail
from kvd.core.leases.lease_table import LeaseTable
from kvd.core.outbox import Outbox
from kvd.errors import Refusal
from kvd.types import NO_TOKENS, Tokens, count
from kvd.wire import events
from tests.core.keeping import (
    arrival,
    cached,
    check,
    claim,
    finish,
    opened,
    pages_left,
    row,
    table_of,
    windows,
)
from tests.core.world import tokens

PAGE = 4
WINDOW = 8
"""Two pages: a sequence goes on from a boundary with two live pages behind it."""


@pytest.fixture
def table() -> LeaseTable:
    return table_of(PAGE, 40, window=WINDOW, swa=20)


def mapped(table: LeaseTable, lease) -> tuple[int, int]:
    """The first mapped page of the row and the end of what is mapped."""
    seen = row(table, lease)
    there = [k for k, page in enumerate(seen) if page]
    return (there[0], there[-1] + 1) if there else (0, 0)


def live(table: LeaseTable, page: int = PAGE) -> list[tuple[int, int, int]]:
    """First and last token and locks of each live node, in order."""
    return sorted(
        (node.end_tokens - node.n_pages * page, node.end_tokens, window.locks)
        for node, window in windows(table).at.items()
    )


def bare(table: LeaseTable, toks: Tokens) -> None:
    """These tokens are cached, and their windows are tombstones."""
    cached(table, toks)
    windows(table).make_room(windows(table).headroom_pages)
    check(table)


# ---- what a claim takes --------------------------------------------------------------------------


def test_who_computes_has_a_window_page_for_every_page(table):
    lease = opened(table, claim(tokens((1, 18)), reserve=4))

    assert row(table, lease) == [15, 16, 17, 18, 19, 20]
    assert pages_left(table) == {"kv": (34, 0), "swa": (14, 0)}


def test_who_receives_has_window_pages_for_the_tail_only(table):
    lease = opened(table, arrival(table, tokens((1, 40))))

    assert row(table, lease) == [0, 0, 0, 0, 0, 0, 0, 18, 19, 20]


def test_a_tail_of_168_tokens_of_a_prompt_of_1000_takes_3_window_pages_and_16_pages():
    table = table_of(64, 20, window=128, swa=3)

    lease = opened(table, arrival(table, tokens((1, 1000))))

    assert row(table, lease) == [0] * 13 + [1, 2, 3]
    assert pages_left(table) == {"kv": (4, 0), "swa": (0, 0)}


def test_the_match_of_a_receive_ends_where_the_window_that_is_sent_begins():
    table = table_of(64, 40, window=128, swa=20)
    prompt = tokens((1, 1000))
    cached(table, Tokens(prompt[: 960 * 4]))
    assert table.tree.probe(prompt, "") == 960

    lease = opened(table, arrival(table, prompt))

    assert lease.prefix_tokens == 832
    assert lease.held_pages == 16 - 13
    assert row(table, lease)[:13] == [0] * 13
    assert 0 not in row(table, lease)[13:]


def test_a_receive_needs_no_live_window(table):
    bare(table, tokens((1, 40)))

    lease = opened(table, arrival(table, tokens((1, 60))))

    assert lease.prefix_tokens == 40


def test_a_window_of_192_tokens_is_not_admitted_into_128_and_neither_pool_is_touched():
    table = table_of(64, 20, window=128, swa=2)
    cached(table, tokens((1, 64)))
    before = pages_left(table), live(table), table.tree.probe(tokens((1, 200)), "")

    found = table.grants.open_lease(arrival(table, tokens((500, 193)), reserve=63))

    assert found == Shortage(3, 2, "swa")
    check(table)
    assert (pages_left(table), live(table), table.tree.probe(tokens((1, 200)), "")) == before


def test_a_shortage_of_pages_touches_no_window_pool():
    table = table_of(64, 2, window=128, swa=9)
    cached(table, tokens((1, 64)))
    before = pages_left(table), live(table)

    found = table.grants.open_lease(arrival(table, tokens((500, 192))))

    assert found == Shortage(3, 2, "kv")
    check(table)
    assert (pages_left(table), live(table)) == before


def test_pages_that_a_prefix_locks_cannot_be_had_for_its_windows():
    table = table_of(PAGE, 40, window=WINDOW, swa=6)
    cached(table, tokens((1, 16)))
    opened(table, claim(tokens((700, 8))))

    # 2 of 4 evictable window pages are the window behind the prefix.
    found = table.grants.open_lease(claim(tokens((1, 16), (900, 12))))

    assert found == Shortage(3, 2, "swa")
    check(table)
    assert pages_left(table)["swa"] == (0, 4)


def test_a_window_pool_of_18432_tokens_admits_a_prompt_of_20000_that_is_received():
    table = table_of(64, 400, window=128, swa=18_432 // 64)

    asked = arrival(table, tokens((1, 20_000)))

    assert table.budgets.least(asked) == (313, 3)
    opened(table, asked)


def test_with_pages_of_one_token_the_window_pool_must_hold_the_whole_prompt():
    table = table_of(1, 20_001, window=128, swa=18_432)

    assert table.grants.open_lease(arrival(table, tokens((1, 20_000)))) == Shortage(
        20_000, 18_432, "swa"
    )


def test_with_pages_of_one_token_a_prefix_has_all_its_windows_or_is_none():
    """All of them are sent to whoever receives, so all of them must be there."""
    table = table_of(1, 60, window=4, swa=60)
    cached(table, tokens((1, 20)))

    lease = opened(table, claim(tokens((1, 30)), step=5))
    assert lease.prefix_tokens == 20
    assert all(row(table, lease))
    assert live(table, 1) == [(0, 20, 1)]

    finish(table, lease)
    windows(table).make_room(windows(table).pool.free_pages + 1)
    assert live(table, 1) == [(20, 30, 0)]
    again = opened(table, claim(tokens((1, 40))))
    assert again.prefix_tokens == 0
    assert all(row(table, again))


def test_the_null_page_is_no_window_page(table):
    lease = opened(table, claim(tokens((1, 20 * PAGE))))

    assert sorted(row(table, lease)) == list(range(1, 21))
    assert table.grants.open_lease(claim(tokens((900, 1)))) == Shortage(1, 0, "swa")


# ---- the match of who computes -------------------------------------------------------------------


def test_a_prefix_is_gone_on_from_with_its_window(table):
    cached(table, tokens((1, 24)))
    (before,) = windows(table).at.values()
    there = before.pages

    lease = opened(table, claim(tokens((1, 24), (900, 8))))

    assert lease.prefix_tokens == 24
    assert row(table, lease)[:4] == [0, 0, 0, 0]
    assert bytes(windows(table).held[lease.id].pages[: 2 * 4]) == there[4 * 4 :]
    assert live(table) == [(0, 16, 0), (16, 24, 1)]


def test_somebody_who_computes_is_left_one_token_to_compute(table):
    cached(table, tokens((1, 24)))

    lease = opened(table, claim(tokens((1, 24))))

    assert lease.prefix_tokens == 20


def test_a_path_without_tombstones_that_is_shorter_than_the_window_matches(table):
    cached(table, tokens((1, 4)))

    lease = opened(table, claim(tokens((1, 8))))

    assert lease.prefix_tokens == 4
    assert live(table) == [(0, 4, 1)]


def test_a_prefix_whose_windows_are_gone_is_computed_again(table):
    bare(table, tokens((1, 24)))

    lease = opened(table, claim(tokens((1, 32))))

    assert lease.prefix_tokens == 0
    assert table.tree.probe(tokens((1, 32)), "") == 24


def test_a_match_ends_before_a_tombstone_that_has_no_window_behind_it(table):
    cached(table, tokens((1, 16)))
    cached(table, tokens((1, 16), (500, 8)))
    tree = table.tree
    deep = tree.match(tokens((1, 16), (500, 8)), "")
    keeper = windows(table)
    while deep in keeper.at:
        keeper.make_room(keeper.pool.free_pages + 1)
    check(table)
    assert live(table) == []

    cached(table, tokens((1, 12)))

    lease = opened(table, claim(tokens((1, 16), (500, 12))))
    assert lease.prefix_tokens == 12


def test_a_live_page_after_a_tombstone_is_no_window(table):
    bare(table, tokens((1, 24)))
    # Comes to life from 24 on only: one page of the two that are looked back at.
    lease = opened(table, arrival(table, tokens((1, 40))))
    finish(table, lease)
    assert live(table) == [(28, 40, 0)]

    assert opened(table, claim(tokens((1, 33)))).prefix_tokens == 0
    assert opened(table, claim(tokens((1, 37)))).prefix_tokens == 36


def test_the_window_behind_a_prefix_is_cut_where_it_begins(table):
    cached(table, tokens((1, 32)))

    opened(table, claim(tokens((1, 32), (900, 4))))

    assert live(table) == [(0, 24, 0), (24, 32, 1)]
    assert windows(table).evictable_pages == 6


def test_a_split_inside_a_locked_window_keeps_both_halves_locked(table):
    cached(table, tokens((1, 32)))
    first = opened(table, claim(tokens((1, 32), (900, 4))))

    second = opened(table, claim(tokens((1, 28), (950, 4))))

    assert second.prefix_tokens == 28
    assert live(table) == [(0, 20, 0), (20, 24, 1), (24, 28, 2), (28, 32, 1)]
    for lease in (first, second):
        table.holders.release(lease, "engine", "normal")
        check(table)
    assert {locks for _, _, locks in live(table)} == {0}


# ---- slides --------------------------------------------------------------------------------------


def test_a_slide_gives_back_what_is_behind_the_window(table):
    lease = opened(table, claim(tokens((1, 40))))

    assert table.grants.slide(lease, 40) is None

    # 40 - 1 - 8 is token 31: page 7 is the first that is still looked at.
    assert mapped(table, lease) == (7, 10)
    assert pages_left(table)["swa"] == (17, 0)
    check(table)


def test_a_slide_to_the_same_token_gives_nothing_back(table):
    lease = opened(table, claim(tokens((1, 40))))
    table.grants.slide(lease, 40)
    before = pages_left(table), row(table, lease)

    table.grants.slide(lease, 40)
    table.grants.slide(lease, 12)

    assert (pages_left(table), row(table, lease)) == before


@pytest.mark.parametrize(("cache", "start"), [(True, 832), (False, 896)])
def test_a_slide_to_token_1000_with_a_window_of_100(cache, start):
    table = table_of(64, 20, window=100, swa=20)
    lease = opened(table, claim(tokens((1, 1000)), cache=cache))

    table.grants.slide(lease, 1000)

    assert mapped(table, lease) == (start // 64, 16)


def test_pages_that_a_send_still_needs_are_not_slid_past(table):
    lease = opened(table, claim(tokens((1, 40)), reserve=8))
    lease.sends = LeaseSends()
    lease.sends.window_from = 16

    table.grants.slide(lease, 40)

    assert mapped(table, lease) == (4, 12)


def test_sliding_past_the_prefix_lets_go_of_its_window_and_not_of_its_pages(table):
    cached(table, tokens((1, 24)))
    lease = opened(table, claim(tokens((1, 24), (900, 24))))
    assert pages_left(table) == {"kv": (28, 0), "swa": (8, 4)}

    table.grants.slide(lease, 36)
    check(table)

    assert live(table) == [(0, 16, 0), (16, 24, 0)]
    assert pages_left(table) == {"kv": (28, 0), "swa": (8, 6)}
    windows(table).make_room(14)
    check(table)
    table.holders.release(lease, "engine", "normal")
    check(table)
    assert live(table) == []
    assert table.tree.probe(tokens((1, 24)), "") == 24


def test_a_slide_that_one_of_two_windows_refuses_moves_neither():
    """What a send needs of the wide one, the narrow one keeps too, and has fewer pages."""
    wide = Component("wide", 1, Raw(16), PAGE, Tail(32))
    narrow = Component("swa", 1, Raw(16), PAGE, Tail(WINDOW))
    components = (Component("kv", 1, Raw(16), PAGE), wide, narrow)
    spec = PoolSpec("main", "many", PageOrder.PAGE_FIRST, components, (41, 41, 41))
    table = LeaseTable(spec, Policy.LRU, Outbox())
    lease = opened(table, claim(tokens((0, 64)), step=8))
    table.holders.hold_for_send(lease, "send 1", 64)
    for upto in range(8, 41, 8):
        assert table.grants.slide(lease, upto) is None
    before = row(table, lease, "wide"), row(table, lease)

    refusal = table.grants.slide(lease, 48)

    assert isinstance(refusal, Refusal)
    assert "it has 5 pages of swa" in refusal.message
    assert (row(table, lease, "wide"), row(table, lease)) == before
    assert [one.slides for one in table.components.each] == [5, 5]
    check(table)


def test_a_slide_that_ends_inside_the_prefixs_window_keeps_all_of_it_locked(table):
    cached(table, tokens((1, 24)))
    lease = opened(table, claim(tokens((1, 24), (900, 24))))

    table.grants.slide(lease, 31)

    assert mapped(table, lease) == (5, 12)
    assert live(table) == [(0, 16, 0), (16, 24, 1)]
    check(table)


def test_a_lease_of_steps_turns_the_same_pages_along_the_sequence():
    table = table_of(PAGE, 40, window=WINDOW, swa=5)
    lease = opened(table, claim(tokens((1, 160)), step=8))
    assert pages_left(table)["swa"] == (0, 0)
    seen = [mapped(table, lease)]

    for upto in range(8, 160, 8):
        assert table.grants.slide(lease, upto) is None
        check(table)
        seen.append(mapped(table, lease))

    assert seen[:6] == [(0, 2), (0, 4), (1, 6), (3, 8), (5, 10), (7, 12)]
    assert seen[-1] == (35, 40)


def test_a_lease_of_steps_gives_pages_back_when_nothing_is_left_to_be_mapped():
    table = table_of(PAGE, 40, window=WINDOW, swa=5)
    lease = opened(table, claim(tokens((1, 24)), step=8))
    table.grants.slide(lease, 8)
    table.grants.slide(lease, 16)
    assert (mapped(table, lease), pages_left(table)["swa"]) == ((1, 6), (0, 0))

    table.grants.slide(lease, 24)

    assert (mapped(table, lease), pages_left(table)["swa"]) == ((3, 6), (2, 0))
    check(table)


def test_a_step_longer_than_promised_is_refused_and_changes_nothing():
    table = table_of(PAGE, 40, window=WINDOW, swa=9)
    lease = opened(table, claim(tokens((1, 160)), step=8))
    table.grants.slide(lease, 8)
    before = row(table, lease), pages_left(table)

    refusal = table.grants.slide(lease, 60)

    assert isinstance(refusal, Refusal)
    assert (refusal.code.value, refusal.numbers) == ("wrong-state", {"upto_tokens": 60, "pages": 5})
    assert (row(table, lease), pages_left(table)) == before
    check(table)


def test_a_receive_of_steps_has_the_prompts_tail_and_one_step_of_what_follows(table):
    lease = opened(table, arrival(table, tokens((1, 40)), reserve=40, step=4))

    assert mapped(table, lease) == (7, 11)
    assert table.grants.slide(lease, 44) is None
    assert mapped(table, lease) == (8, 12)


def test_an_extension_takes_window_pages_for_what_is_added(table):
    lease = opened(table, claim(tokens((1, 16))))

    assert table.grants.extend(lease, 8) is None

    assert mapped(table, lease) == (0, 6)
    check(table)


def test_an_extension_of_a_lease_of_steps_takes_no_more_than_ever_turns():
    table = table_of(PAGE, 40, window=WINDOW, swa=5)
    lease = opened(table, claim(tokens((1, 16)), step=8))

    assert table.grants.extend(lease, 80) is None

    assert pages_left(table)["swa"] == (0, 0)
    assert mapped(table, lease) == (0, 2)
    check(table)


def test_an_extension_without_window_pages_changes_nothing():
    table = table_of(PAGE, 40, window=WINDOW, swa=5)
    lease = opened(table, claim(tokens((1, 16))))
    before = row(table, lease), pages_left(table), lease.page_table

    assert table.grants.extend(lease, 8) == Shortage(2, 1, "swa")

    assert (row(table, lease), pages_left(table), lease.page_table) == before
    assert lease.room_tokens == 16


# ---- what is cached ------------------------------------------------------------------------------


def test_windows_of_committed_tokens_join_the_tree_when_the_lease_ends(table):
    lease = opened(table, claim(tokens((1, 22)), reserve=20))

    finish(table, lease)

    assert live(table) == [(0, 20, 0)]
    assert pages_left(table) == {"kv": (35, 5), "swa": (15, 5)}


def test_a_release_without_a_commit_caches_no_window(table):
    lease = opened(table, claim(tokens((1, 22))))

    table.holders.release(lease, "engine", "normal")
    check(table)

    assert pages_left(table) == {"kv": (40, 0), "swa": (20, 0)}


def test_what_a_commit_cached_keeps_its_windows_after_a_plain_release(table):
    lease = opened(table, claim(tokens((1, 22)), reserve=20))
    table.commits.commit(lease, NO_TOKENS)
    table.commits.commit(lease, tokens((600, 1)))

    table.holders.release(lease, "engine", "normal")
    check(table)

    assert live(table) == [(0, 20, 0)]


def test_a_lease_that_caches_nothing_gives_no_window_to_the_tree(table):
    finish(table, opened(table, claim(tokens((1, 22)), cache=False)))

    assert pages_left(table) == {"kv": (40, 0), "swa": (20, 0)}


def test_a_slid_lease_leaves_a_tombstone_before_its_window(table):
    lease = opened(table, claim(tokens((1, 40))))
    table.grants.slide(lease, 40)

    finish(table, lease)

    assert live(table) == [(28, 40, 0)]
    assert pages_left(table) == {"kv": (30, 10), "swa": (17, 3)}


def test_a_received_tail_joins_the_tree_when_its_lease_ends(table):
    finish(table, opened(table, arrival(table, tokens((1, 40)))))

    assert live(table) == [(28, 40, 0)]
    assert opened(table, claim(tokens((1, 41)))).prefix_tokens == 40


def test_tokens_committed_beyond_the_windows_that_are_mapped_cache_none_of_them(table):
    lease = opened(table, claim(tokens((1, 40)), step=8))

    finish(table, lease)

    assert live(table) == []
    assert pages_left(table)["swa"] == (20, 0)


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_tombstone_comes_to_life_when_its_tokens_are_computed_again(table, is_locked):
    bare(table, tokens((1, 24)))
    other = opened(table, arrival(table, tokens((1, 60)))) if is_locked else None
    node = table.tree.match(tokens((1, 24)), "")
    assert (node.lock_ref > 0) is is_locked

    cached(table, tokens((1, 24)))

    assert live(table) == [(0, 20, 0), (20, 24, 0)]
    assert opened(table, claim(tokens((1, 24), (900, 4)))).prefix_tokens == 24
    if other is not None:
        table.holders.release(other, "arrival", "normal")
        check(table)


def test_what_is_live_already_keeps_its_pages_and_the_others_go_back(table):
    first, second = (opened(table, claim(tokens((1, 24)))) for _ in range(2))
    finish(table, first)
    pages = [window.pages for window in windows(table).at.values()]

    finish(table, second)

    assert [window.pages for window in windows(table).at.values()] == pages
    assert pages_left(table) == {"kv": (34, 6), "swa": (14, 6)}


def test_half_a_node_comes_to_life_where_only_its_end_was_computed(table):
    bare(table, tokens((1, 40)))

    finish(table, opened(table, arrival(table, tokens((1, 40)))))

    assert live(table) == [(28, 40, 0)]
    assert table.tree.probe(tokens((1, 40)), "") == 40


# ---- room ----------------------------------------------------------------------------------------


def test_room_for_windows_is_made_by_dropping_windows_and_no_token(table):
    cached(table, tokens((1, 40)))
    cached(table, tokens((500, 40)))
    table.out.drain()

    opened(table, claim(tokens((900, 12))))

    assert live(table) == [(0, 40, 0)]
    assert table.tree.probe(tokens((1, 40)), "") == 40
    told = [event for event in table.out.drain().events if isinstance(event, events.Evicted)]
    assert [(one.component, one.pages, one.reason) for one in told] == [("swa", 10, "room")]


def test_the_windows_used_longest_ago_go_first(table):
    for first in (1, 500):
        cached(table, tokens((first, 40)))
    table.holders.release(opened(table, claim(tokens((1, 40), (900, 4)))), "engine", "normal")

    windows(table).make_room(2)
    check(table)

    # Of the one that was used again, what lies before its window was not.
    assert table.components.lock_prefix(claim(tokens((1, 41)))).end_tokens == 40


def test_a_locked_window_is_not_dropped(table):
    cached(table, tokens((1, 80)))
    opened(table, claim(tokens((1, 80), (900, 4))))

    windows(table).make_room(windows(table).headroom_pages)
    check(table)

    assert live(table) == [(72, 80, 1)]


def test_tokens_that_leave_the_tree_take_their_windows_with_them(table):
    cached(table, tokens((1, 40)))

    table.evictor.evict(10, "operator")
    check(table)

    assert pages_left(table) == {"kv": (40, 0), "swa": (20, 0)}


def test_a_flush_leaves_the_windows_of_what_is_locked(table):
    cached(table, tokens((1, 40)))
    opened(table, claim(tokens((1, 16), (900, 4))))

    table.evictor.flush()
    check(table)

    assert live(table) == [(0, 8, 0), (8, 16, 1)]


# ---- quarantine ----------------------------------------------------------------------------------


def test_windows_that_a_remote_may_still_write_are_kept_from_everybody(table):
    cached(table, tokens((1, 24)))
    lease = opened(table, arrival(table, tokens((1, 24), (900, 36))))

    table.ends.quarantine(lease, Quarantine((Writer("p", "i"),), 0.0, "cancelled"))
    check(table)

    assert count(windows(table).own_pages(lease)) == 3
    assert pages_left(table) == {"kv": (25, 6), "swa": (11, 6)}
    assert table.components.page_tables(lease) == (b"",)

    table.ends.end_quarantine(lease, "settled")
    check(table)
    assert pages_left(table) == {"kv": (34, 6), "swa": (14, 6)}
