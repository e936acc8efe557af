"""Every row of the table of keys, pressed on its pages over a real node: none does nothing.

What each key does is tested with its page. Here is proven that none is forgotten: a row that is
added to the table is pressed here, and has to change something that an operator sees.
"""

from __future__ import annotations

import pytest

from tests.tui.golden import text_of
from tests.tui.opened import opened
from tests.tui.staged import staged
from tui import actions
from tui.keys import PAGES, TABLE, meaning
from tui.model.navigation import Location

SMALL = (80, 20)
"""Columns are cut, and cards are longer than the screen."""
EVERYWHERE = "clients"
"""Where keys are pressed that mean the same on all pages."""
SITUATION = {"inspect": "dead-client", "overview": "dead-client", "pools": "mixture"}
"""Where there is something to be seen; else a node at work."""
BEFORE = {
    "light": ("end", "enter"),
    "next-lit": ("end", "enter", "L"),
    "page clients": ("1",),
    "zoom-in": ("-",),
    "zoom-out": ("+", "+"),
    "step -1": ("space",),
    "step 1": ("space", "left"),
    "live": ("space",),
    "up": ("end",),
    "left": ("right",),
    "pageup": ("end",),
    "home": ("end",),
    "back": ("enter",),
    "card -3": ("enter", "ctrl+down"),
    "card 3": ("enter",),
}
"""Keys that lead to where a row means something, by its action."""
CARDS = {"card -3", "card 3"}
ENDS = "quit"


def seen(app) -> tuple[object, ...]:
    """All that a key may change: the screen, what is asked for, what was said, and how it ends."""
    return (
        text_of(app),
        [type(screen) for screen in app.screen_stack],
        app.wanted(),
        app.place.crumbs(),
        app.theme,
        app.clipboard,
        id(app.snapshot) if app.mirror.history.is_frozen else 0,
        [note.message for note in app._notifications],
        app.is_running and not app._exit,
    )


async def begin(stage, page) -> None:
    """The page as one comes to it, whatever was done before."""
    app = stage.app
    while len(app.screen_stack) > 1:
        await app.pop_screen()
    if app.bar.display:
        await stage.press("escape")
    app.mirror.history.live()
    app.clear_notifications()
    await app.go(Location(page))
    if app.page.tables():
        app.page.activate(app.page.tables()[0])
        actions.filter_by(app, "")
    await stage.press("home")


async def press(stage, page, row, name) -> str:
    """What is wrong with a key; empty for nothing."""
    await begin(stage, page)
    for before in BEFORE.get(row.action, ()):
        await stage.press(before)
    here = stage.app.page.NAME
    if meaning(name, here, stage.app.has()) is not row:
        return f"{name} on {here} is not {row.action}: {sorted(stage.app.has())}"
    before = seen(stage.app)
    await stage.press(name)
    return f"{name} on {here} does nothing: {row.action}" if seen(stage.app) == before else ""


def rows_of(page) -> list:
    return [row for row in TABLE if page in (row.pages or (EVERYWHERE,)) and row.action != ENDS]


@pytest.mark.parametrize("page", PAGES)
async def test_no_key_of_a_page_does_nothing(page):
    async with staged(page, SITUATION.get(page, "normal"), SMALL) as stage:
        for _ in range(3):
            await stage.pass_time(0.5)
        await begin(stage, page)
        quiet = seen(stage.app)
        await stage.press("f20")
        assert seen(stage.app) == quiet
        wrong = [await press(stage, page, row, name) for row in rows_of(page) for name in row.keys]
    if any(wrong):
        raise AssertionError("\n".join(filter(None, wrong)))


@pytest.mark.parametrize("name", next(row.keys for row in TABLE if row.action == ENDS))
async def test_every_key_that_ends_it_does(name):
    app, _ = opened("empty")
    async with app.run_test(size=SMALL) as pilot:
        assert app.return_code is None
        await pilot.press(name)
    assert app.return_code == 0


def test_every_row_of_the_table_is_pressed_here():
    pressed = [row for page in PAGES for row in rows_of(page)]
    rest = {row.action for row in TABLE if row not in pressed}
    assert rest == {ENDS}
