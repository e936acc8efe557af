"""Transfer processes whose regions lie on devices of the double, seen as engines see them."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING

import numpy as np

from kvd.transfer.orders import NO_FD, RegionPlan
from kvd.transfer.process import TransferProcess
from tests.transfer.conftest import SHAPES, Memory, Node

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvd.core.layout.geometry import Geometry, PieceRow
    from tests.cuda.double import Double

ON_DEVICE = {"kv": 0, "layered": 1}
"""The others, which hold what is saved, are of the host."""


class Seen:
    """A region of another process's device, opened as an engine opens it."""

    def __init__(self, double: Double, node: Node, region: str) -> None:
        (shared,) = [one for one in node.ready.shared if one.region == region]
        self.name, self.shape = region, node.shapes[region]
        self._runtime = double.runtime
        device = double.runtime.device_at(shared.bus_id)
        self._address = double.runtime.open(device, shared.handle)
        size = self.shape.total_bytes
        self.bytes = np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(self._address))

    def paint(self, seed: int) -> None:
        words = self.bytes.view(np.uint32)
        words[:] = np.arange(words.size, dtype=np.uint32) * 2654435761 + seed * 40503

    def piece(self, row: PieceRow, page: int) -> slice:
        start = row.offset_bytes + page * row.stride_bytes
        return slice(start, start + row.piece_bytes)

    def close(self) -> None:
        self._runtime.close(self._address)


@contextlib.asynccontextmanager
async def node_of(
    double: Double,
    name: str,
    devices: Mapping[str, int],
    shapes: Mapping[str, Geometry] = SHAPES,
    *,
    is_pinned: bool = True,
    **settings: str,
):
    """A running transfer process, ``devices`` naming those of its regions that lie on one.

    ``is_pinned``: what is saved of those is registered with CUDA; otherwise it goes by the stage.
    """
    host = {one: Memory(one, shape) for one, shape in shapes.items() if one not in devices}
    regions = [
        RegionPlan(one, NO_FD, shape, in_huge_pages=False, device=devices[one])
        if one in devices
        else RegionPlan(
            one,
            host[one].fd,
            shape,
            is_registered=not one.endswith(".saved"),
            meets_device=is_pinned and one.removesuffix(".saved") in devices,
        )
        for one, shape in shapes.items()
    ]
    environment = {**double.environment, **settings}
    node = Node(
        name, TransferProcess(f"{name}-{id(regions)}", regions, environment=environment), {}
    )
    node.shapes = shapes
    try:
        await node.start()
        seen = {one: Seen(double, node, one) for one in devices}
        node.memories = {**host, **seen}
        for seed, one in enumerate(node.memories.values()):
            assert not one.bytes.any(), f"{one.name} of {name} begins with other bytes than zeros"
            one.paint(len(name) + seed)
        yield node
        for one in seen.values():
            one.close()
    finally:
        await node.transport.stop()
        for one in host.values():
            one.close()
