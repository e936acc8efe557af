"""The page of the pools under a pilot: components, and the map of the pages of one of them."""

from __future__ import annotations

import pytest

from kvd.wire.admin import Because, Why
from tests.tui.feed import line_with, lines_of, settle
from tests.tui.memory import HOSTILE, SHOWN, memory
from tui.draw.page_map import Grid
from tui.widgets.page_map import LENSES

NARROW, WIDE, HUGE = (80, 24), (132, 40), (200, 60)
CAPTION = "━ kv  lens "


async def bring(app, feed, pilot, *names):
    """Press keys, and have what they led to answered: the first answer may change what fits."""
    if not feed.mirror.frames:
        await bring_frames(app, feed, pilot)
    for name in names:
        await pilot.press(name)
    await bring_frames(app, feed, pilot)


async def bring_frames(app, feed, pilot):
    """The second one is of what fits now that the first is known."""
    await pilot.pause()
    for _ in range(3):
        feed.bring()
        app.tick()
    await settle(app, pilot)


async def again(app, feed, action, times):
    """The same key many times."""
    for _ in range(times):
        await app.run_action(action, app.page)
        feed.bring()
        app.tick()


def map_of(app):
    return app.page.map


async def test_each_component_has_a_line_with_its_bar_and_figures():
    app, feed = memory("pools")
    async with app.run_test(size=NARROW) as pilot:
        await bring(app, feed, pilot)
        heads = line_with(app, "component").split()
        assert heads == ["component", "pages", "can", "give", "state", "evict/s", "free", "held",
                         "locked", "cached"]  # fmt: skip
        first = line_with(app, "▶ kv").split()
        assert first[0:2] == ["▶", "kv"]
        assert first[2].startswith("HL██c█Q")
        assert first[-6:] == ["ok", "0.0", "500000", "10", "125000", "250000"]
        assert line_with(app, "  swa").split()[1].startswith("HL██c█Q")


async def test_what_lies_inside_a_page_is_told_where_it_does_not_go_without_saying():
    app, feed = memory("pools")
    async with app.run_test(size=WIDE) as pilot:
        await bring(app, feed, pilot)
        assert not [line for line in lines_of(app) if "nhd" in line]
        await bring(app, feed, pilot, "m", "m")  # past what is saved of kv
        assert "host, hnd, engine 1" in line_with(app, "engine 1")


async def test_evictions_are_told_by_the_second():
    app, feed = memory("pools")
    async with app.run_test(size=NARROW) as pilot:
        for evicted in (0, 5, 10):
            feed.evicted = evicted
            feed.bring()
            await settle(app, pilot)
        assert "50.0" in line_with(app, "▶ kv").split()


@pytest.mark.parametrize("size", [NARROW, WIDE, HUGE])
async def test_only_as_many_cells_are_asked_for_as_the_map_shows(size):
    app, feed = memory("pools")
    async with app.run_test(size=size) as pilot:
        await bring(app, feed, pilot)
        [asked] = map_of(app).asks()
        grid = map_of(app).grid
        assert asked.cells <= grid.cells == grid.width * grid.height * 2
        assert asked.cells * asked.pages_each >= 1_000_000 > (asked.cells - 1) * asked.pages_each
        assert max(one.cells for one in feed.maps) <= size[0] * size[1] * 2


async def test_a_small_component_has_no_more_lines_than_it_fills():
    app, feed = memory("pools")
    async with app.run_test(size=WIDE) as pilot:
        await bring(app, feed, pilot, "m")
        assert map_of(app).component == "kv.saved"
        await bring(app, feed, pilot, "m")
        assert map_of(app).component == "swa"
        assert map_of(app).grid == Grid(132, 4)
        assert map_of(app).asks()[0].cells == 1000
        assert line_with(app, "▶ swa")
        assert line_with(app, "━ swa  lens owner  1 cell = 1 page  1 000 pages x 64.0Ki")
        await bring(app, feed, pilot, "m")
        assert map_of(app).component == ""


async def test_a_key_goes_through_the_lenses_with_their_legends():
    app, feed = memory("pools")
    async with app.run_test(size=NARROW) as pilot:
        await bring(app, feed, pilot)
        assert line_with(app, "c cache ").endswith(" 300 000")
        seen = [LENSES[0]]
        for _ in LENSES:
            await bring(app, feed, pilot, "l")
            seen.append(map_of(app).asks()[0].lens)
            if seen[-1] == "state":
                assert line_with(app, "Q quarantined ").endswith(" 10")
        assert seen == [*LENSES, LENSES[0]]


