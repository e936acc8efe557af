"""Views are the memory itself: aligned, shared between processes, never longer than it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch

from kvd.client.mapping import ALIGNMENT_BYTES, Mapping
from kvd.core.layout.geometry import geometry
from kvd.core.layout.spec import DTYPE_BYTES, Component, Layout, Mha, Mla, PageOrder, Raw
from kvd.errors import KvdError
from kvd.pools.arena import Arena, reserve
from kvd.wire.memory import TensorPlace

if TYPE_CHECKING:
    from collections.abc import Iterator

KV = Component("kv", 3, Mha(2, 8, 4, "bfloat16"), 4)
PAGES = 11

WRITER = """
import sys
import msgspec, torch
from kvd.client.mapping import Mapping
from kvd.wire.memory import TensorPlace

for fd, total, pages, places in msgspec.json.decode(
    sys.stdin.read(), type=list[tuple[int, int, int, list[TensorPlace]]]
):
    mapping = Mapping(fd, total)
    for place in places:
        view = mapping.tensor(place, pages)
        view.copy_(torch.arange(view.numel()).reshape(view.shape) % 97 + 100 * (place.part == "v"))
"""


@pytest.fixture
def arena() -> Iterator[Arena]:
    own = reserve("kv", 1)
    yield own
    own.close()


def test_what_another_process_writes_through_its_views_is_seen_here() -> None:
    """One memory: both processes name it by the same offsets, and a page's bytes are where
    the transfer process, which knows rows only, will look for them."""
    shapes = [geometry(KV, pages=PAGES, order=order) for order in PageOrder]
    arenas = [reserve("kv", shape.total_bytes) for shape in shapes]
    mappings = [
        Mapping(arena.fd, shape.total_bytes) for arena, shape in zip(arenas, shapes, strict=True)
    ]
    told = [
        (arena.fd, shape.total_bytes, PAGES, shape.tensors)
        for arena, shape in zip(arenas, shapes, strict=True)
    ]

    subprocess.run(
        [sys.executable, "-c", WRITER],
        input=msgspec.json.encode(told),
        pass_fds=[arena.fd for arena in arenas],
        check=True,
        timeout=60,
    )

    for shape, mapping in zip(shapes, mappings, strict=True):
        views = [mapping.tensor(place, PAGES) for place in shape.tensors]
        for place, view in zip(shape.tensors, views, strict=True):
            wanted = torch.arange(view.numel()).reshape(view.shape) % 97 + 100 * (place.part == "v")
            assert torch.equal(view, wanted.to(torch.bfloat16)), place
        seventh = b"".join(
            mapping.bytes[start : start + row.piece_bytes].tobytes()
            for row in shape.rows
            for start in [row.offset_bytes + 7 * row.stride_bytes]
        )
        assert seventh == b"".join(
            view[7].contiguous().view(torch.uint8).numpy().tobytes() for view in views
        )
    for arena in arenas:
        arena.close()


def test_a_mapping_is_aligned_for_huge_pages(arena: Arena) -> None:
    mappings = [Mapping(arena.fd, 4096) for _ in range(5)]

    assert {one.bytes.ctypes.data % ALIGNMENT_BYTES for one in mappings} == {0}
    mappings[0].bytes[0] = 9
    assert [int(one.bytes[0]) for one in mappings] == [9] * 5


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
@pytest.mark.parametrize("order", list(PageOrder))
def test_views_have_the_shapes_of_their_family_in_every_dtype(
    dtype: str, order: PageOrder, arena: Arena
) -> None:
    found = []
    layouts: list[Layout] = [Mha(2, 8, 4, dtype), Mla(16, 8, dtype)]
    for layout in layouts:
        shape = geometry(Component("kv", 2, layout, 4), pages=3, order=order)
        mapping = Mapping(arena.fd, shape.total_bytes)
        views = [mapping.tensor(place, 3) for place in shape.tensors]
        for number, view in enumerate(views):
            view.copy_(torch.full(view.shape, number + 1.0))
        for number, view in enumerate(views):
            assert torch.equal(view.float(), torch.full(view.shape, number + 1.0))
            assert view.dtype == getattr(torch, dtype)
        pairs = zip(shape.tensors, views, strict=True)
        found += [(place.part, tuple(view.shape)) for place, view in pairs]

    assert found == [
        *[("k", (3, 4, 2, 8)), ("v", (3, 4, 2, 4))] * 2,
        *[("latent", (3, 4, 1, 24))] * 2,
    ]


def test_raw_pages_are_bytes(arena: Arena) -> None:
    shape = geometry(Component("kv", 1, Raw(100), 4), pages=3, order=PageOrder.PAGE_FIRST)
    view = Mapping(arena.fd, shape.total_bytes).tensor(shape.tensors[0], 3)

    assert (tuple(view.shape), view.dtype) == ((3, 100), torch.uint8)


def test_close_is_refused_while_a_view_is_alive(arena: Arena) -> None:
    """Otherwise the next access of that view would crash the engine."""
    mapping = Mapping(arena.fd, 4096)
    view = mapping.tensor(TensorPlace(0, "k", "float32", 0, 1024, (16, 16)), 4)[2]

    with pytest.raises(KvdError, match="drop every view of it first") as refused:
        mapping.close()
    view.fill_(1)
    assert (refused.value.code, mapping.bytes[2048:2052].tobytes()) == (
        "wrong-state",
        b"\0\0\x80\x3f",
    )

    del view
    mapping.close()
    mapping.close()


def test_a_view_outlives_the_mapping_object(arena: Arena) -> None:
    view = Mapping(arena.fd, 4096).tensor(TensorPlace(0, "k", "uint8", 0, 1024, (1024,)), 4)

    view.fill_(3)

    assert int(view.sum()) == 3 * 4096


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (TensorPlace(0, "k", "uint8", 1, 1024, (1024,)), "ends at byte 4097 of 4096"),
        (TensorPlace(0, "k", "uint8", 0, 1025, (1024,)), "ends at byte 4099 of 4096"),
        (TensorPlace(0, "k", "uint8", -1, 1024, (1,)), "ends at byte 3072 of 4096"),
        (TensorPlace(0, "k", "float32", 2, 1024, (1,)), "no multiples of the 4 bytes of float32"),
        (TensorPlace(0, "k", "float32", 0, 1022, (1,)), "no multiples of the 4 bytes of float32"),
        (TensorPlace(0, "k", "int3", 0, 1024, (1,)), "dtype int3 is none this client knows"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(
    place: TensorPlace, words: str, arena: Arena
) -> None:
    mapping = Mapping(arena.fd, 4096)

    with pytest.raises(KvdError, match=words):
        mapping.tensor(place, 4)


def test_a_descriptor_that_cannot_be_mapped_is_an_error_in_words() -> None:
    with pytest.raises(KvdError, match="mapping 4096 bytes of the pool failed: Bad file desc"):
        Mapping(-1, 4096)


@pytest.mark.parametrize("order", PageOrder)
@pytest.mark.parametrize("dtype", [*DTYPE_BYTES])
def test_arrays_are_the_bytes_of_the_tensors(order: PageOrder, dtype: str) -> None:
    """For a process without torch: the same memory, seen by numpy."""
    one = Component("kv", 2, Mha(2, 8, 4, dtype), 4)
    shape = geometry(one, pages=PAGES, order=order)
    with contextlib.closing(reserve("kv", shape.total_bytes)) as own:
        mapping = Mapping(own.fd, shape.total_bytes)
        mapping.bytes[:] = np.arange(shape.total_bytes, dtype=np.uint64) * 31 % 251
        for place in shape.tensors:
            array = mapping.array(place, PAGES)
            tensor = mapping.tensor(place, PAGES)
            assert array.shape == tuple(tensor.shape)
            assert array.itemsize == tensor.element_size()
            assert array.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()
            array[3] = 0
            assert not tensor[3].view(torch.uint8).any()
        with pytest.raises(KvdError, match="wrong-state"):
            mapping.close()
        del array, tensor
        mapping.close()


def test_an_array_ends_where_the_memory_does() -> None:
    shape = geometry(KV, pages=PAGES, order=PageOrder.PAGE_FIRST)
    with contextlib.closing(reserve("kv", shape.total_bytes)) as own:
        mapping = Mapping(own.fd, shape.total_bytes)
        with pytest.raises(KvdError, match="ends at byte"):
            mapping.array(shape.tensors[-1], PAGES + 1)
        odd = msgspec.structs.replace(shape.tensors[0], dtype="float4")
        with pytest.raises(KvdError, match="float4 is none this client knows"):
            mapping.array(odd, PAGES)
        mapping.close()


def test_without_torch_a_tensor_is_refused_with_what_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = geometry(KV, pages=PAGES, order=PageOrder.PAGE_FIRST)
    monkeypatch.setitem(sys.modules, "torch", None)
    with contextlib.closing(reserve("kv", shape.total_bytes)) as own:
        mapping = Mapping(own.fd, shape.total_bytes)
        with pytest.raises(KvdError, match=r"not-supported: torch is .*pool\.arrays\(") as told:
            mapping.tensor(shape.tensors[0], PAGES)
        mapping.close()
    assert sys.prefix in str(told.value)


@pytest.mark.parametrize("order", PageOrder)
def test_a_page_beyond_four_gibibytes_is_where_the_geometry_says(order: PageOrder) -> None:
    """scenario G14: in a file of which only what is touched has memory."""
    pages = 65_536
    shape = geometry(Component("kv", 2, Mha(8, 128, 128, "bfloat16"), 16), pages=pages, order=order)
    last = shape.tensors[-1]
    assert max(last.offset_bytes, (pages - 1) * last.page_stride_bytes) > 2**32
    file = os.memfd_create("large")
    try:
        os.ftruncate(file, shape.total_bytes)
        mapping = Mapping(file, shape.total_bytes)
        for number, place in enumerate(shape.tensors, 1):
            for page in (0, pages - 1):
                mapping.tensor(place, pages)[page] = number
        for number, place in enumerate(shape.tensors, 1):
            for page in (0, pages - 1):
                at = place.offset_bytes + page * place.page_stride_bytes
                seen = np.frombuffer(os.pread(file, 16 * 8 * 128 * 2, at), "<u2")
                assert (
                    seen
                    == torch.tensor(float(number), dtype=torch.bfloat16).view(torch.int16).item()
                ).all()
                assert (mapping.array(place, pages)[page].ravel() == seen).all()
        mapping.close()
    finally:
        os.close(file)
