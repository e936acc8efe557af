"""Asking the daemon and waiting for what it says, the same for the loop and for a blocking thread.

The verbs in ``api`` are coroutines over a ``Port``. On an event loop its channel suspends them; in
the blocking client they say what they wait for, and a ``PendingCall`` steps them. So there is one
copy of every verb.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvd.client.returning import RETURN_WITHIN_S
from kvd.client.state import LeaseView
from kvd.errors import Code, KvdError, Refusal

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from kvd.client.connection import Call, Connection, KnownPrompt
    from kvd.client.state import Answer, News, Record, Slot
    from kvd.types import Tokens
    from kvd.wire import client as wire

A = TypeVar("A", bound="Answer")
T = TypeVar("T")

ANSWER_WITHIN_S = 10.0
"""For calls that never wait for room or for a peer: by then the daemon is stuck or gone."""

MARGIN_S = 5.0
"""Added to a request's own deadline: the daemon answers at that deadline, and says more than we."""

AT_ONCE_S = 0.25
"""The margin of a deadline of 0, for whoever must not wait: a daemon that is well needs a tenth of
a millisecond, and one that is busy for longer than this is of no use now. That of a longer deadline
is ten times the deadline, up to ``MARGIN_S``."""

STOPPED_S = 0.02
"""After so much of it a daemon whose process was stopped is waited for no longer."""

MAX_DEADLINE_S = 24 * 3600.0


class Channel(Protocol):
    """The sockets of one session, and a way to wait for what they bring."""

    def flush(self) -> None:
        """Send what the connection has queued; never blocks."""
        ...

    def wait(self, slot: Slot[Any], within_s: float) -> Awaitable[None]:
        """Return when ``slot`` is filled or the time is up, whichever is first."""
        ...

    def look(self) -> None:
        """See whether the daemon has hung up; never blocks."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether the daemon's process is known to have been stopped, by a signal or a debugger."""
        ...

    def close(self) -> None:
        """Leave the session; repeatable."""
        ...


class Port:
    """One session: its connection and the channel under it."""

    def __init__(
        self, connection: Connection, channel: Channel, return_within_s: float = RETURN_WITHIN_S
    ) -> None:
        """``return_within_s``: how long a call waits for a daemon that is away."""
        self.called = "this one"
        """The session, for refusals."""
        self.connection = connection
        self._channel = channel
        self.look = channel.look
        """Take note of it if the daemon has hung up since the last call."""
        self._return_within_s = return_within_s

    async def perform(
        self,
        request: wire.Request,
        *,
        tokens: Tokens | None = None,
        about: Record | None = None,
        lease: LeaseView | None = None,
        known: KnownPrompt | None = None,
        within_s: float = ANSWER_WITHIN_S,
        has_looked: bool = False,
    ) -> Call:
        """Send a request and wait for its answer; when the caller goes away, it is undone.

        While the daemon is away it waits for its return first.

        Args:
            request: its ``call`` comes from ``next_call``.
            tokens: the tokens frame of a request that has one.
            about: the record of the handle that it is about.
            lease: the record that its answer changes, where it is about another one.
            known: where ``tokens`` go on with a prompt that the daemon keeps.
            within_s: longest wait for the answer.
            has_looked: whether the caller has just had a ``look``.

        Raises:
            KvdError: the daemon refused, is gone, or has not answered ``within_s``; or what it is
                about is of before a restart.
        """
        # One coroutine for all of it: each further one costs every wait for an answer.
        channel, connection = self._channel, self.connection
        if not has_looked:
            channel.look()
        if connection.end is not None:
            raise KvdError(connection.end)
        if about is not None and about.lost is not None:
            raise KvdError(about.lost)
        if connection.back is not None:
            await self._returned(connection.back, within_s)
        if isinstance(about, LeaseView):
            lease = about
        call = connection.begin(request, tokens, lease, known)
        try:
            channel.flush()
            first_s = within_s if within_s > AT_ONCE_S else min(within_s, STOPPED_S)
            await channel.wait(call.answer, first_s)
            # Who must not wait does so for no process that is stopped.
            if call.answer.value is None and first_s < within_s and not channel.is_stopped:
                await channel.wait(call.answer, within_s - first_s)
        except BaseException:
            self._abandon(call)
            raise
        answer = call.answer.value
        if answer is None:
            self._abandon(call)
            raise _silent(type(request).__name__, within_s)
        if isinstance(answer, Refusal):
            raise KvdError(answer)
        return call

    async def ask(
        self,
        request: wire.Request,
        kind: type[A],
        *,
        tokens: Tokens | None = None,
        about: Record | None = None,
        within_s: float = ANSWER_WITHIN_S,
        has_looked: bool = False,
    ) -> A:
        """``perform``, and the answer, which must be of ``kind``."""
        call = await self.perform(
            request, tokens=tokens, about=about, within_s=within_s, has_looked=has_looked
        )
        answer = call.answer.value
        if isinstance(answer, kind):
            return answer
        self._abandon(call)
        raise confused(request, answer)

    async def arrived(self, slot: Slot[T], within_s: float, what: str) -> T:
        """The value of ``slot``, once it is there.

        Raises:
            KvdError: ``deadline`` when it is not there in time; ``what`` says what was awaited.
        """
        if slot.value is None:
            await self._channel.wait(slot, within_s)
        if slot.value is None:
            raise _silent(what, within_s)
        return slot.value

    async def idle(self, slot: Slot[Any], within_s: float) -> None:
        """Wait for ``slot`` without minding the time."""
        if slot.value is None:
            await self._channel.wait(slot, within_s)

    async def _returned(self, back: Slot[News], within_s: float) -> None:
        """Wait for a daemon that is away."""
        longest_s = min(within_s, self._return_within_s)
        if longest_s > 0:
            await self._channel.wait(back, longest_s)
        if self.connection.back is not None:
            raise KvdError(_away(longest_s))

    def begin(
        self,
        request: wire.Request,
        *,
        tokens: Tokens | None = None,
        about: LeaseView,
        has_looked: bool = False,
    ) -> Call:
        """Send a request for whose answer nobody waits; it changes what is known as any other.

        ``has_looked`` as in ``perform``.

        Raises:
            KvdError: nobody can be asked, or what it is about is of before a restart.
        """
        connection = self.connection
        if not has_looked:
            self._channel.look()
        if connection.end is not None:
            raise KvdError(connection.end)
        if about.lost is not None:
            raise KvdError(about.lost)
        if connection.back is not None:
            raise KvdError(_away(0.0))
        call = connection.begin(request, tokens, about)
        self._channel.flush()
        return call

    def tell(self, request: wire.Request) -> None:
        """Send a request whose answer nobody needs."""
        self.connection.tell(request)
        self._channel.flush()

    def close(self) -> None:
        """Leave the session: the daemon releases what this process held, if it was the last."""
        if self.connection.end is None:
            # The daemon may have been restarted since: the one that is back is told, too.
            with contextlib.suppress(KvdError):
                self._channel.look()
        self.connection.fail_all(
            Refusal(Code.UNREACHABLE, "this node was closed: connect again", side="client")
        )
        self._channel.close()

    def _abandon(self, call: Call) -> None:
        self.connection.abandon(call)
        self._channel.flush()


