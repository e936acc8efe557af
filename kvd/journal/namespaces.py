"""The names of namespaces, each in a slot that rows refer to.

    slot   digest of the name, stored last | length | UTF-8

A slot is used again only when no page's row names it any more. Where none is left, and for names
that are too long, what is cached under the name is not kept over a restart; it is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

from kvd.journal.checked_words import PENDING, WORD_BYTES
from kvd.journal.layout import NAMESPACE_BYTES, SPACE, SPACE_BYTES

if TYPE_CHECKING:
    from kvd.journal.checked_words import Words
    from kvd.journal.layout import Journal, Store

_WORDS: Final = SPACE_BYTES // WORD_BYTES
_TEXT_AT: Final = 2 * WORD_BYTES


def digest_of(name: bytes) -> int:
    """What a slot's first word is for this name; never 0."""
    return xxhash.xxh3_64_intdigest(name) | 1


def read_namespaces(journal: Journal) -> dict[int, str]:
    """The names by slot, without those that are damaged."""
    found: dict[int, str] = {}
    base = journal.sizes.spaces_at
    firsts: Words = np.asarray(journal.spaces)[::_WORDS]
    for slot in np.flatnonzero(firsts).tolist():
        digest, length = journal.spaces[slot * _WORDS], journal.spaces[slot * _WORDS + 1]
        if length > NAMESPACE_BYTES:
            continue
        at = base + slot * SPACE_BYTES + _TEXT_AT
        said = bytes(journal.whole[at : at + length])
        if digest_of(said) == digest:
            found[slot] = said.decode(errors="replace")
    return found


def digests_of(spaces: dict[int, str], n_slots: int) -> Words:
    """The digest of each slot's name, 0 where there is none; (n_slots,)."""
    out: Words = np.zeros(n_slots, np.uint64)
    for slot, name in spaces.items():
        out[slot] = digest_of(name.encode())
    return out


class NamespaceSlots:
    """Who writes the names. ``digests``: by slot; 0 for a free one."""

    def __init__(self, journal: Journal, store: Store, known: dict[int, str]) -> None:
        self._journal = journal
        self._store = store
        self.digests = digests_of(known, journal.sizes.spaces)
        self._slots = {name: slot for slot, name in known.items()}
        self._free = [slot for slot in range(journal.sizes.spaces) if slot not in known][::-1]
        self._misses_until_sweep = 0

    def slot_of(self, name: str) -> int:
        """The slot of that name, made where there is none yet; -1 where none can be had."""
        slot = self._slots.get(name)
        return slot if slot is not None else self._made(name)

    def _made(self, name: str) -> int:
        said = name.encode(errors="surrogatepass")
        if len(said) > NAMESPACE_BYTES:
            return -1
        if not self._free and not self._sweep():
            return -1
        slot = self._free.pop()
        journal, store = self._journal, self._store
        at = journal.sizes.spaces_at + slot * SPACE_BYTES + _TEXT_AT
        digest = digest_of(said)
        # Empty while it is written.
        store(journal.spaces, slot * _WORDS, 0)
        store(journal.whole, slice(at, at + len(said)), said)
        store(journal.spaces, slot * _WORDS + 1, len(said))
        # Behind the name that it proves.
        store(journal.spaces, slot * _WORDS, digest)
        self.digests[slot] = digest
        self._slots[name] = slot
        return slot

    def _sweep(self) -> bool:
        """Free the slots that no cached page names. It reads every row, so not at every miss."""
        # What a sweep costs is shared by so many names that find no place.
        if self._misses_until_sweep:
            self._misses_until_sweep -= 1
            return False
        journal = self._journal
        self._misses_until_sweep = journal.sizes.spaces // 16
        cached = np.flatnonzero(journal.words >= np.uint64(PENDING))
        # By the rows of cached pages only: those of others are left over, and prove nothing.
        used = set(np.unique(journal.rows4[cached, SPACE]).tolist())
        for name, slot in list(self._slots.items()):
            if slot not in used:
                del self._slots[name]
                self.digests[slot] = 0
                self._free.append(slot)
        return bool(self._free)
