"""From the configuration to what the parts of a daemon decide by."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.config.address import IPC
from kvd.core.cache import radix
from kvd.core.cache.eviction import Policy
from kvd.core.layout.quota import Quota
from kvd.core.layout.spec import lockstep_bytes
from kvd.core.settings import (
    TIER_SHARE,
    CacheMode,
    Demotion,
    DialRule,
    KvEventSettings,
    Settings,
    TierSettings,
)
from kvd.curve import KeyFlaw, PeerKeys, read_pair
from kvd.daemon.launch import DISK, STORE
from kvd.daemon.session_entries import AttachLimits
from kvd.daemon.socket_activation import UnfitConfig
from kvd.families.budget import size_bytes
from kvd.storage.sizes import object_bytes
from kvd.types import ID_BYTES, NodeName
from kvd.wire.bounds import MAX_PEER_BYTES
from kvd.wire.peer import Integrity
from kvd.zmtp.bounds import BOUNDS, Bounds

if TYPE_CHECKING:
    from kvd.config import Config
    from kvd.core.layout.spec import PoolSpec
    from kvd.daemon.launch import Launch


def settings_of(config: Config, launched: Launch) -> Settings:
    """The figures of the core, for this life."""
    return Settings(
        name=NodeName(config.node.name),
        incarnation=launched.incarnation,
        spec=launched.spec,
        home=launched.home,
        policy=Policy(config.radix.policy),
        quotas=pool_quotas(config, launched.spec),
        build="" if str(radix.__file__).endswith(".py") else "+compiled",
        allow=config.peers.allow,
        dials=_dials(config),
        heartbeat_s=config.peers.heartbeat_s,
        suspect_s=config.peers.suspect_s,
        lost_s=config.peers.lost_s,
        max_deadline_s=config.admission.max_deadline_s,
        max_queue=config.admission.max_queue,
        overtakers=config.admission.overtakers,
        pull_offer_s=config.pull.offer_s,
        max_pulls=config.pull.max_open,
        max_peer_pulls=config.pull.max_open_per_peer,
        pull_share=config.pull.share,
        peer_pull_share=config.pull.share_per_peer,
        stall_s=config.transfer.stall_s,
        min_bytes_per_s=config.transfer.min_bytes_per_s,
        fence_after_s=config.transfer.fence_after_s,
        max_prompt_tokens=config.limits.max_prompt_tokens,
        max_aux_bytes=config.limits.max_aux_bytes,
        max_told_bytes=config.limits.max_told_bytes,
        # What peers are told must be what is read of them, whatever clients may send.
        max_frame_bytes=min(config.limits.max_frame_bytes, MAX_PEER_BYTES),
        integrity=Integrity(config.transfer.integrity),
        cache_mode=CacheMode(config.cache.mode),
        tiers=_tiers(config, launched.spec),
        is_journaled=launched.pool.is_journaled,
        kv_events=_kv_events(config),
    )


def _kv_events(config: Config) -> KvEventSettings | None:
    if not config.kv_events.enabled:
        return None
    medium = "CPU" if config.pool.device == "cpu" else "GPU"
    return KvEventSettings(medium, config.kv_events.namespaces)


def pool_quotas(config: Config, spec: PoolSpec) -> tuple[Quota, ...]:
    """Of the pool, in its pages."""
    return _quotas(config.quotas_pool.floor, config.quotas_pool.ceiling, lockstep_bytes(spec))


def disk_quotas(config: Config, spec: PoolSpec) -> tuple[Quota, ...]:
    """Of the disk, in its objects."""
    each_bytes = object_bytes(lockstep_bytes(spec))
    return _quotas(config.quotas_disk.floor, config.quotas_disk.ceiling, each_bytes)


def store_quotas(config: Config, spec: PoolSpec) -> tuple[Quota, ...]:
    """Of what this node writes to the store, in its objects."""
    return _quotas({}, config.quotas_store.ceiling, object_bytes(lockstep_bytes(spec)))


def _quotas(floor: dict[str, str], ceiling: dict[str, str], page_bytes: int) -> tuple[Quota, ...]:
    """One for each namespace that has any; whole pages, rounded down."""
    if not page_bytes:
        return ()
    floors = {name: (size_bytes(size) or 0) // page_bytes for name, size in floor.items()}
    most = {name: (size_bytes(size) or 0) // page_bytes for name, size in ceiling.items()}
    return tuple(Quota(name, floors.get(name, 0), most.get(name)) for name in {**floors, **most})


STORE_KNOWN = 131072
"""Objects of a store that a node knows of at a time; what it does not it asks for."""


def _tiers(config: Config, spec: PoolSpec) -> tuple[TierSettings, ...]:
    """What lies below the pool, the nearest first."""
    disk, store = config.tiers_disk, config.tiers_store
    page_bytes = lockstep_bytes(spec)
    most_moving = max(page_bytes, page_bytes * spec.pages[0] // TIER_SHARE)
    one_bytes = object_bytes(page_bytes)
    tiers = []
    if disk.directory is not None:
        tiers.append(
            TierSettings(
                name=DISK,
                capacity_bytes=size_bytes(str(disk.size)) or 0,
                object_bytes=one_bytes,
                demotion=Demotion(disk.demote),
                wait_s=disk.wait_s,
                deadline_s=disk.deadline_s,
                stop_s=disk.stop_s,
                max_moving_bytes=min(size_bytes(disk.max_moving) or 0, most_moving),
                share_beside_handoffs=disk.share_beside_handoffs,
                quotas=disk_quotas(config, spec),
            )
        )
    if store.endpoint is not None:
        tiers.append(
            TierSettings(
                name=STORE,
                capacity_bytes=STORE_KNOWN * one_bytes,
                object_bytes=one_bytes,
                demotion=Demotion(store.demote),
                wait_s=store.wait_s,
                deadline_s=store.deadline_s,
                stop_s=store.stop_s,
                max_moving_bytes=min(size_bytes(store.max_moving) or 0, most_moving),
                is_shared=True,
                absent_s=store.absent_s,
                lifetime_s=store.ttl_s,
                probe_s=store.probe_s,
                least_bytes=store.min_tokens * ID_BYTES,
                quotas=store_quotas(config, spec),
            )
        )
    return tuple(tiers)


def _dials(config: Config) -> DialRule:
    peers = config.peers
    if peers.secret_key_file is not None:
        others = peers.keys.keys() - {config.node.name}
        return DialRule.ANY if others else DialRule.NONE
    return DialRule.ANY if peers.insecure else DialRule.LOOPBACK


def attach_limits(config: Config) -> AttachLimits:
    """How many may attach."""
    return AttachLimits(
        max_sessions=config.limits.max_clients,
        max_frame_bytes=config.limits.max_frame_bytes,
    )


def recordings_directory(config: Config) -> Path:
    """Where recordings are saved: beside the admin socket, unless it says otherwise."""
    if config.recorder.directory is not None:
        return Path(config.recorder.directory)
    return Path(config.sockets.admin.removeprefix(IPC)).parent / "recordings"


def peer_keys(config: Config) -> PeerKeys | None:
    """The keys of this node and its peers; None where links need none.

    Raises:
        UnfitConfig: the secret file has changed since the configuration was checked.
    """
    path = config.peers.secret_key_file
    if path is None:
        return None
    own = read_pair(path)
    if isinstance(own, KeyFlaw):
        raise UnfitConfig(f"peers.secret_key_file {path} {own.rule}: {own.fix}")
    return PeerKeys(own, config.peers.keys)


def bounds_of(config: Config, *, share: int, at_least: int = 1) -> Bounds:
    """Of a socket whose connections may take one of ``share`` parts of all descriptors.

    So whoever floods one socket leaves descriptors for the others. ``at_least``: connections that
    the configuration promises, whatever that leaves.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = BOUNDS.max_connections
    if files != resource.RLIM_INFINITY:
        most = min(most, files // share)
    return Bounds(
        max_message_bytes=config.limits.max_frame_bytes, max_connections=max(most, at_least)
    )
