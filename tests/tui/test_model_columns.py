"""Columns that are made of others: where they stand, and that rows which did not change stay."""

from __future__ import annotations

import math

from kvd.wire.console import Column, Query, TableRow
from tui.model.columns import ComputedColumns, NamedRow, named_row_of
from tui.model.tables import TableData

COLUMNS = (Column("a", "count"), Column("b", "text"))


def data(*rows: TableRow, columns=COLUMNS, at_s: float = 5.0) -> TableData:
    order = tuple(row.key for row in rows)
    known = {row.key: row for row in rows}
    return TableData(Query("x"), columns, order, known, len(rows), len(rows), at_s, 1)


def doubled() -> ComputedColumns:
    return ComputedColumns(
        (Column("twice", "count"),), lambda row: (2 * (row.number("a") or 0),), ("b", "twice")
    )


def test_new_columns_stand_where_they_are_wanted_and_the_others_after_them():
    dressed = doubled().extend(data(TableRow("x:1", (3, "three"))))
    assert [column.name for column in dressed.columns] == ["b", "twice", "a"]
    assert dressed.rows["x:1"].cells == ("three", 6, 3)
    assert (dressed.order, dressed.total, dressed.at_s) == (("x:1",), 1, 5.0)


def test_a_row_that_did_not_change_is_the_same_object():
    computed, one, two = doubled(), TableRow("x:1", (3, "")), TableRow("x:2", (4, ""))
    first = computed.extend(data(one, two))
    second = computed.extend(data(one, TableRow("x:2", (5, "")), at_s=6.0))
    assert second.rows["x:1"] is first.rows["x:1"]
    assert second.rows["x:2"].cells == ("", 10, 5)


def test_a_column_that_the_daemon_has_itself_is_the_daemons():
    columns = (*COLUMNS, Column("twice", "count"))
    dressed = doubled().extend(data(TableRow("x:1", (3, "", 7)), columns=columns))
    assert [column.name for column in dressed.columns] == ["b", "twice", "a"]
    assert dressed.rows["x:1"].cells == ("", 7, 3)


def test_a_table_that_is_not_there_stays_as_it_is():
    nothing = data(columns=())
    assert doubled().extend(nothing) is nothing


def test_facts_of_a_column_that_is_not_there_or_is_no_number_are_nothing():
    facts = named_row_of(data(TableRow("x:1", (math.nan, "three"))), "x:1")
    assert isinstance(facts, NamedRow)
    assert (facts.number("a"), facts.number("b"), facts.number("c")) == (None, None, None)
    assert (facts.text("b"), facts.text("a"), facts.text("c")) == ("three", "", "")
    assert named_row_of(data(), "x:1") is None
