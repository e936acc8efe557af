"""Engines of several real processes, with real daemons: the tokens of one process.

Each case hands four prompts over and then a fifth, of which a page is zeroed in one decode rank's
shard; see ``divided``. Pages and bytes of every daemon are held against what was worked out.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvd.core.layout.shards import page_share
from kvd.demo.layout import PoolPart
from kvd.demo.models import ARCHITECTURES
from kvd.harness.daemons import DaemonProcess, is_linked
from tests.demo.divided import Case, Found

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

full = pytest.mark.skipif(
    os.environ.get("KVD_DEMO") != "full", reason="one more division: set KVD_DEMO=full"
)
LAYER_BYTES = {"llama": 16 * 2 * 2 * 32 * 4, "qwen": 16 * 2 * 4 * 32 * 4, "deepseek": 16 * 80 * 4}
"""Of a page of 16 tokens, all heads, in one layer."""
START_S = 60.0
ROUNDING = 1e-3


@contextlib.contextmanager
def daemons(
    directory: Path, prefill: list[dict[str, str]], decode: dict[str, str]
) -> Iterator[tuple[list[DaemonProcess], DaemonProcess]]:
    """``p0``, ``p1`` ... with these settings, and ``d``, which all of them can send to."""
    sender = [DaemonProcess(f"p{n}", directory, one) for n, one in enumerate(prefill)]
    receiver = DaemonProcess("d", directory, decode)
    for one in sender:
        one.knows(receiver)
        receiver.knows(one)
    every = [*sender, receiver]
    try:
        for one in every:
            one.start()
        for one in every:
            one.wait_ready()
            peers = len(sender) if one is receiver else 1
            one.wait_for(lambda one=one, peers=peers: is_linked(one, peers), "no peer", START_S)
        yield sender, receiver
    finally:
        for one in every:
            one.stop()


def hand_over(
    directory: Path, model: str, way: str, ranks: int, *, decode_ranks: int = 1, page_size: int = 16
) -> list[list[tuple[int, int]]]:
    """Pages and bytes that each prefill daemon sent of each prompt; everything else is asserted."""
    layers = ARCHITECTURES[model].shape.layers
    pool = ARCHITECTURES[model].pool.settings({PoolPart.KV: 512})
    pool |= {"pool.page_size": str(page_size)}
    parts: list[dict[str, str]] = [{"pool.tp_size": str(ranks)}]
    if way == "context":
        parts = [{}] * ranks
    elif way == "pipeline":
        stages = [page_share(0, layers, rank, ranks) for rank in range(ranks)]
        parts = [{"pool.stage": f"{first}:{end}"} for first, end in stages]
    decode = pool | {"pool.tp_size": str(decode_ranks)}
    with daemons(directory, [pool | part for part in parts], decode) as (senders, receiver):
        case = Case(
            model=model,
            way=way,
            ranks=ranks,
            decode_ranks=decode_ranks,
            page_size=page_size,
            prefill=tuple(one.client for one in senders),
            decode=receiver.client,
            directory=str(directory),
        )
        done = subprocess.run(
            [sys.executable, "-m", "tests.demo.divided", msgspec.json.encode(case).decode()],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        held = [pool.held_pages for one in (*senders, receiver) for pool in one.snapshot().pools]
    assert not any(held)

    def found(name: str) -> Found:
        return msgspec.json.decode((directory / name).read_bytes(), type=Found)

    for rank in range(ranks):
        assert max(found(f"prefill-{rank}").differences) < ROUNDING
    for rank in range(decode_ranks):
        decoded = found(f"decode-{rank}")
        assert decoded.tokens_equal[:4] == [True] * 4
        assert max(decoded.differences[:4]) < ROUNDING
        assert decoded.differences[4] > 0.05, "the damaged page of one shard is noticed"
    sent = [found(f"prefill-{rank}").sent[:4] for rank in range(len(senders))]
    return [list(turn) for turn in zip(*sent, strict=True)]


@pytest.mark.parametrize(
    ("ranks", "decode_ranks", "model", "copies"),
    [
        (1, 2, "llama", 1),
        # Two heads on four ranks: each is kept twice, and sent twice, or once from either copy.
        (2, 4, "llama", 2),
        pytest.param(2, 1, "llama", 1, marks=full),
        pytest.param(4, 2, "llama", 1, marks=full),
        pytest.param(2, 4, "qwen", 1, marks=full),
        pytest.param(4, 2, "qwen", 1, marks=full),
        pytest.param(1, 2, "deepseek", 2, marks=full),
        pytest.param(4, 2, "deepseek", 2, marks=full),
    ],
)
def test_heads_go_between_tensor_parallel_ranks(
    tmp_path: Path, ranks: int, decode_ranks: int, model: str, copies: int
) -> None:
    """scenario A32, with other numbers of ranks on both sides: every rank gets its heads."""
    sent = hand_over(tmp_path, model, "tensor", ranks, decode_ranks=decode_ranks)

    page_bytes = 4 * LAYER_BYTES[model] * copies
    assert sent == [[(pages, pages * page_bytes)] for pages in (22, 4, 4, 0)]


@pytest.mark.parametrize(
    ("ranks", "model", "decode_ranks", "page_size", "shares"),
    [
        (2, "llama", 1, 16, [[11, 11], [2, 2], [2, 2], [0, 0]]),
        pytest.param(4, "llama", 1, 16, [[6, 6, 5, 5], *[[1] * 4] * 2, [0] * 4], marks=full),
        # Of 48 tokens and 16 per page 3 pages cross, and one of four ranks has none to send.
        pytest.param(
            *(4, "llama", 1, 32, [[3, 3, 3, 2], *[[1, 1, 0, 0]] * 2, [0] * 4]), marks=full
        ),
        pytest.param(2, "deepseek", 1, 16, [[11, 11], *[[2, 2]] * 2, [0, 0]], marks=full),
        pytest.param(2, "qwen", 4, 16, [[11, 11], *[[2, 2]] * 2, [0, 0]], marks=full),
    ],
)
def test_each_context_parallel_rank_sends_a_share_of_the_pages(
    tmp_path: Path,
    ranks: int,
    model: str,
    decode_ranks: int,
    page_size: int,
    shares: list[list[int]],
) -> None:
    """scenario F: every rank has gathered all KV, and sends its part of the pages alone."""
    sent = hand_over(
        tmp_path, model, "context", ranks, decode_ranks=decode_ranks, page_size=page_size
    )

    page_bytes = 4 * LAYER_BYTES[model] * page_size // 16
    assert sent == [[(pages, pages * page_bytes) for pages in turn] for turn in shares]


@pytest.mark.parametrize(
    ("ranks", "model", "decode_ranks", "layers"),
    [
        (2, "llama", 1, [2, 2]),
        pytest.param(3, "llama", 1, [2, 1, 1], marks=full),
        pytest.param(4, "deepseek", 1, [1, 1, 1, 1], marks=full),
        pytest.param(2, "llama", 2, [2, 2], marks=full),
    ],
)
def test_each_stage_of_a_pipeline_sends_all_pages_of_its_layers(
    tmp_path: Path, ranks: int, model: str, decode_ranks: int, layers: list[int]
) -> None:
    """scenario E15, scenario G13"""
    sent = hand_over(tmp_path, model, "pipeline", ranks, decode_ranks=decode_ranks)

    size = LAYER_BYTES[model]
    assert sent == [[(pages, pages * count * size) for count in layers] for pages in (22, 4, 4, 0)]
