"""Every key of the console itself, pressed."""

from __future__ import annotations

from contextlib import asynccontextmanager

import msgspec
import pytest
from textual.command import CommandPalette
from textual.geometry import Region

from kvd.errors import Code, Refusal
from kvd.wire.admin import (
    AdminFailed,
    Audit,
    Because,
    Evict,
    Fence,
    Flush,
    RaiseEpoch,
    Rehearse,
    Report,
    Why,
)
from kvd.wire.console import Filter
from tests.tui.feed import console, lines_of, resize, settle
from tests.tui.golden import text_of
from tests.tui.plain import plain  # noqa: F401 - a fixture for all tests here
from tui.app import Location
from tui.widgets.table import WindowedTable

SIZE = (120, 30)


@asynccontextmanager
async def shown(size=SIZE, rows=40, **options):
    """A console with its first frame on the screen."""
    options.setdefault("page", "engines")
    app, feed = console(rows, **options)
    async with app.run_test(size=size, notifications=True) as pilot:
        feed.bring()
        await settle(app, pilot)
        yield app, feed, pilot


async def press(app, pilot, *keys):
    """Press, and wait until it is painted."""
    await pilot.press(*keys)
    await settle(app, pilot)


async def enter(app, pilot, text):
    """Type a line into the bar, its mode first, and press Enter."""
    app.action_ask(text[0])
    app.bar.typed.value = text
    await press(app, pilot, "enter")


async def test_arrows_and_letters_move_the_cursor():
    async with shown() as (app, _, pilot):
        await press(app, pilot, "down", "j", "down", "k", "up")
        assert app.page.chosen() == "client:1"
        for end, home in (("end", "home"), ("G", "g")):
            await press(app, pilot, end)
            feed_end = app.page.table().asks()
            assert feed_end.first + feed_end.limit >= 40
            await press(app, pilot, home)
            assert app.page.chosen() == "client:0"


async def test_page_keys_move_by_a_screen():
    async with shown() as (app, feed, pilot):
        rows = app.page.table().page_rows
        await press(app, pilot, "pagedown")
        feed.bring()
        await settle(app, pilot)
        assert app.page.chosen() == f"client:{rows - 1}"
        await press(app, pilot, "pageup")
        assert app.page.chosen() == "client:0"


async def test_tab_moves_on_to_the_next_table():
    async with shown() as (app, _, pilot):
        await press(app, pilot, "tab")
        assert app.page.chosen() == "lease:0"
        await press(app, pilot, "tab")
        assert app.page.chosen() == "client:0"


async def test_s_sorts_by_the_next_column():
    async with shown() as (app, feed, pilot):
        await press(app, pilot, "s")
        assert app.page.table().asks().sort == "name"
        await press(app, pilot, "s", "s")
        assert app.page.table().asks().sort == "-pages"
        feed.bring()
        await settle(app, pilot)
        assert "by -pages" in text_of(app)


async def test_a_click_on_a_column_sorts_by_it():
    async with shown() as (app, _, pilot):
        table = app.page.table()
        head = next(line for line in lines_of(app) if line.startswith("  name"))
        await pilot.click(table, offset=(head.index("state") + 1, 1))
        assert table.asks().sort == "state"
        await pilot.click(table, offset=(head.index("state") + 1, 1))
        assert table.asks().sort == "-state"


async def test_a_click_chooses_a_row_and_a_second_one_opens_it():
    async with shown() as (app, _, pilot):
        table = app.page.table()
        await pilot.click(table, offset=(5, 2 + 3))
        assert (app.page.chosen(), app.card.ref) == ("client:3", "")
        await pilot.click(table, offset=(5, 2 + 3), times=2)
        await settle(app, pilot)
        assert app.card.ref == "client:3"


async def test_the_wheel_moves_the_cursor():
    async with shown() as (app, _, pilot):
        table = app.page.table()
        table.on_mouse_scroll_down(_Wheel())
        assert app.page.chosen() == "client:3"
        await settle(app, pilot)


class _Wheel:
    def stop(self):
        pass


async def test_a_click_on_the_name_of_a_page_goes_there():
    async with shown() as (app, _, pilot):
        x = lines_of(app)[1].index("peers")
        await pilot.click("Tabs", offset=(x, 0))
        await settle(app, pilot)
        assert app.page.id == "page-peers"


async def test_a_filter_is_typed_and_asked_of_the_daemon_and_escape_takes_it_off():
    async with shown() as (app, feed, pilot):
        await enter(app, pilot, "/state:gone")
        assert app.page.table().asks().filters == (Filter("state", "has", "gone"),)
        feed.bring()
        await settle(app, pilot)
        assert "clients /state:gone" in text_of(app)
        await press(app, pilot, "escape")
        assert app.page.table().asks().filters == ()


