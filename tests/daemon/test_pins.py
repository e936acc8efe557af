"""Pins of a real daemon: what is pinned outlives what is not, and its owner, and not the daemon."""

from __future__ import annotations

import time

import pytest

from kvd.client import connect_sync as connect
from kvd.errors import KvdError
from kvd.wire import admin
from tests.daemon.kv import PAGE, SHAPE, tokens_of, write
from tests.support.daemons import two_daemons

PROMPT_TOKENS = 24 * PAGE
N_PROMPTS = 14
"""More than the pool has room for."""
LIMIT_S = 30.0


def put(node, seed: int) -> None:
    tokens = tokens_of(PROMPT_TOKENS, seed)
    lease = node.lease(tokens)
    write(node, lease, tokens)
    lease.release(())


def cached(node, seed: int) -> int:
    return node.match(tokens_of(PROMPT_TOKENS, seed)).tokens


@pytest.fixture
def daemon(tmp_path):
    with two_daemons(tmp_path, SHAPE) as pair:
        yield pair.decode


def test_what_is_pinned_stays_and_what_is_not_goes(daemon):
    with connect(daemon.client, name="engine") as node:
        put(node, 0)
        pinned = node.pin(tokens_of(PROMPT_TOKENS, 0), ttl_s=60, owner="system prompt")
        for seed in range(1, N_PROMPTS):
            put(node, seed)

        assert pinned.tokens == PROMPT_TOKENS
        assert cached(node, 0) == PROMPT_TOKENS
        assert cached(node, 1) < PROMPT_TOKENS
        (row,) = node.snapshot().pins
        assert (row.owner, row.tokens) == ("system prompt", PROMPT_TOKENS)

        node.unpin(pinned)
        assert not node.snapshot().pins
        with pytest.raises(KvdError, match="there is no pin"):
            node.unpin(pinned)


def test_a_pin_ends_with_its_engine_and_an_operators_with_the_daemon(daemon):
    with connect(daemon.client, name="engine") as node:
        put(node, 0)
        node.pin(tokens_of(PROMPT_TOKENS, 0), ttl_s=60)
        (edge,) = daemon.ask(admin.ShowTree(1), admin.Tree).nodes
        daemon.ask(admin.Pin(1, "node", edge.id, 60.0, "ops"), admin.Report)
        assert len(node.snapshot().pins) == 2

    until = time.monotonic() + LIMIT_S
    with connect(daemon.client, name="other") as node:
        while len(node.snapshot().pins) == 2 and time.monotonic() < until:
            time.sleep(0.05)
        assert [pin.owner for pin in node.snapshot().pins] == ["ops"]
        assert cached(node, 0) == PROMPT_TOKENS
