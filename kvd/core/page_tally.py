"""How often a sweep has seen each page of one pool, and what it makes of that at the end.

Pages move while a sweep goes on. What has moved is not judged; what lay still all the time must
have been seen exactly once. See ``sweep`` for the whole argument.

Plain data: two bytes for each page of the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvd.types import ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.types import Pages


class PageTally:
    """One pool during one sweep. ``see`` and ``learn`` all the time, then ``judge``."""

    __slots__ = ("_is_blind", "_seen", "_touched", "_uncounted", "is_suspicious", "total_pages")

    def __init__(self, total_pages: int) -> None:
        self.total_pages = total_pages
        self.is_suspicious = False
        """Something does not add up: only a look at all places at once can tell what."""
        self._seen = bytearray(total_pages)
        self._seen[0] = 1  # the null page is nowhere
        self._uncounted = 1
        """Pages looked at, less those that ``_seen`` tells of; 0 at the end."""
        self._touched = bytearray(total_pages)
        self._is_blind = False

    def learn(self, moved: bytes | None) -> None:
        """These pages have changed their place since the last turn; None: too many to tell."""
        if moved is None:
            self._is_blind = True
        elif moved:
            ids = np.frombuffer(moved, dtype="<i4")
            touched = np.frombuffer(self._touched, dtype=np.uint8)
            touched[ids[(ids >= 0) & (ids < touched.size)]] = 1

    def see(self, pieces: Sequence[bytes]) -> int:
        """See these pages once more; returns how many they are."""
        ids = np.frombuffer(b"".join(pieces), dtype="<i4")
        seen = np.frombuffer(self._seen, dtype=np.uint8)
        n_pages = ids.size
        if n_pages and (ids.min() < 0 or ids.max() >= seen.size):
            self.is_suspicious = True
            ids = ids[(ids >= 0) & (ids < seen.size)]
        seen[ids] += 1  # a page that is among them twice is counted once: see judge
        self._uncounted += ids.size
        return n_pages

    def has_moved(self, pages: Pages) -> bool:
        """Whether the first of these was given back since the sweep began."""
        page = int.from_bytes(pages[:ID_BYTES], "little", signed=True)
        return self._is_blind or (0 <= page < len(self._touched) and self._touched[page] == 1)

    def judge(self, first: int, last: int) -> bool:
        """Whether a page of this range lay still, and was not seen exactly once."""
        seen = np.frombuffer(self._seen, dtype=np.uint8)[first:last]
        self._uncounted -= int(seen.sum())
        if self._uncounted and last == self.total_pages:
            self.is_suspicious = True  # at one moment in two places
        if self._is_blind:
            return False
        touched = np.frombuffer(self._touched, dtype=np.uint8)[first:last]
        return bool(((seen != 1) & (touched == 0)).any())
