"""Filtering and sorting here against the daemon's own: the same rows in the same order."""

from __future__ import annotations

import random

import pytest

from kvd.console.view import View
from kvd.core.inspect.schema import StateField
from kvd.wire.console import Filter, Holder, Query, Table, TableRow
from tests.console.looked import in_one
from tui.model.tables import derive, fold

KINDS = {"ref": "ref", "state": "state", "held": "pages", "since": "since", "until": "until"}
KINDS |= {"share": "share", "holders": "holders", "room": "count"}
NAMES = tuple(KINDS)
NOW_S = 1000.0


class Now:
    """As much of a context as a view of rows needs."""

    now_s = NOW_S
    node = None


def view_of(rows):
    fields = [
        StateField(name, kind, lambda _, row, at=at: row.cells[at])
        for at, (name, kind) in enumerate(KINDS.items())
    ]
    return View("rows", fields, objects=lambda *_: rows, key=lambda row: row.key)


def any_cell(rng, kind):
    if rng.random() < 0.2:
        return None
    match kind:
        case "ref" | "state":
            return rng.choice(["lease:7", "Held", "held", "gone", ""])
        case "since" | "until":
            return NOW_S + rng.choice([-60.0, -5.0, -0.5, 0.5, 5.0])
        case "holders":
            holder = Holder(rng.choice(["engine-1", "Engine-2"]), 0.0, "lease:7", "gone")
            return (holder,) * rng.randrange(3)
        case "share":
            return rng.random()
        case _:
            return rng.randrange(6)


def any_filter(rng):
    test = rng.choice(["has", "has-not", "is", "is-not", "over", "under", "of-a-later-version"])
    value = rng.choice(["held", "7", "ENGINE", "gone", "", 3.0, 0.5, 5.0, -5.0])
    return Filter(rng.choice(["", *NAMES]), test, value)


@pytest.mark.parametrize("_", range(4))
def test_a_window_made_here_is_the_one_that_the_daemon_would_make(_):
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for _ in range(250):
        rows = [
            TableRow(f"row:{at}", tuple(any_cell(rng, kind) for kind in KINDS.values()))
            for at in range(rng.randrange(12))
        ]
        view = view_of(rows)
        slot = Query("rows", limit=50)
        whole = Table(
            *("rows", 1, 0, NOW_S, len(rows), len(rows)),
            view.columns,
            tuple(row.key for row in rows),
            tuple(rows),
        )
        query = Query(
            "rows",
            first=rng.randrange(4),
            limit=rng.randrange(12),
            sort=rng.choice(["", *NAMES, *(f"-{name}" for name in NAMES)]),
            filters=tuple(any_filter(rng) for _ in range(rng.randrange(3))),
        )

        window = in_one(view.look(Now(), query))
        data = derive([fold(None, slot, whole)], query, NOW_S)

        assert data.listed() == window.rows, f"seed {seed}: {query}"
        assert (data.total, data.of) == (window.total, window.of), f"seed {seed}: {query}"
