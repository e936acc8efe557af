"""Real engines in which another model drafts: its KV is found, handed over, and drafts as well.

Tokens are verified, so they are right whatever is drafted: that the KV of the layers that draft is
what it was is seen by how much of it is accepted. ``drafts.py`` has a draft that is right nearly
always as long as it sees the prompt.
"""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.engines.engine import TO_DECODE
from tests.engines.environment import PYTHON
from tests.engines.forks import HERE, PATIENT, WARM, engines_at, prompt, tokens_of
from tests.support.daemons import one_daemon, two_daemons

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="KVD_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(900),
]

FIRST = prompt(300)
ASKS = [{"ids": FIRST, "max_tokens": 48}, {"ids": prompt(200, 3), "max_tokens": 48}]

KINDS = {"eagle": ("eagle", 5), "eagle3": ("eagle3", 5), "target": ("draft_model", 8)}
"""By what drafts: vLLM's name for how, and how many layers there are together."""


def drafts(models, name, **more):
    method = KINDS.get(name, KINDS["eagle"])[0]
    told = {"method": method, "model": str(models / name), "num_speculative_tokens": 3}
    return {"speculative_config": told | more}


def pool_of(layers):
    return {
        "pool.family": "raw",
        "pool.layers": str(layers),
        "pool.page_size": "32",
        "pool.page_bytes": "32768",  # 32 tokens, 4 heads, 2 x 32 elements of 4 bytes
        "pool.pages": "400",
    }


@pytest.fixture(scope="module")
def models(able, tmp_path_factory):
    """A folder: see ``drafts.py``."""
    directory = tmp_path_factory.mktemp("drafts")
    subprocess.run([PYTHON, str(HERE / "drafts.py"), str(directory)], check=True)
    return directory


@pytest.fixture(scope="module")
def alone(forks, models):
    """What the model answers by itself."""
    return tokens_of(forks.answers(models / "target", None, ASKS))


def steps_of(answers):
    """Of each answer, step by step, how many tokens were drafted, and how many of them kept."""
    ends = [0, *(len(answer["drafted"]) for answer in answers)]
    found = zip(answers, ends[:-1], ends[1:], strict=True)
    return [[tuple(step) for step in answer["drafted"][first:end]] for answer, first, end in found]


def accepted(answers):
    """Of each answer, the share of what was drafted that was kept."""
    return [
        sum(kept for _, kept in steps) / sum(drafted for drafted, _ in steps)
        for steps in steps_of(answers)
    ]


@pytest.mark.parametrize("name", KINDS)
def test_kv_of_the_layers_that_draft_is_found_by_another_engine(
    forks, models, alone, tmp_path, name
):
    engine = drafts(models, name)
    own = accepted(forks.answers(models / "target", None, ASKS, **engine))
    assert min(own) > 0.8 or name == "eagle3"
    with one_daemon(tmp_path, pool_of(KINDS[name][1])) as daemon:
        for wanted in ([0, 0], [288, 192]):
            how = (daemon, [*ASKS, WARM], PATIENT)
            found, log = forks.run(models / "target", *how, **engine)
            assert isinstance(found, list), f"{found}\n{log[-3000:]}"
            assert "a bug in kvd's connector" not in log
            assert tokens_of(found[:2]) == alone
            assert [answer["cached"] for answer in found[:2]] == wanted
            # The negative control is below: without the KV of its layers it is less.
            assert accepted(found[:2]) == pytest.approx(own, abs=0.01)
        assert not daemon.snapshot().leases


def test_an_engine_whose_draft_has_other_weights_finds_nothing(forks, models, alone, tmp_path):
    with one_daemon(tmp_path, pool_of(5)) as daemon:
        for name in ("eagle", "other"):
            found = forks.answers(
                models / "target", daemon, [*ASKS, WARM], PATIENT, **drafts(models, name)
            )
            assert tokens_of(found[:2]) == alone
            assert [answer["cached"] for answer in found[:2]] == [0, 0]


def test_a_prompt_is_handed_over_with_what_drafts(forks, models, alone, tmp_path):
    engine = drafts(models, "eagle")
    own = steps_of(forks.answers(models / "target", None, ASKS, **engine))
    with two_daemons(tmp_path, pool_of(5)) as pair:
        ends = [(pair.prefill, engine), (pair.decode, engine)]
        with engines_at(forks, models / "target", *ends) as (prefill, decode):
            found = []
            warm = decode.ask(**WARM)
            for ask in ASKS:
                told = prefill.ask(ask["ids"], max_tokens=1, params=TO_DECODE)["params"]
                assert told["kvd"]["peer"]
                found.append(decode.ask(**ask, params=told))
    assert tokens_of(found) == alone
    assert [answer["cached"] for answer in found] == [299, 199]
    # Where one token is left to compute, vLLM pads its step to the size of one that verifies.
    assert steps_of([warm, *found])[1:] == [[(3, 0), *steps] for steps in own]


def test_without_the_kv_of_its_layers_a_draft_is_worse(forks, models, alone, tmp_path):
    """The negative control of what is compared here: pages whose last layer is empty."""
    engine = drafts(models, "eagle")
    with one_daemon(tmp_path, pool_of(5)) as daemon:
        found, log = forks.run(models / "target", daemon, [*ASKS, WARM], PATIENT, **engine)
        assert isinstance(found, list), f"{found}\n{log[-3000:]}"
        own = accepted(found[:2])
        (namespace,) = set(re.findall(r"kvd namespace (\S+) is of", log))
        damage = (
            "import kvd.client, sys\n"
            "with kvd.client.connect_sync(sys.argv[1], name='damage') as node:\n"
            "    lease = node.lease(list(map(int, sys.argv[2].split(','))), hold='prefix',\n"
            "                       namespace=sys.argv[3])\n"
            "    assert lease.prefix_len == 288, lease.prefix_len\n"
            "    (raw,) = node.pool('main').arrays('kv', layer=4).values()\n"
            "    for page in lease.pages:\n"
            "        raw[page] = 0\n"
        )
        told = [PYTHON, "-c", damage, daemon.client, ",".join(map(str, FIRST)), namespace]
        subprocess.run(told, check=True, cwd="/")
        found = forks.answers(models / "target", daemon, [ASKS[0], WARM], PATIENT, **engine)
    assert (found[0]["cached"], found[0]["tokens"]) == (288, alone[0])
    assert accepted(found[:1])[0] < own[0] - 0.1