async def test_a_flaw_of_a_filter_is_shown_where_it_is_and_not_asked():
    async with shown() as (app, _, pilot):
        await press(app, pilot, "/", *"pages>x")
        flaw, bar = lines_of(app)[-3:-1]
        assert "expected a number" in flaw
        assert bar.startswith("/pages>x")
        assert flaw.index("v") == bar.index("x")
        await press(app, pilot, "enter")
        assert app.page.table().asks().filters == ()
        await press(app, pilot, "escape")
        assert not lines_of(app)[-2].startswith("/")


async def test_keys_are_letters_while_something_is_typed():
    async with shown() as (app, _, pilot):
        await press(app, pilot, ":", *"q12")
        assert app.is_running
        assert lines_of(app)[-2].startswith(":q12")
        await press(app, pilot, "escape")
        await press(app, pilot, "2")
        assert app.page.id == "page-pools"


async def test_pages_that_are_gone_to_at_once_do_not_call_each_other_back(monkeypatch):
    async with shown() as (app, _, pilot):
        went, go = [], app.go

        async def counted(place):
            went.append(place.page)
            await go(place)

        monkeypatch.setattr(app, "go", counted)
        await app.action_go("pools")
        await app.action_go("overview")
        for _ in range(5):
            await settle(app, pilot)
        assert went == ["pools", "overview"]


async def test_going_somewhere_late_neither_takes_the_keys_from_the_bar_nor_from_the_table():
    async with shown() as (app, _, pilot):
        left = app.page.table()
        app.action_ask(":")
        await app.go(Location("handoffs"))
        await settle(app, pilot)
        assert app.focused is app.bar.typed
        await press(app, pilot, "escape")
        app.on_cursored_moved(WindowedTable.Moved(left))
        assert app.page.NAME == "handoffs"
        assert app.page.table() is not None


async def test_tab_completes_a_command():
    async with shown() as (app, _, pilot):
        await press(app, pilot, ":", *"han", "tab")
        assert lines_of(app)[-2].startswith(":handoffs")
        await press(app, pilot, "enter")
        assert app.page.id == "page-handoffs"


async def test_an_arrow_recalls_what_was_typed_before():
    async with shown() as (app, _, pilot):
        await enter(app, pilot, ":sort -pages")
        await press(app, pilot, ":", "up")
        assert lines_of(app)[-2].startswith(":sort -pages")
        await press(app, pilot, "down")
        assert lines_of(app)[-2].rstrip() == ":"
        await press(app, pilot, "backspace", "q")
    assert app.return_code == 0


@pytest.mark.parametrize(
    ("typed", "check"),
    [
        ("peers", lambda app: app.page.id == "page-peers"),
        ("lease 3", lambda app: app.card.ref == "lease:3"),
        ("filter state:gone", lambda app: len(app.page.table().filters) == 1),
        ("sort -pages", lambda app: app.page.table().sort == "-pages"),
        ("sort nonsense", lambda app: app.page.table().sort == ""),
        ("theme nord", lambda app: app.theme == "nord"),
        ("theme nonsense", lambda app: app.theme == "textual-dark"),
        ("q", lambda app: app.return_code == 0),
    ],
)
async def test_a_command_does_what_it_says(typed, check):
    async with shown() as (app, _, pilot):
        await enter(app, pilot, f":{typed}")
        assert check(app)


async def test_space_freezes_while_it_goes_on_collecting():
    async with shown() as (app, feed, pilot):
        await press(app, pilot, "space")
        for _ in range(3):
            feed.bring(findings=9)
        await settle(app, pilot)
        assert "FROZEN -" in lines_of(app)[0]
        assert "problems 2" in lines_of(app)[0]
        await press(app, pilot, "space")
        assert "problems 9" in lines_of(app)[0]
        assert "FROZEN" not in lines_of(app)[0]


async def test_keys_about_a_row_that_are_typed_ahead_wait_for_the_rows_in_their_order():
    async with shown() as (app, feed, pilot):
        await pilot.press("5", "down", "enter", "y", "down", ":", *"sort")
        assert (app.card.ref, app.clipboard, app.bar.display) == ("", "", False)
        feed.bring()
        await press(app, pilot)
        await press(app, pilot)
        assert app.clipboard == "kvd why peer 1"
        assert app.card.ref == "peer:2"
        assert lines_of(app)[-2].startswith(":sort")


