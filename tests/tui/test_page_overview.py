"""The page of the overview: its figures, where they come from, and where it leads."""

from __future__ import annotations

import re

import msgspec
import pytest

from kvd.console.server import VIEWS
from kvd.wire.admin import AbortRoom, Audit, Because
from kvd.wire.console import Sources, TableRow
from tests.tui.feed import vitals
from tests.tui.golden import same_picture, same_text
from tests.tui.staged import LARGE, MIDDLE, SMALL, staged
from tests.tui.town import land
from tui.draw.spans import text_of
from tui.model.rates import NodeRates, RowRates
from tui.model.snapshots import DaemonSnapshot
from tui.model.tables import TableData
from tui.screens.overview import MINUTE_S, TIERS, source_lines
from tui.widgets.pools import PoolTable


async def test_bytes_have_a_chart_with_its_largest_figure():
    async with staged("overview") as stage:
        for _ in range(5):
            land(stage.link.town, "prefill0", 1)
            await stage.pass_time(1.0)
        head = stage.lines("#charts")[0]
        assert "bytes in 0B/s" not in head
        assert "Mi/s" in head.split("max")[1]
        assert "bytes out" not in " ".join(stage.lines("#charts"))  # nothing went out
        assert any("⣿" in line for line in stage.lines("#charts")[1:])


async def test_a_small_terminal_has_figures_and_no_charts():
    async with staged("overview", size=SMALL) as stage:
        text = " ".join(stage.lines("#figures"))
        for one in ("in 0B/s", "out 0B/s", "handoffs 0.0/s", "in flight 4", "waiting 0",
                    "failed 1 in 1m", "leases 15", "evicted 0.0/s",
                    "consoles 0.0% of a core"):  # fmt: skip
            assert one in text
        assert "⠀" not in stage.text


@pytest.mark.parametrize("size", [SMALL, MIDDLE, LARGE])
async def test_every_panel_has_the_lines_that_it_needs(size):
    async with staged("overview", "leak", size) as stage:
        for panel in ("#figures", PoolTable, "#sources"):
            widget = stage.app.page.query_one(panel)
            assert not widget.display or widget.size.height >= len(stage.lines(panel))
        assert stage.app.page.problems.page_rows >= 2


def make_trouble(link) -> None:
    """Seven problems, and nine failures in the last minute."""
    for at in range(9):
        room = link.town.receive(link.town.sides["prefill0"], link.town.prompt(4), 1)
        link.answer(AbortRoom(0, room, f"reason {at}"))
    link.town.cut |= {"prefill0", "prefill1"}
    link.side.node.leases.pool.take_pages(3)
    link.side.ask(Audit(1))
    for pid in (4120, 4188):
        link.town.die(pid)
    link.pass_time(5.5)


@pytest.mark.parametrize("size", [(40, 12), SMALL, MIDDLE, LARGE])
async def test_problems_and_failures_come_before_everything_else_at_every_size(size):
    async with staged("overview", "normal", size, make_trouble) as stage:
        lines = stage.text.splitlines()
        said = [at for at, line in enumerate(lines) if re.match("[▸ ] . (HIGH|MEDIUM|LOW) ", line)]
        failure = re.compile(r"[· ] \d\d:\d\d:\d\d (?![!i] ).*room")
        failed = [at for at, line in enumerate(lines) if failure.match(line)]
        others = [at for at, line in enumerate(lines) if "kv: " in line or "component" in line]
        total = stage.app.page.problems.data.total
        assert total >= 7
        assert len(said) >= (2 if size == (40, 12) else min(total, 7))
        assert len(failed) >= (1 if size == (40, 12) else 3)
        assert said[-1] < failed[0] < (others or [99])[0]
        assert failed[-1] < (others or [99])[0]


async def test_a_problem_that_fits_is_never_cut_and_says_what_to_do_with_which_key():
    async with staged("overview", "normal", MIDDLE, make_trouble) as stage:
        text = " ".join(stage.text.split())
        for row in stage.app.page.problems.data.listed():
            evidence = row.cells[stage.app.page.problems.data.index("evidence")]
            assert all(word in text for word in evidence.split())
        assert "press x: open lease:" in text
        assert "press x to copy: kill 4121" in text
        assert "…" not in "".join(stage.lines(type(stage.app.page.problems)))


