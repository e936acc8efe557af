"""The two sockets of a session and the way back to a daemon that has ended, in steps.

What lives here: what to do when something has come, when the daemon has hung up, and when a time is
there. What must not: waiting, but for a handshake of ``meet``. A ``Watcher`` does that, which is an
event loop or a blocking thread.

Theory of operation. The attach socket says whether the daemon lives, the client stream is only how
it is spoken to. So where the stream breaks alone, it is dialed again; what the daemon cannot have
read goes out on the next connection, and the calls that it may have read end, because their answers
went with the old one. Where nobody is found there for ``NOBODY_S``, calls end, because a file that
was removed does not come back by itself. Where the attach socket is hung up, the stream goes with
it::

    here --stream breaks--> here, dialing
      |---- hung up, and why is retryable --> away --the same memory--> here
      +---- hung up ----> over                  +--- other memory ---> over

A daemon that has ended said everything before it hung up: what it said lies in our socket by then,
and is read before its calls are given up.
"""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from kvd.client.endpoint import attach_path, socket_path
from kvd.client.port import unread
from kvd.client.returning import (
    WayBack,
    go_back,
    leave_former,
    leave_later,
    leave_next,
    leave_with_memory,
    main_way,
)
from kvd.client.stream import ClientStream
from kvd.errors import Code, KvdError, Refusal
from kvd.types import Sent

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.client.attachment import Attachment
    from kvd.client.connection import Connection, Outgoing
    from kvd.zmtp.events import ConnectionClosed

WRITE_NOW_BYTES: Final = 64 * 1024
"""So much is not kept for more of the same turn: a call less is saved then than it costs to have
many prompts in memory at once, which the allocator gives back each time it is rid of them."""

REDIAL_S: Final = 0.1
"""Between two attempts to connect a broken stream to a daemon that lives."""

NOBODY_S: Final = 1.0
"""So long nobody may listen at the client socket of a daemon that lives before calls end."""


class Watcher(Protocol):
    """Who waits for the sockets of a session."""

    gathers: ClassVar[bool]
    """Whether ``write_soon`` is later than now, so that several messages leave with one call."""

    def watch(self, fd: int, act: Callable[[], object]) -> None:
        """Call ``act`` whenever ``fd`` is readable."""
        ...

    def watch_writing(self, fd: int, act: Callable[[], object] | None) -> None:
        """Call ``act`` whenever ``fd``, which is watched, takes more; None: no more."""
        ...

    def unwatch(self, fd: int) -> None:
        """Forget ``fd``, which is about to be closed."""
        ...

    def write_soon(self) -> None:
        """Call ``write`` before anything is waited for."""
        ...

    def read_soon(self) -> None:
        """Call ``read`` again, once others have had a turn: no descriptor tells of what is left."""
        ...

    def step_after(self, pause_s: float) -> None:
        """Call ``step`` once that time has passed, instead of at any time said before."""
        ...


