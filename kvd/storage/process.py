"""The daemon's handle on its storage process: a life of it as ``kvd.transfer.process`` has them.

Nothing here imports NIXL. On GONE it is reaped and its memory map is gone, so no read of it can
write into the pool any more, and its directories can be another's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd.storage.orders import (
    STORAGE_STREAM,
    BeginStorage,
    StorageOrders,
    StorageReady,
    StorageReports,
)
from kvd.transfer.process import ProcessKind, WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.storage.orders import ObjectPart, TierPlan
    from kvd.transfer.orders import RegionPlan

STORAGE: Final = ProcessKind(
    what="storage process",
    module="kvd.storage.worker",
    stream=STORAGE_STREAM,
    ready=StorageReady,
)


class StorageProcess(WorkerProcess[StorageOrders, StorageReports, StorageReady]):
    """One life of the storage process.

    Args:
        name: of this life: incarnation and generation.
        regions: the pool's memory; descriptors stay the caller's.
        parts: what an object is made of.
        layout: the digest of the pool's fingerprint, in hexadecimal digits.
        tiers: where objects lie.
        keep_open: descriptors that are held until its memory map is gone: the daemon's lock.
    """

    def __init__(
        self,
        name: str,
        regions: Sequence[RegionPlan],
        parts: Sequence[ObjectPart],
        *,
        layout: str,
        tiers: Sequence[TierPlan],
        keep_open: Sequence[int] = (),
    ) -> None:
        def begin(witness: int) -> tuple[StorageOrders, Sequence[int]]:
            order = BeginStorage(
                name=name,
                kept=(witness, *keep_open),
                regions=tuple(regions),
                parts=tuple(parts),
                layout=layout,
                tiers=tuple(tiers),
            )
            return order, [*order.kept, *(region.fd for region in regions)]

        super().__init__(STORAGE, name, begin)
