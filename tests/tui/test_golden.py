"""Pictures that are kept: they are the same in every process, and a difference can be read."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from textual.app import App
from textual.widgets import Static

from tests.tui.golden import picture_of, same_picture, same_text, settled, text_of

if TYPE_CHECKING:
    from pathlib import Path

    from textual.app import ComposeResult

OTHER_PROCESS = """
import asyncio
from tests.tui.test_golden import shown
print(asyncio.run(shown()), end="")
"""


class Poster(App[object]):
    """One line of text."""

    def __init__(self, text: str, color: str = "white") -> None:
        super().__init__()
        self.text, self.color = text, color

    def compose(self) -> ComposeResult:
        poster = Static(self.text, markup=False)
        poster.styles.color = self.color
        yield poster


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Whoever runs the tests wants others written anew, perhaps: not these."""
    monkeypatch.delenv("GOLDEN", raising=False)
    return monkeypatch


async def keep(poster: Poster, where: Path, unset: pytest.MonkeyPatch) -> None:
    unset.setenv("GOLDEN", "update")
    async with poster.run_test(size=(20, 4)) as pilot:
        await settled(pilot)
        same_picture(poster, "poster", where)
    unset.delenv("GOLDEN")


async def test_what_is_kept_is_what_is_shown(tmp_path, unset):
    await keep(Poster("free 12"), tmp_path / "new", unset)
    assert (tmp_path / "new" / "poster.txt").read_text("utf-8") == "free 12\n\n\n\n"
    app = Poster("free 12")
    async with app.run_test(size=(20, 4)) as pilot:
        await settled(pilot)
        same_picture(app, "poster", tmp_path / "new")


async def test_a_difference_shows_the_lines_that_differ(tmp_path, unset):
    await keep(Poster("free 12"), tmp_path, unset)
    app = Poster("free 13")
    async with app.run_test(size=(20, 4)) as pilot:
        await settled(pilot)
        with pytest.raises(AssertionError) as failed:
            same_text(app, "poster", tmp_path)
    assert "-free 12\n+free 13" in str(failed.value)


async def test_another_colour_is_another_picture_of_the_same_text(tmp_path, unset):
    await keep(Poster("free 12"), tmp_path, unset)
    app = Poster("free 12", "red")
    async with app.run_test(size=(20, 4)) as pilot:
        await settled(pilot)
        same_text(app, "poster", tmp_path)
        with pytest.raises(AssertionError, match=r"poster\.svg is not what is shown"):
            same_picture(app, "poster", tmp_path)


async def test_a_picture_that_is_not_kept_yet_is_a_failure_that_shows_it(tmp_path, unset):
    app = Poster("free 12")
    async with app.run_test(size=(20, 4)) as pilot:
        await settled(pilot)
        with pytest.raises(AssertionError, match=r"no none\.txt is kept(.|\n)*free 12"):
            same_text(app, "none", tmp_path)


async def shown() -> str:
    app = Poster("free 12")
    async with app.run_test(size=(20, 4)) as pilot:
        await settled(pilot)
        assert text_of(app).startswith("free 12\n")
        return picture_of(app)


def test_a_picture_is_the_same_in_every_process(pytestconfig):
    there = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout == asyncio.run(shown())
