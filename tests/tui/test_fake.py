"""The fake link: real nodes in the situations they are named after, the same every time."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
import time

import msgspec
import pytest

from kvd.core.audit.invariants import violations
from kvd.core.inspect.snapshot import snapshot
from kvd.errors import Code, Refusal
from kvd.wire import admin
from kvd.wire.console import EventQuery, Filter, MapQuery, PageMap, Query, Table
from tests.tui.fake import FakeLink
from tests.tui.town import SITUATIONS
from tui.draw.page_map import STATES, styles
from tui.draw.spans import STYLES
from tui.model.mirror import LinkDown, LinkLive, Mirror, Subscription

WANTED = Subscription((Query("clients", limit=20),), EventQuery(0, 50))


def filled(link: FakeLink) -> Mirror:
    mirror = Mirror()
    link.connect(mirror, lambda: WANTED)
    link.frame()
    return mirror


def everything(link: FakeLink) -> bytes:
    """The frames of a few seconds."""
    frames = []
    for call in range(1, 6):
        frames.append(link.look(admin.Look(call, WANTED.queries, WANTED.events)))
        link.pass_time(0.5)
    return msgspec.msgpack.encode(frames)


def digests() -> dict[str, str]:
    """By situation; the largest one is made as the others are, and takes its time."""
    return {
        name: hashlib.sha256(everything(FakeLink(name, 7))).hexdigest()[:16]
        for name in SITUATIONS
        if name != "overloaded"
    }


def test_the_same_seed_and_steps_give_the_same_bytes_in_every_process(pytestconfig):
    there = subprocess.run(
        [sys.executable, "-c", "from tests.tui.test_fake import digests; print(digests())"],
        cwd=pytestconfig.rootpath,
        env={**os.environ, "PYTHONHASHSEED": "4711"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == str(digests())


def test_another_seed_is_another_story():
    assert everything(FakeLink("normal", 7)) != everything(FakeLink("normal", 8))


@pytest.mark.parametrize("situation", sorted(set(SITUATIONS) - {"leak"}))
def test_nodes_are_sound_whatever_their_situation(situation):
    for side in SITUATIONS[situation](1).sides.values():
        assert violations(side.node) == []


def test_a_node_at_work_has_something_on_every_page():
    shot = snapshot(FakeLink("normal").side.node)
    assert [one.name for one in shot.clients] == ["sglang-0", "sglang-1", "router"]
    assert {one.state for one in shot.rooms} == {"receiving", "offered", "ready"}
    assert (shot.totals.handoffs_delivered, shot.totals.handoffs_failed) == (6, 1)
    assert len(shot.leases) == 15
    assert [one.state for one in shot.peers] == ["up", "up"]


def test_a_node_that_has_just_begun_has_peers_and_nothing_else():
    shot = snapshot(FakeLink("empty").side.node)
    assert (shot.clients, shot.leases, shot.rooms, shot.waiting) == ((), (), (), ())
    assert [one.state for one in shot.peers] == ["up", "up"]


def test_an_overloaded_node_has_no_page_left_and_a_long_queue():
    """In processor time: it is made for many tests."""
    before = time.process_time()
    shot = snapshot(FakeLink("overloaded").side.node)
    assert len(shot.leases) > 10_000
    assert len(shot.waiting) == 240
    assert shot.pools[0].free_pages < 3
    assert time.process_time() - before < 5


def test_a_handoff_that_is_stuck_has_had_no_byte_for_long():
    link = FakeLink("stuck")
    [part] = [one for one in snapshot(link.side.node).rooms if one.state == "receiving"]
    assert 0 < part.moved_bytes < part.total_bytes
    assert part.age_s > 9.0
    assert 5.0 < part.deadline_in_s < 15.0
    [answer] = link.look(
        admin.Look(1, (Query("rooms", filters=(Filter("state", "is", "receiving"),)),))
    ).answers
    table = msgspec.msgpack.decode(answer, type=Table)
    moved = [column.name for column in table.columns].index("moved")
    assert table.at_s - table.rows[0].cells[moved] > 8.0


def test_a_dead_engine_still_holds_what_it_held():
    table = filled(FakeLink("dead-client")).snapshot().tables[WANTED.queries[0]]
    state = [one.name for one in table.columns].index("state")
    assert [table.rows[key].cells[state] for key in sorted(table.rows)] == [
        "alive",
        "outlived",
        "alive",
    ]


def test_a_leak_is_found_by_the_audit_and_counted_in_the_head():
    link = FakeLink("leak")
    report = link.answer(admin.Audit(3))
    assert isinstance(report, admin.Report)
    assert any("3 pages" in line for line in report.refused)
    vitals = filled(link).vitals
    assert vitals is not None
    assert (vitals.findings > 0, vitals.worst) == (True, "high")


def test_a_peer_that_is_silent_is_lost():
    shot = snapshot(FakeLink("silent-peer").side.node)
    assert {one.name: one.state for one in shot.peers} == {"prefill0": "up", "prefill1": "lost"}


def test_verbs_are_carried_out():
    link = FakeLink("normal")
    before = link.side.node.leases.pool.free_pages
    report = link.answer(admin.Evict(1, 10))
    assert isinstance(report, admin.Report)
    assert link.side.node.leases.pool.free_pages >= before + 10


def test_why_is_answered_by_the_core():
    cleaned = FakeLink("normal").answer(admin.Why(5, "page", 0))
    assert isinstance(cleaned, admin.Because)
    assert cleaned.sentence == "page 0 is the null page: never handed out, never freed"


def test_events_are_those_of_the_node():
    link = FakeLink("normal")
    page = link.answer(admin.ListEvents(1, 90))
    assert isinstance(page, admin.EventPage)
    assert [one.seq for one in page.events] == list(range(91, link.side.node.out.seq + 1))


def test_nothing_is_recorded():
    reply = FakeLink("empty").answer(admin.Record(4))
    assert isinstance(reply, admin.AdminFailed)
    assert reply.refusal.code is Code.NOT_SUPPORTED


def test_a_link_that_is_down_says_why_and_comes_back():
    link = FakeLink("normal")
    mirror = filled(link)
    link.down = "nobody answers"
    link.pass_time(2.0)
    link.frame()
    since_s = link.clock()
    assert mirror.link_state(since_s, 0.1) == LinkDown("nobody answers", since_s)
    refusal = Refusal(Code.UNREACHABLE, "nobody answers")
    assert link.answer(admin.Flush(1)) == admin.AdminFailed(1, refusal)
    link.down = ""
    link.frame()
    assert mirror.link_state(link.clock(), 0.1) == LinkLive(0.0)


def test_a_daemon_that_restarts_is_another_incarnation_with_nothing():
    link = FakeLink("normal")
    mirror = filled(link)
    before = mirror.vitals
    link.restart()
    link.frame()
    after = mirror.vitals
    assert before is not None
    assert after is not None
    assert (after.incarnation != before.incarnation, after.leases) == (True, 0)
    assert [one.kind for one in mirror.notices] == ["restart"]


def test_a_frame_with_nothing_new_has_no_rows():
    link = FakeLink("normal")
    mirror = filled(link)
    link.pass_time(0.2)
    look = mirror.look(9, WANTED)
    [answer] = link.look(look).answers
    table = msgspec.msgpack.decode(answer, type=Table)
    assert (table.since, table.rows, table.order) == (look.queries[0].have, (), None)


async def test_a_frame_comes_at_first_and_when_something_else_is_wanted():
    link, mirror = FakeLink("normal"), Mirror()
    link.connect(mirror, lambda: WANTED)
    running = asyncio.create_task(link.run())
    counts = []
    for _ in range(3):
        await asyncio.sleep(0)
        counts.append(mirror.frames)
        if len(counts) == 2:
            link.hurry()
            await asyncio.sleep(0)
    running.cancel()
    assert counts == [1, 1, 2]


def test_pages_that_nobody_has_are_on_the_map():
    [answer] = FakeLink("leak").look(admin.Look(1, (MapQuery("", "state"),))).answers
    shown = msgspec.msgpack.decode(answer, type=PageMap)
    assert [(one.name, one.pages) for one in shown.levels][-1] == ("nobody", 3)


def test_a_mixture_has_a_pool_for_each_component_with_pages_of_its_own():
    [answer] = FakeLink("mixture").look(admin.Look(1, (Query("pools"),))).answers
    table = msgspec.msgpack.decode(answer, type=Table)
    assert table.order == ("pool:kv", "pool:swa", "pool:state")


@pytest.mark.parametrize("lens", ["state", "owner", "age", "hits", "locks", "tier"])
def test_every_level_of_a_real_map_has_a_letter_and_a_style_of_its_own(lens):
    link = FakeLink("normal")
    query = MapQuery("", lens, cells=2000)
    [answer] = link.look(admin.Look(1, (query,))).answers
    shown = msgspec.msgpack.decode(answer, type=PageMap)
    assert shown.trouble == ""
    found = styles(shown)
    assert len({one.letter for one in shown.levels}) == len(shown.levels)
    assert "dim" not in {
        style for level, style in zip(shown.levels, found, strict=True) if level.name != "others"
    }
    apart = [style for level, style in zip(shown.levels, found, strict=True) if level.pages]
    assert len(set(apart)) == len(apart)


def test_the_levels_of_states_are_those_that_have_a_style():
    [answer] = FakeLink("normal").look(admin.Look(1, (MapQuery("", "state"),))).answers
    shown = msgspec.msgpack.decode(answer, type=PageMap)
    names = {one.name for one in shown.levels}
    assert set(STATES) <= names <= {*STATES, *STYLES}
