"""What routers call a block: by all tokens from the start of its prompt, and by its namespace.

    name of a root     of its namespace as the tree has it, with its epoch
    name of a block    xxh3-64(its tokens, seeded with the name of the block before it)

A name has something in its upper half: consumers take no number that fits into 32 bits for a hash,
and 0 for no block at all. It is a name and no proof: whoever goes by it asks the wrong node at
worst, because the tree compares tokens.

What must not live here: which blocks there are (``announcer``).
"""

from __future__ import annotations

from array import array
from typing import Final

from xxhash import xxh3_64_intdigest

NAME_BYTES: Final = 8
"""Of one name; several are one behind the other in ``bytes``, in this host's order."""

NO_BLOCK: Final = 0

_HALF: Final = 32
_TOP: Final = 1 << 63


def root_name(key: str) -> int:
    """What stands before the first block of a namespace, given as the tree has it."""
    return xxh3_64_intdigest(key.encode())


def names_along(before: int, tokens: bytes, page_bytes: int) -> bytes:
    """The names of all whole pages of ``tokens``, which follow the block of that name."""
    names = array("Q")
    for start in range(0, len(tokens) - page_bytes + 1, page_bytes):
        before = xxh3_64_intdigest(tokens[start : start + page_bytes], before)
        if not before >> _HALF:
            before |= _TOP
        names.append(before)
    return names.tobytes()


def last_name(names: bytes) -> int:
    """The last one."""
    return array("Q", names[-NAME_BYTES:])[0]


def each_name(names: bytes) -> list[int]:
    """One by one."""
    return array("Q", names).tolist()
