"""Long walks at random from every start, each followed by calm."""

from __future__ import annotations

import pytest

from tests.explore.case import STARTS
from tests.explore.search import walk, walks


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_walks_of_25_steps_are_safe_and_end(start):
    walks(start, range(12))


@pytest.mark.parametrize(
    ("start", "seed"),
    [
        # Two Settled and a Closed are lost, and time passes: who was asked had answered all the
        # while, and the sender took what the network lost for its silence.
        ("verifying", 33_000_234),
    ],
)
def test_walks_that_were_not_safe_once(start, seed):
    walk(start, seed)
