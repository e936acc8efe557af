"""From keys to components and page counts: what each family holds, and how memory is divided."""

from __future__ import annotations

import msgspec
import pytest

from kvd.config import load, pool_spec
from kvd.config.pool import components
from kvd.core.layout.spec import (
    Buffer,
    Component,
    Device,
    Host,
    Mha,
    Mla,
    Nowhere,
    PageOrder,
    PerRequest,
    PoolSpec,
    Raw,
    State,
    StateTensor,
    Tail,
    companion_factor,
    fingerprint,
    page_bytes,
)
from kvd.families.budget import beside, block_bytes, pages_of_request
from tests.config.pools import HOST, POOLS, PREFILL_ONLY, config_of

LATENT = Mla(512, 64, "bfloat16")
HEADS = Mha(2, 64, 64, "bfloat16")
SSM = StateTensor("ssm", (4, 2, 8), "float32")
CONV = StateTensor("conv", (8, 3), "bfloat16")


def spec_of(*sets: str) -> PoolSpec:
    return pool_spec(config_of(*sets))


def held_bytes(spec: PoolSpec) -> dict[str, int]:
    return {
        one.name: page_bytes(one) * pages
        for one, pages in zip(spec.components, spec.pages, strict=True)
    }


# ---- what each family holds ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (POOLS["mha"], [Component("kv", 4, HEADS, 16)]),
        (POOLS["mla"], [Component("kv", 4, LATENT, 16)]),
        (
            [*POOLS["mla"], "pool.index_dim=132", "pool.index_dtype=uint8"],
            [Component("kv", 4, LATENT, 16), Component("index", 4, Mha(1, 132, 0, "uint8"), 16)],
        ),
        (
            ["pool.index_dim=8", "pool.index_heads=3", "pool.index_page_size=4"],
            [Component("kv", 4, HEADS, 16), Component("index", 4, Mha(3, 8, 0, "bfloat16"), 4)],
        ),
        (
            ["pool.dtype=float8_e4m3fn", "pool.scale_dtype=float32"],
            [
                Component("kv", 4, Mha(2, 64, 64, "float8_e4m3fn"), 16),
                Component("scale", 4, Mha(2, 1, 1, "float32"), 16),
            ],
        ),
        (
            [*POOLS["mla"], "pool.dtype=float8_e5m2", "pool.scale_dtype=float16"],
            [
                Component("kv", 4, Mla(512, 64, "float8_e5m2"), 16),
                Component("scale", 4, Mla(1, 0, "float16"), 16),
            ],
        ),
        (
            POOLS["swa"],
            [Component("kv", 4, HEADS, 16), Component("swa", 20, HEADS, 16, Tail(100))],
        ),
        (
            [*POOLS["swa"], "pool.window_heads=8", "pool.window_head_dim=32"],
            [
                Component("kv", 4, HEADS, 16),
                Component("swa", 20, Mha(8, 32, 32, "bfloat16"), 16, Tail(100)),
            ],
        ),
        (
            [*POOLS["swa"], "pool.v_dim=16", "pool.window_heads=8"],
            [
                Component("kv", 4, Mha(2, 64, 16, "bfloat16"), 16),
                Component("swa", 20, Mha(8, 64, 16, "bfloat16"), 16, Tail(100)),
            ],
        ),
        (
            [*POOLS["hisparse"], "pool.rope_dim=64", "pool.index_dim=128"],
            [
                Component("kv", 4, LATENT, 16, tier=Host()),
                Component("index", 4, Mha(1, 128, 0, "bfloat16"), 16),
                Component("buffer", 4, LATENT, 16, Buffer(4096), Device("cpu")),
            ],
        ),
        (
            ["pool.family=hisparse", "pool.buffer_tokens=4096"],
            [
                Component("kv", 4, HEADS, 16, tier=Host()),
                Component("buffer", 4, HEADS, 16, Buffer(4096)),
            ],
        ),
        (
            POOLS["recurrent"],
            [
                Component("kv", 4, HEADS, 16),
                Component("state", 3, State((SSM, CONV)), 1, PerRequest()),
            ],
        ),
        (
            [*POOLS["recurrent"], "pool.layers=0"],
            [
                Component("kv", 0, Raw(0), 1, tier=Nowhere()),
                Component("state", 3, State((SSM, CONV)), 1, PerRequest()),
            ],
        ),
    ],
)
def test_a_family_is_its_components(sets, expected) -> None:
    spec = spec_of(*sets)

    assert spec.components == tuple(expected)
    assert (spec.order, len(spec.pages), len(spec.saved_pages)) == (
        PageOrder.PAGE_FIRST,
        len(expected),
        len(expected),
    )


