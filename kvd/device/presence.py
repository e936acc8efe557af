"""Whether the devices that a pool is to lie on are here, asked before anything is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.device.cuda import Runtime
from kvd.device.cuda_library import FIX, load

if TYPE_CHECKING:
    from collections.abc import Collection


class Absent(msgspec.Struct, frozen=True):
    """A pool cannot lie there: why not, and what to do.

    ``may_come``: a runtime is installed, and its driver does not answer, as while a host boots.
    """

    why: str
    fix: str
    may_come: bool = False


def absent(devices: Collection[int]) -> Absent | None:
    """Why not all of these devices can be used here; None if they can.

    Raises:
        CudaError: a driver that answered before does not any more.
    """
    if not devices:
        return None
    runtime = load()
    if not isinstance(runtime, Runtime):
        return Absent(runtime.why, FIX, runtime.is_installed)
    count, last = runtime.device_count(), max(devices)
    if last < count:
        return None
    there = "is cuda:0 alone" if count == 1 else f"are cuda:0 to cuda:{count - 1}"
    shards = f", one for each shard from cuda:{min(devices)} on" if len(devices) > 1 else ""
    return Absent(
        f"needs cuda:{last}{shards}; here {there}",
        "choose another pool.device, or look at CUDA_VISIBLE_DEVICES",
    )