class SessionSockets:
    """What one session speaks through. Takes the attachment over."""

    def __init__(
        self,
        endpoint: str,
        attachment: Attachment,
        connection: Connection,
        name: str,
        watcher: Watcher,
    ) -> None:
        """Nothing is dialed before ``open``."""
        self._endpoint = endpoint
        self._attachment = attachment
        self._connection = connection
        self._name = name
        self._watcher = watcher
        self.way: WayBack | None = None
        """To a daemon that has ended; None while it is there."""
        self._watched_way = -1
        self._broken: ConnectionClosed | None = None
        """Why the stream was dialed again, until it is met; then calls of before it end."""
        self._lost_calls: set[int] = set()
        self._is_writing_watched = False
        self._is_closed = False
        self._was_open = False
        self._may_meet = False
        """Whether nobody has waited for the handshake of this connection."""
        self._nobody_since_s: float | None = None
        """Since when nobody has listened at the client socket, as far as was tried."""
        self._nobody: Refusal | None = None
        """What calls end with, once that has been so for ``NOBODY_S``."""
        self.stream = self._new_stream()

    def open(self) -> None:
        """Speak with the daemon that the attachment is with.

        Raises:
            OSError: the first time, where no descriptor is left for it.
            KvdError: the first time, where nobody listens at the client socket. A daemon listens
                there before it does at the attach socket.
        """
        self._watcher.watch(self._attachment.fileno(), self.look)
        self._dial()
        if not self._was_open:
            if self.stream.nobody:
                raise KvdError(self._nobody_listens())
            leave_former(attach_path(self._endpoint), self._attachment)
        self._was_open = True

    @property
    def is_away(self) -> bool:
        """Whether the daemon has ended, and is looked for."""
        return self.way is not None

    @property
    def is_stopped(self) -> bool:
        """Whether the daemon's process is known to be stopped."""
        return self.way is None and self._attachment.is_daemon_stopped()

    def close(self) -> None:
        """Leave the session; repeatable."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._attachment.is_own:
            self._close_copies()
            return
        self._forget_stream()
        if self.way is None:
            self._unwatch_attachment()
            way = self._way_back()
            self._attachment.close(unheard=lambda before: leave_later(way.leave_there, before))
            return
        self._unwatch_way()
        leave_with_memory(self._way_back())
        end = self._connection.end
        if end is None or end.code is not Code.POOL_CHANGED:
            leave_next(self.way)
        self._attachment.close()

    def _way_back(self) -> WayBack:
        path = attach_path(self._endpoint)
        return main_way(path, self._attachment, self._name, self._connection)

    def _close_copies(self) -> None:
        """A forked child lets go of its descriptors.

        Nothing is said, and nothing is unwatched: what watches may be its parent's, too.
        """
        self.stream.hang_up()
        if self.way is not None:
            self.way.close()
        self._attachment.close()

    # ---- out -------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Have written what the connection has queued; a call that cannot be sent fails.

        In a forked child nothing is sent.
        """
        if not self._attachment.is_own:
            return
        stream, queued = self.stream, self._connection.take_outgoing()
        is_one = len(queued) == 1 and self._nobody is None and not self._watcher.gathers
        if not is_one or stream.write_one(queued[0].frames, queued[0].call) is not Sent.TAKEN:
            for outgoing in queued:
                self._send(stream, outgoing)
        if not stream.unsent_bytes or not stream.has_unsent or stream.is_blocked:
            return
        if stream.unsent_bytes >= WRITE_NOW_BYTES and stream.is_met:
            self.write()
        else:
            self._watcher.write_soon()

    def _send(self, stream: ClientStream, outgoing: Outgoing) -> None:
        # What nobody waits for is kept: what it gives back is else held as long as the session.
        if self._nobody is not None and outgoing.call in self._connection.under_way():
            self._connection.not_sent(outgoing, self._nobody)
            return
        sent = stream.send(outgoing.frames, outgoing.call)
        if sent is Sent.FULL:
            self.write()
            sent = stream.send(outgoing.frames, outgoing.call)
        if sent is not Sent.TAKEN:
            self._connection.not_sent(outgoing, unread())

    def mend(self, within_s: float) -> None:
        """Have what waits leave now, as far as it can; for a watcher that reads now and then only.

        It would find out the next time that the stream has broken, or that the handshake is over.
        ``within_s``: for a handshake, once for each connection.
        """
        stream = self.stream
        if not stream.has_waiting or self.way is not None or not self._attachment.is_own:
            return
        if stream.is_blocked:
            self.write()
        if stream.is_deaf:
            self.read()
        if self.stream.fileno() < 0 and not self.is_away and self._connection.end is None:
            self._dial()
        self.meet(within_s)

    def meet(self, within_s: float) -> None:
        """Wait for a handshake under way, unless that was done for this connection before."""
        end_s = time.monotonic() + within_s
        ready = select.poll()
        while self._may_meet and not self.stream.is_met and self.stream.fileno() >= 0:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                break
            ready.register(self.stream.fileno(), select.POLLIN)
            fd = self.stream.fileno()
            ready.poll(left_s * 1000)
            ready.unregister(fd)
            self.read()
            self.write()
        self._may_meet = False

    def write(self) -> None:
        """Write what the kernel takes; the rest when it takes more."""
        stream = self.stream
        stream.write()
        if stream.is_blocked is not self._is_writing_watched and stream.fileno() >= 0:
            self._is_writing_watched = stream.is_blocked
            act = self.write if stream.is_blocked else None
            self._watcher.watch_writing(stream.fileno(), act)

    # ---- in --------------------------------------------------------------------------------------

    def read(self) -> bool:
        """Take what has come; whether there was anything."""
        try:
            came = self.stream.read(self._connection.feed)
        finally:
            if self.stream.is_left:
                self._watcher.read_soon()
        if self.stream.fault is not None:
            self._stream_broke(self.stream.fault)
        elif self._broken is not None and self.stream.is_met:
            refusal, self._broken = _lost_answers(self._broken), None
            lost, self._lost_calls = self._lost_calls, set()
            self._connection.unanswered(refusal, lost)
        if self._connection.queued or self.stream.unsent_bytes:
            self.flush()
        return came

    def look(self) -> None:
        """See whether the daemon has hung up; then it is away, or all is over.

        Raises:
            KvdError: ``wrong-state`` in a forked child.
        """
        if not self._attachment.is_own:
            self._attachment.require_own()
        if self.way is not None or self._connection.end is not None:
            return
        if not self._attachment.has_news(0):
            return
        why = self._attachment.last_word()
        if why is None:
            return
        while self._connection.is_waiting and self.stream.read(self._connection.feed):
            pass
        # What waits in it must not reach the daemon that is back: nobody waits for its answer.
        self._forget_stream()
        self._unwatch_attachment()
        self._broken, self._lost_calls = None, set()
        if not why.is_retryable:
            self._connection.fail_all(why)
            return
        self.way = self._way_back()
        self._connection.lost(why)
        self._watcher.step_after(0.0)

    # ---- in time ---------------------------------------------------------------------------------

    def hurry(self) -> None:
        """Somebody waits for the daemon that is away: try now, and begin with short pauses."""
        if self.way is not None:
            self.way.pause_s = 0.0
            self._watcher.step_after(0.0)

    def step(self) -> None:
        """What it is time for: to dial again, or the next step of the way back."""
        if self._is_closed:
            return
        way = self.way
        if way is None:
            if self.stream.fileno() < 0 and self._connection.end is None:
                self._dial()
            return
        self._unwatch_way()
        if go_back(way, self._attachment, self._connection):
            self.way = None
            self.stream = self._new_stream()
            self.open()
            self.flush()
        elif self._connection.end is not None:
            return
        elif way.sock is not None:
            self._watched_way = way.sock.fileno()
            self._watcher.watch(self._watched_way, self.step)
        else:
            self._watcher.step_after(way.pause_s)

    def _dial(self) -> None:
        try:
            is_dialed = self.stream.dial()
        except OSError:
            if not self._was_open:
                raise
            is_dialed = False  # there may be a descriptor soon
        self._note_nobody()
        if is_dialed:
            self._may_meet = True
            self._watcher.watch(self.stream.fileno(), self.read)
            self.write()
        else:
            self._watcher.step_after(REDIAL_S)

    def _note_nobody(self) -> None:
        """Whether calls can be sent at all: the daemon lives, but its client socket may be gone."""
        if not self.stream.nobody:
            self._nobody_since_s = self._nobody = None
            return
        now_s = time.monotonic()
        if self._nobody_since_s is None:
            self._nobody_since_s = now_s
        if self._nobody is None and now_s - self._nobody_since_s >= NOBODY_S:
            self._nobody = self._nobody_listens()
            self._broken, self._lost_calls = None, set()
            self._connection.unanswered(self._nobody, self._connection.under_way())

    def _nobody_listens(self) -> Refusal:
        return Refusal(
            Code.UNREACHABLE,
            f"nobody listens at {self._endpoint} ({self.stream.nobody}), and "
            f"{self._attachment.attached.node} lives and answers at the attach socket beside it: "
            "the file of its client socket was removed or replaced; restart that daemon "
            "(`systemctl restart kvd`), and let nothing clean up its directory",
            side="client",
        )

    def _stream_broke(self, why: ConnectionClosed) -> None:
        was_met = self.stream.is_met
        self._forget_stream()
        self.look()
        if self.way is None and self._connection.end is None:
            self._broken = why
            self._lost_calls |= self._connection.under_way() - self.stream.unsent_calls()
            # At once, but not in circles: where it was never met, a pause comes first.
            self._watcher.step_after(0.0 if was_met else REDIAL_S)

    def _new_stream(self) -> ClientStream:
        return ClientStream(socket_path(self._endpoint), self._attachment.route)

    def _forget_stream(self) -> None:
        fd = self.stream.fileno()
        if fd >= 0:
            self._watcher.unwatch(fd)
        self._is_writing_watched = False
        self.stream.hang_up()

    def _unwatch_way(self) -> None:
        """Its socket is closed by the next step, or becomes that of the attachment."""
        if self._watched_way >= 0:
            self._watcher.unwatch(self._watched_way)
            self._watched_way = -1

    def _unwatch_attachment(self) -> None:
        self._watcher.unwatch(self._attachment.fileno())


def _lost_answers(why: ConnectionClosed) -> Refusal:
    """Why calls end though the daemon lives."""
    return Refusal(
        Code.UNREACHABLE,
        f"the connection to the daemon broke ({why.why}) and was made anew: what it answers to "
        "calls of before is given back; ask again",
        side="client",
    )
