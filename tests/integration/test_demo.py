"""``kvd demo`` for real: two daemons, engines with each of its models, KV over NIXL."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, TypeVar

import msgspec
import pytest

from kvd.demo.embedding import EmbeddingMemory, EmbeddingReport
from kvd.demo.report import DemoReport, TurnRow

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

full = pytest.mark.skipif(
    os.environ.get("KVD_DEMO") != "full", reason="one more model: set KVD_DEMO=full"
)
"""Five processes import torch for each model."""

PAGE_BYTES = 4 * 2 * 16 * 2 * 32 * 4


R = TypeVar("R")


def run(
    json_file: Path, kind: type[R], *arguments: str
) -> tuple[subprocess.CompletedProcess[str], R]:
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
    return done, msgspec.json.decode(json_file.read_bytes(), type=kind)


def demo(json_file: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], DemoReport]:
    """A model that decodes."""
    return run(json_file, DemoReport, *arguments)


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


@pytest.mark.parametrize(
    ("tp", "model", "copies"),
    [
        ("1:2", "llama", 1),
        pytest.param("2:1", "llama", 1, marks=full),
        # Two heads on four ranks: each is kept twice, and sent twice, or once from either copy.
        pytest.param("2:4", "llama", 2, marks=full),
        pytest.param("4:2", "llama", 1, marks=full),
        pytest.param("2:4", "qwen", 1, marks=full),
        pytest.param("4:2", "qwen", 1, marks=full),
        pytest.param("1:2", "deepseek", 2, marks=full),
        pytest.param("4:2", "deepseek", 2, marks=full),
    ],
)
def test_demo_hands_heads_over_between_tensor_parallel_ranks(
    tmp_path: Path, tp: str, model: str, copies: int
) -> None:
    """scenario A32, with other numbers of ranks on both sides: every rank gets its heads."""
    done, report = demo(tmp_path / "demo.json", "--tp", tp, "--model", model, "--turns", "1")

    good(done, report)
    page_bytes = {
        "llama": PAGE_BYTES,
        "qwen": 2 * PAGE_BYTES,
        "deepseek": 4 * 16 * (64 + 16) * 4,
    }[model]
    assert [(row.pages_sent, row.bytes_sent) for row in report.turns] == [
        (pages, pages * page_bytes * copies) for pages in (22, 4, 4, 0)
    ]
    ranks = [report.environment.prefill.ranks, report.environment.decode.ranks]
    assert ranks == [int(word) for word in tp.split(":")]


@pytest.mark.parametrize(
    ("options", "bytes_times", "shares"),
    [
        ("--cp 2", 1, [[11, 11], [2, 2], [2, 2], [0, 0]]),
        pytest.param("--cp 4", 1, [[6, 6, 5, 5], *[[1] * 4] * 2, [0] * 4], marks=full),
        # Of 48 tokens and 16 per page 3 pages cross, and one of four ranks has none to send.
        pytest.param(
            "--cp 4 --page-size 32", 1, [[3, 3, 3, 2], *[[1, 1, 0, 0]] * 2, [0] * 4], marks=full
        ),
        pytest.param(
            "--cp 2 --model deepseek", 0.625, [[11, 11], *[[2, 2]] * 2, [0, 0]], marks=full
        ),
        pytest.param(
            "--cp 2 --tp 1:4 --model qwen", 2, [[11, 11], *[[2, 2]] * 2, [0, 0]], marks=full
        ),
    ],
)
def test_demo_takes_a_prompt_from_context_parallel_ranks_that_each_send_a_share(
    tmp_path: Path, options: str, bytes_times: float, shares: list[list[int]]
) -> None:
    """scenario F: every rank has gathered all KV, and sends its part of the pages alone."""
    done, report = demo(tmp_path / "demo.json", *options.split(), "--turns", "1")

    good(done, report)
    assert [[one.pages_sent for one in row.senders] for row in report.turns] == shares
    page_bytes = PAGE_BYTES * bytes_times * report.environment.page_size // 16
    for row in report.turns:
        assert [one.bytes_sent for one in row.senders] == [
            one.pages_sent * page_bytes for one in row.senders
        ]


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        ("--pp 2", 2),
        pytest.param("--pp 3", 3, marks=full),
        pytest.param("--pp 4 --model deepseek", 4, marks=full),
        pytest.param("--pp 2 --tp 1:2", 2, marks=full),
    ],
)
def test_demo_takes_the_layers_of_a_prompt_from_the_stages_of_a_pipeline(
    tmp_path: Path, options: str, stages: int
) -> None:
    """scenario E15, scenario G13: each stage sends all pages of its own layers."""
    done, report = demo(tmp_path / "demo.json", *options.split(), "--turns", "1")

    good(done, report)
    layers = {2: [2, 2], 3: [2, 1, 1], 4: [1, 1, 1, 1]}[stages]
    for row, pages in zip(report.turns, (22, 4, 4, 0), strict=True):
        assert [one.pages_sent for one in row.senders] == [pages] * stages
        layer_bytes = report.environment.page_bytes // 4
        assert [one.bytes_sent for one in row.senders] == [
            pages * count * layer_bytes for count in layers
        ]


def test_demo_embeds_the_same_with_kv_written_and_in_a_pool_without_kv(tmp_path: Path) -> None:
    """scenario D1, scenario D10, scenario D13: 97 pages of 8 heads in 4 layers, and none of it."""
    done, report = run(tmp_path / "demo.json", EmbeddingReport, "--model", "embedding")

    assert (done.returncode, report.problems) == (0, ()), done.stdout + done.stderr
    assert len(report.batches) == 12
    assert report.max_difference <= report.tolerance == 1e-5
    assert report.damaged_difference > 1e-3
    page_bytes = 4 * 2 * 16 * 8 * 32 * 4
    assert report.memory == EmbeddingMemory(
        pages=97,
        counted_pages=97,
        pool_bytes=97 * page_bytes,
        pool_bytes_expected=97 * page_bytes,
        counted_pool_bytes=0,
        placeholder_bytes=page_bytes,
        pages_still_held=0,
    )
    assert report.refused == dict.fromkeys(
        ("map", "commit", "send", "receive", "match"), "not-supported"
    )
    assert done.stdout.splitlines()[-1].startswith("OK: embeddings of 96 texts are the same")


def _figures(row: TurnRow) -> tuple[int, int, int, int, int]:
    """Prompt, prefill side's prefix, tokens computed, decode side's prefix, pages sent."""
    return (
        row.prompt_tokens,
        row.prefill_prefix_len,
        row.computed_tokens,
        row.decode_prefix_len,
        row.pages_sent,
    )
