"""Real engines of every kind of KV cache that vLLM has on a CPU: served, or refused in words.

Each is compared with the same engine without kvd: a first one token by token, and a second one,
which does find what the first has cached, with one that has found as much in vLLM's own cache. Of
latents, for which vLLM has no cache of its own without AMX, with another that has found as much in
kvd: behind a hit, and behind what it has generated, the kernel has other last bits. The blocks that
it has loaded are compared with those that the first has computed, byte by byte. Where layers have
windows or states, so that vLLM takes blocks of a request back while that goes on, also with caches
too small for what runs, with prompts in chunks, with requests that are taken back, and over the
turns of a conversation. And prompts are handed from one node to another. All that takes nine
minutes on two cores that have much else to do.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from tests.engines.environment import PYTHON
from tests.engines.forks import PATIENT, WARM, engines_at, handed_over, prompt, tokens_of
from tests.support.daemons import one_daemon, two_daemons

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="KVD_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(900),
]

BF16 = {"dtype": "bfloat16"}
FLAG = {"disable_hybrid_kv_cache_manager": True}
SMALL = {"max_num_batched_tokens": 128}


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

PROCESSOR = Path("/proc/cpuinfo").read_text()

LATENTS = 32 if "amx_tile" in PROCESSOR else 16
"""Tokens of a block: of vLLM's kernels for latents each has its own."""

