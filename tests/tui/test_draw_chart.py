"""Charts and bars: what exists shows, and the figure stands beside the shape."""

from __future__ import annotations

import time

import pytest

from kvd.text import percent
from tui.draw.chart import Series, area, bar, chart, spark
from tui.draw.spans import Styled, line, text_of, width_of


def cleaned(value: float) -> str:
    return f"{value:g} B/s"


def texts(lines: list[tuple[Styled, ...]]) -> list[str]:
    return [text_of(one) for one in lines]


def test_an_area_fills_four_dots_a_line_and_two_values_a_column():
    assert texts(area([0, 1, 2, 3, 4, 5, 6, 8], 4, 2, 8)) == ["⠀⠀⢀⣼", "⢀⣴⣿⣿"]


def test_the_newest_value_is_at_the_right_and_what_is_older_falls_off():
    assert texts(area([8.0], 2, 1, 8)) == ["⠀⢸"]
    assert texts(area([8, 8, 8, 0, 0, 0, 8], 2, 1, 8)) == ["⠀⢸"]


def test_little_is_not_nothing_and_too_much_is_the_top():
    assert texts(area([0.001, 0, 900, -5], 2, 1, 8)) == ["⡀⡇"]


def test_an_area_of_nothing_is_blank_whatever_its_top():
    assert texts(area([0, None], 1, 2, 0)) == ["⠀", "⠀"]
    assert area([1], 0, 3, 1) == area([1], 3, 0, 1) == []


def test_the_style_of_an_area_says_how_near_the_top_it_is():
    styles = [one[0].style for one in area([8] * 20, 10, 10, 8)]
    assert styles == ["graph-high"] * 2 + ["graph-mid"] * 3 + ["graph-low"] * 5


def test_a_chart_says_the_newest_and_the_largest_value_that_it_shows():
    made = chart(Series("RX", (99, 0, 4, 2), cleaned), 34, 3)[0]
    assert text_of(made) == "RX 2 B/s ────── max 99 B/s in 4.0s"


def test_a_value_that_has_left_the_chart_is_no_longer_its_largest():
    head, *body = chart(Series("RX", (99, *[1] * 60), cleaned), 30, 3)
    assert text_of(head) == "RX 1 B/s ── max 1 B/s in 1m00s"
    assert texts(body) == ["⣿" * 30] * 2


def test_an_interval_that_nobody_knows_is_told_from_none():
    head, *body = chart(Series("RX", (None, None), cleaned), 24, 2)
    assert text_of(head) == "RX        no figures yet"
    assert body == [line("⠀" * 24, "dim")]
    assert (
        text_of(chart(Series("RX", (3, None), cleaned, 8.0), 24, 2)[0])
        == "RX - ── max 3 B/s in 16s"
    )


def test_a_chart_never_mixes_letters_and_braille_in_one_span():
    for span in sum(chart(Series("RX", range(50), cleaned), 30, 6), ()):
        kinds = {0x2800 <= ord(char) <= 0x28FF for char in span.text}
        assert len(kinds) == 1


def test_the_name_of_a_chart_cannot_steer_the_terminal():
    assert "\x1b" not in text_of(chart(Series("\x1b[m", [1], cleaned), 30, 2)[0])


def test_a_sparkline_has_a_step_for_each_value_and_a_dot_for_none():
    assert spark([None, 0, 0.01, 3, 5, 7], 7) == Styled(" ·▁▂▄▆█", "graph-high")
    assert spark([1, 2], 0).text == ""
    assert [spark([5, newest], 2).style for newest in (0, 2.4, 2.5, 3.9, 4)] == [
        "graph-low",
        "graph-low",
        "graph-mid",
        "graph-mid",
        "graph-high",
    ]
    assert spark([0, None], 2).style == "graph-low"


@pytest.mark.parametrize(
    ("part", "whole", "drawn"),
    [
        (0, 10, "░░░░░░░░░░   0%"),
        (1, 1000, "▏░░░░░░░░░  <1%"),
        (29, 100, "██▉░░░░░░░  29%"),
        (999, 1000, "█████████▉  99%"),
        (10, 10, "██████████ 100%"),
        (12, 10, "██████████ >all"),
        (3, 0, "░░░░░░░░░░    -"),
    ],
)
def test_a_bar_tells_nothing_little_nearly_all_and_all_apart(part, whole, drawn):
    assert text_of(bar(part, whole, 15)) == drawn


@pytest.mark.parametrize("width", range(9))
def test_a_narrow_bar_is_its_percentage(width):
    made = bar(29, 100, width)
    assert width_of(made) == width
    assert width < 3 or "29%" in text_of(made)


def test_a_share_in_percent_is_the_exact_one_rounded_down():
    assert [percent(part, 100) for part in (28.999, 29, 57, 58)] == ["28%", "29%", "57%", "58%"]


def test_a_wide_chart_costs_less_than_two_milliseconds():
    """In processor time, the best of a few: a busy machine only ever adds."""
    series = Series("RX", [abs(at % 37 - 18) for at in range(400)], cleaned)
    best_s = min(_cost_s(series) for _ in range(20))
    assert best_s < 0.002


def _cost_s(series: Series) -> float:
    before = time.process_time()
    chart(series, 180, 12)
    return time.process_time() - before
