"""The frame of the console under a pilot: head, pages, the cursor, the card."""

from __future__ import annotations

import asyncio
import gc
import re
import warnings

import pytest
from textual.widgets import Tabs

from kvd.wire.admin import Why
from tests.tui.feed import console, lines_of, settle
from tests.tui.plain import plain  # noqa: F401 - a fixture for all tests here
from tui.model.commands import PAGES
from tui.model.peers import ALL_PEERS

SIZE = (80, 24)
WIDE = (132, 40)


async def test_it_starts_by_saying_that_nobody_has_answered_yet():
    app, _ = console()
    async with app.run_test(size=SIZE) as pilot:
        await settle(app, pilot)
        assert lines_of(app)[0].strip() == "CONNECTING"


async def test_the_head_says_how_the_daemon_is_in_words():
    app, feed = console()
    async with app.run_test(size=SIZE) as pilot:
        feed.bring()
        await settle(app, pilot)
        head = lines_of(app)[0]
    assert head.startswith(" LOOK  decode-node  serving  problems 2  peers 6/6 ")
    assert re.search(r" LIVE 4/s \d\d:\d\d:\d\d$", head)


async def test_a_lost_daemon_is_said_over_what_was_last_seen():
    app, feed = console(page="engines")
    async with app.run_test(size=WIDE) as pilot:
        feed.bring()
        feed.mirror.failed("no answer within 2 s", 0.0)
        await settle(app, pilot)
        lines = lines_of(app)
        assert lines[0].startswith(" LOST  decode-node")
        assert lines[0].endswith(": no answer within 2 s")
        assert any("clients-2" in line for line in lines)


@pytest.mark.parametrize(("number", "page"), list(enumerate(PAGES, start=1)))
async def test_a_number_key_shows_its_page_and_asks_for_what_is_on_it(number, page):
    app, _feed = console(page="engines" if page == "overview" else "overview")
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press(str(number))
        await settle(app, pilot)
        assert app.page.id == f"page-{page}"
        assert app.query_one(Tabs).active == f"tab-{page}"
        assert app.wanted().queries == tuple(dict.fromkeys((*app.page.queries(), ALL_PEERS)))


async def test_only_the_window_on_the_screen_is_asked_for():
    app, feed = console(rows=10_000, page="engines")
    async with app.run_test(size=SIZE) as pilot:
        feed.bring()
        await settle(app, pilot)
        await pilot.press(*["pagedown"] * 4)
        query = app.page.table().asks()
        assert 0 < query.first <= 4 * 8
        assert query.limit < 20


async def test_the_cursor_stays_on_its_row_while_others_come_and_go():
    app, feed = console(page="engines")
    feed.numbers["clients"] = [0, 1, 2, 3]
    async with app.run_test(size=SIZE) as pilot:
        feed.bring()
        await settle(app, pilot)
        await pilot.press("down", "down")
        assert app.page.chosen() == "client:2"
        feed.numbers["clients"] = [8, 9, 3, 2, 1]
        feed.bring()
        await settle(app, pilot)
        assert app.page.chosen() == "client:2"
        assert any(line.startswith("▸ clients-2") for line in lines_of(app))


async def test_the_cursor_stays_at_the_top_until_it_is_moved():
    app, feed = console(page="engines")
    feed.numbers["clients"] = [5, 6]
    async with app.run_test(size=SIZE) as pilot:
        feed.bring()
        await settle(app, pilot)
        assert app.page.chosen() == "client:5"
        feed.numbers["clients"] = [4, 5, 6]
        feed.bring()
        await settle(app, pilot)
        assert app.page.chosen() == "client:4"


@pytest.mark.parametrize("size", [SIZE, WIDE])
async def test_enter_opens_a_card_with_the_daemons_answer_and_escape_closes_it(size):
    app, feed = console(page="engines")
    async with app.run_test(size=size) as pilot:
        feed.bring()
        await settle(app, pilot)
        await pilot.press("enter")
        await settle(app, pilot)
        assert Why(0, "client", 0) in feed.requests
        assert any("lease 7 holds it" in line for line in lines_of(app))
        assert any("lease:7  peer:prefill-0" in line for line in lines_of(app))

        await pilot.press("escape")
        await settle(app, pilot)
        assert not any("lease 7 holds it" in line for line in lines_of(app))


async def test_hostile_names_reach_the_screen_as_text_only():
    app, feed = console(page="engines")
    async with app.run_test(size=SIZE) as pilot:
        feed.bring()
        await settle(app, pilot)
        assert any(r"evil\x1b[2J[bold]\u202etxt" in line for line in lines_of(app))


async def test_q_quits():
    app, _ = console()
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("q")
        await pilot.pause()
    assert app.return_code == 0


async def test_a_question_that_another_one_overtakes_is_never_begun(monkeypatch):
    monkeypatch.setattr("tui.app.CARD_S", 60.0)  # the clock asks nothing meanwhile
    app, feed = console(page="engines")
    async with app.run_test(size=SIZE) as pilot:
        feed.bring()
        await settle(app, pilot)
        await pilot.press("enter")
        feed.requests.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            app.ask_again()
            app.ask_again()
            await settle(app, pilot)
            gc.collect()
    assert set(feed.requests) == {Why(0, "client", 0)}


async def test_two_ways_to_a_page_that_is_not_there_yet_are_gone_one_after_the_other():
    app, _feed = console()
    async with app.run_test(size=SIZE) as pilot:
        await settle(app, pilot)
        ways = [app.open("peer:peers-1"), app.open("peer:peers-2")]
        async with asyncio.timeout(10.0):
            await asyncio.gather(*ways)
        assert app.page.is_mounted
        assert (app.page.NAME, app.card.ref) == ("peers", "peer:peers-2")


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light"])
async def test_all_text_stands_on_the_background_of_the_theme(theme):
    app, feed = console(page="pools", theme=theme)
    async with app.run_test(size=WIDE) as pilot:
        feed.bring()
        await settle(app, pilot)
        dark = app.current_theme.dark
        grounds = [
            segment.style.bgcolor if segment.style is not None else None
            for strip in app.screen._compositor.render_strips()
            for segment in strip
        ]
        app.action_set_theme("textual-light" if dark else "textual-dark")
        await settle(app, pilot)
        head = next(iter(app.screen._compositor.render_strips()[0]))
    assert None not in grounds
    assert (max(head.style.bgcolor.triplet) < 128) is not dark
