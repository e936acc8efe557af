"""Regions on devices: real transfer processes, over doubles of the CUDA runtime and of NIXL.

No processor reaches the memory of the transfer processes; this process stands for an engine's
kernels, which do. How NIXL moves such memory is for tests/gpu. Everything else is as on a device:
who allocates, who opens, who copies, what ends when.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvd.core.effects import Verify
from kvd.core.inputs import (
    AgentLoaded,
    Copied,
    MemoryPinned,
    PathFound,
    PostDone,
    Verified,
    WritePath,
)
from kvd.core.layout.geometry import Geometry, PieceRow
from kvd.core.layout.seal import Seal
from kvd.core.layout.shards import lanes, tp_shards
from kvd.core.layout.spec import Mla, PageOrder
from kvd.device.cuda import CudaError
from kvd.transfer.device_streams import READERS, STAGE_BYTES
from kvd.transfer.orders import Sum, Summed
from kvd.transfer.process import TransportDown
from kvd.types import Pages, pack_ids
from kvd.wire.peer import Integrity
from tests.cuda.double import holders, memory_of_devices
from tests.cuda.regions import ON_DEVICE, node_of
from tests.cuda.test_cuda import other
from tests.transfer.conftest import HUGE, SHAPES
from tests.transfer.layouts import shaped
from tests.transfer.sharded import MHA, fill, memory_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.transfer.conftest import Node

pytestmark = pytest.mark.usefixtures("nixl", "kernels")

ROOT = Path(__file__).parents[2]
PATTERNS = (([3], [5]), (list(range(1, 25)), list(range(1, 25))), ([9, 2, 17, 24], [4, 23, 8, 1]))
SIDES = {"device to device": (ON_DEVICE, ON_DEVICE)} | {
    "device to host": (ON_DEVICE, {}),
    "host to device": ({}, ON_DEVICE),
}


@contextlib.asynccontextmanager
async def two(double, ours, theirs, **settings) -> Iterator[tuple[Node, Node]]:
    async with (
        node_of(double, "sender", ours, **settings) as sender,
        node_of(double, "receiver", theirs, **settings) as receiver,
    ):
        await sender.load(receiver)
        yield sender, receiver


@pytest.mark.parametrize("late", [{}, {"DOUBLE_LATE_US": "2000"}], ids=["at-once", "late"])
@pytest.mark.parametrize("sides", SIDES)
async def test_pages_arrive_and_nothing_else_changes(double, sides, late):
    numbers = iter(range(1, 99))
    async with two(double, *SIDES[sides], **late) as (sender, receiver):
        for region in ("kv", "layered"):
            ours, theirs = sender.memories[region], receiver.memories[region]
            for source, destination in PATTERNS:
                theirs.paint(50 + next(numbers))
                size = theirs.shape.total_bytes
                expected = theirs.bytes[:size].copy()
                for row in theirs.shape.rows:
                    for a, b in zip(source, destination, strict=True):
                        expected[theirs.piece(row, b)] = ours.bytes[ours.piece(row, a)]
                post = next(numbers)
                sender.post(post, receiver, source, destination, component=region)

                outcome = await sender.outcome(post)

                assert isinstance(outcome, PostDone), outcome
                assert np.array_equal(theirs.bytes[:size], expected)


@pytest.mark.parametrize("sockets", ["none", "emulated", "forced"])
@pytest.mark.parametrize("sides", SIDES)
async def test_how_bytes_of_a_device_travel_is_seen_and_told(double, sides, sockets, monkeypatch):
    """Real sockets, as UCX would have: what it emulates passes them, and nothing else does."""
    monkeypatch.setenv("NIXL_DOUBLE_SOCKETS", sockets)
    is_emulated = sockets == "forced" or (sockets == "emulated" and sides != "device to device")
    source, _, destination = sides.partition(" to ")
    async with two(double, *SIDES[sides]) as (sender, receiver):
        assert sender.heard(AgentLoaded)[0].path is WritePath.SAME_HOST, "host memory"
        sender.post(1, receiver, list(range(1, 25)), list(range(1, 25)))
        assert isinstance(await sender.outcome(1), PostDone)

        (found,) = sender.heard(PathFound)
        assert (found.source.value, found.destination.value) == (source, destination)
        expected = WritePath.EMULATED if is_emulated else WritePath.SAME_HOST
        assert found.path is expected
        size = receiver.memories["kv"].shape.total_bytes
        for first in (2, 3):
            sender.post(first, receiver, [9, 2, 17], [4, 23, 8])
            assert isinstance(await sender.outcome(first), PostDone)
        assert len(sender.heard(PathFound)) == 1
        ours, theirs = sender.memories["kv"].bytes, receiver.memories["kv"].bytes
        row = receiver.memories["kv"].shape.rows[0]
        where = receiver.memories["kv"].piece
        assert np.array_equal(theirs[:size][where(row, 23)], ours[:size][where(row, 2)])


async def test_sums_of_a_device_are_those_of_the_same_bytes_in_host_memory(double):
    seal = Seal(Integrity.FULL, b"devices!", 0, 4)
    pages = [7, 8, 2, 24]
    async with two(double, ON_DEVICE, {}) as (device, host):
        for region in ("kv", "layered"):
            device.post(1, host, pages, pages, component=region, seal=seal)
            posted = await device.outcome(1)
            assert len(posted.sums) == 4 * 8
            order = Verify(1, region, seal, Pages(pack_ids(pages)), posted.sums)
            for node in (device, host):
                node.transport.order(order)
                assert (await node.hears(Verified)).bad_pages == ()
            row = device.memories[region].shape.rows[-1]
            device.memories[region].bytes[device.memories[region].piece(row, 2)] ^= 1
            device.transport.order(order)
            device.reports.clear()
            assert (await device.hears(Verified)).bad_pages == (2,)
            host.transport.order(Sum(9, region, Pages(pack_ids([7]))))
            device.transport.order(Sum(9, region, Pages(pack_ids([7]))))
            assert (await host.hears(Summed)).sums == (await device.hears(Summed)).sums
            device.reports.clear()
            host.reports.clear()


PINNED, STAGED = "registered", "by the stage"


@pytest.mark.parametrize("late", [{}, {"DOUBLE_LATE_US": "2000"}], ids=["at-once", "late"])
@pytest.mark.parametrize("way", [PINNED, STAGED, "refused"])
@pytest.mark.parametrize("region", ["kv", "layered"])
async def test_pages_of_a_device_are_saved_in_host_memory_and_brought_back(
    double, region, way, late
):
    stages = 2 * 2 * (1 + READERS) * STAGE_BYTES
    settings = {**late, "DOUBLE_PINNABLE": str(stages if way == "refused" else 2**30)}
    async with node_of(double, "decode", ON_DEVICE, is_pinned=way != STAGED, **settings) as node:
        ours = node.memories[region]
        if way != STAGED:
            pinned = await node.hears(MemoryPinned, region=f"{region}.saved")
            assert (pinned.pinned_bytes == pinned.region_bytes) == (way == PINNED)
            assert ("cudaErrorMemoryAllocation (2)" in pinned.why) == (way != PINNED)
        size = ours.shape.total_bytes
        before = ours.bytes[:size].copy()
        pages, saved = [3, 4, 5, 20, 24, 11], [1, 2, 8, 3, 6, 7]

        node.copy(1, region, pages, f"{region}.saved", saved)
        done = await node.copied(1)
        assert isinstance(done, Copied)
        assert done.n_bytes == 6 * ours.shape.page_bytes
        for row in ours.shape.rows:
            for page in pages:
                ours.bytes[ours.piece(row, page)] = 0
        node.copy(2, f"{region}.saved", saved, region, pages)
        assert isinstance(await node.copied(2), Copied)

        assert np.array_equal(ours.bytes[:size], before)


async def test_a_few_pages_pass_a_large_copy_of_a_device(double):
    """What a decode step waits for does not wait for a lease that is saved."""
    shapes = {
        **SHAPES,
        "kv": Geometry(97, HUGE, (PieceRow(0, HUGE, HUGE),), ()),
        "kv.saved": Geometry(97, HUGE, (PieceRow(0, HUGE, HUGE),), ()),
    }
    settings = {"DOUBLE_BYTES": str(2**30), "DOUBLE_LATE_US": "20000"}
    async with node_of(double, "decode", {"kv": 0}, shapes, **settings) as node:
        everything = list(range(1, 97))
        node.copy(1, "kv", everything, "kv.saved", everything)
        node.copy(2, "kv.saved", [5], "kv", [5])
        node.copy(3, "kv", everything, "kv.saved", everything[::-1])
        for ticket in (1, 2, 3):
            assert isinstance(await node.copied(ticket), Copied)

        assert [one.ticket for one in node.reports if isinstance(one, Copied)] == [2, 1, 3]
        kept, page = node.memories["kv.saved"], node.memories["kv"]
        for number in everything:
            (row,) = page.shape.rows
            here, there = page.piece(row, 97 - number), kept.piece(row, number)
            assert np.array_equal(page.bytes[here], kept.bytes[there])


async def test_pages_larger_than_a_stage_are_summed_and_saved(double):
    """In bounded stretches, whatever a page has: the sums are those of the same bytes elsewhere."""
    large = 3 * (STAGE_BYTES + 4096)
    rows = tuple(PieceRow(at * 5 * large // 3, large // 3, large // 3) for at in range(3))
    shapes = {name: Geometry(5, large, rows, ()) for name in ("kv", "kv.saved")}
    pages = Pages(pack_ids([4, 1, 2]))
    async with (
        node_of(double, "device", {"kv": 1}, shapes, is_pinned=False) as device,
        node_of(double, "host", {}, shapes) as host,
    ):
        ours, theirs = device.memories["kv"], host.memories["kv"]
        theirs.bytes[: theirs.shape.total_bytes] = ours.bytes[: ours.shape.total_bytes]
        sums = []
        for node in (device, host):
            node.transport.order(Sum(1, "kv", pages))
            sums.append((await node.hears(Summed)).sums)
        assert sums[0] == sums[1]
        device.copy(1, "kv", [4, 1], "kv.saved", [1, 2])
        assert isinstance(await device.copied(1), Copied)
        saved = device.memories["kv.saved"]
        for row in rows:
            for page, slot in ((4, 1), (1, 2)):
                here, there = ours.bytes[ours.piece(row, page)], saved.bytes[saved.piece(row, slot)]
                assert np.array_equal(here, there)


async def test_without_memory_that_can_be_pinned_the_start_ends_with_what_to_do(double):
    why = "no copy engine brings memory of cuda:0 to this host: registering 4,194,304 bytes"

    with pytest.raises(TransportDown, match=why):
        async with node_of(double, "decode", ON_DEVICE, DOUBLE_PINNABLE="0"):
            pass


async def test_larger_pages_of_a_device_are_cut_where_they_lie(double):
    """The processor cannot pack what it cannot read: pieces leave from where they are."""
    seal = Seal(Integrity.FULL, b"in parts", 0, 4)
    latent = Mla(480, 32, "bfloat16")
    large, small = (
        {"kv": shaped(latent, size, 640 // size, PageOrder.PAGE_FIRST, layers=4)}
        for size in (64, 16)
    )
    async with (
        node_of(double, "prefill", {"kv": 0}, large) as sender,
        node_of(double, "decode", {"kv": 1}, small) as receiver,
    ):
        await sender.load(receiver)
        sender.post(1, receiver, [9, 10, 11, 20], [4, 5, 30, 7], split=4, seal=seal)
        posted = await sender.outcome(1)
        assert isinstance(posted, PostDone)
        order = Verify(1, "kv", seal, Pages(pack_ids([4, 5, 30, 7])), posted.sums)
        receiver.transport.order(order)
        assert (await receiver.hears(Verified)).bad_pages == ()
        assert receiver.memories["kv"].bytes[5 * 16384 * 4 :][:64].any()


@pytest.mark.parametrize("order", list(PageOrder))
async def test_shards_on_two_devices_are_sent_and_summed_as_one_pool_has_them(double, order):
    """Pages of two tensor-parallel ranks, each on a device of its own, to a pool on a host."""
    seal = Seal(Integrity.FULL, b"together", 0, 3)
    halves = tp_shards(MHA.heads, 2, (0, 2), (0, MHA.layers))
    ours = {f"kv{'#1' * i}": memory_of(MHA, one, 9, order) for i, one in enumerate(halves)}
    theirs = {"kv": memory_of(MHA, MHA.all, 9, order)}
    (lane,) = lanes(halves, (MHA.all,))
    async with (
        node_of(double, "prefill", {"kv": 0, "kv#1": 1}, ours) as sender,
        node_of(double, "decode", {}, theirs) as receiver,
    ):
        for region, shard in zip(ours, halves, strict=True):
            fill(sender.memories[region].bytes, ours[region], shard, 7)
        expected = np.zeros_like(receiver.memories["kv"].bytes)
        fill(expected, theirs["kv"], MHA.all, 7)
        receiver.memories["kv"].bytes[:] = expected
        await sender.load(receiver)
        await receiver.load(sender)

        sender.post(1, receiver, [1, 5, 2], [1, 5, 2], making=lane.copies[0], seal=seal)
        posted = await sender.outcome(1)
        assert isinstance(posted, PostDone), posted
        assert np.array_equal(receiver.memories["kv"].bytes, expected), "the same bytes again"
        receiver.transport.order(Verify(1, "kv", seal, Pages(pack_ids([1, 5, 2])), posted.sums))
        assert (await receiver.hears(Verified)).bad_pages == ()

        for back in lanes((MHA.all,), halves):
            post = 10 + back.peer_shard
            more = {"peer_shard": back.peer_shard, "making": back.copies[0], "seal": seal}
            receiver.post(post, sender, [1, 5, 2], [3, 4, 6], **more)
            sums = (await receiver.outcome(post)).sums
            pages = Pages(pack_ids([3, 4, 6]))
            sender.transport.order(Verify(post, "kv", seal, pages, sums, back.peer_shard))
            assert (await sender.hears(Verified, ticket=post)).bad_pages == ()
            assert len(sums) == 3 * 8


async def test_the_memory_ends_with_its_process_whoever_has_opened_it(double, cuda):
    async with node_of(double, "decode", ON_DEVICE) as node:
        shared = {one.region: one for one in node.ready.shared}
        device = cuda.device_at(shared["layered"].bus_id)
        with other(double, "open", device, shared["layered"].handle) as engine:
            assert engine.said == "open"
            engine.child.kill()
        node.copy(1, "kv", [1], "kv", [2])
        assert isinstance(await node.copied(1), Copied), "a dead engine is nobody's concern"
        memory = memory_of_devices(node.transport.pid)
        assert len(memory) == 2
        assert holders(memory) == {node.transport.pid, os.getpid()}

    assert not holders(memory)
    for one in shared.values():
        with pytest.raises(CudaError):
            cuda.open(cuda.device_at(one.bus_id), one.handle)


@pytest.mark.parametrize(
    ("devices", "settings", "why"),
    [
        (
            ON_DEVICE,
            {"DOUBLE_BYTES": str(4 * 2**20)},
            r"region 'kv': allocating 26 MiB on cuda:0: cudaErrorMemoryAllocation \(2\): out of "
            r"memory; 4 of 4 MiB are free on cuda:0: lower pool.pages or pool.size",
        ),
        ({"kv": 2}, {}, r"region 'kv': choosing cuda:2: cudaErrorInvalidDevice \(101\)"),
        (
            ON_DEVICE,
            {"CUDART_LIBRARY": "/nowhere"},
            "no CUDA device can be used here: /nowhere: cannot be loaded",
        ),
    ],
    ids=["too-much", "no-such-device", "no-cuda"],
)
async def test_a_device_that_does_not_serve_ends_the_start_with_what_to_do(
    double, devices, settings, why
):
    with pytest.raises(TransportDown, match=why):
        async with node_of(double, "decode", devices, **settings):
            pass


async def test_a_nixl_that_does_not_reach_the_device_ends_the_start_with_what_to_do(
    double, monkeypatch
):
    """The real one: its UCX has no module for the CUDA of this host."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    why = "NIXL does not reach the memory of the device: .*nixl-cu12 or nixl-cu13; here: nixl"

    with pytest.raises(TransportDown, match=why):
        async with node_of(double, "decode", ON_DEVICE):
            pass


async def test_a_device_that_breaks_while_its_pages_are_summed_ends_the_process_with_its_words(
    double,
):
    async with node_of(double, "decode", ON_DEVICE, DOUBLE_BREAKS=str(HUGE)) as node:
        node.transport.order(Sum(1, "kv", Pages(pack_ids(list(range(1, 25))))))

        (why,) = await node.until(lambda: node.exits)

        assert "cudaErrorLaunchFailure (719)" in why
        assert not node.heard(Summed)
