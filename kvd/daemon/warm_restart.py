"""What the daemon before left: the memory of the pool, its journal, and engines that still use it.

    open_pool        memory found or made; a journal that is no good makes it anew
    (the transfer process maps and registers it)
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
from typing import TYPE_CHECKING, Final

import msgspec

from kvd.core.inputs import PoolAdopted
from kvd.daemon.journalist import Journalist
from kvd.daemon.pagesums import Unsummed
from kvd.daemon.pool_memory import keep, memory_of
from kvd.daemon.sessions import NO_PAST, TOKEN_HEAD, UNSEEN, AwaitedSession, Past
from kvd.journal.engines import Process
from kvd.journal.identity import RefusedJournal, identity_of
from kvd.journal.layout import make_journal, open_journal
from kvd.journal.reader import Reading, VerifyDepth
from kvd.journal.writer import JournalWriter
from kvd.pools.memory import MemoryOrigin
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
    """The memory of the pool for one life of the daemon, open until ``close``.

    ``journal`` is None where the memory ends with the daemon. ``said``: where all of it comes from.
    """

    def __init__(self, memory: DaemonMemory, spec: PoolSpec, journal: Journal | None) -> None:
        """Use ``open_pool``."""
        self.memory = memory
        self._spec = spec
        self.journal = journal

    @property
    def is_journaled(self) -> bool:
        """Whether the memory outlives this daemon."""
        return self.journal is not None

    @property
    def region(self) -> str:
        """Of the pages that are journaled."""
        return self._spec.components[0].name

    @property
    def page_bytes(self) -> int:
        """Of one of those pages; 1 where tokens are only counted and no page is ever read."""
        placed = self.memory.placed
        return placed[0].geometry.page_bytes if placed else 1

    @property
    def said(self) -> str:
        """A sentence for the log."""
        return self.memory.reason

    async def take(
        self,
        verify: VerifyDepth,
        sums: PageSums,
        clock: Callable[[], float],
        advance: Callable[[str], None],
    ) -> TakenOver | None:
        """Prove what was left, and go on from there; None where nothing outlives the daemon.

        Args:
            verify: how much of it is summed.
            sums: has the transfer process sum them.
            clock: of the core's inputs.
            advance: told of every step.

        Raises:
            TransportDown: the transfer process does not say their sums.
        """
        if self.journal is None:
            return None
        namespace = os.stat("/proc/self/ns/pid").st_ino  # the one in which we see pids
        if self.memory.origin is MemoryOrigin.MADE:
            writer = JournalWriter(self.journal)
            writer.pids_are_of(namespace)
            return TakenOver(None, NO_PAST, Journalist(writer, sums))
        reading = Reading(self.journal, verify)
        try:
            await sums.check(reading, advance)
        except Unsummed as why:
            raise TransportDown(f"the pool that was left could not be verified: {why}") from why
        found = reading.found()
        writer = reading.carry_on()
        if found.pid_namespace != namespace:
            for engine in found.engines:
                writer.session_joined(engine.session.id, Process(0))
            writer.pids_are_of(namespace)
        past = past_of(found, namespace)
        return TakenOver(_adopted(found, clock()), past, Journalist(writer, sums))

    def close(self) -> None:
        """Drop our descriptors; what is kept stays."""
        self.memory.close()


async def leave(journalist: Journalist, tree: RadixTree, advance: Callable[[str], None]) -> None:
    """The end of this daemon: sums that are under way are awaited, and who was used last is noted.

    A killed daemon leaves the order in which its pages were cached instead.
    """
    for _ in range(round(SETTLED_WITHIN_S / LOOK_EVERY_S)):
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
        Unfit, TimeoutError: it is to be kept by systemd, which does not.
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
        sessions=tuple(engine.session for engine in found.engines),
        unproven=found.unproven,
        last_lease=found.last_lease,
    )


def past_of(found: FoundJournal, namespace: int) -> Past:
    """The engines of before; pids that a daemon in another pid namespace noted say nothing."""
    return Past(
        tuple(
            AwaitedSession(
                session=engine.session.id,
                token=TOKEN_HEAD + engine.token,
                name=engine.session.name,
                processes=engine.processes if found.pid_namespace == namespace else UNSEEN,
            )
            for engine in found.engines
        ),
        found.last_session + 1,
    )
