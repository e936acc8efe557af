"""Orders to copy that wait for a mark of their engine, and have waited longer than most.

A process that is about to copy waits for what its engine computes first, and says nothing of it. An
order that has waited for a second is told here, once, so that whoever asks what a lease waits for
hears of the mark, and until when its process waits for it. Nothing is kept for such an order.

Invariant: of a process that is gone nothing is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.cache.engine_copy import Way, told_s
from kvd.errors import Code, Refusal
from kvd.wire import events

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.core.inputs import WorkerCopies
    from kvd.core.outbox import Outbox
    from kvd.wire.attach import CopyEnds, CopyWaits

MOST_LATE = 1024
"""Of one process."""


@mypyc_attr(allow_interpreted_subclasses=True)
class MarkWait:
    """One order whose mark is late; ``until_s``: then it is given up."""

    __slots__ = (
        *("call", "device", "lease", "n_pages", "rank", "ranks", "session", "since_s", "until_s"),
        *("way", "worker"),
    )

    def __init__(self, got: WorkerCopies, message: CopyWaits, at_s: float) -> None:
        self.worker, self.call = got.worker, message.call
        self.session, self.lease = got.session, message.lease
        self.way = Way.SAVE if message.to_pages else Way.LOAD
        self.n_pages = message.n_pages
        self.rank, self.ranks = got.rank, got.ranks
        self.device = message.device
        self.since_s = at_s - max(0, message.waited_us) / 1e6
        self.until_s = at_s + max(0, message.left_us) / 1e6

    def told(self, engine: str, at_s: float) -> str:
        """In words, for whoever asks."""
        rank = f" rank {self.rank}" if self.ranks > 1 else ""
        where = f" on {self.device}" if self.device else ""
        within = told_s(self.until_s - self.since_s)
        # Its process says that it gives up; one that is stopped says nothing.
        until = f"until {within}" if at_s <= self.until_s else f"which was to end after {within}"
        pages = f"{self.n_pages} pages" if self.n_pages != 1 else "1 page"
        return (
            f"a {self.way.value} of {pages} of lease {self.lease} waits for the mark of "
            f"{engine}{rank}{where} since {told_s(at_s - self.since_s)}, {until}"
        )


def _since(wait: MarkWait) -> float:
    return wait.since_s


@mypyc_attr(allow_interpreted_subclasses=True)
class MarkWaits:
    """Those of all engines, by the process and the number it gave them; a few, or none."""

    def __init__(self, name: str, out: Outbox) -> None:
        self.by_worker: dict[int, dict[int, MarkWait]] = {}
        self._name = name
        self._out = out

    def __iter__(self) -> Iterator[MarkWait]:
        """Each of them, the oldest first."""
        # Of a process they come in any order too: one that waits for longer may be told later.
        waits = [wait for own in self.by_worker.values() for wait in own.values()]
        return iter(sorted(waits, key=_since))

    def of_lease(self, lease: int) -> list[MarkWait]:
        """Those that are to copy its pages."""
        return [wait for wait in self if wait.lease == lease]

    def of_session(self, session: int) -> list[MarkWait]:
        """Those of one engine."""
        return [wait for wait in self if wait.session == session]

    def begin(self, got: WorkerCopies, message: CopyWaits) -> Refusal | None:
        """It waits; or why that is not noted."""
        own = self.by_worker.get(got.worker, {})
        if len(own) >= MOST_LATE or message.call in own:
            why = f"{len(own)} orders of this process that wait are known, {MOST_LATE} at most"
            return Refusal(Code.NO_ROOM, why, side=self._name, numbers={"waits": len(own)})
        if message.device and not message.device.isprintable():
            why = "the name of its device is not printable"
            return Refusal(Code.BAD_REQUEST, why, side=self._name)
        self.by_worker.setdefault(got.worker, {})[message.call] = MarkWait(
            got, message, self._out.at_s
        )
        return None

    def over(self, worker: int, call: int) -> MarkWait | None:
        """It waits no more; None where it was not known."""
        own = self.by_worker.get(worker)
        wait = own.pop(call, None) if own is not None else None
        if not own:
            self.by_worker.pop(worker, None)
        return wait

    def given_up(self, got: WorkerCopies, message: CopyEnds) -> bool:
        """Whether that was the end of an order which never began."""
        wait = self.over(got.worker, message.copy)
        if wait is None:
            return False
        waited_us = max(0, message.waited_us)
        self._out.emit(
            events.EngineCopied(
                session=wait.session,
                lease=wait.lease,
                way=wait.way.value,
                device=wait.device,
                rank=wait.rank,
                pages=wait.n_pages,
                n_bytes=0,
                waited_us=waited_us,
                moved_us=0,
                why=message.why or "it says no reason",
                mark_us=waited_us,
            )
        )
        return True

    def gone(self, worker: int) -> None:
        """Its process is gone."""
        self.by_worker.pop(worker, None)

    def session_gone(self, session: int) -> None:
        """The last process of an engine is gone."""
        for worker in {wait.worker for wait in self.of_session(session)}:
            self.gone(worker)
