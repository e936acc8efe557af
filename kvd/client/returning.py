"""The way back to a daemon that has ended: dialled again and again, in steps that never wait.

What lives here: when to dial, what to say there, and whether what is found can be gone on with; and
the goodbye of a node that is closed before. What must not: a loop; whoever waits does so between
two steps, until ``sock`` is readable, or for ``pause_s`` where there is none.

A daemon that is back may have other memory, where the pool was refused or does not outlive it. Then
what this process has mapped is nobody's pool any more, and the session is over: ``pool-changed``.
"""

from __future__ import annotations

import contextlib
import time
from threading import Thread
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec.structs import replace

from kvd.client.attachment import Attachment, ask, dial, is_heard, leave, take_answer
from kvd.errors import Code, KvdError, Refusal
from kvd.wire.attach import Attach

if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket

    from kvd.client.connection import Connection
    from kvd.wire.attach import Join

FIRST_PAUSE_S: Final = 0.02
LONGEST_PAUSE_S: Final = 0.5
"""Between two attempts; each pause is twice as long as the one before."""

QUIET_LOOK_S: Final = 0.002
"""Between two looks whether copies of before a restart are over; they take milliseconds."""

RETURN_WITHIN_S: Final = 10.0
"""How long a call waits for a daemon that is away, unless the engine says otherwise."""

HEARD_WITHIN_S: Final = 0.005
"""A daemon that is not held up reads a packet in less; a thread sees to the others."""

HEARD_LOOK_S: Final = 0.0002
"""Between two looks."""

MemoryAt: TypeAlias = "tuple[str, frozenset[tuple[int, int]]]"

MOST_LEFT: Final = 16
_LEFT: Final[dict[MemoryAt, list[WayBack]]] = {}
"""Sessions of this process that are over here, and that a later daemon may wait for, by memory."""

FAREWELL_S: Final = 600.0
FAREWELL_PAUSE_S: Final = 0.2
"""How long, and how often, a node that was closed meanwhile looks for it to say so."""


class WayBack:
    """Finds the daemon that has taken the place of the one that an attachment was with."""

    def __init__(
        self, path: str, attachment: Attachment, request: Callable[[], Attach | Join]
    ) -> None:
        """Prepare; ``request`` is what to say there, at the time when it is said."""
        self._path = path
        self._attachment = attachment
        self._request = request
        self.sock: socket | None = None
        self.pause_s = 0.0

    def step(self) -> bool:
        """Try; whether the attachment is with the daemon that is back.

        Raises:
            KvdError: there is no way back: ``pool-changed``, or the refusal of the daemon; or a
                copy of before has failed, and nobody can tell whether it still writes.
        """
        copies = self._attachment.copies
        if copies is not None and copies.doubt is not None:
            raise KvdError(copies.doubt)
        if copies is not None and not copies.is_quiet:
            # Whose pages move now only the daemon of before knew: the next one gives none of them
            # away before all processes of its sessions are back.
            self.pause_s = QUIET_LOOK_S
            return False
        try:
            found = self._find()
        except KvdError as error:
            self.close()
            if not error.retryable:
                raise
            self._pause()
            return False
        if found is None:
            return False
        self.sock = None
        changed = self._attachment.difference(found)
        if changed:
            found.close()
            raise KvdError(_pool_changed(self._attachment, changed))
        self._attachment.renew(found)
        return True

    def leave_there(self) -> bool:
        """Give it up, and say so to a daemon that is back already; whether there was one.

        To that one a process that lives and says nothing is still to come, and its leases hold.
        Waits for nothing; repeatable. A forked child has nothing to say.
        """
        if self.sock is None and self._attachment.is_own:
            with contextlib.suppress(KvdError):
                self.sock = dial(self._path)
                if self.sock is not None:
                    ask(self.sock, _to_leave(self._request()))
        is_said = self.sock is not None or not self._attachment.is_own
        self.abandon()
        return is_said

    def leaves(self) -> bool:
        """Go back to leave, and see that it is heard; whether there is nothing to say any more."""
        try:
            found = self._find(to_leave=True)
        except KvdError as error:
            self.close()
            return not error.retryable
        if found is not None:
            found.close()
        return found is not None

    def abandon(self) -> None:
        """Give it up because the engine is done with the pool; repeatable."""
        if self.sock is not None and self._attachment.is_own:
            leave(self.sock)
        self.close()

    def close(self) -> None:
        """Give it up; repeatable."""
        if self.sock is not None:
            self.sock.close()
            self.sock = None

    @property
    def memory(self) -> MemoryAt:
        """Where the daemon listened, and the files that its pool is in."""
        return self._path, self._attachment.files

    def _find(self, *, to_leave: bool = False) -> Attachment | None:
        self._attachment.require_own()
        if self.sock is None:
            self.sock = dial(self._path)
            if self.sock is None:
                self._pause()
                return None
            request = self._request()
            ask(self.sock, _to_leave(request) if to_leave else request)
        found = take_answer(self.sock)
        if found is not None:
            self.sock = None
            found.require_socket(self._attachment.endpoint)
        return found

    def _pause(self) -> None:
        self.pause_s = min(max(FIRST_PAUSE_S, 2 * self.pause_s), LONGEST_PAUSE_S)


