"""The session with the daemon: opened, lost, found again and left beside the engine's steps.

What lives here: one session's sockets as the connector uses them, so that whatever they raise is a
``KvdError`` and known to be of that session, and which session there is now. What must not: leases
and requests; who holds handles of a session that is over is told so, and drops them.

A session has several lives: another one begins when the daemon was restarted and came back with the
same memory. Leases of before can be released then, and nothing else::

    nobody --opened--> here --the daemon ended--> away --with the same memory--> here, another life
       ^                 '--- over ---.             '--- with other memory ---.
       '------ left, closed beside <--'---------------------------------------'
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, ParamSpec, TypeVar

from kvd.client import Code, KvdError
from kvd.connectors.refusals import BROKEN, is_users_to_mend, refused_here
from kvd.connectors.vllm.beside import BesideTask, in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvd.client import PendingCall, SyncNode
    from kvd.connectors.vllm.beside import Start
    from kvd.connectors.vllm.log import ConnectorLog

P = ParamSpec("P")
T = TypeVar("T")

OVER: Final = frozenset({Code.POOL_CHANGED.value, Code.UNKNOWN_SESSION.value})
"""Of these the session is over, whatever call ends in them."""

RETRY_S: Final = 0.5
"""A daemon that is not there is looked for so often."""

UNFIT_RETRY_S: Final = 60.0
"""So often where its pool does not fit: that changes by a restart with another configuration."""

OPEN_WITHIN_S: Final = 1.0
"""An engine that starts waits so long at most for its session."""

SILENT_S: Final = 0.25
"""A daemon that has not answered a look-up for so long is stopped, or overloaded."""

IDLE_WAIT_S: Final = 0.005
"""So long a step that computes nothing waits for another node, and for a load; vLLM would sleep and
turn for nothing, and look a millisecond or two behind the answer."""

PAUSE_S: Final = 50e-6
"""Between two looks for an answer that is waited for."""


class StepBudget:
    """How long one step of the engine may wait for answers, all of them together."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = self._left_s = wait_s
        self._idle_left_s = 0.0

    def renew(self, *, is_idle: bool = False) -> None:
        """The next step begins; ``is_idle``: the last one had nothing to compute."""
        self._left_s = self._wait_s
        self._idle_left_s = IDLE_WAIT_S if is_idle and self._wait_s > 0 else 0.0

    def answered(self, link: NodeLink, call: PendingCall[T], *, is_idle: bool = False) -> T | None:
        """The outcome of a call, if it is here, or comes while there is time left.

        Args:
            link: of its session.
            call: that call.
            is_idle: wait as long as a step that has nothing else to do.

        Raises:
            KvdError: it ended in it.
        """
        found = link.poll(call)
        left_s = max(self._left_s, self._idle_left_s) if is_idle else self._left_s
        if found is not None or left_s <= 0:
            return found
        began_s = time.perf_counter()
        try:
            return link.wait(call, left_s)
        finally:
            took_s = time.perf_counter() - began_s
            self._left_s -= took_s
            self._idle_left_s -= took_s

    def heard(self, poll: Callable[[], T | None]) -> T | None:
        """What ``poll`` says, if it says something now, or while there is time left."""
        found = poll()
        if found is not None or self._left_s <= 0:
            return found
        began_s = time.perf_counter()
        end_s = began_s + self._left_s
        while found is None and time.perf_counter() < end_s:
            time.sleep(PAUSE_S)
            found = poll()
        self._left_s -= time.perf_counter() - began_s
        return found


