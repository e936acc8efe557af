"""A pool of which every page is watched: who wrote a word of it follows from the word.

What the decode engine holds it has filled with a value of its own, a new one for each lease, and
looks at again and again. Any other word in such a page is foreign. The words of a handoff name the
attempt that sent them, so that a foreign word also tells whose it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvd.client import KvdError
from tests.fault.prompts import PAGE_TOKENS, Memory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from kvd.client import Lease, Node

LEASE_PAGES = 16
"""How much the hoarding engine asks for at a time: what comes back in parts is had in parts."""

_SENT, _FILLED = 0x5E << 24, 0xF1 << 24


def sent(attempt: int) -> int:
    """Every word of an attempt's pages. Both halves name it, so a mixed word is nobody's."""
    return (_SENT | attempt) << 32 | _SENT | attempt


def _sender(word: int) -> int | None:
    attempt = word & 0xFFFFFF
    return attempt if word == sent(attempt) else None


class Foreign(msgspec.Struct, frozen=True):
    """Words that nobody who holds their page has written; ``attempts``: whose they are."""

    words: int = 0
    pages: int = 0
    cached_pages: int = 0
    attempts: list[int] = []


class Watched:
    """One session's view of its pool, and everything that it has filled."""

    def __init__(self, node: Node, seed: int) -> None:
        self.node = node
        self.words = Memory(node).rows.view(np.uint64)
        self._tokens = np.random.default_rng(seed)
        self._fills = 0
        self._cached: list[Lease] = []
        self._hoard: list[Lease] = []
        self._wanted: set[asyncio.Task[None]] = set()
        self._filled: dict[int, int] = {}
        self._foreign: dict[int, NDArray[np.bool_]] = {}

    @property
    def hoarded_pages(self) -> int:
        """Pages that it has, those in the cache aside."""
        return sum(len(lease.pages) for lease in self._hoard)

    def prompt(self, pages: int) -> NDArray[np.int32]:
        """Tokens that no other prompt begins with."""
        return self._tokens.integers(1, 2**31 - 1, pages * PAGE_TOKENS, dtype=np.int32)

    async def cache(self, pages: int) -> None:
        """Commit a prompt of so many pages, and keep it locked: it can be read, never evicted."""
        tokens = self.prompt(pages)
        lease = await self.node.lease(tokens, deadline_s=2.0)
        self._fill(lease)
        await lease.commit()
        self._cached.append(lease)

    def want(self, pages: int, within_s: float) -> None:
        """Ask for so many, in small leases, and fill each as soon as it is granted."""
        for _ in range(pages // LEASE_PAGES):
            task = asyncio.create_task(self._take(within_s))
            self._wanted.add(task)
            task.add_done_callback(self._wanted.discard)

    async def had(self, pages: int, within_s: float) -> bool:
        """Whether it comes to have so many in that time."""
        until_s = asyncio.get_running_loop().time() + within_s
        while self.hoarded_pages < pages and self._wanted:
            left_s = until_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                break
            await asyncio.wait(self._wanted, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        return self.hoarded_pages >= pages

    def missing_page(self, last: int) -> int:
        """One up to ``last`` that is neither its own nor in its cache."""
        return next(page for page in range(1, last + 1) if page not in self._filled)

    def held(self, lease: Lease, attempt: int) -> int:
        """How many words of a delivered prompt are not what was sent."""
        pages = lease.pages.tolist()
        return sum(int((self.words[page] != sent(attempt)).sum()) for page in pages)

    def look(self) -> None:
        """Compare every page that is held or cached with what was written there."""
        for page, value in self._filled.items():
            wrong = self.words[page] != value
            if wrong.any():
                self._foreign[page] = self._foreign.get(page, np.False_) | wrong

    def foreign(self) -> Foreign:
        """What was found since the last ``forget``."""
        cached = {page for lease in self._cached for page in lease.pages.tolist()}
        found = set()
        for page, wrong in self._foreign.items():
            found |= set(np.unique(self.words[page][wrong]).tolist())
        return Foreign(
            words=sum(int(wrong.sum()) for wrong in self._foreign.values()),
            pages=len(self._foreign),
            cached_pages=len(cached & self._foreign.keys()),
            attempts=sorted({one for word in found if (one := _sender(word)) is not None}),
        )

    async def forget(self) -> None:
        """Give everything back but the cache, whose pages are mended; what is asked for too."""
        for task in list(self._wanted):
            task.cancel()
        await asyncio.gather(*self._wanted, return_exceptions=True)
        await release(self._hoard)
        self._hoard.clear()
        self._foreign.clear()
        mine = {page for lease in self._cached for page in lease.pages.tolist()}
        self._filled = {page: value for page, value in self._filled.items() if page in mine}
        for page, value in self._filled.items():
            self.words[page] = value

    async def _take(self, within_s: float) -> None:
        with contextlib.suppress(KvdError):  # whoever waits for the pages counts them
            tokens = self.prompt(LEASE_PAGES)
            lease = await self.node.lease(tokens, deadline_s=within_s, cache=False)
            self._hoard.append(lease)
            self._fill(lease)

    def _fill(self, lease: Lease) -> None:
        self._fills += 1
        value = (_FILLED | self._fills) << 32 | _FILLED | self._fills
        for page in lease.pages.tolist():
            self._filled[page] = value
            self.words[page] = value


async def release(leases: Iterable[Lease]) -> None:
    """Give them back; a session that is gone has done so."""
    for lease in leases:
        with contextlib.suppress(KvdError):
            await lease.release()
