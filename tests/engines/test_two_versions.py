"""Engines of two versions of vLLM at one daemon, and at two nodes: none takes the other's KV.

``KVD_VLLM_OTHER_PYTHON`` is the interpreter of the second one: ``make test-engines`` names the
oldest version of the same torch.
"""

from __future__ import annotations

import contextlib
import os
import re

import pytest

from tests.engines.environment import PYTHON, flaw
from tests.engines.forks import IDS, PATIENT, WARM, Forks, handed_over
from tests.engines.test_vllm import POOL
from tests.support.daemons import one_daemon, two_daemons

OTHER = os.environ.get("KVD_VLLM_OTHER_PYTHON", "")

pytestmark = [
    pytest.mark.skipif(
        not (PYTHON and OTHER), reason="KVD_VLLM_OTHER_PYTHON names no second version of vLLM"
    ),
    pytest.mark.timeout(600),
]

CACHED = 288


@pytest.fixture(scope="module")
def both(able, tmp_path_factory):
    """Engines of each version."""
    assert not flaw(OTHER)
    made = [Forks(tmp_path_factory.mktemp("forks"), python) for python in (PYTHON, OTHER)]
    yield made
    for forks in made:
        forks.close()


@pytest.fixture(scope="module")
def model(models):
    return models / "model"


@pytest.fixture(scope="module")
def alone(both, model):
    """What each says without kvd: they may differ in the last bits, and so in a token."""
    return [forks.answers(model, None, [WARM, {}])[1]["tokens"] for forks in both]


def parts_of(log):
    (line,) = [line for line in log.splitlines() if "kvd namespace " in line]
    told = line.partition(" is of ")[2]
    return dict(part.split("=", 1) for part in told.split(", ") if "=" in part)


def test_neither_finds_what_the_other_has_cached(both, model, alone, tmp_path):
    logs = []
    with one_daemon(tmp_path, POOL) as daemon:
        for cached in (0, CACHED):
            for forks, tokens in zip(both, alone, strict=True):
                found, log = forks.run(model, daemon, [WARM, {}], PATIENT)
                assert (found[1]["cached"], found[1]["tokens"]) == (cached, tokens)
                logs.append(log)
    one, other = map(parts_of, logs[:2])
    assert one["engine"] != other["engine"]
    assert one["weights"] == other["weights"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_prompt_that_another_version_prefilled_is_computed(both, model, alone, tmp_path, order):
    with two_daemons(tmp_path, POOL) as pair, contextlib.ExitStack() as stack:
        engines = []
        for at, daemon in zip(order, (pair.prefill, pair.decode), strict=True):
            engines.append(both[at].beside(model, daemon, PATIENT))
            stack.callback(engines[-1].close)
        for engine in engines:
            engine.ready()
            engine.ask(**WARM)
        found = handed_over(*engines, IDS)
        moved = pair.decode.snapshot().totals.received_bytes
    assert (found["tokens"], found["cached"], moved) == (alone[order[1]], 0, 0)


def test_a_pool_of_one_version_refuses_the_other(both, model, tmp_path):
    one, other = both
    with one_daemon(tmp_path, POOL) as daemon:
        _, log = one.run(model, daemon, [{"ids": IDS[:40]}], PATIENT)
    tag = " ".join(re.search(r"blocks packed as '([^']*)'", log)[1].split()[:2])
    (tmp_path / "tagged").mkdir()
    with one_daemon(tmp_path / "tagged", POOL | {"pool.tag": tag}) as daemon:
        one.answers(model, daemon, [WARM], PATIENT)
        refused, _ = other.run(model, daemon, [WARM], PATIENT)
    assert f"it is '{tag}'" in refused["error"]
