"""How the bytes of a device travel to a peer, seen from the first handles that move some.

UCX does not say it, but in its log. Where it reaches memory of a device, that is copied by the
device or sent by an RDMA one, and passes no socket of this process. Where it has no way of its own
it emulates one: the bytes are brought to the host in small pieces and sent by active messages
through TCP, on one host too. So bytes of a device that pass a socket are emulated, and those that
do not are direct as far as can be seen: what an RDMA device emulates by messages of its own passes
no socket either, and tells itself by its speed alone, which is therefore said too.

Between two devices of one host pieces should be as large as pages allow: a direct write of 512 KiB
moves 94 GB/s on an H100, of 2 MiB 369. Emulated, large handles would only hold up others, so they
are made when the way is known to be direct.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd.core.inputs import WritePath
from kvd.transfer.metadata import MemoryKind

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvd.transfer.nixl import SendingAgent, Sides

LEAST_BYTES: Final = 64 * 2**10
"""Of a handle that is looked at: what else passes the sockets meanwhile is much less."""

MEASURED_BYTES: Final = 4 * 2**20
"""Of a handle whose time says how fast the way is, and not how long it takes to begin."""


class AgentKey(NamedTuple):
    """What names a sending agent."""

    peer: str
    generation: int


class PathLook(NamedTuple):
    """A handle by which a path is to be seen: what the sockets had sent before it, and when.

    ``mixes`` counts handles of another kind beside one of these: of such nothing can be told.
    """

    sides: Sides
    sent_bytes: int
    began_s: float
    mixes: int


class SeenPaths:
    """What one sending agent has shown of its ways; one look for each, mostly."""

    def __init__(self, sender: SendingAgent, path: WritePath) -> None:
        """``path`` is that of host memory."""
        self._sender = sender
        self._path = path
        self._known: dict[Sides, WritePath] = {}
        self._mixes = 0

    def look(self, sides: Sides, in_flight: Collection[Sides]) -> PathLook | None:
        """Look before such a handle is posted; None where that shows nothing, or nothing new."""
        if any(other != sides for other in in_flight):
            # Nobody could say whose bytes a socket has sent, of those under way either.
            self._mixes += 1
            return None
        if sides in self._known:
            return None
        return PathLook(sides, self._sender.socket_bytes(), time.monotonic(), self._mixes)

    def seen(self, look: PathLook, n_bytes: int) -> tuple[WritePath, float] | None:
        """The path of a handle that is done, and its bytes a second; None: nothing was shown."""
        is_told = look.mixes == self._mixes and n_bytes >= LEAST_BYTES
        if look.sides in self._known or not is_told:
            return None
        took_s = max(time.monotonic() - look.began_s, 1e-6)
        by_socket = self._sender.socket_bytes() - look.sent_bytes >= n_bytes // 2
        path = WritePath.EMULATED if by_socket else self._path
        self._known[look.sides] = path
        return path, n_bytes / took_s if n_bytes >= MEASURED_BYTES else 0.0

    def is_direct(self, sides: Sides) -> bool:
        """Whether bytes go from device to device of this host, and UCX has a way for that."""
        between_devices = set(sides) == {MemoryKind.VRAM}
        return between_devices and self._known.get(sides) is WritePath.SAME_HOST
