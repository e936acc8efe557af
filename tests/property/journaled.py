"""The same pool with a real journal: what the next daemon knows was read from its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from kvd.core import effects
from kvd.core.inputs import PoolAdopted
from kvd.journal.engines import Process
from kvd.journal.identity import Identity
from kvd.journal.layout import Journal, make_journal, open_journal, size_bytes
from kvd.journal.reader import Reading, VerifyDepth
from kvd.journal.writer import JournalWriter
from kvd.types import NO_TOKENS, Pages, Tokens, count, pack_ids, page_ids
from tests.core.noted import Cached
from tests.core.world import PAGE
from tests.property.restarts import PAGE_BYTES, POOL, Engine, Pool

if TYPE_CHECKING:
    from kvd.core.cache.eviction import Policy

IDENTITY = Identity(b"l" * 32, POOL + 1, PAGE, "d")
TICKS = 7


class JournaledPool(Pool):
    """Notes are written to a buffer too, and only the buffer is read after a restart."""

    def __init__(self, seed: int, policy: Policy) -> None:
        self.buffer = bytearray(size_bytes(IDENTITY.pages, IDENTITY.page_size))
        self.writer = JournalWriter(make_journal(self.buffer, IDENTITY))
        self.unsummed: list[int] = []
        super().__init__(seed, policy)

    @override
    def perform(self, effect: effects.Effect) -> None:
        super().perform(effect)
        match effect:
            case effects.NoteHeld():
                self.writer.held(effect)
            case effects.NoteCached():
                self.writer.cached(effect)
                self.unsummed += page_ids(effect.pages)
            case effects.NoteFreed():
                self.writer.freed(effect)
            case effects.NoteEnded():
                self.writer.ended(effect)
            case _:
                pass
        if self.rng.random() < 0.05:
            self.prove()

    def prove(self) -> None:
        """The transfer process has summed what was cached so far."""
        pages, words = self.writer.pending(Pages(pack_ids(self.unsummed)))
        self.writer.summed(pages, words, b"".join(self.sum_of(page) for page in page_ids(pages)))
        self.unsummed = []

    def sum_of(self, page: int) -> bytes:
        return hash(self.memory.get(page)).to_bytes(8, "little", signed=True)

    @override
    def joined(self, session: int, engine: Engine) -> None:
        process = Process(engine.pid, TICKS)
        token = session.to_bytes(16, "little")
        self.writer.engines.session_opened(session, token, engine.name, process)

    @override
    def left(self, session: int) -> None:
        self.writer.engines.session_ended(session)

    @override
    def adopted(self, proven: set[int]) -> PoolAdopted:
        """Of engines that are alive: the others are known to be dead, and hang up right after."""
        del proven
        journal = open_journal(self.buffer, IDENTITY)
        assert isinstance(journal, Journal)
        reading = Reading(journal, self.rng.choice(list(VerifyDepth)))
        while pages := reading.to_sum():
            reading.summed(pages, b"".join(map(self.sum_of, page_ids(pages))))
            assert reading._good[page_ids(pages)].all()  # no page was written that nobody noted
        found = reading.found()
        self.writer = reading.carry_on()
        self.unsummed = []
        sessions = found.sessions
        value = PoolAdopted(
            self.now_s, found.generation, found.branches, sessions, found.unproven, found.last_lease
        )
        self.keep(value)
        return value

    def keep(self, value: PoolAdopted) -> None:
        """The dict is what was adopted."""
        noted = self.noted
        ends: list[tuple[Tokens, int]] = []
        cached: dict[int, Cached] = {}
        by_path: dict[tuple[str, Tokens], int] = {}
        for branch in value.branches:
            toks, before = ends[branch.parent] if branch.parent >= 0 else (NO_TOKENS, 0)
            for k, page in enumerate(page_ids(branch.pages)):
                one = Tokens(branch.tokens[k * PAGE_BYTES : (k + 1) * PAGE_BYTES])
                cached[page] = Cached(branch.namespace, before, count(toks) // PAGE, one)
                toks, before = Tokens(toks + one), page
                by_path[branch.namespace, toks] = page
            ends.append((toks, before))
        noted.cached, noted.holder, noted.leases = cached, {}, {}
        for session in value.sessions:
            for lease in session.leases:
                anchor = by_path[lease.namespace, lease.prefix] if lease.prefix else 0
                noted.leases[lease.id] = (session.id, anchor)
                noted.holder |= dict.fromkeys(page_ids(lease.held), lease.id)
