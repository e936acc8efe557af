"""Words of 8 bytes that prove themselves, and the checks of rows.

They find accidents: torn stores, flipped bits, zeroed ranges. None is against malice.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.uint64]

WORD_BYTES: Final = 8
PROVEN: Final = 1 << 63
"""In a page's word: the rest is the check of its row."""
PENDING: Final = 1 << 62
"""In a page's word: the rest is the serial of its caching."""

_PAIR: Final = struct.Struct("<QQ")
_PROVEN: Final = np.uint64(PROVEN)
_PENDING: Final = np.uint64(PENDING)
_HALF: Final = np.uint64(32)
_PAGE_FACTOR: Final = np.uint64(0xD6E8FEB86659FD93)

_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))


def are_pending(words: Words) -> NDArray[np.bool_]:
    """Which are the words of pages that are cached, their sums not known."""
    # Below, it wraps around to what is larger than any; above, nothing is as small.
    out: NDArray[np.bool_] = (words - _PENDING) < _PENDING
    return out


def mixed_all(numbers: Words) -> Words:
    """64 bits of each, in which every one depends on all of it (splitmix64)."""
    numbers = numbers + _STEP
    numbers ^= numbers >> _SHIFTS[0]
    numbers *= _FIRST
    numbers ^= numbers >> _SHIFTS[1]
    numbers *= _SECOND
    numbers ^= numbers >> _SHIFTS[2]
    return numbers


def sealed(value: int, salt: int) -> int:
    """``value`` (below 2**48) in one word with 16 bits that prove it; never 0.

    ``salt`` says what it is the value of: another salt's word proves nothing.
    """
    # The last bit is given up so that 0 stays what zeroed memory says: nothing.
    return (value << 16) | (xxhash.xxh3_64_intdigest(_PAIR.pack(value, salt)) & 0xFFFF) | 1


def unsealed(word: int, salt: int) -> int | None:
    """The value of such a word; None where it is damaged."""
    value = word >> 16
    return value if word == sealed(value, salt) else None


def weights(n_words: int) -> Words:
    """Odd factors, another one for each word of a row: any change of one is found for sure."""
    out: Words = mixed_all(np.arange(n_words, dtype=np.uint64)) | np.uint64(1)
    return out


def row_checks(pages: Words, rows: Words, names: Words, factors: Words) -> Words:
    """The words of proven pages.

    Args:
        pages: their numbers, (n,).
        rows: what is noted of each, (n, words).
        names: the digest of each one's namespace, (n,).
        factors: one for each of those words; 0 for what is not covered.
    """
    # Folded first: by an odd factor alone, a change in the upper half of a word never reaches the
    # lower half of the total.
    folded = rows >> _HALF
    folded ^= rows
    total: Words = folded @ factors
    total += names
    total += pages * _PAGE_FACTOR
    out: Words = mixed_all(total)
    out |= _PROVEN
    return out
