"""Where the operator is."""

from __future__ import annotations

import pytest

from tui.app import MAX_CRUMBS, Location


@pytest.fixture
def place():
    """From the memory to a lease, and from there to its node."""
    return Location("pools").open("pools", "lease:7").open("radix", "node:9")


def test_crumbs_are_the_way_that_led_here(place):
    assert place.crumbs() == ("pools", "lease:7", "node:9")


def test_up_closes_one_crumb_after_the_other_and_ends_on_the_page(place):
    seen = []
    for _ in range(4):
        place = place.up()
        seen.append((place.page, place.ref))

    assert seen == [("pools", "lease:7"), ("pools", ""), ("pools", ""), ("pools", "")]


def test_what_is_open_from_nowhere_is_closed_to_its_page():
    assert Location("events", "room:7").up() == Location("events")


def test_opening_what_is_open_goes_nowhere(place):
    assert place.open("radix", "node:9") is place


def test_a_long_way_is_bounded(place):
    for number in range(50):
        place = place.open("pools", f"page:{number}")

    assert len(place.crumbs()) == MAX_CRUMBS + 1