async def test_a_page_that_textual_takes_the_keys_from_has_them_again():
    async with shown() as (app, _, pilot):
        app.bench.set_focus(None)
        await press(app, pilot, ":", *"q")
        assert lines_of(app)[-2].startswith(":q")


async def test_shift_and_a_letter_sorts_by_the_columns_that_begin_with_it():
    async with shown() as (app, _, pilot):
        await press(app, pilot, "P")
        assert app.page.table().sort == "-pages"
        await press(app, pilot, "P")
        assert app.page.table().sort == "pages"
        await press(app, pilot, "Z")
        assert app.page.table().sort == "pages"
        assert [note.message for note in app._notifications] == ["no column here begins with z"]


async def test_a_frozen_console_does_not_ask_what_is_now():
    async with shown() as (app, feed, pilot):
        await press(app, pilot, "space", "enter")
        assert not feed.requests
        assert "frozen: the daemon is asked again" in text_of(app)
        await press(app, pilot, "space")
        app.ask_again()
        await settle(app, pilot)
        assert Why(0, "client", 0) in feed.requests


async def test_r_goes_to_what_has_to_do_with_it_and_escape_back_along_the_way():
    async with shown() as (app, feed, pilot):
        feed.replies[Why] = Because(0, "because", (), ("lease:7", "peer:peers-2"))
        await press(app, pilot, "enter", "r")
        await press(app, pilot)
        assert "related to client:0" in text_of(app)
        await press(app, pilot, "down", "enter")
        assert (app.page.id, app.card.ref) == ("page-peers", "peer:peers-2")
        assert "engines > client:0 > peer:peers-2" in text_of(app)
        await press(app, pilot, "escape")
        assert (app.page.id, app.card.ref) == ("page-engines", "client:0")
        await press(app, pilot, "escape")
        assert (app.page.id, app.card.ref) == ("page-engines", "")


async def test_the_card_goes_with_the_cursor():
    async with shown() as (app, _, pilot):
        await press(app, pilot, "enter", "down")
        assert app.card.ref == "client:1"
        assert "engines > client:1" in text_of(app)


async def test_w_gives_the_table_the_whole_width():
    async with shown() as (app, _, pilot):
        await press(app, pilot, "enter")
        narrow = app.page.table().size.width
        await press(app, pilot, "w")
        assert app.page.table().size.width > narrow
        await press(app, pilot, "w")
        assert app.page.table().size.width == narrow


async def test_z_leaves_only_what_is_wrong():
    async with shown(page="peers") as (app, _, pilot):
        await press(app, pilot, "z")
        assert app.page.table().asks().filters == (Filter("state", "has-not", "up"),)
        await press(app, pilot, "z")
        assert app.page.table().asks().filters == ()


async def test_y_copies_the_command_that_says_why_of_what_is_under_the_cursor():
    async with shown() as (app, _, pilot):
        await press(app, pilot, "down", "y")
        assert app.clipboard == "kvd why client 1"


async def test_ctrl_t_is_the_next_theme_and_colours_follow():
    second = Region(0, 1, SIZE[0], 1)
    async with shown() as (app, _, pilot):
        [strip] = app.page.table().render_lines(second)
        before = next(segment.style.color for segment in strip if segment.text.strip())
        await press(app, pilot, "ctrl+t")
        assert app.theme == "textual-light"
        [strip] = app.page.table().render_lines(second)
        after = next(segment.style.color for segment in strip if segment.text.strip())
        assert before != after


async def test_the_question_mark_shows_the_keys_of_this_page_and_escape_closes_them():
    async with shown(page="radix") as (app, _, pilot):
        await press(app, pilot, "?")
        assert "on this page" in text_of(app)
        assert app.screen.active_bindings["l"].binding.tooltip == "only what is locked"
        await press(app, pilot, "escape")
        assert "on this page" not in text_of(app)


async def test_help_and_the_way_out_are_named_however_narrow_it_is():
    async with shown(page="pools", size=(80, 24)) as (app, _, pilot):
        assert text_of(app).splitlines()[-1].rstrip().endswith("? help q quit")
        await resize(app, pilot, 40, 12)
        assert lines_of(app)[1] == " 1 >2 pools< 3  4  5  6"
        assert text_of(app).splitlines()[-1].rstrip() == "⏎ open / filter : command ? help q quit"
        await resize(app, pilot, 132, 40)
        assert text_of(app).splitlines()[-1].endswith("space freeze c compare ? help q quit")


