"""The table of keys: every row means something somewhere, and nothing means two things at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tui.keys import NEEDS, PAGES, TABLE, here, markdown, meaning, names

ALL = frozenset(NEEDS) - {"frozen"}


def test_number_keys_are_the_pages_in_their_order():
    assert [meaning(str(at), "pools", ALL).action for at in range(1, 9)] == [
        f"page {page}" for page in PAGES
    ]


@pytest.mark.parametrize("key", TABLE, ids=lambda key: key.action)
def test_every_row_of_the_table_can_be_reached(key):
    pages = key.pages or PAGES
    states = (ALL, ALL | {"frozen"})
    assert any(
        meaning(name, page, state) is key for name in key.keys for page in pages for state in states
    )
    assert set(key.needs) <= set(NEEDS)
    assert set(key.pages) <= set(PAGES)


def test_a_key_of_a_page_means_something_else_on_another():
    assert meaning("l", "pools", ALL).action == "lens"
    assert meaning("l", "radix", ALL).action == "only-locked"
    assert meaning("l", "peers", ALL) is None


def test_arrows_step_through_time_when_frozen_and_move_when_not():
    assert meaning("left", "pools", ALL).action == "left"
    assert meaning("left", "pools", ALL | {"frozen"}).action == "step -1"
    assert meaning("end", "pools", ALL).action == "end"
    assert meaning("end", "pools", ALL | {"frozen"}).action == "live"


def test_without_write_no_key_changes_anything():
    changing = [key for key in TABLE if key.group == "change"]
    assert len(changing) == 4
    for page in PAGES:
        assert not set(here(page, ALL - {"write"})) & set(changing)


def test_keys_that_mean_nothing_are_not_among_those_here():
    shown = {key.action for key in here("events", frozenset())}
    assert {"follow", "help", "quit"} <= shown
    assert not {"sort", "open", "lens", "step 1"} & shown


def test_no_name_of_a_key_is_missing_from_the_readme_table():
    table = markdown()
    assert table.startswith("| key | what it does | where |\n|---|---|---|\n")
    assert len(table.splitlines()) == len(TABLE) + 2
    assert set("12345678:/?swzyTq") <= set(names())


def test_the_module_prints_the_table():
    done = subprocess.run(
        [sys.executable, "-m", "tui.keys"], capture_output=True, text=True, check=True
    )
    assert done.stdout == markdown() + "\n"


def test_what_is_asked_with_every_frame_is_worked_out_once():
    assert here("pools", ALL) is here("pools", frozenset(ALL))
    assert here("pools", ALL) is not here("pools", ALL - {"write"})
