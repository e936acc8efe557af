"""A port that passes everything on to another one: whole, slowly, or until it breaks off."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random

READ_BYTES: Final = 2**16


class Relay:
    """Listens on ``port`` of loopback until ``close``; what it does may be changed at any time.

    Attributes:
        pause_s: before each piece is passed on, either way.
        breaks: share of pieces of which half is passed on before both ends are closed.
    """

    def __init__(self, source: random.Random) -> None:
        self.pause_s = 0.0
        self.breaks = 0.0
        self.target = 0
        """The port that is behind it."""
        self._source = source
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def heal(self) -> None:
        """Pass on everything at once, and as it is."""
        self.pause_s = self.breaks = 0.0

    def close(self) -> None:
        """End it with all of its connections."""
        # A thread that waits in accept is woken by this, and not by a close.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in list(self._open):
            _end(end)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    near.close()
                    continue
                self._open |= {near, far}
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(READ_BYTES):
                time.sleep(self.pause_s)
                if self._source.random() < self.breaks:
                    other.sendall(data[: len(data) // 2])
                    break
                other.sendall(data)
        _end(one)
        _end(other)
        self._open -= {one, other}


def _end(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