CHUNKS = {"environment": {"VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "1"}}

STEPS = {"max_num_batched_tokens": 32, "max_num_seqs": 8}
"""Of less than two blocks: each page has the state of its last token. And of one at most, since
vLLM's kernel for a CPU fails where another one would save a state in the middle of a step."""

STATE = (3 * (256 + 2 * 16) + 8 * 32 * 16) * 4
"""Of a layer: what its convolution last saw, and what it scans, of 4 bytes."""

ALONE = (3 * (512 + 2 * 16) + 16 * 32 * 16) * 4

SERVED = {
    "windows beside full attention": ("gemma", {}, pool_of(6, KV)),
    "the same as one group": ("gemma", FLAG, pool_of(6, KV)),
    "the same in blocks of 64": ("gemma", {"block_size": 64}, pool_of(6, 2 * KV, 64)),
    "the same in blocks of 128": ("gemma", {"block_size": 128}, pool_of(6, 4 * KV, 128)),
    "windows and sinks": ("gptoss", {}, pool_of(4, KV)),
    "windows alone": ("sliding", {}, pool_of(4, KV)),
    "blocks of unlike tokens": ("gemma4", {}, pool_of(8, 2 * KV, 64)),
    "pages of unlike sizes in one group": ("gemma4", FLAG, pool_of(1, 4 * KV + 2 * 2 * KV)),
    "chunks beside full attention": ("llama4", CHUNKS, pool_of(4, KV)),
    "the same as one group, as usual": ("llama4", {}, pool_of(4, KV)),
    "latents": ("mla", BF16 | {"block_size": LATENTS}, pool_of(3, LATENTS * 1152, LATENTS)),
    "states beside attention": ("falcon", STEPS, pool_of(1, 2 * (KV + STATE))),
    "states alone": ("mamba2", STEPS | {"enable_prefix_caching": True}, pool_of(2, ALONE)),
    "fp8": ("gemma", BF16 | {"kv_cache_dtype": "fp8_e4m3"}, pool_of(6, KV // 4)),
}
if "avx512_bf16" in PROCESSOR:  # which vLLM's kernel needs
    in_bf16 = BF16 | {"max_num_batched_tokens": 63}
    SERVED["states of linear attention"] = ("qwen3next", in_bf16, pool_of(1, 334_592))


@pytest.mark.parametrize("what", SERVED)
def test_what_one_engine_caches_another_finds(forks, families, tmp_path, what):
    name, engine, pool = SERVED[what]
    long, short = prompt(300), prompt(300)[:40]
    asks = [{"ids": long}, {"ids": short}, {"ids": [*long, *prompt(90, 2)], "bytes": True}]
    alone, log = forks.run(families / name, None, [WARM, *asks, *asks], **engine)
    if "requires x86 with AVX-512" in log:
        pytest.skip("vLLM has no such KV cache for this processor")
    with one_daemon(tmp_path, pool) as daemon:
        first = forks.answers(families / name, daemon, [WARM, *asks], PATIENT, **engine)
        again = forks.answers(families / name, daemon, [WARM, *asks], PATIENT, **engine)
    has_own = any(answer["cached"] for answer in alone)
    if has_own:
        assert tokens_of(first) == tokens_of(alone[:4])
        assert tokens_of(again[1:]) == tokens_of(alone[4:])
    else:
        # vLLM has no prefix cache for these here: only as much found has the same last bits.
        assert tokens_of(first[:2]) == tokens_of(alone[:2])
        assert first[2]["cached"] == again[2]["cached"] > 0
        assert tokens_of(again[2:3]) == tokens_of(first[2:3])
    page = int(pool["pool.page_size"])
    assert again[1]["cached"] == 300 // page * page
    assert again[3]["cached"] == 384 // page * page
    assert len({tuple(tokens) for tokens in tokens_of(alone[:4])}) == 4
    computed, loaded = first[3]["bytes"], again[3]["bytes"]
    assert bool(loaded) is has_own, "blocks are known by what vLLM finds them by"
    for found_by, digests in loaded.items():
        assert set(digests) <= set(computed[found_by])


REFUSED = {
    "states, and steps of two blocks": ("falcon", {}, "--max-num-batched-tokens 63"),
    "states of whole requests": ("mamba2", STEPS, "with --enable-prefix-caching"),
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


TOO_FEW = {
    "windows beside full attention": 34,
    "windows alone": 24,
    "blocks of unlike tokens": 34,
    "states beside attention": 24,
}
"""How many blocks are less than what the prompts below need together."""

BESIDE_ANSWERS = {"max_num_batched_tokens": 63, "long_prefill_token_threshold": 32}
"""A step has a block of a prompt and the next tokens of others: in one of 32 alone, where blocks of
prompts are whole, each prompt waits until no other one is answered, and nobody is preempted."""


@pytest.mark.parametrize("what", TOO_FEW)
def test_a_cache_that_is_too_small_for_what_runs(forks, families, tmp_path, what):
    """Requests are preempted in the middle of prompts and answers, and come back from pages."""
    name, engine, pool = SERVED[what]
    if "states" in what:
        engine = engine | BESIDE_ANSWERS
    # Two requests fit while their answers are short.
    answers = 100 if what == "windows beside full attention" else 40
    prompts = [prompt(250, seed) for seed in range(6)]
    turns = [[*prompts[0], *prompt(70, 9)], prompts[3], [*prompts[5][:130], *prompt(80, 9)]]
    asks = [
        WARM,
        {"ids": prompts[0], "more": prompts[1:], "max_tokens": answers},
        {"ids": turns[0], "more": turns[1:], "max_tokens": answers},
    ]
    alone = forks.answers(families / name, None, asks, **engine)
    tight = SMALL | engine | {"num_gpu_blocks_override": TOO_FEW[what], "max_model_len": 512}
    preempted = []
    with one_daemon(tmp_path, pool) as daemon:
        for n in range(2):
            found, log = forks.run(families / name, daemon, asks, PATIENT, **tight)
            assert isinstance(found, list), f"{found}\n{log[-3000:]}"
            assert tokens_of(found) == tokens_of(alone), f"engine {n}"
            assert "a bug in kvd's connector" not in log
            preempted += found[-1]["preempted"]
        page = int(pool["pool.page_size"])
        assert found[1]["cached"] == 250 // page * page
        totals = daemon.snapshot()
    assert preempted
    assert not totals.leases


@pytest.mark.parametrize("what", ["windows beside full attention", "states beside attention"])
def test_requests_that_are_taken_back(forks, families, tmp_path, what):
    """After so many steps: what they saved is found, and is theirs."""
    name, engine, pool = SERVED[what]
    small = SMALL | engine
    asks = [{"ids": prompt(400, n), "abort": n} for n in range(6)]
    again = [WARM, *({"ids": prompt(400, n)} for n in range(6))]
    alone = forks.answers(families / name, None, again, **engine)
    with one_daemon(tmp_path, pool) as daemon:
        found, log = forks.run(families / name, daemon, [*asks, *again], PATIENT, **small)
        assert isinstance(found, list), f"{found}\n{log[-3000:]}"
        assert tokens_of(found) == tokens_of(alone)
        found = forks.answers(families / name, daemon, again, PATIENT, **small)
        assert tokens_of(found) == tokens_of(alone)
        assert [answer["cached"] for answer in found[1:]] == [384] * 6


@pytest.mark.parametrize(
    "what", ["windows alone", "blocks of unlike tokens", "states beside attention"]
)
def test_turns_of_a_conversation(forks, families, tmp_path, what):
    """In turn by two engines: each finds what the other one has computed and generated."""
    name, engine, pool = SERVED[what]
    page = int(pool["pool.page_size"])
    with (
        one_daemon(tmp_path, pool) as daemon,
        contextlib.closing(forks.beside(families / name, **engine)) as alone,
    ):
        alone.ready()
        said = prompt(150)
        for turn in range(3):
            asks = [WARM, {"ids": said}]
            wanted = alone.ask(said)["tokens"]
            _, found = forks.answers(families / name, daemon, asks, PATIENT, **SMALL | engine)
            assert found["tokens"] == wanted
            if turn:
                assert found["cached"] >= (len(said) - 75) // page * page
            said = [*said, *wanted, *prompt(60, turn)]


@pytest.mark.parametrize(
    "what", ["windows beside full attention", "blocks of unlike tokens", "states beside attention"]
)
def test_a_prompt_that_another_node_prefilled(forks, families, tmp_path, what):
    """Its last page is partial: of groups with smaller blocks some have no block in it."""
    name, engine, pool = SERVED[what]
    page = int(pool["pool.page_size"])
    prompts = [prompt(n, 3) for n in (300, 192, 20, 700)]
    asks = [{"ids": ids, "max_tokens": 12} for ids in prompts]
    alone = forks.answers(families / name, None, asks, **engine)
    with (
        two_daemons(tmp_path, pool) as pair,
        engines_at(forks, families / name, (pair.prefill, engine), (pair.decode, engine)) as (p, d),
    ):
        for ids, wanted in zip(prompts, tokens_of(alone), strict=True):
            before = pair.decode.snapshot().totals.received_bytes
            answer = handed_over(p, d, ids, max_tokens=12)
            moved = pair.decode.snapshot().totals.received_bytes - before
            assert answer["tokens"] == wanted
            assert moved == -(-len(ids) // page) * page_bytes(pool), said(p, d)
            whole = (len(ids) - 1) // page * page
            assert answer["cached"] == (whole if "states" in what else len(ids) - 1)


def page_bytes(pool):
    return int(pool["pool.layers"]) * int(pool["pool.page_bytes"])


def said(*engines):
    """Of what went on without kvd, and why, in their logs."""
    lines = [line for engine in engines for line in engine.log.read_text().splitlines()]
    return "\n".join(line for line in lines if "kvd" in line and "WARNING" in line)
