"""``kvd demo`` for real: two daemons, engines with a Llama, KV over NIXL."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvd.demo.report import Report, Row

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

PAGE_BYTES = 4 * 2 * 16 * 2 * 32 * 4


def demo(json_file: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], Report]:
    """Run the command as a user would."""
    command = [sys.executable, "-c", "from kvd.cli import main; main()", "demo"]
    done = subprocess.run(
        [*command, "--json", str(json_file), *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert json_file.exists(), done.stderr
    return done, msgspec.json.decode(json_file.read_bytes(), type=Report)


def test_demo_decodes_the_same_tokens_and_sends_only_what_is_lacking(tmp_path: Path) -> None:
    """Real daemons, real bytes, a real model: scenario A1, scenario A2, scenario A3, scenario A4,
    scenario A6, scenario A33, scenario A39.

    The figures follow from the script: 300 tokens of system prompt, messages of 40, answers of 16
    whose last token has no KV, pages of 16. The retry's prompt has 352 tokens, 22 whole pages. In
    the negative control the decode engine zeroes a page that crossed, and answers wrongly.
    """
    done, report = demo(tmp_path / "demo.json", "--turns", "3")

    assert (done.returncode, report.problems) == (0, ()), done.stdout + done.stderr
    assert report.ok
    assert [(row.conversation, row.turn) for row in report.turns] == [
        ("first", 1),
        ("first", 2),
        ("first", 3),
        ("second", 1),
        ("second", 2),
        ("retry", 1),
    ]
    assert [_figures(row) for row in report.turns] == [
        (340, 0, 340, 0, 22),
        (396, 336, 60, 352, 3),
        (452, 384, 68, 400, 4),
        (352, 288, 64, 288, 4),
        (408, 352, 56, 352, 4),
        (352, 352, 1, 352, 0),
    ]
    for row in report.turns:
        assert row.tokens_equal
        assert row.max_logit_difference < 1e-3
        assert row.bytes_sent == row.pages_sent * PAGE_BYTES
        assert row.bytes_saved == row.decode_prefix_len // 16 * PAGE_BYTES
        assert row.ttft_ms > 0
        assert (row.transfer_gbps is None) == (row.pages_sent == 0)
    assert report.environment.page_bytes == PAGE_BYTES
    everything = (*report.turns, report.control)
    assert report.totals.sent_bytes == sum(row.bytes_sent for row in everything)
    assert report.control.max_logit_difference > 0.1
    assert done.stdout.splitlines()[-1].startswith("OK: 96 tokens of 6 turns equal")


def _figures(row: Row) -> tuple[int, int, int, int, int]:
    """Prompt, prefill side's prefix, tokens computed, decode side's prefix, pages sent."""
    return (
        row.prompt_tokens,
        row.prefill_prefix_len,
        row.computed_tokens,
        row.decode_prefix_len,
        row.pages_sent,
    )
