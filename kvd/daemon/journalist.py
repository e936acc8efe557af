"""The journal's place in the shell: what is cached is noted, and summed, which proves it.

    NoteCached --> queue --> PageSums --> proven

What was cached in one turn of the loop is asked for in the next. Which pages still wait for their
sums is read when they are asked for, and compared when the sums are here: what was freed meanwhile
drops out, and what was cached anew has been queued again.

Invariants: a page that is cached and not proven is queued, or asked for, or was refused a sum
(``n_unsummed_pages``); nothing is asked for while no transfer process is ready; the queue is at
most twice as long as the pool.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from kvd.types import ID_BYTES, Pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.effects import NoteCached
    from kvd.daemon.pagesums import PageSums
    from kvd.journal.checked_words import Words
    from kvd.journal.writer import JournalWriter
    from kvd.transfer.orders import Summed


class Journalist:
    """Has what is cached proven. All other notes are carried out by its ``writer``.

    Args:
        writer: of this generation.
        sums: asks the transfer process.
    """

    def __init__(self, writer: JournalWriter, sums: PageSums) -> None:
        self.writer = writer
        self.n_unsummed_pages = 0
        """Pages that the transfer process refused to sum: they are not kept over a restart."""
        self._sums = sums
        self._queue: deque[Pages] = deque()
        self._queued_pages = 0
        self._most_queued_pages = 2 * writer.journal.sizes.pages
        self._turn: asyncio.Handle | None = None
        self._is_settled = asyncio.Event()
        self._is_settled.set()
        sums.ask_again_with(self._ask_soon)

    def cached(self, note: NoteCached) -> None:
        """Carry out ``NoteCached``; its pages are proven when their sums are here."""
        # Noted before its sum is asked for: the sum proves the note.
        self.writer.cached(note)
        if note.pages:
            self._queue.append(note.pages)
            self._queued_pages += len(note.pages) // ID_BYTES
            if self._queued_pages > self._most_queued_pages:
                self._sift()
            self._is_settled.clear()
            self._ask_soon()

    # ---- sums --------------------------------------------------------------------------------

    def _ask_soon(self) -> None:
        if self._turn is None and self._sums.is_ready:
            self._turn = asyncio.get_running_loop().call_soon(self._ask)

    def _ask(self) -> None:
        """Ask for as much as may be outstanding."""
        # First, so that what comes while it asks gets a turn of its own.
        self._turn = None
        sums = self._sums
        while sums.is_ready and self._queue and sums.n_pages < sums.most_pages:
            # The words as they are now: a page that is freed and cached again meanwhile has another
            # one, and its old sum proves nothing of it.
            pages, words = self.writer.pending(self._next_pages(sums.order_pages))
            if pages:
                sums.ask(pages, self._proof(pages, words))
        if not self._queue and not sums.n_pages:
            self._is_settled.set()

    def _next_pages(self, n_pages: int) -> Pages:
        """The first ``n_pages`` of the queue, or all."""
        queue, room = self._queue, n_pages * ID_BYTES
        parts: list[bytes] = []
        while queue and room:
            part = queue.popleft()
            if len(part) > room:
                queue.appendleft(Pages(part[room:]))
                part = Pages(part[:room])
            parts.append(part)
            room -= len(part)
            self._queued_pages -= len(part) // ID_BYTES
        return Pages(b"".join(parts))

    def _sift(self) -> None:
        """Leave each page that waits in the queue once, however often it came and went."""
        waiting = self.writer.all_pending()
        self._queue = deque([waiting])
        self._queued_pages = len(waiting) // ID_BYTES

    def _proof(self, pages: Pages, words: Words) -> Callable[[Summed | None], None]:
        def prove(report: Summed | None) -> None:
            # To the end of the queue: the next process sums them.
            if report is None:
                self._queue.append(pages)
                self._queued_pages += len(pages) // ID_BYTES
            elif report.why:
                self.n_unsummed_pages += len(pages) // ID_BYTES
            else:
                self.writer.summed(pages, words, report.sums)
            self._ask()

        return prove

    async def settle(self, timeout_s: float) -> bool:
        """Wait until everything that is cached is proven; whether it is, in that time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_settled.wait()
        except TimeoutError:
            return False
        return True
