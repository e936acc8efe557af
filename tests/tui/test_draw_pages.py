"""The page map: which cell a character shows, and that nothing is told by colour alone."""

from __future__ import annotations

import random
import time

import msgspec
import pytest

from kvd.wire.console import Level, PageMap
from tui.draw.page_map import (
    Grid,
    MapWindow,
    cell_of,
    draw,
    pages_of,
    placed,
    styles,
    told,
    whole,
)
from tui.draw.spans import Line, Styled, text_of, width_of

LEVELS = (
    Level(".", "free", 40_000),
    Level("c", "cached", 1_015_808),
    Level("H", "held", 7),
    Level("!", "nobody", 0),
)


def page_map(cells: bytes, **more: object) -> PageMap:
    one = PageMap(
        "kv", "state", 1, 0.0, 0.0, len(cells) * 3, 65_536, 0, 3, LEVELS, cells
    )  # fmt: skip
    return msgspec.structs.replace(one, **more)


def texts(lines: list[Line]) -> list[str]:
    return [text_of(one) for one in lines]


def test_a_character_is_two_cells_one_over_the_other():
    shown = page_map(bytes([0, 1, 2, 3]))
    assert draw(shown, Grid(2, 1)) == [
        (Styled("▀", "free", "held"), Styled("▀", "cached", "nobody"))
    ]


def test_a_wide_run_of_one_level_begins_with_its_letter():
    row = bytes([1] * 4 + [2] * 3)
    assert draw(page_map(row + row), Grid(7, 1)) == [
        (
            Styled("c", "label", "cached"),
            Styled("▀▀▀", "cached", "cached"),
            Styled("▀▀▀", "held", "held"),
        )
    ]


def test_without_colour_a_character_is_the_letter_of_one_cell():
    shown = page_map(bytes([0, 0, 1, 2, 3, 3]))
    assert draw(shown, Grid(3, 2, "letters")) == [
        (Styled("..", "free"), Styled("c", "cached")),
        (Styled("H", "held"), Styled("!!", "nobody")),
    ]


@pytest.mark.parametrize("shape", ["blocks", "letters"])
def test_a_map_fills_its_grid_however_many_cells_came(shape):
    for cells in (0, 1, 7, 40, 500):
        made = draw(page_map(bytes(cells)), Grid(8, 4, shape))
        assert [width_of(one) for one in made] == [8] * 4


def test_behind_the_last_page_there_is_nothing():
    assert draw(page_map(bytes([2])), Grid(3, 1)) == [(Styled("▀", "held"), Styled("  "))]
    assert draw(page_map(bytes([2])), Grid(3, 1, "letters")) == [
        (Styled("H", "held"), Styled("  "))
    ]


def test_lit_cells_show_without_colour_and_which_half_is_lit():
    shown = page_map(bytes([0, 1, 2, 0, 1, 2]), lit=(0, 4, 2, 5))
    assert draw(shown, Grid(3, 1)) == [
        (Styled("▔", "lit", "free"), Styled("▁", "lit", "cached"), Styled("■", "lit", "held"))
    ]
    assert texts(draw(shown, Grid(3, 2, "letters"))) == ["■c■", ".■■"]


@pytest.mark.parametrize(("cursor", "drawn"), [(1, "▔▲■"), (4, "▔▼■"), (0, "▲▀■"), (5, "▔▀▼")])
def test_the_cursor_shows_without_colour_and_comes_before_what_is_lit(cursor, drawn):
    shown = page_map(bytes([0, 1, 2, 0, 0, 2]), lit=(0, 2, 5))
    assert texts(draw(shown, Grid(3, 1), cursor)) == [drawn]


def test_the_cursor_among_letters_is_a_shape():
    assert texts(draw(page_map(bytes(4)), Grid(2, 2, "letters"), 3)) == ["..", ".◆"]


def test_marks_outside_the_grid_are_left_out():
    shown = page_map(bytes(4), lit=(900, -1))
    assert texts(draw(shown, Grid(2, 1), 77)) == ["▀▀"]


def test_a_letter_that_is_not_one_column_wide_cannot_shift_the_map():
    levels = (Level("漢", "wide", 1), Level("", "none", 1), Level("\x1b", "esc", 1))
    shown = page_map(bytes([0, 1, 2]), levels=levels)
    assert texts(draw(shown, Grid(3, 1, "letters"))) == ["***"]


def test_a_level_that_nobody_has_explained_is_blank():
    shown = page_map(bytes([4, 9]))
    assert texts(draw(shown, Grid(2, 1))) == texts(draw(shown, Grid(2, 1, "letters"))) == ["  "]
    assert texts(draw(shown, Grid(2, 1, "letters"), 0)) == ["◆ "]
    assert text_of(told(shown, 0)) == "pages 0 to 2"


