"""Engines of several real processes compute what one does, and keep their part of its KV."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from kvd.demo.processes import ENGINE_VARIABLES
from tests.demo.divided import Compared

TENSOR = ("tensor:llama:4", "tensor:qwen:2", "tensor:deepseek:2")
PIPELINE = ("pipeline:llama:2", "pipeline:deepseek:3")
CONTEXT = ("context:llama:2", "context:qwen:4", "context:deepseek:2")
ROUNDED = ("tensor:llama:4", "tensor:deepseek:2", *CONTEXT)
"""Matrices of other shapes are multiplied: tokens are divided, or queries of one head of KV."""


def compared(*cases: str) -> list[Compared]:
    """What came out of each case; see ``divided``."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.demo.divided", *cases],
        env={**os.environ, **ENGINE_VARIABLES},
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.splitlines()
    return [msgspec.json.decode(line, type=Compared) for line in lines]


def run_program(program: str) -> int:
    """The status that its first rank ends with."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **ENGINE_VARIABLES},
        timeout=60,
        check=False,
    ).returncode


@pytest.mark.slow
def test_ranks_compute_and_keep_what_one_process_does() -> None:
    """Heads of KV and layers divided: the very same bits, because no sum is split.

    Tokens divided, or the queries of a head of KV: the same up to rounding; the last pieces are too
    short for every rank to have a token. In every case a spoiled page shows.
    """
    found = compared(*TENSOR, *PIPELINE, *CONTEXT)

    assert [one.case for one in found] == [*TENSOR, *PIPELINE, *CONTEXT]
    for one in found:
        rounding = 5e-5 if one.case in ROUNDED else 0.0
        assert one.logits <= rounding, one
        assert one.kv <= rounding, one
        assert one.spoiled > 0.02, one


@pytest.mark.slow
def test_a_rank_that_is_gone_ends_the_others() -> None:
    """Nobody waits for it: the next word from it is an error."""
    program = (
        "import os, torch\n"
        "torch.set_num_threads(1)\n"
        "from kvd.demo.group import fork\n"
        "group = fork(3)\n"
        "assert group.gathered(b'%d' % group.rank) == [b'0', b'1', b'2']\n"
        "assert group.numbers(group.rank + 5) == [5, 6, 7]\n"
        "if group.rank == 1:\n"
        "    os._exit(0)\n"
        "try:\n"
        "    group.spread(b'', source=1)\n"
        "except RuntimeError:\n"
        "    os._exit(7)\n"
    )

    assert run_program(program) == 7


@pytest.mark.slow
def test_ranks_with_a_daemon_each_compare_what_their_daemons_say() -> None:
    """What one has not cached all compute; they never send for two different offers."""
    program = (
        "import os, torch\n"
        "from types import SimpleNamespace\n"
        "torch.set_num_threads(1)\n"
        "from kvd.demo.group import fork\n"
        "from kvd.demo.ranks import Together\n"
        "from kvd.device.collectives import Disagreement\n"
        "group = fork(2)\n"
        "ranks = Together(None, group, None)\n"
        "assert ranks.common_prefix(64 - 16 * group.rank) == 48\n"
        "def offered(number):\n"
        "    return SimpleNamespace(accepted=lambda: None, decode_prefix_len=number)\n"
        "ranks.agree(offered(32))\n"
        "try:\n"
        "    ranks.agree(offered(32 * group.rank))\n"
        "except Disagreement as difference:\n"
        "    assert 'rank 0: 0, rank 1: 32' in str(difference), difference\n"
        "    os._exit(7)\n"
    )

    assert run_program(program) == 7