def test_prefill_only_counts_the_pages_that_the_pool_would_have_held_and_holds_none() -> None:
    """scenario D1: valid with embedding, whole prompts and no radix cache; capacity unchanged."""
    usual, counted = spec_of("pool.size=1GiB"), spec_of("pool.size=1GiB", *PREFILL_ONLY)

    assert counted == PoolSpec(
        name="main",
        family="prefill-only",
        order=PageOrder.PAGE_FIRST,
        components=(Component("kv", 4, HEADS, 16, tier=Nowhere()),),
        pages=usual.pages,
        saved_pages=(0,),
    )
    assert counted.pages == (32768,)


def test_nothing_but_the_mode_makes_a_pool_prefill_only() -> None:
    """scenario D14: no workload switches to it by itself."""
    for workload in ("generate", "embedding", "scoring"):
        sets = [f"engine.workload={workload}", "engine.attention=varlen"]
        assert spec_of(*sets) == spec_of()


def test_a_prefill_node_with_an_index_and_a_hisparse_decode_node_lay_out_the_same() -> None:
    index = ["pool.index_dim=132", "pool.index_dtype=uint8"]
    decode = spec_of(*POOLS["hisparse"], "pool.rope_dim=64", *index)

    assert fingerprint(decode) == fingerprint(spec_of(*POOLS["mla"], *index))


def test_the_order_in_which_the_tensors_of_a_state_are_given_is_no_difference() -> None:
    turned = [*POOLS["recurrent"][:2], *POOLS["recurrent"][:1:-1]]

    assert turned != POOLS["recurrent"]
    assert fingerprint(spec_of(*turned)) == fingerprint(spec_of(*POOLS["recurrent"]))


# ---- how memory is divided -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "sets",
    [
        POOLS["mha"],
        [*POOLS["mla"], "pool.index_dim=128", "pool.index_page_size=4"],
        ["pool.dtype=int8", "pool.scale_dtype=float32"],
        POOLS["swa"],
        [*POOLS["swa"], "pool.window_pages=1000"],
        POOLS["recurrent"],
        [*POOLS["recurrent"], "pool.states=100"],
        [*POOLS["recurrent"], "pool.layers=0"],
    ],
)
@pytest.mark.parametrize("size", ["640MiB", "1GiB", "80GiB"])
def test_the_pages_of_all_components_fill_the_memory_to_the_last_page(sets, size) -> None:
    config = config_of(*sets, f"pool.size={size}")
    spec = pool_spec(config)
    parts = components(config.pool)
    other = beside(parts)
    left = int(size[:-3]) * 2 ** (20 if "M" in size else 30) - sum(held_bytes(spec).values())

    assert 0 <= left < block_bytes(parts) + (page_bytes(other) if other else 0)
    for one, pages in zip(parts[1:], spec.pages[1:], strict=True):
        if one is not other:
            assert pages == spec.pages[0] * companion_factor(spec, one)


@pytest.mark.parametrize("family", ["swa", "recurrent"])
def test_typical_requests_use_up_both_budgets_together(family) -> None:
    sets = ["pool.size=8GiB", "pool.typical_tokens=32768"]
    if family == "recurrent":
        sets.append("pool.state.ssm=float32[64,64,128]")
    config = config_of(*POOLS[family], *sets)
    parts = components(config.pool)
    other = beside(parts)
    assert other is not None
    kv_pages, other_pages = pool_spec(config).pages

    by_kv = kv_pages / pages_of_request(parts[0], 32768)
    by_other = other_pages / pages_of_request(other, 32768)
    assert by_kv == pytest.approx(by_other, rel=0.01)


@pytest.mark.parametrize(
    ("window", "page", "tokens", "pages"),
    [(128, 64, 1000, 4), (100, 64, 1000, 4), (128, 64, 50, 1), (4096, 256, 10000, 18)],
)
def test_a_request_holds_its_window_a_page_for_the_boundary_and_one_ahead(
    window, page, tokens, pages
) -> None:
    component = Component("swa", 1, HEADS, page, Tail(window))

    assert pages_of_request(component, tokens) == pages


