"""Components: which have page ids of their own, what peers compare, which pages go together."""

from __future__ import annotations

import msgspec
import pytest

from kvd.core.layout.spec import (
    Buffer,
    Component,
    Device,
    Host,
    Layout,
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
    budgets,
    companion_factor,
    companion_pages,
    fingerprint,
    has_bytes,
    is_companion,
    layout_difference,
    page_bytes,
)
from kvd.core.peers.compatibility import PageSplit, page_split
from kvd.types import Pages, pack_ids, page_ids
from tests.core.sentences import sentence_of

KV = Component("kv", 2, Mla(8, 4, "bfloat16"), 16)
INDEX = Component("index", 2, Mha(1, 8, 0, "uint8"), 4)
BUFFER = Component("buffer", 2, Mla(8, 4, "bfloat16"), 16, Buffer(64))
WINDOW = Component("swa", 5, Mha(1, 8, 8, "bfloat16"), 16, Tail(32))
STATE = Component(
    "state",
    3,
    State((StateTensor("ssm", (4, 2, 8), "float32"), StateTensor("conv", (8, 3), "bfloat16"))),
    1,
    PerRequest(),
)


def pool(
    *components: Component, family: str = "mla", order: PageOrder = PageOrder.PAGE_FIRST
) -> PoolSpec:
    return PoolSpec("main", family, order, components, tuple(10 for _ in components))


def test_whole_components_after_the_first_have_no_page_ids_of_their_own():
    spec = pool(KV, INDEX, WINDOW, STATE, BUFFER)

    assert [one.name for one in spec.components if is_companion(spec, one)] == ["index"]
    assert [one.name for one in budgets(spec)] == ["kv", "swa", "state", "buffer"]
    assert companion_factor(spec, INDEX) == 4
    assert spec.match_page_tokens == 16


@pytest.mark.parametrize(
    ("k", "companions"),
    [(1, [0, 7, 3]), (2, [0, 1, 14, 15, 6, 7]), (3, [0, 1, 2, 21, 22, 23, 9, 10, 11])],
)
def test_a_page_owns_k_companion_pages_in_a_row_and_the_null_page_the_first_k(k, companions):
    assert page_ids(companion_pages(Pages(pack_ids([0, 7, 3])), k)) == companions


def test_no_pages_have_no_companions():
    assert companion_pages(Pages(b""), 4) == b""


def test_a_page_of_states_is_every_tensor_of_every_layer():
    assert page_bytes(STATE) == 3 * (4 * 2 * 8 * 4 + 8 * 3 * 2)


@pytest.mark.parametrize(
    ("component", "expected"),
    [
        (KV, True),
        (msgspec.structs.replace(KV, tier=Host()), True),
        (msgspec.structs.replace(KV, tier=Nowhere()), False),
        (msgspec.structs.replace(KV, layers=0), False),
    ],
)
def test_bytes_are_where_there_are_layers_and_a_memory(component, expected):
    assert has_bytes(component) is expected


def test_saved_pages_are_none_for_each_component_when_left_out():
    assert pool(KV, INDEX).saved_pages == (0, 0)
    assert msgspec.structs.replace(pool(KV, INDEX), saved_pages=(3, 12)).saved_pages == (3, 12)


def test_a_component_is_found_by_its_name():
    spec = pool(KV, INDEX)

    assert [spec.index("kv"), spec.index("index")] == [0, 1]
    with pytest.raises(KeyError, match="swa"):
        spec.index("swa")


# ---- what peers compare --------------------------------------------------------------------------


def test_family_tier_pages_and_buffers_make_no_difference_to_a_peer():
    prefill = pool(KV, INDEX)
    host = msgspec.structs.replace(KV, tier=Host())
    decode = msgspec.structs.replace(pool(host, INDEX, BUFFER, family="hisparse"), pages=(9, 36, 5))

    assert fingerprint(decode) == fingerprint(prefill)
    assert layout_difference(decode, fingerprint(prefill)) is None


