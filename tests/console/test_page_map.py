"""Page maps: windows, lenses, marks, runs, and cells that are sent only when they change."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvd.console.context import Context
from kvd.console.history import Recent
from kvd.console.page_map import _highest
from kvd.console.page_owners import Is
from kvd.console.server import ConsoleServer, Watch
from kvd.types import page_ids
from kvd.wire import client
from kvd.wire.admin import Frame, Look
from kvd.wire.codec import ADMIN_REPLIES
from kvd.wire.console import MapQuery, PageMap
from tests.console.looked import map_of, pages_by_level, surveyed
from tests.console.test_server import NoEngines
from tests.core.families import SPECS, worked
from tests.core.world import PAGE, World, tokens


@pytest.fixture
def world() -> World:
    """Pages 1 to 3 cached, 4 to 6 locked and cached, 7 and 8 held; 9 to 63 free."""
    world = World()
    side = world.p
    pool = side.node.leases.pool
    pool._free = bytearray(np.arange(63, 0, -1, "<i4").tobytes())
    for first in (1, 1000):
        lease = side.lease(tokens((first, 3 * PAGE)))
        side.call(client.CommitAndRelease, lease=lease.lease)
    side.lease(tokens((1000, 3 * PAGE), (7, 2 * PAGE)))
    assert page_ids(side.node.leases.leases[3].page_table) == [6, 5, 4, 8, 7]
    return world


class Service:
    """A server over a world's prefill node; what it spends is what it is told."""

    def __init__(self, world: World, budget: float = 0.5) -> None:
        self.spent_s = 0.0
        self.context = Context(world.p.node, Recent(), NoEngines())
        self.server = ConsoleServer(self.context, lambda _: (0, ()), budget, lambda: self.spent_s)
        self.now_s = 100.0

    def maps(self, *queries: MapQuery) -> list[PageMap]:
        self.now_s += 1.0
        frame = ADMIN_REPLIES.decode(
            self.server.frame(Watch(Look(1, queries), self.now_s), self.now_s)
        )
        assert isinstance(frame, Frame)
        return [msgspec.msgpack.decode(one, type=PageMap) for one in frame.answers]


def test_a_cell_shows_what_its_page_is(world):
    shown = map_of(world.p.node, cells=10)

    assert list(shown.cells) == [
        *(Is.FREE, Is.CACHED, Is.CACHED, Is.CACHED, Is.LOCKED, Is.LOCKED, Is.LOCKED),
        *(Is.HELD, Is.HELD, Is.FREE),
    ]
    assert pages_by_level(shown) == {"free": 55, "cached": 3, "locked": 3, "held": 2}
    assert (shown.component, shown.total_pages, shown.page_bytes) == ("kv", 64, 128)


def test_a_cell_of_many_pages_shows_the_one_most_worth_a_look(world):
    shown = map_of(world.p.node, pages_each=4, cells=3)

    assert list(shown.cells) == [Is.CACHED, Is.LOCKED, Is.HELD]
    assert sum(pages_by_level(shown).values()) == 63


def test_a_window_begins_where_it_is_asked_for_and_ends_with_the_pool(world):
    assert list(map_of(world.p.node, first_page=6, cells=3).cells) == [Is.LOCKED, Is.HELD, Is.HELD]
    assert len(map_of(world.p.node, first_page=60, pages_each=3).cells) == 2
    assert map_of(world.p.node, first_page=64).cells == b""
    assert map_of(world.p.node, first_page=2**62, pages_each=2**31).cells == b""
    assert list(map_of(world.p.node, pages_each=2**31).cells) == [Is.LOCKED]


@pytest.mark.parametrize("each", [1, 2, 3, 15, 16, 17, 40, 99, 100, 101])
def test_the_highest_of_each_cell_is_found_whatever_its_size(each):
    values = np.random.default_rng(each).integers(0, 9, 100).astype(np.uint8)
    expected = [values[first : first + each].max() for first in range(0, 100, each)]
    assert _highest(values, each).tolist() == expected


def test_the_owner_lens_names_the_sessions_with_the_most_pages_and_counts_the_others(world):
    node = world.p.node
    for session in range(2, 15):
        world.p.attach(f"engine-{session}")
        world.p.call(client.OpenLease, tokens((1, 0)), session=session, reserve_tokens=PAGE)
    pages = pages_by_level(map_of(node, lens="owner"))

    named = {f"engine-{session}": 1 for session in range(2, 13)}
    assert pages == {"free": 42, "cache": 6, "engine": 2, **named, "others": 2}


def test_a_session_that_is_gone_is_named_as_such(world):
    world.p.node.sessions.by_id.clear()

    assert pages_by_level(map_of(world.p.node, lens="owner"))["session 1 (gone)"] == 2


def test_the_age_lens_counts_from_the_last_use(world):
    node = world.p.node
    survey = surveyed(node, at_s=world.now_s + 30)

    assert pages_by_level(map_of(node, survey, lens="age")) == {"free": 55, "< 1 min": 8}
    late = surveyed(node, at_s=world.now_s + 3600)
    assert pages_by_level(map_of(node, late, lens="age")) == {"free": 55, "1 h or more": 8}


