"""The keys: each means one thing on a page, and those of the README are there."""

from __future__ import annotations

import pytest

from tests.tui.opened import opened
from tui.app import KvdTui
from tui.model.commands import FACES, PAGES
from tui.screens import ALL
from tui.screens.page import Page


def bindings_of(owner):
    """Every binding of a page or of the console, by its key."""
    return owner._merge_bindings().key_to_bindings


async def active(page, *keys, **options):
    """What keys mean on a page, after some were pressed, by their key."""
    app, _ = opened("empty", page=page, **options)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press(*keys)
        await pilot.pause()
        found = app.screen.active_bindings
        return {key: one.binding.action for key, one in found.items()}


def test_number_keys_are_the_pages_in_their_order():
    found = bindings_of(Page)
    assert tuple(ALL) == (*PAGES, *FACES)
    assert [found[str(at)][0].action for at in range(1, len(PAGES) + 1)] == [
        f"app.go({page!r})" for page in PAGES
    ]


@pytest.mark.parametrize("page", ALL)
def test_a_key_means_one_thing_on_a_page(page):
    everywhere = bindings_of(KvdTui)
    for key, found in bindings_of(ALL[page]).items():
        assert key not in everywhere
        assert len(found) == 1


@pytest.mark.parametrize("page", ALL)
def test_every_key_says_what_it_does(page):
    found = [*bindings_of(ALL[page]).values(), *bindings_of(KvdTui).values()]
    assert all(one.description for several in found for one in several)


async def test_a_key_of_a_page_means_something_else_on_another():
    assert (await active("pools"))["l"] == "lens"
    assert (await active("radix"))["l"] == "nodes('locked')"
    assert "l" not in await active("peers")


@pytest.mark.parametrize("page", ALL)
async def test_without_write_no_key_changes_anything(page):
    writing = {key for key, action in (await active(page)).items() if "change(" in action}
    reading = await active(page, readonly=True)
    own = bindings_of(ALL[page])
    assert writing <= {key for key, found in own.items() if "change(" in found[0].action}
    assert not [action for action in reading.values() if "change(" in action]


async def test_keys_that_mean_nothing_are_not_among_those_here():
    shown = await active("events")
    assert {"f", "question_mark", "q"} <= set(shown)
    assert not {"s", "l"} & set(shown)


@pytest.mark.parametrize("page", ALL)
def test_shift_and_a_letter_has_no_other_use_than_to_sort_but_for_the_last_row(page):
    bound = {*bindings_of(ALL[page]), *bindings_of(KvdTui)}
    assert {key for key in bound if len(key) == 1 and key.isupper()} == {"G"}


def test_the_keys_that_the_documentation_names_are_there():
    named = {"slash", "colon", "space", "question_mark", *"swzygGrictqe"}
    bound = {key for owner in (KvdTui, *ALL.values()) for key in bindings_of(owner)}
    assert named | {f"ctrl+{letter}" for letter in "kefxt"} <= bound
