"""Sums of our own pages, as the transfer process finds them: who asked, and what came of it.

    ask --> Sum --> transfer process --> Summed --> then(sums)
                                  `--> gone --> then(None)

Invariants: each ``ask`` is answered once; a ticket is never used again, so what a process said that
is gone meanwhile answers nobody.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kvd.core.layout.seal import SUM_BYTES
from kvd.transfer.orders import Sum, Summed
from kvd.types import ID_BYTES, Pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.journal.reader import Reading

    Answered = Callable[[Summed | None], None]
    """Takes the answer; None: the process that was asked is gone."""

ORDER_BYTES: Final = 32 * 1024 * 1024
"""Of pages in one order: a few milliseconds of summing."""

OUTSTANDING_BYTES: Final = 256 * 1024 * 1024
"""Of pages that are asked for and not answered."""


class Unsummed(Exception):
    """The transfer process could not sum pages of ours; the message says why."""


class PageSums:
    """Asks the transfer process for sums of pages of ``region``, each of ``page_bytes``."""

    def __init__(self, order: Callable[[Sum], None], region: str, page_bytes: int) -> None:
        self._order = order
        self._region = region
        self.order_pages = max(1, ORDER_BYTES // page_bytes)
        self.most_pages = max(1, OUTSTANDING_BYTES // page_bytes)
        self.n_pages = 0
        """Asked for and not answered."""
        self.is_ready = False
        """Whether a transfer process serves; what is asked of none is not answered."""
        self._when_ready: list[Callable[[], None]] = []
        self._waiting: dict[int, tuple[Pages, Answered]] = {}
        self._last_ticket = 0

    def ask(self, pages: Pages, then: Answered) -> None:
        """Have ``pages`` summed; ``then`` is called once."""
        self._last_ticket += 1
        # Before it is ordered: by this the answer is known.
        self._waiting[self._last_ticket] = (pages, then)
        self.n_pages += len(pages) // ID_BYTES
        self._order(Sum(self._last_ticket, self._region, pages))

    def summed(self, report: Summed) -> None:
        """Answer whoever waits."""
        found = self._waiting.pop(report.ticket, None)
        if found is None:
            return
        pages, then = found
        n_pages = len(pages) // ID_BYTES
        # Before it is answered: whoever hears it asks for more, as far as there is room.
        self.n_pages -= n_pages
        if not report.why and len(report.sums) != n_pages * SUM_BYTES:
            why = f"{len(report.sums)} bytes of sums for {n_pages} pages"
            report = Summed(report.ticket, b"", why)
        then(report)

    def ask_again_with(self, ask: Callable[[], None]) -> None:
        """Have ``ask`` called whenever there is a transfer process to be asked."""
        self._when_ready.append(ask)

    def transfer_ready(self) -> None:
        """There is somebody to ask; who was not answered asks again."""
        # First: whoever is called asks only of one that is ready.
        self.is_ready = True
        for ask in self._when_ready:
            ask()

    def transfer_gone(self) -> None:
        """Nobody will answer: tell everybody who waits, the first one first."""
        self.is_ready = False  # first: whoever is told asks again at once, and must not
        waiting, self._waiting = self._waiting, {}
        self.n_pages = 0
        for _, then in waiting.values():
            then(None)

    async def check(self, reading: Reading, advance: Callable[[str], None]) -> None:
        """Have everything summed that ``reading`` wants; ``advance`` is told how far it is.

        Raises:
            Unsummed: the transfer process could not: it is gone, or refuses.
        """
        while pages := reading.to_sum():
            window = self.most_pages * ID_BYTES
            for start in range(0, len(pages), window):
                advance(f"verifying page {start // ID_BYTES} of {len(pages) // ID_BYTES}")
                part = Pages(pages[start : start + window])
                reading.summed(part, await self._sums_of(part))

    async def _sums_of(self, pages: Pages) -> bytes:
        """The sums of ``pages``, asked for all at once."""
        step = self.order_pages * ID_BYTES
        parts = [Pages(pages[start : start + step]) for start in range(0, len(pages), step)]
        answers = [self._answer(part) for part in parts]
        found = []
        for report in await asyncio.gather(*answers):
            if report is None or report.why:
                raise Unsummed("the transfer process is gone" if report is None else report.why)
            found.append(report.sums)
        return b"".join(found)

    def _answer(self, pages: Pages) -> asyncio.Future[Summed | None]:
        answer: asyncio.Future[Summed | None] = asyncio.get_running_loop().create_future()

        def then(report: Summed | None) -> None:
            if not answer.done():  # whoever waited was cancelled
                answer.set_result(report)

        self.ask(pages, then)
        return answer
