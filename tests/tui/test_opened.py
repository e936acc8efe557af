"""The console over real nodes: frames of the server reach the screen, the same ones every time."""

from __future__ import annotations

import pytest

from tests.tui.golden import picture_of, text_of
from tests.tui.opened import brought, opened
from tui.screens import ALL


async def shown(situation: str, down: str = "", **options: object) -> tuple[str, str]:
    """Text and picture of a screen, some seconds on."""
    app, link = opened(situation, **options)
    async with app.run_test(size=(132, 40)) as pilot:
        await brought(app, link, pilot)
        link.down = down
        link.pass_time(2.0)
        await brought(app, link, pilot)
        return text_of(app), picture_of(app)


async def test_sessions_of_a_real_node_are_on_the_screen():
    text, _ = await shown("dead-client", page="engines")
    assert [name for name in ("sglang-0", "sglang-1", "router") if name in text] == [
        "sglang-0",
        "sglang-1",
        "router",
    ]
    assert "gone" in text
    assert "decode-0" in text.splitlines()[0]


async def test_a_daemon_that_cannot_be_reached_is_said_over_what_was_seen_last():
    text, _ = await shown("normal", "connection refused", page="engines")
    assert "connection refused" in text
    assert "sglang-0" in text


@pytest.mark.parametrize("situation", ["normal", "stuck"])
async def test_the_same_steps_give_the_same_picture(situation):
    assert await shown(situation, page="engines") == await shown(situation, page="engines")


@pytest.mark.parametrize("page", ALL)
async def test_a_link_that_asks_what_is_wanted_after_the_pages_are_gone_gets_an_answer(page):
    app, link = opened("empty", page=page)
    async with app.run_test(size=(132, 40)) as pilot:
        await brought(app, link, pilot)
        before = app.wanted()
    assert app.wanted() == before
