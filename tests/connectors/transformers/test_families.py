"""Further families: tokens are those of the model alone, or the model is refused in a sentence."""

from __future__ import annotations

import pytest
import torch

from kvd.client import KvdError
from kvd.connectors.transformers import node
from tests.connectors.transformers.families import REFUSED, SERVED, VOCABULARY, built
from tests.connectors.transformers.world import (
    answered,
    daemon_for,
    nothing_is_held,
    served,
)

PAGE = 16
PROMPT = 150
HIT = (PROMPT - 1) // PAGE * PAGE


def prompt(count: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (1, count), generator=draw)


@pytest.mark.parametrize("keeps", SERVED)
def test_tokens_are_equal_cold_and_hit_and_in_the_next_turn(keeps: str) -> None:
    model, first = built(SERVED[keeps]), prompt(PROMPT, seed=7)
    alone = answered(model, first)
    assert len(set(alone[0, PROMPT:].tolist())) > 5, "tokens that are all one show nothing"
    second = torch.cat([alone, prompt(37, seed=8)], dim=1)
    alone_again = answered(model, second)
    with daemon_for(model) as daemon:
        with served(model, daemon) as made:
            for hit in (0, HIT):
                assert torch.equal(answered(model, first), alone)
                assert made.counts.hit_tokens == hit
            nothing_is_held(daemon)
            # What another prompt has left in the model, if anything, is not gone on from.
            answered(model, prompt(40, seed=9))
            assert torch.equal(answered(model, second), alone_again)
            assert made.counts.hit_tokens >= 2 * HIT
        nothing_is_held(daemon)


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_page_can_hold_is_refused_in_a_sentence(what: str) -> None:
    row, why = REFUSED[what]
    with pytest.raises(KvdError, match=rf"no pages for the cache of \w+: {why}"):
        node(built(row), "ipc:///tmp/kvd-there-is-none/client.sock")
