"""What the daemon before left: the memory of the pool, its journal, and engines that still use it.

    open_pool        memory found or made; a journal that is no good makes it anew
    read               what the journal says, while the transfer process maps and registers
    take               pages are summed as ``pool.verify`` says; what was proven is taken over
    leave              what is cached is proven for the next one

What lives here: the order of these. What must not: where memory is kept (``kvd.pools``), what a
journal says (``kvd.journal``), what becomes of pages and leases (the core).

The lock is held before any of it, and the transfer process of the daemon before held a copy: so
nobody writes into these pages any more but engines that have leases on them.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from kvd.config import pool_spec
from kvd.config.address import IPC
from kvd.core.inputs import PoolAdopted
from kvd.daemon.journalist import Journalist
from kvd.daemon.pagesums import Unsummed
from kvd.daemon.sessions import NO_PAST, TOKEN_HEAD, UNSEEN, Past
from kvd.journal.engines import Process
from kvd.journal.identity import RefusedJournal, identity_of
from kvd.journal.layout import make_journal, open_journal, size_bytes
from kvd.journal.reader import Reading, VerifyDepth
from kvd.journal.writer import JournalWriter
from kvd.pools.arena import mib
from kvd.pools.location import Backing, PoolLocation
from kvd.pools.memory import MemoryOrigin, kept_names, open_memory
from kvd.transfer.process import TransportDown
from kvd.types import Pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.config import Config
    from kvd.core.cache.radix import RadixTree
    from kvd.core.layout.spec import PoolSpec
    from kvd.daemon.pagesums import PageSums
    from kvd.daemon.systemd import Systemd
    from kvd.journal.layout import Journal
    from kvd.journal.reader import FoundJournal
    from kvd.pools.memory import DaemonMemory

SETTLED_WITHIN_S: Final = 15.0
"""Pages whose sums are not known by then are not taken over by the next daemon."""

LOOK_EVERY_S: Final = 1.0


class TakenOver(msgspec.Struct, frozen=True):
    """What there is to go on with; ``adopted`` is None where nothing was found."""

    adopted: PoolAdopted | None
    past: Past
    journalist: Journalist


class OpenPool:
    """The memory of the pool for one life of the daemon.

    ``journal`` is None where the memory ends with the daemon.
    """

    def __init__(self, memory: DaemonMemory, spec: PoolSpec, journal: Journal | None) -> None:
        """Use ``open_pool``."""
        self.memory = memory
        self.journal = journal
        self.region = spec.components[0].name
        """Of the pages that are journaled."""
        placed = memory.placed
        self.page_bytes = placed[0].geometry.page_bytes if placed else 1
        """Of one of those pages; 1 where tokens are only counted and no page is ever read."""

    @property
    def is_journaled(self) -> bool:
        """Whether the memory outlives this daemon."""
        return self.journal is not None

    def read(self, verify: VerifyDepth) -> Reading | None:
        """What was left, to be proven by ``take``; None where nothing was.

        Needs no transfer process: with the lock held, nobody else writes the journal.

        Args:
            verify: how much of it is summed.
        """
        if self.journal is None or self.memory.origin is MemoryOrigin.MADE:
            return None
        return Reading(self.journal, verify)

    async def take(
        self,
        reading: Reading | None,
        sums: PageSums,
        clock: Callable[[], float],
        advance: Callable[[str], None],
    ) -> TakenOver | None:
        """Prove what was left, and go on from there; None where nothing outlives the daemon.

        Args:
            reading: what ``read`` gave.
            sums: has the transfer process sum them.
            clock: of the core's inputs.
            advance: told of every step.

        Raises:
            TransportDown: the transfer process does not say their sums.
        """
        if self.journal is None:
            return None
        namespace = os.stat("/proc/self/ns/pid").st_ino  # the one in which we see pids
        # Nothing was left, so there is nothing to sum.
        if reading is None:
            writer = JournalWriter(self.journal)
            # Before any pid is noted.
            writer.pids_are_of(namespace)
            return TakenOver(None, NO_PAST, Journalist(writer, sums))
        try:
            await sums.check(reading, advance)
        except Unsummed as why:
            raise TransportDown(f"the pool that was left could not be verified: {why}") from why
        found = reading.found()
        # After all sums are known: from here on the journal says what this daemon does, and no
        # longer what it found.
        writer = reading.carry_on()
        # Numbers of another namespace are other processes here: noted as unseen, none is ever found
        # dead.
        if found.pid_namespace != namespace:
            for engine in found.engines:
                writer.engines.session_joined(engine.session, Process(0))
            writer.pids_are_of(namespace)
        past = past_of(found, namespace)
        return TakenOver(_adopted(found, clock()), past, Journalist(writer, sums))


async def leave(journalist: Journalist, tree: RadixTree, advance: Callable[[str], None]) -> None:
    """The end of this daemon: sums that are under way are awaited, and who was used last is noted.

    A killed daemon leaves the order in which its pages were cached instead.
    """
    for _ in range(round(SETTLED_WITHIN_S / LOOK_EVERY_S)):
        # In short waits, each of which asks the manager for more time.
        if await journalist.settle(LOOK_EVERY_S):
            break
        advance("summing the last pages, for the next daemon to take over")
    journalist.writer.restamp(
        Pages(b"".join(node.pages for node in tree.order.ahead() if node is not None))
    )


def open_pool(config: Config, spec: PoolSpec, systemd: Systemd) -> OpenPool:
    """Find or make the memory of the pool; call it with the daemon's lock held.

    Raises:
        NotReserved: there is not enough, or it is in use, or not to be trusted.
        UnfitConfig, TimeoutError: it is to be kept by systemd, which does not.
    """
    memory = memory_of(config, systemd)
    try:
        journal = _journal_of(memory, config, spec)
        keep(memory, systemd)
    except BaseException:
        memory.close()
        raise
    return OpenPool(memory, spec, journal)


def _journal_of(memory: DaemonMemory, config: Config, spec: PoolSpec) -> Journal | None:
    """The journal that was left, or a new one; a bad one takes the pages with it."""
    if memory.journal is None:
        return None
    if memory.origin is MemoryOrigin.FOUND:
        found = open_journal(_mapped(memory), identity_of(spec, config.node.name, memory.identity))
        if not isinstance(found, RefusedJournal):
            return found
        # The pages go too: without their journal nobody knows which of them an engine still writes.
        memory.renew(f"the journal is of no use: {found.why}")
    return make_journal(_mapped(memory), identity_of(spec, config.node.name, memory.identity))


def _mapped(memory: DaemonMemory) -> mmap.mmap:
    assert memory.journal is not None
    return mmap.mmap(memory.journal.fd, memory.journal.size_bytes)


def _adopted(found: FoundJournal, at_s: float) -> PoolAdopted:
    return PoolAdopted(
        at_s=at_s,
        generation=found.generation,
        branches=found.branches,
        sessions=found.sessions,
        unproven=found.unproven,
        last_lease=found.last_lease,
    )


def past_of(found: FoundJournal, namespace: int) -> Past:
    """The engines of before; pids that a daemon in another pid namespace noted say nothing."""
    is_ours = found.pid_namespace == namespace
    engines = tuple(
        replace(
            engine,
            token=TOKEN_HEAD + engine.token,
            processes=engine.processes if is_ours else UNSEEN,
        )
        for engine in found.engines
    )
    return Past(engines, found.last_session + 1)


# ---- from the configuration to memory -----------------------------------------------------------


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
        UnfitConfig, TimeoutError: it does not; the message says why.
    """
    # Forgotten before anything is stored: under one name two would come back, and neither be
    # trusted.
    for name in memory.keeper.stale:
        systemd.forget(name)
    if memory.keeper.to_store:
        systemd.store(memory.keeper.to_store)


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
            # Of two nobody knows which is the pool: neither is used, and both are given up.
            os.close(descriptor)
            systemd.forget(name)
    return given
