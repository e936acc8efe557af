"""The memory of a configured pool, and what systemd is told of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kvd.daemon.socket_activation import PassedDescriptors
from kvd.daemon.systemd import Systemd
from kvd.daemon.warm_restart import keep, memory_of, place_of
from kvd.journal.layout import size_bytes
from kvd.pools.arena import HUGE_PAGE_BYTES, NotReserved
from kvd.pools.location import Backing, PoolLocation
from kvd.pools.memory import MemoryOrigin
from tests.config.pools import config_of
from tests.daemon.manager import Manager
from tests.pools.keeping import content, shm_directory, written

if TYPE_CHECKING:
    from pathlib import Path

STORED = ["pool.backing=fdstore", "pool.pages=4"]


def passed_again(manager: Manager) -> PassedDescriptors:
    """What a service gets of it at its next start."""
    by_name: dict[str, list[int]] = {}
    for name, descriptor in manager.store:
        by_name.setdefault(name, []).append(os.dup(descriptor))
    return PassedDescriptors(by_name)


def test_the_place_is_what_the_configuration_says() -> None:
    config = config_of("pool.backing=shm", "sockets.client=ipc:///run/kvd/a/client.sock")

    assert place_of(config) == PoolLocation(Backing.SHM, None, "/run/kvd/a")


def test_the_journal_has_room_for_every_page_and_no_huge_page_more() -> None:
    with shm_directory() as directory:
        config = config_of(
            "pool.backing=shm",
            f"pool.directory={directory}",
            "pool.pages=60000",
            "pool.layers=1",
            "pool.heads=1",
            "pool.head_dim=8",
        )
        memory = memory_of(config, Systemd())
        assert memory.journal is not None
        assert memory.journal.size_bytes - HUGE_PAGE_BYTES < size_bytes(60000, 16)
        assert memory.journal.size_bytes >= size_bytes(60000, 16)
        memory.close()


def test_memory_in_files_needs_no_supervisor_and_tells_one_how_it_goes(tmp_path: Path) -> None:
    with shm_directory() as directory, Manager.at(tmp_path) as manager:
        config = config_of("pool.backing=shm", f"pool.directory={directory}", "pool.pages=4")

        memory_of(config, Systemd(manager.address)).close()
        found = memory_of(config, Systemd())

        assert (found.origin, found.keeper.to_store) == (MemoryOrigin.FOUND, {})
        manager.expect("STATUS", "reserving memory: 2 MiB so far")
        found.close()


def test_what_systemd_holds_comes_back_and_is_held_on(tmp_path: Path) -> None:
    with Manager.at(tmp_path, store_max=8) as manager:
        first = memory_of(config_of(*STORED), Systemd(manager.address))
        written(first.placed[0].arena, b"kept")
        supervisor = Systemd(manager.address)
        keep(first, supervisor)
        supervisor.barrier()
        first.close()

        again = Systemd(manager.address, passed=passed_again(manager))
        second = memory_of(config_of(*STORED), again)
        keep(second, again)
        again.barrier()

        assert second.origin is MemoryOrigin.FOUND
        assert content(second.placed[0].arena, 4) == (b"kept", b"kept")
        assert again.drop_unclaimed() == ()
        assert [name for name, _ in manager.store] == ["kvd.kv", "kvd.journal"]
        second.close()


@pytest.mark.parametrize("journals", [0, 2])
def test_what_systemd_holds_and_is_no_pool_is_replaced_in_its_store(
    tmp_path: Path, journals: int
) -> None:
    """None, of a daemon killed while it stored; two, of two daemons."""
    with Manager.at(tmp_path, store_max=8) as manager:
        supervisor = Systemd(manager.address)
        first = memory_of(config_of(*STORED), supervisor)
        keep(first, supervisor)
        supervisor.barrier()
        held = dict(manager.store)
        old = {os.fstat(descriptor).st_ino for descriptor in held.values()}
        doubles = [os.dup(held["kvd.journal"]) for _ in range(journals)]
        if not journals:
            supervisor.forget("kvd.journal")
            supervisor.barrier()
        passed = PassedDescriptors({"kvd.kv": [os.dup(held["kvd.kv"])], "kvd.journal": doubles})
        first.close()

        again = Systemd(manager.address, passed=passed)
        second = memory_of(config_of(*STORED), again)
        keep(second, again)
        again.barrier()

        assert second.reason == "made in systemd's store of descriptors: kvd.journal is missing"
        assert [name for name, _ in manager.store] == ["kvd.kv", "kvd.journal"]
        assert old.isdisjoint({os.fstat(descriptor).st_ino for _, descriptor in manager.store})
        second.close()


def test_a_store_without_systemd_is_said() -> None:
    with pytest.raises(NotReserved, match=r"NOTIFY_SOCKET is not set"):
        memory_of(config_of(*STORED), Systemd())
