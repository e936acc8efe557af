"""From the configuration to the memory of the pool: where it is kept, and getting it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvd.config import pool_spec
from kvd.config.address import IPC
from kvd.pools.memory import Memory, open_memory
from kvd.pools.place import Backing, Place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvd.config import Config


def place_of(config: Config) -> Place:
    """Where the pool of ``config`` is kept while no daemon runs."""
    runtime = Path(config.sockets.client.removeprefix(IPC)).parent
    return Place(Backing(config.pool.backing), config.pool.directory, str(runtime))


def memory_of(config: Config, journal_bytes: int, given: Mapping[str, int] | None = None) -> Memory:
    """The memory of the configured pool and of its journal, found or made: ``open_memory``.

    Call it with the daemon's own lock held. In this order:

    - log ``reason``; take the journal's arena if ``origin`` is FOUND, and ``renew(why)`` if what it
      says is of no use;
    - with fdstore, have systemd let go of ``stale``, then hold ``to_store``, and wait until it has
      (``to_store`` without the journal is nothing: a daemon that is killed in between begins anew);
    - pass ``keep_open`` on to every transfer process.

    Raises:
        NotReserved: there is no memory; the message says what to do.
    """
    return open_memory(pool_spec(config), place_of(config), journal_bytes, given)
