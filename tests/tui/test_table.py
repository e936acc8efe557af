"""The table: which columns fit, where the cursor is, and that only what changed is painted."""

from __future__ import annotations

import msgspec
import pytest

from kvd.wire.console import Column, Query, TableRow
from tests.tui.feed import console, lines_of, settle
from tests.tui.plain import plain  # noqa: F401 - a fixture for all tests here
from tui.draw.spans import text_of
from tui.model.snapshots import DaemonSnapshot
from tui.model.tables import TableData
from tui.widgets.table import ColumnRules, WindowedTable, fit, natural

TREE = (
    Column("depth", "depth"),
    Column("name", "text"),
    Column("tokens", "tokens"),
)


def columns(*kinds):
    return tuple(Column(f"c{at}", kind) for at, kind in enumerate(kinds))


# ---- which columns fit ---------------------------------------------------------------------------


def test_all_columns_are_shown_where_there_is_room_and_cut_texts_get_what_is_left():
    shown = fit(columns("text", "count", "text"), [40, 5, 10], 80, ColumnRules())
    assert (shown.at, shown.widths, shown.hidden) == ((0, 1, 2), (40, 5, 10), 0)


def test_columns_at_the_end_go_first_where_there_is_no_room():
    shown = fit(columns("count", "count", "count"), [10, 10, 10], 23, ColumnRules())
    assert (shown.at, shown.hidden) == ((0, 1), 1)


def test_a_column_that_matters_stays_and_keeps_its_place():
    shown = fit(columns("count", "count", "count"), [10, 10, 10], 23, ColumnRules(first=("c2",)))
    assert (shown.at, shown.hidden) == ((0, 2), 1)


def test_a_column_that_is_never_wanted_is_not_counted_as_hidden():
    shown = fit(columns("count", "count"), [5, 5], 80, ColumnRules(never=("c0",)))
    assert (shown.at, shown.hidden) == ((1,), 0)


def test_one_column_is_shown_however_narrow_the_terminal_is():
    assert fit(columns("text", "text"), [40, 40], 10, ColumnRules()).widths == (10,)


def test_columns_that_may_be_narrow_are_cut_so_that_others_have_room():
    kinds, rules = columns("text", "count", "holders"), ColumnRules(narrow=("c0", "c2"))
    shown = fit(kinds, [60, 10, 60], 60, rules)
    assert (shown.widths, shown.hidden) == ((28, 10, 18), 0)


def test_room_that_is_left_goes_to_all_up_to_their_cap_before_one_has_more():
    kinds, rules = columns("text", "holders"), ColumnRules(narrow=("c0", "c1"))
    assert fit(kinds, [90, 90], 100, rules).widths == (54, 44)


def test_tight_makes_room_for_more_columns():
    kinds, wishes = columns("text", "text", "text"), [28, 28, 28]
    assert len(fit(kinds, wishes, 60, ColumnRules()).at) == 2
    assert len(fit(kinds, wishes, 60, ColumnRules(is_tight=True)).at) == 3


def test_a_shift_leaves_out_columns_after_the_first():
    assert fit(columns("count", "count", "count"), [9, 9, 9], 20, ColumnRules(), 1).at == (0, 2)


@pytest.mark.parametrize(("x", "at"), [(0, 0), (11, 0), (12, 2), (30, None)])
def test_a_column_is_found_by_the_place_of_a_click(x, at):
    shown = fit(columns("count", "count", "count"), [10, 10, 10], 23, ColumnRules(first=("c2",)))
    assert shown.column_under(x) == at


def test_a_column_would_like_to_be_as_wide_as_its_widest_text_or_its_name():
    assert natural(columns("text", "text"), [["a", "漢字漢字"], ["abcdef", ""]]) == [6, 8]


# ---- on the screen -------------------------------------------------------------------------------