async def test_until_a_lens_is_answered_the_last_map_stays_and_the_caption_says_so():
    app, feed = memory("pools")
    async with app.run_test(size=WIDE) as pilot:
        await bring(app, feed, pilot)
        await pilot.press("l", "l")
        await settle(app, pilot)
        assert "lens age" in line_with(app, CAPTION)
        assert "asked for age" in line_with(app, CAPTION)
        assert line_with(app, "c cache ").endswith(" 300 000")
        await bring(app, feed, pilot)
        assert "asked for" not in line_with(app, CAPTION)


async def test_zoom_goes_from_all_pages_to_one_page_a_cell_and_back():
    app, feed = memory("pools")
    async with app.run_test(size=NARROW) as pilot:
        await bring(app, feed, pilot, *["down"] * 4, *["right"] * 9)
        page = map_of(app).page
        await bring(app, feed, pilot, "+")
        asked = map_of(app).asks()[0]
        assert asked.pages_each == 1
        assert asked.first_page < page < asked.first_page + asked.cells
        assert map_of(app).page == page
        await bring(app, feed, pilot, "-")
        assert map_of(app).window is None
        assert map_of(app).asks()[0].first_page == 0


async def test_arrows_move_over_cells_and_stop_at_the_edges():
    app, feed = memory("pools")
    async with app.run_test(size=NARROW) as pilot:
        await bring(app, feed, pilot)
        each = map_of(app).asks()[0].pages_each
        await bring(app, feed, pilot, "left", "up")
        assert app.page.chosen() == "page:0"
        await bring(app, feed, pilot, "right", "right", "down")
        assert app.page.chosen() == f"page:{82 * each}"
        assert line_with(app, f"pages {82 * each} to {83 * each - 1}")
        await bring(app, feed, pilot, "end")
        assert app.page.chosen() == "page:999999"
        await bring(app, feed, pilot, "down")
        assert app.page.chosen() == "page:999999"
        await bring(app, feed, pilot, "home")
        assert app.page.chosen() == "page:0"
        await bring(app, feed, pilot, "pagedown")
        assert app.page.chosen() == f"page:{8 * 80 * each}"
        await bring(app, feed, pilot, "pageup")
        assert app.page.chosen() == "page:0"


async def test_the_window_goes_with_the_cursor_when_it_is_zoomed():
    app, feed = memory("pools")
    async with app.run_test(size=NARROW) as pilot:
        await bring(app, feed, pilot)
        await bring(app, feed, pilot, "+")
        assert map_of(app).asks()[0].first_page == 0
        rows = map_of(app).grid.height * 2
        await again(app, feed, "move(1)", rows)
        assert map_of(app).page == rows * 80
        assert 80 <= map_of(app).asks()[0].first_page <= rows * 80
        await again(app, feed, "move(-1)", rows)
        assert map_of(app).asks()[0].first_page == 0


async def test_what_was_opened_is_lit_and_n_goes_from_one_lit_cell_to_the_next():
    app, feed = memory("pools")
    async with app.run_test(size=NARROW) as pilot:
        await bring(app, feed, pilot)
        each = map_of(app).asks()[0].pages_each
        app.page.seek("lease:7")
        await bring(app, feed, pilot)
        assert map_of(app).asks()[0].mark == "lease:7"
        assert "lease:7: 1 cell lit" in line_with(app, CAPTION)
        assert map_of(app).page == 123_400 // each * each
        assert line_with(app, "■ lit")
        await bring(app, feed, pilot, "+")
        await bring(app, feed, pilot, "n")
        assert map_of(app).page == 123_400
        await bring(app, feed, pilot, "n")
        assert map_of(app).page == 123_401


async def test_enter_opens_the_page_under_the_cursor_with_its_component_if_not_the_first():
    app, feed = memory("pools")
    async with app.run_test(size=WIDE) as pilot:
        await bring(app, feed, pilot, "enter")
        assert Why(0, "page", 0) in feed.requests
        assert any("lease 7 holds it" in line for line in lines_of(app))
        await bring(app, feed, pilot, "right")
        assert app.card.ref == f"page:{map_of(app).page}" != "page:0"
        await bring(app, feed, pilot, "escape", "m", "m")
        await bring(app, feed, pilot, "right", "enter")
        assert Why(0, "page", 1, component="swa") in feed.requests


