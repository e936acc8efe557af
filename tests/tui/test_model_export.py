"""A sheet as a file."""

from __future__ import annotations

import csv
import io

import msgspec
import pytest

from kvd.wire.console import Column, Holder, Query, TableRow
from tests.cli.admin_peer import HARMLESS, HOSTILE
from tui.model.export import export
from tui.model.tables import TableData

COLUMNS = (
    Column("id", "ref"),
    Column("owner", "text"),
    Column("held", "bytes"),
    Column("since", "since"),
    Column("deadline", "until"),
    Column("holders", "holders"),
)
NOW_S = 100.0


@pytest.fixture
def data():
    rows = (
        TableRow("lease:1", ("lease:1", HOSTILE, 2048, 97.5, None, ())),
        TableRow(
            "lease:2",
            (
                *("lease:2", '=cmd|"x"', 10, 90.0, 130.0),
                (Holder("engine-2", 69.0, "lease:2", "gone"),),
            ),
        ),
    )
    return TableData(
        slot=Query("leases"),
        columns=COLUMNS,
        order=tuple(row.key for row in rows),
        rows={row.key: row for row in rows},
        total=5,
        of=9,
        at_s=NOW_S,
        revision=3,
    )


def test_csv_has_figures_as_they_are_and_ages(data):
    lines = list(csv.reader(io.StringIO(export(data, "csv", NOW_S))))

    assert lines == [
        ["key", "id", "owner", "held", "since_age_s", "deadline_in_s", "holders"],
        ["lease:1", "lease:1", HARMLESS, "2048", "2.5", "", ""],
        ["lease:2", "lease:2", '\'=cmd|"x"', "10", "10.0", "30.0", "!engine-2 gone 31s"],
    ]


def test_json_has_holders_as_objects(data):
    made = msgspec.json.decode(export(data, "json", NOW_S))

    assert (made["view"], made["total"], made["of"]) == ("leases", 5, 9)
    assert made["rows"][0]["owner"] == HOSTILE
    assert made["rows"][1]["holders"] == [
        {"who": "engine-2", "ref": "lease:2", "state": "gone", "age_s": 31.0}
    ]


def test_text_is_what_a_wide_screen_shows(data):
    assert export(data, "text", NOW_S) == (
        "id       owner                         held  since  deadline  holders\n"
        f"lease:1  {HARMLESS}  2.00Ki   2.5s         -\n"
        'lease:2  =cmd|"x"                       10B    10s       30s  !engine-2 gone 31s\n'
        "3 more rows are not here\n"
    )


def test_only_tagged_rows_are_written_where_there_are_any(data):
    made = export(data, "csv", NOW_S, tagged={"lease:2"})

    assert [line.partition(",")[0] for line in made.splitlines()] == ["key", "lease:2"]


def test_a_figure_that_is_no_number_is_nothing_in_json(data):
    wrap_words = msgspec.structs.replace(
        data,
        rows={**data.rows, "lease:1": TableRow("lease:1", ("a", "b", float("nan"), 0.0, None, ()))},
    )

    assert msgspec.json.decode(export(wrap_words, "json", NOW_S))["rows"][0]["held"] is None
