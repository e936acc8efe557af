"""ZMTP itself under siege, in small; ``python -m tests.fault.fuzz_zmtp`` is the whole of it."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import pytest

from tests.fault.fuzz_zmtp import SOCKETS, besiege

CASES = int(os.environ.get("KVD_CASES", "240"))
SEED = int(os.environ.get("KVD_SEED", "0")) or random.randrange(2**31)


@pytest.mark.parametrize("name", SOCKETS, ids=lambda name: name.replace(", ", "-"))
def test_hostile_zmtp_ends_no_daemon_disturbs_nobody_and_leaves_no_memory_behind(name):
    # The path of a unix socket has 107 bytes, and a folder of pytest's may have nearly all of them.
    with tempfile.TemporaryDirectory() as directory:
        row = besiege(name, Path(directory), CASES, SEED)

    assert row.troubles == [], f"KVD_SEED={SEED}"
    assert row.handoffs > 0
