"""The CUDA devices of the transfer process: its regions there, and the events of engines.

A region is one plain allocation, because an IPC handle is of a whole one, and NIXL registers it as
one. It belongs to this process: when this ends, however it ends, the memory does, whoever still has
it mapped. Nothing of CUDA is loaded before it is needed.

What kind of memory an allocation is, is asked of the runtime and not assumed: peers are told what
it says, NIXL registers it so.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import numpy as np
from typing_extensions import override

from kvd.device.cuda import CopyRows, CudaError, MemorySide, Runtime
from kvd.device.cuda_library import load
from kvd.transfer.copies import Area, Reach
from kvd.transfer.mapping import HUGE_BYTES, noted
from kvd.transfer.metadata import HOST, MemoryKind, MemorySite, extent_bytes
from kvd.transfer.orders import SharedRegion

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvd.transfer.copies import Bytes
    from kvd.transfer.orders import RegionPlan

_MIB: Final = 2**20


class DeviceUnusable(Exception):
    """There is no CUDA here, or it refuses; the message is a sentence."""


class DeviceReach(Reach):
    """Memory of a device: the runtime copies it, to host memory and back too."""

    is_direct = False

    def __init__(self, runtime: Runtime, device: int) -> None:
        self._runtime = runtime
        self.device = device

    @override
    def copy(self, onto: Bytes, source: Bytes) -> None:
        """As ``Reach``: two arrays ``(rows, bytes)``, of which the bytes of a row are together."""
        self._runtime.use(self.device)
        self._runtime.copy_rows(_rows(onto), _rows(source), source.shape[1], source.shape[0])

    @override
    def settle(self) -> None:
        self._runtime.use(self.device)
        self._runtime.synchronize()


class Devices:
    """The runtime of this process, and what it has on devices."""

    def __init__(self) -> None:
        self._runtime: Runtime | None = None
        self._used: dict[str, int] = {}
        """The device of each region that lies on one."""
        self._event_devices: list[int] = []
        """Those on which events were opened, the last one first."""

    @property
    def runtime(self) -> Runtime:
        """The CUDA runtime.

        Raises:
            DeviceUnusable: there is none.
        """
        # When it is first needed: a pool in host memory must come up on a host without CUDA.
        if self._runtime is None:
            found = load()
            if not isinstance(found, Runtime):
                raise DeviceUnusable(found.sentence)
            self._runtime = found
        return self._runtime

    @property
    def cuda_major(self) -> int:
        """Of the CUDA that the driver serves; 0 where no region lies on a device."""
        return int(self.runtime.driver_version().partition(".")[0]) if self._used else 0

    def area(self, plan: RegionPlan, device: int) -> Area:
        """Allocate a region, zeroed, for the life of the process.

        Raises:
            DeviceUnusable: there is no such device, or not so much memory; the numbers are said.
        """
        size = -(-extent_bytes(plan.geometry.pages, plan.geometry.rows) // HUGE_BYTES) * HUGE_BYTES
        runtime = self.runtime
        try:
            address = runtime.allocate(device, size)
            place = (
                MemorySite(MemoryKind.VRAM, device)
                if runtime.side(address) is MemorySide.DEVICE
                else HOST
            )
        except CudaError as exc:
            raise DeviceUnusable(f"region {plan.name!r}: {exc}{self._room(device)}") from exc
        # Before NIXL is imported: which build of it is right depends on there being a region on a
        # device.
        self._used[plan.name] = device
        memory = np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))
        return Area(noted(plan, address, size, place), memory, DeviceReach(runtime, device))

    def shared(self, areas: Mapping[str, Area]) -> tuple[SharedRegion, ...]:
        """What engines open to see the regions on devices.

        Raises:
            DeviceUnusable: their memory cannot be shared.
        """
        try:
            return tuple(
                SharedRegion(
                    name,
                    self.runtime.bus_id(device),
                    self.runtime.share(areas[name].note.address),
                )
                for name, device in self._used.items()
            )
        except CudaError as exc:
            raise DeviceUnusable(f"memory of a device cannot be given to engines: {exc}") from exc

    def open_event(self, handle: bytes) -> int:
        """An engine's event. Its handle does not say on which device it was made.

        So devices are tried, those first on which this process has something already: the first
        call on any other makes a context there, half a GiB of it, and a context stays. Where the
        pool lies in host memory that is the device of the last event, and before the first one
        nothing is known: there ``CUDA_VISIBLE_DEVICES`` of the daemon says which are tried at all.

        Raises:
            DeviceUnusable: there is no CUDA, or the handle is no event of a living process.
        """
        runtime, why = self.runtime, ""
        known = sorted(set(self._used.values())) or self._event_devices
        # A pool on devices: its engines compute there and nowhere else.
        others = () if self._used else set(range(runtime.device_count())) - set(known)
        for device in (*known, *sorted(others)):
            try:
                event = runtime.open_event(device, handle)
            except CudaError as exc:
                # The last device's words: of all others it is only known that the event is none of
                # theirs.
                why = str(exc)
                continue
            self._event_devices = [device, *(one for one in self._event_devices if one != device)]
            return event
        raise DeviceUnusable(why)

    def _room(self, device: int) -> str:
        """What there is, if the device says it."""
        try:
            room = self.runtime.room(device)
        except CudaError:
            return ""
        return (
            f"; {room.free_bytes / _MIB:,.0f} of {room.total_bytes / _MIB:,.0f} MiB are free "
            f"on cuda:{device}: lower pool.pages or pool.size"
        )


def _rows(array: Bytes) -> CopyRows:
    return CopyRows(array.ctypes.data, array.strides[0])
