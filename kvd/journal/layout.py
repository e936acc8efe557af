"""Where everything lies in a journal, and the arrays over it.

    head 4096 | words 8 x pages | lease slots | engine slots | names | rows

Offsets are multiples of 64. A row, in words of 4 bytes::

    before | index | namespace | - | serial | serial of before | stamp | sum | tokens
    0        1       2           3   4        6                  8       10    12

Everything but the stamp is covered by the check of the page's word. A stamp of 0 stands for the
serial: used last when it was cached.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvd.journal.checked_words import WORD_BYTES, row_checks, sealed, unsealed, weights
from kvd.journal.identity import (
    HEAD_BYTES,
    MAGIC,
    STATIC_BYTES,
    Identity,
    IdentityFlaw,
    RefusedJournal,
    flaw_of,
    head_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvd.journal.checked_words import Words

    Store = Callable[[Any, Any, Any], None]
    """``store(array, where, what)``: every store into a journal is one call of it. Any, because
    arrays and memoryviews take keys and values of many types."""

LEASE_SLOTS: Final = 65_535
NO_SLOT: Final = 65_535
"""In a page's word: its lease found no slot, or is not known any more."""
LEASE_WORDS: Final = 4

ENGINE_SLOTS: Final = 1_024
PROCESSES: Final = 16
"""Of one engine at most."""
NAME_BYTES: Final = 128
"""Of an engine's name at most."""
ENGINE_BYTES: Final = 8 + 8 + 16 + 8 + NAME_BYTES + 16 * PROCESSES

NAMESPACE_BYTES: Final = 272
"""Of a namespace's name at most, in UTF-8."""
SPACE_BYTES: Final = 8 + 8 + NAMESPACE_BYTES
_FEWEST_SPACES: Final = 64
_MOST_SPACES: Final = 65_536
_PAGES_PER_SPACE: Final = 8

ROW_HEAD: Final = 12
"""Words of 4 bytes before the tokens of a row."""
BEFORE, INDEX, SPACE = 0, 1, 2
SERIAL_8, BEFORE_SERIAL_8, STAMP_8, SUM_8 = 2, 3, 4, 5
"""Places in words of 8 bytes."""

GENERATION, LAST_LEASE, LAST_SESSION, PID_NAMESPACE = 0, 1, 2, 3
"""The counters of the head."""
_COUNTERS_AT: Final = 1024

_CHUNK_ROWS: Final = 16_384


