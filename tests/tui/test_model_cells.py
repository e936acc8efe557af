"""Cells as text: by kind, in the width that there is, whatever a daemon sends."""

from __future__ import annotations

import math
import random

import pytest

from kvd.text import age, compact, compact_bytes
from kvd.wire.console import Holder
from tests.cli.admin_peer import HARMLESS, HOSTILE
from tui.draw.spans import columns
from tui.model.cells import FIGURES, CellText, holder, show

NOW_S = 1000.0
KINDS = sorted(FIGURES | {"text", "state", "ref", "holders", "of-a-later-version"})


@pytest.mark.parametrize(
    ("cell", "kind", "text", "style"),
    [
        ("engine-1", "text", "engine-1", "plain"),
        (HOSTILE, "text", HARMLESS, "plain"),
        ("lease:7", "ref", "lease:7", "key"),
        ("held", "state", "held", "plain"),
        ("alive", "state", "alive", "ok"),
        ("lingering", "state", "lingering", "warn"),
        ("quarantined", "state", "quarantined", "bad"),
        ("gone 3 s", "state", "gone 3 s", "bad"),
        (1234567, "count", "1234567", "plain"),
        (128, "pages", "128", "plain"),
        (4_100_000, "tokens", "4.10M", "plain"),
        (1024, "tokens", "1024", "plain"),
        (2 * 2**20, "bytes", "2.00Mi", "plain"),
        (0.834, "share", "83%", "plain"),
        (0.314, "ms", "0.31ms", "plain"),
        (42.0, "ms", "42ms", "plain"),
        (0.25, "seconds", "0.2s", "plain"),
        (NOW_S - 2.1, "since", "2.1s", "plain"),
        (NOW_S - 31.2, "since", "31s", "plain"),
        (NOW_S - 185, "since", "3m05s", "plain"),
        (NOW_S + 12, "until", "12s", "plain"),
        (NOW_S + 0.4, "until", "0.4s", "warn"),
        (NOW_S - 3, "until", "-3.0s", "bad"),
        (None, "bytes", "-", "dim"),
        (math.nan, "since", "?", "warn"),
        (math.inf, "bytes", "?", "warn"),
        (3, "of-a-later-version", "3", "plain"),
    ],
)
def test_a_cell_is_shown_by_its_kind(cell, kind, text, style):
    assert show(cell, kind, NOW_S, 40) == CellText(text, style)


def test_holders_are_told_by_name_and_age_and_the_gone_ones_stand_out():
    holders = (
        Holder("engine-1", NOW_S - 2.1, "lease:1"),
        Holder("engine-2", NOW_S - 31, "lease:2", "gone"),
    )

    assert show(holders, "holders", NOW_S, 60) == CellText(
        "engine-1 2.1s, !engine-2 gone 31s", "bad"
    )
    assert show((), "holders", NOW_S, 60) == CellText("", "plain")


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (40, "one 1.0s, two 1.0s, three 1.0s"),
        (24, "one 1.0s, two 1.0s, +1"),
        (20, "one 1.0s, +2"),
        (9, "one 1… +2"),
        (0, ""),
    ],
)
def test_holders_that_do_not_fit_are_counted(width, text):
    holders = tuple(Holder(name, NOW_S - 1, "lease:1") for name in ("one", "two", "three"))

    assert show(holders, "holders", NOW_S, width).text == text


@pytest.mark.parametrize("state", ["moving", "pinned"])
def test_a_holder_that_is_at_work_is_marked_by_nothing(state):
    assert holder(Holder("kvd: 9 pages", NOW_S - 2, "lease:1", state), NOW_S) == (
        f"kvd: 9 pages {state} 2.0s"
    )


def test_the_name_of_a_holder_is_as_hostile_as_any():
    holders = (Holder(HOSTILE, NOW_S - 1, "lease:1", "\x1b[2J"),)

    assert show(holders, "holders", NOW_S, 400).text == f"!{HARMLESS} \\x1b[2J 1.0s"


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [("prefill-0", 9, "prefill-0"), ("prefill-0", 5, "pref…"), ("日本語", 5, "日本…")],
)
def test_text_is_cut_by_the_columns_that_it_takes(text, width, shown):
    assert show(text, "text", NOW_S, width).text == shown


def test_a_wide_character_is_never_cut_in_half():
    assert columns(show("日本語", "text", NOW_S, 4).text) <= 4


def test_a_count_that_does_not_fit_is_told_in_short():
    assert show(123_456_789, "pages", NOW_S, 6).text == "123M"


@pytest.mark.parametrize(
    ("value", "text"),
    [(99_999, "99999"), (100_000, "100k"), (999_600, "1.00M"), (12_345_678, "12.3M"), (-5, "-5")],
)
def test_counts_in_short(value, text):
    assert compact(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0B"), (1023, "1023B"), (1024, "1.00Ki"), (2**64, "16.0Ei")]
)
def test_sizes_in_short(value, text):
    assert compact_bytes(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-0.01, "0.0s"),
        (9.94, "9.9s"),
        (9.97, "10s"),
        (59.7, "1m00s"),
        (7260, "2h01m"),
        (-2, "-2.0s"),
    ],
)
def test_ages_stay_calm(seconds, text):
    assert age(seconds) == text


def test_figures_stand_at_the_right():
    assert [kind for kind in KINDS if kind not in FIGURES] == [
        "holders",
        "of-a-later-version",
        "ref",
        "state",
        "text",
    ]


def test_any_cell_fits_any_width_and_steers_nothing():
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    texts = ["", HOSTILE, "日本" * 9, "e\u0301" * 9, "\x00", "a b"]
    figures = [0, -1, 2**64 - 1, -(2**63), 0.0, 1e308, -1e308, math.nan, math.inf, -math.inf, 1e-9]

    def holders():
        return tuple(
            Holder(rng.choice(texts), rng.choice(figures), "", rng.choice(texts))
            for _ in range(rng.randrange(4))
        )

    for _ in range(3000):
        cell = rng.choice([None, rng.choice(texts), rng.choice(figures), holders()])
        width = rng.randrange(30)
        shown = show(cell, rng.choice(KINDS), rng.choice(figures), width)
        assert columns(shown.text) <= width, f"seed {seed}: {cell!r}"
        assert shown.text.isprintable(), f"seed {seed}: {cell!r}"


@pytest.mark.parametrize(
    ("value", "words"), [(4, "4"), (4.0, "4"), (61.9983, "62.0"), (0.04567, "0.0457")]
)
def test_a_count_that_is_no_whole_number_has_no_more_digits_than_it_means(value, words):
    assert show(value, "count", 0.0, 400).text == words
