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
from kvd.pools.memory import Memory, kept_names, open_memory
from kvd.pools.place import Backing, Place

if TYPE_CHECKING:
    from kvd.config import Config
    from kvd.core.layout.spec import PoolSpec
    from kvd.daemon.supervisor import Supervisor


def place_of(config: Config) -> Place:
    """Where the pool of ``config`` is kept while no daemon runs."""
    runtime = Path(config.sockets.client.removeprefix(IPC)).parent
    return Place(Backing(config.pool.backing), config.pool.directory, str(runtime))


def memory_of(config: Config, supervisor: Supervisor) -> Memory:
    """The memory of the configured pool and of its journal, found or made; see ``open_memory``.

    To be called with the daemon's own lock held. If ``origin`` is FOUND and the journal says
    nothing of use, ``renew(why)`` it; then ``keep`` it. Every transfer process must hold what is in
    ``keep_open``. The supervisor is told how it goes, and asked for time.

    Raises:
        NotReserved: there is no memory; the message says what to do.
    """
    spec, place = pool_spec(config), place_of(config)
    given = None
    if place.backing is Backing.FDSTORE and supervisor.is_there:
        given = _given(spec, supervisor)
    taken_bytes = 0

    def advance(step_bytes: int) -> None:
        nonlocal taken_bytes
        taken_bytes += step_bytes
        supervisor.advance(f"reserving memory: {mib(taken_bytes)} so far")

    journal_bytes = size_bytes(spec.pages[0], spec.components[0].page_size)
    return open_memory(spec, place, journal_bytes, given, advance)


def keep(memory: Memory, supervisor: Supervisor) -> None:
    """Have systemd hold what was made for it, in the place of what it held.

    A daemon that is killed between the two finds a part of it, which is as good as nothing.

    Raises:
        Unfit, TimeoutError: it does not; the message says why.
    """
    for name in memory.stale:
        supervisor.forget(name)
    if memory.to_store:
        supervisor.store(memory.to_store)


def _given(spec: PoolSpec, supervisor: Supervisor) -> dict[str, int]:
    """What systemd held, by name. What it gives twice is of two daemons: nobody knows which."""
    given = {}
    for name in kept_names(spec):
        found = []
        while (descriptor := supervisor.passed.claim(name)) is not None:
            found.append(descriptor)
        if len(found) == 1:
            given[name] = found[0]
            continue
        for descriptor in found:
            os.close(descriptor)
            supervisor.forget(name)
    return given
