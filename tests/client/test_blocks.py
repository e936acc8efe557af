"""Blocks of an engine in host memory, saved into pages and loaded from them."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import re
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.lib.stride_tricks import as_strided

import kvd.client.worker
from kvd.client import Code, KvdError, LayerMemory
from kvd.client.mover import host_lane
from kvd.client.mover.blocks import _BlockUses
from kvd.client.mover.pending_copy import CopyState
from kvd.core.layout.shards import tp_shards
from kvd.core.layout.spec import (
    Component,
    HeldShards,
    Interior,
    Mha,
    PageOrder,
    PoolSpec,
    Raw,
)
from kvd.errors import Refusal
from kvd.wire.attach import CopyBegins, CopyEnds, Leave, pages_sum
from tests.support.copies import WordsDaemon, mha_pool, numbered, raw_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from kvd.client import EngineBlocks, PendingCopy

BYTES = 4096
LAYER = 20 * BYTES
LAYERS = range(3)


class Engine:
    """Three layers of twenty blocks of host memory."""

    def __init__(self, daemon: WordsDaemon, **given: Any) -> None:
        self.daemon = daemon
        self.layers = {
            f"layer.{n}": numbered(np.random.default_rng(n), (20, BYTES)) for n in range(3)
        }
        self.before = np.stack(list(self.layers.values()))
        self.blocks: EngineBlocks = daemon.worker.blocks(self.layers, block_size=16, **given)

    def save(self, blocks: Any, pages: Any, **more: Any) -> PendingCopy:
        key = self.daemon.key()
        return self.blocks.begin_save(key, {"kv": blocks}, pages={"kv": pages}, **more)

    def load(self, blocks: Any, pages: Any, **more: Any) -> PendingCopy:
        key = self.daemon.key()
        return self.blocks.begin_load(key, {"kv": blocks}, pages={"kv": pages}, **more)

    def there(self) -> NDArray[np.uint8]:
        return np.stack(list(self.layers.values()))

    def pages(self) -> NDArray[np.uint8]:
        pool = self.daemon.worker.pool("main")
        return np.stack([next(iter(pool.arrays("kv", layer=n).values())) for n in range(3)])


@pytest.fixture
def daemon() -> Iterator[WordsDaemon]:
    made = WordsDaemon(raw_pool())
    yield made
    made.close()


@pytest.fixture
def engine(daemon: WordsDaemon) -> Engine:
    return Engine(daemon)


def ends(pending: PendingCopy, code: Code, match: str | None = None) -> Refusal:
    with pytest.raises(KvdError, match=match) as refused:
        pending.result(5)
    assert refused.value.code == code.value
    return refused.value.refusal


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_saved_is_loaded_again(daemon: WordsDaemon, threads: int) -> None:
    engine = Engine(daemon, threads=threads)
    save = engine.save([3, 4, 9], [7, 8, 2], first_page=2, upto_tokens=80)
    save.result(5)
    assert (engine.pages()[:, [7, 8, 2]] == engine.before[:, [3, 4, 9]]).all()
    load = engine.load(np.array([0, 1, 2]), np.array([7, 8, 2], np.int32), first_page={"kv": 2})
    load.result(5)
    assert load.safe()
    assert load.poll()
    assert save.n_bytes == load.n_bytes == 3 * 3 * BYTES
    expected = engine.before.copy()
    expected[:, [0, 1, 2]] = engine.before[:, [3, 4, 9]]
    assert (engine.there() == expected).all()


def test_the_daemon_hears_which_pages_of_which_lease(engine: Engine) -> None:
    daemon = engine.daemon
    engine.save([3, 4], [7, 8], first_page=5, upto_tokens=112).result(5)
    begins, ended = daemon.said
    assert isinstance(begins, CopyBegins)
    assert isinstance(ended, CopyEnds)
    (part,) = begins.parts
    assert (begins.lease, begins.to_pages, begins.upto_tokens, begins.device) == (1, True, 112, "")
    assert (part.component, part.first_page, part.n_pages) == ("kv", 5, 2)
    assert part.pages_sum == pages_sum(np.array([7, 8], "<i4").tobytes())
    assert (ended.copy, ended.is_done, ended.n_bytes) == (begins.call, True, 2 * 3 * BYTES)


def test_many_threads_share_large_copies_to_the_byte() -> None:
    daemon = WordsDaemon(raw_pool(page_bytes=512 * 1024 + 64, layers=1))
    try:
        layer = numbered(np.random.default_rng(3), (30, 512 * 1024 + 64))
        blocks = daemon.worker.blocks({0: layer}, block_size=16, threads=3)
        order = np.random.default_rng(4).permutation(30)
        blocks.begin_save(daemon.key(), {"kv": order}, pages={"kv": order[::-1] + 1}).result(10)
        (pages,) = daemon.worker.pool("main").arrays("kv", layer=0).values()
        assert (pages[order[::-1] + 1] == layer[order]).all()
        pages[order + 1] = layer[order]
        layer[:] = 0
        blocks.begin_load(daemon.key(), {"kv": order}, pages={"kv": order + 1}).result(10)
        assert (layer == pages[1:31]).all()
    finally:
        daemon.close()


def test_a_sandbox_without_the_kernels_copy_has_memmove(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forbidding:
        memmove = host_lane._libc.memmove

        @staticmethod
        def process_vm_readv(*_: object) -> int:
            ctypes.set_errno(1)
            return -1

        process_vm_writev = process_vm_readv

    monkeypatch.setattr(host_lane, "_libc", Forbidding)
    engine.save([3, 4, 9], [7, 8, 2]).result(5)
    assert (engine.pages()[:, [7, 8, 2]] == engine.before[:, [3, 4, 9]]).all()
    engine.load([0, 1, 2], [7, 8, 2]).result(5)
    assert (engine.there()[:, [0, 1, 2]] == engine.before[:, [3, 4, 9]]).all()


def test_what_lies_side_by_side_in_the_pool_is_looked_up_as_one_stretch(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stretches: list[tuple[int, int]] = []
    libc = host_lane._libc

    def counted(call: Callable[..., int]) -> Callable[..., int]:
        def copy(pid: int, near: int, n: int, far: int, n_far: int, flags: int) -> int:
            stretches.append((n, n_far))
            return call(pid, near, n, far, n_far, flags)

        return copy

    read, write = counted(libc.process_vm_readv), counted(libc.process_vm_writev)
    counting = SimpleNamespace(process_vm_readv=read, process_vm_writev=write)
    monkeypatch.setattr(host_lane, "_libc", counting)
    blocks = np.random.default_rng(5).permutation(20)
    pages = [*range(1, 11), *range(15, 25)]
    engine.save(blocks, pages).result(5)
    assert (engine.pages()[:, pages] == engine.before[:, blocks]).all()
    engine.load(blocks[::-1], pages).result(5)
    assert (engine.there()[:, blocks[::-1]] == engine.before[:, blocks]).all()
    # All layers of a page, and pages that follow each other; of the engine each is by itself.
    assert stretches == [(60, 2), (60, 2)]


# ---- blocks and pages of different sizes ---------------------------------------------------------


def kv_of(rng: np.random.Generator, n: int, block: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """K and V of two layers, in blocks."""
    shape = (n, block, 2, 8)
    return [
        (rng.random(shape).astype(np.float32), rng.random(shape).astype(np.float32))
        for _ in range(2)
    ]


def tokens_of(parts: NDArray[Any], at: list[int]) -> NDArray[Any]:
    """What these blocks or pages hold, token by token."""
    return np.concatenate([parts[one] for one in at])


@pytest.mark.parametrize("block", [4, 8, 16, 32, 64])
def test_blocks_and_pages_of_other_sizes_hold_the_same_tokens(block: int) -> None:
    daemon = WordsDaemon(mha_pool(page_size=16))
    try:
        layers = kv_of(np.random.default_rng(block), 80, block)
        blocks = daemon.worker.blocks(dict(enumerate(layers)), block_size=block)
        n_tokens = 192
        mine = list(range(20, 20 + n_tokens // block))
        pages = [5, 6, 9, 2, 11, 12, 13, 20, 30, 31, 3, 4]
        blocks.begin_save(
            daemon.key(), {"kv": mine}, pages={"kv": pages}, upto_tokens=n_tokens
        ).result(5)
        for layer, (keys, values) in enumerate(layers):
            k, v = daemon.worker.pool("main").arrays("kv", layer=layer).values()
            assert (tokens_of(k, pages) == tokens_of(keys, mine)).all()
            assert (tokens_of(v, pages) == tokens_of(values, mine)).all()
        before = [(k.copy(), v.copy()) for k, v in layers]
        other = [79, *range(len(mine) - 1)] if len(mine) < 20 else mine[::-1]
        blocks.begin_load(daemon.key(), {"kv": other}, pages={"kv": pages}).result(5)
        for (keys, values), (k, v) in zip(layers, before, strict=True):
            assert (tokens_of(keys, other) == tokens_of(k, mine)).all()
            assert (tokens_of(values, other) == tokens_of(v, mine)).all()
    finally:
        daemon.close()


def test_the_last_page_may_have_blocks_in_part() -> None:
    daemon = WordsDaemon(mha_pool(page_size=16))
    try:
        layers = kv_of(np.random.default_rng(1), 40, 4)
        blocks = daemon.worker.blocks(dict(enumerate(layers)), block_size=4)
        blocks.begin_save(daemon.key(), {"kv": [1, 2, 3, 4, 5]}, pages={"kv": [7, 9]}).result(5)
        k, _ = daemon.worker.pool("main").arrays("kv", layer=0).values()
        assert (tokens_of(k, [7, 9])[:20] == tokens_of(layers[0][0], [1, 2, 3, 4, 5])).all()
        assert not k[9][4:].any()
        with pytest.raises(KvdError, match="both must be of the same tokens") as refused:
            blocks.begin_save(daemon.key(), {"kv": [1, 2, 3, 4, 5]}, pages={"kv": [7, 9, 10]})
        assert refused.value.code == Code.BAD_PAGES.value
    finally:
        daemon.close()


def test_a_save_of_a_page_in_part_says_no_more_than_its_blocks() -> None:
    served = WordsDaemon(mha_pool(page_size=64))
    try:
        layers = kv_of(np.random.default_rng(1), 8, 16)
        blocks = served.worker.blocks(dict(enumerate(layers)), block_size=16)
        key = served.key()
        blocks.begin_save(key, {"kv": [1, 2, 3]}, pages={"kv": [5]}, first_page=1).result(5)
        assert next(iter(served.began.values())).upto_tokens == 64 + 48
    finally:
        served.close()


def test_tensors_are_kept_whatever_becomes_of_the_mapping(engine: Engine) -> None:
    engine.layers.clear()
    others = [np.full((20, BYTES), 0xAB, np.uint8) for _ in LAYERS]
    engine.save([7], [3]).result(5)
    assert (engine.pages()[:, 3] == engine.before[:, 7]).all()
    assert all((other == 0xAB).all() for other in others)


def test_all_layers_of_a_block_in_one_piece_are_one_piece(daemon: WordsDaemon) -> None:
    """As vLLM's BLHNC: the layers are views of one tensor, blocks outside."""
    whole = numbered(np.random.default_rng(2), (20, 3, BYTES))
    blocks = daemon.worker.blocks({n: whole[:, n] for n in range(3)}, block_size=16)
    table = blocks._tables["kv"]
    assert len(table._sizes) == 1
    blocks.begin_save(daemon.key(), {"kv": [4, 5]}, pages={"kv": [8, 9]}).result(5)
    for layer in range(3):
        (pages,) = daemon.worker.pool("main").arrays("kv", layer=layer).values()
        assert (pages[[8, 9]] == whole[[4, 5], layer]).all()