def test_the_levels_of_a_graded_lens_go_from_one_end_of_the_ramp_to_the_other():
    levels = (Level(".", "free", 1), *[Level("ABCD"[at], f"{at} s", 1) for at in range(4)])
    graded = page_map(b"", lens="age", levels=levels)
    assert styles(graded) == ("free", "ramp-0", "ramp-2", "ramp-4", "ramp-7")
    owners = page_map(b"", lens="owner", levels=levels)
    assert styles(owners) == ("free", "hue-0", "hue-1", "hue-2", "hue-3")


def test_an_owner_who_calls_himself_free_does_not_look_so():
    names = ("free", "cache", "others", "cache", "nobody", "free", "nobody")
    levels = tuple(Level(str(at), name, 1) for at, name in enumerate(names))
    assert styles(page_map(b"", lens="owner", levels=levels)) == (
        "free",
        "cached",
        "dim",
        "hue-2",
        "hue-3",
        "hue-4",
        "nobody",
    )


def test_more_owners_than_hues_still_have_a_style_each():
    levels = tuple(Level(chr(65 + at), f"o{at}", 1) for at in range(20))
    assert len(styles(page_map(b"", lens="owner", levels=levels))) == 20


def test_a_cell_is_told_in_words():
    shown = page_map(bytes([0, 2]), lit=(1,), total_pages=5)
    assert text_of(told(shown, 0)) == "pages 0 to 2  . free at worst"
    assert text_of(told(shown, 1)) == "pages 3 to 4  H held at worst  ■ lit"
    assert text_of(told(shown, 2)) == "no page here"
    one = page_map(bytes([0, 2]), pages_each=1)
    assert text_of(told(one, 1)) == "page 1  H held"


# ---- from the screen to pages and back -------------------------------------------------------


@pytest.mark.parametrize("shape", ["blocks", "letters"])
def test_a_character_and_its_cell_find_each_other(shape):
    grid = Grid(7, 3, shape)
    for row in range(3):
        for column in range(7):
            cell = grid.cell_at(row, column)
            assert cell is not None
            assert (cell // grid.width // grid.each, cell % grid.width) == (row, column)
    assert {cell // grid.width // grid.each for cell in range(grid.cells)} == {0, 1, 2}


def test_outside_of_the_map_there_is_no_cell():
    grid = Grid(7, 3)
    assert [grid.cell_at(*at) for at in ((-1, 0), (0, -1), (3, 0), (0, 7))] == [None] * 4


def test_a_cell_and_a_page_find_each_other():
    shown = page_map(bytes(10), first_page=6, total_pages=34)
    assert pages_of(shown, 2) == range(12, 15)
    assert pages_of(shown, 9) == range(33, 34)
    assert pages_of(shown, 10) == range(34, 34)
    assert [cell_of(shown, page) for page in (5, 6, 14, 33, 34)] == [None, 0, 2, 9, None]
    few = page_map(bytes(3), total_pages=34)
    assert [cell_of(few, page) for page in (8, 9)] == [2, None]
    assert text_of(told(few, 3)) == "no page here"


def test_arrows_move_by_a_cell_and_stay_inside():
    grid = Grid(4, 2)
    assert grid.moved(5, rows=1, cells=14) == 9
    assert grid.moved(5, columns=-1, cells=14) == 4
    assert grid.moved(4, columns=-1, cells=14) == 4
    assert grid.moved(2, rows=-1, cells=14) == 2
    assert grid.moved(10, rows=1, cells=14) == 10
    assert grid.moved(13, columns=1, cells=14) == 13
    assert grid.moved(3, columns=1, cells=14) == 3
    assert grid.moved(4, rows=-1, cells=14) == 0
    assert grid.moved(3, columns=9, cells=0) == 0


def test_all_pages_fit_into_the_cells_that_there_are():
    assert whole(1_015_808, 16_384) == MapWindow(0, 62)
    assert whole(10, 16_384) == MapWindow(0, 1)


def test_a_window_does_not_look_past_the_last_page():
    assert placed(99_999, 10, 100_000, 1000) == MapWindow(90_000, 10)
    assert placed(-5, 10, 100_000, 1000) == MapWindow(0, 10)


# ---- the price -------------------------------------------------------------------------------


def test_a_large_map_is_drawn_within_its_share_of_a_frame():
    """In processor time, the best of a few: a busy machine only ever adds."""
    chance = random.Random(7)
    cells = b"".join(
        bytes([chance.choice((0, 1, 1, 2))]) * chance.randrange(120) for _ in range(400)
    )
    assert len(cells) > 20_000
    best_s = min(_cost_s(page_map(cells[:20_000], lit=(5, 77, 1000))) for _ in range(10))
    assert best_s < 0.010


def _cost_s(shown: PageMap) -> float:
    before = time.process_time()
    draw(shown, Grid(200, 50), 4040)
    return time.process_time() - before
