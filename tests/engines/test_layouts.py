"""Real engines of every kind of KV cache that vLLM has on a CPU: served, or refused in words.

Each is compared with the same engine without kvd, token by token, and a second one does find what
the first has cached. Where layers have windows, so that vLLM takes blocks of a request back while
that goes on, also with caches too small for what runs, with prompts in chunks, with requests that
are taken back, and over the turns of a conversation.
"""

from __future__ import annotations

import re
import subprocess

import numpy as np
import pytest

from tests.engines.environment import PYTHON, flaw
from tests.engines.forks import HERE, Forks
from tests.support.daemons import one_daemon

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="KVD_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(900),
]

BF16 = {"dtype": "bfloat16"}
FLAG = {"disable_hybrid_kv_cache_manager": True}
SMALL = {"max_num_batched_tokens": 128}


PATIENT = {"kvd.probe_wait_s": 0.25}
"""Several engines and daemons share this machine: what moves is looked at, not how soon."""

WARM = {"ids": [9] * 20}
"""The first step joins the session, and a load waits for that 50 ms at most: this is no load."""


def prompt(n_tokens, seed=1):
    return np.random.default_rng([n_tokens, seed]).integers(1, 4000, n_tokens).tolist()


def pool_of(layers, page_bytes, page_size=32):
    return {
        "pool.family": "raw",
        "pool.layers": str(layers),
        "pool.page_size": str(page_size),
        "pool.page_bytes": str(page_bytes),
        "pool.pages": "400",
    }


KV = 32 * 4 * 2 * 64 * 4
"""A block of 32 tokens: K and V of 4 heads, 64 wide, of 4 bytes."""

