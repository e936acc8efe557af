"""Prompts of which pages lie in a tier below the pool: both halves with real daemons and a disk."""

from __future__ import annotations

import itertools
import time

from kvd.client import connect_sync
from tests.connectors.vllm.stand_ins import COMES_S, Request
from tests.connectors.vllm.test_daemons import (  # noqa: F401 - the last two are fixtures
    POOL,
    PROMPT,
    engine_of,
    patience,
)
from tests.support.daemons import two_daemons

NAMESPACE = "model"
WRITTEN_S = 0.1
"""What is next to be evicted is written in that time, most often; what was not is done anew."""


def with_disk(directory):
    """A pool, and a disk below it."""
    disk = {"directory": str(directory / "disk"), "size": "64MiB", "max_moving": "1MiB"}
    return POOL | {"pool.pages": "128"} | {f"tiers.disk.{key}": disk[key] for key in disk}


def other(number):
    """A prompt that does not begin as ``PROMPT`` does, nor as any other one."""
    return [7000 + 128 * number + n for n in range(128)]


def push_out(engine, daemon):
    """Compute others until ``PROMPT`` lies in the tier, and not in the pool any more."""
    end_s = time.monotonic() + COMES_S
    with connect_sync(daemon.client, name="looks") as node:
        for number in itertools.count():
            told = node.match(PROMPT, namespace=NAMESPACE)
            if not told.tokens and told.tier_tokens == len(PROMPT):
                return
            assert time.monotonic() < end_s, told
            is_lost = told.tokens + told.tier_tokens < len(PROMPT)
            prompt = PROMPT if is_lost else other(number)
            engine.run(Request(f"pushes {number}", prompt))
            time.sleep(WRITTEN_S)


def test_a_prompt_that_another_node_sends_comes_though_a_disk_has_it_too(tmp_path, engine_of):  # noqa: F811
    (tmp_path / "disks").mkdir()
    of_p = POOL | {"pool.pages": "128"}
    with two_daemons(tmp_path, with_disk(tmp_path / "disks"), prefill=of_p) as pair:
        p, d = engine_of(pair.prefill), engine_of(pair.decode)
        push_out(d, pair.decode)
        _, told = p.run(Request("sent", PROMPT, {"do_remote_decode": True}))

        found, _ = d.run(Request("again", PROMPT, told))

        assert found == len(PROMPT) - 1
        assert d.unmet == []
