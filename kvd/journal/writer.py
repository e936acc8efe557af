"""Who writes a journal: one verb for each note of the core, done when it returns.

Order of stores: a page's row before its word, and its word before anybody is told; what ends is
cleared before anybody else may have it. Pages of one verb are stored together where they are many,
and one by one where they are few, which is quicker for up to ``FEW``.

Invariant: a page whose word is 0 is nobody's, so the word of a page that may be written by whoever
gets it next is 0 or a lease's.
"""

from __future__ import annotations

import operator
import struct
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from kvd.journal.checked_words import PENDING, WORD_BYTES, are_pending, sealed
from kvd.journal.claims import LeaseClaim, LeaseClaims, claim_word
from kvd.journal.engines import EngineRecord, EngineRecords
from kvd.journal.layout import (
    BEFORE,
    BEFORE_SERIAL_8,
    GENERATION,
    INDEX,
    LAST_LEASE,
    NO_SLOT,
    PID_NAMESPACE,
    ROW_HEAD,
    SERIAL_8,
    SPACE,
    ids_of,
    page_bytes_of,
)
from kvd.journal.namespaces import NamespaceSlots
from kvd.types import ID_BYTES, Pages

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvd.core.effects import NoteCached, NoteEnded, NoteFreed, NoteHeld
    from kvd.journal.checked_words import Words
    from kvd.journal.layout import Journal, Store

FEW: Final = 4
"""Up to so many pages are stored one by one."""

SERIAL_BITS: Final = 40
"""Of the count within a generation; the generation is above it."""

_BLOCK_ROWS: Final = 1024
"""Serials are laid out for so many rows at a time."""
_ROW: Final = struct.Struct("<IIIIQQQQ")


class Known(msgspec.Struct, frozen=True):
    """What a journal says that is carried on, by slot."""

    claims: dict[int, LeaseClaim] = {}
    engines: dict[int, EngineRecord] = {}
    spaces: dict[int, str] = {}


class _Block:
    """Rows that are being made, and their columns; what no column covers stays 0.

    Row k has serial ``first + k`` from the beginning, and the one before it for its predecessor: a
    caching counts on, so only its first row is another's successor.
    """

    def __init__(self, first: int, n_rows: int, page_size: int, row_words: int) -> None:
        self.n_rows = n_rows
        rows8: Words = np.zeros((n_rows, row_words), np.uint64)
        rows4 = rows8.view(np.uint32)
        row_bytes = row_words * WORD_BYTES
        self.rows: NDArray[np.void] = rows8.view(f"V{row_bytes}")[:, 0]
        self.before, self.index, self.space = rows4[:, BEFORE], rows4[:, INDEX], rows4[:, SPACE]
        self.before_serial = rows8[:, BEFORE_SERIAL_8]
        self.counting = np.arange(n_rows, dtype=np.uint32)
        self.tokens: NDArray[np.void] = np.ndarray(
            (n_rows,), f"V{page_size * ID_BYTES}", rows8, ROW_HEAD * 4, (row_bytes,)
        )
        self._serial = rows8[:, SERIAL_8]
        self.begin(first)

    def begin(self, first: int) -> None:
        """Row 0 has this serial from now on."""
        self.first = first
        serials: Words = np.arange(first, first + self.n_rows, dtype=np.uint64)
        self._serial[:] = serials
        self.before_serial[:] = serials - np.uint64(1)
        self.words = serials | np.uint64(PENDING)


