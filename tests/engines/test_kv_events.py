"""A router finds by KV events what a vLLM has cached at its daemon, by the prompt's token ids."""

from __future__ import annotations

import pytest

from kvd.harness.daemons import free_port
from tests.engines.environment import PYTHON
from tests.engines.forks import IDS, PATIENT
from tests.engines.test_vllm import POOL
from tests.kv_events.llmd import LlmdSubscriber
from tests.support.daemons import one_daemon

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="KVD_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(600),
]

MODEL = "small"
PAGE = 32
CACHED = 288
"""Whole blocks of ``IDS``."""


def test_what_a_vllm_has_computed_is_found_by_its_tokens(forks, models, tmp_path):
    listen, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    settings = {
        **POOL,
        "kv_events.enabled": "true",
        "kv_events.model": MODEL,
        "kv_events.listen": listen,
        "kv_events.replay": replay,
    }
    with one_daemon(tmp_path, settings) as daemon:
        router = LlmdSubscriber(listen, replay)
        try:
            asks = [{"ids": IDS, "max_tokens": 1}]
            found, log = forks.run(models / "model", daemon, asks, PATIENT)
            assert isinstance(found, list), f"{found}\n{log[-3000:]}"
            n_blocks = CACHED // PAGE
            assert router.until(lambda one: one.index.found(IDS, MODEL, PAGE) >= n_blocks)
            assert (router.dropped, router.failures) == ([], 0)
        finally:
            router.close()
