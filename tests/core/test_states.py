"""States beside the tree: one page per request, gone on from where a snapshot is and only there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvd.core.cache.lease import Quarantine, Shortage, Writer
from kvd.types import NO_TOKENS, Tokens
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
    states,
    table_of,
)
from tests.core.world import tokens

if TYPE_CHECKING:
    from kvd.core.leases.lease_table import LeaseTable

PAGE = 4


@pytest.fixture
def table() -> LeaseTable:
    """Attention layers and recurrent ones: pages of tokens, and states."""
    return table_of(PAGE, 40, states=4)


def ends(table: LeaseTable) -> dict[int, int]:
    """By the token where it stands, the locks of each snapshot."""
    return {node.end_tokens: one.locks for node, one in states(table).at.items()}


def test_a_request_takes_one_state_whatever_its_length(table):
    for n_tokens in (1, 100):
        opened(table, claim(tokens((n_tokens, n_tokens))))

    assert pages_left(table)["state"] == (2, 0)


def test_a_state_is_refused_when_all_are_held_and_no_page_is_touched(table):
    for first in (1, 100, 200, 300):
        opened(table, claim(tokens((first, 8))))

    assert table.grants.open_lease(claim(tokens((400, 8)))) == Shortage(1, 0, "state")

    check(table)
    assert pages_left(table) == {"kv": (32, 0), "state": (0, 0)}


def test_the_state_of_exactly_the_cached_tokens_becomes_their_snapshot(table):
    lease = opened(table, claim(tokens((1, 16)), reserve=4))
    own = row(table, lease, "state")

    finish(table, lease, tokens((500, 4)))

    assert own[0] == 0
    assert ends(table) == {20: 0}
    assert [one.pages for one in states(table).at.values()] == [own[1].to_bytes(4, "little")]


@pytest.mark.parametrize("n_tokens", [17, 18, 19])
def test_a_state_beyond_the_last_whole_page_is_no_snapshot(table, n_tokens):
    cached(table, tokens((1, n_tokens)))

    assert ends(table) == {}
    assert pages_left(table)["state"] == (4, 0)


def test_a_plain_release_leaves_no_snapshot_because_more_may_have_been_computed(table):
    lease = opened(table, claim(tokens((1, 16)), reserve=8))
    table.commits.commit(lease, NO_TOKENS)

    table.holders.release(lease, "engine", "normal")
    check(table)

    assert ends(table) == {}
    assert table.tree.probe(tokens((1, 16)), "") == 16


def test_a_lease_that_caches_nothing_leaves_no_snapshot(table):
    finish(table, opened(table, claim(tokens((1, 16)), cache=False)))

    assert ends(table) == {}


def test_a_receive_that_caches_nothing_leaves_no_snapshot_at_cached_tokens(table):
    warm_up = arrival(table, tokens((1, 16)), cache=False)
    cached(table, tokens((1, 18)))

    finish(table, opened(table, warm_up))

    assert ends(table) == {}


def test_a_snapshot_is_gone_on_from_and_not_written(table):
    cached(table, tokens((1, 16)))
    (snapshot,) = states(table).at.values()

    lease = opened(table, claim(tokens((1, 16), (500, 8))))

    source, own = row(table, lease, "state")
    assert lease.prefix_tokens == 16
    assert source.to_bytes(4, "little") == snapshot.pages
    assert own not in {0, source}
    assert ends(table) == {16: 1}


def test_the_snapshot_that_was_gone_on_from_stays_beside_the_new_one(table):
    cached(table, tokens((1, 16)))
    finish(table, opened(table, claim(tokens((1, 16), (500, 8)))))

    assert ends(table) == {16: 0, 24: 0}


def test_a_match_ends_at_the_deepest_snapshot(table):
    cached(table, tokens((1, 8)))
    cached(table, tokens((1, 16)))
    cached(table, tokens((1, 27)))

    assert opened(table, claim(tokens((1, 27)))).prefix_tokens == 16


def test_tokens_without_a_snapshot_are_computed_again(table):
    cached(table, tokens((1, 19)))

    lease = opened(table, claim(tokens((1, 24))))

    assert (lease.prefix_tokens, row(table, lease, "state")[0]) == (0, 0)


def test_somebody_who_computes_does_not_go_on_from_the_end_of_its_own_prompt(table):
    cached(table, tokens((1, 8)))
    cached(table, tokens((1, 16)))

    assert opened(table, claim(tokens((1, 16)))).prefix_tokens == 8


def test_the_halves_of_a_split_node_have_the_snapshot_at_its_end(table):
    cached(table, tokens((1, 16)))

    cached(table, tokens((1, 8), (500, 8)))

    assert opened(table, claim(tokens((1, 16), (900, 4)))).prefix_tokens == 16
    assert opened(table, claim(tokens((1, 12), (900, 4)))).prefix_tokens == 0
    assert [node.end_tokens for node in states(table).at] == [16, 16]


def test_a_receive_needs_no_snapshot_and_has_a_state_of_its_own(table):
    cached(table, tokens((1, 18)))

    lease = opened(table, arrival(table, tokens((1, 24))))

    assert lease.prefix_tokens == 16
    assert row(table, lease, "state")[0] == 0


def test_a_receive_may_find_its_whole_prompt_cached(table):
    cached(table, tokens((1, 16)))

    lease = opened(table, arrival(table, tokens((1, 16))))

    assert lease.prefix_tokens == 16
    assert ends(table) == {16: 0}


def test_the_snapshots_used_longest_ago_make_room(table):
    for first in (1, 100, 200):
        cached(table, tokens((first, 8)))
    table.holders.release(opened(table, claim(tokens((1, 8), (900, 1)))), "engine", "normal")

    opened(table, claim(tokens((300, 8))))
    opened(table, claim(tokens((400, 8))))

    assert [node.edge for node in states(table).at] == [tokens((1, 8)), tokens((200, 8))]
    assert table.tree.probe(tokens((100, 8)), "") == 8


def test_a_dropped_snapshot_is_told_under_its_component(table):
    for first in (1, 100, 200, 300):
        cached(table, tokens((first, 8)))
    table.out.drain()

    opened(table, claim(tokens((400, 8))))

    told = [event for event in table.out.drain().events if isinstance(event, events.Evicted)]
    assert [(one.component, one.pages) for one in told] == [("state", 1)]


def test_a_snapshot_that_is_gone_on_from_is_not_dropped(table):
    cached(table, tokens((1, 8)))
    opened(table, claim(tokens((1, 12))))
    for first in (100, 200):
        opened(table, claim(tokens((first, 8))))

    assert table.grants.open_lease(claim(tokens((300, 8)))) == Shortage(1, 0, "state")
    assert ends(table) == {8: 1}


def test_tokens_that_leave_the_tree_take_their_snapshots_with_them(table):
    cached(table, tokens((1, 8)))

    table.evictor.flush()
    check(table)

    assert pages_left(table) == {"kv": (40, 0), "state": (4, 0)}


def test_a_snapshot_that_is_there_already_keeps_its_page(table):
    first, second = (opened(table, claim(tokens((1, 16)))) for _ in range(2))
    finish(table, first)
    page = next(iter(states(table).at.values())).pages

    finish(table, second)

    assert next(iter(states(table).at.values())).pages == page
    assert pages_left(table)["state"] == (3, 1)


def test_a_state_that_a_remote_may_still_write_is_kept_from_everybody(table):
    lease = opened(table, arrival(table, tokens((1, 24))))

    table.ends.quarantine(lease, Quarantine((Writer("p", "i"),), 0.0, "cancelled"))
    check(table)

    assert pages_left(table)["state"] == (3, 0)
    table.ends.end_quarantine(lease, "settled")
    check(table)
    assert pages_left(table)["state"] == (4, 0)


def test_a_slide_and_an_extension_leave_a_state_as_it_is(table):
    lease = opened(table, claim(tokens((1, 16))))
    before = row(table, lease, "state")

    assert table.grants.slide(lease, 16) is None
    assert table.grants.extend(lease, 40) is None

    assert row(table, lease, "state") == before
    check(table)


def test_a_match_ends_where_both_a_window_and_a_snapshot_are():
    table = table_of(PAGE, 40, window=8, swa=40, states=4)
    prompt = tokens((1, 32))
    for n_tokens in (12, 24):
        cached(table, Tokens(prompt[: n_tokens * 4]))

    assert opened(table, claim(prompt)).prefix_tokens == 24


def test_a_snapshot_without_a_window_behind_it_is_not_gone_on_from():
    table = table_of(PAGE, 40, window=8, swa=40, states=4)
    prompt = tokens((1, 32))
    cached(table, Tokens(prompt[: 12 * 4]))
    table.components.each[0].make_room(40)
    lease = opened(table, arrival(table, Tokens(prompt[: 24 * 4])))
    assert lease.prefix_tokens == 12
    finish(table, lease)
    assert ends(table) == {12: 0, 24: 0}

    assert opened(table, claim(prompt)).prefix_tokens == 24
    assert opened(table, claim(Tokens(prompt[: 20 * 4]))).prefix_tokens == 0


def test_a_window_without_a_snapshot_at_its_end_is_not_gone_on_from():
    table = table_of(PAGE, 40, window=8, swa=40, states=4)
    prompt = tokens((1, 32))
    cached(table, Tokens(prompt[: 12 * 4]))
    cached(table, Tokens(prompt[: 27 * 4]))

    assert opened(table, claim(prompt)).prefix_tokens == 12
