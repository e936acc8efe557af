"""The page of the tree under a pilot: nodes opened where they stand, and lists of some of them."""

from __future__ import annotations

import pytest

from kvd.wire.admin import Because, Mark, Why
from tests.tui.feed import line_with, lines_of, settle
from tests.tui.memory import SHOWN, memory

NARROW, WIDE, HUGE = (80, 24), (132, 40), (200, 60)


async def bring(app, feed, pilot, *names):
    """Press keys one after the other, and have what each of them led to answered."""
    for name in ["", *names]:
        if name:
            await pilot.press(name)
        feed.bring()
        app.tick()
    await settle(app, pilot)


async def test_nodes_are_opened_and_closed_where_they_stand():
    app, feed = memory("radix")
    async with app.run_test(size=WIDE) as pilot:
        await bring(app, feed, pilot)
        assert app.page.table().asks().opened == (1,)  # there is room
        await bring(app, feed, pilot)
        assert list(app.page.nodes.data.order) == ["node:1", "node:2", "node:3"]
        assert line_with(app, f"▼ {SHOWN}")
        assert line_with(app, "    ▶ 10 11 12 …")
        assert line_with(app, "      20 21")
        await bring(app, feed, pilot, "x")
        assert app.page.table().asks().opened == ()
        assert line_with(app, f"▶ {SHOWN}")


async def test_arrows_open_and_go_in_and_close_and_go_out():
    app, feed = memory("radix")
    async with app.run_test(size=WIDE) as pilot:
        await bring(app, feed, pilot, "right")
        assert app.page.nodes.opened == (1,)
        await bring(app, feed, pilot, "right")
        assert app.page.chosen() == "node:2"
        await bring(app, feed, pilot, "right", "right")
        assert app.page.nodes.opened == (1, 2)
        assert app.page.chosen() == "node:4"
        await bring(app, feed, pilot, "left")
        assert app.page.chosen() == "node:2"
        await bring(app, feed, pilot, "left")
        assert app.page.nodes.opened == (1,)
        await bring(app, feed, pilot, "left", "left")
        assert app.page.chosen() == "node:1"
        assert app.page.nodes.opened == ()


async def test_a_leaf_has_nothing_to_open():
    app, feed = memory("radix")
    async with app.run_test(size=WIDE) as pilot:
        await bring(app, feed, pilot)
        await bring(app, feed, pilot, "down", "down", "x")
        assert app.page.chosen() == "node:3"
        assert app.page.nodes.opened == (1,)


async def test_enter_opens_the_node_and_its_card_with_the_story_of_its_locks():
    app, feed = memory("radix")
    marks = (Mark(8.4, f"lock_ref 1: {SHOWN}"), Mark(0.3, "lock_ref 2: engine-2"))
    feed.replies[Why] = Because(0, "node 1, lock_ref 2", (), ("lease:7",), marks)
    async with app.run_test(size=WIDE) as pilot:
        await bring(app, feed, pilot, "enter")
        assert Why(0, "node", 1) in feed.requests
        assert app.page.nodes.opened == (1,)
        assert app.card.ref == "node:1"
        assert line_with(app, "-8.40s lock_ref 1: ")
        assert line_with(app, "-0.30s lock_ref 2: engine-2")


async def test_a_node_is_marked_as_open_before_the_daemon_has_said_what_is_below_it():
    app, feed = memory("radix")
    async with app.run_test(size=WIDE) as pilot:
        await bring(app, feed, pilot, "x")
        await pilot.press("x")
        await settle(app, pilot)
        assert line_with(app, f"▼ {SHOWN}")


@pytest.mark.parametrize(
    ("key", "view", "title"),
    [
        ("l", "locked", "locked nodes"),
        ("v", "eviction", "in the order of eviction"),
    ],
)
async def test_a_key_shows_a_list_of_nodes_and_the_tree_again(key, view, title):
    app, feed = memory("radix")
    async with app.run_test(size=WIDE) as pilot:
        await bring(app, feed, pilot, "down", key)
        assert app.page.table().asks().view == view
        assert app.page.table().asks().filters == ()
        assert line_with(app, f"━ {title} ━")
        assert "▶" not in "\n".join(lines_of(app)[4:10])
        await bring(app, feed, pilot, key)
        assert app.page.table().asks().view == "tree"
        assert app.page.nodes.opened == (1,)
        assert line_with(app, f"▼ {SHOWN}")


async def test_locks_are_names_with_ages():
    app, feed = memory("radix")
    async with app.run_test(size=WIDE) as pilot:
        await bring(app, feed, pilot)
        assert f"{SHOWN} 5.1s, !gone gone 40s" in line_with(app, f"▼ {SHOWN}")


async def test_what_changes_something_is_not_there_in_a_readonly_console():
    app, feed = memory("radix", readonly=True)
    async with app.run_test(size=WIDE) as pilot:
        await bring(app, feed, pilot)
        assert not {"ctrl+e", "ctrl+f"} & set(app.screen.active_bindings)
        assert " h hottest " in lines_of(app)[-1]
        assert "^e" not in lines_of(app)[-1]
        assert "^f" not in lines_of(app)[-1]


async def test_hostile_names_reach_the_screen_as_text_only():
    app, feed = memory("radix")
    async with app.run_test(size=HUGE) as pilot:
        await bring(app, feed, pilot, "x", "enter")
        text = "\n".join(lines_of(app))
        assert text.count(SHOWN) >= 3
        assert "\x1b" not in text
        assert "\u202e" not in text
