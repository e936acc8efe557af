"""The client socket: requests of engines in, answers and pushes out.

The routing id is the session's token, issued on the attach socket: who knows it is of the session.
A message that cannot be read, or is of no session, is answered with ``Failed`` and costs nobody
else anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from kvd.core import effects
from kvd.core.inputs import FromClient, Unreadable
from kvd.errors import Code, Refusal
from kvd.sockets import BACKLOG_MESSAGES, LoopSocket, Sent
from kvd.types import NO_TOKENS, Tokens
from kvd.wire import client
from kvd.wire.codec import CLIENT_REPLIES, CLIENT_REQUESTS, NO_CALL, check_tokens

if TYPE_CHECKING:
    import asyncio

    import zmq

    from kvd.daemon.attach import AttachServer
    from kvd.daemon.reactor import Reactor
    from kvd.observe.bus import Bus
    from kvd.observe.metrics import Metrics
    from kvd.wire.events import Event

OPS: dict[type, str] = {kind: str(kind.__struct_config__.tag) for kind in get_args(client.Request)}
"""What metrics call each request: its tag on the wire."""

UNKNOWN_OP = "client"
"""What metrics call a request that could not be read, or that was refused after a wait."""

WITH_TOKENS = 3

FRAMES: dict[type, int] = {
    kind: WITH_TOKENS if kind in client.TAKES_TOKENS else WITH_TOKENS - 1 for kind in OPS
}
"""Frames of each request, the routing id included."""


class ClientPort:
    """Requests of all sessions on one ROUTER."""

    def __init__(
        self,
        reactor: Reactor,
        bus: Bus,
        sessions: AttachServer,
        metrics: Metrics,
    ) -> None:
        self._reactor = reactor
        self._bus = bus
        self._sessions = sessions
        self._metrics = metrics
        self._token_of: dict[int, bytes] = {}
        self._calls: dict[int, int] = {}
        self._max_tokens = reactor.node.settings.max_prompt_tokens
        self._subscribers: dict[int, int] = {}
        """Session to number of events lost since the last that was taken."""
        self._fresh: list[Event] = []
        self._is_listening = False
        self._call, self._op = NO_CALL, UNKNOWN_OP
        """The request that is being carried out: most are answered at once."""

    def start(self, socket: zmq.Socket[bytes], loop: asyncio.AbstractEventLoop) -> None:
        """Serve ``socket``, a bound ROUTER."""
        self._loop = loop
        self._socket = LoopSocket(socket, self._take, loop=loop)

    def close(self) -> None:
        """Stop serving; what was answered still goes out."""
        self._socket.close(linger_s=0.5)

    def gone(self, session: int) -> None:
        """The session is over."""
        self._token_of.pop(session, None)
        self._calls.pop(session, None)
        self._subscribers.pop(session, None)

    def calls(self, session: int) -> int:
        """Messages that this living session has sent so far."""
        return self._calls.get(session, 0)

    def answer(self, effect: effects.Answer) -> None:
        """Carry out ``Answer``; a session that has gone hears nothing."""
        token = self._token_of.get(effect.session)
        if token is None:
            return
        message = effect.message
        if isinstance(message, client.Failed):
            op = self._op if message.call == self._call else UNKNOWN_OP
            self._metrics.rpc_failed(op, message.refusal.code.value)
        if self._socket.send([token, CLIENT_REPLIES.encode(message)]) is Sent.FULL:
            self._give_up(effect.session)

    def _take(self, frames: list[bytes]) -> None:
        token = frames[0]
        session = self._sessions.session_of(token)
        if session is None:
            refusal = Refusal(
                Code.UNKNOWN_SESSION,
                "this routing id belongs to no session: attach first, and again after a restart",
                side=self._reactor.node.settings.name,
            )
            self._refuse(token, refusal, frames)
            return
        self._token_of[session] = token
        self._calls[session] = self._calls.get(session, 0) + 1
        message = CLIENT_REQUESTS.decode(frames[1]) if len(frames) > 1 else _no_header()
        if isinstance(message, Refusal):
            call = CLIENT_REQUESTS.call_of(frames[1]) if len(frames) > 1 else NO_CALL
            self._refuse(token, message, frames, call=call)
            return
        kind = type(message)
        tokens: Tokens | Refusal = NO_TOKENS
        n_frames = len(frames)
        if n_frames != FRAMES[kind]:
            tokens = _wrong_frames(message, n_frames)
        elif n_frames == WITH_TOKENS:
            tokens = check_tokens(frames[2], max_tokens=self._max_tokens)
        if isinstance(tokens, Refusal):
            self._refuse(token, tokens, frames, call=message.call)
            return
        if isinstance(message, client.Subscribe | client.Unsubscribe):
            self._subscribe(session, message)
            return
        self._call, self._op = message.call, OPS[kind]
        reactor = self._reactor
        began_s = reactor.clock()
        reactor.feed(FromClient(began_s, session, message, tokens))
        self._call = NO_CALL
        self._metrics.rpc(self._op, reactor.clock() - began_s)

    def _subscribe(self, session: int, asked: client.Subscribe | client.Unsubscribe) -> None:
        if not self._is_listening:
            self._is_listening = True
            self._bus.subscribe(self._tell)
        if isinstance(asked, client.Subscribe):
            self._subscribers[session] = 0
        else:
            self._subscribers.pop(session, None)
        self.answer(effects.Answer(session, client.Done(asked.call)))

    def _give_up(self, session: int) -> None:
        """A lost answer may be a lease that nobody would ever release: we hang up instead."""
        refusal = Refusal(
            Code.CLIENT_GONE,
            f"session {session} has left {BACKLOG_MESSAGES} messages of the daemon unread, so the "
            "next could not be sent: it is served no more, and what its processes may write stays "
            "held until they leave or end; close it, attach anew and read every answer",
            side=self._reactor.node.settings.name,
            numbers={"unread": BACKLOG_MESSAGES},
        )
        sender = f"session {session}"
        self._reactor.feed(Unreadable(self._reactor.clock(), "client", sender, refusal))
        self._sessions.hang_up(session, refusal)

    def _refuse(
        self, token: bytes, refusal: Refusal, frames: list[bytes], *, call: int = NO_CALL
    ) -> None:
        self._metrics.rpc_failed(UNKNOWN_OP, refusal.code.value)
        self._socket.send([token, CLIENT_REPLIES.encode(client.Failed(call, refusal))])
        sender = f"{token[:4].hex()}, {sum(map(len, frames[1:]))} bytes"
        self._reactor.feed(Unreadable(self._reactor.clock(), "client", sender, refusal))

    def _tell(self, event: Event) -> None:
        """Push an event to the subscribers, batched per turn of the loop."""
        if not self._subscribers:
            return
        if not self._fresh:
            self._loop.call_soon(self._push)
        self._fresh.append(event)

    def _push(self) -> None:
        events, self._fresh = tuple(self._fresh), []
        for session, lost in list(self._subscribers.items()):
            token = self._token_of[session]
            message = CLIENT_REPLIES.encode(client.Events(lost, events))
            is_taken = self._socket.send([token, message]) is Sent.TAKEN
            self._subscribers[session] = 0 if is_taken else lost + len(events)


def _no_header() -> Refusal:
    return Refusal(Code.BAD_REQUEST, "an empty message: send [header] or [header, tokens]")


def _wrong_frames(message: client.Request, n_frames: int) -> Refusal:
    kind = type(message)
    return Refusal(
        Code.BAD_REQUEST,
        f"{kind.__name__} came in {n_frames - 1} frames, it has {FRAMES[kind] - 1}",
        numbers={"frames": n_frames - 1},
    )
