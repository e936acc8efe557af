"""Links to other daemons: one ROUTER that they dial, one DEALER for each that we dial.

A link is a name for the core and a connection here. Who is at its other end is the core's question:
every message names its sender's incarnation, and with keys each comes with the name of the node
whose key carried it. A message that cannot be read is answered with ``Reject``; nothing that comes
in on a link can raise.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import zmq

from kvd.core.inputs import FromPeer, LinkDialed, Unreadable
from kvd.curve import PeerKeys, be_client, be_server
from kvd.daemon.handshakes import Handshakes
from kvd.daemon.keygate import KeyGate
from kvd.errors import Code, Refusal
from kvd.sockets import LoopSocket, is_ipv6, open_dealer, receive_proven
from kvd.wire.codec import PEER_MESSAGES
from kvd.wire.peer import Reject

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from kvd.core import effects
    from kvd.daemon.reactor import Reactor

INWARD = "in:"
OUTWARD = "out:"
NO_NAME = ""
"""Whose key a message came with, where links need no keys."""


class PeerLinks:
    """All links of this daemon, by name. Without ``keys`` anyone may say anything."""

    def __init__(
        self,
        reactor: Reactor,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: PeerKeys | None,
        *,
        count_failed: Callable[[str], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Judge keys from now on, so that nobody can come in before.

        Args:
            reactor: what hears of messages.
            context: of all sockets here.
            keys: of this node and its peers.
            count_failed: takes the reason of each handshake that fails.
            loop: that everything runs on.
        """
        self._reactor = reactor
        self._context = context
        self._keys = keys
        self._loop = loop
        self._dealers: dict[str, LoopSocket] = {}
        self._handshakes = Handshakes(reactor, keys, count_failed, loop)
        self._router: LoopSocket | None = None
        self._gate: KeyGate | None = None
        if keys is not None:
            self._gate = KeyGate(context, keys.of, self._handshakes.stranger, loop)

    def prepare(self, socket: zmq.Socket[bytes]) -> None:
        """Lock ``socket``, a ROUTER that is to be bound and given to ``listen``."""
        if self._keys is not None:
            be_server(socket, self._keys.own)
        self._handshakes.watch_listener(socket)

    def listen(self, socket: zmq.Socket[bytes]) -> None:
        """Serve ``socket``, prepared and bound."""
        if self._keys is None:
            self._router = LoopSocket(socket, self._from_anyone, loop=self._loop)
            return
        self._router = LoopSocket(
            socket, self._from_proven, loop=self._loop, receive=receive_proven
        )

    def trust(self, keys: Mapping[str, str]) -> None:
        """Know the keys of more nodes; only where this one has a key."""
        if self._keys is not None and self._gate is not None:
            self._keys = PeerKeys(self._keys.own, {**self._keys.of, **keys})
            self._gate.trust(keys)

    def dial(self, connect: Mapping[str, str], max_frame_bytes: int) -> None:
        """Connect to every configured peer; ZMQ connects again by itself when it breaks."""
        for name, address in connect.items():
            link = OUTWARD + name
            dealer = open_dealer(self._context, max_frame_bytes=max_frame_bytes)
            if is_ipv6(address):
                dealer.setsockopt(zmq.IPV6, 1)
            proven = NO_NAME
            if self._keys is not None:
                be_client(dealer, self._keys.own, self._keys.of[name])
                proven = name  # nobody else can answer: it takes the secret of that key
            self._handshakes.watch_dealer(dealer, link, name, address)
            dealer.connect(address)
            take = partial(self._take, link, proven)
            self._dealers[link] = LoopSocket(dealer, take, loop=self._loop)
            self._reactor.feed(LinkDialed(self._reactor.clock(), link, name, address))

    def close(self) -> None:
        """Close every link; the last words still go out."""
        self._handshakes.close()
        if self._router is not None:
            self._router.close(linger_s=0.5)
        for dealer in self._dealers.values():
            dealer.close(linger_s=0.5)
        if self._gate is not None:
            self._gate.close()

    def send(self, effect: effects.Send) -> None:
        """Carry out ``Send``; lost if nobody is there, and repeated by whoever needs an answer."""
        frame = PEER_MESSAGES.encode(effect.message)
        dealer = self._dealers.get(effect.link)
        if dealer is not None:
            dealer.send([frame])
        elif effect.link.startswith(INWARD):
            self._send_back(effect.link, frame)

    def _send_back(self, link: str, frame: bytes) -> None:
        if self._router is not None:
            self._router.send([bytes.fromhex(link[len(INWARD) :]), frame])

    def _from_anyone(self, frames: list[bytes]) -> None:
        self._take(INWARD + frames[0].hex(), NO_NAME, frames[1:])

    def _from_proven(self, frames: list[bytes]) -> None:
        self._take(INWARD + frames[0].hex(), frames[1].decode(), frames[2:])

    def _take(self, link: str, proven: str, frames: list[bytes]) -> None:
        if len(frames) == 1:
            message = PEER_MESSAGES.decode(frames[0])
        else:
            message = Refusal(Code.BAD_REQUEST, f"{len(frames)} frames, a message has one")
        now_s = self._reactor.clock()
        if not isinstance(message, Refusal):
            self._reactor.feed(FromPeer(now_s, link, message, proven))
            return
        self._reactor.feed(Unreadable(now_s, "peers", link, message))
        frame = PEER_MESSAGES.encode(Reject(self._reactor.node.settings.incarnation, "", message))
        if link.startswith(INWARD):
            self._send_back(link, frame)