def test_layers_may_be_outside_and_heads_before_tokens() -> None:
    """A pool by layers, and pages by heads, of which a block is a part: a piece a head."""
    component = Component("kv", 2, Mha(2, 8, 8, "float32"), 16, interior=Interior.HND)
    daemon = WordsDaemon(PoolSpec("main", "mha", PageOrder.LAYER_FIRST, (component,), (40,)))
    try:
        rng = np.random.default_rng(6)
        shape = (30, 2, 4, 8)  # blocks of four tokens
        layers = {
            n: tuple(rng.random(shape).astype(np.float32) for _ in range(2)) for n in range(2)
        }
        blocks = daemon.worker.blocks(layers, block_size=4)
        mine = [3, 4, 9, 11, 20, 21, 22, 23]
        blocks.begin_save(daemon.key(), {"kv": mine}, pages={"kv": [7, 5]}).result(5)
        for layer, (keys, values) in layers.items():
            found = daemon.worker.pool("main").arrays("kv", layer=layer).values()
            for there, here in zip(found, (keys, values), strict=True):
                for page, four in ((7, mine[:4]), (5, mine[4:])):
                    assert (there[page] == np.concatenate(list(here[four]), axis=1)).all()
    finally:
        daemon.close()


@pytest.mark.parametrize("shard", [0, 1])
def test_each_rank_has_its_shard(shard: int) -> None:
    held = HeldShards(layers=2, heads=4, shards=tp_shards(4, 2, (0, 2), (0, 2)))
    component = Component("kv", 2, Mha(2, 8, 8, "float32"), 16)
    spec = PoolSpec("main", "mha", PageOrder.PAGE_FIRST, (component,), (40,), held=held)
    daemon = WordsDaemon(spec, rank=shard)
    try:
        layers = kv_of(np.random.default_rng(1), 20, 16)
        blocks = daemon.worker.blocks(dict(enumerate(layers)), block_size=16)
        blocks.begin_save(daemon.key(), {"kv": [3, 4]}, pages={"kv": [7, 5]}).result(5)
        for number in range(2):
            found = daemon.worker.pool("main").arrays("kv", layer=1, shard=number)
            is_mine = (found["k"][[7, 5]] == layers[1][0][[3, 4]]).all()
            assert is_mine == (number == shard)
    finally:
        daemon.close()