def _to_leave(request: Attach | Join) -> Attach | Join:
    """The same for who leaves at once: it keeps nothing, and its key may be another session's."""
    return replace(request, leases=(), key="") if isinstance(request, Attach) else request


def leave_next(way: WayBack) -> None:
    """Say that this process is done with its pool to the daemon that is back, or to the next one.

    That may be long after the node was closed, and nobody may run a loop then: where no daemon is
    there a thread looks for one, for ``FAREWELL_S`` at most.
    """
    if not way.leave_there():
        leave_later(way.leave_there)


def leave_with_memory(way: WayBack) -> None:
    """Say so to the daemon that has the memory of before again, once this process attaches to it.

    The next one may have other memory, and know nothing of that session. Where files are left of
    the former, one after it may take them up; it would wait for this process while that lives.
    """
    memory = way.memory
    if memory[1]:
        _LEFT.setdefault(memory, []).append(way)
        while len(_LEFT) > MOST_LEFT:
            del _LEFT[next(iter(_LEFT))]


def leave_former(path: str, attachment: Attachment) -> None:
    """This process has attached anew: leave what it was of where that memory was there before."""
    for way in _LEFT.pop((path, attachment.files), ()):
        leave_later(way.leaves)


def leave_later(is_over: Callable[[], bool], before: socket | None = None) -> None:
    """Say so in a thread, step by step until it ``is_over``.

    Args:
        is_over: tries; whether there is nothing to say any more.
        before: the connection where it was said, and may not be read yet.
    """
    is_read = before is not None and _is_read(before, HEARD_WITHIN_S, HEARD_LOOK_S)
    if before is not None and is_read is not None:
        before.close()
        before = None
    if not is_read:
        args = (is_over, before)
        Thread(target=_leave_when_there, args=args, name="kvd-farewell", daemon=True).start()


def _is_read(sock: socket, within_s: float, pause_s: float) -> bool | None:
    """As ``is_heard``, by then."""
    end_s = time.monotonic() + within_s
    while (is_read := is_heard(sock)) is None and time.monotonic() < end_s:
        time.sleep(pause_s)  # no event tells that a packet was read
    return is_read


def _leave_when_there(is_over: Callable[[], bool], before: socket | None) -> None:
    end_s = time.monotonic() + FAREWELL_S
    if before is not None:
        with before:
            is_read = _is_read(before, FAREWELL_S, FIRST_PAUSE_S)
        if is_read is not False:
            return
    while not is_over() and time.monotonic() < end_s:
        time.sleep(FAREWELL_PAUSE_S)  # no event tells that somebody listens


def main_way(path: str, attachment: Attachment, name: str, connection: Connection) -> WayBack:
    """The way back of the process that opened the session: it names the leases it still uses."""

    def request() -> Attach:
        token = attachment.attached.token
        leases = connection.unreleased()
        copies = attachment.copies
        keeps_blocks = copies is not None and copies.has_blocks
        return Attach(
            name,
            resumes=token,
            leases=leases,
            key=attachment.key,
            keeps_blocks=keeps_blocks,
            kind=attachment.kind,
        )

    return WayBack(path, attachment, request)


def go_back(way: WayBack, attachment: Attachment, connection: Connection) -> bool:
    """One step of the process that opened the session; whether its connection is here again."""
    try:
        if not way.step():
            return False
    except KvdError as error:
        connection.fail_all(error.refusal)
        return False
    attached = attachment.attached
    connection.returned(attached.leases, max_frame_bytes=attached.max_frame_bytes)
    return True


def _pool_changed(former: Attachment, why: str) -> Refusal:
    mapped = "what is mapped here stays readable, but is no pool of its any more"
    if former.attached.devices:
        mapped = "its memory on devices went with it, so drop every tensor of it unread"
    return Refusal(
        Code.POOL_CHANGED,
        f"{former.attached.node} was restarted and {why}: {mapped}; close this node, connect anew, "
        "and map the pool again",
        side="client",
    )
