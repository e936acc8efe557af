"""What a tier below the pool cannot be combined with, and why; and whether it is large enough."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvd.config.pool import components, family_of, missing
from kvd.config.pool_rules import RULES, over
from kvd.families import POOLS, Breach
from kvd.families.budget import block_bytes, size_bytes
from kvd.families.family import among
from kvd.families.sharding import shard_count
from kvd.types import amount

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.config.schema import Config, DiskTierSection, StoreTierSection

__all__ = ["RULES", "over"]

_DISK, _STORE = "tiers.disk", "tiers.store"
_DIRECTORY, _ENDPOINT = f"{_DISK}.directory", f"{_STORE}.endpoint"
_LEAVE, _LEAVE_STORE = "or remove [tiers.disk]", "or remove [tiers.store]"
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


def _places(config: Config) -> Iterator[tuple[str, str, DiskTierSection | StoreTierSection]]:
    """Of each tier the key that says where it is, the name of its section, and that."""
    if config.tiers_disk.directory is not None:
        yield _DIRECTORY, _DISK, config.tiers_disk
    if config.tiers_store.endpoint is not None:
        yield _ENDPOINT, _STORE, config.tiers_store


@over(_DIRECTORY, _ENDPOINT, "pool.family", "pool.device", "cache.mode")
def _untiered(config: Config) -> Iterator[Breach]:
    """Storage reads and writes whole pages of host memory."""
    for place, section, _ in _places(config):
        leave = f"or remove [{section}]"
        if why := family_of(config.pool).untiered:
            can = among([name for name, row in POOLS.items() if not row.untiered])
            rule = (
                f"is refused with pool.family = {config.pool.family}: {why}; only {can} have tiers"
            )
            yield Breach(place, rule, f"remove [{section}]")
        if config.pool.device != "cpu":
            rule = (
                f"is refused with pool.device = {config.pool.device}: storage reads and writes "
                "host memory alone"
            )
            yield Breach(place, rule, f'write pool.device = "cpu", {leave}')
        if why := _MODES.get(config.cache.mode, ""):
            rule = f"is refused with cache.mode = {config.cache.mode}: {why}"
            yield Breach(place, rule, f'set cache.mode = "radix", {leave}')


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


@over(
    *(_DIRECTORY, f"{_DISK}.max_moving", _ENDPOINT, f"{_STORE}.max_moving"),
    *("pool.family", "pool.page_size", "pool.layers"),
)
def _page_moves(config: Config) -> Iterator[Breach]:
    """One page can be under way."""
    pool = config.pool
    if family_of(pool).untiered or missing(pool):
        return
    page_bytes = block_bytes(components(pool), shard_count(pool))
    for _, name, section in _places(config):
        if (size_bytes(section.max_moving) or 0) < page_bytes:
            rule = f"must hold one page of this pool, which takes {amount(page_bytes)}"
            fix = f"give at least {-(-page_bytes // 1024)}KiB"
            yield Breach(f"{name}.max_moving", rule, fix)


@over(
    *(_DIRECTORY, f"{_DISK}.max_rate", f"{_DISK}.max_moving", f"{_DISK}.deadline_s"),
    *(_ENDPOINT, f"{_STORE}.max_rate", f"{_STORE}.max_moving", f"{_STORE}.deadline_s"),
)
def _paced(config: Config) -> Iterator[Breach]:
    """What is under way comes well before its storage process would be ended for it."""
    for _, name, section in _places(config):
        if section.max_rate is None:
            continue
        most = int((size_bytes(section.max_rate) or 0) * section.deadline_s / 2)
        if (size_bytes(section.max_moving) or 0) > most:
            rule = (
                f"is too little for {name}.max_moving, which is {section.max_moving}: that has "
                f"half of {name}.deadline_s, {section.deadline_s / 2:g} s"
            )
            fix = f"give more, or set {name}.max_moving to {most // 1024}KiB at most"
            yield Breach(f"{name}.max_rate", rule, fix)


# ---- a store is beyond this host, and outlives it ------------------------------------------------


@over(_ENDPOINT, f"{_STORE}.bucket", f"{_STORE}.credentials_file", f"{_STORE}.ca_file")
def _complete(config: Config) -> Iterator[Breach]:
    """A store has a bucket, and what it is shown is there and for nobody else."""
    store = config.tiers_store
    if store.endpoint is None:
        for key, value in (("bucket", store.bucket), ("credentials_file", store.credentials_file)):
            if value is not None:
                rule = f"says nothing without {_ENDPOINT}: there is no such tier"
                yield Breach(f"{_STORE}.{key}", rule, f"set {_ENDPOINT}, {_LEAVE_STORE}")
        return
    if store.bucket is None:
        rule = f"needs {_STORE}.bucket: kvd makes none"
        yield Breach(_ENDPOINT, rule, f"make a bucket and set {_STORE}.bucket")
    if store.ca_file is not None and not os.path.exists(store.ca_file):
        yield Breach(f"{_STORE}.ca_file", f"{store.ca_file} is not there", "name one that is")
    if store.credentials_file is not None:
        yield from _flaws_of_secret(store.credentials_file)


def _flaws_of_secret(path: str) -> Iterator[Breach]:
    """Nobody else may read it."""
    key = f"{_STORE}.credentials_file"
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError as exc:
        rule = f"{path} cannot be read: {exc.strerror}"
        yield Breach(key, rule, "write it as AWS's own tools do, and chmod 0600")
        return
    if mode & 0o077:
        yield Breach(
            key, f"{path} has mode {mode:04o}, and others can read it", f"chmod 0600 {path}"
        )


@over(_ENDPOINT, f"{_STORE}.insecure")
def _encrypted(config: Config) -> Iterator[Breach]:
    """KV of prompts crosses no network in the clear unless somebody says that it may."""
    store = config.tiers_store
    if store.endpoint is None or store.insecure:
        return
    found = urlsplit(store.endpoint)
    if found.scheme == "http" and found.hostname not in {"localhost", "127.0.0.1", "::1"}:
        rule = "leaves this host in the clear: who listens has the KV of prompts, and may change it"
        fix = (
            f"write https://, or {_STORE}.insecure = true where every host of the network is "
            "trusted"
        )
        yield Breach(_ENDPOINT, rule, fix)


@over(_ENDPOINT, "cache.epochs_directory")
def _keeps_epochs(config: Config) -> Iterator[Breach]:
    """A store remembers what was cached before new weights; so must the node."""
    if config.tiers_store.endpoint is not None and config.cache.epochs_directory is None:
        rule = (
            "needs cache.epochs_directory: the store outlives a restart of this host, and a node "
            "that has forgotten the epoch of its weights would find there what older ones computed"
        )
        yield Breach(_ENDPOINT, rule, 'set cache.epochs_directory = "/var/lib/kvd"')