async def test_on_the_smallest_terminal_a_problem_says_what_since_when_and_what_to_press():
    async with staged("overview", "normal", (40, 12), make_trouble) as stage:
        told = list[str]()
        for _ in range(stage.app.page.problems.data.total):
            told.append(" ".join(stage.text.split()))
            await stage.press("down")
    assert all(re.search(r" for \d", text) for text in told)
    found = [re.sub(r" for [\d.]+s", "", text) for text in told]  # it ends the first line
    wanted = (
        "3 pages, the first is 618, are nowhere press x: audit",
        "prefill1 is lost; 1 handoff with it under way",
        "is kept by pid 4121; pid 4120, which opened it, ended",
        "press x to copy: kill 4121",
    )
    assert [words for words in wanted if not any(words in text for text in found)] == []


async def test_compare_says_what_is_another_than_a_minute_ago_then_than_now_then_nothing():
    async with staged("overview") as stage:
        await stage.pass_time(1.0)
        await stage.press("2", "c")
        assert stage.app.page.NAME == "overview"
        assert "since " in stage.lines("#figures")[0]
        stage.link.town.keep(stage.link.side, stage.link.town.prompt(30), 1)
        await stage.pass_time(1.0)
        assert "kv cached 288 (+30)" in " ".join(stage.lines("#figures"))
        await stage.press("c")
        assert "kv cached 288 (+30)" in " ".join(stage.lines("#figures"))  # than ten minutes ago
        await stage.press("c")
        assert "nothing has changed" in " ".join(stage.lines("#figures"))
        await stage.press("c")
        assert "since " not in stage.lines("#figures")[0]


async def test_a_pool_has_its_letters_its_share_and_its_evictions():
    async with staged("overview") as stage:
        [line] = [line for line in stage.lines(PoolTable) if line.startswith("  kv ")]
        bar, given, share, state, evicted, *_ = line.split()[1:]
        assert (bar[0], "L" in bar, "c" in bar, "." in bar) == ("H", True, True, True)
        assert (given, share, state, evicted) == ("711", "70%", "ok", "0.0")


async def test_evictions_have_their_rate():
    async with staged("overview") as stage:
        await stage.pass_time(1.0)
        for _ in range(30):
            stage.link.town.keep(stage.link.side, stage.link.town.prompt(30), 1)
        await stage.pass_time(1.0)
        [line] = [line for line in stage.lines(PoolTable) if line.startswith("  kv ")]
        assert float(line.split()[5]) > 0


def picture(at_s, sources, tables=None):
    return DaemonSnapshot(0.0, vitals(at_s, sources=sources), tables or {}, {}, {})


def sources(shown, rates, end_s=None, width=90, room=6):
    """What is said of where tokens came from."""
    read = RowRates("read_tokens", MINUTE_S)
    return [text_of(line).rstrip() for line in source_lines(shown, rates, end_s, read, width, room)]


def test_sources_are_of_the_last_minute_else_of_all_that_was():
    rates, before = NodeRates(), Sources(1000, 0, 0, 0, 0, 0, 0)
    rates.take(vitals(100.0, sources=before))
    rates.take(vitals(110.0, sources=before))
    [head, *_] = sources(picture(110.0, before), rates)
    assert head.startswith("─ where tokens came from since it began, none in the last 10s ─")
    after = msgspec.structs.replace(before, cached=1300, received=100, new=70, evicted=30)
    rates.take(vitals(120.0, sources=after))
    text = sources(picture(120.0, after), rates)
    assert text[0].startswith("─ where tokens came from last 20s ─")
    assert text[2] == "  c cached 300 60%  p from a peer 100 20%  s saved 0 0%  x computed 100 20%"
    assert text[4].startswith("  n never seen 70 70%  e evicted 30 30%  l lost on its way 0 0%")
    assert sources(picture(120.0, after), rates, room=4) == text[:3]
    assert "since it began" in sources(picture(110.0, before), rates, 110.0)[0]