class JournalWriter:
    """Writes one journal, as the next generation of it.

    Args:
        journal: a new one, or one that was read and ``settled``.
        known: of one that was read, what goes on.
        store: does every store; another one in tests.
    """

    def __init__(
        self, journal: Journal, known: Known | None = None, store: Store = operator.setitem
    ) -> None:
        known = known or Known()
        self.journal = journal
        self._store = store
        self._words = journal.words
        self._word = journal.words_view
        self._rows = journal.rows
        self._row_words = journal.sizes.row_words
        self.claims = LeaseClaims(journal, store, known.claims)
        self.engines = EngineRecords(journal, store, known.engines)
        self._spaces = NamespaceSlots(journal, store, known.spaces)
        self.generation = journal.counter(GENERATION) + 1
        # Before anything is written as this generation.
        store(journal.head, GENERATION, sealed(self.generation, GENERATION))
        self._last_lease = journal.counter(LAST_LEASE)
        # Above all of the generation before: no serial is used twice in the life of the memory.
        self._serial = self.generation << SERIAL_BITS
        self.n_unkept_pages = 0
        """Cached pages of namespaces for which no slot was left."""
        self._block = self._new_block(_BLOCK_ROWS)
        self._padding = bytes(
            self._row_words * WORD_BYTES - ROW_HEAD * 4 - journal.sizes.page_size * ID_BYTES
        )

    # ---- leases ------------------------------------------------------------------------------

    def held(self, note: NoteHeld) -> None:
        """From now on these pages are the lease's own, beside those that were before."""
        lease = note.lease
        # Before any page is the lease's: a number that the next daemon did not know of it might
        # give again, to somebody else.
        if lease > self._last_lease:
            self._last_lease = lease
            self._store(self.journal.head, LAST_LEASE, sealed(lease, LAST_LEASE))
        # First, because the word of a page names the slot. Killed between the two the lease has
        # fewer pages, of which its engine has not been told.
        slot = self.claims.hold(lease, note.session, note.anchor)
        self._mark(note.pages, claim_word(lease, slot))

    def cached(self, note: NoteCached) -> None:
        """Pages joined the tree; they are ``pending`` until they are ``summed``."""
        pages = note.pages
        if pages:
            space = self._spaces.slot_of(note.namespace)
            # Its rows could name no namespace, so it is not kept over a restart.
            if space < 0:
                self.n_unkept_pages += len(pages) // ID_BYTES
                self.forget(pages)
            elif len(pages) <= FEW * ID_BYTES:
                self._cache_few(space, note)
            else:
                self._cache_many(space, note)
            self._serial += 1  # a gap, by which the reader tells one caching from the next
        # Behind the pages: an anchor on a page that is not noted yet would cut the lease's path
        # short.
        if note.lease:
            self.claims.move(note.lease, note.anchor)

    def freed(self, note: NoteFreed) -> None:
        """These pages are nobody's now, and may be written by whoever gets them next."""
        self._mark(note.pages, 0)

    def ended(self, note: NoteEnded) -> None:
        """The lease keeps nothing any more."""
        self.claims.end(note.lease)

    def forget(self, pages: Pages) -> None:
        """Pages that somebody may still read, and that join nothing any more."""
        self._mark(pages, claim_word(0, NO_SLOT))

    # ---- sums --------------------------------------------------------------------------------

    def pending(self, pages: Pages) -> tuple[Pages, Words]:
        """Those of ``pages`` that are cached and not proven yet, and their words as they are now.

        To be given to ``summed`` with what was summed after this.
        """
        ids = ids_of(pages)
        words = self._words[ids]
        waits = are_pending(words)
        if waits.all():  # the rule
            return pages, words
        return Pages(page_bytes_of(ids[waits])), words[waits]

    def all_pending(self) -> Pages:
        """Every page that is cached and not proven."""
        return Pages(page_bytes_of(np.flatnonzero(are_pending(self._words))))

    def summed(self, pages: Pages, words: Words, sums: bytes) -> int:
        """Prove those of ``pages`` whose word is still what it was; how many those are.

        ``sums``: 8 bytes each, little-endian.
        """
        ids = ids_of(pages)
        # By the word, which has the serial of the caching: what was freed meanwhile, or freed and
        # cached again, has another one, and this sum is of bytes that are gone.
        same = self._words[ids] == words
        found = np.frombuffer(sums, "<u8")
        if not same.all():
            ids, found = ids[same], found[same]
        store, journal = self._store, self.journal
        # The sum before the word that proves the row with it: torn between the two the page is
        # pending still, and only lost.
        store(journal.sums, ids, found)
        store(self._words, ids, journal.checks(ids, self._spaces.digests))
        return int(ids.size)

    def restamp(self, pages: Pages) -> None:
        """The order of use of cached pages, least recently used first, as far as it is known."""
        ids = ids_of(pages)
        first, self._serial = self._serial + 1, self._serial + ids.size
        stamps = np.arange(first, first + ids.size, dtype=np.uint64)
        # No check covers it, so pages stay proven whatever order they are used in.
        self._store(self.journal.stamps, ids, stamps)

    # ---- engines -----------------------------------------------------------------------------

    def pids_are_of(self, namespace: int) -> None:
        """The pid namespace in which every pid that is noted from now on has its meaning."""
        self._store(self.journal.head, PID_NAMESPACE, sealed(namespace, PID_NAMESPACE))

    # ---- pages -------------------------------------------------------------------------------

    def _mark(self, pages: Pages, word: int) -> None:
        if len(pages) <= FEW * ID_BYTES:
            for page in memoryview(pages).cast("i"):
                self._store(self._word, page, word)
        else:
            self._store(self._words, ids_of(pages), word)

    def _cache_few(self, space: int, note: NoteCached) -> None:
        store, word, whole = self._store, self._word, self.journal.whole
        size = self.journal.sizes.page_size * ID_BYTES
        row_bytes, rows_at = self._row_words * WORD_BYTES, self.journal.sizes.rows_at
        before, serial_before = note.before, self._serial_of(note.before)
        for at, page in enumerate(memoryview(note.pages).cast("i")):
            self._serial = serial = self._serial + 1
            row = _ROW.pack(before, note.first + at, space, 0, serial, serial_before, 0, 0)
            start = rows_at + page * row_bytes
            said = row + note.tokens[at * size : (at + 1) * size] + self._padding
            # The row first: its word says that it is there.
            store(whole, slice(start, start + row_bytes), said)
            store(word, page, PENDING | serial)
            before, serial_before = page, serial

    def _cache_many(self, space: int, note: NoteCached) -> None:
        ids = ids_of(note.pages)
        n = ids.size
        block = self._block_for(n)
        # What was cached in other ways has taken serials, and their rows here stay unused.
        start = self._serial + 1 - block.first
        stop = start + n
        self._serial += n
        block.before[start + 1 : stop] = ids[:-1]
        block.before[start] = note.before
        behind = note.first + n
        if behind <= block.n_rows:
            block.index[start:stop] = block.counting[note.first : behind]
        else:
            np.add(block.counting[:n], note.first, out=block.index[start:stop])
        block.space[start:stop] = space
        # With the serial of the page before, not its number alone: that page may be cached anew
        # with other tokens, and what hangs behind it must not be taken to follow those.
        block.before_serial[start] = self._serial_of(note.before)
        block.tokens[start:stop] = np.frombuffer(note.tokens, block.tokens.dtype)
        # As in ``_cache_few``: rows first, all of them.
        self._store(self._rows, ids, block.rows[start:stop])
        self._store(self._words, ids, block.words[start:stop])

    def _block_for(self, n_rows: int) -> _Block:
        """A block with rows for the next ``n_rows`` serials."""
        block = self._block
        first = self._serial + 1
        if first + n_rows > block.first + block.n_rows:
            if n_rows > block.n_rows:
                block = self._block = self._new_block(n_rows)
            else:
                block.begin(first)
        return block

    def _new_block(self, n_rows: int) -> _Block:
        page_size = self.journal.sizes.page_size
        return _Block(self._serial + 1, n_rows, page_size, self._row_words)

    def _serial_of(self, page: int) -> int:
        if not page:
            return 0
        serial: int = self.journal.row_view[page * self._row_words + SERIAL_8]
        return serial
