"""What engines are told of memory on devices, from what the transfer process has shared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.spec import region_names
from kvd.wire.memory import DeviceMemory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.core.spec import PoolSpec
    from kvd.transfer.orders import SharedRegion


def device_memory(spec: PoolSpec, shared: Iterable[SharedRegion]) -> tuple[DeviceMemory, ...]:
    """Each region of the pool on a device, by component and shard."""
    regions = {
        name: (component.name, shard)
        for component in spec.components
        for shard, name in enumerate(region_names(spec, component.name))
    }
    return tuple(
        DeviceMemory(spec.name, *regions[one.region], one.bus_id, one.handle) for one in shared
    )