def test_each_tier_says_what_came_from_it_and_who_waits():
    columns = VIEWS["tiers"].columns
    told = {"tier": "disk", "state": "serving", "read_tokens": 4000, "hits": 2, "waits": 3}
    told |= {"waiting": 1, "waiting_since": 108.0, "objects": 7, "capacity_objects": 20}
    row = TableRow("tier:disk", tuple(told.get(column.name) for column in columns))
    data = TableData(TIERS, columns, (row.key,), {row.key: row}, 1, 1, 110.0, 1)
    assert sources(picture(110.0, Sources(1), {TIERS: data}), NodeRates(), None, 120, 9)[-1] == (
        "  tier disk serving, 1 wait, for 2.0s  4000 tokens read, 0 in 1m  "
        "2 of 3 waits got pages  7 of 20 pages there"
    )


async def test_the_gravest_finding_is_on_top_and_enter_opens_what_it_is_about():
    async with staged("overview", "leak") as stage:
        assert stage.app.page.chosen() == "pool:kv"
        await stage.press("down")
        subject = stage.app.page.chosen()
        assert subject.startswith("receive:")
        await stage.press("enter")
        assert (stage.app.page.NAME, stage.app.card.ref) == ("handoffs", subject)
        assert isinstance(stage.app.card.content.answer, Because)
        await stage.press("escape")
        assert stage.app.page.NAME == "overview"


async def test_a_click_on_a_pool_opens_it():
    async with staged("overview") as stage:
        await stage.pilot.click("#pools", offset=(4, 1))
        await stage.frame()
        assert (stage.app.page.NAME, stage.app.card.ref) == ("pools", "pool:kv")


async def test_a_tall_terminal_has_who_holds_pages_and_what_happened_and_a_click_opens_that():
    async with staged("overview", size=LARGE) as stage:
        held = [row.cells[stage.app.page.holders.data.index("held")]
                for row in stage.app.page.holders.data.listed()]  # fmt: skip
        assert held == sorted(held, reverse=True)
        happened = stage.app.query_one("#happened")
        lines = [text_of(line) for line in happened.lines]
        assert re.match(r"  12:00:06 ! handoff-ended +room 7 decode prefill1: aborted", lines[1])
        assert not any("lease-opened" in line or "delivered" in line for line in lines)
        await stage.pilot.click("#happened", offset=(4, 1))
        await stage.frame()
        assert stage.app.page.NAME == "events"
        assert stage.app.page.row(stage.app.card.ref)[0].cells[1] == "handoff-ended"
        assert not happened.display
        await stage.pilot.resize_terminal(*SMALL)
        await stage.press("1")
        assert not happened.display


async def test_frozen_it_stands_still_while_the_node_goes_on():
    async with staged("overview") as stage:
        await stage.press("space")
        before = stage.text.splitlines()[2:-1]
        land(stage.link.town, "prefill0", 2)
        stage.link.town.keep(stage.link.side, stage.link.town.prompt(30), 1)
        await stage.pass_time(2.0)
        assert stage.text.splitlines()[2:-1] == before


@pytest.mark.parametrize("size", [SMALL, MIDDLE, LARGE])
async def test_the_page_looks_as_it_is_kept(size):
    async with staged("overview", size=size) as stage:
        for _ in range(4):
            land(stage.link.town, "prefill0", 1)
            await stage.pass_time(1.0)
        name = f"overview-{size[0]}x{size[1]}"
        (same_picture if size == MIDDLE else same_text)(stage.app, name)


@pytest.mark.parametrize("situation", ["empty", "overloaded", "leak", "mixture"])
async def test_situations_look_as_they_are_kept(situation):
    async with staged("overview", situation, SMALL) as stage:
        same_text(stage.app, f"overview-{situation}")


async def test_down_and_frozen_look_as_they_are_kept():
    async with staged("overview", size=SMALL) as stage:
        await stage.press("space")
        await stage.pass_time(2.0)
        same_text(stage.app, "overview-frozen")
        await stage.press("space")
        stage.link.down = "connection refused"
        await stage.pass_time(3.0)
        same_text(stage.app, "overview-down")