SERVED = {
    "windows beside full attention": ("gemma", {}, pool_of(6, KV)),
    "the same as one group": ("gemma", FLAG, pool_of(6, KV)),
    "the same in blocks of 64": ("gemma", {"block_size": 64}, pool_of(6, 2 * KV, 64)),
    "windows and sinks": ("gptoss", {}, pool_of(4, KV)),
    "windows alone": ("sliding", {}, pool_of(4, KV)),
    "blocks of unlike tokens": ("gemma4", {}, pool_of(8, 2 * KV, 64)),
    "pages of unlike sizes in one group": ("gemma4", FLAG, pool_of(1, 4 * KV + 2 * 2 * KV)),
    "fp8": ("gemma", BF16 | {"kv_cache_dtype": "fp8_e4m3"}, pool_of(6, KV // 4)),
}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    why = flaw()
    if why:
        pytest.fail(why, pytrace=False)
    directory = tmp_path_factory.mktemp("families")
    names = ["gemma", "gemma4", "gptoss", "sliding", "states"]
    subprocess.run([PYTHON, str(HERE / "families.py"), str(directory), *names], check=True)
    return directory


@pytest.fixture(scope="module")
def forks(families, tmp_path_factory):
    made = Forks(tmp_path_factory.mktemp("forks"))
    yield made
    made.close()


def tokens_of(answers):
    return [answer["tokens"] for answer in answers]


@pytest.mark.parametrize("what", SERVED)
def test_what_one_engine_caches_another_finds(forks, families, tmp_path, what):
    name, engine, pool = SERVED[what]
    long, short = prompt(300), prompt(300)[:40]
    asks = [WARM, {"ids": long}, {"ids": short}, {"ids": [*long, *prompt(90, 2)]}]
    alone, log = forks.run(families / name, None, asks, **engine)
    if "requires x86 with AVX-512" in log:
        pytest.skip("vLLM has no such KV cache for this processor")
    with one_daemon(tmp_path, pool) as daemon:
        first = forks.answers(families / name, daemon, asks, PATIENT, **engine)
        assert tokens_of(first) == tokens_of(alone)
        again = forks.answers(families / name, daemon, asks, PATIENT, **engine)
    assert tokens_of(again) == tokens_of(alone)
    page = int(pool["pool.page_size"])
    assert again[1]["cached"] == 300 // page * page
    assert again[3]["cached"] == 384 // page * page
    assert len({tuple(tokens) for tokens in tokens_of(alone)}) == len(alone)


REFUSED = {
    "states": ("states", {}, "MambaSpec.*run it without kvd"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_served_is_refused_in_words(forks, families, tmp_path, what):
    name, engine, told = REFUSED[what]
    with one_daemon(tmp_path, pool_of(6, KV)) as daemon:
        refused, _ = forks.run(families / name, daemon, **engine)
    assert re.search(told, refused["error"])


@pytest.mark.parametrize("what", ["windows beside full attention", "blocks of unlike tokens"])
def test_a_pool_that_does_not_fit_names_what_does(forks, families, tmp_path, what):
    name, engine, pool = SERVED[what]
    with one_daemon(tmp_path, pool_of(5, 512)) as daemon:
        refused, _ = forks.run(families / name, daemon, **engine)
    wanted = {
        key: re.search(rf"{key} = (\d+)", refused["error"]) for key in ("layers", "page_bytes")
    }
    assert {key: found and found[1] for key, found in wanted.items()} == {
        key: pool[f"pool.{key}"] for key in wanted
    }


WINDOWS = ["windows beside full attention", "windows and sinks", "windows alone"]


@pytest.mark.parametrize("what", [*WINDOWS, "blocks of unlike tokens"])
def test_a_cache_that_is_too_small_for_what_runs(forks, families, tmp_path, what):
    """Requests are preempted in the middle of prompts and answers, and come back from pages."""
    name, engine, pool = SERVED[what]
    prompts = [prompt(250, seed) for seed in range(6)]
    turns = [[*prompts[0], *prompt(70, 9)], prompts[3], [*prompts[5][:130], *prompt(80, 9)]]
    asks = [
        WARM,
        {"ids": prompts[0], "more": prompts[1:], "max_tokens": 40},
        {"ids": turns[0], "more": turns[1:], "max_tokens": 40},
    ]
    alone = forks.answers(families / name, None, asks, **engine)
    blocks = 34 if what != "windows alone" else 24
    tight = engine | SMALL | {"num_gpu_blocks_override": blocks, "max_model_len": 512}
    with one_daemon(tmp_path, pool) as daemon:
        for n in range(2):
            found, log = forks.run(families / name, daemon, asks, PATIENT, **tight)
            assert isinstance(found, list), f"{found}\n{log[-3000:]}"
            assert tokens_of(found) == tokens_of(alone), f"engine {n}"
            assert "a bug in kvd's connector" not in log
        page = int(pool["pool.page_size"])
        assert found[1]["cached"] == 250 // page * page
        totals = daemon.snapshot()
    assert not totals.leases


@pytest.mark.parametrize("what", WINDOWS)
def test_requests_that_are_taken_back(forks, families, tmp_path, what):
    """After so many steps: what they saved is found, and is theirs."""
    name, engine, pool = SERVED[what]
    asks = [{"ids": prompt(400, n), "abort": n} for n in range(6)]
    again = [WARM, *({"ids": prompt(400, n)} for n in range(6))]
    alone = forks.answers(families / name, None, again, **engine)
    with one_daemon(tmp_path, pool) as daemon:
        found, log = forks.run(families / name, daemon, [*asks, *again], PATIENT, **engine, **SMALL)
        assert isinstance(found, list), f"{found}\n{log[-3000:]}"
        assert tokens_of(found) == tokens_of(alone)
        found = forks.answers(families / name, daemon, again, PATIENT, **engine, **SMALL)
        assert tokens_of(found) == tokens_of(alone)
        assert [answer["cached"] for answer in found[1:]] == [384] * 6


@pytest.mark.parametrize("what", [*WINDOWS, "blocks of unlike tokens"])
def test_turns_of_a_conversation(forks, families, tmp_path, what):
    """In turn by two engines: each finds what the other one has computed and generated."""
    name, engine, pool = SERVED[what]
    page = int(pool["pool.page_size"])
    with one_daemon(tmp_path, pool) as daemon:
        said = prompt(150)
        for turn in range(3):
            asks = [WARM, {"ids": said}]
            _, alone = forks.answers(families / name, None, asks, **engine)
            _, found = forks.answers(families / name, daemon, asks, PATIENT, **engine, **SMALL)
            assert found["tokens"] == alone["tokens"]
            if turn:
                assert found["cached"] >= (len(said) - 75) // page * page
            said = [*said, *found["tokens"], *prompt(60, turn)]