def within(deadline_s: float) -> float:
    """How long to wait for a request with a deadline of its own.

    Raises:
        KvdError: ``bad-request`` when it is negative or no number.
    """
    try:
        is_one = deadline_s >= 0
    except TypeError:
        is_one = False
    if not is_one:
        raise KvdError(
            Refusal(
                Code.BAD_REQUEST,
                f"deadline_s is {deadline_s!r:.100}: it is the longest wait in seconds, 0 or more",
                side="client",
            )
        )
    if 1 <= deadline_s <= MAX_DEADLINE_S:
        return deadline_s + MARGIN_S
    longest_s = min(deadline_s, MAX_DEADLINE_S)
    return longest_s + min(MARGIN_S, max(AT_ONCE_S, 10 * longest_s))


def confused(request: wire.Request, answer: object) -> KvdError:
    """The daemon answered something else than the protocol says."""
    return KvdError(
        Refusal(
            Code.INTERNAL,
            f"the daemon answered {type(request).__name__} with {type(answer).__name__}: install "
            "the same version of kvd on both sides",
            side="client",
        )
    )


def foreign(port: Port, what: str, fix: str) -> Refusal:
    """Why a handle of another node is of no use at this one: its number means nothing here."""
    return Refusal(
        Code.BAD_REQUEST,
        f"this {what} was made by another node than {port.called}, which knows nothing of it: "
        f"{fix}",
        side="client",
    )


def unread() -> Refusal:
    """Why a message could not be sent: thousands of earlier ones are still unread."""
    return Refusal(
        Code.UNREACHABLE,
        "the daemon does not read: thousands of requests wait in its socket; look at `kvd status`",
        side="client",
    )


def _away(waited_s: float) -> Refusal:
    """Why nothing can be asked now."""
    back = f"was not back within {waited_s:.1f} s" if waited_s else "is not back yet"
    return Refusal(
        Code.UNREACHABLE,
        f"the daemon ended and {back}: look at `systemctl status "
        "kvd`; this node goes on looking for it, and what it holds stays held",
        side="client",
        numbers={"within_s": waited_s},
    )


def _silent(what: str, within_s: float) -> KvdError:
    return KvdError(
        Refusal(
            Code.DEADLINE,
            f"no answer from the daemon within {within_s:.3g} s ({what}): it is stopped, stuck or "
            "overloaded; look at `kvd status`",
            side="client",
            numbers={"within_s": within_s},
        )
    )
