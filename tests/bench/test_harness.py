"""``python -m benchmarks``: every name runs something, and a file says what, where and when."""

from __future__ import annotations

import msgspec
import pytest
from click.testing import CliRunner

from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.harness import BenchmarkFile, benchmark
from kvd import __version__
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most
from kvd.harness.child import Child, ChildFailed

COLUMNS = (
    ResultColumn("what", "what"),
    ResultColumn("took_ms", "ms", ".1f"),
    ResultColumn("sent", "MiB", ".0f"),
    ResultColumn("is_packed", "packed"),
)
FOUND = BenchmarkResult(
    tables=(
        ResultTable(
            title="A table",
            columns=COLUMNS,
            rows=(
                {"what": "kvd", "took_ms": 1.25, "sent": (1.0, 2.0), "is_packed": True, "n": 3},
                {"what": "reference", "took_ms": None, "is_packed": False},
            ),
        ),
    ),
    goals=(at_most("ms", 1.0, 1.25),),
    notes=("a note",),
)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_help_and_writes_a_file(name):
    told = CliRunner().invoke(main, [name, "--help"])

    assert told.exit_code == 0, told.output
    assert "--json" in told.stdout


def test_a_result_is_printed_and_written_with_where_it_was_measured(tmp_path):
    file = tmp_path / "result.json"

    ran = CliRunner().invoke(benchmark("it", lambda _: FOUND), ["--json", str(file)])

    assert ran.exit_code == 0, ran.output
    lines = [" ".join(line.split()) for line in ran.stdout.splitlines()]
    assert lines == [
        "A table",
        "what ms MiB packed",
        "kvd 1.2 1+2 yes",
        "reference - - no",
        "- a note",
        "MISSED ms: 1.25 (goal <= 1)",
    ]
    written = msgspec.json.decode(file.read_bytes(), type=BenchmarkFile)
    assert (written.name, written.versions["kvd"]) == ("it", __version__)
    assert all((written.date, written.machine, written.python, written.cpus))
    assert written.found.tables[0].rows[0]["n"] == 3


def test_a_benchmark_that_cannot_go_on_says_why_and_fails():
    def run(_: object) -> BenchmarkResult:
        raise ChildFailed("the ranks have ended")

    ran = CliRunner().invoke(benchmark("it", run), [])

    assert (ran.exit_code, ran.stderr.endswith("Error: the ranks have ended\n")) == (1, True)


def test_a_child_that_says_nothing_is_waited_for_no_longer_than_asked():
    child = Child("tests.bench.silent_child")

    with pytest.raises(ChildFailed, match="has not answered for 0 s"):
        child.hear(msgspec.Struct, within_s=0.1)

    child.stop()
