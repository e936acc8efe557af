"""Links to other daemons: one listener that they dial, one dialer for each that we dial.

A link is a name for the core and a connection here. Names of those who dialed us never repeat, so
what goes out on one reaches the connection that it answers, whose key was proven, or nobody. Who is
at its other end is the core's question: every message names its sender's incarnation, and with keys
each comes with the name of the node whose key carried it. A message that cannot be read is answered
with ``Reject``; nothing that comes in on a link can raise.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
from mypy_extensions import mypyc_attr
from typing_extensions import override

from kvd.config.address import tcp_address
from kvd.core.inputs import FromPeer, LinkDialed, Unreadable
from kvd.core.peers.registry import BY_ADDRESS
from kvd.curve import PeerKeys, raw
from kvd.daemon.handshakes import Handshakes
from kvd.errors import Code, Refusal
from kvd.wire.codec import PEER_MESSAGES
from kvd.wire.peer import Reject
from kvd.zmtp.curve import CurveClient, KeyRing
from kvd.zmtp.dialer import Dialer
from kvd.zmtp.listener import LAST_WORDS_S, ListenerOwner
from kvd.zmtp.mechanism import DEALER, Null

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from kvd.core import effects
    from kvd.daemon.reactor import Reactor
    from kvd.zmtp.bounds import Bounds
    from kvd.zmtp.connection import ZmtpConnection
    from kvd.zmtp.events import ConnectionClosed, Frames
    from kvd.zmtp.mechanism import Mechanism
    from kvd.zmtp.turns import WriteBatch

INWARD: Final = "in:"
OUTWARD: Final = "out:"
SILENT_LIMITS: Final = 4
"""Times ``peers.lost_s``: so long whom we dialed may say nothing before it is dialed anew."""
_NOT_MEANT: Final = frozenset({Code.PEER_UNKNOWN, Code.PEER_STALE, Code.VERSIONS_DIFFER})
"""By these a Hello is refused whose sender is not who was meant to answer."""
NO_NAME: Final = ""
"""Whose key a message came with, where links need no keys."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Answering:
    """Whose key is expected at an address of no known node: one after another of those listed."""

    def __init__(self, names: list[str], *, is_proven: bool) -> None:
        self._names = names
        self._is_proven = is_proven
        self._at = 0

    @property
    def name(self) -> str:
        """Whom the handshake under way is made for."""
        return self._names[self._at]

    @property
    def proven(self) -> str:
        """Whose key has answered."""
        return self.name if self._is_proven else NO_NAME

    def next(self, tell: Callable[[], None]) -> None:
        """It was not the one: expect the next, and ``tell`` when it was none of all."""
        self._at = (self._at + 1) % len(self._names)
        if self._at == 0:
            tell()


