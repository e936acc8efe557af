"""``kvd demo`` for real: two daemons, engines with each of its models, KV over NIXL."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvd.demo.report import DemoReport, TurnRow

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

full = pytest.mark.skipif(
    os.environ.get("KVD_DEMO") != "full", reason="one more model: set KVD_DEMO=full"
)
"""Five processes import torch for each model."""

PAGE_BYTES = 4 * 2 * 16 * 2 * 32 * 4


def demo(json_file: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], DemoReport]:
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
    return done, msgspec.json.decode(json_file.read_bytes(), type=DemoReport)


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
    everything = (*report.turns, report.control, *report.more_controls)
    assert report.totals.sent_bytes == sum(row.bytes_sent for row in everything)
    assert report.control.max_logit_difference > 0.1
    assert done.stdout.splitlines()[-1].startswith("OK: 96 tokens of 6 turns equal")


def good(done: subprocess.CompletedProcess[str], report: DemoReport) -> None:
    """What must be so whatever the model is."""
    assert (done.returncode, report.problems) == (0, ()), done.stdout + done.stderr
    everything = (*report.turns, report.control, *report.more_controls)
    assert all(row.tokens_equal for row in report.turns)
    assert all(row.bytes_sent == row.bytes_expected for row in everything)
    assert report.totals.sent_bytes == sum(row.bytes_sent for row in everything)
    assert report.totals.pages_still_held == report.totals.pages_still_locked == 0
    for control in (report.control, *report.more_controls):
        assert control.max_logit_difference > 0.05, control


@pytest.mark.parametrize(
    "model",
    [
        "llama",
        *(pytest.param(name, marks=full) for name in ("qwen", "deepseek", "gemma", "gptoss")),
    ],
)
def test_demo_copies_between_the_pools_and_memory_of_the_engines(
    tmp_path: Path, model: str
) -> None:
    """As on a GPU, by processors: what is cached is loaded, what was computed is saved."""
    done, report = demo(tmp_path / "demo.json", "--model", model, "--turns", "2", "--device", "cpu")

    good(done, report)
    assert report.environment.device == "cpu"
    if model == "llama":
        found = [(row.copied.loaded_bytes, row.copied.saved_bytes) for row in report.turns]
        # Of pages: the prefill's prefix, and the prompt once more on the decode node; what was
        # computed, and the answer of 15 tokens, from the page on in which the prompt ends.
        assert found == [
            (pages * PAGE_BYTES, saved * PAGE_BYTES)
            for pages, saved in (
                (22, 24),
                (21 + 25, 4 + 2),
                (18 + 22, 5),
                (22 + 26, 4 + 2),
                (44, 1),
            )
        ]
    assert done.stdout.splitlines()[-1].count("saved from cpu") == 1


@full
def test_demo_hands_over_the_latents_of_deepseek(tmp_path: Path) -> None:
    """One latent of 64 + 16 numbers per token and layer, in 4 layers."""
    done, report = demo(tmp_path / "demo.json", "--model", "deepseek", "--turns", "1")

    good(done, report)
    page_bytes = 4 * 16 * (64 + 16) * 4
    assert [(row.pages_sent, row.bytes_sent) for row in report.turns] == [
        (22, 22 * page_bytes),
        (4, 4 * page_bytes),
        (4, 4 * page_bytes),
        (0, 0),
    ]
    assert report.control.damaged == "kv"


@pytest.mark.parametrize(
    ("model", "window", "layers", "prefixes"),
    [
        ("gemma", 96, (2, 4), (0, 240, 304, 240)),
        pytest.param("gptoss", 72, (2, 2), (0, 272, 320, 272), marks=full),
    ],
)
def test_demo_hands_over_a_window_and_gives_the_other_pages_back(
    tmp_path: Path, model: str, window: int, layers: tuple[int, int], prefixes: tuple[int, ...]
) -> None:
    """Prompts of four windows: their tail crosses, a few window pages turn on both nodes.

    A window is always sent, so the decode node's prefix ends where the tail begins; a full hit
    sends it again. Pages of 16, steps of 64 and of 8.
    """
    done, report = demo(tmp_path / "demo.json", "--model", model, "--turns", "1")

    good(done, report)
    layer_bytes = 16 * 2 * 2 * 32 * 4
    prompts = (340, 352, 408, 352)
    assert [(row.prompt_tokens, row.decode_prefix_len) for row in report.turns] == list(
        zip(prompts, prefixes, strict=True)
    )
    span = -(-window // 16)
    for row in report.turns:
        end, tail = -(-row.prompt_tokens // 16), (row.prompt_tokens - 1 - window) // 16
        kv = end - row.decode_prefix_len // 16
        assert row.pages_sent == kv
        assert row.bytes_sent == layer_bytes * (layers[0] * kv + layers[1] * (end - tail))
        assert row.bytes_saved == layer_bytes * sum(layers) * end - row.bytes_sent
        assert row.window is not None
        assert row.window.crossed == end - tail
        assert span <= row.window.prefill_peak <= span + 4 + 1
        assert span <= row.window.decode_peak <= span + 1 + 1
        assert row.window.prefill_slides == -(-row.computed_tokens // 64) - 1
        assert row.window.decode_slides == 1
        assert row.window.full == -(-(row.prompt_tokens + 16) // 16) > 2 * row.window.prefill_peak
    assert [control.damaged for control in (report.control, *report.more_controls)] == ["kv", "swa"]
    assert "window pages held where all tokens would take" in done.stdout.splitlines()[-1]


def test_demo_hands_over_the_state_of_mamba(tmp_path: Path) -> None:
    """One state per prompt, whatever its length and whatever is cached.

    The second turn of a conversation goes on from the state that the prefill node has of the first;
    the retry must be computed afresh but for its prefix, since a state cannot be rolled back.
    """
    done, report = demo(tmp_path / "demo.json", "--model", "mamba", "--turns", "2")

    good(done, report)
    state_bytes = 4 * (640 * 4 + 8 * 64 * 32) * 4
    assert [row.bytes_sent for row in report.turns] == [state_bytes] * 5
    assert [(row.prompt_tokens, row.prefill_prefix_len) for row in report.turns] == [
        (340, 0),
        (396, 340),
        (340, 0),
        (396, 340),
        (340, 0),
    ]
    assert report.control.damaged == "state"


def _figures(row: TurnRow) -> tuple[int, int, int, int, int]:
    """Prompt, prefill side's prefix, tokens computed, decode side's prefix, pages sent."""
    return (
        row.prompt_tokens,
        row.prefill_prefix_len,
        row.computed_tokens,
        row.decode_prefix_len,
        row.pages_sent,
    )
