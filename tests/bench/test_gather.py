"""``benchmarks gather``: real ranks, small tensors; what it measures is not looked at here."""

from __future__ import annotations

import msgspec
from click.testing import CliRunner

from benchmarks.gather import command
from benchmarks.harness import BenchmarkFile


def test_command_reports_each_number_of_ranks(tmp_path):
    result = tmp_path / "result.json"

    ran = CliRunner().invoke(
        command, ["--ranks", "2", "--tokens", "64", "--rounds", "3", "--json", str(result)]
    )

    assert ran.exit_code == 0, ran.output
    written = msgspec.json.decode(result.read_bytes(), type=BenchmarkFile)
    assert written.parameters == {"ranks": (2,), "tokens": 64, "rounds": 3}
    (row,) = written.found.tables[0].rows
    assert (row["ranks"], row["result_bytes"]) == (2, 64 * 8 * 128 * 2)
    assert min(row["collective_ms"], row["gather_ms"]) > 0
    assert [goal.wanted for goal in written.found.goals] == [1.1]
