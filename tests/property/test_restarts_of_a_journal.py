"""Nodes that are killed and come back over one pool, by the journal itself.

Beside the dict that is what the notes say, a real journal is written and read. Both must come to
the same: the same branches, the same former leases; and when everybody has let go, every page of
the journal is nobody's.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvd.core import effects
from kvd.core.cache.eviction import Policy
from kvd.core.inputs import PoolAdopted
from kvd.journal.engines import Process
from kvd.journal.identity import Identity
from kvd.journal.layout import make_journal, open_journal, size_bytes
from kvd.journal.reader import Reading, VerifyDepth
from kvd.journal.writer import JournalWriter
from kvd.types import Pages, pack_ids, page_ids
from tests.core.noted import Noted
from tests.core.world import PAGE
from tests.journal.journaled import places_in
from tests.property.restarts import POOL, Pool, calm, step

STEPS = 300


class Journaling(Noted):
    """The dict, and a writer that is told the same."""

    def __init__(self, writer: JournalWriter) -> None:
        super().__init__(PAGE, "kv")
        self.writer = writer

    def perform(self, effect: effects.Effect) -> None:
        super().perform(effect)
        match effect:
            case effects.NoteHeld():
                self.writer.held(effect)
            case effects.NoteCached():
                self.writer.cached(effect)
            case effects.NoteFreed():
                self.writer.freed(effect)
            case effects.NoteEnded():
                self.writer.ended(effect)
            case _:
                pass


class JournaledPool(Pool):
    """A pool whose next daemon knows what the journal says."""

    def __init__(self, seed: int) -> None:
        self.identity = Identity(b"l" * 32, POOL + 1, PAGE, "d")
        self.buffer = bytearray(size_bytes(POOL + 1, PAGE))
        super().__init__(seed, Policy.LRU)
        self.noted = Journaling(JournalWriter(make_journal(self.buffer, self.identity)))
        self.known: set[int] = set()

    def join(self) -> None:
        super().join()
        session = max(self.engines)
        self.known.add(session)
        token = b"%16d" % session
        engine = self.engines[session]
        self.noted.writer.engines.session_opened(
            session, token, engine.name, Process(engine.pid, 7)
        )

    def sums(self, pages: Pages, good: set[int]) -> bytes:
        """Of what is in the pages; of those that are not ``good``, of something else."""
        seen = [hash((page, self.memory[page], page in good)) for page in page_ids(pages)]
        return np.array([one & (2**64 - 1) for one in seen], dtype="<u8").tobytes()

    def adopted(self, proven: set[int]) -> PoolAdopted:
        """By the journal; what the dict says must be the same."""
        for session in self.known - self.engines.keys():
            self.noted.writer.engines.session_ended(session)
        self.known &= self.engines.keys()
        cached = set(self.noted.cached)
        unsummed = {page for page in cached - proven if self.rng.random() < 0.5}
        writer = self.noted.writer
        pages, words = writer.pending(Pages(pack_ids(sorted(cached - unsummed))))
        writer.summed(pages, words, self.sums(pages, cached))
        reading = Reading(open_journal(self.buffer, self.identity), VerifyDepth.ALL)
        while pages := reading.to_sum():
            reading.summed(pages, self.sums(pages, proven))
        found = reading.found()
        wanted = super().adopted(proven)

        assert places_in(found, PAGE) == _places(wanted)
        sessions = found.sessions
        assert _leases(sessions) == _leases(wanted.sessions)
        assert _held(sessions) == _held(wanted.sessions)
        assert set(page_ids(wanted.unproven)) <= set(page_ids(found.unproven))
        assert found.last_lease == wanted.last_lease
        self.noted.writer = reading.carry_on()
        return PoolAdopted(
            wanted.at_s,
            found.generation,
            found.branches,
            sessions,
            found.unproven,
            found.last_lease,
        )


def _places(value: PoolAdopted):
    return places_in(value, PAGE)


def _leases(sessions):
    return {
        (session.id, session.name, session.pids, one.id, one.namespace, one.prefix)
        for session in sessions
        for one in session.leases
    }


def _held(sessions):
    return {one.id: sorted(page_ids(one.held)) for session in sessions for one in session.leases}


@pytest.mark.parametrize("seed", range(6))
def test_the_journal_says_what_was_noted_and_loses_no_page(seed):
    pool = JournaledPool(seed)
    pool.join()
    for _ in range(STEPS):
        step(pool)
    calm(pool)

    assert pool.done["restarts"] > 0
    assert pool.done["former leases"] > 0
    assert not pool.noted.writer.journal.words.any()
