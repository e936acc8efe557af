"""What the daemon, the pool or a copy cannot do costs no token; the rest is the contract's.

``tests/connectors/contract`` has daemons that end, hang and come back at each step, scripts that
are interrupted or killed, and pools of another kind.
"""

from __future__ import annotations

import pytest
import torch

from kvd.client import KvdError, connect_sync
from kvd.connectors.transformers import node
from kvd.connectors.transformers.copies import PageCopies
from tests.connectors.transformers.world import (
    answered,
    daemon_for,
    model_of,
    nothing_is_held,
    prompt,
    served,
)

IDS = prompt(100)


def test_a_full_pool_serves_hits_and_saves_nothing() -> None:
    model = model_of("llama")
    other = prompt(300, seed=9)
    alone, other_alone = answered(model, IDS), answered(model, other)
    with daemon_for(model) as daemon, served(model, daemon) as node:
        answered(model, IDS, max_new_tokens=2)
        with connect_sync(daemon.client, name="greedy") as greedy:
            pages = greedy.pool("main").memory.components[0].pages
            greedy.lease([1], reserve_tokens=(pages - 1 - 8) * 16)
            assert torch.equal(answered(model, IDS), alone)
            assert node.counts.hit_tokens == 96
            saved = node.counts.saved_tokens
            assert torch.equal(answered(model, other), other_alone)
            assert node.counts.saved_tokens == saved
        assert torch.equal(answered(model, other), other_alone)
        assert node.counts.saved_tokens > saved
        nothing_is_held(daemon)


def test_a_copy_that_fails_is_not_committed(monkeypatch) -> None:
    """What was half written is nobody's."""
    model = model_of("llama")
    alone = answered(model, IDS)
    plain = PageCopies.save

    def fails(self, lease, cache, n_tokens):
        plain(self, lease, cache, n_tokens // 2 // 16 * 16)
        raise RuntimeError("out of memory")

    with daemon_for(model) as daemon, served(model, daemon) as node:
        monkeypatch.setattr(PageCopies, "save", fails)
        assert torch.equal(answered(model, IDS), alone)
        monkeypatch.undo()
        assert torch.equal(answered(model, IDS), alone)
        assert node.counts.hit_tokens == 0
        nothing_is_held(daemon)


def test_a_pool_of_another_model_is_refused_with_the_section_that_fits() -> None:
    model, other = model_of("llama"), model_of("qwen")
    with daemon_for(other) as daemon, pytest.raises(KvdError) as refused:
        served(model, daemon)
    assert refused.value.code == "layout-mismatch"
    assert '[pool]\nfamily = "mha"\nlayers = 4' in str(refused.value)
    assert "heads = 2" in str(refused.value)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"pool": "mian"}, "there is no pool 'mian'; there is main"),
        ({"endpoint": "tcp://127.0.0.1:1"}, "is no client endpoint"),
        ({"name": "a\nb"}, "a session's name is"),
    ],
)
def test_what_cannot_be_whatever_daemon_comes_is_an_error_at_once(how, what) -> None:
    model = model_of("llama")
    with daemon_for(model) as daemon:
        with pytest.raises(KvdError, match="bad-request") as refused:
            node(model, **{"endpoint": daemon.client, **how})
        assert what in str(refused.value)
        daemon.wait_for(lambda: not daemon.snapshot().clients, "a session is left", 60)
