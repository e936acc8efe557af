"""Every key, pressed on its pages over a real node: none does nothing.

What each key does is tested with its page. Here is proven that none is forgotten: a binding that is
added is pressed here, and has to change something that an operator sees.
"""

from __future__ import annotations

import pytest

from tests.tui.golden import text_of
from tests.tui.opened import opened
from tests.tui.staged import staged
from tui import actions
from tui.app import KvdTui, Location
from tui.screens import ALL

SMALL = (80, 20)
"""Columns are cut, and cards are longer than the screen."""
EVERYWHERE = "engines"
"""Where keys are pressed that mean the same on all pages."""
SITUATION = {"overview": "dead-client", "pools": "mixture"}
"""Where there is something to be seen; else a node at work."""
BEFORE = {
    "light": ("end", "enter"),
    "next_lit": ("end", "enter", "o"),
    "zoom(2.0)": ("-",),
    "zoom(0.5)": ("+", "+"),
    "move(-1)": ("end",),
    "shift(-1)": ("right",),
    "screen(-1)": ("end",),
    "home": ("end",),
    "close": ("enter",),
    "scroll_card(-3)": ("enter", "ctrl+down"),
    "scroll_card(3)": ("enter",),
}
"""Keys that lead to where a binding means something, by its action."""
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
    app.action_hide_help_panel()
    app.mirror.history.live()
    app.clear_notifications()
    await app.go(Location(page))
    if app.page.tables():
        app.page.activate(app.page.tables()[0])
        actions.filter_by(app, "")
    await stage.press("home")


async def press(stage, page, binding) -> str:
    """What is wrong with a key; empty for nothing."""
    await begin(stage, page)
    for before in BEFORE.get(binding.action, ()):
        await stage.press(before)
    here, key = stage.app.page.NAME, binding.key
    found = stage.app.screen.active_bindings.get(key)
    if found is None or found.binding.action != binding.action:
        return f"{key} on {here} is not {binding.action}: {found}"
    before = seen(stage.app)
    await stage.press(key)
    return f"{key} on {here} does nothing: {binding.action}" if seen(stage.app) == before else ""


def own(owner) -> list:
    return [one for several in owner._merge_bindings().key_to_bindings.values() for one in several]


def bindings_of(page) -> list:
    """Those of the page alone, and on one page those that all have."""
    of_all = [one for one in own(KvdTui) if one.action != ENDS]
    inherited = {(one.key, one.action) for one in own(ALL[page].__mro__[1])}
    if page == EVERYWHERE:
        return [*own(ALL[page]), *of_all]
    return [one for one in own(ALL[page]) if (one.key, one.action) not in inherited]


@pytest.mark.parametrize("page", ALL)
async def test_no_key_of_a_page_does_nothing(page):
    async with staged(page, SITUATION.get(page, "normal"), SMALL) as stage:
        for _ in range(3):
            await stage.pass_time(0.5)
        await begin(stage, page)
        quiet = seen(stage.app)
        await stage.press("f20")
        assert seen(stage.app) == quiet
        wrong = [await press(stage, page, one) for one in bindings_of(page)]
    if any(wrong):
        raise AssertionError("\n".join(filter(None, wrong)))


@pytest.mark.parametrize("name", ["q", "ctrl+c"])
async def test_every_key_that_ends_it_does(name):
    app, _ = opened("empty")
    async with app.run_test(size=SMALL) as pilot:
        assert app.return_code is None
        await pilot.press(name)
    assert app.return_code == 0