def snapshot(
    table: WindowedTable, sheet_columns, rows, *, total=None, at_s=100.0
) -> DaemonSnapshot:
    """A picture that answers what the table asks now."""
    slot = table.asks()
    order = tuple(row.key for row in rows)
    data = TableData(
        slot,
        tuple(sheet_columns),
        order,
        {row.key: row for row in rows},
        len(rows) if total is None else total,
        len(rows) if total is None else total,
        at_s,
        1,
    )
    return DaemonSnapshot(0.0, None, {slot: data}, {}, {})


async def test_a_tree_is_indented_and_says_what_is_opened():
    app, _ = console(page="radix")
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(app, pilot)
        table = app.page.table()
        table.opened = (3,)
        rows = (TableRow("node:3", (0, "root", 100)), TableRow("node:4", (1, "chat", 40)))
        table.show(snapshot(table, TREE, rows))
        text = [text_of(line).rstrip() for line in table.lines]
        assert text[2].startswith("▸ ▼ root")
        assert text[3].startswith("    ▶ chat")


async def test_only_lines_that_changed_are_painted():
    app, feed = console(page="peers")
    async with app.run_test(size=(80, 24)) as pilot:
        feed.bring()
        await settle(app, pilot)
        table = app.page.table()
        painted = []
        table.refresh = lambda *regions, **_: painted.extend(region.y for region in regions)
        rows = [TableRow(f"peer:{n}", (f"p{n}", n)) for n in range(4)]
        kinds = (Column("name", "text"), Column("n", "count"))
        table.show(snapshot(table, kinds, rows))
        painted.clear()
        table.show(snapshot(table, kinds, rows))
        assert painted == []
        rows[2] = TableRow("peer:2", ("p2", 7))
        table.show(snapshot(table, kinds, rows))
        assert painted == [4]


async def test_rows_that_are_not_here_yet_are_dots_and_the_cursor_finds_its_row_when_they_come():
    app, feed = console(rows=1000, page="peers")
    async with app.run_test(size=(80, 24)) as pilot:
        feed.bring()
        await settle(app, pilot)
        await pilot.press("end")
        await settle(app, pilot)
        assert app.page.chosen() == ""
        assert any(line.startswith("▸ …") for line in lines_of(app))
        assert feed.hurried > 0
        feed.bring()
        await settle(app, pilot)
        assert app.page.chosen() == "peer:999"
        assert "of 1000" in lines_of(app)[2]


async def test_trouble_is_said_in_place_of_rows():
    app, _ = console(page="peers")
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(app, pilot)
        table = app.page.table()
        one = snapshot(table, (), ())
        slot = table.asks()
        data = msgspec.structs.replace(one.tables[slot], trouble="there is no table 'peers'")
        table.show(msgspec.structs.replace(one, tables={slot: data}))
        assert text_of(table.lines[-1]).strip() == "there is no table 'peers'"


async def test_fewer_rows_than_before_put_the_cursor_on_the_last_one():
    app, feed = console(page="peers")
    async with app.run_test(size=(80, 24)) as pilot:
        feed.bring()
        await settle(app, pilot)
        await pilot.press("end")
        feed.numbers["peers"] = [1, 2]
        for _ in range(2):
            feed.bring()
            await settle(app, pilot)
        assert app.page.chosen() == "peer:2"


async def test_columns_that_do_not_fit_are_counted_and_reached_to_the_right():
    app, _ = console(page="peers")
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(app, pilot)
        table = app.page.table()
        kinds = tuple(Column(f"column-{n:02}", "count") for n in range(20))
        table.show(snapshot(table, kinds, [TableRow("peer:1", tuple(range(20)))]))
        assert "columns hidden" in text_of(table.lines[0])
        assert "column-12" not in text_of(table.lines[1])
        await pilot.press(*["right"] * 12)
        assert "column-13" in text_of(table.lines[1])
        assert "column-00" in text_of(table.lines[1])


def test_a_table_asks_for_no_more_rows_than_the_wire_takes():
    table = WindowedTable("leases")
    assert table.asks() == Query("leases", first=0, limit=2)
