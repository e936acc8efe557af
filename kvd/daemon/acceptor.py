"""A listening seqpacket socket on the event loop: who connects is given to somebody else.

What must not live here: what is said on a connection (``attach``).
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from kvd.daemon.seqpacket import open_listener, remove_own

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable

ACCEPTS_PER_WAKE: Final = 16
PAUSE_S: Final = 0.1
"""Without free descriptors ``accept`` fails and the listener stays readable: look away shortly."""


class Acceptor:
    """Listens on ``path`` from ``start`` to ``close``."""

    def __init__(self, path: str, welcome: Callable[[socket.socket], None]) -> None:
        """Prepare; ``welcome`` takes each connection over."""
        self._path = path
        self._welcome = welcome
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: socket.socket | None = None
        self._resume: asyncio.TimerHandle | None = None
        self._inode = 0

    def start(
        self, loop: asyncio.AbstractEventLoop, mode: int, group: str | None, listening: int | None
    ) -> None:
        """Serve the socket ``listening``, whose file is not ours, or listen.

        Raises:
            AddressInUse: another process listens on the path.
            OSError: the directory is missing or not ours, or there is no such group.
        """
        self._loop = loop
        self._listener, self._inode = open_listener(self._path, mode, group, listening)
        loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> bool:
        """Listen no more and remove the socket file; whether it listened."""
        loop, listener = self._loop, self._listener
        if loop is None or listener is None:
            return False
        self._listener = None
        if self._resume is not None:
            self._resume.cancel()
        loop.remove_reader(listener.fileno())
        listener.close()
        remove_own(self._path, self._inode)
        return True

    def _accept(self) -> None:
        """Take the connections that wait; runs on the loop."""
        for _ in range(ACCEPTS_PER_WAKE):
            if self._listener is None:
                return
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                if exc.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}:
                    self._look_away()
                    return
                continue
            self._welcome(sock)

    def _look_away(self) -> None:
        """No descriptors left: stop accepting for a moment, instead of spinning on the listener."""
        if self._loop is None or self._listener is None:
            return
        listener, loop = self._listener, self._loop

        def look_again() -> None:
            self._resume = None
            loop.add_reader(listener.fileno(), self._accept)

        loop.remove_reader(listener.fileno())
        self._resume = loop.call_later(PAUSE_S, look_again)
