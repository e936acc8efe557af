"""The reference is made of the code: every part of it can be made, and says what is there."""

from __future__ import annotations

import re

import msgspec
import pytest

from kvd import errors
from kvd.config.keys import KEYS
from kvd.wire import events
from tests.docs.commands import fault, ours

ARGUMENTS = {
    "messages": ("attach", "client-requests", "client-replies", "peer", "admin-requests"),
    "messages-overview": ("attach", "peer", "admin-replies"),
    "states": ("decode", "prefill"),
    "triggers": ("decode", "prefill"),
}
PARTS = (
    *("cli", "console-command", "console-keys", "configuration", "messages", "messages-overview"),
    *("states", "triggers", "events", "snapshot", "metrics", "stories", "benchmarks", "rooms"),
)


@pytest.fixture(scope="module")
def made(reference):
    def make(part, of=""):
        return "\n".join(reference.PARTS[part](of))

    return make


@pytest.mark.parametrize("part", PARTS)
def test_each_part_has_something_to_say(reference, made, part):
    assert set(reference.PARTS) == set(PARTS)
    for of in ARGUMENTS.get(part, ("",)):
        assert len(made(part, of).split()) > 10


def test_pages_ask_only_for_parts_that_exist(reference, pages):
    asked = {
        one for text in pages.values() for one in re.findall(r"^```\{kvd\} ([\w-]+)", text, re.M)
    }
    assert asked - {"drawing", "errors"} == set(reference.PARTS)


def test_every_key_is_told(made):
    text = made("configuration")
    assert [path for path in KEYS if f"`{path}`" not in text] == []


def test_every_event_is_told(reference, made):
    text = made("events")
    tags = [reference.tag_of(one) for one in reference.members(events.Event)]
    assert [tag for tag in tags if f"## `{tag}`" not in text] == []


def test_every_code_has_a_meaning_on_the_page(reference, pages):
    page = pages["docs/reference/errors.md"]
    body = re.search(r"^```\{kvd\} errors\n(.*?)^```", page, re.S | re.M)
    rows = "\n".join(reference.error_rows(body[1].splitlines()))
    assert [code.value for code in errors.Code if f"`{code.value}`" not in rows] == []


def test_meaning_without_a_code_is_refused(reference):
    with pytest.raises(reference.Unknown, match="no-such-code"):
        list(reference.error_rows(["no-such-code: nothing"]))


def test_names_are_found_where_they_are_written(reference, pages):
    known = reference.definitions()
    wrong = []
    for text in pages.values():
        for one in re.findall(r"\{where\}`([^`]+)`", text):
            name, _, under = one.partition(" in ")
            places = [place for place in known.get(name, []) if place.startswith(under)]
            wrong += [] if len(places) == 1 else [f"{one}: {places}"]
    assert not wrong, "\n".join(wrong)


def test_each_state_is_in_the_drawing(reference):
    for side, (rows, _, _) in reference.MACHINES.items():
        svg = reference.states_picture(side)
        assert [one.value for one in set(rows.values()) if f">{one.value}<" not in svg] == []


def test_each_measurement_says_how_and_when_and_where(root):
    for path in sorted((root / "docs" / "benchmarks").glob("*.json")):
        one = msgspec.json.decode(path.read_bytes())
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", one["date"]), path
        called = ours(one["command"])
        assert called or re.match(r"make |python -m ", one["command"]), path
        assert called is None or fault(*called) is None, path
        assert "cores" in one["machine"], path
        assert ("result" in one) != bool(one.get("tables")), path


def test_readme_figures_are_those_of_the_measurements(root, pages):
    kept = "".join(
        path.read_text("utf-8") for path in (root / "docs" / "benchmarks").glob("*.json")
    )
    table = re.search(r"^## Measured\n(.*?)^## ", pages["README.md"], re.S | re.M)[1]
    figures = re.findall(r"\d[\d,]*\.\d+|\b622\b", table)
    assert figures
    assert [figure for figure in figures if figure not in kept] == []
