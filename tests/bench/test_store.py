"""``benchmarks store``: the flow by which a result comes into the documentation."""

from __future__ import annotations

import datetime
import re
import sys

import click
import msgspec
import pytest
from click.testing import CliRunner

from benchmarks import store

KEPT = {
    "order": 1,
    "title": "The prefix tree",
    "command": "python -m benchmarks radix --trace FILE --json FILE",
    "date": "2026-01-01",
    "machine": "two cores",
    "about": "A tree.",
    "tables": [{"columns": ["what"], "rows": [["by hand"]]}],
    "notes": ["of the rows"],
}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("kvd bench control --json FILE", ["-m", "kvd", "bench", "control"]),
        ("python -m benchmarks radix --trace FILE", ["-m", "benchmarks", "radix"]),
    ],
)
def test_a_command_of_the_documentation_runs_in_this_interpreter(command, words):
    assert store.words_of(command) == [sys.executable, *words]


def test_a_command_that_writes_no_result_is_refused():
    with pytest.raises(click.ClickException, match="`make soak` is no command"):
        store.words_of("make soak")


def test_a_result_takes_the_place_of_rows_that_were_kept_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "KEPT", tmp_path)
    kept, result = tmp_path / "radix.json", tmp_path / "result.json"
    kept.write_bytes(msgspec.json.encode(KEPT))
    result.write_text('{"tree": {"p50_us": 2.5}}')

    ran = CliRunner().invoke(store.command, ["radix", "--json", str(result)])

    assert ran.exit_code == 0, ran.output
    found = msgspec.json.decode(kept.read_bytes())
    assert found["result"] == {"tree": {"p50_us": 2.5}}
    assert found["date"] == datetime.datetime.now(datetime.UTC).date().isoformat()
    assert re.fullmatch(r"\d+ cores \(.+\), .+; shared with other work", found["machine"])
    assert {"tables", "notes"}.isdisjoint(found)
    assert [found[key] for key in ("order", "title", "command", "about")] == [
        KEPT[key] for key in ("order", "title", "command", "about")
    ]


def test_a_command_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "KEPT", tmp_path)
    kept = tmp_path / "radix.json"
    kept.write_bytes(msgspec.json.encode({**KEPT, "command": "python -c pass"}))

    ran = CliRunner().invoke(store.command, ["radix"])

    assert (ran.exit_code, "nothing was stored" in ran.output) == (1, True)
    assert msgspec.json.decode(kept.read_bytes())["date"] == "2026-01-01"


def test_rows_of_a_command_that_writes_nothing_else_are_kept_as_rows():
    assert store.stored(KEPT, [{"socket": "client"}], "two cores")["result"] == {
        "rows": [{"socket": "client"}]
    }


@pytest.mark.parametrize("kept", sorted(store.KEPT.glob("*.json")), ids=lambda path: path.stem)
def test_every_file_of_the_documentation_can_be_measured_anew_or_says_why_not(kept):
    if kept.stem in store.NOT_STORED:
        ran = CliRunner().invoke(store.command, [kept.stem])
        assert (ran.exit_code, f"{kept.stem} stays as it is" in ran.output) == (1, True)
    else:
        told = msgspec.json.decode(kept.read_bytes())["command"]
        assert store.words_of(told)[:2] == [sys.executable, "-m"]


def test_a_result_of_another_machine_keeps_its_date_and_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "KEPT", tmp_path)
    kept, result = tmp_path / "gpu.json", tmp_path / "result.json"
    kept.write_bytes(msgspec.json.encode(KEPT))
    result.write_text('{"date": "2026-12-01T10:00:00+00:00", "machine": "1 H100; 16 cores"}')

    ran = CliRunner().invoke(store.command, ["gpu", "--json", str(result)])

    assert ran.exit_code == 0, ran.output
    found = msgspec.json.decode(kept.read_bytes())
    assert (found["date"], found["machine"]) == ("2026-12-01", "1 H100; 16 cores")


def test_a_rehearsal_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "KEPT", tmp_path)
    kept, result = tmp_path / "gpu.json", tmp_path / "result.json"
    kept.write_bytes(msgspec.json.encode(KEPT))
    result.write_text('{"is_rehearsal": true, "found": {}}')

    ran = CliRunner().invoke(store.command, ["gpu", "--json", str(result)])

    assert ran.exit_code == 1
    assert "nothing was measured" in ran.output
    assert msgspec.json.decode(kept.read_bytes()) == KEPT
