"""What an operator types to see less, and what is said where it cannot be read."""

from __future__ import annotations

import pytest

from kvd.filters import SyntaxFlaw, parse, row_passes
from kvd.wire.console import Column, Filter, TableRow

COLUMNS = (
    Column("state", "state"),
    Column("owner", "text"),
    Column("pages", "pages"),
    Column("room", "count"),
    Column("since", "since"),
    Column("deadline", "until"),
    Column("moved", "bytes"),
    Column("done", "share"),
    Column("rtt_ms", "ms"),
    Column("held_by", "holders"),
    Column("startled", "text"),
)


@pytest.mark.parametrize(
    ("text", "filters"),
    [
        ("", ()),
        ("   ", ()),
        ("state:held", (Filter("state", "has", "held"),)),
        ("!state:held", (Filter("state", "has-not", "held"),)),
        ("owner:eng*", (Filter("owner", "has", "eng"),)),
        ("own=engine-1", (Filter("owner", "is", "engine-1"),)),
        ("owner!=engine-1", (Filter("owner", "is-not", "engine-1"),)),
        ("!owner!=engine-1", (Filter("owner", "is", "engine-1"),)),
        ('owner:"two words"', (Filter("owner", "has", "two words"),)),
        ('"two words"', (Filter("", "has", "two words"),)),
        ("lingering", (Filter("", "has", "lingering"),)),
        ("!lingering", (Filter("", "has-not", "lingering"),)),
        ("room=12", (Filter("room", "is", 12.0),)),
        ("!room=12", (Filter("room", "is-not", 12.0),)),
        ("room:12", (Filter("room", "has", "12"),)),
        ("lease:7", (Filter("", "has", "lease:7"),)),
        ("age>5s", (Filter("since", "over", 5.0),)),
        ("age<2m", (Filter("since", "under", 120.0),)),
        ("left<1.5", (Filter("deadline", "under", 1.5),)),
        ("since>1h", (Filter("since", "over", 3600.0),)),
        ("moved>10MiB", (Filter("moved", "over", 10 * 2.0**20),)),
        ("moved>4k", (Filter("moved", "over", 4096.0),)),
        ("pages>4k", (Filter("pages", "over", 4000.0),)),
        ("done<80%", (Filter("done", "under", 0.8),)),
        ("rtt_ms>5", (Filter("rtt_ms", "over", 5.0),)),
        ("rtt_ms>1s", (Filter("rtt_ms", "over", 1000.0),)),
        ("held_by>1", (Filter("held_by", "over", 1.0),)),
        ("held_by:eng", (Filter("held_by", "has", "eng"),)),
        (
            "state:held  age>5s x",
            (Filter("state", "has", "held"), Filter("since", "over", 5.0), Filter("", "has", "x")),
        ),
    ],
)
def test_a_filter_is_read(text, filters):
    assert parse(text, COLUMNS) == filters


@pytest.mark.parametrize(
    ("text", "passing"),
    [
        ("pages>=10", [10, 11]),
        ("pages>10", [11]),
        ("pages<=10", [9, 10]),
        ("pages<10", [9]),
        ("!pages>=10", [9]),
        ("!pages<10", [10, 11]),
        ("!pages>10", [9, 10]),
        ("pages!=10", [9, 11]),
    ],
)
def test_both_ends_are_where_they_were_asked_for(text, passing):
    """On the wire there is only over and under."""
    [condition] = parse(text, COLUMNS)
    columns = (COLUMNS[2],)

    found = [n for n in (9, 10, 11) if row_passes(condition, TableRow("x", (n,)), columns, 0.0)]

    assert found == passing


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        (
            "owner:x nix:y",
            SyntaxFlaw(
                "there is no column 'nix': state owner pages room since deadline moved done "
                "rtt_ms held_by startled",
                8,
            ),
        ),
        ("sta:held", SyntaxFlaw("'sta' may be state or startled", 0)),
        ("state:", SyntaxFlaw("expected a value after state:", 6)),
        ("a !", SyntaxFlaw("expected a word", 3)),
        ("age>soon", SyntaxFlaw("expected a number: since>5s", 4)),
        ("moved>5s", SyntaxFlaw("expected a number: moved>10MiB", 6)),
        ("pages>1e999", SyntaxFlaw("expected a number: pages>10", 6)),
        ("room=many", SyntaxFlaw("room is a number: room=10", 5)),
        ("owner>3", SyntaxFlaw("owner is text: owner:3 or owner=3", 5)),
        ('owner:"two', SyntaxFlaw('a " without its end, or in the middle of a word', 6)),
        ('x"y"', SyntaxFlaw('a " without its end, or in the middle of a word', 1)),
        ("x" * 300, SyntaxFlaw("a text of 300 characters, at most 256 are looked for", 0)),
        ("a " * 17, SyntaxFlaw("17 conditions, at most 16 are asked for", 0)),
    ],
)
def test_a_flaw_says_what_and_where(text, flaw):
    assert parse(text, COLUMNS) == flaw
