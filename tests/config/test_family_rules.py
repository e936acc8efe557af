"""What a family cannot be combined with is refused by the check, each thing with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvd.config import load
from kvd.config.keys import KEYS, KeyKind
from kvd.config.pool import BELONGS
from kvd.families import POOLS as FAMILIES
from kvd.families.family import HEADS, among
from tests.config.pools import HOST, POOLS, PREFILL_ONLY, config_of, findings

if TYPE_CHECKING:
    from pathlib import Path

WITH_HEADS = among([name for name, row in FAMILIES.items() if HEADS in row.groups])
"""``mha, swa, hisparse and recurrent`` as long as there are no others."""
WITHOUT_HEADS = (
    "mla and raw keep none" if len(FAMILIES) == 6 else BELONGS["heads"][1].split("; ")[1]
)
MODE = 'is refused with cache.mode = "prefill-only"'


@pytest.mark.parametrize("family", POOLS)
def test_the_least_of_each_family_is_valid(family: str) -> None:
    assert findings(*POOLS[family]) == []


@pytest.mark.parametrize(
    "sets",
    [
        PREFILL_ONLY,
        [*PREFILL_ONLY, "pool.dtype=float8_e4m3fn", "pool.size=64GiB"],
        ["cache.mode=off"],
        [*POOLS["swa"], "cache.mode=off", "engine.chunk_tokens=512"],
        [*POOLS["hisparse"], "engine.chunk_tokens=512", "engine.context_parallel=4"],
        [*POOLS["recurrent"], "pool.latent_dim=8", "pool.scale_dtype=float32"],
        [*POOLS["recurrent"], "pool.layers=0", "pool.page_size=1"],
        [*POOLS["raw"], "pool.components.scale=64", "pool.components.index=1024"],
        [*POOLS["raw"], "pool.tp_size=4", "pool.tp_ranks=2-3", "pool.stage=0:2"],
    ],
)
def test_what_works_together_is_valid(sets: list[str]) -> None:
    assert findings(*sets) == []


@pytest.mark.parametrize(
    ("family", "name"),
    [
        (family, name)
        for name, (families, _) in BELONGS.items()
        for family in POOLS
        if family not in families
    ],
)
def test_a_key_of_another_family_is_refused_with_the_reason(family: str, name: str) -> None:
    known = KEYS[f"pool.{name}"]
    given = f"pool.{name}={known.example or (known.choices or (2,))[-1]}"
    if is_table := known.kind is KeyKind.TABLE:
        entry, value = next(iter(known.example.items()))
        given = f"pool.{name}.{entry}={value}"
    key = given.partition("=")[0]

    found = [one for one in findings(*POOLS[family], given) if "says nothing" in one[1]]

    assert found == [
        (
            key,
            f"says nothing in family {family}: {BELONGS[name][1]}",
            "remove the table, or set pool.family" if is_table else "remove it, or set pool.family",
        )
    ]


@pytest.mark.parametrize(
    ("family", "left_out", "needs"),
    [
        ("mla", "pool.latent_dim", "needs pool.latent_dim: the model's kv_lora_rank, like 512"),
        ("swa", "pool.window_tokens", "needs pool.window_tokens: the model's sliding_window"),
        ("swa", "pool.window_layers", "needs pool.window_layers: how many of its layers slide"),
        ("hisparse", "pool.buffer_tokens", "needs pool.buffer_tokens: what the device holds"),
        ("recurrent", "pool.state_layers", "needs pool.state_layers: how many of its layers"),
        ("recurrent", "pool.state.", "needs pool.state: the tensors of one layer"),
    ],
)
def test_a_family_without_its_keys_is_refused(family: str, left_out: str, needs: str) -> None:
    sets = [text for text in POOLS[family] if not text.startswith(left_out)]

    [(key, rule, _)] = findings(*sets)

    assert key == "pool.family"
    assert rule.startswith(needs)


@pytest.mark.parametrize(
    ("sets", "key", "rule"),
    [
        (
            ["pool.index_dim=8", "pool.index_page_size=5"],
            "pool.index_page_size",
            "must divide pool.page_size: pages of 16 tokens are no whole number of pages of 5",
        ),
        (
            ["pool.index_page_size=4"],
            "pool.index_page_size",
            "needs pool.index_dim: the elements of one key of the index, like 128",
        ),
        (
            [*POOLS["hisparse"], "pool.buffer_tokens=100"],
            "pool.buffer_tokens",
            "must be whole pages: 100 tokens are none of 16 each",
        ),
        (
            [*POOLS["swa"], "pool.page_size=1"],
            "pool.page_size",
            "is refused with pool.family = swa: single tokens have no page boundary for the "
            "window's tail to begin at, so the sliding layers would be charged in full, like the "
            "others",
        ),
        (
            [*POOLS["hisparse"], "engine.mixed_chunk=true"],
            "engine.mixed_chunk",
            "is refused with pool.family = hisparse: a prompt's KV goes to host memory, a decoding "
            "request's to its device buffer, so one batch cannot write both",
        ),
        (
            ["pool.layers=0"],
            "pool.layers",
            "leaves nothing: only recurrent can do without a layer that has KV of every token",
        ),
        (
            [*POOLS["swa"], "pool.layers=0"],
            "pool.layers",
            "leaves its sliding layers alone: only recurrent can do without a layer that has KV "
            "of every token",
        ),
        (
            [*POOLS["recurrent"], "pool.layers=0", "pool.page_size=32"],
            "pool.page_size",
            "says nothing in family recurrent: with pool.layers = 0 no layer has KV: a page is one "
            "token and takes no byte",
        ),
        (
            [*POOLS["mla"][:2], "pool.rope_dim=64", "pool.heads=128"],
            "pool.heads",
            f"says nothing in family mla: K and V per head are what {WITH_HEADS} keep; "
            f"{WITHOUT_HEADS}",
        ),
        (
            [*POOLS["hisparse"], "pool.head_dim=128"],
            "pool.head_dim",
            "says nothing in family hisparse: pool.latent_dim says that latents are kept, which "
            "have no heads",
        ),
        (
            ["cache.mode=off", "radix.policy=lfu"],
            "radix.policy",
            'says nothing with cache.mode = "off": nothing is cached, so nothing gives way',
        ),
        (
            ["engine.chunk_tokens=0"],
            "engine.chunk_tokens",
            "must be -1, or a whole number from 1 to 268435456",
        ),
        (
            [*POOLS["recurrent"], "pool.state.conv=bfloat16[3]"],
            "pool.state.ssm",
            "would lie at byte 0 of the state, one of which follows the other at 786: no "
            "multiples of the bytes of float32",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_reason(
    sets: list[str], key: str, rule: str
) -> None:
    """scenarios C6, E11."""
    [(found, reason, fix)] = findings(*sets)

    assert (found, reason) == (key, rule)
    assert fix


@pytest.mark.parametrize("value", ["float32", "float32[]", "float4[2]", "[2]", "float32[0]"])
def test_a_state_that_is_no_shape_is_refused(value: str) -> None:
    found = findings(*POOLS["recurrent"], f"pool.state.more={value}")

    assert found == [
        (
            "pool.state.more",
            'must be NAME = "DTYPE[N,N,...]"',
            "write for example float32[64,64,128]",
        )
    ]


def test_a_tensor_of_a_state_has_a_plain_name() -> None:
    [(key, _, fix)] = findings(*POOLS["recurrent"], "pool.state.a-b=float32[2]")

    assert (key, fix) == ("pool.state.a-b", "name a tensor, like ssm")


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "finding"),
    [
        (
            [*POOLS["swa"], "pool.size=1MiB"],
            (
                "pool.size",
                "must hold at least 2 pages of kv (32.0 KiB each) and 10 of swa (160.0 KiB each)",
                "give at least 1664KiB, or set pool.window_pages",
            ),
        ),
        (
            [*POOLS["swa"], "pool.window_pages=9"],
            (
                "pool.window_pages",
                "must hold one request: 10 pages of swa, the null page included",
                "give at least 10",
            ),
        ),
        (
            [*POOLS["hisparse"], "pool.buffer_pages=256"],
            (
                "pool.buffer_pages",
                "must hold one request: 257 pages of buffer, the null page included",
                "give at least 257",
            ),
        ),
        (
            [*POOLS["recurrent"], "pool.states=90000"],
            (
                "pool.size",
                "must hold at least 2 pages of kv (32.0 KiB each) and 90000 of state (912 B each)",
                "give at least 80221KiB, or set pool.states",
            ),
        ),
        (
            ["pool.pages=2147483647", "pool.index_dim=8", "pool.index_page_size=4"],
            (
                "pool.pages",
                "makes 8589934588 pages, and page ids end at 2147483647",
                "give less memory or a larger pool.page_size",
            ),
        ),
    ],
)
def test_pages_that_do_not_fit_are_refused_with_the_numbers(
    sets: list[str], finding: tuple[str, str, str]
) -> None:
    assert findings(*sets) == [finding]


def test_the_size_that_a_refusal_asks_for_is_enough() -> None:
    assert findings(*POOLS["swa"], "pool.size=1664KiB", "pool.window_pages=10") == []
    assert findings(*POOLS["recurrent"], "pool.states=90000", "pool.size=80221KiB") == []


# ---- prefill-only --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "key", "reason"),
    [
        (["engine.workload=generate"], "engine.workload", "each decoded token reads the KV"),
        (["engine.chunk_tokens=4096"], "engine.chunk_tokens", "the second chunk of a prompt reads"),
        (["radix.policy=lru"], "radix.policy", "a prefix that is matched must be readable"),
        (["engine.context_parallel=2"], "engine.context_parallel", "ranks that share a prompt"),
        (["engine.attention=paged"], "engine.attention", "paged attention reads K and V"),
        (["engine.mixed_chunk=true"], "engine.mixed_chunk", "a batch that decodes reads KV"),
        (["pool.scale_dtype=float32"], "pool.scale_dtype", "quantising KV stores its scales"),
        (["pool.index_dim=128"], "pool.index_dim", "an index is read to choose KV"),
        (["pool.saved_size=1GiB"], "pool.saved_size", "there is nothing to save of a lease"),
        (["transfer.integrity=full"], "transfer.integrity", "there is no page whose bytes could"),
        (["peers.connect.d=tcp://127.0.0.1:1"], "peers.connect.d", "nothing can be sent to a peer"),
        (POOLS["mla"], "pool.family", "attention over latents expands them from the pool"),
        (POOLS["swa"], "pool.family", "sliding layers have a window of the pool"),
        (POOLS["hisparse"], "pool.family", "its KV lies in host memory"),
        (POOLS["recurrent"], "pool.family", "a state is carried from token to token"),
        (POOLS["raw"], "pool.family", "what its pages hold is the engine's"),
        (["pool.family=mla"], "pool.family", "attention over latents expands them from the pool"),
        (["pool.family=recurrent"], "pool.family", "a state is carried from token to token"),
    ],
)
def test_prefill_only_refuses_whatever_needs_kv_each_with_its_reason(
    sets: list[str], key: str, reason: str
) -> None:
    """scenarios D2 to D9."""
    [(found, rule, fix)] = findings(*PREFILL_ONLY, *sets)

    assert found == key
    assert rule.startswith(f"{MODE}: {reason}")
    assert fix.endswith('or set cache.mode = "radix"')


@pytest.mark.parametrize("tokens", [1, 2, 4095, 4097, 2**28])
def test_prefill_only_refuses_prompts_in_chunks_of_any_size(tokens: int) -> None:
    """scenario D3: only the whole prompt is no second chunk."""
    [(key, rule, _)] = findings(*PREFILL_ONLY, f"engine.chunk_tokens={tokens}")

    assert key == "engine.chunk_tokens"
    assert "the second chunk of a prompt reads" in rule
    assert findings(*PREFILL_ONLY, "engine.chunk_tokens=-1") == []


def test_prefill_only_refuses_every_family_but_one_with_a_reason_of_its_own() -> None:
    """scenario D9."""
    told = {name: findings(*PREFILL_ONLY, *pool) for name, pool in POOLS.items()}

    assert told.pop("mha") == []
    assert {len(found) for found in told.values()} == {1}
    assert len({found[0][1] for found in told.values()}) == len(told)


@pytest.mark.parametrize("dtype", ["fp4", "nvfp4", "mxfp8", "int4"])
def test_packed_kv_types_are_refused_in_every_mode(dtype: str) -> None:
    """scenario D8."""
    for mode in ([], PREFILL_ONLY):
        [(key, rule, _)] = findings(*mode, f"pool.dtype={dtype}")
        assert key == "pool.dtype"
        assert rule.startswith("is refused: two elements to a byte")


def test_everything_that_is_wrong_is_told_at_once_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "kvd.toml"
    file.write_text(
        '[cache]\nmode = "prefill-only"\n[engine]\nchunk_tokens = 512\n'
        '[pool]\nfamily = "swa"\nwindow_tokens = 64\nwindow_layers = 2\npage_size = 1\n'
        "[pool.state]\nssm = 'float32[2]'\n"
    )

    errors = load(file, {}, ["engine.context_parallel=2"], host=HOST)

    assert isinstance(errors, list)
    assert sorted((error.where.removeprefix(str(file)), error.key) for error in errors) == [
        ("--set engine.context_parallel=2", "engine.context_parallel"),
        (":11", "pool.state.ssm"),
        (":4", "engine.chunk_tokens"),
        (":6", "pool.family"),
        (":9", "pool.page_size"),
        ("default", "engine.attention"),
        ("default", "engine.workload"),
    ]
    assert len({error.rule for error in errors}) == len(errors)


# ---- what is shown -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sets",
    [
        *POOLS.values(),
        PREFILL_ONLY,
        ["cache.mode=off"],
        [*POOLS["recurrent"], "pool.layers=0"],
    ],
)
def test_what_is_shown_is_a_file_that_gives_the_same_pool(sets: list[str], tmp_path: Path) -> None:
    from kvd.config import pool_spec  # noqa: PLC0415
    from kvd.config.render import effective  # noqa: PLC0415

    config = config_of(*sets)
    file = tmp_path / "kvd.toml"
    file.write_text(effective(config).replace('group = "kvd"\n', ""))

    again = load(file, {}, [], host=HOST)

    assert not isinstance(again, list), [error.sentence for error in again]
    assert pool_spec(again) == pool_spec(config)
    assert (again.cache, again.engine) == (config.cache, config.engine)
