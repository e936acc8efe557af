"""Connections of a listening socket as they come; while no descriptor is free, it looks away."""

from __future__ import annotations

import errno
import socket
import struct
from typing import TYPE_CHECKING, Any, Final

from mypy_extensions import mypyc_attr
from typing_extensions import override

from kvd.zmtp.turns import TurnTaker

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from kvd.zmtp.turns import FairTurns

_ACCEPTS: Final = 4
"""In one turn."""
PAUSE_S: Final = 0.1
"""Without free descriptors ``accept`` fails and the socket stays readable: look away shortly."""


def _no_relief() -> None:
    """Nothing can be done about it but to wait."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Acceptor(TurnTaker):
    """Accepts until ``close``. Takes the socket over, bound and listening."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        welcome: Callable[[socket.socket, Any], None],
        relieve: Callable[[], object] = _no_relief,
        turns: FairTurns | None = None,
    ) -> None:
        """``welcome`` takes each connection and its address; ``relieve`` may free a descriptor.

        ``turns``: the line of those who come, in which they are accepted too.
        """
        self._loop = loop
        self._sock = sock
        self._welcome = welcome
        self._relieve = relieve
        self._turns = turns
        self._is_watched = False
        self._resume: asyncio.TimerHandle | None = None
        sock.setblocking(False)  # noqa: FBT003 - its only form
        self._look()

    def close(self) -> None:
        """Accept no more."""
        if self._resume is not None:
            self._resume.cancel()
        self._look_away()
        self._sock.close()

    def _look(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            self._loop.add_reader(self._sock.fileno(), self._somebody_comes)

    def _look_away(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._sock.fileno())

    def _somebody_comes(self) -> None:
        if self._turns is None or self._turns.is_open():
            self.turn(_ACCEPTS)
        else:
            self._look_away()
            self._turns.wait(self)

    @override
    def turn(self, messages: int) -> None:
        """As ``TurnTaker``."""
        if self._sock.fileno() < 0:
            return  # closed while it stood in line
        for _ in range(min(messages, _ACCEPTS)):
            try:
                sock, address = self._sock.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}:
                    self._relieve()
                    self._look_away()
                    self._resume = self._loop.call_later(PAUSE_S, self._look)
                    return
                continue
            sock.setblocking(False)  # noqa: FBT003 - its only form
            self._welcome(sock, address)
        self._look()


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Who connected to a unix socket, as the kernel says: its pid, and its user.

    The pid is 0 for a process of another pid namespace.
    """
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    pid, uid, _ = struct.unpack("iII", credentials)
    return pid, uid
