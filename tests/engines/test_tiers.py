"""vLLM and a tier below the pool: what has left memory is read by another engine, not computed."""

from __future__ import annotations

import itertools
import re
import time

import pytest

from kvd.client import connect_sync
from tests.connectors.vllm.stand_ins import COMES_S
from tests.engines.environment import PYTHON
from tests.engines.forks import IDS, PATIENT, WARM, prompt
from tests.engines.test_vllm import POOL
from tests.support.daemons import one_daemon

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="KVD_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(600),
]

CACHED = 288
WRITTEN_S = 0.2
"""What is next to be evicted is written in that time, most often; what was not is done anew."""

OPTIONS = PATIENT | {"kvd.computes_per_s": 5}
"""What moves is looked at, not how soon: the tier may take a minute."""


def push_out(daemon, engine, namespace):
    """Ask other things until ``IDS`` lies on the disk, and not in memory any more."""
    end_s = time.monotonic() + COMES_S
    with connect_sync(daemon.client, name="looks") as node:
        for seed in itertools.count():
            told = node.match(IDS, namespace=namespace)
            if not told.tokens and told.tier_tokens == CACHED:
                return
            assert time.monotonic() < end_s, told
            is_lost = told.tokens + told.tier_tokens < CACHED
            engine.ask(IDS if is_lost else prompt(300, seed), drop=True)
            time.sleep(WRITTEN_S)


def test_what_lies_on_a_disk_alone_is_read_by_another_engine(forks, models, tmp_path):
    model = models / "model"
    _, alone = forks.answers(model, None, [WARM, {}])
    disk = {
        "directory": str(tmp_path / "disk"),
        "size": "256MiB",
        "max_moving": "4MiB",
        "wait_s": "60",
    }
    pool = POOL | {"pool.pages": "40"} | {f"tiers.disk.{key}": disk[key] for key in disk}
    with one_daemon(tmp_path, pool) as daemon:
        engine = forks.beside(model, daemon, OPTIONS)
        engine.ready()
        engine.ask(**WARM)
        (namespace,) = set(re.findall(r"kvd namespace (\S+) is of", engine.log.read_text()))
        push_out(daemon, engine, namespace)
        engine.close()

        _, found = forks.answers(model, daemon, [WARM, {}], OPTIONS)

        assert (found["cached"], found["tokens"]) == (CACHED, alone["tokens"])
        assert not daemon.snapshot().leases
