"""The page of the overview: its figures, where they come from, and where it leads."""

from __future__ import annotations

import msgspec
import pytest

from kvd.wire import client
from kvd.wire.admin import Because
from kvd.wire.console import Sources
from tests.tui.feed import vitals
from tests.tui.golden import same_picture, same_text
from tests.tui.staged import LARGE, MIDDLE, SMALL, Stage, staged
from tests.tui.town import land
from tui.model.rates import NodeRates
from tui.screens.overview import Figures, LastEvents, SourceBar
from tui.widgets.pools import PoolTable

HOSTILE = "[red]x\x1b[31m\u202e"
ESCAPED = r"[red]x\x1b[31m\u202e"


def of(stage: Stage, panel: type) -> list[str]:
    lines = stage.app.page.query_one(panel).lines
    return ["".join(span.text for span in line).rstrip() for line in lines]


def height(stage: Stage, panel: type) -> int:
    return stage.app.page.query_one(panel).size.height


async def test_bytes_have_a_chart_with_its_largest_figure():
    async with staged("overview") as stage:
        for _ in range(5):
            land(stage.link.town, "prefill0", 1)
            await stage.pass_time(1.0)
        head = of(stage, Figures)[0]
        assert "bytes in 0B/s" not in head
        assert "Mi/s" in head.split("bytes out")[0].split("max")[1]
        assert "bytes out 0B/s" in head
        assert any("⣿" in line for line in of(stage, Figures)[1:])


async def test_a_small_terminal_has_figures_and_no_charts():
    async with staged("overview", size=SMALL) as stage:
        text = " ".join(of(stage, Figures))
        for one in ("in 0B/s", "out 0B/s", "handoffs 0.0/s", "in flight 4", "waiting 0",
                    "failed 1 in 1m", "engines 3", "leases 15", "peers 2/2", "evicted 0.0/s",
                    "consoles 0.0% of a core"):  # fmt: skip
            assert one in text
        assert "⠀" not in stage.text


@pytest.mark.parametrize("size", [SMALL, MIDDLE, LARGE])
async def test_every_panel_has_the_lines_that_it_needs(size):
    async with staged("overview", "leak", size) as stage:
        whole = (Figures, PoolTable, SourceBar)
        for panel in whole[: 2 if size == SMALL else 3]:
            assert height(stage, panel) >= len(of(stage, panel))
        assert height(stage, LastEvents) >= 3
        assert stage.app.page.findings.page_rows >= 2


async def test_a_pool_has_its_letters_its_share_and_its_evictions():
    async with staged("overview") as stage:
        [line] = [line for line in of(stage, PoolTable) if line.startswith("  kv ")]
        bar, used, evicted, *_ = line.split()[1:]
        assert (bar[0], "L" in bar, "c" in bar, "." in bar) == ("H", True, True, True)
        assert (used, evicted) == ("39%", "0.0")


async def test_evictions_have_their_rate():
    async with staged("overview") as stage:
        await stage.pass_time(1.0)
        for _ in range(30):
            stage.link.town.keep(stage.link.side, stage.link.town.prompt(30), 1)
        await stage.pass_time(1.0)
        [line] = [line for line in of(stage, PoolTable) if line.startswith("  kv ")]
        assert float(line.split()[3]) > 0


def test_sources_are_of_the_last_minute_else_of_all_that_was():
    rates, panel = NodeRates(), SourceBar()
    before = Sources(1000, 0, 0, 0, 0, 0, 0)
    rates.take(vitals(100.0, sources=before))
    rates.take(vitals(110.0, sources=before))
    panel.make(vitals(110.0, sources=before), rates, None, 90)
    text = ["".join(span.text for span in line) for line in panel._made]
    assert text[0].startswith("─ where tokens came from since it began, none in the last 10s ─")
    after = msgspec.structs.replace(before, cached=1300, received=100, new=70, evicted=30)
    rates.take(vitals(120.0, sources=after))
    count = panel.make(vitals(120.0, sources=after), rates, None, 90)
    text = ["".join(span.text for span in line).rstrip() for line in panel._made]
    assert len(text) == count
    assert text[0].startswith("─ where tokens came from last 20s ─")
    assert text[2] == "  c cached 300 60%  p from a peer 100 20%  s saved 0 0%  x computed 100 20%"
    assert text[4].startswith("  n never seen 70 70%  e evicted 30 30%  l lost on its way 0 0%")
    panel.make(vitals(110.0, sources=before), rates, 110.0, 90)
    assert "since it began" in "".join(span.text for span in panel._made[0])


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


async def test_x_puts_what_is_proposed_into_the_bar():
    async with staged("overview", "leak") as stage:
        await stage.press("x")
        assert ":audit" in stage.text


async def test_z_leaves_out_what_is_not_grave():
    async with staged("overview") as stage:
        await stage.pass_time(2.5)
        assert stage.app.page.findings.data.total > 0
        await stage.press("z")
        assert stage.app.page.findings.asks().filters[0].value == "low"


async def test_the_newest_event_is_first_and_what_every_request_does_is_not_there():
    async with staged("overview") as stage:
        lines = of(stage, LastEvents)[1:]
        assert lines[0].split()[1:3] == ["!", "handoff-ended"]
        assert not any(" moved " in line or "lease-" in line for line in lines)


async def test_a_click_on_a_pool_or_an_event_opens_it():
    async with staged("overview") as stage:
        await stage.pilot.click("#last-events", offset=(20, 1))
        await stage.frame()
        assert stage.app.page.NAME == "events"
        assert stage.app.card.ref == stage.app.page.chosen() != ""
        await stage.press("1")
        await stage.pilot.click("#pools", offset=(4, 1))
        await stage.frame()
        assert (stage.app.page.NAME, stage.app.card.ref) == ("pools", "pool:kv")


async def test_frozen_it_stands_still_while_the_node_goes_on():
    async with staged("overview") as stage:
        await stage.press("space")
        before = stage.text.splitlines()[2:-1]
        land(stage.link.town, "prefill0", 2)
        stage.link.town.keep(stage.link.side, stage.link.town.prompt(30), 1)
        await stage.pass_time(2.0)
        assert stage.text.splitlines()[2:-1] == before


async def test_hostile_names_are_written_out():
    def join(link) -> None:
        session = link.side.join(HOSTILE, 4999)
        link.side.call(client.OpenLease, session=session, deadline_s=1.0)
        link.town.dead.add(4999)
        link.pass_time(3.0)

    async with staged("overview", size=LARGE, prepare=join) as stage:
        assert any(ESCAPED in line for line in of(stage, LastEvents))
        assert "\x1b" not in stage.text
        assert "\u202e" not in stage.text


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


async def test_the_evidence_of_a_finding_has_the_room_of_what_x_proposes():
    async with staged("overview", "stuck", SMALL) as stage:
        [line] = [line for line in stage.text.splitlines() if "stuck-handoff" in line][:1]
        evidence = stage.app.page.findings.named_row().text("evidence")
        assert evidence[:30] in line
