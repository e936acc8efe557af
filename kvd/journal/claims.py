"""Which leases engines have: a slot each, beside the words of the pages that are their own.

    slot   lease, stored last, 0 when it ended | session | anchor | check of slot, lease, session

The anchor is the last page of the path that the lease keeps cached; it moves, so it is a word that
proves itself. A lease that finds no slot still claims its pages; after a restart those are kept
until every lease of before has ended, and its path is not.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import xxhash

from kvd.journal.checked_words import sealed, unsealed
from kvd.journal.layout import LEASE_SLOTS, LEASE_WORDS, NO_SLOT

if TYPE_CHECKING:
    from kvd.journal.layout import Journal, Store

_KEY: Final = struct.Struct("<QQQ")


class LeaseClaim(msgspec.Struct, frozen=True):
    """A lease as it was noted; ``anchor`` is -1 where that word is damaged."""

    lease: int
    session: int
    anchor: int


def _check(slot: int, lease: int, session: int) -> int:
    return xxhash.xxh3_64_intdigest(_KEY.pack(slot, lease, session))


def claim_word(lease: int, slot: int) -> int:
    """The word of a page that is this lease's own."""
    return (lease << 16) | slot


def read_claims(journal: Journal) -> dict[int, LeaseClaim]:
    """The leases by slot, without those that are damaged."""
    leases = journal.leases
    found: dict[int, LeaseClaim] = {}
    for slot in np.flatnonzero(np.asarray(leases)[::LEASE_WORDS]).tolist():
        at = slot * LEASE_WORDS
        lease, session, anchor, check = leases[at : at + LEASE_WORDS].tolist()
        # A word has no room for a larger number: it would be taken for a cached page's.
        if check != _check(slot, lease, session) or lease >= 1 << 46:
            continue
        page = unsealed(anchor, lease)
        is_page = page is not None and page < journal.sizes.pages
        found[slot] = LeaseClaim(lease, session, page if page is not None and is_page else -1)
    return found


class LeaseClaims:
    """Who writes the slots of leases. ``n_unkept``: leases that found none."""

    def __init__(self, journal: Journal, store: Store, known: dict[int, LeaseClaim]) -> None:
        self._leases = journal.leases
        self._store = store
        self.slots = {claim.lease: slot for slot, claim in known.items()}
        taken = set(known)
        self._free = [slot for slot in range(LEASE_SLOTS) if slot not in taken][::-1]
        self.n_unkept = 0

    def hold(self, lease: int, session: int, anchor: int) -> int:
        """The slot of the lease, opened where it has none; ``NO_SLOT`` where none is left."""
        slot = self.slots.get(lease)
        if slot is not None:
            self._store(self._leases, slot * LEASE_WORDS + 2, sealed(anchor, lease))
            return slot
        if not self._free:
            self.n_unkept += 1
            return NO_SLOT
        slot = self.slots[lease] = self._free.pop()
        leases, store, at = self._leases, self._store, slot * LEASE_WORDS
        store(leases, at + 1, session)
        store(leases, at + 2, sealed(anchor, lease))
        store(leases, at + 3, _check(slot, lease, session))
        # Last: without it the slot is empty.
        store(leases, at, lease)
        return slot

    def move(self, lease: int, anchor: int) -> None:
        """The lease keeps up to ``anchor`` now."""
        slot = self.slots.get(lease)
        if slot is not None:
            self._store(self._leases, slot * LEASE_WORDS + 2, sealed(anchor, lease))

    def end(self, lease: int) -> None:
        """The lease keeps nothing."""
        slot = self.slots.pop(lease, None)
        if slot is not None:
            # One word, and the lease is over: what stands behind it needs no clearing.
            self._store(self._leases, slot * LEASE_WORDS, 0)
            self._free.append(slot)

    def drop_but(self, known: dict[int, LeaseClaim]) -> None:
        """Clear every slot but these."""
        for slot in np.flatnonzero(np.asarray(self._leases)[::LEASE_WORDS]).tolist():
            if slot not in known:
                self._store(self._leases, slot * LEASE_WORDS, 0)
