"""Transfer processes with regions on a device, which this process reads and writes by CUDA."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

import numpy as np

from kvd.transfer.orders import NO_FD, RegionPlan
from kvd.transfer.process import TransferProcess
from tests.transfer.conftest import Memory, Node

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from kvd.core.layout.geometry import Geometry
    from kvd.device.cuda import Runtime


class OnHost:
    """A region of host memory, read and written as one on a device is."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.size = memory.shape.total_bytes

    def read(self) -> NDArray[np.uint8]:
        return self.memory.bytes[: self.size].copy()

    def write(self, content: NDArray[np.uint8]) -> None:
        self.memory.bytes[: self.size] = content

    def close(self) -> None:
        os.close(self.memory.fd)


class OnDevice:
    """A region that a transfer process allocated, opened here as an engine opens it."""

    def __init__(self, runtime: Runtime, node: Node, name: str, shape: Geometry) -> None:
        (shared,) = [one for one in node.ready.shared if one.region == name]
        self._runtime = runtime
        self._device = runtime.device_at(shared.bus_id)
        self._address = runtime.open(self._device, shared.handle)
        self.size = shape.total_bytes

    def read(self) -> NDArray[np.uint8]:
        content = np.empty(self.size, np.uint8)
        self._runtime.use(self._device)
        self._runtime.synchronize()
        self._runtime.copy(content.ctypes.data, self._address, self.size)
        return content

    def write(self, content: NDArray[np.uint8]) -> None:
        self._runtime.use(self._device)
        self._runtime.copy(self._address, content.ctypes.data, self.size)
        self._runtime.synchronize()

    def close(self) -> None:
        self._runtime.close(self._address)


class Nodes:
    """Starts transfer processes, and ends them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._all: list[Node] = []

    async def start(
        self,
        name: str,
        shapes: Mapping[str, Geometry],
        devices: Mapping[str, int],
        **settings: str,
    ) -> Node:
        """One whose regions lie on the devices that are named, the others in host memory."""
        host = {one: Memory(one, shape) for one, shape in shapes.items() if one not in devices}
        regions = [
            RegionPlan(one, NO_FD, shape, in_huge_pages=False, device=devices[one])
            if one in devices
            else RegionPlan(one, host[one].fd, shape, is_registered=not one.endswith(".saved"))
            for one, shape in shapes.items()
        ]
        transport = TransferProcess(f"{name}-{id(regions)}", regions, environment=settings)
        node = Node(name, transport, {})
        self._all.append(node)
        await node.start()
        far = {
            one: OnDevice(self._runtime, node, one, shapes[one]) for one in shapes if one in devices
        }
        node.memories = {one: OnHost(memory) for one, memory in host.items()} | far
        return node

    async def end(self) -> None:
        for node in self._all:
            for memory in node.memories.values():
                memory.close()
            await node.transport.stop()


def painted(size: int, seed: int) -> NDArray[np.uint8]:
    """Bytes of which no two pages look alike."""
    words = np.arange(size // 4 + 1, dtype=np.uint32) * 2654435761 + seed * 40503
    return words.view(np.uint8)[:size].copy()


def address_of(content: bytes) -> int:
    """Of bytes that the caller keeps."""
    return ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p).value or 0