@mypyc_attr(allow_interpreted_subclasses=True)
class PeerLinks(ListenerOwner):
    """All links of this daemon, by name. Without ``keys`` anyone may say anything."""

    def __init__(
        self,
        reactor: Reactor,
        batch: WriteBatch,
        keys: PeerKeys | None,
        bounds: Bounds,
        *,
        count_failed: Callable[[str], None],
    ) -> None:
        """``count_failed`` takes the reason of each handshake that fails."""
        self._reactor = reactor
        self.batch = batch
        self._keys = keys
        self._bounds = bounds
        # Whoever lives says something with every heartbeat; a host that lost its power says nothing
        # at its end, and its connection would stay for a quarter of an hour.
        silent_s = SILENT_LIMITS * reactor.node.settings.lost_s
        self._dialed_bounds = msgspec.structs.replace(bounds, silent_s=silent_s)
        self._ring = None
        if keys is not None:
            names = {raw(key): name for name, key in keys.of.items()}
            self._ring = KeyRing(raw(keys.own.secret), names)
        self._handshakes = Handshakes(reactor, keys, count_failed)
        self._dialers: dict[str, Dialer] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._inward: dict[str, ZmtpConnection] = {}
        self._link_of: dict[ZmtpConnection, str] = {}
        self._came = 0
        """Connections so far."""

    def listen(self, sock: socket.socket) -> None:
        """Serve ``sock``, bound and listening."""
        self.start(sock, self.batch, self._bounds, self._ring)

    def trust(self, keys: Mapping[str, str]) -> None:
        """Know the keys of more nodes; only where this one has a key."""
        if self._keys is not None and self._ring is not None:
            self._keys = PeerKeys(self._keys.own, {**self._keys.of, **keys})
            self._ring.names |= {raw(key): name for name, key in keys.items()}

    def dial(self, connect: Mapping[str, str]) -> None:
        """Connect to every configured peer, again and again when it breaks."""
        for name, address in connect.items():
            link = OUTWARD + name
            place = tcp_address(address)
            assert place is not None, "the configuration is valid"
            # Nobody else can answer there: it takes the secret of that key.
            proven = NO_NAME if self._keys is None else name
            self._dialers[link] = Dialer(
                place.host,
                place.port,
                partial(self._mechanism, name),
                self.batch,
                on_message=partial(self._read, link, proven),
                on_failed=partial(self._handshakes.dialed_them, link, name, address),
                on_unreachable=partial(self._handshakes.not_reached, link, name, address),
                bounds=self._dialed_bounds,
            )
            self._reactor.feed(
                LinkDialed(at_s=self._reactor.clock(), link=link, name=name, address=address)
            )

    def _dial_address(self, link: str) -> Dialer | None:
        """Connect to an address that an engine has named; the core has said that it may be."""
        name, _, address = link.removeprefix(BY_ADDRESS).rpartition("@")
        place = tcp_address(address)
        if place is None:
            return None
        names = [name] if name else []
        if self._keys is not None:
            own, listed = self._keys.own.public, self._keys.of
            names = [name for name in names or listed if listed.get(name, own) != own]
            if not names:
                # Behind this step, which may be one of the core's.
                self.batch.loop.call_soon(self._handshakes.without_key, link, name, address)
                return None
        answering = Answering(names or [NO_NAME], is_proven=self._keys is not None)
        dialer = self._dialers[link] = Dialer(
            place.host,
            place.port,
            lambda: self._mechanism(answering.name),
            self.batch,
            on_message=lambda frames: self._read(link, answering.proven, frames),
            on_failed=lambda closed: answering.next(
                lambda: self._handshakes.dialed_them(link, name or address, address, closed)
            ),
            on_unreachable=partial(self._handshakes.not_reached, link, name or address, address),
            bounds=self._dialed_bounds,
        )
        return dialer

    def hang_up(self, effect: effects.HangUpLink) -> None:
        """Carry out ``HangUpLink``; what was said last still goes out."""
        dialer = self._dialers.pop(effect.link, None)
        if dialer is not None:
            task = self.batch.loop.create_task(dialer.close(linger_s=LAST_WORDS_S))
            # Kept, or nothing would hold it until it is done.
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _mechanism(self, name: str) -> Mechanism:
        if self._keys is None or self._ring is None:
            return Null(DEALER)
        return CurveClient(self._ring, raw(self._keys.of[name]))

    @override
    async def close(self) -> None:
        """Close every link; the last words still go out."""
        dialers = [dialer.close(linger_s=LAST_WORDS_S) for dialer in self._dialers.values()]
        await asyncio.gather(super().close(), *dialers, *self._ending)

    def send(self, effect: effects.SendToPeer) -> None:
        """Carry out ``SendToPeer``; lost if nobody is there, repeated by who needs an answer."""
        frame = PEER_MESSAGES.encode(effect.message)
        dialer = self._dialers.get(effect.link)
        if dialer is None and effect.link.startswith(BY_ADDRESS):
            dialer = self._dial_address(effect.link)
        at = dialer or self._inward.get(effect.link)
        if at is not None:
            at.send([frame])
        # A name may have several addresses, and another node answers at this one.
        said = effect.message
        if dialer is not None and isinstance(said, Reject) and said.refusal.code in _NOT_MEANT:
            dialer.turn_away()

    @override
    def welcome(self, connection: ZmtpConnection) -> bool:
        self._came += 1
        link = f"{INWARD}{self._came}"
        self._inward[link] = connection
        self._link_of[connection] = link
        return True

    @override
    def take(self, connection: ZmtpConnection, frames: Frames) -> None:
        self._read(self._link_of[connection], connection.name, frames)

    @override
    def gone(self, connection: ZmtpConnection, closed: ConnectionClosed) -> None:
        del self._inward[self._link_of.pop(connection)]

    @override
    def failed(self, connection: ZmtpConnection, closed: ConnectionClosed) -> None:
        self._handshakes.dialed_us(connection.peer, closed)

    def _read(self, link: str, proven: str, frames: Frames) -> None:
        if len(frames) == 1:
            message = PEER_MESSAGES.decode(frames[0])
        else:
            message = Refusal(Code.BAD_REQUEST, f"{len(frames)} frames, a message has one")
        now_s = self._reactor.clock()
        if not isinstance(message, Refusal):
            happened = FromPeer(at_s=now_s, link=link, message=message, proven=proven)
            self._reactor.feed(happened, frames[0])
            return
        self._reactor.feed(Unreadable(at_s=now_s, socket="peers", sender=link, refusal=message))
        came_by = self._inward.get(link)
        if came_by is not None:
            mine = self._reactor.node.settings.incarnation
            came_by.send([PEER_MESSAGES.encode(Reject(mine, "", message))])