def test_hits_and_locks_are_of_what_is_cached(world):
    side = world.p
    for _ in range(2):
        side.lease(tokens((1000, 3 * PAGE)))
    node = side.node

    # A lock for its own lease, one for the lease behind it, and two more.
    assert pages_by_level(map_of(node, lens="hits")) == {
        "free": 55,
        "held": 2,
        "1": 3,
        "4 to 7": 3,
    }
    assert pages_by_level(map_of(node, lens="locks")) == {
        "free": 55,
        "held": 2,
        "0": 3,
        "3 to 7": 3,
    }


def test_the_tier_lens_says_which_memory_and_what_is_saved_too(world):
    world.hold_copies = True
    world.p.call(client.RetractLease, lease=3)

    tiers = pages_by_level(map_of(world.p.node, lens="tier"))
    assert tiers == {"free": 55, "device": 6, "saved too": 2}
    node = worked("hisparse", 1, 50).node
    assert set(pages_by_level(map_of(node, lens="tier"))) <= {"free", "host"}
    assert set(pages_by_level(map_of(node, lens="tier", component="buffer"))) <= {"free", "device"}


@pytest.mark.parametrize(
    ("mark", "pages"),
    [
        ("lease:3", [4, 5, 6, 7, 8]),
        ("client:1", [4, 5, 6, 7, 8]),
        ("client:9", []),
        ("lease:99", []),
        ("lease:x", []),
        ("rubbish", []),
    ],
)
def test_a_mark_lights_what_it_has_and_what_it_needs(world, mark, pages):
    assert list(map_of(world.p.node, mark=mark, cells=20).lit) == pages


def test_a_marked_node_lights_its_own_pages(world):
    anchor = world.p.node.leases.leases[3].anchor

    assert list(map_of(world.p.node, mark=f"node:{anchor.id}", cells=20).lit) == [4, 5, 6]
    assert list(map_of(world.p.node, mark=f"node:{anchor.id}", pages_each=5).lit) == [0, 1]


@pytest.mark.parametrize("family", SPECS)
def test_what_a_lease_needs_of_every_component_is_lit(family):
    node = worked(family, 4, 200).node
    survey = surveyed(node)
    for keeper in node.leases.components.each:
        for lease in node.leases.leases.values():
            row = {*page_ids(keeper.page_table(lease)), *page_ids(keeper.own_pages(lease))} - {0}
            lit = map_of(
                node, survey, component=keeper.component.name, mark=f"lease:{lease.id}"
            ).lit
            assert row <= set(lit)


def test_runs_of_free_pages_are_counted(world):
    assert map_of(world.p.node).runs == (55, 55)
    world.p.node.leases.pool._free = bytearray(np.array([10, 11, 20, 63], "<i4").tobytes())
    assert map_of(world.p.node).runs == (1, 2)
    world.p.node.leases.pool._free = bytearray()
    assert map_of(world.p.node).runs == (0, 0)


@pytest.mark.parametrize(
    ("query", "why"),
    [
        (MapQuery("nothing", "state"), "no component 'nothing' with pages of its own: it is kv"),
        (MapQuery("index", "state"), "pages of index go in lockstep, 4 with each of kv"),
        (MapQuery("", "beauty"), "no lens 'beauty': it is state, owner"),
    ],
)
def test_what_there_is_not_is_said(query, why):
    node = worked("hisparse", 1, 10).node
    shown = map_of(node, **msgspec.structs.asdict(query))

    assert why in shown.trouble
    assert shown.cells is None


# ---- over time -----------------------------------------------------------------------------------


def test_cells_are_sent_when_they_change_and_only_then(world):
    service = Service(world)
    query = MapQuery("", "state")
    [first] = service.maps(query)
    [again] = service.maps(msgspec.structs.replace(query, have=first.revision))
    world.p.lease(tokens((9, PAGE)))
    [changed] = service.maps(msgspec.structs.replace(query, have=first.revision))

    assert len(first.cells) == 64
    assert (again.revision, again.cells) == (first.revision, None)
    assert again.at_s > first.at_s
    assert changed.revision > first.revision
    assert changed.cells[9] == Is.HELD


def test_a_revision_that_is_not_known_is_answered_with_all_cells(world):
    service = Service(world)
    [first] = service.maps(MapQuery("", "state"))
    [again] = service.maps(MapQuery("", "state", have=first.revision + 1000))

    assert again.cells == first.cells


def test_consoles_with_different_windows_share_one_survey(world):
    service = Service(world)
    queries = [MapQuery("", "state", first_page=first) for first in range(6)]
    maps = service.maps(*queries)
    survey = service.context.surveyor._last

    assert {one.at_s for one in maps} == {survey.at_s}
    assert [len(one.cells) for one in maps] == [64, 63, 62, 61, 60, 59]


def test_until_the_first_survey_is_over_the_map_says_so(world):
    service = Service(world)
    service.context.surveyor._credit_s = -1.0
    [first] = service.maps(MapQuery("", "state"))

    assert "not over yet" in first.trouble
    assert (first.revision, first.cells) == (0, None)
    service.now_s += 60
    assert service.maps(MapQuery("", "state"))[0].trouble == ""
