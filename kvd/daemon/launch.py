"""The first steps of a daemon: its lock, its memory, and its transfer process on the way.

They come before everything else because the transfer process has to load NIXL and to register the
memory, while the rest of the daemon is imported: both go side by side. So what is imported here is
little.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.config import pool_spec
from kvd.config.address import IPC
from kvd.core.layout.spec import companion_factor, has_bytes, region_names
from kvd.core.tiers.keys import layout_digest
from kvd.daemon import lock
from kvd.daemon.listeners import own_directory
from kvd.daemon.socket_activation import UnfitConfig
from kvd.daemon.warm_restart import open_pool
from kvd.families.budget import size_bytes
from kvd.pools.arena import NotReserved
from kvd.pools.build import device_bytes, reserved_bytes
from kvd.storage.orders import DirectoryPlan, ObjectPart, StorePlan
from kvd.storage.process import StorageProcess
from kvd.transfer.orders import NO_FD, RegionPlan
from kvd.transfer.process import TransferProcess
from kvd.types import Incarnation

if TYPE_CHECKING:
    from kvd.config import Config
    from kvd.core.layout.spec import PoolSpec
    from kvd.daemon.systemd import Systemd
    from kvd.daemon.warm_restart import OpenPool
    from kvd.pools.build import PoolRegion
    from kvd.storage.orders import TierPlan
    from kvd.transfer.child import WorkerChild

FIRST_GENERATION = 1
DISK, STORE = "disk", "store"
"""The tiers of [tiers.disk] and [tiers.store]."""


class Launch:
    """What is there before the daemon is. ``close`` it last.

    Attributes:
        spec: what the pool holds.
        pool: its memory.
        incarnation: of this life.
        home: whose processes' births are in order.
        first: the transfer process to begin with.
    """

    def __init__(
        self,
        config: Config,
        spec: PoolSpec,
        lock_fd: int,
        pool: OpenPool,
        child: WorkerChild | None,
    ) -> None:
        """Use ``launch``."""
        self.spec = spec
        self.pool = pool
        birth = lock.next_birth(lock_fd, lock_path(config))
        # The birth in front, so that incarnations of a home compare by age; the rest is nobody's to
        # guess.
        self.incarnation = Incarnation(f"{birth.at_ns:016x}{secrets.token_hex(8)}")
        self.home = birth.home
        self._lock_fd = lock_fd
        self._environment = config.transfer.ucx
        in_huge_pages = config.pool.huge_pages == "collapse" and config.pool.backing != "hugetlbfs"
        self._regions = [
            _planned(region, in_huge_pages=in_huge_pages) for region in pool.memory.placed
        ]
        self.first = self._process(FIRST_GENERATION, child)
        self._tiers = _tier_plans(config)

    def process(self, generation: int) -> TransferProcess:
        """The transfer process of this generation, to be started."""
        return self.first if generation == FIRST_GENERATION else self._process(generation)

    @property
    def has_tiers(self) -> bool:
        """Whether there is anything below the pool."""
        return bool(self._tiers)

    def storage(self, generation: int) -> StorageProcess:
        """The storage process of this generation, to be started; there are tiers."""
        spec = self.spec
        # Region by region in the order of the components, which all go in lockstep.
        parts = [
            ObjectPart(name, companion_factor(spec, component))
            for component in spec.components
            if has_bytes(component)
            for name in region_names(spec, component.name)
        ]
        names = {part.region for part in parts}
        return StorageProcess(
            f"{self.incarnation}-storage-{generation}",
            [region for region in self._regions if region.name in names],
            parts,
            layout=layout_digest(spec).hex(),
            tiers=self._tiers,
            keep_open=(self._lock_fd, *self.pool.memory.keeper.keep_open),
        )

    def close(self) -> None:
        """Let go of memory and lock; what is kept stays."""
        self.pool.memory.close()
        os.close(self._lock_fd)

    def _process(self, generation: int, child: WorkerChild | None = None) -> TransferProcess:
        return TransferProcess(
            f"{self.incarnation}-{generation}",
            self._regions,
            environment=self._environment,
            keep_open=(self._lock_fd, *self.pool.memory.keeper.keep_open),
            child=child,
        )


def _tier_plans(config: Config) -> list[TierPlan]:
    """Where the storage process keeps objects."""
    disk, store = config.tiers_disk, config.tiers_store
    plans: list[TierPlan] = []
    if disk.directory is not None:
        max_rate = size_bytes(disk.max_rate or "") or 0
        plans.append(DirectoryPlan(tier=DISK, directory=disk.directory, max_rate=max_rate))
    if store.endpoint is not None:
        plans.append(
            StorePlan(
                tier=STORE,
                endpoint=store.endpoint,
                bucket=str(store.bucket),
                prefix=store.prefix or "",
                region=store.region,
                credentials_file=store.credentials_file,
                profile=store.profile,
                ca_file=store.ca_file,
                answer_s=store.answer_s,
                deadline_s=store.deadline_s,
                max_bytes=size_bytes(store.max_moving) or 0,
                max_rate=size_bytes(store.max_rate or "") or 0,
            )
        )
    return plans


def _planned(region: PoolRegion, *, in_huge_pages: bool) -> RegionPlan:
    """What the transfer process makes of it."""
    return RegionPlan(
        name=region.name,
        fd=NO_FD if region.arena is None else region.arena.fd,
        geometry=region.geometry,
        # What is saved is not worth it but where a device copies it: huge pages are pinned faster.
        in_huge_pages=in_huge_pages
        and (region.is_pool or region.meets_device)
        and region.arena is not None,
        is_registered=region.is_registered,
        device=region.device,
        meets_device=region.meets_device,
    )


def _check_devices(devices: dict[int, int]) -> None:
    """Refuse a pool on devices that are not here.

    Raises:
        UnfitConfig: there are none such.
        NotReserved: the driver does not answer.
    """
    from kvd.device.presence import absent  # noqa: PLC0415 - other pools need nothing of it

    found = absent(devices)
    if found is None:
        return
    why = f"pool.device: {found.why}; {found.fix}"
    if found.may_come:
        raise NotReserved(why)
    raise UnfitConfig(why)


def lock_path(config: Config) -> str:
    """The lock file of a daemon, beside its sockets."""
    return config.sockets.client.removeprefix(IPC) + ".lock"


def launch(config: Config, systemd: Systemd, child: WorkerChild | None = None) -> Launch:
    """Take the lock, find or make the memory, and tell the transfer process of both.

    Args:
        config: of this daemon.
        systemd: is told what takes its time.
        child: the transfer process, where it was started before; else it is started here.

    Raises:
        CANNOT_SERVE: one of these; nothing stays open.
    """
    sockets = config.sockets
    for endpoint in (sockets.client, sockets.admin):
        own_directory(Path(endpoint.removeprefix(IPC)).parent, sockets.group)
    # Before any memory is looked at: until then the daemon before may still write it.
    lock_fd = lock.take(lock_path(config))
    try:
        spec = pool_spec(config)
        size = f"{sum(reserved_bytes(spec).values()) / 2**30:.1f} GiB"
        devices = device_bytes(spec)
        if devices:
            _check_devices(devices)
            size += f" and {sum(devices.values()) / 2**30:.1f} GiB on devices"
        systemd.begin(f"reserving {size}")
        pool = open_pool(config, spec, systemd)
    except BaseException:
        os.close(lock_fd)
        raise
    made = Launch(config, spec, lock_fd, pool, child)
    try:
        systemd.begin(f"registering {size}")
        # Last here, and before the rest of the daemon is imported: both take about as long.
        made.first.spawn()
    except BaseException:
        made.close()
        raise
    return made