def test_components_are_copied_in_one_order() -> None:
    parts = (Component("kv", 2, Raw(512), 16), Component("index", 2, Raw(64), 16))
    several = WordsDaemon(PoolSpec("main", "raw", PageOrder.PAGE_FIRST, parts, (40, 40)))
    try:
        own = {
            name: {n: numbered(np.random.default_rng(size + n), (20, size)) for n in range(2)}
            for name, size in (("index", 64), ("kv", 512))
        }
        blocks = several.worker.blocks(own, block_size=16)
        blocks.begin_save(
            several.key(),
            {"index": [1, 2], "kv": [1, 2]},
            pages={"kv": [7, 8], "index": [7, 8]},
            first_page=3,
        ).result(5)
        (begins, _) = several.said
        assert isinstance(begins, CopyBegins)
        assert [part.component for part in begins.parts] == ["kv", "index"]
        assert begins.upto_tokens == 5 * 16
        for name, layers in own.items():
            for n, layer in layers.items():
                (pages,) = several.worker.pool("main").arrays(name, layer=n).values()
                assert (pages[[7, 8]] == layer[[1, 2]]).all()
    finally:
        several.close()


# ---- what cannot be blocks ---------------------------------------------------------------------


def flat(array: NDArray[Any]) -> NDArray[Any]:
    return array.reshape(-1)


class _Described:
    """What says by its interface alone where it lies."""

    def __init__(self, interface: dict[str, object]) -> None:
        self.__array_interface__ = interface


def _read_only() -> NDArray[Any]:
    array = np.zeros((20, BYTES), np.uint8)
    array.flags.writeable = False
    return array


