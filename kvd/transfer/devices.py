"""The CUDA devices of the transfer process: its regions there, and the events of engines.

A region is one plain allocation, because an IPC handle is of a whole one, and NIXL registers it as
one. It belongs to this process: when this ends, however it ends, the memory does, whoever still has
it mapped. Nothing of CUDA is loaded before it is needed.

What kind of memory an allocation is, is asked of the runtime and not assumed: peers are told what
it says, NIXL registers it so.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from kvd.core.inputs import MemoryPinned
from kvd.device.copies import KnownMemory, Stretch
from kvd.device.cuda import CudaError, MemorySide, Runtime
from kvd.device.cuda_library import load
from kvd.transfer.copies import Area
from kvd.transfer.device_streams import DeviceReach
from kvd.transfer.mapping import HUGE_BYTES, noted
from kvd.transfer.metadata import HOST, MemoryKind, MemorySite, extent_bytes
from kvd.transfer.orders import UNSTAMPED, SharedRegion

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvd.transfer.metadata import RegionNote
    from kvd.transfer.orders import RegionPlan

_MIB: Final = 2**20


class DeviceUnusable(Exception):
    """There is no CUDA here, or it refuses; the message is a sentence."""


class PartPinner:
    """Registers a region of host memory part by part; ``on_over`` hears of the last."""

    def __init__(
        self,
        runtime: Runtime,
        device: int,
        memory: KnownMemory,
        region: RegionNote,
        on_over: Callable[[MemoryPinned], None],
    ) -> None:
        self._runtime = runtime
        self._device = device
        self._memory = memory
        self._region = region
        self._on_over = on_over
        self._pinned_bytes = 0
        self._took_s = 0.0
        self._why = ""

    def __call__(self, address: int, size_bytes: int) -> None:
        """Register this part, unless CUDA has refused one before."""
        if not self._why:
            began_s = time.monotonic()
            try:
                # Of a device that is used anyhow: a context takes half a gigabyte of any other.
                self._runtime.use(self._device)
                self._memory.register(address, size_bytes)
                self._pinned_bytes += size_bytes
            except CudaError as exc:
                self._why = str(exc)
            self._took_s += time.monotonic() - began_s
        end = self._region.address + self._region.region_bytes
        if address + size_bytes == end:
            self._on_over(
                MemoryPinned(
                    at_s=UNSTAMPED,
                    region=self._region.name,
                    pinned_bytes=self._pinned_bytes,
                    region_bytes=self._region.region_bytes,
                    took_s=self._took_s,
                    why=self._why,
                )
            )


class Devices:
    """The runtime of this process, and what it has on devices."""

    def __init__(self) -> None:
        self._runtime: Runtime | None = None
        self._memory: KnownMemory | None = None
        self._used: dict[str, int] = {}
        """The device of each region that lies on one."""
        self._reaches: dict[int, DeviceReach] = {}
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
    def memory(self) -> KnownMemory:
        """What the copy engines reach: the regions on devices, and what was registered.

        Raises:
            DeviceUnusable: there is no CUDA.
        """
        if self._memory is None:
            self._memory = KnownMemory(self.runtime)
        return self._memory

    @property
    def are_used(self) -> bool:
        """Whether a region lies on one."""
        return bool(self._used)

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
        self.memory.add(Stretch(address, size, f"region {plan.name!r} on cuda:{device}"))
        # Before NIXL is imported: which build of it is right depends on there being a region on a
        # device.
        self._used[plan.name] = device
        memory = np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))
        return Area(noted(plan, address, size, place), memory, self._reach(device))

    def shared(self, areas: Mapping[str, Area]) -> tuple[SharedRegion, ...]:
        """What engines open to see the regions on devices.

        Raises:
            DeviceUnusable: their memory cannot be shared.
        """
        try:
            return tuple(
                self._shared(name, device, areas[name].note.address)
                for name, device in self._used.items()
            )
        except CudaError as exc:
            raise DeviceUnusable(f"memory of a device cannot be given to engines: {exc}") from exc

    def _shared(self, name: str, device: int, address: int) -> SharedRegion:
        """Its handle with the place of its device; what lies elsewhere is no memory to give."""
        runtime = self.runtime
        if runtime.side(address) is MemorySide.DEVICE and runtime.device_of(address) != device:
            found = runtime.device_of(address)
            where = "on no device" if found is None else f"on cuda:{found}, {runtime.bus_id(found)}"
            raise DeviceUnusable(
                f"region {name!r} is to be on cuda:{device}, {runtime.bus_id(device)}, and its "
                f"memory is {where}: it is given to nobody"
            )
        return SharedRegion(name, runtime.bus_id(device), runtime.share(address))

    def pinning(self, region: RegionNote, on_over: Callable[[MemoryPinned], None]) -> PartPinner:
        """Takes the parts of a region of host memory that copies of devices read or write."""
        device = min(self._used.values())
        return PartPinner(self.runtime, device, self.memory, region, on_over)

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
        tried = (*known, *sorted(others))
        for device in tried:
            try:
                event = runtime.open_event(device, handle)
            except CudaError as exc:
                # The last device's words: of all others it is only known that the event is none of
                # theirs.
                why = str(exc)
                continue
            self._event_devices = [device, *(one for one in self._event_devices if one != device)]
            return event
        names = ", ".join([f"cuda:{device} at {runtime.bus_id(device)}" for device in tried])
        raise DeviceUnusable(
            f"it is no event of a living process on {names}, which this daemon sees: {why}"
        )

    def _reach(self, device: int) -> DeviceReach:
        """That of all regions on it."""
        if device not in self._reaches:
            try:
                self._reaches[device] = DeviceReach(self.runtime, device, self.memory)
            except CudaError as exc:
                raise DeviceUnusable(
                    f"no copy engine brings memory of cuda:{device} to this host: {exc}; it needs "
                    "memory of the host that can be pinned: look at what is free, and at the "
                    "limits of this unit or container"
                ) from exc
        return self._reaches[device]

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