class NodeLink:
    """One session, as long as its ``SyncNode`` lives: whatever it raises is of this one alone."""

    def __init__(self, node: SyncNode) -> None:
        self.node = node
        self.name = node.name
        self.failures = 0
        """Calls that ended in an error, since somebody asked."""
        self.is_broken = False
        """It can be used no more."""
        self.is_silent = False
        """The daemon lives, and does not answer."""
        self.was_silent = False
        """Whether that was told."""
        self._ping: PendingCall[Any] | None = None
        self._ping_s = 0.0
        self._quiet: dict[PendingCall[Any], Callable[[], object] | None] = {}

    def ask(
        self, begin: Callable[P, PendingCall[T]], *args: P.args, **more: P.kwargs
    ) -> PendingCall[T]:
        """Begin a call.

        Raises:
            KvdError: it cannot be begun.
        """
        try:
            return begin(*args, **more)
        except KvdError as error:
            self._note(error)
            raise
        except BROKEN as error:
            raise self._broke(error) from error

    def wait(self, call: PendingCall[T], within_s: float) -> T | None:
        """The outcome of a call, if there is one by then.

        Raises:
            KvdError: it ended in it.
        """
        try:
            return call.wait(within_s)
        except KvdError as error:
            self._note(error)
            raise
        except BROKEN as error:
            raise self._broke(error) from error

    def poll(self, call: PendingCall[T]) -> T | None:
        """The outcome of a call; None while there is none.

        Raises:
            KvdError: it ended in it.
        """
        try:
            return call.poll()
        except KvdError as error:
            self._note(error)
            raise
        except BROKEN as error:
            raise self._broke(error) from error

    def cancel(self, call: PendingCall[Any]) -> None:
        """Nobody wants its outcome: what it gets is given back."""
        try:
            call.cancel()
        except KvdError as error:
            self._note(error)
        except BROKEN as error:
            self._broke(error)

    def quietly(
        self,
        begin: Callable[..., PendingCall[Any]],
        *args: Any,
        otherwise: Callable[[], object] | None = None,
        **more: Any,
    ) -> None:
        """Begin a call whose outcome nobody waits for; ``otherwise``: what to do if it fails."""
        try:
            call = self.ask(begin, *args, **more)
        except KvdError:
            if otherwise is not None:
                otherwise()
            return
        self._quiet[call] = otherwise
        if call.is_done:
            self._ended(call)

    def say(self, verb: Callable[P, None], *args: P.args, **more: P.kwargs) -> bool:
        """What has no outcome; whether it could be said."""
        try:
            verb(*args, **more)
        except KvdError as error:
            self._note(error)
            return False
        except BROKEN as error:
            self._broke(error)
            return False
        return True

    def send_gathered(self) -> None:
        """Have what was said since ``gather`` of its node leave."""
        self.say(self.node.send_gathered)

    def look(self, now_s: float) -> None:
        """Read and write what there is, and take note of calls that nobody waits for."""
        ended: list[PendingCall[Any]] = []
        try:
            ended = self.node.pump()
        except KvdError as error:
            self._note(error)
        except BROKEN as error:
            self._broke(error)
        for call in ended:
            self._ended(call)
        self._hear(now_s)

    def _ended(self, call: PendingCall[Any]) -> None:
        """If nobody waits for it, what to do if it failed."""
        if call not in self._quiet:
            return
        otherwise = self._quiet.pop(call)
        try:
            self.poll(call)
        except KvdError:
            if otherwise is not None:
                otherwise()

    def doubt(self, now_s: float) -> None:
        """Something was not answered in time: find out whether anything is."""
        if self._ping is None:
            try:
                self._ping = self.ask(self.node.begin_match, [0])
                self._ping_s = now_s
            except KvdError:
                return

    def silent_s(self, now_s: float) -> float:
        """For how long something has been asked that was not answered yet."""
        return now_s - self._ping_s if self._ping is not None else 0.0

    def _hear(self, now_s: float) -> None:
        if self._ping is None:
            return
        try:
            if self.poll(self._ping) is not None:
                self._ping, self.is_silent = None, False
            elif now_s - self._ping_s >= SILENT_S:
                self.is_silent = True
        except KvdError:
            # After its own time a call ends: that is no answer, and another one is asked.
            self._ping = None
            if self.is_silent:
                self.doubt(now_s)

    def _note(self, error: KvdError) -> None:
        self.failures += 1
        self.is_broken = self.is_broken or error.code in OVER

    def _broke(self, error: Exception) -> KvdError:
        self.failures += 1
        self.is_broken = True
        why = f"the session's sockets are closed ({error}): it is over"
        return refused_here(Code.UNREACHABLE, why)


class DaemonLife(NamedTuple):
    """A session in one life of its daemon."""

    session: int
    incarnation: str


NO_LIFE: Final = DaemonLife(0, "")


