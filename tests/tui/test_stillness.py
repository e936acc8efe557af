"""An app is still when all that could run has run, and all is painted."""

from __future__ import annotations

import asyncio

import pytest
from textual.app import App
from textual.widgets import Static

from tests.tui import stillness


class Chain(App[None]):
    """Each key begins a chain of steps, one message for each."""

    def __init__(self):
        super().__init__()
        self.done = 0

    def compose(self):
        yield Static("begun", id="said")

    def on_key(self):
        self.call_later(self.step, 40)

    def step(self, left):
        if left:
            self.call_after_refresh(self.step, left - 1)
        else:
            self.query_one("#said", Static).update("done")
            self.done += 1


async def test_a_key_has_done_all_that_it_does_when_it_has_been_pressed():
    app = Chain()
    async with app.run_test() as pilot:
        for count in range(1, 4):
            await pilot.press("x")
            assert app.done == count
        strips = app.screen._compositor.render_strips()
        assert strips[0].text.startswith("done")


async def test_an_app_that_is_never_still_fails_its_test(monkeypatch):
    monkeypatch.setattr(stillness, "MOST_TURNS", 100)
    app = Chain()
    async with app.run_test():
        loop = asyncio.get_running_loop()

        def again():
            nonlocal handle
            handle = loop.call_soon(again)

        handle = loop.call_soon(again)
        with pytest.raises(AssertionError, match="does not come to rest"):
            await stillness.until_still()
        handle.cancel()
