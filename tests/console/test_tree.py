"""The views of the tree: what is opened, what is locked and by whom, orphans, what goes next."""

from __future__ import annotations

import pytest

from kvd.console.server import VIEWS
from kvd.console.survey import Survey, Surveyor
from kvd.console.tree import HOLDERS, beside_of, first_holders, holder_counts, locks_of
from kvd.console.view import TableWindow
from kvd.core.audit.invariants import violations
from kvd.core.inspect.why import holders
from kvd.types import pack_ids
from kvd.wire import client
from kvd.wire.console import Holder, Query
from tests.console.looked import in_one
from tests.console.sentences import sentence_of
from tests.console.stage import Stage
from tests.core.families import SPECS, worked
from tests.core.world import PAGE, World, tokens

LONG, SHORT, OTHER = (100, 4 * PAGE), (100, 2 * PAGE), (9000, PAGE)


@pytest.fixture
def world() -> World:
    """Two pages that two sequences begin with, two more of one of them, and one of its own.

    Of the first one a lease locks all four pages; another namespace has one page.
    """
    world = World()
    for toks, namespace in ((tokens(LONG), ""), (tokens(OTHER), ""), (tokens(OTHER), "tenant")):
        lease = world.p.lease(toks, namespace=namespace)
        world.p.call(client.CommitAndRelease, lease=lease.lease)
    short = world.p.lease(tokens(SHORT, (7, 5)))
    world.p.call(client.ReleaseLease, lease=short.lease)
    world.p.lease(tokens(LONG, (7, 5)))
    return world


class Tree:
    """Rows of the views of one side, by key or in order."""

    def __init__(self, world: World) -> None:
        self.stage = Stage(world.p)
        self.stage.context.surveyor = Surveyor(world.p.node, timer=lambda: 0.0)
        self.tree = world.p.node.leases.tree

    def shown(self, *opened: int, view: str = "tree", **how: object) -> list[dict[str, object]]:
        query = Query(view, opened=opened, limit=500, **how)  # type: ignore[arg-type]
        window = in_one(VIEWS[view].look(self.stage.now(), query))
        assert isinstance(window, TableWindow), window
        names = [column.name for column in VIEWS[view].columns]
        return [{"key": row.key, **dict(zip(names, row.cells, strict=True))} for row in window.rows]

    def column(self, name: str, *opened: int, view: str = "tree") -> list[object]:
        return [row[name] for row in self.shown(*opened, view=view)]

    def root(self, namespace: str = "") -> int:
        return self.tree.roots[namespace].id


def test_roots_are_the_namespaces_the_biggest_first(world):
    tree = Tree(world)
    rows = tree.shown()

    assert [row["name"] for row in rows] == ["(no namespace)", "tenant"]
    assert [row["key"] for row in rows] == [f"node:{tree.root()}", f"node:{tree.root('tenant')}"]
    assert [row["below_pages"] for row in rows] == [5, 1]
    assert [row["children"] for row in rows] == [2, 1]
    assert [row["lock_ref"] for row in rows] == [1, 0]


def test_children_are_shown_behind_an_opened_parent_and_of_no_other(world):
    tree = Tree(world)
    first, _ = (row["key"] for row in tree.shown(tree.root())[1:3])
    opened = int(str(first).removeprefix("node:"))

    assert tree.column("depth", tree.root()) == [0, 1, 1, 0]
    assert tree.column("pages", tree.root()) == [0, 2, 1, 0]
    assert tree.column("depth", tree.root(), opened) == [0, 1, 2, 1, 0]
    assert tree.column("name", tree.root(), opened)[1:4] == [
        "100 101 102 103 104 105 …",
        "132 133 134 135 136 137 …",
        "9000 9001 9002 9003 9004 9005 …",
    ]
    assert tree.column("below_pages", tree.root(), opened) == [5, 4, 2, 1, 1]
    assert tree.column("depth", opened) == [0, 0], "its root is not opened"


@pytest.mark.parametrize("sort", ["pages", "-pages", "name", "-hits", "-last_use", "lock_ref"])
def test_sorted_by_anything_children_stay_behind_their_parent_and_among_themselves(world, sort):
    tree = Tree(world)
    first, _ = (row["key"] for row in tree.shown(tree.root())[1:3])
    opened = int(str(first).removeprefix("node:"))
    rows = tree.shown(tree.root(), opened, sort=sort)
    whole = {row["key"]: row["depth"] for row in tree.shown(tree.root(), opened)}
    assert {row["key"]: row["depth"] for row in rows} == whole

    keys = [row["key"] for row in rows]
    assert rows[keys.index(first) + 1]["depth"] == 2
    name = sort.removeprefix("-")
    siblings = [row[name] for row in rows if row["depth"] == 1]
    assert siblings == sorted(siblings, reverse=sort.startswith("-"))


def test_sizes_of_subtrees_are_empty_until_there_is_a_survey(world):
    tree = Tree(world)
    tree.stage.context.surveyor._credit_s = -1.0
    tree.stage.context.surveyor._now_s = world.now_s

    assert tree.column("below_pages") == [None, None]


def test_a_holder_is_named_without_an_age_and_can_be_opened(world):
    tree = Tree(world)
    held = Holder("engine 1001: lease", world.now_s, "lease:5")

    assert tree.column("holders", tree.root()) == [(held,), (held,), (), ()]