async def test_the_palette_has_the_keys_and_the_commands():
    async with shown() as (app, _, pilot):
        found = {one.title: one for one in app.get_system_commands(app.screen)}
        await found["the page peers"].callback()
        await settle(app, pilot)
        assert app.page.id == "page-peers"
        found[":evict N"].callback()
        await settle(app, pilot)
        assert lines_of(app)[-2].startswith(":evict")
        await pilot.press("escape", "ctrl+p")
        assert isinstance(app.screen, CommandPalette)


async def test_control_arrows_scroll_a_card_that_is_longer_than_the_screen():
    async with shown() as (app, feed, pilot):
        feed.replies[Why] = Because(0, "because", tuple(f"fact {n}" for n in range(60)))
        await press(app, pilot, "enter")
        assert "fact 59" not in text_of(app)
        await press(app, pilot, *["ctrl+down"] * 14)
        assert "fact 59" in text_of(app)
        await press(app, pilot, *["ctrl+up"] * 14)
        assert "because" in text_of(app)


# ---- what changes something ----------------------------------------------------------------------

WOULD = Report(0, {"evicted_pages": 43}, ("lease 7 holds 3 pages",))
DONE = Report(0, {"evicted_pages": 41}, ())


@pytest.mark.parametrize(
    ("page", "keys", "verb"),
    [
        ("pools", ("ctrl+f",), Flush(0)),
        ("pools", ("ctrl+e", *"100", "enter"), Evict(0, 100)),
        ("radix", ("ctrl+e", *"5", "enter"), Evict(0, 5)),
        ("peers", ("ctrl+x",), Fence(0)),
        ("engines", (":", *"flush strict", "enter"), Flush(0, "strict")),
        ("engines", (":", *"epoch llama", "enter"), RaiseEpoch(0, "llama")),
    ],
)
async def test_what_changes_something_is_rehearsed_and_done_only_when_agreed_to(page, keys, verb):
    async with shown(page=page) as (app, feed, pilot):
        feed.replies[Rehearse] = WOULD
        feed.replies[type(verb)] = DONE
        await press(app, pilot, *keys)
        await press(app, pilot)
        assert feed.requests == [Rehearse(0, verb)]
        assert "43  evicted pages" in text_of(app)
        assert "! lease 7 holds 3 pages" in text_of(app)

        await press(app, pilot, "enter", "space")
        assert feed.requests == [Rehearse(0, verb)]
        await press(app, pilot, "y")
        await press(app, pilot)
        assert feed.requests == [Rehearse(0, verb), verb]
        assert "41  evicted pages" in text_of(app)


@pytest.mark.parametrize("key", ["n", "escape"])
async def test_what_is_not_agreed_to_is_not_done(key):
    async with shown(page="pools") as (app, feed, pilot):
        feed.replies[Rehearse] = WOULD
        await press(app, pilot, "ctrl+f")
        await press(app, pilot, key)
        assert feed.requests == [Rehearse(0, Flush(0))]
        assert "flush: not done" in text_of(app)


async def test_what_the_daemon_cannot_rehearse_is_not_done():
    async with shown(page="pools") as (app, feed, pilot):
        why = Refusal(Code.NOT_SUPPORTED, "this daemon is older")
        feed.replies[Rehearse] = AdminFailed(0, why)
        await press(app, pilot, "ctrl+f")
        await press(app, pilot, "y")
        assert "this daemon is older" in text_of(app)
        await press(app, pilot, "escape")
        assert feed.requests == [Rehearse(0, Flush(0))]


async def test_capital_a_names_the_room_of_the_row():
    async with shown(page="handoffs") as (app, feed, pilot):
        table = app.page.table()
        columns = (*table.columns, msgspec.structs.replace(table.columns[2], name="room"))
        data = table.data
        rows = {
            key: msgspec.structs.replace(one, cells=(*one.cells, 12))
            for key, one in data.rows.items()
        }
        table.data = msgspec.structs.replace(data, columns=columns, rows=rows)
        await press(app, pilot, "ctrl+k")
        assert lines_of(app)[-2].startswith(":abort room 12")
        assert not feed.requests


@pytest.mark.parametrize("keys", [("ctrl+f",), (":", *"flush", "enter")])
async def test_readonly_changes_nothing(keys):
    async with shown(page="pools", readonly=True) as (app, feed, pilot):
        await press(app, pilot, *keys)
        assert not feed.requests
        assert "flush" not in lines_of(app)[-1]


async def test_an_audit_is_only_looked_at():
    async with shown(page="overview", readonly=True) as (app, feed, pilot):
        feed.replies[Audit] = Report(0, {"checked_pages": 128}, ())
        await press(app, pilot, "a")
        await press(app, pilot)
        assert feed.requests == [Audit(0)]
        assert "128  checked pages" in text_of(app)
