"""vLLM itself, a small model with random weights, and real daemons: the same tokens as without kvd.

Opt-in: ``KVD_VLLM_PYTHON=PYTHON make test-engines``, by the interpreter of an environment
that has vLLM for the CPU and kvd without extras. What it lacks is said by ``environment``. All of
``tests/engines`` takes four minutes on two cores.
"""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.engines.engine import TO_DECODE, VllmEngine
from tests.engines.environment import PYTHON
from tests.support.daemons import two_daemons

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="KVD_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(600),
]

POOL = {
    "pool.family": "raw",
    "pool.layers": "8",
    "pool.page_size": "32",
    "pool.page_bytes": "32768",  # 32 tokens, 4 heads, 2 x 32 elements of 4 bytes
    "pool.pages": "400",
}


def engine_of(model: Path, endpoint: str | None, log: Path) -> VllmEngine:
    """Of the environment; ``endpoint`` of its daemon, or none."""
    options = {
        "kvd.endpoint": endpoint,
        "kvd.namespace": "tests",
        # Three engines and two daemons share this machine: what is looked for here is what moves,
        # not how soon.
        "kvd.probe_wait_s": 0.25,
    }
    return VllmEngine(PYTHON, model, log, options=None if endpoint is None else options)


@pytest.fixture(scope="module")
def engines(models, tmp_path_factory):
    """One engine for each of two daemons, and one without kvd."""
    directory, model = tmp_path_factory.mktemp("vllm"), models / "model"
    with two_daemons(directory, POOL) as pair, contextlib.ExitStack() as stack:
        found = {
            name: engine_of(model, endpoint, directory / f"{name}.log")
            for name, endpoint in (
                ("p", pair.prefill.client),
                ("d", pair.decode.client),
                ("alone", None),
            )
        }
        for engine in found.values():
            stack.callback(engine.close)
        for engine in found.values():
            engine.ready()
        yield found, pair


def prompt(n_tokens):
    return np.random.default_rng(n_tokens).integers(1, 4000, n_tokens).tolist()


@pytest.mark.parametrize("n_tokens", [300, 192, 20, 1500, 33])
def test_a_prompt_that_another_node_prefilled_gives_the_same_tokens(engines, n_tokens):
    found, pair = engines
    ids = prompt(n_tokens)
    wanted = found["alone"].ask(ids)["tokens"]
    prefilled = found["p"].ask(ids, 1, TO_DECODE)
    assert prefilled["params"]["kvd"]["peer"] == "p"
    before = pair.decode.snapshot().totals.received_bytes

    decoded = found["d"].ask(ids, 12, prefilled["params"])

    assert decoded["tokens"] == wanted
    # Its tokens would be the same if it had computed them: that KV has travelled is seen here.
    moved = pair.decode.snapshot().totals.received_bytes - before
    assert moved == -(-n_tokens // 32) * 8 * 32768


def ways_that_lead_nowhere(found, ids, other):
    """What a decode engine is told of a prompt's KV, by how it is wrong."""
    mine = found["p"].ask(ids, 1, TO_DECODE)["params"]["kvd"]
    yield "another prompt's", found["p"].ask(other, 1, TO_DECODE)["params"]["kvd"]
    yield "unknown", mine | {"room": "12345", "at": mine["at"] - 60}
    yield "out of range", mine | {"room": str(2**63)}
    assert found["d"].ask(ids, 1, {"do_remote_prefill": True, "kvd": mine})["cached"]
    yield "consumed", mine
    yield "a node that is not there", mine | {"peer": "nobody"}


def test_a_reference_that_leads_nowhere_gives_the_same_tokens_and_is_not_waited_for(engines):
    found, _ = engines
    ids, other = prompt(333), prompt(334)
    wanted = found["alone"].ask(ids)["tokens"]
    assert found["alone"].ask(other)["tokens"] != wanted
    took_s = {}
    for number, (name, told) in enumerate(ways_that_lead_nowhere(found, ids, other)):
        # Of a prompt of its own: of the same one much would be cached by now.
        mine = [2000 + number, *ids]
        wanted = found["alone"].ask(mine)["tokens"]
        found["d"].ask([3000 + number, *ids])  # computed, as long as the next one but for the wait
        params = {"do_remote_prefill": True, "kvd": told}
        answer = found["d"].ask(mine, 12, params, reset=True)
        assert answer["tokens"] == wanted, name
        assert answer["cached"] == 0, name
        took_s[name] = answer["took_s"]
    # Computing takes far less than a second; waiting for a room took two.
    assert max(took_s.values()) < 2.0, took_s


def test_a_second_turn_finds_what_was_decoded_when_the_engine_has_dropped_it(engines):
    found, _ = engines
    first = prompt(400)
    answer = found["d"].ask(first, 40)["tokens"]
    turn = [*first, *answer, *prompt(50)]
    wanted = found["alone"].ask(turn)["tokens"]
    again = found["d"].ask(turn, reset=True)
    assert again["tokens"] == wanted
    assert again["cached"] == 416


def test_a_page_that_is_damaged_is_noticed_by_the_tokens(engines):
    """The negative control: what is compared above does depend on what is loaded."""
    found, pair = engines
    ids = prompt(700)
    wanted = found["d"].ask(ids)["tokens"]
    damage = (
        "import kvd.client, sys\n"
        "with kvd.client.connect_sync(sys.argv[1], name='damage') as node:\n"
        "    lease = node.lease(list(map(int, sys.argv[2].split(','))), hold='prefix',\n"
        "                       namespace=sys.argv[3])\n"
        "    assert lease.prefix_len == 672, lease.prefix_len\n"
        "    for layer in range(8):\n"
        "        (raw,) = node.pool('main').arrays('kv', layer=layer).values()\n"
        "        raw[lease.pages[3]] = 0\n"
    )
    subprocess.run(
        [
            *(PYTHON, "-c", damage, pair.decode.client, ",".join(map(str, ids))),
            found["d"].namespace,
        ],
        check=True,
        cwd="/",
    )
    again = found["d"].ask(ids, reset=True)
    assert again["cached"] == 672
    assert again["tokens"] != wanted
