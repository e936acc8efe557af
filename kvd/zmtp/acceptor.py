"""Connections of a listening socket as they come; while no descriptor is free, it looks away."""

from __future__ import annotations

import errno
import socket
import struct
from typing import TYPE_CHECKING, Any, Final

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_ACCEPTS: Final = 4
"""In one wake-up."""
PAUSE_S: Final = 0.1
"""Without free descriptors ``accept`` fails and the socket stays readable: look away shortly."""


def _no_relief() -> None:
    """Nothing can be done about it but to wait."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Acceptor:
    """Accepts until ``close``. Takes the socket over, bound and listening."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        welcome: Callable[[socket.socket, Any], None],
        relieve: Callable[[], object] = _no_relief,
    ) -> None:
        """``welcome`` takes each connection and its address; ``relieve`` may free a descriptor."""
        self._loop = loop
        self._sock = sock
        self._welcome = welcome
        self._relieve = relieve
        self._resume: asyncio.TimerHandle | None = None
        sock.setblocking(False)  # noqa: FBT003 - its only form
        self._look()

    def close(self) -> None:
        """Accept no more."""
        if self._resume is not None:
            self._resume.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()

    def _look(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, address = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}:
                    self._relieve()
                    self._loop.remove_reader(self._sock.fileno())
                    self._resume = self._loop.call_later(PAUSE_S, self._look)
                    return
                continue
            sock.setblocking(False)  # noqa: FBT003 - its only form
            self._welcome(sock, address)


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Who connected to a unix socket, as the kernel says: its pid, and its user.

    The pid is 0 for a process of another pid namespace.
    """
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    pid, uid, _ = struct.unpack("iII", credentials)
    return pid, uid