class SessionLife:
    """Which session there is now: one at a time.

    Args:
        connect: opens one, or raises ``KvdError``; may take long.
        log: where changes are told.
        now_s: a clock.
        start: has work done beside the step.
    """

    def __init__(
        self,
        connect: Callable[[], SyncNode],
        log: ConnectorLog,
        *,
        now_s: Callable[[], float] = time.monotonic,
        start: Start = in_thread,
    ) -> None:
        self.link: NodeLink | None = None
        """Of the daemon that is there, or is looked for by its session itself."""
        self.life = NO_LIFE
        """The session's now; ``NO_LIFE`` while there is nobody to ask."""
        self.failures = 0
        self._connect = connect
        self._log = log
        self._now_s = now_s
        self._start = start
        self._opening: BesideTask[SyncNode] | None = None
        self._next_try_s = now_s()
        self._left: list[NodeLink] = []

    @property
    def token(self) -> bytes:
        """Of the session that there is, or that may come back; empty: there is none."""
        return self.link.node.token if self.link is not None else b""

    def open_first(self) -> None:
        """Open a session as the engine starts; wait for it, but not for a daemon that hangs.

        Raises:
            KvdError: ``layout-mismatch``: the pool does not fit; ``bad-request``: there is no such
                pool, or this is no endpoint.
        """
        self._open()
        if self._opening is not None:
            self._opening.ended(OPEN_WITHIN_S)
        self._take_opened(is_first=True)
        if self._opening is not None:
            self._log.changed(
                "session",
                logging.WARNING,
                "the daemon has not answered yet: requests are computed without kvd until it does",
            )

    def look(self) -> None:
        """See what has become of the session; never waits."""
        now_s = self._now_s()
        link = self.link
        if link is None:
            self._take_opened()
            if self.link is None and self._opening is None and now_s >= self._next_try_s:
                self._open()
            return
        link.look(now_s)
        self.failures, link.failures = self.failures + link.failures, 0
        if link.is_silent or link.was_silent:
            link.was_silent = link.is_silent
            told = (
                "does not answer: requests are computed without kvd"
                if link.is_silent
                else ("answers again")
            )
            self._log.changed("silence", logging.WARNING, f"the daemon {link.name} {told}")
        end = link.node.end
        if end is not None or link.is_broken:
            self.give_up("its session is over" if end is None else str(end))
        elif link.node.is_away:
            if self.life != NO_LIFE:
                self.life = NO_LIFE
                self._say(f"the daemon {link.name} has ended", "and it is looked for")
        elif link.node.life != self.life:
            link.is_silent = False
            self.life = DaemonLife(*link.node.life)
            self._log.changed(
                "session",
                logging.INFO,
                f"session {link.node.session} with daemon {link.name}: it is back, with the same "
                "memory",
            )

    def give_up(self, why: str, *, retry_s: float = 0.0) -> None:
        """The session is of no use: leave it, and open another one.

        It is closed by ``close_left``, once nobody uses handles of it.
        """
        link, self.link, self.life = self.link, None, NO_LIFE
        if link is not None:
            self._left.append(link)
            self._next_try_s = self._now_s() + retry_s
            then = f"in {retry_s:g} s" if retry_s else "now"
            self._say(
                f"the session with daemon {link.name} is over: {why}",
                f"and another one is opened {then}",
            )

    def close_left(self, handles: Iterable[PendingCall[Any]] = ()) -> None:
        """Close sessions that were given up, beside the step; ``handles``: their calls."""
        left, self._left = self._left, []
        calls = list(handles)
        if left:
            BesideTask(lambda: _close(left, calls), start=self._start)

    def close(self) -> None:
        """Leave, for good."""
        if self._opening is not None:
            self._opening.abandon()
            self._opening = None
        link, self.link, self.life = self.link, None, NO_LIFE
        self._next_try_s = float("inf")
        if link is not None:
            _close([link], ())

    def _say(self, what: str, then: str) -> None:
        self._log.changed(
            "session", logging.WARNING, f"{what}; requests are computed without kvd, {then}"
        )

    def _open(self) -> None:
        self._opening = BesideTask(self._connect, _leave, self._start)

    def _take_opened(self, *, is_first: bool = False) -> None:
        opening = self._opening
        if opening is None or not opening.ended():
            return
        self._opening = None
        self._next_try_s = self._now_s() + RETRY_S
        try:
            node = opening.take()
        except (KvdError, *BROKEN) as error:
            is_unfit = is_users_to_mend(error)
            if is_unfit and is_first:
                raise
            self._not_opened(error, is_unfit=is_unfit)
            return
        self.link = NodeLink(node)
        self.life = DaemonLife(*node.life)
        self._log.changed(
            "session", logging.INFO, f"session {node.session} with daemon {node.name} is open"
        )

    def _not_opened(self, error: Exception, *, is_unfit: bool) -> None:
        self.failures += 1
        if is_unfit:
            self._next_try_s = self._now_s() + UNFIT_RETRY_S
        every_s = UNFIT_RETRY_S if is_unfit else RETRY_S
        self._log.changed(
            "session",
            logging.ERROR if is_unfit else logging.WARNING,
            f"no session: {error}; requests are computed without kvd, and it is tried again every "
            f"{every_s:g} s",
        )


def _leave(node: SyncNode) -> None:
    node.close()


def _close(links: Iterable[NodeLink], calls: Iterable[PendingCall[Any]]) -> None:
    """Cancel what is under way and leave; nobody else uses them any more."""
    calls = list(calls)
    for link in links:
        for call in calls:
            link.cancel(call)
        try:
            link.node.close()
        except (KvdError, *BROKEN):
            continue
