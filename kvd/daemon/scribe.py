"""Carries out the notes of the core in the journal, and has what is cached summed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.daemon.estate import TOKEN_HEAD
from kvd.daemon.vigil import started_ticks
from kvd.journal.engines import Process
from kvd.transfer import orders

if TYPE_CHECKING:
    from kvd.core.effects import NoteCached
    from kvd.daemon.mover import Mover
    from kvd.journal.words import Words
    from kvd.journal.writer import Writer
    from kvd.types import Pages


class Scribe:
    """Writes one journal; ``region`` is that of the pool's pages."""

    def __init__(self, writer: Writer, mover: Mover, region: str) -> None:
        self._writer = writer
        self._mover = mover
        self._region = region
        self._asked: dict[int, tuple[Pages, Words]] = {}
        self._last = 0
        self.held = writer.held
        self.freed = writer.freed
        self.ended = writer.ended
        mover.on_summed = self._summed

    def cached(self, note: NoteCached) -> None:
        """Carry out ``NoteCached``; its pages are proven when their sums are here."""
        self._writer.cached(note)
        pages, words = self._writer.pending(note.pages)
        if pages:
            self._last += 1
            self._asked[self._last] = (pages, words)
            self._mover.sum(orders.Sum(self._last, self._region, pages))

    def _summed(self, got: orders.Summed) -> None:
        pages, words = self._asked.pop(got.ticket)
        if not got.why:
            self._writer.summed(pages, words, got.sums)

    def session_opened(self, session: int, token: bytes, name: str, pid: int) -> None:
        """A process opened the session."""
        said = token.removeprefix(TOKEN_HEAD)
        self._writer.session_opened(session, said, name, Process(pid, started_ticks(pid) or 0))

    def session_joined(self, session: int, pid: int) -> None:
        """One more process of it."""
        self._writer.session_joined(session, Process(pid, started_ticks(pid) or 0))

    def session_left(self, session: int) -> None:
        """Its last process is gone."""
        self._writer.session_ended(session)
