"""Pictures of the pages of the pools and of the tree over real nodes, that are kept."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from tests.tui.golden import SIZES, same_picture, same_text, text_of
from tests.tui.opened import brought, opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NARROW, WIDE, HUGE = SIZES
PATH = {"pools": (), "radix": ("right", "right", "right")}
"""Keys that lead to what there is to see."""


class Shown:
    """A console at a page of a real node."""

    def __init__(self, app, link, pilot) -> None:
        self.app, self.link, self.pilot = app, link, pilot

    async def press(self, *names: str) -> None:
        """Keys, each with the rows it leads to; then what those lead to."""
        for name in names:
            await self.pilot.press(name)
            self.link.frame()
            self.app.tick()
        await self.bring()

    async def bring(self) -> None:
        await brought(self.app, self.link, self.pilot)

    def same(self, name: str) -> None:
        """The picture of one size; of the others the text."""
        same = same_picture if self.app.size == WIDE and "-" not in name else same_text
        same(self.app, f"{name}-{self.app.size.width}x{self.app.size.height}")


@asynccontextmanager
async def at(page: str, situation: str = "normal", size=NARROW) -> AsyncIterator[Shown]:
    app, link = opened(situation, page=page)
    async with app.run_test(size=size) as pilot:
        shown = Shown(app, link, pilot)
        await pilot.pause()
        link.pass_time(0.5)
        await shown.bring()
        yield shown


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("page", PATH)
async def test_the_page_of_a_node_at_work(page, size):
    async with at(page, size=size) as shown:
        await shown.press(*PATH[page])
        shown.same(page)


@pytest.mark.parametrize("page", PATH)
async def test_the_page_of_an_empty_node(page):
    async with at(page, "empty") as shown:
        shown.same(f"{page}-empty")


async def test_the_pages_of_an_overloaded_node():
    async with at("pools", "overloaded", WIDE) as shown:
        shown.same("pools-overloaded")
        await shown.press("3", *PATH["radix"])
        shown.same("radix-overloaded")


@pytest.mark.parametrize("page", PATH)
async def test_the_page_of_a_daemon_that_is_gone(page):
    async with at(page) as shown:
        await shown.press(*PATH[page])
        shown.link.down = "nobody answers at ipc:///run/kvd/admin.sock"
        shown.link.pass_time(3.0)
        await shown.bring()
        shown.same(f"{page}-down")


@pytest.mark.parametrize("page", PATH)
async def test_the_page_frozen(page):
    async with at(page) as shown:
        await shown.press(*PATH[page], "space")
        before = text_of(shown.app).splitlines()[2:-1]
        shown.link.pass_time(2.0)
        await shown.bring()
        assert text_of(shown.app).splitlines()[2:-1] == before
        shown.same(f"{page}-frozen")


async def test_the_map_without_colour_is_letters(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    async with at("pools") as shown:
        shown.same("pools-letters")


async def test_the_holder_of_a_page_is_lit_and_its_pages_are_gone_through():
    async with at("pools", size=WIDE) as shown:
        await shown.press("end", "enter")
        assert shown.app.card.ref == "page:1023"
        holder = next(ref for ref in shown.app.card.links if ref.startswith(("lease:", "node:")))
        await shown.press("L")
        assert shown.app.page.map.mark == holder
        await shown.press("n")
        shown.same("pools-lit")


@pytest.mark.parametrize("key", ["l", "v"])
async def test_the_lists_of_nodes(key):
    async with at("radix", "dead-client", WIDE) as shown:
        await shown.press(key)
        shown.same(f"radix-{shown.app.page.nodes.view}")


async def test_the_card_of_a_node_has_the_story_of_its_locks():
    async with at("radix", size=WIDE) as shown:
        await shown.press("l", "end", "enter")
        shown.same("radix-card")


async def test_a_flush_is_rehearsed_and_then_done():
    async with at("radix", size=WIDE) as shown:
        pool = shown.link.side.node.leases.pool
        free = pool.free_pages
        await shown.press("F")
        assert "What would come of it now:" in text_of(shown.app)
        await shown.press("n")
        assert pool.free_pages == free
        await shown.press("F", "y", "escape")
        assert pool.free_pages > free


async def test_evicted_pages_leave_the_map():
    async with at("pools", size=WIDE) as shown:
        free = shown.link.side.node.leases.pool.free_pages
        await shown.press("E", *"16", "enter", "y", "escape")
        shown.link.pass_time(1.0)
        await shown.bring()
        freed = shown.link.side.node.leases.pool.free_pages
        assert freed >= free + 16
        assert f". free {freed} " in text_of(shown.app)