async def test_the_holders_of_a_page_are_lit_one_after_the_other():
    app, feed = memory("pools")
    feed.replies[Why] = Because(0, "held", (), ("lease:7", "peer:one", "node:3"))
    async with app.run_test(size=WIDE) as pilot:
        await bring(app, feed, pilot, "enter")
        marks = []
        for _ in range(3):
            await bring(app, feed, pilot, "o")
            marks.append(map_of(app).mark)
        assert marks == ["lease:7", "node:3", ""]


async def test_a_click_on_a_cell_chooses_its_page_and_a_second_one_opens_it():
    app, feed = memory("pools")
    async with app.run_test(size=WIDE) as pilot:
        await bring(app, feed, pilot)
        each = map_of(app).asks()[0].pages_each
        await pilot.click("#map", offset=(5, 2))
        await settle(app, pilot)
        assert app.page.chosen() == f"page:{(2 * 132 + 5) * each}"
        assert app.card.ref == ""
        await pilot.click("#map", offset=(5, 2), times=2)
        await settle(app, pilot)
        assert app.card.ref == f"page:{(2 * 132 + 5) * each}"


async def test_a_click_on_a_component_shows_its_map():
    app, feed = memory("pools")
    async with app.run_test(size=WIDE) as pilot:
        await bring(app, feed, pilot)
        await pilot.click("#pools", offset=(5, 2))
        await bring(app, feed, pilot)
        assert map_of(app).component == "swa"


async def test_the_map_says_how_old_it_is_how_free_pages_lie_and_whose_the_others_are():
    app, feed = memory("pools")
    async with app.run_test(size=NARROW) as pilot:
        await bring(app, feed, pilot)
        assert line_with(app, CAPTION).endswith("seen 0.4s ago in 12ms ━")
        assert line_with(app, "free runs: median 212, largest 18 032 pages")
        assert line_with(app, "c cache    ").endswith("30%     300 000")
        assert line_with(app, "? nobody    ").endswith("<1%          10")


async def test_a_map_that_there_is_not_says_why():
    app, feed = memory("pools")
    feed.trouble = "the first look at all pages is not over yet\x1b[31m"
    async with app.run_test(size=NARROW) as pilot:
        await bring(app, feed, pilot, "right", "+", "n", "enter")
        assert line_with(app, r"  the first look at all pages is not over yet\x1b[31m")


async def test_hostile_names_reach_the_screen_as_text_only():
    app, feed = memory("pools")
    feed.first_name = HOSTILE
    async with app.run_test(size=WIDE) as pilot:
        await bring(app, feed, pilot)
        text = "\n".join(lines_of(app))
        assert f"━ {SHOWN}  lens owner" in text
        assert text.count(SHOWN) == 3
        assert "\x1b" not in text
        assert "\u202e" not in text


async def test_p_comes_here_from_a_node_with_its_pages_lit():
    app, feed = memory("radix")
    async with app.run_test(size=WIDE) as pilot:
        await bring(app, feed, pilot, "p")
        assert app.page.NAME == "pools"
        assert app.card.ref == "node:1"
        assert map_of(app).asks()[0].mark == "node:1"
        assert "node:1: 2 cells lit" in line_with(app, CAPTION)
        await bring(app, feed, pilot, "right")
        assert app.card.ref == app.page.chosen()


async def test_r_offers_the_pages_of_a_lease():
    app, feed = memory("pools")
    feed.replies[Why] = Because(0, "held", (), ("room:4",))
    async with app.run_test(size=WIDE) as pilot:
        await app.open("lease:7")
        await bring(app, feed, pilot, "r")
        assert line_with(app, "pages:lease:7")
        await bring(app, feed, pilot, "2")
        assert (app.page.NAME, app.card.ref) == ("pools", "lease:7")
        assert map_of(app).mark == "lease:7"


async def test_where_nothing_is_lit_n_says_how_to_light_something():
    app, feed = memory("pools")
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await bring(app, feed, pilot, "n")
        assert any("nothing is lit here" in line for line in lines_of(app))
