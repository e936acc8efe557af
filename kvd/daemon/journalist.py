"""The journal's place in the shell: what is cached is noted, and summed, which proves it.

    NoteCached --> queue --> PageSums --> proven

What is cached within ``BATCH_S`` is asked for together, and what was answered by then is proven
together: 64 pages by themselves cost 17 us, among a thousand 4. Which pages still wait for their
sums is read when they are asked for, and compared when the sums are here: what was freed meanwhile
drops out, and what was cached anew has been queued again.

Invariants: a page that is cached and not proven is queued, or asked for, or answered, or was
refused a sum (``n_unsummed_pages``); nothing is asked for while no transfer process is ready; the
queue is at most twice as long as the pool.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from kvd.types import ID_BYTES, Pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.effects import NoteCached
    from kvd.daemon.pagesums import PageSums
    from kvd.journal.checked_words import Words
    from kvd.journal.writer import JournalWriter
    from kvd.transfer.orders import Summed

BATCH_S: Final = 0.005
"""A killed daemon loses so much more of what it cached last."""


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
        self._answered: list[tuple[Pages, Words, bytes]] = []
        """Pages with their words when they were asked for, and their sums: not proven yet."""
        self._turn: asyncio.TimerHandle | None = None
        self._is_settled = asyncio.Event()
        self._is_settled.set()
        sums.ask_again_with(self._go_on_soon)

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
            self._go_on_soon()

    # ---- sums --------------------------------------------------------------------------------

    def _go_on_soon(self) -> None:
        if self._turn is None and (self._sums.is_ready or self._answered):
            self._turn = asyncio.get_running_loop().call_later(BATCH_S, self._go_on)

    def _go_on(self) -> None:
        """Prove what was answered, and ask for as much as may be outstanding."""
        # First, so that what comes while it asks gets a turn of its own.
        self._turn = None
        self._prove()
        sums = self._sums
        while sums.is_ready and self._queue and sums.n_pages < sums.most_pages:
            # The words as they are now: a page that is freed and cached again meanwhile has another
            # one, and its old sum proves nothing of it.
            room = sums.most_pages - sums.n_pages
            pages, words = self.writer.pending(self._next_pages(room))
            for start in range(0, words.size, sums.order_pages):
                stop = start + sums.order_pages
                some = Pages(pages[start * ID_BYTES : stop * ID_BYTES])
                sums.ask(some, self._answer(some, words[start:stop]))
        if not (self._queue or sums.n_pages or self._answered):
            self._is_settled.set()

    def _prove(self) -> None:
        """All that was answered since the last turn."""
        answered, self._answered = self._answered, []
        if answered:
            pages, words, sums = zip(*answered, strict=True)
            self.writer.summed(Pages(b"".join(pages)), np.concatenate(words), b"".join(sums))

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

    def _answer(self, pages: Pages, words: Words) -> Callable[[Summed | None], None]:
        def answered(report: Summed | None) -> None:
            # To the end of the queue: the next process sums them.
            if report is None:
                self._queue.append(pages)
                self._queued_pages += len(pages) // ID_BYTES
            elif report.why:
                self.n_unsummed_pages += len(pages) // ID_BYTES
            else:
                self._answered.append((pages, words, report.sums))
            self._go_on_soon()

        return answered

    async def settle(self, timeout_s: float) -> bool:
        """Wait until everything that is cached is proven; whether it is, in that time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_settled.wait()
        except TimeoutError:
            return False
        return True