def test_what_was_used_below_was_used_above(world):
    world.now_s += 50.0
    world.p.lease(tokens(LONG, (8, 5)))
    tree = Tree(world)

    assert tree.column("last_use", tree.root())[:3] == [150.0, 150.0, 100.0]


def test_windows_and_snapshots_are_named_where_they_lie():
    node = worked("everything", 3, 300).node
    cells = {beside_of(node.leases, edge) for edge in node.leases.tree.nodes()}
    assert any(cell.startswith("swa gone") for cell in cells)
    assert any("state 1" in cell for cell in cells)


# ---- locked --------------------------------------------------------------------------------------


def test_locked_nodes_are_those_of_the_paths_of_leases(world):
    tree = Tree(world)
    rows = tree.shown(view="locked")

    assert [(row["start"], row["tokens"], row["lock_ref"]) for row in rows] == [
        (0, 2 * PAGE, 1),
        (2 * PAGE, 2 * PAGE, 1),
    ]
    assert {row["namespace"] for row in rows} == {"(no namespace)"}


@pytest.mark.parametrize("family", SPECS)
def test_holders_are_counted_as_the_locks_are(family):
    node = worked(family, 7, 300).node
    leases = node.leases.leases.values()
    counts = holder_counts(leases)
    expected = holders(node.leases)

    assert {one.id: n for one, n in counts.items()} == {k: len(v) for k, v in expected.items()}
    assert all(locks_of(one) == n for one, n in counts.items())
    for one, first in first_holders(leases).items():
        assert first == expected[one.id][:HOLDERS]


def test_of_many_holders_the_first_few_are_named():
    world = World()
    first = world.p.lease(tokens(SHORT))
    world.p.call(client.CommitLease, lease=first.lease)
    for number in range(HOLDERS + 3):
        world.p.lease(tokens(SHORT, (number, 2)))
    [row] = Tree(world).shown(view="locked")

    assert row["lock_ref"] == HOLDERS + 4
    assert [one.ref for one in row["holders"]] == [f"lease:{k + 1}" for k in range(HOLDERS)]


# ---- orphans -------------------------------------------------------------------------------------


def test_a_sound_tree_has_no_orphans(world):
    assert Tree(world).shown(view="orphans") == []


def test_a_lock_without_a_lease_is_an_orphan(world):
    tree = Tree(world)
    node = tree.tree.match(tokens(OTHER), "tenant")
    tree.tree.lock(node)
    [row] = tree.shown(view="orphans")

    assert row["key"] == f"node:{node.id}"
    assert row["why"] == sentence_of("a lock without a lease is an orphan")
    assert row["holders"] == ()


def test_a_node_with_more_locks_than_leases_is_an_orphan(world):
    tree = Tree(world)
    lease = world.p.node.leases.leases[5]
    tree.tree.lock(lease.anchor)
    whys = {row["key"]: row["why"] for row in tree.shown(view="orphans")}

    assert whys == {
        f"node:{tree.root()}": "2 locks, 1 holders",
        f"node:{lease.anchor.parent.id}": "2 locks, 1 holders",
        f"node:{lease.anchor.id}": "2 locks, 1 holders",
    }


def test_what_a_lease_locks_whose_session_is_gone_is_an_orphan(world):
    tree = Tree(world)
    lease = world.p.node.leases.leases[5]
    world.p.node.sessions.by_id.clear()
    rows = tree.shown(view="orphans")

    assert {row["key"] for row in rows} == {
        f"node:{lease.anchor.id}",
        f"node:{lease.anchor.parent.id}",
    }
    assert {row["why"] for row in rows} == {"lease 5 is gone"}


# ---- eviction ------------------------------------------------------------------------------------


def test_the_eviction_order_is_what_eviction_does(world):
    tree = Tree(world)
    rows = tree.shown(view="eviction")
    going = [row for row in rows if row["rank"] is not None]

    assert [row["rank"] for row in going] == [1, 2]
    assert [row["frees"] for row in going] == [1, 2]
    for row in going:
        [victim] = tree.tree.evict(1).victims
        assert row["key"] == f"node:{victim.id}"


def test_what_is_locked_is_passed_and_says_by_whom(world):
    passed = [row for row in Tree(world).shown(view="eviction") if row["rank"] is None]

    assert passed
    for row in passed:
        assert row["skipped"] == sentence_of("what is locked is passed and says by whom")
        assert [one.ref for one in row["holders"]] == ["lease:5"]
        assert row["frees"] is None


def test_views_of_the_tree_change_nothing(world):
    tree = Tree(world)
    before = [(one.id, one.hits, one.lock_ref) for one in tree.tree.nodes()]
    for view in ("tree", "locked", "orphans", "eviction"):
        tree.shown(tree.root(), view=view)

    assert [(one.id, one.hits, one.lock_ref) for one in tree.tree.nodes()] == before
    assert violations(world.p.node) == []


def test_a_node_that_is_new_since_the_survey_is_shown_without_a_size(world):
    tree = Tree(world)
    tree.shown()
    survey = tree.stage.context.surveyor._last
    assert isinstance(survey, Survey)
    lease = world.p.lease(tokens((5, PAGE)), namespace="new")
    world.p.call(client.CommitAndRelease, lease=lease.lease)
    assert tree.tree.probe(pack_ids([5 + k for k in range(PAGE)]), "new") == PAGE

    assert tree.column("name") == ["(no namespace)", "tenant", "new"]
    assert tree.column("below_pages") == [5, 1, None]
