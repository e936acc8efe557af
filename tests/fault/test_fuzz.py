"""Every socket of a running daemon under siege, in small; ``python -m tests.fault.fuzz`` is the
whole of it, with the table."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from tests.fault.fuzz import SIEGES, besiege
from tests.fault.fuzz_memory import (
    POOLS,
    CoreSiege,
    besiege_core,
    besiege_metadata,
    besiege_orders,
)
from tests.fault.fuzz_target import besieged

FRAMES = int(os.environ.get("KVD_FRAMES", "1000"))
SEED = int(os.environ.get("KVD_SEED", "0")) or random.randrange(2**31)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    with besieged(tmp_path_factory.mktemp("siege")) as one:
        yield one


@pytest.mark.parametrize("siege", SIEGES, ids=lambda siege: siege.name.replace(", ", "-"))
def test_hostile_frames_disturb_nobody_and_leave_nothing_behind(target, siege):
    """scenario G1, scenario G2, scenario G3, scenario G4, scenario G6."""
    row = besiege(target, siege, FRAMES, SEED)

    assert row.troubles == [], f"KVD_SEED={SEED}"
    assert row.frames >= FRAMES
    assert row.answered + row.counted > 0


@pytest.mark.parametrize("family", POOLS)
def test_core_answers_every_hostile_input_once_and_keeps_every_invariant(family):
    try:
        answers = besiege_core(2 * FRAMES, SEED, POOLS[family])
    except Exception as error:
        error.add_note(f"KVD_SEED={SEED} KVD_FRAMES={FRAMES}")
        raise
    assert answers > FRAMES / 10


@pytest.mark.parametrize("family", ["mha", "hisparse", "everything"])
def test_hostile_inputs_meet_copies_that_end_well_and_badly(family):
    """A siege that carries out no copy never learns whether a fetch is answered."""
    fed: Counter[str] = Counter()
    for seed in range(1, 5):
        siege = CoreSiege(seed, POOLS[family])
        siege.storm(40_000)
        fed.update(siege.fed)

    assert fed["Copied"] > fed["CopyFailed"] > 0
    assert fed["TransferGone"] > 0


def test_order_socket_raises_one_typed_error_whatever_it_is_given():
    readable = besiege_orders(4 * FRAMES, SEED)

    assert 0 < readable < 4 * FRAMES


def test_metadata_raises_one_typed_error_whatever_it_is_given():
    readable = besiege_metadata(2 * FRAMES, SEED)

    assert 0 < readable < 2 * FRAMES
