"""A terminal that is made smaller and larger: what is shown is of its present size."""

from __future__ import annotations

import re

import pytest

from tests.tui.feed import resize, vitals
from tests.tui.staged import LARGE, MIDDLE, SMALL, Stage, staged
from tui.draw.spans import text_of
from tui.model.mirror import LinkLive
from tui.screens import ALL
from tui.widgets.head import HeadStatus, head_line

TINY = (40, 12)


def without_rates(stage: Stage) -> str:
    """What is shown, but for figures that take two frames."""
    return stage.text.replace("0B/s", "   -")


@pytest.mark.parametrize("page", ALL)
async def test_a_page_looks_alike_whatever_size_it_had_before(page):
    async with staged(page, "leak", MIDDLE) as stage:
        at_once = without_rates(stage)
    async with staged(page, "leak", LARGE) as stage:
        for other in (TINY, SMALL, (80, 17), MIDDLE):
            await resize(stage.app, stage.pilot, *other)
            await stage.frame()
            await stage.frame()
        assert without_rates(stage) == at_once


@pytest.mark.parametrize("width", range(40, 140))
def test_what_the_head_says_is_whole_at_every_width(width):
    now = HeadStatus(LinkLive(0.0), 1.0, 4.0, clock="12:00:00")
    text = text_of(head_line(vitals(), now, width))
    assert len(text) == width
    assert "…" not in text
    assert text.endswith(" LIVE 4/s 12:00:00 ")


async def test_a_card_lies_over_the_page_once_there_is_no_room_beside_it():
    async with staged("engines", size=MIDDLE) as stage:
        await stage.press("enter")
        assert stage.app.card.region.x > 0
        await resize(stage.app, stage.pilot, *SMALL)
        assert stage.app.card.region.x == 0


async def test_a_table_that_was_not_asked_for_since_says_of_when_it_is():
    async with staged("peers", size=MIDDLE) as stage:
        await stage.press("1")
        await stage.pass_time(30.0)
        stage.link.down = "nobody answers"
        await stage.press("5")
        assert re.search(r" 1-2 of 2 · seen 30s ago .*━\n", stage.text)
        assert re.search(r"prefill1 .* 0\.\ds ", stage.text)  # heard: as of then
        stage.link.down = ""
        await stage.frame()
        assert "seen 30s ago" not in stage.text


async def test_what_is_short_of_room_drops_words_of_a_caption_and_not_its_title():
    async with staged("engines", size=TINY) as stage:
        assert "━ engines ━━━━━━━━━ 1-3 of 3 · by name ━" in stage.text
    async with staged("handoffs", size=TINY) as stage:
        assert "─ receive:8  room 8  ← prefill0" in stage.text