def like(array: NDArray[Any], device: str) -> LayerMemory:
    strides = tuple(step // array.itemsize for step in array.strides)
    return LayerMemory(array.ctypes.data, array.shape, strides, array.itemsize, device)


@pytest.mark.parametrize(
    ("caches", "told"),
    [
        (lambda a, _: {n: a[n, :, :2048] for n in LAYERS}, "4096 bytes a page"),
        (lambda a, _: {0: a[0]}, "1 layers of the engine, and 3"),
        (lambda a, _: {n: a[n] if n else a[n, :10] for n in LAYERS}, "10, 20"),
        (lambda a, _: {n: (a[n], a[n]) for n in LAYERS}, "2 tensors for layer 0"),
        (lambda a, _: {n: a[n].T for n in LAYERS}, "not one stretch"),
        (lambda a, _: {n: flat(a)[n * 64 :][:LAYER].reshape(20, -1) for n in LAYERS}, "over each"),
        (lambda a, _: {}, "no layer"),
        (lambda _, pages: dict(enumerate(pages)), "they are pages already"),
        (lambda a, _: {n: a[n, :0] for n in LAYERS}, "no block in it"),
        (lambda a, _: {n: as_strided(a[n], (20, BYTES), (64, 1)) for n in LAYERS}, "is not the"),
        (lambda a, _: {n: like(a[n], "cpu" if n else "cuda:0") for n in LAYERS}, "cpu and cuda:0"),
    ],
)  # fmt: skip
def test_what_is_no_page_of_this_pool_is_refused_with_the_numbers(
    daemon: WordsDaemon, caches: Callable[[Any, Any], Any], told: str
) -> None:
    pool = daemon.worker.pool("main")
    pages = [next(iter(pool.arrays("kv", layer=n).values())) for n in range(3)]
    with pytest.raises(KvdError, match=told) as refused:
        daemon.worker.blocks(caches(np.zeros((3, 20, BYTES), np.uint8), pages), block_size=16)
    assert refused.value.code == Code.LAYOUT_MISMATCH.value
    assert not daemon.said


@pytest.mark.parametrize(
    ("caches", "code", "told"),
    [
        (None, Code.BAD_REQUEST, "caches is a NoneType"),
        ([np.zeros((20, BYTES), np.uint8)] * 3, Code.BAD_REQUEST, "caches is a list"),
        ({0: None}, Code.BAD_REQUEST, "layer 0 is a NoneType"),
        ({0: np.full((20, 8), None)}, Code.BAD_REQUEST, "array of Python's objects"),
        ({0: _read_only()}, Code.BAD_REQUEST, "may only be read"),
        ({0: LayerMemory(4096, (20, 64), (64,), 1)}, Code.LAYOUT_MISMATCH, "the strides (64,)"),
        ({0: LayerMemory(4096, (20, -1), (64, 1), 1)}, Code.LAYOUT_MISMATCH, "lies like that"),
        ({0: LayerMemory(4096, (20, 64), (64, 1), 0)}, Code.LAYOUT_MISMATCH, "of 0 bytes"),
        ({0: _Described({})}, Code.BAD_REQUEST, "does not say where it lies"),
        ({0: _Described({"typestr": 5})}, Code.BAD_REQUEST, "does not say where it lies"),
        ({0: LayerMemory("a", (20, 64), (64, 1), 1)}, Code.BAD_REQUEST, "are ints"),
        ({0: LayerMemory(4096, (20, 1.5), (64, 1), 1)}, Code.BAD_REQUEST, "are ints"),
        ({0: LayerMemory(0, (20, 64), (64, 1), 1)}, Code.BAD_REQUEST, "no memory is there"),
        ({0: LayerMemory(-5, (20, 64), (64, 1), 1)}, Code.BAD_REQUEST, "no memory is there"),
        ({0: LayerMemory(2**64, (20, 64), (64, 1), 1)}, Code.BAD_REQUEST, "no memory is there"),
        ({0: LayerMemory(2**64 - 1280, (21, 64), (64, 1), 1)}, Code.BAD_REQUEST, "no memory"),
        ({0: LayerMemory(4096, (20, 64), (2**62, 1), 1)}, Code.BAD_REQUEST, "no memory is there"),
    ],
)
def test_what_is_no_memory_is_refused_with_what_it_is(
    daemon: WordsDaemon, caches: Any, code: Code, told: str
) -> None:
    with pytest.raises(KvdError, match=re.escape(told)) as refused:
        daemon.worker.blocks(caches, block_size=16)
    assert refused.value.code == code.value


@pytest.mark.parametrize(
    "wrong",
    [{"pool": ["main"]}, {"pool": {}}, {"mark_within_s": float("nan")}, {"mark_within_s": -1}],
)
def test_what_blocks_are_given_with_is_refused_by_its_name(
    daemon: WordsDaemon, wrong: dict[str, Any]
) -> None:
    layers = {n: np.zeros((20, BYTES), np.uint8) for n in LAYERS}
    with pytest.raises(KvdError) as refused:
        daemon.worker.blocks(layers, block_size=16, **wrong)
    assert refused.value.code == Code.BAD_REQUEST.value


def test_the_daemon_knows_that_there_are_blocks_before_the_first_order(
    daemon: WordsDaemon,
) -> None:
    layers = {n: np.zeros((20, BYTES), np.uint8) for n in LAYERS}
    assert not daemon.worker.movers.has_blocks
    daemon.worker.blocks(layers, block_size=16)
    assert daemon.knows_of_blocks
    assert daemon.worker.movers.has_blocks


def test_blocks_of_other_tokens_are_refused(daemon: WordsDaemon) -> None:
    layers = {n: np.zeros((20, BYTES), np.uint8) for n in range(3)}
    with pytest.raises(KvdError, match="blocks of 12 tokens and pages of 16"):
        daemon.worker.blocks(layers, block_size=12)
    halves = {n: np.zeros((20, BYTES // 2), np.uint8) for n in range(3)}
    with pytest.raises(KvdError, match="only the engine tells apart"):
        daemon.worker.blocks(halves, block_size=8)


@pytest.mark.parametrize("device", ["cuda:0", "xpu:0"])
def test_blocks_on_a_device_need_one(
    daemon: WordsDaemon, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDART_LIBRARY", "/nowhere/libcudart.so")
    memory = np.zeros((3, 20, BYTES), np.uint8)
    layers = {n: like(memory[n], device) for n in range(3)}
    with pytest.raises(KvdError, match=device) as refused:
        daemon.worker.blocks(layers, block_size=16)
    assert refused.value.code == Code.NOT_SUPPORTED.value


def test_what_does_not_say_where_it_lies_is_refused(daemon: WordsDaemon) -> None:
    with pytest.raises(KvdError, match="layer 0 is a int") as refused:
        daemon.worker.blocks({0: 17, 1: 17, 2: 17}, block_size=16)
    assert refused.value.code == Code.BAD_REQUEST.value


class OnlyDlpack:
    """A tensor of a framework that has nothing else."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, *, stream: int | None = None) -> object:
        return self._tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


@pytest.mark.parametrize("kind", ["torch", "dlpack", "view of torch"])
def test_tensors_of_any_framework_are_blocks(daemon: WordsDaemon, kind: str) -> None:
    whole = torch.randint(0, 255, (20, 3, BYTES // 2), dtype=torch.uint8).to(torch.float16)
    layers: dict[int, Any] = {n: whole[:, n] for n in range(3)}
    if kind == "torch":
        layers = {n: layer.contiguous() for n, layer in layers.items()}
    elif kind == "dlpack":
        layers = {n: OnlyDlpack(layer) for n, layer in layers.items()}
    blocks = daemon.worker.blocks(layers, block_size=16)
    numbers = torch.tensor([4, 9])
    blocks.begin_save(daemon.key(), {"kv": numbers}, pages={"kv": [8, 2]}).result(5)
    for layer in range(3):
        (pages,) = daemon.worker.pool("main").tensors("kv", layer=layer).values()
        assert torch.equal(pages[[8, 2]].view(torch.float16), whole[[4, 9], layer])


def test_a_device_that_nobody_can_copy_is_named(daemon: WordsDaemon) -> None:
    class Other(OnlyDlpack):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (14, 0)

    layers = {n: Other(torch.zeros(20, BYTES)) for n in range(3)}
    with pytest.raises(KvdError, match="kind 14 of DLPack") as refused:
        daemon.worker.blocks(layers, block_size=16)
    assert refused.value.code == Code.NOT_SUPPORTED.value


def test_the_daemon_keeps_pages_for_so_many_copies_at_once() -> None:
    daemon = WordsDaemon(raw_pool(layers=1, page_bytes=64, pages=400))
    try:
        layer = numbered(np.random.default_rng(1), (4, 64))
        blocks = daemon.worker.blocks({0: layer}, block_size=16)
        daemon.hold()
        orders = [
            blocks.begin_save(daemon.key(), {"kv": [n % 4]}, pages={"kv": [n + 1]})
            for n in range(390)
        ]
        daemon.until(lambda: len(daemon.said) == 256)
        time.sleep(0.02)
        assert len(daemon.said) == 256
        daemon.answer()
        for order in orders:
            order.result(10)
        (pages,) = daemon.worker.pool("main").arrays("kv", layer=0).values()
        assert (pages[1:391] == layer[np.arange(390) % 4]).all()
    finally:
        daemon.close()


# ---- what cannot be ordered --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "pages", "told"),
    [
        ([20], [1], "block 20 is none: they are 0 to 19"),
        ([-1], [1], "block -1 is none"),
        ([1], [0], "page 0 is none: they are 1 to 39"),
        ([1], [40], "page 40 is none"),
        ([1, 2], [3], "2 blocks and 1 pages"),
        ([1, 2], [3, 3], "number 3 is twice among the pages"),
        ([1.5], [3], "float64"),
        ([[1]], [3], "shape"),
        ([None], [3], "none of block numbers"),
    ],
)
def test_numbers_that_cannot_be_are_refused_at_once(
    engine: Engine, blocks: Any, pages: Any, told: str
) -> None:
    with pytest.raises(KvdError, match=told) as refused:
        engine.save(blocks, pages)
    assert refused.value.code == Code.BAD_PAGES.value
    assert not engine.daemon.said
    engine.save([1], [1]).result(5)


@pytest.mark.parametrize(
    "order",
    [
        lambda engine, key: engine.blocks.begin_save(key, {"other": [1]}, pages={"other": [1]}),
        lambda engine, key: engine.blocks.begin_save(key, {"kv": [1]}),
        lambda engine, key: engine.save([1], [1], first_page=-1),
        lambda engine, key: engine.save([1], [1], first_page=1.5),
        lambda engine, key: engine.save([1], [1], first_page={"KV": 4}),
        lambda engine, key: engine.blocks.begin_load(
            key, {"kv": [1]}, pages={"kv": [1], "other": [1]}
        ),
        lambda engine, key: engine.blocks.begin_save(key, {"kv": []}, pages={"kv": []}),
        lambda engine, key: engine.blocks.begin_save(key, {}, pages={}),
        lambda engine, key: engine.save([1], [1], upto_tokens="a"),
        lambda engine, _: engine.blocks.begin_save(None, {"kv": [1]}, pages={"kv": [1]}),
        lambda engine, _: engine.blocks.begin_load(7, {"kv": [1]}, pages={"kv": [1]}),
        lambda engine, key: engine.blocks.begin_save((key,), {"kv": [1]}, pages={"kv": [1]}),
        lambda engine, key: engine.blocks.begin_save(key, [1], pages={"kv": [1]}),
        lambda engine, key: engine.blocks.begin_load(key, None, pages={"kv": [1]}),
        lambda engine, key: engine.blocks.begin_save(key, {"kv": [1]}, pages=[1]),
    ],
)  # fmt: skip
def test_an_order_of_nothing_is_refused(engine: Engine, order: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(KvdError) as refused:
        order(engine, engine.daemon.key())
    assert refused.value.code == Code.BAD_REQUEST.value


def test_an_order_of_another_session_or_life_is_refused(engine: Engine) -> None:
    key = engine.daemon.key()
    for other, code in (
        (replace(key, session=8), Code.UNKNOWN_SESSION),
        (replace(key, incarnation="f" * 32), Code.BEFORE_RESTART),
    ):
        with pytest.raises(KvdError) as refused:
            engine.blocks.begin_load(other, {"kv": [1]}, pages={"kv": [1]})
        assert refused.value.code == code.value
    assert not engine.daemon.said


def test_a_block_has_one_writer_and_no_reader_beside(engine: Engine) -> None:
    engine.daemon.hold()
    saves = [engine.save([3], [5]), engine.save([3, 4], [6, 7])]
    with pytest.raises(KvdError, match="block 4 of kv is read by a save") as refused:
        engine.load([4], [9])
    assert refused.value.code == Code.WRONG_STATE.value
    load = engine.load([8], [9])
    for order in (engine.load, engine.save):
        with pytest.raises(KvdError, match="block 8 of kv is written by a load"):
            order([7, 8], [10, 11])
    engine.daemon.answer()
    for pending in (*saves, load):
        pending.result(5)
    engine.load([3, 4, 8], [5, 6, 9]).result(5)


# ---- the daemon's word -------------------------------------------------------------------------


def test_no_byte_moves_before_the_daemon_has_answered(engine: Engine) -> None:
    engine.daemon.hold()
    save = engine.save([3], [5])
    load = engine.load([8], [9])
    engine.daemon.until(lambda: len(engine.daemon.said) == 2)
    time.sleep(0.05)
    assert save.state is load.state is CopyState.ASKING
    assert not save.safe()
    assert not engine.pages().any()
    assert (engine.there() == engine.before).all()
    engine.daemon.answer()
    save.result(5)
    load.result(5)
    assert (engine.pages()[:, 5] == engine.before[:, 3]).all()
    assert not engine.there()[:, 8].any()


def test_what_the_daemon_refuses_is_not_copied(engine: Engine) -> None:
    why = Refusal(Code.CONDEMNED, "lease 1 is condemned", side="daemon")
    engine.daemon.refuse = lambda word: why if isinstance(word, CopyBegins) else None
    save = engine.save([3], [5])
    assert ends(save, Code.CONDEMNED) == why
    assert save.safe()
    assert not engine.pages().any()
    assert not engine.daemon.ended


def test_it_is_over_when_the_daemon_has_counted_it(engine: Engine) -> None:
    engine.daemon.refuse = lambda word: engine.daemon.hold()  # type: ignore[func-returns-value]
    save = engine.save([3], [5])
    engine.daemon.until(lambda: len(engine.daemon.said) == 2)
    time.sleep(0.02)
    assert save.safe()
    assert not save.is_over
    engine.daemon.refuse = lambda _: None
    engine.daemon.answer()
    save.result(5)


def test_a_block_is_the_engines_again_when_its_order_says_safe(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no later, whether or not the daemon has counted the save yet."""
    orders: list[PendingCopy] = []
    safe_before: list[bool] = []
    give_back = _BlockUses.give_back

    def gives_back(uses: _BlockUses, blocks: NDArray[np.int64], *, is_written: bool) -> None:
        safe_before.append(orders[-1].safe())
        give_back(uses, blocks, is_written=is_written)

    monkeypatch.setattr(_BlockUses, "give_back", gives_back)
    engine.daemon.hold()
    orders.append(engine.save([3], [5]))
    engine.daemon.refuse = lambda word: engine.daemon.hold()  # type: ignore[func-returns-value]
    engine.daemon.answer()
    engine.daemon.until(lambda: len(engine.daemon.said) == 2)
    save = orders[0]
    assert save.safe()
    assert not save.is_over
    orders.append(engine.load([3], [9]))
    engine.daemon.refuse = lambda _: None
    engine.daemon.answer()
    for order in orders:
        order.result(5)
    assert safe_before == [False, False]


def test_a_daemon_that_refuses_the_end_does_not_count_it(engine: Engine) -> None:
    why = Refusal(Code.WRONG_STATE, "lease 1 was retracted meanwhile", side="daemon")
    engine.daemon.refuse = lambda word: why if isinstance(word, CopyEnds) else None
    assert ends(engine.save([3], [5]), Code.WRONG_STATE) == why


def test_memory_that_is_gone_ends_the_order_and_not_the_engine(daemon: WordsDaemon) -> None:
    size = 3 * 20 * BYTES
    memory = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    layers = {
        n: LayerMemory(address + n * 20 * BYTES, (20, BYTES), (BYTES, 1), 1) for n in range(3)
    }
    blocks = daemon.worker.blocks(layers, block_size=16)
    libc = ctypes.CDLL(None)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    # Of the last layer alone, and nothing else may be mapped there meanwhile.
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert not libc.mprotect(address + 2 * 20 * BYTES, 20 * BYTES, 0)
    save = blocks.begin_save(daemon.key(), {"kv": [1, 2]}, pages={"kv": [4, 5]})
    ends(save, Code.POST_FAILED, "Bad address")
    assert save.safe()
    (ended,) = daemon.ended.values()
    assert not ended.is_done
    assert "Bad address" in ended.why


# ---- cancel, close, fork -----------------------------------------------------------------------


def test_a_cancelled_order_is_over_when_nothing_of_it_moves(engine: Engine) -> None:
    engine.daemon.hold()
    asked = engine.save([3], [5])
    engine.daemon.until(lambda: engine.daemon.said)
    assert not asked.safe()
    assert asked.cancel()
    # Nothing has moved, and nobody waits for a daemon that does not answer.
    ends(asked, Code.CANCELLED)
    assert asked.safe()
    assert not asked.cancel()
    assert not engine.daemon.worker.movers.is_quiet, "pages may be kept for it"
    engine.daemon.answer()
    engine.daemon.until(lambda: engine.daemon.ended)
    assert not engine.pages().any()
    assert [word.is_done for word in engine.daemon.ended.values()] == [False]
    engine.load([3], [5]).result(5)


def test_a_close_waits_for_what_moves_and_ends_the_rest(engine: Engine) -> None:
    engine.daemon.hold()
    order = engine.save([3], [5])
    engine.daemon.until(lambda: engine.daemon.said)
    closing = threading.Thread(target=engine.blocks.close)
    closing.start()
    closing.join(5)
    assert not closing.is_alive(), "it waits for a daemon, and nothing moves"
    assert order.safe()
    engine.daemon.answer()
    engine.daemon.until(lambda: engine.daemon.ended)
    with pytest.raises(KvdError, match="closed"):
        engine.save([4], [6])
    assert Engine(engine.daemon).save([4], [6]).result(5) is None


def test_a_worker_leaves_when_its_copies_are_over(engine: Engine) -> None:
    engine.daemon.hold()
    order = engine.save([3], [5])
    engine.daemon.until(lambda: engine.daemon.said)
    closing = threading.Thread(target=engine.daemon.worker.close)
    closing.start()
    time.sleep(0.02)
    engine.daemon.answer()
    closing.join(5)
    engine.daemon.until(lambda: isinstance(engine.daemon.said[-1], Leave))
    assert order.is_over
    assert [type(word) for word in engine.daemon.said] == [CopyBegins, CopyEnds, Leave]
    with pytest.raises(KvdError, match="closed"):
        engine.save([4], [6])


def test_a_worker_whose_daemon_does_not_answer_leaves_where_nothing_moves(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its pages would be held until this process has ended, which may be never."""
    monkeypatch.setattr(kvd.client.worker, "CLOSE_WITHIN_S", 0.05)
    engine.daemon.hold()
    order = engine.save([3], [5])
    engine.daemon.until(lambda: engine.daemon.said)
    engine.daemon.worker.close()
    ends(order, Code.UNREACHABLE, "closed")
    assert order.safe()
    engine.daemon.until(lambda: isinstance(engine.daemon.said[-1], Leave))


async def _awaited(order: PendingCopy) -> None:
    await order


def test_a_forked_child_orders_nothing(engine: Engine) -> None:
    engine.save([3], [5]).result(5)
    engine.daemon.hold()
    under_way = engine.save([7], [8])
    engine.daemon.until(lambda: len(engine.daemon.said) == 3)
    said = len(engine.daemon.said)
    pid = os.fork()
    if not pid:
        for verb in (
            under_way.poll,
            under_way.result,
            under_way.cancel,
            lambda: asyncio.run(_awaited(under_way)),
            lambda: engine.save([4], [6]),
            engine.blocks.mark,
            lambda: engine.daemon.worker.blocks(
                {n: np.zeros((20, BYTES)) for n in LAYERS}, block_size=16
            ),
        ):
            try:
                verb()
            except KvdError as error:
                if error.code != Code.WRONG_STATE.value:
                    os._exit(1)
            else:
                os._exit(2)
        engine.blocks.close()
        os._exit(3 if under_way.safe() else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(engine.daemon.said) == said
    engine.daemon.answer()
    under_way.result(5)
    engine.save([4], [6]).result(5)


# ---- a daemon that ends ------------------------------------------------------------------------


def test_orders_end_when_the_daemon_is_gone(engine: Engine) -> None:
    engine.daemon.hold()
    asked = engine.save([3], [5])
    engine.daemon.until(lambda: engine.daemon.said)
    engine.daemon.hang_up()
    ends(asked, Code.UNREACHABLE)
    assert asked.safe()
    assert not engine.pages().any()
    with pytest.raises(KvdError) as refused:
        engine.save([3], [5])
    assert refused.value.code == Code.UNREACHABLE.value


def test_a_copy_whose_end_nobody_hears_does_not_count(engine: Engine) -> None:
    engine.daemon.refuse = lambda word: engine.daemon.hold()  # type: ignore[func-returns-value]
    save = engine.save([3], [5])
    engine.daemon.until(lambda: len(engine.daemon.said) == 2)
    engine.daemon.hang_up()
    ends(save, Code.UNREACHABLE)
    assert save.safe()
    assert engine.daemon.worker.movers.is_quiet


# ---- waiting -----------------------------------------------------------------------------------


async def test_an_order_is_awaited_on_a_loop(engine: Engine) -> None:
    engine.daemon.hold()
    orders = [engine.save([3], [5]), engine.load([8], [9])]
    waiting = [asyncio.ensure_future(_of(order)) for order in orders]
    await asyncio.sleep(0.02)
    assert not any(one.done() for one in waiting)
    engine.daemon.answer()
    await asyncio.gather(*waiting)
    await orders[0]
    why = Refusal(Code.WRONG_STATE, "no", side="daemon")
    engine.daemon.refuse = lambda _: why
    with pytest.raises(KvdError, match="no"):
        await engine.save([3], [5])


async def _of(order: PendingCopy) -> None:
    await order


def test_a_wait_that_is_too_short_says_so_and_the_order_goes_on(engine: Engine) -> None:
    engine.daemon.hold()
    order = engine.save([3], [5])
    assert not order.poll()
    with pytest.raises(KvdError, match="goes on") as refused:
        order.result(0.01)
    assert refused.value.code == Code.DEADLINE.value
    engine.daemon.answer()
    order.result(5)


def test_short_orders_do_not_wait_for_long_ones_and_long_ones_end() -> None:
    daemon = WordsDaemon(raw_pool(page_bytes=2**20, layers=1, pages=200))
    try:
        layer = np.ones((160, 2**20), np.uint8)
        blocks = daemon.worker.blocks({0: layer}, block_size=16)
        daemon.hold()
        long = blocks.begin_save(daemon.key(), {"kv": range(150)}, pages={"kv": range(1, 151)})
        short = blocks.begin_save(daemon.key(), {"kv": [155]}, pages={"kv": [160]})
        daemon.until(lambda: len(daemon.said) == 2)
        daemon.answer()
        short.result(10)
        assert not long.is_over
        long.result(20)
    finally:
        daemon.close()


class Grouped:
    """Two groups of layers over the same memory, as vLLM lays them: a block is one group's."""

    def __init__(self, daemon: WordsDaemon) -> None:
        self.daemon = daemon
        self.layers = [numbered(np.random.default_rng(n), (20, BYTES)) for n in range(2)]
        first, second = self.layers
        self.before = np.stack(self.layers)
        self.blocks: EngineBlocks = daemon.worker.blocks(
            [{"a": first, "b": second}, {"c": first}], block_size=16
        )

    def order(self, begin: Any, rows: Any, pages: Any) -> PendingCopy:
        pending: PendingCopy = begin(self.daemon.key(), {"kv": rows}, pages={"kv": pages})
        return pending

    def pages(self) -> NDArray[np.uint8]:
        pool = self.daemon.worker.pool("main")
        return np.stack([next(iter(pool.arrays("kv", layer=n).values())) for n in range(3)])


def test_groups_of_layers_have_blocks_of_their_own(daemon: WordsDaemon) -> None:
    engine = Grouped(daemon)
    save = engine.order(engine.blocks.begin_save, [[3, 4], [9, 2]], [7, 8])
    save.result(5)
    first, second = engine.before
    assert (engine.pages()[0, [7, 8]] == first[[3, 4]]).all()
    assert (engine.pages()[1, [7, 8]] == second[[3, 4]]).all()
    assert (engine.pages()[2, [7, 8]] == first[[9, 2]]).all()
    load = engine.order(engine.blocks.begin_load, [[10, 11], [-1, 12]], [7, 8])
    load.result(5)
    expected = engine.before.copy()
    expected[:, [10, 11]] = engine.before[:, [3, 4]]
    expected[0, 12] = first[2]
    assert (np.stack(engine.layers) == expected).all()
    assert (save.n_bytes, load.n_bytes) == (6 * BYTES, 5 * BYTES)


def test_a_group_may_have_no_block_at_all(daemon: WordsDaemon) -> None:
    engine = Grouped(daemon)
    engine.order(engine.blocks.begin_load, [[1, 2], [-1, -1]], [7, 8]).result(5)
    with pytest.raises(KvdError, match="an order of no block"):
        engine.order(engine.blocks.begin_load, [[-1, -1], [-1, -1]], [7, 8])


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([[1, 2]], "1 rows of 2 of blocks of kv, whose layers are in 2 groups"),
        ([[1, 2], [3]], "2 rows of 1 and 2 of blocks"),
        ([1, 2], "no rows of blocks"),
        ([[1, 2], [3, 20]], "block 20 is none"),
        ([[1, 2], [3, -2]], "block -2 is none"),
        ([[1, 2], [2, 3]], "number 2 is twice among the blocks"),
        ([[1, 2, 3], [4, 5, 6]], "3 blocks and 2 pages"),
    ],
)
def test_rows_that_are_none_are_refused(daemon: WordsDaemon, rows: Any, match: str) -> None:
    engine = Grouped(daemon)
    with pytest.raises(KvdError, match=match) as refused:
        engine.order(engine.blocks.begin_load, rows, [7, 8])
    assert refused.value.code == Code.BAD_PAGES.value


def test_blocks_of_groups_are_used_once(daemon: WordsDaemon) -> None:
    engine = Grouped(daemon)
    daemon.hold()
    engine.order(engine.blocks.begin_load, [[1], [2]], [7])
    with pytest.raises(KvdError, match="block 2 of kv is written by a load"):
        engine.order(engine.blocks.begin_save, [[2], [5]], [9])
    daemon.answer()


def test_a_page_of_bytes_may_be_cut_into_other_layers_than_the_engine_has(
    daemon: WordsDaemon,
) -> None:
    """Of layers of unlike sizes no pool has the like."""
    sizes = (BYTES // 2, 2 * BYTES, BYTES // 2)
    layers = [numbered(np.random.default_rng(n), (20, size)) for n, size in enumerate(sizes)]
    before = [layer.copy() for layer in layers]
    blocks = daemon.worker.blocks(dict(enumerate(layers)), block_size=16)
    key = daemon.key()
    blocks.begin_save(key, {"kv": [3, 4]}, pages={"kv": [7, 8]}).result(5)
    pool = daemon.worker.pool("main")
    pages = [next(iter(pool.arrays("kv", layer=n).values())) for n in range(3)]
    for block, page in ((3, 7), (4, 8)):
        wanted = np.concatenate([layer[block] for layer in layers])
        assert (np.concatenate([layer[page] for layer in pages]).view(np.uint8) == wanted).all()
    blocks.begin_load(key, {"kv": [0, 1]}, pages={"kv": [7, 8]}).result(5)
    for layer, was in zip(layers, before, strict=True):
        assert (layer[[0, 1]] == was[[3, 4]]).all()
        assert (layer[2:] == was[2:]).all()
