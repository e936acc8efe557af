"""``benchmarks gather``: real ranks, small tensors; what it measures is not looked at here."""

from __future__ import annotations

import msgspec
from click.testing import CliRunner

from benchmarks.gather import GatherResult, command


def test_command_reports_each_number_of_ranks(tmp_path):
    result = tmp_path / "result.json"

    ran = CliRunner().invoke(
        command, ["--ranks", "2", "--tokens", "64", "--rounds", "3", "--json", str(result)]
    )

    assert ran.exit_code == 0, ran.output
    found = msgspec.json.decode(result.read_bytes(), type=GatherResult)
    assert [(one.ranks, one.result_bytes) for one in found.times] == [(2, 64 * 8 * 128 * 2)]
    assert all(min(one.collective_ms, one.gather_ms) > 0 for one in found.times)
    assert [goal.wanted for goal in found.goals] == [1.1]
