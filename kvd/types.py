"""The shared nouns: token and page sequences, identities, runs of pages.

Tokens and page ids are ``bytes`` of little-endian int32. That is the wire format, the tree's
edge format and the allocator's format at once: slicing is a memcpy, comparing is a memcmp, and
nothing is ever a Python object per token or per page.

NumPy is imported by what uses it: a tool that only speaks to a daemon starts without it.
"""

from __future__ import annotations

import enum
from typing import Final, NewType

import msgspec

Tokens = NewType("Tokens", bytes)
"""Token ids, little-endian int32, 4 bytes each."""

Pages = NewType("Pages", bytes)
"""Page ids in the order of the tokens they hold, little-endian int32, 4 bytes each."""

Incarnation = NewType("Incarnation", str)
"""One daemon process lifetime: 16 hex digits of its birth, then 16 random ones.

Ordered within a node: a later process compares greater, so a Hello that was delayed over a restart
cannot pass for news."""

NodeName = NewType("NodeName", str)
"""A daemon's configured name, stable over restarts."""

ID_BYTES: Final = 4
"""Bytes of one token id or one page id."""

NULL_PAGE: Final = 0
"""The page that is never handed out and never freed."""

MAX_ROOM = 2**63 - 1
"""Rooms are 1..MAX_ROOM: 0 means "no room" to every router in the field."""

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""The longest frame of any socket, unless the configuration says otherwise."""

NO_TOKENS: Final = Tokens(b"")
NO_PAGES: Final = Pages(b"")


class PageRun(msgspec.Struct, frozen=True, array_like=True):
    """``count`` consecutive pages from ``start``: ``[start, start + count)``."""

    start: int
    count: int


class Sent(enum.Enum):
    """What became of a message given to a socket."""

    TAKEN = "taken"
    """It will go out, if nothing breaks."""
    FULL = "full"
    """Not sent: the other side is too far behind. It is alive and does not read."""
    GONE = "gone"
    """Not sent: nobody is connected there any more, or this socket is closed."""


UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
"""Of sizes that people read."""


def short(incarnation: str) -> str:
    """Enough of an incarnation to tell it from another one: the start of its random half."""
    return incarnation[16:24]


def amount(size_bytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    value = float(size_bytes)
    for unit in UNITS:
        if value < 1024 or unit == UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("the last unit takes everything")


def count(ids: bytes) -> int:
    """How many tokens or pages ``ids`` holds."""
    return len(ids) // ID_BYTES


def slice_pages(pages: Pages, first: int, end: int | None = None) -> Pages:
    """Pages ``[first, end)`` of the sequence, counted in pages; up to its end without ``end``."""
    return Pages(pages[first * ID_BYTES : None if end is None else end * ID_BYTES])


def null_pages(n_pages: int) -> Pages:
    """The null page, so many times: what a page table has where there is no page."""
    return Pages(bytes(n_pages * ID_BYTES))


def page_ids(pages: Pages) -> list[int]:
    """The page ids as integers, for people and for tests."""
    import numpy as np  # noqa: PLC0415

    out: list[int] = np.frombuffer(pages, dtype="<i4").tolist()
    return out


def pack_ids(ids: list[int]) -> bytes:
    """The opposite of ``page_ids``; for tests and small lists."""
    import numpy as np  # noqa: PLC0415

    return np.asarray(ids, dtype="<i4").tobytes()


def runs_of(pages: Pages) -> list[PageRun]:
    """The maximal ascending runs of ``pages``, in order: [7, 8, 9, 3] is 7x3, 3x1."""
    import numpy as np  # noqa: PLC0415

    ids = np.frombuffer(pages, dtype="<i4")
    if not ids.size:
        return []
    cuts = np.flatnonzero(np.diff(ids) != 1) + 1
    starts = np.concatenate(([0], cuts))
    lengths = np.diff(np.append(starts, ids.size))
    return [
        PageRun(first, length)
        for first, length in zip(ids[starts].tolist(), lengths.tolist(), strict=True)
    ]
