"""Asking the daemon, on the loop that runs already: one look at a time, as often as is painted.

Theory of operation. A look asks for ``FRAMES`` frames, one every interval, and the next look is
sent when half of them have come, or when something else is wanted; it ends the one before. So a
slow daemon, or a slow way to it, makes frames rare, and none is later than those few. A daemon that
is connected and silent (stopped, or busy) is waited for on the same connection, however long it
takes: every other way would leave it a heap of questions. A connection that is lost takes its look
with it, and another one is made after a pause. Questions and verbs go by the same connection and
are told apart by their number.

What must not live here: what a frame means (``model.mirror``), what is wanted (the pages).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Any, assert_never

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from kvd.errors import Code, Refusal
from kvd.sockets import LoopSocket, nobody_listens, open_dealer
from kvd.text import clean
from kvd.wire.admin import AdminFailed, Frame, Look
from kvd.wire.codec import ADMIN_REPLIES, ADMIN_REQUESTS, MAX_REPLY_BYTES
from tui import endpoint as places
from tui.tunnel import Tunnel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvd.sockets import Frames
    from kvd.wire.admin import AdminReply, AdminRequest
    from tui.model.mirror import Mirror, Subscription


ANSWER_S = 2.0
"""Silence of a connected daemon that is a state of its own."""
ASK_S = 5.0
CONNECT_S = 5.0
CONNECT_BY_SSH_S = 20.0
PAUSES_S = (0.1, 0.2, 0.5, 1.0)
"""Before each further attempt; the last one again and again."""
PAUSES_BY_SSH_S = (0.5, 2.0, 5.0, 10.0)
"""A host that sees a failed login every second shuts its door."""
SSH_SAYS_S = 0.1
"""ssh hangs up first, and says why then."""
SHARE = 4.0
"""Painting and reading a frame may take one part in so many of the time."""
WIRE_SHARE = 2.0
"""And waiting for it one in so many: a slow line is not kept full."""
SMOOTH = 0.2
FRAMES = 10
EVERY_LEAST_S, EVERY_MOST_S = 0.05, 60.0
"""What the daemon takes."""
PACE = (0.7, 1.5)
"""Frames that come as often as wanted, near enough."""


class _Lost(Exception):
    """The connection is no more; the sentence says why."""


class Link:
    """Brings frames of the daemon at ``endpoint`` to ``mirror``.

    ``wanted`` is asked after each frame.
    """

    def __init__(
        self,
        endpoint: places.Local | places.Remote,
        mirror: Mirror,
        wanted: Callable[[], Subscription],
        *,
        fps: float = 10.0,
    ) -> None:
        self.fps = fps
        self._endpoint = endpoint
        self._mirror = mirror
        self._wanted = wanted
        self._calls = itertools.count(1)
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        self._line: AdminConnection | None = None
        self._look_call = 0
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue()
        """Frames of that look; those of an earlier one are dropped."""
        self._hurry = asyncio.Event()
        self._paint_s = 0.0
        self._trip_s = 0.0

    @property
    def interval_s(self) -> float:
        """How often a frame is wanted at present: at ``fps``, or as this terminal and way allow."""
        return max(1.0 / self.fps, SHARE * self._paint_s, WIRE_SHARE * self._trip_s)

    def hurry(self) -> None:
        """Something else is wanted: do not wait for the next frame to be due."""
        self._hurry.set()

    def painted(self, took_s: float) -> None:
        """A frame was read and painted; others come more rarely where that takes long."""
        self._paint_s += SMOOTH * (took_s - self._paint_s)

    async def run(self) -> None:
        """Connect, look, and connect again when that fails; until cancelled."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        failures = 0
        try:
            while True:
                begun_frames = self._mirror.frames
                try:
                    async with self._way() as way:
                        await self._talk_over(context, way)
                except _Lost as exc:
                    self._mirror.failed(str(exc), _now_s())
                failures = 0 if self._mirror.frames > begun_frames else failures + 1
                await asyncio.sleep(_pause_s(self._endpoint, failures))
        finally:
            context.destroy(linger=0)

    async def ask(self, request: AdminRequest, limit_s: float = ASK_S) -> AdminReply:
        """The answer to a question or a verb within ``limit_s``; its ``call`` does not matter.

        ``AdminFailed`` where the daemon refuses, does not answer in time, or is not there.
        """
        line = self._line
        if line is None:
            return _failed("no daemon is connected, so nobody was asked")
        call = next(self._calls)
        answer = self._pending[call] = asyncio.get_running_loop().create_future()
        line.send(ADMIN_REQUESTS.encode(msgspec.structs.replace(request, call=call)))
        try:
            async with asyncio.timeout(limit_s):
                reply = ADMIN_REPLIES.decode(await answer)
        except TimeoutError:
            return _failed(f"no answer within {limit_s:g} s; it may yet be done")
        except _Lost:
            return _failed("the connection was lost before the answer; it may have been done")
        finally:
            self._pending.pop(call, None)
        return AdminFailed(call, reply) if isinstance(reply, Refusal) else reply

    # ---- one way, and the lines over it ------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _way(self) -> AsyncIterator[Tunnel | None]:
        """A tunnel, where there has to be one."""
        match self._endpoint:
            case places.Local():
                yield None
            case places.Remote() as target:
                tunnel = await Tunnel.open(target)
                try:
                    yield tunnel
                finally:
                    await tunnel.close()
            case _:
                assert_never(self._endpoint)

    async def _talk_over(
        self, context: zmq.Context[zmq.Socket[bytes]], tunnel: Tunnel | None
    ) -> None:
        """Talk on one line after the other while the way is there. Raises ``_Lost`` at its end."""
        if tunnel is None:
            assert isinstance(self._endpoint, places.Local)
            await self._talk(context, self._endpoint.endpoint, None)
            return
        failures = 0
        while not tunnel.ended.done():
            tunnel.forget()
            begun_frames = self._mirror.frames
            try:
                await self._talk(context, tunnel.endpoint, tunnel)
            except _Lost:
                await _first_of(tunnel.ended, limit_s=SSH_SAYS_S)
                self._mirror.failed(tunnel.why(), _now_s())
            failures = 0 if self._mirror.frames > begun_frames else failures + 1
            await _first_of(tunnel.ended, limit_s=_pause_s(self._endpoint, failures))
        raise _Lost(tunnel.why())

    async def _talk(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, tunnel: Tunnel | None
    ) -> None:
        """Look on one line until it is lost, which raises ``_Lost``."""
        why = nobody_listens(endpoint) if tunnel is None else ""
        if why:
            raise _Lost(why)
        line = AdminConnection(context, endpoint, self._hear)
        try:
            await _connected(line, tunnel)
            self._line = line
            while True:
                await self._look(line)
        finally:
            self._line = None
            line.close()
            for answer in self._pending.values():
                if not answer.done():
                    answer.set_exception(_Lost("the connection was lost"))
                    answer.exception()
            self._pending.clear()

    async def _look(self, line: AdminConnection) -> None:
        """One look and half of its frames, and the pause until the next look is due."""
        begun_s = _now_s()
        self._hurry.clear()
        wanted = self._wanted()
        every_s = min(max(self.interval_s, EVERY_LEAST_S), EVERY_MOST_S)
        self._arrived = asyncio.Queue()
        self._look_call = next(self._calls)
        look = self._mirror.look(self._look_call, wanted, FRAMES, every_s)
        line.send(ADMIN_REQUESTS.encode(look))
        heard_s = begun_s
        for count in range(1, FRAMES // 2 + 1):
            raw = await self._next(line, look.every_s)
            if raw is None:
                break
            heard_s = _now_s()
            if count == 1:
                self._trip_s += SMOOTH * (min(heard_s - begun_s, ANSWER_S) - self._trip_s)
            if not self._take(raw, heard_s) or self._is_over(look, wanted):
                break
        left_s = heard_s + self.interval_s - _now_s()
        if left_s > 0 and not self._hurry.is_set():
            await self._rest(line, left_s)

    def _is_over(self, look: Look, wanted: Subscription) -> bool:
        """Whether something else is wanted by now, or not as often."""
        pace = self.interval_s / look.every_s
        return self._wanted() != wanted or not PACE[0] < pace < PACE[1]

    async def _next(self, line: AdminConnection, every_s: float) -> bytes | None:
        """The next frame, however late; that it is late is told. None: somebody is in a hurry.

        Raises ``_Lost``.
        """
        frame = asyncio.ensure_future(self._arrived.get())
        hurry = asyncio.ensure_future(self._hurry.wait())
        try:
            await _first_of(frame, hurry, line.lost, limit_s=ANSWER_S + every_s)
            if not (frame.done() or hurry.done() or line.lost.done()):
                self._mirror.failed(
                    f"connected, and no answer for more than {ANSWER_S:g} s: the daemon is "
                    "stopped, or very busy",
                    _now_s(),
                )
                await _first_of(frame, line.lost)
            if frame.done():
                return frame.result()
            if line.lost.done():
                raise _Lost("the daemon has hung up")
            return None
        finally:
            hurry.cancel()
            frame.cancel()

    def _take(self, raw: bytes, heard_s: float) -> bool:
        """Fold the answer in; whether others of its look will fit. A refusal is a state."""
        reply = ADMIN_REPLIES.decode(raw)
        match reply:
            case Frame():
                return self._mirror.take(reply, heard_s)
            case AdminFailed(_, refusal):
                why = f"the daemon refuses to be looked at: {clean(refusal.message)}"
            case Refusal():
                why = f"what came is no answer of this version: {clean(reply.message)}"
            case _:
                why = f"a look was answered with {type(reply).__name__}"
        self._mirror.failed(why, heard_s)
        self._trip_s = max(self._trip_s, ANSWER_S / WIRE_SHARE)
        return False

    async def _rest(self, line: AdminConnection, rest_s: float) -> None:
        """Wait for the next look to be due, or for somebody in a hurry, or for the end."""
        hurry = asyncio.ensure_future(self._hurry.wait())
        try:
            await _first_of(hurry, line.lost, limit_s=rest_s)
        finally:
            hurry.cancel()
        if line.lost.done():
            raise _Lost("the daemon has hung up")

    def _hear(self, raw: bytes) -> None:
        """A message: for whoever waits for its number; what has none is for the look."""
        call = _call_of(raw)
        answer = self._pending.get(call)
        if call in {self._look_call, -1}:
            self._arrived.put_nowait(raw)
        elif answer is not None and not answer.done():
            answer.set_result(raw)


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of every answer."""

    tag: str
    call: int


_HEADS = msgspec.msgpack.Decoder(_Head)


def _call_of(raw: bytes) -> int:
    try:
        return _HEADS.decode(raw).call
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return -1


def _pause_s(endpoint: places.Local | places.Remote, failures: int) -> float:
    """How long to wait after so many attempts without a frame."""
    pauses = PAUSES_S if isinstance(endpoint, places.Local) else PAUSES_BY_SSH_S
    return pauses[min(failures, len(pauses) - 1)]


async def _connected(line: AdminConnection, tunnel: Tunnel | None) -> None:
    """Wait for the line to be there. Raises ``_Lost``."""
    limit_s = CONNECT_S if tunnel is None else CONNECT_BY_SSH_S
    waits = (line.up, line.lost) if tunnel is None else (line.up, line.lost, tunnel.ended)
    await _first_of(*waits, limit_s=limit_s)
    if tunnel is not None and tunnel.ended.done():
        raise _Lost(tunnel.why())
    if not line.up.done():
        raise _Lost(f"no connection within {limit_s:g} s")


# Futures of several results: asyncio.wait wants one type, and looks at none of them.
async def _first_of(*futures: asyncio.Future[Any], limit_s: float | None = None) -> None:
    """Wait until one of them is done, or for ``limit_s``."""
    await asyncio.wait(futures, timeout=limit_s, return_when="FIRST_COMPLETED")


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _failed(why: str) -> AdminFailed:
    return AdminFailed(0, Refusal(Code.UNREACHABLE, why, side="client"))


_WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class AdminConnection:
    """Connects at once; ``on_frame`` gets every message. Close it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        on_frame: Callable[[bytes], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.up: asyncio.Future[None] = loop.create_future()
        """Done when the other end's socket is there; whether anybody reads it is not known."""
        self.lost: asyncio.Future[None] = loop.create_future()
        """Done when the connection has ended."""
        self._on_frame = on_frame
        self._dealer = open_dealer(context, max_frame_bytes=MAX_REPLY_BYTES)
        self._monitor = LoopSocket(
            self._dealer.get_monitor_socket(_WATCHED), self._watch, loop=loop
        )
        self._socket = LoopSocket(self._dealer, self._hear, loop=loop)
        self._dealer.connect(endpoint)

    def send(self, frame: bytes) -> None:
        """Hand a request over; it is lost with the line."""
        self._socket.send([frame])

    def close(self) -> None:
        """Hang up; repeatable."""
        self.up.cancel()
        self.lost.cancel()
        if not self._dealer.closed:
            self._dealer.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def _hear(self, frames: Frames) -> None:
        self._on_frame(frames[-1])

    def _watch(self, frames: Frames) -> None:
        event = parse_monitor_message(frames)["event"]
        if event != zmq.EVENT_CONNECTED:
            if not self.lost.done():
                self.lost.set_result(None)
        elif not self.up.done():
            self.up.set_result(None)