@pytest.mark.parametrize(
    ("sets", "pages"),
    [
        ([*POOLS["swa"], "pool.size=1664KiB"], (2, 10)),
        ([*POOLS["swa"], "pool.size=2MiB"], (14, 10)),
        ([*POOLS["recurrent"], "pool.size=66KiB"], (2, 2)),
    ],
)
def test_a_memory_for_less_than_a_typical_request_still_has_room_for_one(
    sets: list[str], pages: tuple[int, ...]
) -> None:
    """What the check names as the least is enough, and so is everything above it."""
    assert spec_of(*sets).pages == pages


def test_what_the_configuration_gives_is_taken_as_it_is() -> None:
    assert spec_of(*POOLS["swa"], "pool.pages=99", "pool.window_pages=33").pages == (99, 33)
    assert spec_of(*POOLS["recurrent"], "pool.pages=99", "pool.states=5").pages == (99, 5)
    assert spec_of(*POOLS["hisparse"], "pool.pages=999", "pool.buffer_pages=400").pages == (
        999,
        400,
    )


def test_hisparse_means_host_memory_and_gives_each_typical_request_its_buffer() -> None:
    spec = spec_of(*POOLS["hisparse"], "pool.size=1GiB", "pool.index_dim=128")
    kv, index, buffer = spec.pages

    assert kv == 2**30 // page_bytes(spec.components[0])
    assert index == kv
    assert buffer == (kv - 1) // 512 * 256 + 1


def test_tokens_that_take_no_bytes_are_counted_for_every_state_within_bounds() -> None:
    stateful = [*POOLS["recurrent"], "pool.layers=0"]
    state_bytes = 3 * (4 * 2 * 8 * 4 + 8 * 3 * 2)

    assert spec_of(*stateful, "pool.size=64MiB").pages == (2**22 + 1, 2**26 // state_bytes)
    few = spec_of(*stateful, "pool.states=301")
    assert few.pages == (300 * 8192 + 1, 301)
    assert spec_of(*stateful, "pool.states=3").pages == (2**20 + 1, 3)
    assert spec_of(*stateful, "pool.pages=8193").pages == (8193, 3)
    assert spec_of(*stateful, "pool.pages=50", "pool.states=9").pages == (50, 9)


# ---- memory for retracted leases -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "saved_pages"),
    [
        (["pool.pages=64"], 8),
        (["pool.size=64GiB"], 2**30 // 32768),
        (["pool.pages=15"], 0),
        (["pool.pages=64", "pool.saved_size=320KiB"], 10),
        (["pool.pages=64", "pool.saved_size=1GiB"], 32768),
        (["pool.saved_size=0KiB"], 0),
        (["pool.saved_size=63KiB"], 0),
    ],
)
def test_saved_pages_are_an_eighth_up_to_a_gib_or_what_is_asked_for(sets, saved_pages) -> None:
    """A page has 32 KiB here; one page alone would be the null page, and of no use."""
    assert spec_of(*sets).saved_pages == (saved_pages,)


@pytest.mark.parametrize(
    ("sets", "saved_pages"),
    [
        ([*POOLS["swa"], "pool.pages=800", "pool.window_pages=80"], (100, 10)),
        ([*POOLS["recurrent"], "pool.pages=800", "pool.states=80"], (100, 10)),
        ([*POOLS["swa"], "pool.pages=800", "pool.window_pages=15"], (100, 9)),
        ([*POOLS["recurrent"], "pool.pages=800", "pool.states=8"], (100, 2)),
        ([*POOLS["recurrent"], "pool.pages=800", "pool.saved_size=0KiB"], (0, 0)),
        (["pool.pages=800", "pool.index_dim=8", "pool.index_page_size=4"], (100, 400)),
        ([*POOLS["hisparse"], "pool.pages=800", "pool.buffer_pages=400"], (100, 0)),
    ],
)
def test_each_component_gets_its_share_of_saved_pages_and_room_for_one_lease(
    sets, saved_pages
) -> None:
    assert spec_of(*sets).saved_pages == saved_pages


def test_a_saved_size_that_is_none_is_refused() -> None:
    (error,) = load(None, {}, ["pool.saved_size=half"], host=HOST)

    assert error.key == "pool.saved_size"


def test_a_spec_crosses_the_wire_unchanged() -> None:
    for sets in POOLS.values():
        spec = spec_of(*sets)
        assert msgspec.json.decode(msgspec.json.encode(spec), type=PoolSpec) == spec
