"""Where the operator has been."""

from __future__ import annotations

import pytest

from tui.model.navigation import MAX_CRUMBS, MAX_PLACES, Navigation


@pytest.fixture
def navigation():
    """From the overview to a lease, and from there to its node."""
    made = Navigation("overview")
    made.to_page("pools")
    made.open("pools", "lease:7")
    made.open("radix", "node:9")
    return made


def here(navigation):
    return navigation.here.page, navigation.here.ref


def test_crumbs_are_the_way_that_led_here(navigation):
    assert navigation.crumbs() == ("pools", "lease:7", "node:9")


def test_up_closes_one_crumb_after_the_other_and_ends_on_the_page(navigation):
    seen = []
    for _ in range(4):
        navigation.up()
        seen.append(here(navigation))

    assert seen == [("pools", "lease:7"), ("pools", ""), ("pools", ""), ("pools", "")]


def test_last_goes_to_and_fro(navigation):
    navigation.to_page("events")

    navigation.last()
    assert here(navigation) == ("radix", "node:9")
    navigation.last()
    assert here(navigation) == ("events", "")


def test_back_and_forth_in_time_stops_at_both_ends(navigation):
    seen = []
    for step in "[[[[]]]]":
        navigation.backward() if step == "[" else navigation.forward()
        seen.append(navigation.here.label)

    assert seen == [
        *("lease:7", "pools", "overview", "overview"),
        *("pools", "lease:7", "node:9", "node:9"),
    ]


def test_going_elsewhere_forgets_what_was_forward(navigation):
    navigation.backward()
    navigation.to_page("peers")
    navigation.forward()

    assert here(navigation) == ("peers", "")
    assert navigation.backward().label == "lease:7"


def test_opening_what_is_open_goes_nowhere(navigation):
    before = navigation.here

    assert navigation.open("radix", "node:9") is before


def test_a_long_way_is_bounded():
    navigation = Navigation("overview")
    for number in range(1000):
        navigation.open("radix", f"node:{number}")
    for _ in range(1000):
        navigation.backward()

    assert navigation.here.label == f"node:{1000 - MAX_PLACES}"
    assert len(navigation.crumbs()) == MAX_CRUMBS + 1
