"""Who may connect to a CURVE server of this process: the answers of ZAP (RFC 27).

libzmq asks over an inproc socket, once for each handshake and after the client has proven that it
holds the secret of its key. The answer is a name, which libzmq then attaches to every message of
that connection; so what a message claims can be held against the key that carried it.

A key that is not listed is answered with "temporary failure" (300), because after a plain no (400)
a libzmq client never dials again, not even when the key has been added here since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import zmq

from kvd.curve import raw
from kvd.sockets import LoopSocket

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

ENDPOINT: Final = "inproc://zeromq.zap.01"
"""Fixed by the RFC; must be bound before a server socket is."""


class KeyGate:
    """Lets in who has a listed key. One for each ZMQ context."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: Mapping[str, str],
        on_stranger: Callable[[str], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Answer from now on.

        Args:
            context: of the server sockets.
            keys: public keys by node name.
            on_stranger: takes the IP address of a client whose key is not listed.
            loop: on which to answer.
        """
        self._names = {raw(key): name.encode() for name, key in keys.items()}
        self._on_stranger = on_stranger
        socket = context.socket(zmq.ROUTER)
        socket.bind(ENDPOINT)
        self._socket = LoopSocket(socket, self._take, loop=loop)

    def trust(self, keys: Mapping[str, str]) -> None:
        """Let these in too."""
        self._names |= {raw(key): name.encode() for name, key in keys.items()}

    def close(self) -> None:
        """Answer nobody any more; whoever asks then is not let in."""
        self._socket.close()

    def _take(self, frames: list[bytes]) -> None:
        match frames:
            case [asker, b"", b"1.0", request, _domain, address, _identity, b"CURVE", key]:
                name = self._names.get(key)
                reply = [b"200", b"", name, b""] if name else [b"300", b"unknown key", b"", b""]
                self._socket.send([asker, b"", b"1.0", request, *reply])
                if name is None:
                    self._on_stranger(address.decode("ascii", "replace"))
            case _:
                pass  # libzmq asks nothing else here; without an answer nobody gets in
