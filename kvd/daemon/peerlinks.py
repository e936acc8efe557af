"""Links to other daemons: one ROUTER that they dial, one DEALER for each that we dial.

A link is a name for the core and a connection here. Who is at its other end is the core's question:
every message names its sender's incarnation. A message that cannot be read is answered with
``Reject``; nothing that comes in on a link can raise.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import zmq

from kvd.core.inputs import FromPeer, LinkDialed, Unreadable
from kvd.errors import Code, Refusal
from kvd.sockets import LoopSocket, is_ipv6, open_dealer
from kvd.wire.codec import PEER_MESSAGES
from kvd.wire.peer import Reject

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from kvd.core import effects
    from kvd.daemon.reactor import Reactor

INWARD = "in:"
OUTWARD = "out:"


class PeerLinks:
    """All links of this daemon, by name."""

    def __init__(self, reactor: Reactor, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._reactor = reactor
        self._context = context
        self._dealers: dict[str, LoopSocket] = {}

    def listen(self, socket: zmq.Socket[bytes], loop: asyncio.AbstractEventLoop) -> None:
        """Serve ``socket``, a bound ROUTER."""
        self._router = LoopSocket(socket, self._from_router, loop=loop)

    def dial(
        self,
        connect: Mapping[str, str],
        max_frame_bytes: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Connect to every configured peer; ZMQ connects again by itself when it breaks."""
        for name, address in connect.items():
            link = OUTWARD + name
            dealer = open_dealer(self._context, max_frame_bytes=max_frame_bytes)
            if is_ipv6(address):
                dealer.setsockopt(zmq.IPV6, 1)
            dealer.connect(address)
            self._dealers[link] = LoopSocket(dealer, partial(self._take, link), loop=loop)
            self._reactor.feed(LinkDialed(self._reactor.clock(), link, name, address))

    def close(self) -> None:
        """Close every link; the last words still go out."""
        self._router.close(linger_s=0.5)
        for dealer in self._dealers.values():
            dealer.close(linger_s=0.5)

    def send(self, effect: effects.Send) -> None:
        """Carry out ``Send``; lost if nobody is there, and repeated by whoever needs an answer."""
        frame = PEER_MESSAGES.encode(effect.message)
        dealer = self._dealers.get(effect.link)
        if dealer is not None:
            dealer.send([frame])
        elif effect.link.startswith(INWARD):
            self._router.send([bytes.fromhex(effect.link[len(INWARD) :]), frame])

    def _from_router(self, frames: list[bytes]) -> None:
        self._take(INWARD + frames[0].hex(), frames[1:])

    def _take(self, link: str, frames: list[bytes]) -> None:
        if len(frames) == 1:
            message = PEER_MESSAGES.decode(frames[0])
        else:
            message = Refusal(Code.BAD_REQUEST, f"{len(frames)} frames, a message has one")
        now_s = self._reactor.clock()
        if not isinstance(message, Refusal):
            self._reactor.feed(FromPeer(now_s, link, message))
            return
        self._reactor.feed(Unreadable(now_s, "peers", link, message))
        frame = PEER_MESSAGES.encode(Reject(self._reactor.node.settings.incarnation, "", message))
        if link.startswith(INWARD):
            self._router.send([bytes.fromhex(link[len(INWARD) :]), frame])
