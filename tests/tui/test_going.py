"""Going to something: the cursor, the card and what keys do are about the same thing."""

from __future__ import annotations

from kvd.wire.admin import AskOtherEnd
from tests.tui.golden import text_of
from tests.tui.opened import brought, opened
from tests.tui.staged import MIDDLE, staged
from tui.draw import spans


async def test_the_cursor_gets_to_what_was_gone_to_when_its_row_has_come():
    app, link = opened(page="engines")
    async with app.run_test(size=MIDDLE) as pilot:
        await brought(app, link, pilot)
        await app.open("receive:10")
        await brought(app, link, pilot)
        story_shown = spans.text_of(app.page.panel.lines[0])
        assert app.page.chosen() == app.card.ref == "receive:10"
        assert story_shown.startswith("─ receive:10  room 10 ")


async def test_a_key_that_moves_the_cursor_ends_the_search_for_a_row():
    async with staged("engines") as stage:
        await stage.app.open("receive:9999")
        await stage.frame()
        await stage.press("down")
        chosen = stage.app.page.chosen()
        await stage.frame()
        assert stage.app.page.chosen() == chosen
        assert stage.app.card.ref == "receive:9999"  # what was gone to, and is not there


async def test_abort_is_about_what_is_open_wherever_the_cursor_is():
    async with staged("handoffs") as stage:
        await stage.press("down", "enter")
        assert stage.app.card.ref == "receive:9"
        stage.app.page.table().move(1)
        await stage.frame()
        await stage.press("ctrl+k")
        assert ":abort room 9\n" in text_of(stage.app)


async def test_abort_names_no_room_when_what_is_open_has_none_any_more():
    async with staged("handoffs") as stage:
        await stage.app.open("receive:9999")
        await stage.frame()
        await stage.press("ctrl+k")
        assert ":abort room\n" in text_of(stage.app)


async def test_r_answers_for_what_is_open_when_no_row_is_under_the_cursor():
    async with staged("engines") as stage:
        await stage.app.open("lease:9999")
        await stage.frame()
        await stage.press("r")
        assert "related to lease:9999" in text_of(stage.app)


async def test_i_shows_what_happened_to_a_handoff_from_both_ends():
    async with staged("handoffs", "stuck") as stage:
        room = stage.app.page.table().named_row().number("room")
        await stage.press("i")
        await stage.frame()
        assert (stage.app.page.NAME, stage.app.card.ref) == ("events", f"room:{room:.0f}")
        assert stage.app.page.about == f"room:{room:.0f}"
        assert "about room:" in stage.text
        assert AskOtherEnd(0, int(room)) in stage.asked
        await stage.press("escape")
        assert stage.app.page.NAME == "handoffs"


async def test_i_says_so_when_no_event_names_it():
    async with staged("pools") as stage:
        await stage.press("i")
        assert stage.app.page.NAME in {"pools", "events"}


async def test_the_menu_of_what_is_related_leads_to_its_events():
    async with staged("engines") as stage:
        ref = stage.app.page.chosen()
        await stage.press("enter", "r")
        assert f"events:{ref}" in text_of(stage.app)
