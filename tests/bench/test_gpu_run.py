"""``python -m tests.gpu.run`` without a GPU: what it runs, what it writes, what it keeps to itself.

All of it is rehearsed by ``python -m tests.gpu.run --rehearse``, which takes two minutes; here are
the parts that copy, which no other test runs.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING

import msgspec
import pytest

import tests.cuda
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_least
from kvd.device.cuda_library import VARIABLE
from tests.cuda.double import compiled
from tests.gpu import part as parts
from tests.gpu import results
from tests.gpu.results import GpuRun, PartOutcome
from tests.gpu.run import main, run
from tests.gpu.suite import RULES, read_report

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS = (ResultColumn("size", "size"), ResultColumn("gb_s", "GB/s", ".1f"))
FOUND = BenchmarkResult(
    tables=(
        ResultTable("copies", COLUMNS, ({"size": 4, "gb_s": 9.5}, {"size": 64, "gb_s": 41.0})),
    ),
    goals=(at_least("GB/s", 45.0, 41.0),),
)


@pytest.fixture
def double(tmp_path, monkeypatch):
    """Every process that is started here has it."""
    for name, value in {**compiled(tmp_path).environment, "DOUBLE_BYTES": str(2**30)}.items():
        monkeypatch.setenv(name, value)


def rehearsed(name: str, tmp_path: Path) -> BenchmarkResult:
    outcomes = run([name], None, tmp_path, 100.0, is_rehearsal=True)
    assert outcomes[name].failed == "", outcomes[name]
    assert outcomes[name].skipped == ""
    found = outcomes[name].found
    assert found is not None
    return found


def test_copies_are_rehearsed_by_the_real_mover(double, tmp_path):
    found = rehearsed("copies", tmp_path)

    by_piece, one_block = found.tables
    assert [row["piece_kib"] for row in by_piece.rows] == [4, 16, 64, 512, 2048]
    assert len(one_block.rows) == 4
    assert [goal.wanted for goal in found.goals] == [45.0, 45.0, 0.6, 300.0]
    assert found.wrong == ()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "goals"), [("compute", 4), ("prompt", 0)])
def test_what_needs_torch_is_rehearsed_on_the_processor(double, tmp_path, name, goals):
    found = rehearsed(name, tmp_path)

    assert len(found.goals) == goals
    assert found.wrong == ()


def test_copies_that_bring_other_bytes_fail(double, tmp_path, monkeypatch):
    """The check of the bytes is one that can fail: of a double whose first copies are spoiled."""
    from tests.gpu.engine import CopyingEngine  # noqa: PLC0415 - loads the client
    from tests.gpu.moves import copies  # noqa: PLC0415

    real = CopyingEngine.load
    monkeypatch.setattr("tests.gpu.moves.PIECES_KIB", (64,))
    monkeypatch.setattr(
        CopyingEngine,
        "load",
        lambda engine, lease, blocks, first_page=0: real(
            engine, lease, list(reversed(blocks)), first_page
        ),
    )

    assert copies(results.Setting(is_rehearsal=True)).wrong == (
        "pieces of 64 KiB came back as other bytes",
    )


def test_a_rehearsal_writes_down_no_figure(double, tmp_path, monkeypatch):
    file = tmp_path / "found.json"
    outcome = PartOutcome(FOUND, seconds=3.25)
    monkeypatch.setattr("tests.gpu.run.part", lambda *_, **__: outcome)

    run(["copies"], file, tmp_path, 100.0, is_rehearsal=True)

    written = msgspec.json.decode(file.read_bytes(), type=GpuRun)
    assert written.is_rehearsal
    (table,) = written.found.tables
    assert table.rows == ({"size": 4, "gb_s": None}, {"size": 64, "gb_s": None})
    assert written.found.goals == ()
    assert "double of CUDA" in written.machine


def test_what_was_measured_is_written_with_device_and_date(tmp_path, monkeypatch):
    file = tmp_path / "found.json"
    outcomes = iter([PartOutcome(FOUND, seconds=3.2), PartOutcome(skipped="no transformers")])
    monkeypatch.setattr("tests.gpu.run.part", lambda *_, **__: next(outcomes))
    monkeypatch.setattr("tests.gpu.run.place_told", lambda _: "1 H100, driver 580; 16 cores")

    run(["copies", "prompt"], file, tmp_path, 100.0, is_rehearsal=False)

    written = msgspec.json.decode(file.read_bytes(), type=GpuRun)
    assert (written.machine, written.found) == ("1 H100, driver 580; 16 cores", FOUND)
    assert re.match(r"20\d\d-\d\d-\d\dT", written.date)
    assert written.parts == {"copies": "3 s", "prompt": "skipped: no transformers"}


def test_a_part_that_has_no_time_left_is_skipped_and_said_to_be(tmp_path):
    outcomes = run(["copies"], None, tmp_path, 2.0, is_rehearsal=False)

    assert outcomes["copies"].skipped == "2 s were left of 2"


def test_a_part_that_takes_too_long_is_ended_and_the_next_one_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(parts.PARTS, "copies", parts.PARTS["copies"]._replace(within_s=0.05))

    outcomes = run(["copies"], None, tmp_path, 100.0, is_rehearsal=False)

    assert outcomes["copies"].failed == "it took longer than 0 s"


def test_without_a_gpu_parts_are_skipped_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "/nowhere")
    monkeypatch.setattr(sys, "argv", ["run", "--only", "copies", "rules"])

    assert main() == 0

    why = "no CUDA device can be used here: /nowhere: cannot be loaded"
    for name in parts.PARTS:
        outcome = parts.outcome_of(name, results.Setting(is_rehearsal=False))
        assert outcome.skipped == why or re.fullmatch("torch .* finds no device", outcome.skipped)


@pytest.mark.parametrize(
    ("row", "flaw"),
    [
        ({"size": 4, "gb_s": float("nan")}, "copies: gb_s is nan"),
        ({"size": 4, "gb_s": 0.0}, "copies: gb_s is 0.0"),
        ({"size": 4}, "copies: no gb_s in any row"),
        (None, "copies: no row"),
    ],
)
def test_what_is_no_figure_fails_its_part(row, flaw):
    table = ResultTable("copies", COLUMNS, () if row is None else (row,))

    assert flaw in set(results.flaws(BenchmarkResult(tables=(table,))))


def test_tests_that_failed_are_named_and_those_skipped_counted():
    junit = """<testsuites><testsuite>
    <testcase classname="tests.gpu.test_a" name="test_passes"/>
    <testcase classname="tests.gpu.test_a" name="test_fails"><failure message="x"/></testcase>
    <testcase classname="tests.gpu.test_a" name="test_breaks"><error message="x"/></testcase>
    <testcase classname="tests.gpu.test_b" name="test_1"><skipped message="no flash"/></testcase>
    <testcase classname="tests.gpu.test_b" name="test_2"><skipped message="no flash"/></testcase>
    </testsuite></testsuites>"""

    found = read_report("tests", junit)

    assert found.tables[0].rows == ({"what": "tests", "passed": 1, "failed": 2, "skipped": 2},)
    assert found.wrong == ("tests.gpu.test_a::test_fails", "tests.gpu.test_a::test_breaks")
    assert found.notes == ("2 skipped: no flash",)


def test_where_nothing_passed_nothing_was_shown():
    assert read_report("tests", "<testsuites/>").wrong == ("tests: none passed",)


def test_plugins_of_pytest_that_are_foreign_change_nothing(double, tmp_path):
    """One that cannot even be loaded stands for pytest-benchmark, whose warning is an error."""
    package = tmp_path / "foreign-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[pytest11]\nforeign = nowhere_at_all\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    program = (
        "from tests.gpu import suite\n"
        "from pathlib import Path\n"
        f"found = suite._tested('one', [{str(RULES)!r}, '-k', 'uuid'], 60.0)\n"
        "assert not found.wrong, found.wrong\n"
        "print(found.tables[0].rows[0]['passed'])\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.stdout == "1\n", done.stderr


def test_what_no_device_has_confirmed_names_tests_that_are_there():
    assert tests.cuda.__doc__ is not None
    known = re.findall(r"^(?:async )?def (test_\w+)", RULES.read_text("utf-8"), re.M)
    named = re.findall(r"``(test_\w+?_)\.\.\.``", tests.cuda.__doc__)

    assert len(named) > 8
    assert [name for name in named if sum(one.startswith(name) for one in known) != 1] == []


def test_the_documentation_shows_what_a_run_wrote(monkeypatch):
    """Where ``benchmarks store`` has put it."""
    monkeypatch.syspath_prepend(str(RULES.parents[2] / "docs" / "_ext"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Sphinx, about itself
        reference = importlib.import_module("kvd_reference")
    noted = msgspec.structs.replace(FOUND, notes=("2 skipped: no flash-attn",))
    outcomes = {"copies": PartOutcome(noted, seconds=9.0)}
    written = results.file_of("gpu", "1 H100", outcomes, is_rehearsal=False, seconds=9.0)

    shown = "\n".join(reference._result_text(msgspec.to_builtins(written), ()))

    assert "| 64 | 41.0 |" in shown
    assert "- 2 skipped: no flash-attn" in shown
    assert re.search(r"GB/s \| at least 45 \| 41 \| \*\*missed\*\*", shown)
