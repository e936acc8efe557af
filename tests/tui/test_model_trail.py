"""Where the operator has been."""

from __future__ import annotations

import pytest

from tui.model.trail import MAX_CRUMBS, MAX_PLACES, Trail


@pytest.fixture
def trail():
    """From the overview to a lease, and from there to its node."""
    made = Trail("overview")
    made.turn("pools")
    made.open("pools", "lease:7")
    made.open("radix", "node:9")
    return made


def here(trail):
    return trail.here.page, trail.here.ref


def test_crumbs_are_the_way_that_led_here(trail):
    assert trail.crumbs() == ("pools", "lease:7", "node:9")


def test_up_closes_one_crumb_after_the_other_and_ends_on_the_page(trail):
    seen = []
    for _ in range(4):
        trail.up()
        seen.append(here(trail))

    assert seen == [("pools", "lease:7"), ("pools", ""), ("pools", ""), ("pools", "")]


def test_last_goes_to_and_fro(trail):
    trail.turn("events")

    trail.last()
    assert here(trail) == ("radix", "node:9")
    trail.last()
    assert here(trail) == ("events", "")


def test_back_and_forth_in_time_stops_at_both_ends(trail):
    seen = []
    for step in "[[[[]]]]":
        trail.backward() if step == "[" else trail.forward()
        seen.append(trail.here.label)

    assert seen == [
        *("lease:7", "pools", "overview", "overview"),
        *("pools", "lease:7", "node:9", "node:9"),
    ]


def test_going_elsewhere_forgets_what_was_forward(trail):
    trail.backward()
    trail.turn("peers")
    trail.forward()

    assert here(trail) == ("peers", "")
    assert trail.backward().label == "lease:7"


def test_opening_what_is_open_goes_nowhere(trail):
    before = trail.here

    assert trail.open("radix", "node:9") is before


def test_a_long_way_is_bounded():
    trail = Trail("overview")
    for number in range(1000):
        trail.open("radix", f"node:{number}")
    for _ in range(1000):
        trail.backward()

    assert trail.here.label == f"node:{1000 - MAX_PLACES}"
    assert len(trail.crumbs()) == MAX_CRUMBS + 1
