"""What a client remembers between two messages: slots, and one record per handle.

No socket, no loop, no clock: ``connection`` fills these in, the handles in ``api`` read them.
"""

from __future__ import annotations

import collections
import enum
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec
import numpy as np

from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from kvd.wire import client as wire
    from kvd.wire.client import Accepted, PagesBack, Received, Resumed
    from kvd.wire.events import Event

    Answer = (
        wire.Leased
        | wire.PageTable
        | wire.Done
        | wire.Receiving
        | wire.Sending
        | wire.Finished
        | wire.MatchReply
        | wire.Snapshotted
        | wire.Retracted
        | wire.Resumed
        | wire.FetchReply
        | wire.FlushReport
        | wire.RoomKept
    )
    """To a call."""

T = TypeVar("T")

MAX_EVENTS: Final = 65_536
"""Events kept for a reader that lags; what does not fit is reported as lost."""


class Slot(Generic[T]):
    """A value that comes once. It is kept when it comes before anyone waits for it."""

    # Of the class until they are otherwise: each request makes one, and calls nothing for it.
    value: T | None = None
    _wakes: list[Callable[[], None]] | None = None

    def put(self, value: T) -> None:
        """Fill the slot and wake who waits; the first value stays."""
        if self.value is not None:
            return
        self.value = value
        if self._wakes is not None:
            for wake in self._wakes:
                wake()
            self._wakes = None

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` when the slot is filled."""
        if self._wakes is None:
            self._wakes = [wake]
        else:
            self._wakes.append(wake)

    def forget(self, wake: Callable[[], None]) -> None:
        """Nobody waits there any more; legal at any time."""
        if self._wakes is not None and wake in self._wakes:
            self._wakes.remove(wake)


class LeaseTiers(msgspec.Struct, frozen=True):
    """What tiers below the pool had of a lease's prompt when it was opened.

    ``promoted_tokens`` of its prefix came out of a tier for it; ``tokens`` more lie in a tier
    behind the prefix, and it takes about ``ms`` to have them (0: not measured yet): ask with
    ``tiers="wait"``, or compute them where that is faster.
    """

    promoted_tokens: int = 0
    tokens: int = 0
    ms: float = 0.0


NO_TIERS: Final = LeaseTiers()


class LeaseView:
    """The pages of one lease, as the daemon last said; none while it is retracted.

    ``kv_tokens`` is how far their KV was there when it began, or last resumed. ``beside`` has the
    rows of the other components that have page pools of their own. ``lost`` says why it can only be
    released: it is of before a restart; ``is_kept`` whether its pages are still kept for it then,
    ``is_row_known`` whether those are the pages here: no call that changes them was cut short.
    """

    tiers = NO_TIERS
    is_released = False
    is_retracted = False
    lost: Refusal | None = None
    condemned: Refusal | None = None
    """The daemon found it broken: its pages are not to be used any more."""
    over: Refusal | None = None
    """Why its session is: then its pages are nobody's here, whatever the daemon keeps."""
    is_kept = True
    is_row_known = True
    version = 0
    """Grows when pages that it had become others, so that numbers of before are wrong."""

    def __init__(
        self,
        number: int,
        *,
        prefix_tokens: int,
        pages: bytes,
        beside: tuple[bytes, ...] = (),
    ) -> None:
        self.number = number
        self.prefix_tokens = prefix_tokens
        self.kv_tokens = prefix_tokens
        self.row = pages
        """The bytes of ``pages``."""
        self._beside = beside

    def replace(self, first: int, pages: bytes, beside: tuple[bytes, ...]) -> None:
        """The daemon's row from page index ``first`` on; the rows ``beside`` are whole."""
        former, former_beside = self.row, self._beside
        self.row = former[: first * ID_BYTES] + pages
        self._beside = beside
        if not self.row.startswith(former) or any(
            not now.startswith(before) for before, now in zip(former_beside, beside, strict=False)
        ):
            self.version += 1

    def retracted(self) -> None:
        """The daemon has taken the pages back."""
        self.is_retracted = True
        self.version += 1
        self.row = b""
        self._beside = ()

    def resumed(self, answer: Resumed) -> None:
        """It has pages again."""
        self.is_retracted = False
        self.version += 1
        self.prefix_tokens = answer.prefix_tokens
        self.kv_tokens = answer.kv_tokens
        self.row = answer.pages
        self._beside = answer.beside

    def lose(self) -> None:
        """The daemon has ended: from now on the lease can only be released."""
        self.lost = Refusal(
            Code.BEFORE_RESTART,
            f"lease {self.number} is of before the daemon's restart: its pages stay yours until "
            "you release it, and nothing else can be done with it; release it and open a new one",
            side="client",
            numbers={"lease": self.number},
        )

    @property
    def pages(self) -> NDArray[np.int32]:
        """The page ids, read-only; a later change makes a new array."""
        return np.frombuffer(self.row, dtype="<i4")

    @property
    def beside(self) -> tuple[NDArray[np.int32], ...]:
        """The rows of the other components, read-only; 0 where there is no page."""
        return tuple(np.frombuffer(row, dtype="<i4") for row in self._beside)


class ReceiveState:
    """One receive, from its ``Receiving`` on. ``is_unwanted``: if it is delivered, give it back.

    ``lease`` is its record, once it is delivered; ``lost`` why the daemon knows it no more.
    ``arriving`` is one of before that, of which the first ``arrived_tokens`` are here.
    ``prompt_tokens``: how much of the prompt it will have; None: all of it. ``safe``: of one into
    an arena, filled once no remote can write its pages any more. ``callers``: so many calls have it
    as their answer and their caller still wants it; more than one where it was asked for again.
    """

    def __init__(
        self,
        number: int,
        prefix_tokens: int,
        prompt_tokens: int | None = None,
        *,
        is_in_arena: bool = False,
    ) -> None:
        self.number = number
        self.prefix_tokens = prefix_tokens
        self.promoted_tokens = 0
        self.prompt_tokens = prompt_tokens
        self.outcome: Slot[Received | Refusal] = Slot()
        self.is_unwanted = False
        self.callers = 0
        self.lease: LeaseView | None = None
        self.arriving: LeaseView | None = None
        self.arrived_tokens = 0
        self.lost: Refusal | None = None
        self.safe: Slot[Received | PagesBack | Refusal] | None = Slot() if is_in_arena else None


class SendState:
    """One send, from its ``Sending`` on. ``accepted``: what is to be sent, or the failure.

    ``lost``: why the daemon knows it no more. ``callers`` as in ``ReceiveState``.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.callers = 0
        self.accepted: Slot[Accepted | Refusal] = Slot()
        self.failure: Refusal | None = None
        self.lost: Refusal | None = None

    def fail(self, refusal: Refusal) -> None:
        """The handoff ended before ``finish``; the first reason stays."""
        if self.failure is None:
            self.failure = refusal
        self.accepted.put(refusal)


Record = LeaseView | ReceiveState | SendState
"""What a request is about, if it is about something that the daemon told us of."""


class EventsLost(msgspec.Struct, frozen=True):
    """A gap: ``count`` events before the next one were not delivered, because someone lagged.

    With ``is_restart`` the daemon ended, and how much happened before the next event is not known.
    """

    count: int
    is_restart: bool = False


RESTART: Final = EventsLost(0, is_restart=True)


class News(enum.Enum):
    """What fills the slot of an event queue: look into it."""

    CAME = "came"


class EventQueue:
    """Events for one reader, in order, gaps named.

    Invariant: between two delivered events with a hole in their numbers stands an ``EventsLost``.
    """

    def __init__(self) -> None:
        self.news: Slot[News] = Slot()
        self.end: Refusal | None = None
        self._events: collections.deque[Event | EventsLost] = collections.deque()
        self._next_seq = 0

    def push(self, lost: int, events: Iterable[Event]) -> None:
        """Take what the daemon pushed; ``lost`` of them it had to skip before these."""
        for event in events:
            if not self._next_seq:
                self._next_seq = event.seq - lost
            if len(self._events) < MAX_EVENTS:
                self._events.append(event)
        self.news.put(News.CAME)

    def restarted(self) -> None:
        """What comes from now on is of another life of the daemon, which numbers from 1 again."""
        if not self._events or self._events[-1] is not RESTART:
            self._events.append(RESTART)
        self.news.put(News.CAME)

    def close(self, refusal: Refusal) -> None:
        """Nothing will come any more."""
        self.end = refusal
        self.news.put(News.CAME)

    def take(self) -> Event | EventsLost | None:
        """The next one, or the gap before it; None when there is none now."""
        if not self._events:
            if self.news.value is not None:
                self.news = Slot()
            return None
        event = self._events[0]
        if isinstance(event, EventsLost):
            self._next_seq = 0
            return self._events.popleft()
        missing = event.seq - self._next_seq if self._next_seq else 0
        if missing > 0:
            self._next_seq += missing
            return EventsLost(missing)
        self._events.popleft()
        self._next_seq = event.seq + 1
        return event
