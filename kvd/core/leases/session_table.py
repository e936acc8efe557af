"""The sessions that live, by number: each an engine, with the processes that map the pool for it.

What lives here: who is there, and why one is served no more. What must not: what happens to leases
and handoffs when one ends (``sessions``).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import msgspec

from kvd.core.leases.prompts import PromptBudget, ToldPrompts
from kvd.errors import Code, Refusal
from kvd.wire import events

if TYPE_CHECKING:
    from kvd.core.inputs import ClientJoined, FormerSession, ProcessesNow
    from kvd.core.outbox import Outbox


MOST_GONE: Final = 256
"""Sessions that are over and whose names are known still."""


class HangUp(msgspec.Struct, frozen=True):
    """Why and since when a session is served no more."""

    why: Refusal
    since_s: float


class DeadRank:
    """A process that wrote a part of every page is gone, of so many."""

    __slots__ = ("at_s", "ranks", "why")

    def __init__(self, at_s: float, ranks: int, why: str) -> None:
        self.at_s = at_s
        self.ranks = ranks
        self.why = why


class Session:
    """One engine: its name, and the processes that map the pool for it."""

    __slots__ = (
        *("dead_ranks", "ended", "hang_up", "heirs", "id", "is_former", "is_whole"),
        *("keeps_blocks", "kind", "name", "opener", "pids", "prompts", "since_s"),
    )

    def __init__(
        self, session_id: int, name: str, since_s: float, budget: PromptBudget | None = None
    ) -> None:
        self.id = session_id
        self.name = name
        self.kind = ""
        """What the engine is, as it says: ``vllm 0.32.0``; empty where it does not say."""
        self.pids: list[int] = []
        """Of its processes, as they came; of one that is dead and has heirs, theirs."""
        self.opener = 0
        """Of the process that opened it, or came back for it: it alone ends leases."""
        self.heirs: dict[int, int] = {}
        """Forked children that have the connection of a process that is dead: pid to its pid."""
        self.ended: dict[int, float] = {}
        """The opener and those with heirs: when each was found gone, while others are here."""
        self.since_s = since_s
        self.dead_ranks: dict[int, DeadRank] = {}
        """By rank; one that speaks again is none."""
        self.is_former = False
        """Whether it is of before the restart, and its engine has not come back yet."""
        self.is_whole = True
        """Whether no process of before the restart is away that may still copy pages."""
        self.keeps_blocks = False
        """Whether its KV is in blocks of its own first, as one of its processes has said."""
        self.prompts = ToldPrompts(budget)
        self.hang_up: HangUp | None = None
        """Of the daemon on it, while processes of it live; ``pids`` are those then."""

    def saw(self, pid: int) -> None:
        """One more process of it, or one that was known from before the restart."""
        if pid not in self.pids:
            self.pids.append(pid)

    @property
    def is_outlived(self) -> bool:
        """Whether its opener is gone for good: what it holds is free when the others end."""
        return self.opener in self.ended and not self.is_former and self.hang_up is None

    def told_pid(self, pid: int, at_s: float) -> str:
        """A process of it, and what makes it one where it has not come by itself."""
        parent = self.heirs.get(pid, pid)
        if parent not in self.ended:
            return f"pid {pid}"
        ended = f"pid {parent}, which ended {at_s - self.ended[parent]:.1f} s ago"
        return ended if pid == parent else f"pid {pid}, forked from {ended}"

    def told_keeper(self, at_s: float) -> str:
        """The first of its processes, and that its opener is gone where others outlive it."""
        first = self.pids[0]
        said = self.told_pid(first, at_s)
        if not self.is_outlived or self.opener in {first, self.heirs.get(first)}:
            return said
        gone_s = at_s - self.ended[self.opener]
        return f"{said}; pid {self.opener}, which opened it, ended {gone_s:.1f} s ago"

    def told_outlived(self, at_s: float) -> str:
        """Who keeps it though its opener is gone, and what ends that; empty where that is here."""
        if not self.is_outlived:
            return ""
        more = f" and {len(self.pids) - 1} more" if len(self.pids) > 1 else ""
        return f"{self.told_keeper(at_s)}{more}: {self.told_stop()}"

    def told_stop(self) -> str:
        """Which processes to stop, so that what it holds is free."""
        if self.opener in self.pids:
            return "stop what it has forked (ss -xp as root names it)"
        return f"stop {' and '.join([f'pid {pid}' for pid in self.pids])}"


class SessionTable:
    """The living sessions, by number."""

    def __init__(self, name: str, max_told_bytes: int, by_word: set[int], out: Outbox) -> None:
        self.by_id: dict[int, Session] = {}
        self.name = name
        """This node's."""
        self.gone: OrderedDict[int, str] = OrderedDict()
        """Names of sessions that are over: what they wrote or missed may be told of yet."""
        self.prompts = PromptBudget(max_told_bytes)
        self._by_word = by_word
        self._out = out

    def _open(self, number: int, name: str) -> Session:
        session = self.by_id[number] = Session(number, name, self._out.at_s, self.prompts)
        return session

    def end(self, session: Session) -> None:
        """It is none of them any more, and what was kept of its prompts goes."""
        self._by_word.discard(session.id)
        if self.by_id.pop(session.id, None) is not None:
            session.prompts.end()
            self.gone[session.id] = session.name
            if len(self.gone) > MOST_GONE:
                self.gone.popitem(last=False)

    def joined(self, got: ClientJoined) -> None:
        """A process opened the session or joined it."""
        session = self.by_id.get(got.session)
        if session is None:
            session = self._open(got.session, got.name)
            session.opener = got.pid
        session.saw(got.pid)
        session.kind = session.kind or got.kind
        if got.keeps_blocks:
            self.keeps_blocks(session)
        self._out.emit(events.ClientAttached(session=session.id, name=session.name, pid=got.pid))

    def kept_by(self, got: ProcessesNow) -> None:
        """Processes of it are gone, and these are left."""
        session = self.by_id.get(got.session)
        if session is None:
            return
        left = [pid for pid in session.pids if pid in got.pids]
        session.pids = left + [pid for pid in got.pids if pid not in left] or session.pids
        session.heirs = {heir.pid: heir.of_pid for heir in got.heirs if heir.pid}
        gone = {heir.of_pid for heir in got.heirs}
        if session.opener not in got.pids:
            gone.add(session.opener)
        was_outlived = session.is_outlived
        session.ended = {pid: session.ended.get(pid, got.at_s) for pid in sorted(gone)}
        if session.is_outlived and not was_outlived:
            self._out.emit(
                events.ClientOutlived(
                    session=session.id,
                    name=session.name,
                    pid=session.opener,
                    pids=tuple(session.pids),
                )
            )

    def awaits(self, former: FormerSession) -> None:
        """It was there before the restart; its engine may come back."""
        session = self._open(former.id, former.name)
        # At least one: what is told of its end names the last.
        session.pids = list(former.pids) or [0]
        session.opener = session.pids[0]
        session.keeps_blocks = former.keeps_blocks
        session.is_former = True
        session.is_whole = False

    def keeps_blocks(self, session: Session) -> None:
        """Nothing but what is saved or said is written of its leases, from now on."""
        session.keeps_blocks = True
        self._by_word.add(session.id)

    def came_back(self, session: Session, *, is_whole: bool) -> None:
        """It is here again; ``is_whole``: with each process that it had.

        One that is not may have said that it keeps blocks, and go on saving.
        """
        session.is_whole = is_whole
        if session.keeps_blocks or not is_whole:
            self._by_word.add(session.id)
        else:
            self._by_word.discard(session.id)

    def refusal(self, number: int) -> Refusal | None:
        """Why no request of that session is served; None where one is."""
        session = self.by_id.get(number)
        if session is None:
            why = "this session is over: attach again"
            return Refusal(Code.UNKNOWN_SESSION, why, side=self.name)
        return session.hang_up.why if session.hang_up is not None else None