class Sizes:
    """Offsets and counts for so many pages of so many tokens."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self.spaces = min(_MOST_SPACES, max(_FEWEST_SPACES, pages // _PAGES_PER_SPACE))
        self.row_words = -(-(ROW_HEAD + page_size) // 2)
        self.words_at = HEAD_BYTES
        self.leases_at = _aligned(self.words_at + WORD_BYTES * pages)
        self.engines_at = _aligned(self.leases_at + WORD_BYTES * LEASE_WORDS * LEASE_SLOTS)
        self.spaces_at = _aligned(self.engines_at + ENGINE_BYTES * ENGINE_SLOTS)
        self.rows_at = _aligned(self.spaces_at + SPACE_BYTES * self.spaces)
        self.size_bytes = _aligned(self.rows_at + WORD_BYTES * self.row_words * pages)


def size_bytes(pages: int, page_size: int) -> int:
    """Bytes of the journal of a pool of ``pages`` (null page included) of ``page_size`` tokens."""
    return Sizes(pages, page_size).size_bytes


class Journal:
    """The arrays over a buffer; ``make_journal`` and ``open_journal`` give one.

    Attributes:
        words: one for each page; ``words_view`` is the same, quicker for one page.
        rows8, rows4: what is noted of each page, in words of 8 and of 4 bytes; ``rows`` row by row,
            ``stamps`` and ``sums`` their columns.
        leases, engines, spaces: slots.
        head: of the counters.
    """

    def __init__(self, buffer: Buffer, identity: Identity) -> None:
        sizes = self.sizes = Sizes(identity.pages, identity.page_size)
        self.identity = identity
        whole = self.whole = memoryview(buffer).cast("B")
        if len(whole) < sizes.size_bytes:
            raise ValueError(f"{len(whole)} bytes for a journal of {sizes.size_bytes}")
        self.words: Words = np.frombuffer(whole, np.uint64, sizes.pages, sizes.words_at)
        n_words = sizes.pages * sizes.row_words
        flat: Words = np.frombuffer(whole, np.uint64, n_words, sizes.rows_at)
        self.rows8: Words = flat.reshape(sizes.pages, sizes.row_words)
        self.rows4: NDArray[np.uint32] = self.rows8.view(np.uint32)
        self.stamps, self.sums = self.rows8[:, STAMP_8], self.rows8[:, SUM_8]
        self.rows: NDArray[np.void] = flat.view(f"V{sizes.row_words * WORD_BYTES}")
        self.words_view = self._view(sizes.words_at, sizes.pages)
        self.row_view = self._view(sizes.rows_at, n_words)
        self.leases = self._view(sizes.leases_at, LEASE_WORDS * LEASE_SLOTS)
        self.engines = self._view(sizes.engines_at, ENGINE_BYTES // WORD_BYTES * ENGINE_SLOTS)
        self.spaces = self._view(sizes.spaces_at, SPACE_BYTES // WORD_BYTES * sizes.spaces)
        self.head = self._view(_COUNTERS_AT, 4)
        self._factors = weights(sizes.row_words)
        # The order of use is noted after pages are proven, and must not undo that.
        self._factors[STAMP_8] = 0

    def _view(self, start: int, n_words: int) -> memoryview:
        return self.whole[start : start + WORD_BYTES * n_words].cast("Q")

    def checks(self, pages: NDArray[np.intp], digests: Words) -> Words:
        """The words that prove the rows of ``pages`` as they are now.

        ``digests``: of the namespaces, by slot; a row that names no slot gets a word of nobody.
        """
        out: Words = np.empty(pages.size, np.uint64)
        for start in range(0, pages.size, _CHUNK_ROWS):
            some = pages[start : start + _CHUNK_ROWS]
            rows: Words = self.rows8.take(some, 0)
            spaces = rows.view(np.uint32)[:, SPACE]
            digest = digests.take(spaces, mode="clip")
            found = row_checks(some.view(np.uint64), rows, digest, self._factors)
            if not digest.all():
                found[digest == 0] = 0
            out[start : start + some.size] = found
        return out

    def counter(self, which: int) -> int:
        """One of the counters of the head."""
        return self.head[which] >> 16


def make_journal(buffer: Buffer, identity: Identity, store: Store = operator.setitem) -> Journal:
    """A new, empty journal, whatever the buffer holds; the head's first word is stored last.

    Raises:
        ValueError: the buffer is too small.
    """
    journal = Journal(buffer, identity)
    sizes, whole = journal.sizes, journal.whole
    # Taken away first and given back last: killed anywhere between, this is no journal.
    store(whole, slice(0, len(MAGIC)), bytes(len(MAGIC)))
    for start, stop in (
        (sizes.words_at, sizes.words_at + WORD_BYTES * sizes.pages),
        (sizes.leases_at, sizes.rows_at),
    ):
        store(np.frombuffer(whole, np.uint8), slice(start, stop), 0)
    for which in (GENERATION, LAST_LEASE, LAST_SESSION, PID_NAMESPACE):
        store(journal.head, which, sealed(0, which))
    head = head_of(identity)
    store(whole, slice(len(MAGIC), len(head)), head[len(MAGIC) :])
    store(whole, slice(0, len(MAGIC)), MAGIC)
    return journal


def open_journal(buffer: Buffer, identity: Identity) -> Journal | RefusedJournal:
    """The journal that the buffer holds, or why it is not that of ``identity``."""
    whole = memoryview(buffer).cast("B")
    if len(whole) < HEAD_BYTES:
        return RefusedJournal(
            IdentityFlaw.FOREIGN, f"it has {len(whole)} bytes, a head alone {HEAD_BYTES}"
        )
    refused = flaw_of(bytes(whole[:STATIC_BYTES]), identity)
    if refused is not None:
        return refused
    needed = size_bytes(identity.pages, identity.page_size)
    if len(whole) < needed:
        return RefusedJournal(
            IdentityFlaw.RESIZED, f"it has {len(whole)} bytes, its head says {needed}"
        )
    journal = Journal(whole, identity)
    for which in (GENERATION, LAST_LEASE, LAST_SESSION, PID_NAMESPACE):
        if unsealed(journal.head[which], which) is None:
            return RefusedJournal(IdentityFlaw.TORN, "a counter of its head is damaged")
    return journal


def ids_of(pages: bytes) -> NDArray[np.intp]:
    """Page ids as an array of indices."""
    return np.frombuffer(pages, "<i4").astype(np.intp)


def page_bytes_of(ids: NDArray[np.intp]) -> bytes:
    """The opposite of ``ids_of``."""
    return ids.astype("<i4").tobytes()


def _aligned(offset: int) -> int:
    return -(-offset // 64) * 64
