"""Pictures of the pages of the pools and of the tree over real nodes, that are kept."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from tests.tui.golden import same_picture, same_text, text_of
from tests.tui.staged import LARGE, MIDDLE, SMALL, Stage, staged

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATH = {"pools": (), "radix": ("right", "right", "right")}
"""Keys that lead to what there is to see."""


@asynccontextmanager
async def at(page: str, situation: str = "normal", size=SMALL) -> AsyncIterator[Stage]:
    """The page half a second after its first frame."""
    async with staged(page, situation, size) as stage:
        await stage.pass_time(0.1)
        yield stage


def same(stage: Stage, name: str) -> None:
    """The picture of one size; of the others the text."""
    size = stage.app.size
    kept = same_picture if size == MIDDLE and "-" not in name else same_text
    kept(stage.app, f"{name}-{size.width}x{size.height}")


@pytest.mark.parametrize("size", [SMALL, MIDDLE, LARGE])
@pytest.mark.parametrize("page", PATH)
async def test_the_page_of_a_node_at_work(page, size):
    async with at(page, size=size) as stage:
        await stage.press(*PATH[page])
        same(stage, page)


@pytest.mark.parametrize("page", PATH)
async def test_the_page_of_an_empty_node(page):
    async with at(page, "empty") as stage:
        same(stage, f"{page}-empty")


async def test_the_pages_of_an_overloaded_node():
    async with at("pools", "overloaded", MIDDLE) as stage:
        same(stage, "pools-overloaded")
        await stage.press("3", *PATH["radix"])
        same(stage, "radix-overloaded")


@pytest.mark.parametrize("page", PATH)
async def test_the_page_of_a_daemon_that_is_gone(page):
    async with at(page) as stage:
        await stage.press(*PATH[page])
        stage.link.down = "nobody answers at ipc:///run/kvd/admin.sock"
        await stage.pass_time(3.0)
        same(stage, f"{page}-down")


@pytest.mark.parametrize("page", PATH)
async def test_the_page_frozen(page):
    async with at(page) as stage:
        await stage.press(*PATH[page], "space")
        before = text_of(stage.app).splitlines()[2:-1]
        await stage.pass_time(2.0)
        assert text_of(stage.app).splitlines()[2:-1] == before
        same(stage, f"{page}-frozen")


async def test_the_map_without_colour_is_letters(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    async with at("pools") as stage:
        same(stage, "pools-letters")


async def test_the_holder_of_a_page_is_lit_and_its_pages_are_gone_through():
    async with at("pools", size=MIDDLE) as stage:
        await stage.press("end", "enter")
        assert stage.app.card.ref == "page:1023"
        holder = next(ref for ref in stage.app.card.links if ref.startswith(("lease:", "node:")))
        await stage.press("o")
        assert stage.app.page.map.mark == holder
        await stage.press("n")
        same(stage, "pools-lit")


@pytest.mark.parametrize("key", ["l", "v"])
async def test_the_lists_of_nodes(key):
    async with at("radix", "dead-client", MIDDLE) as stage:
        await stage.press(key)
        same(stage, f"radix-{stage.app.page.nodes.view}")


async def test_the_card_of_a_node_has_the_story_of_its_locks():
    async with at("radix", size=MIDDLE) as stage:
        await stage.press("l", "end", "enter")
        same(stage, "radix-card")


async def test_a_flush_is_rehearsed_and_then_done():
    async with at("radix", size=MIDDLE) as stage:
        pool = stage.link.side.node.leases.pool
        free = pool.free_pages
        await stage.press("ctrl+f")
        assert "What would come of it now:" in text_of(stage.app)
        await stage.press("n")
        assert pool.free_pages == free
        await stage.press("ctrl+f", "y", "escape")
        assert pool.free_pages > free


async def test_evicted_pages_leave_the_map():
    async with at("pools", size=MIDDLE) as stage:
        free = stage.link.side.node.leases.pool.free_pages
        await stage.press("ctrl+e", *"16", "enter", "y", "escape")
        await stage.pass_time(1.0)
        freed = stage.link.side.node.leases.pool.free_pages
        assert freed >= free + 16
        assert re.search(rf"^\. free .* {freed}\b", text_of(stage.app), re.MULTILINE)
