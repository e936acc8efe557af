"""What an operator reads before something is changed, and what lies over it."""

from __future__ import annotations

import pytest

from kvd.text import counted
from kvd.wire.admin import Because, Mark, Report
from tests.tui.golden import text_of
from tests.tui.staged import staged
from tui.draw.spans import text_of as words_of
from tui.widgets.card import CardContent, card_lines
from tui.widgets.dialogs import report_lines


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 pages"), (1, "1 page"), (2, "2 pages"), (1000, "1000 pages")]
)
def test_a_figure_and_its_noun_agree(count, words):
    assert counted(count, "page") == words


def test_a_report_has_its_figures_in_words_and_says_what_they_mean():
    report = Report(0, {"receives": 1, "freed_pages": 24}, ("busy",), notes=("lease 7 waits",))
    lines = [words_of(line) for line in report_lines(report)]
    assert lines == [
        "           1  receive",
        "          24  freed pages",
        "",
        "which means",
        "- lease 7 waits",
        "",
        "refused, or in the way",
        "! busy",
    ]


async def test_what_was_said_in_passing_never_lies_over_a_question():
    async with staged("pools") as stage:
        await stage.press("ctrl+f", "escape")
        assert "flush: not done" in text_of(stage.app)
        await stage.press("ctrl+f")
        assert "flush: not done" not in text_of(stage.app)
        assert "y  do it" in text_of(stage.app)


async def test_what_was_said_in_passing_never_lies_over_the_bar():
    async with staged("pools") as stage:
        await stage.press("ctrl+f", "escape")
        await stage.press(":")
        assert "flush: not done" not in text_of(stage.app)


def test_a_card_says_a_moment_of_a_story_once():
    because = Because(
        0,
        "room 7: receiving",
        ("prompt 100 tokens", "3.0 s ago: queued"),
        marks=(Mark(3.0, "queued"),),
    )
    lines = [words_of(line).strip() for line in card_lines(CardContent("receive:7", because))]
    assert "prompt 100 tokens" in lines
    assert [line for line in lines if "queued" in line] == ["-3.00s queued"]
