"""What the daemon before left: the memory of the pool, its journal, and engines that still use it.

    open_estate        memory found or made; a journal that is no good makes it anew
    (the transfer process maps and registers it)
    prove              pages are summed as ``pool.verify`` says; what was proven is taken over
    writer             the journal goes on

What lives here: the order of these. What must not: where memory is kept (``kvd.pools``), what a
journal says (``kvd.journal``), what becomes of pages and leases (the core).

The lock is held before any of it, and the transfer process of the daemon before held a copy: so
nobody writes into these pages any more but engines that have leases on them.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from typing import TYPE_CHECKING, Final

import msgspec

from kvd.core.inputs import Adopted
from kvd.daemon.kept import keep, memory_of
from kvd.daemon.sessions import NO_PAST, FormerEngine, Past, Process
from kvd.journal.identity import Refused, identity_of
from kvd.journal.layout import make_journal, open_journal
from kvd.journal.reader import Reading, Verify
from kvd.journal.writer import Writer
from kvd.pools.memory import Origin
from kvd.transfer import orders
from kvd.transfer.base import TransportDown
from kvd.types import ID_BYTES, Pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.config import Config
    from kvd.core.spec import PoolSpec
    from kvd.daemon.mover import Mover
    from kvd.daemon.supervisor import Supervisor
    from kvd.journal.layout import Journal
    from kvd.journal.reader import Found
    from kvd.pools.memory import Memory

TOKEN_HEAD: Final = b"S"
"""Of every token of a session: a journal keeps what is behind it."""

SUM_BYTES_AT_ONCE: Final = 256 * 2**20
"""Of pages whose sums are ordered together: systemd is told that it goes on after each."""

SUMMED_WITHIN_S: Final = 30.0
"""So many bytes; a transfer process that takes longer does not work."""


class Taken(msgspec.Struct, frozen=True):
    """What there is to go on with; ``adopted`` is None where nothing was found."""

    adopted: Adopted | None
    past: Past
    writer: Writer


class Estate:
    """The memory of the pool for one life of the daemon, open until ``close``.

    ``journal`` is None where the memory ends with the daemon. ``said``: where all of it comes from.
    """

    def __init__(self, memory: Memory, spec: PoolSpec, journal: Journal | None) -> None:
        """Use ``open_estate``."""
        self.memory = memory
        self._spec = spec
        self.journal = journal
        self.found: Found | None = None

    @property
    def is_journaled(self) -> bool:
        """Whether the memory outlives this daemon."""
        return self.journal is not None

    @property
    def region(self) -> str:
        """Of the pages that are journaled."""
        return self._spec.components[0].name

    @property
    def said(self) -> str:
        """A sentence for the log."""
        return self.memory.reason

    async def take(
        self,
        verify: Verify,
        mover: Mover,
        clock: Callable[[], float],
        advance: Callable[[str], None],
    ) -> Taken | None:
        """Prove what was left, and go on from there; None where nothing outlives the daemon.

        Args:
            verify: how much of it is summed.
            mover: has the transfer process sum them.
            clock: of the core's inputs.
            advance: told of every step.

        Raises:
            TransportDown: the transfer process does not say their sums.
        """
        if self.journal is None:
            return None
        if self.memory.origin is Origin.MADE:
            return Taken(None, NO_PAST, Writer(self.journal))
        reading = Reading(self.journal, verify)
        await self._prove(reading, mover, advance)
        found = self.found = reading.found()
        return Taken(_adopted(found, clock()), _past(found), reading.carry_on())

    async def _prove(self, reading: Reading, mover: Mover, advance: Callable[[str], None]) -> None:
        stride = max(1, SUM_BYTES_AT_ONCE // self.memory.placed[0].geometry.page_bytes) * ID_BYTES
        while pages := reading.to_sum():
            sums = []
            for start in range(0, len(pages), stride):
                advance(f"verifying page {start // ID_BYTES} of {len(pages) // ID_BYTES}")
                sums.append(await sums_of(mover, self.region, Pages(pages[start : start + stride])))
            reading.summed(pages, b"".join(sums))

    def close(self) -> None:
        """Drop our descriptors; what is kept stays."""
        self.memory.close()


async def sums_of(mover: Mover, region: str, pages: Pages) -> bytes:
    """The sums of pages of ours, 8 bytes each.

    Raises:
        TransportDown: they did not come.
    """
    answer: asyncio.Future[orders.Summed] = asyncio.get_running_loop().create_future()
    mover.on_summed = answer.set_result
    mover.sum(orders.Sum(0, region, pages))
    try:
        async with asyncio.timeout(SUMMED_WITHIN_S):
            summed = await answer
    except TimeoutError:
        msg = f"the transfer process did not sum {len(pages) // ID_BYTES} pages of {region}"
        raise TransportDown(msg) from None
    if summed.why:
        raise TransportDown(summed.why)
    return summed.sums


def open_estate(config: Config, spec: PoolSpec, supervisor: Supervisor) -> Estate:
    """Find or make the memory of the pool; call it with the daemon's lock held.

    Raises:
        NotReserved: there is not enough, or it is in use, or not to be trusted.
        Unfit, TimeoutError: it is to be kept by systemd, which does not.
    """
    memory = memory_of(config, supervisor)
    try:
        journal = _journal_of(memory, config, spec)
        keep(memory, supervisor)
    except BaseException:
        memory.close()
        raise
    return Estate(memory, spec, journal)


def _journal_of(memory: Memory, config: Config, spec: PoolSpec) -> Journal | None:
    """The journal that was left, or a new one; a bad one takes the pages with it."""
    if memory.journal is None:
        return None
    if memory.origin is Origin.FOUND:
        found = open_journal(_mapped(memory), identity_of(spec, config.node.name, _name_of(memory)))
        if not isinstance(found, Refused):
            return found
        memory.renew(f"the journal is of no use: {found.why}")
    return make_journal(_mapped(memory), identity_of(spec, config.node.name, _name_of(memory)))


def _mapped(memory: Memory) -> mmap.mmap:
    assert memory.journal is not None
    return mmap.mmap(memory.journal.fd, memory.journal.size_bytes)


def _name_of(memory: Memory) -> bytes:
    """What tells the pool's memory from any other: the number of its file, on its file system."""
    seen = os.fstat(memory.placed[0].arena.fd)
    return seen.st_dev.to_bytes(8, "little") + seen.st_ino.to_bytes(8, "little")


def _adopted(found: Found, at_s: float) -> Adopted:
    return Adopted(
        at_s,
        found.generation,
        found.branches,
        tuple(engine.session for engine in found.engines),
        found.unproven,
        found.last_lease,
    )


def _past(found: Found) -> Past:
    return Past(
        tuple(
            FormerEngine(
                engine.session.id,
                TOKEN_HEAD + engine.token,
                engine.session.name,
                tuple(Process(one.pid, one.start_ticks) for one in engine.processes),
            )
            for engine in found.engines
        ),
        found.last_session + 1,
    )
