"""Whether quotas can hold: floors within their place, and below their ceilings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.config.pool import components, counts_of, missing
from kvd.config.tier_rules import RULES, over
from kvd.core.cache.quotas import MOST_QUOTAS
from kvd.families import Breach
from kvd.families.budget import beside, block_bytes, size_bytes
from kvd.families.sharding import shard_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.config.schema import Config

__all__ = ["QUOTA_KEYS", "RULES", "over"]

_POOL, _DISK, _STORE = "quotas.pool", "quotas.disk", "quotas.store"
QUOTA_KEYS = (
    *(f"{place}.{bound}" for place in (_POOL, _DISK) for bound in ("floor", "ceiling")),
    f"{_STORE}.ceiling",
)
_UNCACHED = {
    "off": "nothing is cached",
    "prefill-only": "there is no KV of which anything could be kept",
}


def _places(config: Config) -> Iterator[tuple[str, dict[str, str], dict[str, str]]]:
    """Each with its floors and its ceilings."""
    yield _POOL, config.quotas_pool.floor, config.quotas_pool.ceiling
    yield _DISK, config.quotas_disk.floor, config.quotas_disk.ceiling
    yield _STORE, {}, config.quotas_store.ceiling


@over(*QUOTA_KEYS, "cache.mode")
def _bounded(config: Config) -> Iterator[Breach]:
    """There is a cache, of few enough namespaces, and no floor is above its ceiling."""
    for place, floors, ceilings in _places(config):
        named = [("floor", name) for name in floors]
        named += [("ceiling", name) for name in ceilings if name not in floors]
        why = _UNCACHED.get(config.cache.mode)
        if why is not None:
            for bound, name in named[:1]:
                rule = f"is refused with cache.mode = {config.cache.mode}: {why}"
                yield Breach(f"{place}.{bound}", rule, f"remove [{place}.{bound}]", entry=name)
            continue
        for bound, name in named[MOST_QUOTAS : MOST_QUOTAS + 1]:
            rule = f"is the quota of namespace {MOST_QUOTAS + 1} of {len(named)}: at most"
            rule += f" {MOST_QUOTAS} may have one"
            fix = "name bases, each of which means all its members"
            yield Breach(f"{place}.{bound}", rule, fix, entry=name)
        for name, floor in floors.items():
            most = ceilings.get(name, floor)
            if _bytes(floor) > _bytes(most):
                rule = f"must be at most {place}.ceiling of the same namespace, which is {most}"
                yield Breach(f"{place}.floor", rule, f"give at most {most}", entry=name)


@over(
    *(f"{_POOL}.floor", f"{_POOL}.ceiling", "cache.mode", "pool.family", "pool.pages", "pool.size"),
    *("pool.page_size", "pool.layers"),
)
def _fit_pool(config: Config) -> Iterator[Breach]:
    """A floor is a page at least, and together they fit into the pool."""
    pool, floors = config.pool, config.quotas_pool.floor
    if not floors or missing(pool) or config.cache.mode != "radix":
        return
    parts = components(pool)
    page_bytes = block_bytes(parts, 1 if beside(parts) is not None else shard_count(pool))
    if not page_bytes:
        return
    for name, floor in floors.items():
        if _bytes(floor) < page_bytes:
            rule = f"must be at least one page of this pool, which takes {page_bytes} bytes"
            fix = f"give at least {-(-page_bytes // 1024)}KiB, or remove it"
            yield Breach(f"{_POOL}.floor", rule, fix, entry=name)
    n_pages = counts_of(pool, parts)[0] - 1
    wanted = sum([_bytes(floor) // page_bytes for floor in floors.values()])
    if wanted > n_pages:
        rule = (
            f"and the other floors are {wanted} pages together, the pool has {n_pages} "
            f"of {page_bytes} bytes"
        )
        fix = f"keep them within {n_pages * page_bytes // 1024}KiB"
        yield Breach(f"{_POOL}.floor", rule, fix, entry=list(floors)[-1])


@over(*QUOTA_KEYS, "tiers.disk.directory", "tiers.disk.size", "tiers.disk.max_moving")
def _fit_disk(config: Config) -> Iterator[Breach]:
    """There is a disk, and all floors fit there beside what is being written."""
    disk, quotas = config.tiers_disk, config.quotas_disk
    if disk.directory is None:
        for bound, table in (("floor", quotas.floor), ("ceiling", quotas.ceiling)):
            for name in list(table)[:1]:
                rule = "says nothing without tiers.disk.directory: there is no such tier"
                fix = f"set tiers.disk.directory, or remove [{_DISK}.{bound}]"
                yield Breach(f"{_DISK}.{bound}", rule, fix, entry=name)
        return
    if not quotas.floor or disk.size is None:
        return
    room = _bytes(disk.size) - _bytes(disk.max_moving)
    wanted = sum(map(_bytes, quotas.floor.values()))
    if wanted > room:
        rule = (
            f"and the other floors are {wanted // 1024}KiB together, tiers.disk.size is "
            f"{disk.size} and {disk.max_moving} of it may be under way"
        )
        fix = f"keep them within {max(0, room) // 1024}KiB"
        yield Breach(f"{_DISK}.floor", rule, fix, entry=list(quotas.floor)[-1])


@over(f"{_STORE}.ceiling", "tiers.store.endpoint")
def _fit_store(config: Config) -> Iterator[Breach]:
    """There is a store."""
    if config.tiers_store.endpoint is None:
        for name in list(config.quotas_store.ceiling)[:1]:
            rule = "says nothing without tiers.store.endpoint: there is no such tier"
            fix = f"set tiers.store.endpoint, or remove [{_STORE}.ceiling]"
            yield Breach(f"{_STORE}.ceiling", rule, fix, entry=name)


def _bytes(size: str) -> int:
    return size_bytes(size) or 0
