"""What the pages of the handoffs, peers, events and engines have alike."""

from __future__ import annotations

import pytest

from tests.tui.golden import same_picture, same_text
from tests.tui.staged import LARGE, MIDDLE, SMALL, staged
from tui.model import handoffs, peers
from tui.screens import engines

MADE_HERE = {"handoffs": handoffs.COLUMNS, "peers": peers.COLUMNS, "engines": engines.COLUMNS}


@pytest.mark.parametrize("page", MADE_HERE)
async def test_every_column_that_s_comes_to_is_one_the_daemon_can_sort_by(page):
    async with staged(page) as stage:
        table = stage.app.page.table()
        seen = set()
        for _ in range(len(table.source.columns) + 1):
            table.sort_next()
            seen.add(table.sort.removeprefix("-"))
        await stage.frame()
        assert seen == {"", *(column.name for column in table.source.columns)}
        assert not seen & {column.name for column in MADE_HERE[page]}
        assert table.data.trouble == ""


@pytest.mark.parametrize("size", [SMALL, MIDDLE, LARGE])
@pytest.mark.parametrize(
    ("page", "keys"),
    [("handoffs", ("down", "down")), ("peers", ()), ("events", ()), ("engines", ("down",))],
)
async def test_the_page_of_a_node_at_work(page, keys, size):
    async with staged(page, size=size) as stage:
        await stage.press(*keys)
        same = same_picture if size == MIDDLE else same_text
        same(stage.app, f"{page}-{size[0]}x{size[1]}")


@pytest.mark.parametrize("page", ["handoffs", "events", "engines"])
async def test_the_page_of_a_node_without_any(page):
    async with staged(page, "empty", SMALL) as stage:
        same_text(stage.app, f"{page}-empty")


@pytest.mark.parametrize(
    ("page", "situation"),
    [("handoffs", "normal"), ("peers", "normal"), ("engines", "dead-client")],
)
async def test_the_page_of_a_daemon_that_is_gone(page, situation):
    async with staged(page, situation, SMALL) as stage:
        stage.link.down = "nobody answers at ipc:///run/kvd/admin.sock"
        await stage.pass_time(3.0)
        same_text(stage.app, f"{page}-down")


@pytest.mark.parametrize(
    ("page", "situation", "keys"),
    [
        ("handoffs", "stuck", ()),
        ("peers", "silent-peer", ()),
        ("engines", "normal", ("down",)),
    ],
)
async def test_the_page_frozen(page, situation, keys):
    async with staged(page, situation, SMALL) as stage:
        await stage.press(*keys, "space")
        await stage.pass_time(2.0)
        same_text(stage.app, f"{page}-frozen")
