"""Who has a page of another component than the first, and what lies beside a node or a lease."""

from __future__ import annotations

import pytest

from kvd.core import effects, inputs
from kvd.core.cache.lease import Quarantine, Writer
from kvd.types import page_ids
from kvd.wire import admin
from tests.core.breakage_beside import (
    buffers,
    busy_beside,
    leases,
    part_of,
    states,
    unlocked,
    windows,
)
from tests.core.sentences import sentence_of

LEASE_3 = "lease 3 of engine (pid 7) for lease, 1.0 s"
LEASE_4 = "lease 4 of engine (pid 7) for lease, 1.0 s"
NOBODY = "needed by nobody: it can be evicted"


@pytest.fixture
def engine():
    """See ``busy_beside``: lease 3 goes on from node 2, lease 4 slides alone."""
    return busy_beside()


def ask(engine, request):
    step = engine.feed(inputs.FromOperator(engine.now_s, b"op", request))
    (report,) = (one for one in step.effects if isinstance(one, effects.AnswerOperator))
    return report.message


def why(engine, kind, number, component=""):
    """The sentence and the facts, or the refusal."""
    said = ask(engine, admin.Why(1, kind, number, component))
    if isinstance(said, admin.AdminFailed):
        return said.refusal.message
    return [said.sentence, *said.facts]


def first(pages):
    return page_ids(pages)[0]


def test_a_mapped_window_page_names_its_lease_and_its_tokens(engine):
    lease, _ = leases(engine.node)
    page = first(windows(engine.node).own_pages(lease))

    assert why(engine, "page", page, "swa") == [
        f"page {page} of swa is held by {LEASE_3}",
        "it is the window of tokens 112 to 128",
    ]


def test_a_spare_window_page_says_what_it_is_for(engine):
    lease, _ = leases(engine.node)
    page = first(windows(engine.node).held[lease.id].spare)

    assert why(engine, "page", page, "swa") == [
        f"page {page} of swa is held by {LEASE_3}",
        "it is spare: the lease maps it further on when it slides",
    ]


def test_a_cached_window_page_names_its_node_and_who_needs_it(engine):
    keeper = windows(engine.node)
    needed, other = next(one for one in keeper.nodes if one.id == 2), unlocked(keeper)
    mine, theirs = first(keeper.pages_at(needed)), first(keeper.pages_at(other))

    assert why(engine, "page", mine, "swa") == [
        f"page {mine} of swa is cached beside node 2: the window of tokens 64 to 80",
        f"needed by {LEASE_3}",
    ]
    assert why(engine, "page", theirs, "swa")[1:] == [NOBODY]


def test_a_window_page_in_quarantine_says_whose_it_was_and_why(engine):
    lease, _ = leases(engine.node)
    page = first(windows(engine.node).own_pages(lease))
    engine.node.leases.ends.quarantine(
        lease, Quarantine((Writer("p", "i"),), 1.0, "its peer fell silent")
    )

    assert why(engine, "page", page, "swa")[:2] == [
        f"page {page} of swa is in quarantine under {LEASE_3}",
        "because its peer fell silent",
    ]


def test_states_and_snapshots_name_who_writes_them_and_who_goes_on_from_them(engine):
    keeper, (lease, _) = states(engine.node), leases(engine.node)
    own, source = page_ids(keeper.page_table(lease))[::-1]

    assert why(engine, "page", own, "state") == [
        f"page {own} of state is held by {LEASE_3}",
        "it is the state that the lease writes",
    ]
    assert why(engine, "page", source, "state") == [
        f"page {source} of state is cached at node 2: the state behind its last token, 112",
        f"needed by {LEASE_3}",
    ]


def test_a_buffer_page_names_its_lease_its_slot_and_what_is_copied_there(engine):
    _, lease = leases(engine.node)
    taken, free = page_ids(buffers(engine.node).own_pages(lease))[:2]
    buffers(engine.node).resident[lease.id].want([5], whole_pages=7)

    assert why(engine, "page", taken, "buffer") == [
        f"page {taken} of buffer is held by {LEASE_4}",
        "it is slot 0 of its 4, for tokens 80 to 96",
    ]
    assert why(engine, "page", free, "buffer")[1] == sentence_of(
        "a buffer page names its lease its slot and what is copied there"
    )


def test_a_saved_page_names_the_retracted_lease_that_wants_it_back(engine):
    *_, lease = engine.node.leases.leases.values()
    page = first(part_of(lease, "swa").slots)
    free = first(engine.node.leases.saved.pools["swa"].free_ids())

    assert why(engine, "page", page, "swa.saved") == [
        f"page {page} of swa.saved is held by lease 6 of engine (pid 7) for lease, 1.0 s, which "
        "is retracted",
        "it keeps page 0 of its row",
    ]
    assert why(engine, "page", free, "swa.saved") == [f"page {free} of swa.saved is free"]
    assert why(engine, "page", 12, "swa.saved") == sentence_of(
        "a saved page names the retracted lease that wants it back"
    )


def test_a_companion_page_goes_with_a_page_of_the_first_component(engine):
    lease, _ = leases(engine.node)
    page = first(lease.held)

    (said,) = why(engine, "page", 4 * page + 3, "index")

    assert said == (
        f"page {4 * page + 3} of index goes with page {page}: page {page} is held by {LEASE_3}"
    )


@pytest.mark.parametrize("component", ["", "kv"])
def test_the_first_component_is_meant_where_none_is_named(engine, component):
    page = first(engine.node.leases.pool.free_ids())

    assert why(engine, "page", page, component) == [f"page {page} is free"]


@pytest.mark.parametrize(
    ("component", "page", "said"),
    [
        ("swa", 30, "page 30 of swa: this pool has pages 0..29"),
        ("index", 160, "page 40: this pool has pages 0..39"),
        ("wsa", 1, "this pool has no component 'wsa': kv, index, swa, state, buffer"),
    ],
)
def test_a_page_that_is_not_there_is_refused_with_the_bounds(engine, component, page, said):
    assert why(engine, "page", page, component) == said


def test_the_null_page_of_a_component_means_none(engine):
    assert why(engine, "page", 0, "swa") == [
        "page 0 of swa is the null page: never handed out, never freed; in a row it means none"
    ]


def test_a_node_says_what_lies_beside_it_and_whether_it_is_a_tombstone(engine):
    keeper = windows(engine.node)
    keeper.make_room(keeper.pool.free_pages + 1)
    gone = next(one for one in engine.node.leases.tree.nodes() if one not in keeper.nodes)

    assert why(engine, "node", 2)[2:] == [
        "written by engine",
        f"swa: 3 pages, needed by {LEASE_3}",
        f"state: a snapshot, needed by {LEASE_3}",
    ]
    assert "swa: a tombstone, its tokens are cached and their window is gone" in why(
        engine, "node", gone.id
    )


def test_a_lease_says_where_it_is_mapped_and_what_of_the_tree_it_needs(engine):
    assert why(engine, "lease", 3)[-3:] == [
        "swa: mapped at tokens 64 to 144, its own from token 112 on, 1 pages spare",
        "swa: needs what lies at node 2",
        "state: needs what lies at node 2",
    ]


def test_the_tree_shows_pages_and_locks_beside_each_node(engine):
    tree = ask(engine, admin.ShowTree(1))

    assert {node.id: node.beside for node in tree.nodes} == {
        2: (admin.Beside("swa", 3, 1), admin.Beside("state", 1, 1)),
        3: (admin.Beside("swa", 4, 0),),
        4: (admin.Beside("swa", 3, 0), admin.Beside("state", 1, 0)),
    }
