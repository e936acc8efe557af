"""Where the bytes of a page lie: offsets, strides and shapes of every layout in both orders."""

from __future__ import annotations

import math

import msgspec
import pytest

from kvd.core.layout.geometry import Geometry, PieceRow, geometry, misplaced
from kvd.core.layout.spec import (
    DTYPE_BYTES,
    Component,
    Mha,
    Mla,
    Nowhere,
    PageOrder,
    PerRequest,
    Raw,
    State,
    StateTensor,
    Tail,
)
from kvd.wire.memory import TensorPlace

PAGES = 5
SSM = StateTensor("ssm", (4, 2, 8), "float32")
CONV = StateTensor("conv", (6, 2), "bfloat16")

FP8 = Component("kv", 2, Mha(2, 8, 4, "float8_e4m3fn"), 4)
SCALE = Component("scale", 2, Mha(2, 1, 1, "float32"), 4)
MLA = Component("kv", 2, Mla(8, 4, "bfloat16"), 4)
SWA = Component("swa", 2, Mha(1, 8, 8, "float16"), 4, Tail(8))
INDEX = Component("index", 2, Mha(1, 12, 0, "uint8"), 2)
STATE = Component("state", 2, State((SSM, CONV)), 1, PerRequest())

EVERY = [FP8, SCALE, MLA, SWA, INDEX, STATE, Component("raw", 2, Raw(7), 4)]


def places(component: Component, order: PageOrder) -> list[TensorPlace]:
    return list(geometry(component, pages=PAGES, order=order).tensors)


@pytest.mark.parametrize("component", EVERY, ids=lambda one: str(one.name))
@pytest.mark.parametrize("order", list(PageOrder))
def test_tensors_and_rows_tile_the_memory_exactly(component: Component, order: PageOrder) -> None:
    shape = geometry(component, pages=PAGES, order=order)
    tensors = [
        (place.offset_bytes + page * place.page_stride_bytes, size)
        for place in shape.tensors
        for size in [math.prod(place.page_shape) * DTYPE_BYTES[place.dtype]]
        for page in range(PAGES)
    ]
    rows = [
        (row.offset_bytes + page * row.stride_bytes, row.piece_bytes)
        for row in shape.rows
        for page in range(PAGES)
    ]
    for pieces in (tensors, rows):
        end = 0
        for start, size in sorted(pieces):
            assert start == end
            end = start + size
        assert end == shape.total_bytes


def test_quantised_kv_and_its_scales_lie_side_by_side_per_page() -> None:
    assert places(FP8, PageOrder.PAGE_FIRST) == [
        TensorPlace(0, "k", "float8_e4m3fn", 0, 192, (4, 2, 8)),
        TensorPlace(0, "v", "float8_e4m3fn", 64, 192, (4, 2, 4)),
        TensorPlace(1, "k", "float8_e4m3fn", 96, 192, (4, 2, 8)),
        TensorPlace(1, "v", "float8_e4m3fn", 160, 192, (4, 2, 4)),
    ]
    assert places(SCALE, PageOrder.PAGE_FIRST) == [
        TensorPlace(0, "k", "float32", 0, 128, (4, 2, 1)),
        TensorPlace(0, "v", "float32", 32, 128, (4, 2, 1)),
        TensorPlace(1, "k", "float32", 64, 128, (4, 2, 1)),
        TensorPlace(1, "v", "float32", 96, 128, (4, 2, 1)),
    ]
    assert places(SCALE, PageOrder.LAYER_FIRST) == [
        TensorPlace(0, "k", "float32", 0, 32, (4, 2, 1)),
        TensorPlace(0, "v", "float32", 160, 32, (4, 2, 1)),
        TensorPlace(1, "k", "float32", 320, 32, (4, 2, 1)),
        TensorPlace(1, "v", "float32", 480, 32, (4, 2, 1)),
    ]


def test_a_latent_is_one_tensor_of_one_head() -> None:
    assert places(MLA, PageOrder.PAGE_FIRST) == [
        TensorPlace(0, "latent", "bfloat16", 0, 192, (4, 1, 12)),
        TensorPlace(1, "latent", "bfloat16", 96, 192, (4, 1, 12)),
    ]
    assert places(MLA, PageOrder.LAYER_FIRST) == [
        TensorPlace(0, "latent", "bfloat16", 0, 96, (4, 1, 12)),
        TensorPlace(1, "latent", "bfloat16", 480, 96, (4, 1, 12)),
    ]


def test_an_index_has_keys_and_no_values() -> None:
    assert places(INDEX, PageOrder.PAGE_FIRST) == [
        TensorPlace(0, "k", "uint8", 0, 48, (2, 1, 12)),
        TensorPlace(1, "k", "uint8", 24, 48, (2, 1, 12)),
    ]
    assert places(INDEX, PageOrder.LAYER_FIRST) == [
        TensorPlace(0, "k", "uint8", 0, 24, (2, 1, 12)),
        TensorPlace(1, "k", "uint8", 120, 24, (2, 1, 12)),
    ]


def test_a_window_lies_as_the_same_layout_does_elsewhere() -> None:
    plain = msgspec.structs.replace(SWA, name="kv")

    for order in PageOrder:
        assert places(SWA, order) == places(plain, order)


def test_the_tensors_of_a_state_follow_each_other_without_a_token_dimension() -> None:
    assert places(STATE, PageOrder.PAGE_FIRST) == [
        TensorPlace(0, "ssm", "float32", 0, 560, (4, 2, 8)),
        TensorPlace(0, "conv", "bfloat16", 256, 560, (6, 2)),
        TensorPlace(1, "ssm", "float32", 280, 560, (4, 2, 8)),
        TensorPlace(1, "conv", "bfloat16", 536, 560, (6, 2)),
    ]
    assert places(STATE, PageOrder.LAYER_FIRST) == [
        TensorPlace(0, "ssm", "float32", 0, 256, (4, 2, 8)),
        TensorPlace(0, "conv", "bfloat16", 1280, 24, (6, 2)),
        TensorPlace(1, "ssm", "float32", 1400, 256, (4, 2, 8)),
        TensorPlace(1, "conv", "bfloat16", 2680, 24, (6, 2)),
    ]


def test_a_component_without_layers_has_nothing_anywhere() -> None:
    ghost = Component("kv", 0, Raw(0), 1, tier=Nowhere())

    for order in PageOrder:
        assert geometry(ghost, pages=PAGES, order=order) == Geometry(PAGES, 0, (), ())


def test_page_first_is_one_row_and_layer_first_one_per_tensor() -> None:
    assert geometry(STATE, pages=PAGES, order=PageOrder.PAGE_FIRST).rows == (PieceRow(0, 560, 560),)
    assert geometry(STATE, pages=PAGES, order=PageOrder.LAYER_FIRST).rows == (
        PieceRow(0, 256, 256),
        PieceRow(1280, 24, 24),
        PieceRow(1400, 256, 256),
        PieceRow(2680, 24, 24),
    )


def test_a_state_that_puts_wide_elements_at_odd_places_is_found_out() -> None:
    narrow_first = State((StateTensor("conv", (3,), "bfloat16"), SSM))
    odd_end = State((SSM, StateTensor("conv", (3,), "bfloat16")))

    assert misplaced(STATE) is None
    for layout, part in [(narrow_first, "ssm"), (odd_end, "ssm")]:
        found = misplaced(msgspec.structs.replace(STATE, layout=layout))
        assert found is not None
        assert found.part == part
