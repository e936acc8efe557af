"""Which pages changed their place lately: what a sweep needs to look at a node that goes on living.

The standing audit looks at a pool piece by piece, while pages move between free list, leases and
tree. Whoever moves pages appends their ids to ``log``: one append, no look at the pages. What a
sweep did not see exactly once, and what nobody has moved since it began, is in no place or in two.

Nobody watches most of the time, then the log keeps nothing.

What must not live here: what a finding is (``audit``), who moves what (pools, tree, lease table).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    from kvd.types import Pages

MAX_LOG = 16_384
"""Moves kept between two turns of the audit: half a second of a busy node."""


@mypyc_attr(allow_interpreted_subclasses=True)
class MovedPages:
    """The moves since the last ``drain``, while somebody watches."""

    __slots__ = ("log",)

    def __init__(self) -> None:
        self.log: deque[Pages] = deque(maxlen=0)
        """Append the pages that change their place, before or after; in the same step."""

    def watch(self) -> None:
        """Keep what is appended from now on."""
        self.log = deque(maxlen=MAX_LOG)

    def ignore(self) -> None:
        """Keep nothing."""
        self.log = deque(maxlen=0)

    def drain(self) -> bytes | None:
        """The ids of all pages moved since the last time; None when there were too many moves."""
        log = self.log
        # Full: the oldest may have fallen out, and a page that is not named here would count as
        # lying still.
        moved = None if len(log) == MAX_LOG else b"".join(log)
        log.clear()
        return moved
