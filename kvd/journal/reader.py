"""What a journal proves: read once, by the process that comes after, before anybody writes it.

    reading = Reading(journal, VerifyDepth.SAMPLED)
    while pages := reading.to_sum():
        reading.summed(pages, sums)          what the transfer process says of them
    found = reading.found()                  for the core
    writer = reading.carry_on()              the journal goes on as the next generation

A page is kept where its check is good, all pages before it in its sequence are kept too, and its
sum, if it was looked at, is what was noted. **One bad sum in a sample ends the sampling**: then
every page that is still kept is summed, because memory that was written by somebody without a lease
is not known to have one such place only. What follows a bad page goes with it.

Every other page that was somebody's is ``unproven``: an engine of before may still read it. Pages
that were nobody's are free, and so are those that were only being received.
"""

from __future__ import annotations

import enum
import operator
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvd.core.inputs import Branch, FormerLease, FormerSession
from kvd.journal.checked_words import PENDING, PROVEN, mixed_all
from kvd.journal.claims import claim_word, read_claims
from kvd.journal.engines import EngineRecord, read_engines
from kvd.journal.layout import (
    GENERATION,
    LAST_LEASE,
    LAST_SESSION,
    PID_NAMESPACE,
    SUM_8,
    ids_of,
    page_bytes_of,
)
from kvd.journal.namespaces import digests_of, read_namespaces
from kvd.journal.page_rows import Columns, GrownRows, RowForest, reachable
from kvd.journal.writer import JournalWriter, Known
from kvd.types import NO_TOKENS, Pages

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvd.journal.claims import LeaseClaim
    from kvd.journal.layout import Journal, Store

SAMPLE_ONE_IN = 16
"""Of the pages between the first and the last of a branch."""


class VerifyDepth(enum.Enum):
    """Which of the pages that could be kept are summed first."""

    ALL = "all"
    SAMPLED = "sampled"
    NONE = "none"


class FoundJournal(msgspec.Struct, frozen=True):
    """What the pool held and was proven; ``PoolAdopted`` and the attach socket take it over.

    ``generation`` is that which comes now. ``engines`` are how those of ``sessions`` prove that
    they are it.
    """

    generation: int
    branches: tuple[Branch, ...]
    sessions: tuple[FormerSession, ...]
    engines: tuple[EngineRecord, ...]
    unproven: Pages
    last_lease: int
    last_session: int
    pid_namespace: int


