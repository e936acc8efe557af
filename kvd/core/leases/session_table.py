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
    from kvd.core.inputs import ClientJoined, FormerSession
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
        *("dead_ranks", "hang_up", "id", "is_former", "is_whole", "keeps_blocks", "kind", "name"),
        *("pids", "prompts", "since_s"),
    )

    def __init__(
        self, session_id: int, name: str, since_s: float, budget: PromptBudget | None = None
    ) -> None:
        self.id = session_id
        self.name = name
        self.kind = ""
        """What the engine is, as it says: ``vllm 0.32.0``; empty where it does not say."""
        self.pids: list[int] = []
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
        session.saw(got.pid)
        session.kind = session.kind or got.kind
        if got.keeps_blocks:
            self.keeps_blocks(session)
        self._out.emit(events.ClientAttached(session=session.id, name=session.name, pid=got.pid))

    def awaits(self, former: FormerSession) -> None:
        """It was there before the restart; its engine may come back."""
        session = self._open(former.id, former.name)
        # At least one: what is told of its end names the last.
        session.pids = list(former.pids) or [0]
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
