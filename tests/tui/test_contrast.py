"""One panel is lit, and every word can be read in every theme, under the cursor too."""

from __future__ import annotations

import pytest
from textual.color import Color

from tests.tui.staged import MIDDLE, staged
from tui.screens import ALL
from tui.themes import THEMES, contrast, least_contrast

PAINTED = tuple(theme for theme in THEMES if not theme.startswith("ansi"))
"""Of the others the terminal has the colours."""
OVER = {
    "nothing": ("2", "enter", "r"),
    "dialog": ("2", "ctrl+f"),
    "bar": ("2", ":", "s"),
    "menu": ("2", "e", "enter", "r"),
    "keys": ("?",),
}
"""What lies over a page, by the keys that lead to it."""


def unread(app) -> list[str]:
    """Words on the screen that cannot be read, each with how little they stand out.

    Of a dialog those in its box: what is behind it is dimmed, as one is not to look there.
    """
    found = {}
    boxes = list(app.screen.query("ModalScreen > Vertical")) or [app.screen]
    area = boxes[0].region
    for y, strip in enumerate(app.screen._compositor.render_strips()):
        if not area.y <= y < area.bottom:
            continue
        for text, style, _ in strip.crop(area.x, area.right):
            if not any(map(str.isalnum, text)) or style is None or style.color is None:
                continue
            front, back = Color.from_rich_color(style.color), Color.from_rich_color(style.bgcolor)
            front = back.blend(front, 0.5) if style.dim else front
            if contrast(front, back) < least_contrast(app.theme) - 0.01:
                found[text.strip()] = f"{contrast(front, back):.1f} {front.hex} on {back.hex}"
    return [f"{how}: {text}" for text, how in found.items()]


@pytest.mark.parametrize("theme", PAINTED)
async def test_every_word_of_every_page_stands_out(theme):
    async with staged("overview", "leak", MIDDLE) as stage:
        stage.app.action_set_theme(theme)
        for page in ALL:
            await stage.app.action_go(page)
            await stage.frame()
            for keys in ((), ("down",), ("tab",)):
                await stage.press(*keys)
                assert unread(stage.app) == [], (theme, page, keys)
                rules = [line for line in stage.text.splitlines() if line.startswith("━")]
                assert len(rules) == 1, (page, keys, rules)  # what keys are about


@pytest.mark.parametrize("theme", PAINTED)
@pytest.mark.parametrize("over", OVER)
async def test_every_word_that_lies_over_a_page_stands_out(theme, over):
    async with staged("overview", "leak", MIDDLE) as stage:
        stage.app.action_set_theme(theme)
        await stage.press(*OVER[over])
        assert unread(stage.app) == []
