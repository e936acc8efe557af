"""From the configuration to the memory of the pool: where it is kept, getting it, having it kept.

``memory_of`` before anything else that needs it, ``keep`` once it is known to be good.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.config import pool_spec
from kvd.config.address import IPC
from kvd.journal.layout import size_bytes
from kvd.pools.arena import mib
from kvd.pools.location import Backing, PoolLocation
from kvd.pools.memory import DaemonMemory, kept_names, open_memory

if TYPE_CHECKING:
    from kvd.config import Config
    from kvd.core.layout.spec import PoolSpec
    from kvd.daemon.systemd import Systemd


def place_of(config: Config) -> PoolLocation:
    """Where the pool of ``config`` is kept while no daemon runs."""
    runtime = Path(config.sockets.client.removeprefix(IPC)).parent
    return PoolLocation(Backing(config.pool.backing), config.pool.directory, str(runtime))


def memory_of(config: Config, systemd: Systemd) -> DaemonMemory:
    """The memory of the configured pool and of its journal, found or made; see ``open_memory``.

    To be called with the daemon's own lock held. If ``origin`` is FOUND and the journal says
    nothing of use, ``renew(why)`` it; then ``keep`` it. Every transfer process must hold what is in
    ``keep_open``. The systemd is told how it goes, and asked for time.

    Raises:
        NotReserved: there is no memory; the message says what to do.
    """
    spec, place = pool_spec(config), place_of(config)
    given = None
    if place.backing is Backing.FDSTORE and systemd.is_there:
        given = _given(spec, systemd)
    taken_bytes = 0

    def advance(step_bytes: int) -> None:
        nonlocal taken_bytes
        taken_bytes += step_bytes
        systemd.advance(f"reserving memory: {mib(taken_bytes)} so far")

    journal_bytes = size_bytes(spec.pages[0], spec.components[0].page_size)
    return open_memory(spec, place, journal_bytes, given, advance)


def keep(memory: DaemonMemory, systemd: Systemd) -> None:
    """Have systemd hold what was made for it, in the place of what it held.

    A daemon that is killed between the two finds a part of it, which is as good as nothing.

    Raises:
        Unfit, TimeoutError: it does not; the message says why.
    """
    for name in memory.stale:
        systemd.forget(name)
    if memory.to_store:
        systemd.store(memory.to_store)


def _given(spec: PoolSpec, systemd: Systemd) -> dict[str, int]:
    """What systemd held, by name. What it gives twice is of two daemons: nobody knows which."""
    given = {}
    for name in kept_names(spec):
        found = []
        while (descriptor := systemd.passed.claim(name)) is not None:
            found.append(descriptor)
        if len(found) == 1:
            given[name] = found[0]
            continue
        for descriptor in found:
            os.close(descriptor)
            systemd.forget(name)
    return given
