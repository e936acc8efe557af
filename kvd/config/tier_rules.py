"""What a tier below the pool cannot be combined with, and why; and whether it is large enough."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.config.pool import components, family_of, missing
from kvd.config.pool_rules import RULES, over
from kvd.families import POOLS, Breach
from kvd.families.budget import block_bytes, size_bytes
from kvd.families.family import among
from kvd.families.sharding import shard_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.config.schema import Config

__all__ = ["RULES"]

_DISK = "tiers.disk"
_DIRECTORY = f"{_DISK}.directory"
_LEAVE = "or remove [tiers.disk]"
_MODES = {
    "off": "nothing is cached, so nothing leaves the cache",
    "prefill-only": "there is no KV that could be kept",
}


@over(_DIRECTORY, f"{_DISK}.size")
def _without_directory(config: Config) -> Iterator[Breach]:
    """A tier is where its directory is."""
    if config.tiers_disk.directory is None and config.tiers_disk.size is not None:
        rule = f"says nothing without {_DIRECTORY}: there is no such tier"
        yield Breach(f"{_DISK}.size", rule, f"set {_DIRECTORY}, {_LEAVE}")


@over(_DIRECTORY, "pool.family", "pool.device", "cache.mode")
def _untiered(config: Config) -> Iterator[Breach]:
    """Storage reads and writes whole pages of host memory."""
    if config.tiers_disk.directory is None:
        return
    if why := family_of(config.pool).untiered:
        can = among([name for name, row in POOLS.items() if not row.untiered])
        rule = f"is refused with pool.family = {config.pool.family}: {why}; only {can} have tiers"
        yield Breach(_DIRECTORY, rule, "remove [tiers.disk]")
    if config.pool.device != "cpu":
        rule = (
            f"is refused with pool.device = {config.pool.device}: storage reads and writes host "
            "memory alone"
        )
        yield Breach(_DIRECTORY, rule, f'write pool.device = "cpu", {_LEAVE}')
    if why := _MODES.get(config.cache.mode, ""):
        rule = f"is refused with cache.mode = {config.cache.mode}: {why}"
        yield Breach(_DIRECTORY, rule, f'set cache.mode = "radix", {_LEAVE}')


@over(_DIRECTORY, f"{_DISK}.size", f"{_DISK}.max_moving")
def _bounded(config: Config) -> Iterator[Breach]:
    """It has a bound, above what is on its way there."""
    disk = config.tiers_disk
    if disk.directory is None:
        return
    if disk.size is None:
        rule = f"needs {_DISK}.size: without a bound it would fill the disk"
        yield Breach(_DIRECTORY, rule, f"set {_DISK}.size")
        return
    # What is written is counted before it is there.
    if (size_bytes(disk.size) or 0) < 2 * (size_bytes(disk.max_moving) or 0):
        rule = f"must be at least twice {_DISK}.max_moving, which is {disk.max_moving}"
        yield Breach(f"{_DISK}.size", rule, f"give more, or set {_DISK}.max_moving")


@over(_DIRECTORY, f"{_DISK}.max_moving", "pool.family", "pool.page_size", "pool.layers")
def _page_moves(config: Config) -> Iterator[Breach]:
    """One page can be under way."""
    disk, pool = config.tiers_disk, config.pool
    if disk.directory is None or family_of(pool).untiered or missing(pool):
        return
    page_bytes = block_bytes(components(pool), shard_count(pool))
    if (size_bytes(disk.max_moving) or 0) < page_bytes:
        rule = f"must hold one page of this pool, which takes {page_bytes} bytes"
        yield Breach(f"{_DISK}.max_moving", rule, f"give at least {-(-page_bytes // 1024)}KiB")
