"""Lines of spans: they take the columns that they are given, and cannot steer a terminal."""

from __future__ import annotations

import pytest

from tui.draw.spans import (
    STYLES,
    Styled,
    TextBlock,
    cleaned,
    columns,
    cut,
    fit,
    headed,
    left,
    line,
    merged,
    right,
    side_by_side,
    spread,
    text_of,
    width_of,
    wrapped,
)

WIDE = "漢字"
"""Four columns."""


def test_a_daemons_text_cannot_steer_the_terminal():
    assert cleaned("\x1b[2Jq\u202e") == Styled("\\x1b[2Jq\\u202e", "plain")


@pytest.mark.parametrize(
    ("text", "width", "is_cut_to"),
    [
        ("abcdef", 6, "abcdef"),
        ("abcdef", 5, "abcd…"),
        ("abcdef", 1, "…"),
        ("abcdef", 0, ""),
        ("abcdef", -3, ""),
        (WIDE + "x", 5, WIDE + "x"),
        (WIDE + "x", 4, "漢 …"),
        (WIDE + "x", 3, "漢…"),
    ],
)
def test_text_is_cut_to_the_columns_that_a_terminal_gives_it(text, width, is_cut_to):
    assert cut(text, width) == is_cut_to


def test_text_stands_at_the_left_and_figures_at_the_right():
    assert (left(WIDE, 6), right("17", 6), left("abcdefg", 4)) == ("漢字  ", "    17", "abc…")


def test_a_line_that_fits_is_padded_in_the_style_asked_for():
    assert fit((Styled("ab", "bad"),), 4, "dim") == (Styled("ab", "bad"), Styled("  ", "dim"))


def test_a_line_that_just_fits_is_left_as_it_is():
    assert fit((Styled("ab", "bad"), Styled("cd"), Styled("")), 4) == (
        Styled("ab", "bad"),
        Styled("cd"),
    )


def test_a_line_that_is_too_long_ends_in_an_ellipsis():
    assert fit((Styled("ab", "bad"), Styled("cdef")), 4) == (Styled("ab", "bad"), Styled("c…"))
    assert fit((Styled("abcd", "bad"), Styled("ef")), 4) == (Styled("abc…", "bad"),)


@pytest.mark.parametrize("width", range(12))
def test_a_line_takes_exactly_its_columns_at_any_width(width):
    assert width_of(fit((Styled("a" + WIDE, "ok"), Styled(WIDE + "b")), width)) == width


def test_equal_neighbours_become_one_span():
    spans = (Styled("a"), Styled(""), Styled("b"), Styled("c", "bad"), Styled("d", "bad", "free"))
    assert merged(spans) == (Styled("ab"), Styled("c", "bad"), Styled("d", "bad", "free"))


def test_blocks_stand_side_by_side_and_the_shorter_ends_in_blanks():
    made = side_by_side(
        [TextBlock([line("one"), line("two")], 5), TextBlock([line("x", "bad")], 2)], gap=2
    )

    assert made == [
        (Styled("one    "), Styled("x", "bad"), Styled(" ")),
        (Styled("two" + " " * 6),),
    ]


def test_no_blocks_are_no_lines():
    assert side_by_side([]) == []


def test_what_stands_at_the_right_stays_when_there_is_no_room():
    ends = (line("a long name"), line("max 9"))
    assert text_of(spread(*ends, 20)) == "a long name    max 9"
    assert text_of(spread(*ends, 22, Styled("─"))) == "a long name ──── max 9"
    assert text_of(spread(*ends, 19, Styled("─"))) == "a long name ─ max 9"
    assert text_of(spread(*ends, 18, Styled("─"))) == "a long name  max 9"
    assert text_of(spread(*ends, 17, Styled("─"))) == "a long name max 9"
    assert text_of(spread(*ends, 12)) == "a lon… max 9"
    assert text_of(spread(*ends, 5)) == "max 9"
    assert text_of(spread(*ends, 4)) == "max…"


def test_columns_are_those_of_the_terminal_and_not_characters():
    assert [columns(text) for text in ("abc", WIDE, "▀⣿█")] == [3, 4, 3]


def test_styles_are_named_once_each():
    assert len(set(STYLES)) == len(STYLES)


def test_things_are_wrapped_where_the_next_one_does_not_fit():
    made = wrapped([line("one"), line("two", "bad"), line("three")], 9)

    assert made == [
        (Styled("one  "), Styled("two", "bad"), Styled(" ")),
        (Styled("three    "),),
    ]
    assert [text_of(one) for one in wrapped([line("one"), line("two")], 8)] == ["one  two"]
    assert wrapped([], 9) == []


def test_a_thing_too_wide_for_any_line_is_cut():
    assert [text_of(one) for one in wrapped([line("abcdefgh"), line("x")], 5)] == ["abcd…", "x    "]


def test_a_title_stands_in_a_rule_as_wide_as_there_is_room():
    assert text_of(headed((Styled("peer"),), 12)) == "─ peer ─────"
    assert text_of(headed((Styled("a long name"),), 8)) == "─ a lon…"