@pytest.mark.parametrize(
    ("theirs", "difference"),
    [
        (
            pool(msgspec.structs.replace(KV, page_size=64), INDEX),
            "components.0.page_size: ours 16, theirs 64",
        ),
        (
            pool(msgspec.structs.replace(KV, layers=61), INDEX),
            "components.0.layers: ours 2, theirs 61",
        ),
        (
            pool(msgspec.structs.replace(KV, tier=Nowhere()), INDEX),
            "components.0.layers: ours 2, theirs 0",
        ),
        (
            pool(KV, msgspec.structs.replace(INDEX, layout=Mha(1, 8, 0, "float16"))),
            "components.1.layout.dtype: ours uint8, theirs float16",
        ),
        (
            pool(KV, INDEX, order=PageOrder.LAYER_FIRST),
            "order: ours page_first, theirs layer_first",
        ),
        (pool(KV), "components.1.name: ours index, theirs absent"),
        (pool(KV, INDEX, WINDOW), "components.2.name: ours absent, theirs swa"),
    ],
)
def test_any_other_difference_is_told_in_words(theirs, difference):
    assert layout_difference(pool(KV, INDEX), fingerprint(theirs)) == difference


def test_a_window_of_another_length_is_another_layout():
    other = msgspec.structs.replace(WINDOW, extent=Tail(64))

    assert layout_difference(pool(KV, WINDOW), fingerprint(pool(KV, other))) == sentence_of(
        "a window of another length is another layout"
    )


# ---- page sizes that go together -----------------------------------------------------------------


def paged(kv_tokens: int, index_tokens: int, layout: Layout = KV.layout) -> PoolSpec:
    kv = msgspec.structs.replace(KV, page_size=kv_tokens, layout=layout)
    return pool(kv, msgspec.structs.replace(INDEX, page_size=index_tokens))


@pytest.mark.parametrize(
    ("ours", "theirs", "split"),
    [
        (paged(16, 4), paged(16, 4), PageSplit(16, 16, (1, 1))),
        (paged(64, 64), paged(1, 1), PageSplit(64, 1, (64, 64))),
        (paged(1, 1), paged(64, 64), PageSplit(1, 64, (64, 64))),
        (paged(16, 16), paged(64, 16), PageSplit(16, 64, (4, 1))),
        (paged(16, 16), paged(24, 16), None),
        (paged(16, 4), paged(64, 2), None),
        (paged(16, 16), paged(64, 64, Raw(64)), None),
        (paged(16, 16, Raw(64)), paged(64, 64, Raw(64)), None),
    ],
)
def test_page_sizes_go_together_when_one_is_a_whole_multiple_in_every_component(
    ours, theirs, split
):
    assert page_split(ours, fingerprint(theirs)) == split


@pytest.mark.parametrize("beside", [WINDOW, STATE])
def test_a_window_or_a_state_is_not_cut_into_smaller_pages(beside):
    larger = msgspec.structs.replace(beside, page_size=beside.page_size * 4)
    kv = msgspec.structs.replace(KV, page_size=64)

    assert page_split(pool(KV, beside), fingerprint(pool(kv, beside))) == PageSplit(16, 64, (4, 1))
    assert page_split(pool(KV, beside), fingerprint(pool(kv, larger))) is None


def test_a_difference_beside_the_page_size_is_no_split():
    kv = msgspec.structs.replace(KV, page_size=64, layers=61)

    assert page_split(pool(KV), fingerprint(pool(kv))) is None
    assert page_split(pool(KV), fingerprint(pool(KV, INDEX))) is None
    assert page_split(pool(KV), fingerprint(pool(KV, order=PageOrder.LAYER_FIRST))) is None


@pytest.mark.parametrize(
    "theirs", ["", "[" * 60_000, "7", '["page_first", []]', '["page_first", [{"name": "kv"}]]']
)
def test_what_is_no_fingerprint_is_no_split(theirs):
    assert page_split(pool(KV), theirs) is None


@pytest.mark.parametrize("page_size", [0, -16])
def test_a_page_size_of_nothing_is_no_split(page_size):
    theirs = fingerprint(pool(KV)).replace('"page_size":16', f'"page_size":{page_size}')

    assert theirs != fingerprint(pool(KV))
    assert page_split(pool(KV), theirs) is None


def test_a_pool_elsewhere_is_not_a_pool_here():
    """What is compared does not name the device; the tier of both sides is their own."""
    far = msgspec.structs.replace(KV, tier=Device("cuda:0"))

    assert fingerprint(pool(far)) == fingerprint(pool(KV))
