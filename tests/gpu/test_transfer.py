"""Regions on a device through transfer processes and NIXL: as VRAM, where the device is real."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.core.effects import Verify
from kvd.core.inputs import Copied, PostDone, Verified
from kvd.core.layout.seal import Seal
from kvd.transfer.metadata import MemoryKind, unpack
from kvd.types import Pages, pack_ids
from kvd.wire.peer import Integrity
from tests.gpu.conftest import DEVICE
from tests.gpu.nodes import painted
from tests.transfer.conftest import SHAPES

FAR = {"kv": DEVICE, "layered": DEVICE}
SIDES = {"gpu to gpu": (FAR, FAR), "gpu to host": (FAR, {}), "host to gpu": ({}, FAR)}
PATTERNS = (([3], [5]), (list(range(1, 25)), list(range(1, 25))), ([9, 2, 17, 24], [4, 23, 8, 1]))


@pytest.mark.parametrize("sides", SIDES)
async def test_pages_arrive_and_nothing_else_changes(nodes, is_double, sides):
    ours, theirs = SIDES[sides]
    sender = await nodes.start("sender", SHAPES, ours)
    receiver = await nodes.start("receiver", SHAPES, theirs)
    for node, devices in ((sender, ours), (receiver, theirs)):
        kinds = {one.name: one.place.kind for one in unpack(node.ready.metadata).regions}
        wanted = MemoryKind.VRAM if devices and not is_double else MemoryKind.DRAM
        assert kinds == dict.fromkeys(("kv", "layered"), wanted)
    await sender.load(receiver)
    post = 0
    for region in ("kv", "layered"):
        shape, size = SHAPES[region], SHAPES[region].total_bytes
        source = painted(size, 1)
        sender.memories[region].write(source)
        for pages, onto in PATTERNS:
            post += 1
            expected = painted(size, 10 + post)
            receiver.memories[region].write(expected)
            for row in shape.rows:
                for a, b in zip(pages, onto, strict=True):
                    at, to = (row.offset_bytes + one * row.stride_bytes for one in (a, b))
                    expected[to : to + row.piece_bytes] = source[at : at + row.piece_bytes]
            sender.post(post, receiver, pages, onto, component=region)

            outcome = await sender.outcome(post)

            assert isinstance(outcome, PostDone), outcome
            assert np.array_equal(receiver.memories[region].read(), expected)


async def test_sums_and_saved_copies_of_a_device_are_those_of_its_bytes(nodes):
    seal, pages = Seal(Integrity.FULL, b"devices!", 0, 4), [7, 8, 2, 24]
    device = await nodes.start("device", SHAPES, FAR)
    host = await nodes.start("host", SHAPES, {})
    await device.load(host)
    for post, region in enumerate(("kv", "layered"), 1):
        content = painted(SHAPES[region].total_bytes, 3)
        device.memories[region].write(content)
        device.post(post, host, pages, pages, component=region, seal=seal)
        sums = (await device.outcome(post)).sums
        for node in (device, host):
            node.transport.order(Verify(post, region, seal, Pages(pack_ids(pages)), sums))
            assert (await node.hears(Verified, ticket=post)).bad_pages == ()

        device.copy(post, region, pages, f"{region}.saved", [1, 2, 3, 4])
        assert isinstance(await device.copied(post), Copied)
        device.memories[region].write(np.zeros_like(content))
        device.copy(10 + post, f"{region}.saved", [1, 2, 3, 4], region, pages)
        assert isinstance(await device.copied(10 + post), Copied)
        found = device.memories[region].read()
        for row in SHAPES[region].rows:
            for page in pages:
                at = row.offset_bytes + page * row.stride_bytes
                piece = slice(at, at + row.piece_bytes)
                assert np.array_equal(found[piece], content[piece])


async def test_the_memory_is_free_when_its_process_has_ended(nodes, cuda, is_double):
    if is_double:
        pytest.skip("the double counts what one process has taken; tests/cuda looks at the memory")
    shapes = {"kv": SHAPES["kv"]}
    first = await nodes.start("first", shapes, {"kv": DEVICE})
    size = SHAPES["kv"].total_bytes
    before = cuda.room(DEVICE).free_bytes
    first.memories["kv"].close()
    first.memories.clear()
    await first.transport.stop()

    assert cuda.room(DEVICE).free_bytes >= before + size