class Reading:
    """One journal as it was when the process before ended."""

    def __init__(self, journal: Journal, verify: VerifyDepth) -> None:
        self._journal = journal
        self._verify = verify
        self._spaces = read_namespaces(journal)
        self._claims = read_claims(journal)
        self._engines = read_engines(journal)
        # A copy: ``carry_on`` writes while this is still asked what was found.
        words = self._words = journal.words.copy()
        # The null page is nobody's, whatever a damaged word says.
        words[0] = 0
        noted = np.flatnonzero(words >= np.uint64(PROVEN))
        digests = digests_of(self._spaces, journal.sizes.spaces)
        good: NDArray[np.bool_] = np.zeros(words.size, bool)
        # A row that was torn, or whose namespace is damaged, has another check: the page is not
        # kept.
        good[noted] = journal.checks(noted, digests) == words[noted]
        self._columns = Columns(journal)
        self._good = good
        self._kept = reachable(self._columns, good)
        self._is_summed: NDArray[np.bool_] = np.zeros(words.size, bool)

    # ---- sums --------------------------------------------------------------------------------

    def to_sum(self) -> Pages:
        """The pages that are to be summed before more can be said; none when that is all."""
        if self._verify is VerifyDepth.NONE:
            return Pages(b"")
        wanted = self._kept & ~self._is_summed
        if self._verify is VerifyDepth.SAMPLED:
            forest = RowForest(self._columns, self._kept)
            # Of every stretch something is looked at, however short it is.
            wanted &= forest.is_first | forest.is_last | self._is_picked()
        return Pages(page_bytes_of(np.flatnonzero(wanted)))

    def _is_picked(self) -> NDArray[np.bool_]:
        """One page in so many, other ones for every caching."""
        picked: NDArray[np.bool_] = mixed_all(self._columns.serial) % np.uint64(
            SAMPLE_ONE_IN
        ) == np.uint64(0)
        return picked

    def summed(self, pages: Pages, sums: bytes) -> None:
        """Drop the pages whose sum is not what was noted, with all that follow them.

        ``sums``: 8 bytes each, little-endian.
        """
        ids = ids_of(pages)
        bad = ids[self._journal.rows8[ids, SUM_8] != np.frombuffer(sums, "<u8")]
        self._is_summed[ids] = True
        # Once one is wrong the sample says nothing about the others.
        if bad.size:
            self._verify = VerifyDepth.ALL
            self._good[bad] = False
            self._kept = reachable(self._columns, self._good)

    # ---- the end -----------------------------------------------------------------------------

    def found(self) -> FoundJournal:
        """What was proven, when ``to_sum`` has no more."""
        grown = RowForest(self._columns, self._kept).branches(self._journal, self._spaces)
        journal = self._journal
        known = self._known_claims()
        engines = sorted(self._engines.values(), key=lambda engine: engine.session)
        return FoundJournal(
            generation=journal.counter(GENERATION) + 1,
            branches=grown.branches,
            sessions=self._former(engines, known, grown),
            engines=tuple(engines),
            unproven=self._unproven(known),
            last_lease=journal.counter(LAST_LEASE),
            last_session=journal.counter(LAST_SESSION),
            pid_namespace=journal.counter(PID_NAMESPACE),
        )

    def carry_on(self, store: Store = operator.setitem) -> JournalWriter:
        """The writer of the next generation; what is not kept is noted as such first.

        Pages that are ``unproven`` stay noted so, until they are noted as freed.
        """
        known = self._known_claims()
        journal = self._journal
        writer = JournalWriter(journal, Known(known, self._engines, self._spaces), store)
        writer.forget(self._unproven(known))
        writer.claims.drop_but(known)
        writer.engines.drop_but(self._engines)
        seen: dict[int, int] = {}
        for claim in known.values():
            kept = self._kept_part(claim.anchor, seen)
            if kept != claim.anchor:  # what lies below is no path any more
                writer.claims.move(claim.lease, kept)
        return writer

    def _known_claims(self) -> dict[int, LeaseClaim]:
        """The leases of engines that are known, by slot."""
        sessions = {engine.session for engine in self._engines.values()}
        return {slot: claim for slot, claim in self._claims.items() if claim.session in sessions}

    def _own_pages(self, known: dict[int, LeaseClaim]) -> dict[int, NDArray[np.intp]]:
        """The pages that are the own of each lease, by lease."""
        words = self._words
        ids = np.flatnonzero((words != 0) & (words < np.uint64(PENDING)))
        # Sorted once for all leases, instead of one look at all pages for each of them.
        order = ids[np.argsort(words[ids], kind="stable")]
        kinds, starts = np.unique(words[order], return_index=True)
        bounds = [*starts.tolist(), order.size]
        by_word = {
            word: order[bounds[at] : bounds[at + 1]] for at, word in enumerate(kinds.tolist())
        }
        return {
            claim.lease: by_word.get(claim_word(claim.lease, slot), order[:0])
            for slot, claim in known.items()
        }

    def _unproven(self, known: dict[int, LeaseClaim]) -> Pages:
        """Every page that was somebody's and is neither kept nor a known lease's own."""
        rest = (self._words != 0) & ~self._kept
        for own in self._own_pages(known).values():
            rest[own] = False
        return Pages(page_bytes_of(np.flatnonzero(rest)))

    def _former(
        self, engines: list[EngineRecord], known: dict[int, LeaseClaim], grown: GrownRows
    ) -> tuple[FormerSession, ...]:
        own = self._own_pages(known)
        leases: dict[int, list[FormerLease]] = {}
        anchors: dict[int, int] = {}
        for claim in sorted(known.values(), key=lambda claim: claim.lease):
            anchor = self._kept_part(claim.anchor, anchors)
            namespace, prefix = grown.path_to(anchor) if anchor > 0 else ("", NO_TOKENS)
            held = Pages(page_bytes_of(own[claim.lease]))
            former = FormerLease(id=claim.lease, namespace=namespace, prefix=prefix, held=held)
            leases.setdefault(claim.session, []).append(former)
        return tuple(
            FormerSession(
                id=engine.session,
                name=engine.name,
                pids=tuple(process.pid for process in engine.processes),
                leases=tuple(leases.get(engine.session, ())),
                keeps_blocks=engine.keeps_blocks,
            )
            for engine in engines
        )

    def _kept_part(self, anchor: int, seen: dict[int, int]) -> int:
        """The last kept page of the path to ``anchor``; 0 where there is none."""
        columns = self._columns
        path: list[int] = []
        at = anchor
        # Each page is walked over once, however many leases end below it.
        while at > 0 and not self._kept[at] and at not in seen:
            path.append(at)
            before = int(columns.before[at])
            is_next = before < self._kept.size and bool(
                columns.follows(np.array([at]), np.array([before]))[0]
            )
            at = before if is_next else 0
        end = seen.get(at, max(at, 0))
        seen.update(dict.fromkeys(path, end))
        return end
