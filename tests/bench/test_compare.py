"""``benchmarks compare``: its arithmetic, and two checkouts that differ in one thing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from benchmarks import compare
from benchmarks.harness import BenchmarkFile
from kvd.harness.child import ChildFailed
from kvd.trace import read_trace

ROOT = Path(__file__).parents[2]


def test_figures_are_named_by_the_texts_of_their_row():
    written = {
        "name": "radix",
        "cpus": 2,
        "versions": {"kvd": "0.1.0"},
        "found": {
            "tables": [
                {
                    "title": "a trace",
                    "columns": [{"key": "p50_us"}],
                    "rows": [{"index": "tree", "p50_us": 2.5, "is_met": True}],
                }
            ],
            "goals": [{"name": "p50", "got": 2.5}],
        },
        "counts": [{"what": "match", "in_flight": 16, "counted_by": "strace", "client_calls": 3}],
    }

    assert dict(compare.figures_in(written)) == {
        "tree: p50_us": 2.5,
        "match, in_flight 16: client_calls": 3.0,
    }


def test_a_ratio_is_taken_within_its_round_when_the_machine_slows_down():
    rounds = [({"a: p50_us": base}, {"a: p50_us": 2 * base}) for base in (1.0, 50.0, 10.0)]

    (row,) = compare.compared(rounds)

    assert (row["base"], row["here"]) == (10.0, 20.0)
    assert [row[f"ratio{end}"] for end in ("_min", "_low", "", "_high", "_max")] == [2.0] * 5


def test_the_spread_of_a_ratio_is_that_of_its_rounds():
    rounds = [({"a: p50_us": 10.0}, {"a: p50_us": here}) for here in (9.0, 10.0, 11.0, 12.0, 20.0)]

    (row,) = compare.compared(rounds)

    ends = ("_min", "_low", "", "_high", "_max")
    assert [row[f"ratio{end}"] for end in ends] == pytest.approx([0.9, 1.0, 1.1, 1.2, 2.0])


def test_a_figure_of_one_side_or_of_nothing_has_no_ratio():
    rounds = [({"a: n": 0.0, "b: n": 1.0, "c: n": 1.0}, {"a: n": 0.0, "c: n": 3.0})]

    assert compare.compared(rounds, "[ab]") == [{"figure": "a: n", "base": 0.0, "here": 0.0}]


@pytest.mark.parametrize(
    ("name", "ratio", "slower"),
    [
        ("a: p50_us", 1.5, 1.5),
        ("a: per_s", 0.5, 2.0),
        ("a: prefill_calls", 3.0, 3.0),
        ("a: echo_p50_us", 9.0, 1.0),
        ("a: hit_rate", 9.0, 1.0),
    ],
)
def test_slower_is_how_many_times_more_a_figure_costs(name, ratio, slower):
    assert compare.slower({"figure": name, "ratio": ratio}) == slower


def test_base_must_be_a_directory_or_a_revision(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "PLACE", tmp_path)

    with pytest.raises(ChildFailed, match="no-such is no directory and no revision"):
        compare.lay_out("base", "no-such", own_benches=False)


def test_conversations_that_are_made_up_are_a_trace(tmp_path):
    file = tmp_path / "trace.jsonl"
    compare.make_trace(file)

    requests = read_trace(file)

    assert len(requests) == compare.REQUESTS
    assert any(len(request.hash_ids) > 32 for request in requests)


def test_a_slower_checkout_is_found_out_when_both_run_in_turns(tmp_path, monkeypatch):
    """The other one is this one, with a tree that adds numbers before each match."""
    monkeypatch.setattr(compare, "PLACE", tmp_path / "build")
    other, file = tmp_path / "other", tmp_path / "result.json"
    for name in compare.PACKAGES:
        compare._copy(ROOT / name, other / name)
    command = [str(other), "--rounds", "2", "--bench", "radix --limit 60", "--json", str(file)]
    tree = Path("kvd/core/cache/radix.py")
    code = (ROOT / tree).read_text("utf-8")
    start = '"""Does ``match`` and ``lock`` in one'
    assert start in code
    (other / tree).write_text(code.replace(start, f"sum(range(50_000))\n        {start}"), "utf-8")

    ran = CliRunner().invoke(compare.command, command)

    assert ran.exit_code == 0, ran.output
    rows = msgspec.json.decode(file.read_bytes(), type=BenchmarkFile).found.tables[0].rows
    ratio = {row["figure"]: row["ratio"] for row in rows}
    assert ratio["radix: tree: p50_us"] < 0.8, ran.output
    assert ratio["radix: tree: bytes_per_token"] == pytest.approx(1.0, rel=0.5)
