"""The admin socket: requests of operators in, one answer each out.

Most go to the core. Events are served from the bus here, because they are a stream, not a state:
``ListEvents`` with ``wait_s`` is answered with the next event, or empty when the time is over. What
consoles look at is read between two steps, and is no input: it is in no recording.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace
from typing_extensions import override

from kvd import __version__
from kvd.core.inputs import FromOperator, Unreadable
from kvd.core.replay.freeze import TooManyObjects, state_hash
from kvd.errors import Code, Refusal
from kvd.recorder.orders import NotSaved, SavedFile
from kvd.types import Sent
from kvd.wire import admin
from kvd.wire.codec import ADMIN_REPLIES, ADMIN_REQUESTS, NO_CALL
from kvd.zmtp.listener import ListenerOwner

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core import effects
    from kvd.daemon.consoles import Looked
    from kvd.daemon.reactor import Reactor
    from kvd.daemon.recording import FlightRecorder
    from kvd.observe.bus import Bus
    from kvd.zmtp.connection import ZmtpConnection
    from kvd.zmtp.events import ConnectionClosed, Frames

MAX_WAIT_S = 30.0
PAGE_EVENTS = 1000
"""Events in one answer; the reader asks again from the last."""


class AdminPort(ListenerOwner):
    """Requests of all operators on one listener. An operator is a connection, by its number.

    ``look`` and ``recall`` are those of ``Consoles``, ``reload`` is ``Reloader.reload``.
    """

    def __init__(
        self,
        reactor: Reactor,
        bus: Bus,
        recording: FlightRecorder,
        look: Callable[[bytes, admin.Look], Looked],
        reload: Callable[[int], admin.Reloaded],
        recall: Callable[[admin.Why, admin.AdminReply], admin.AdminReply],
    ) -> None:
        self._reactor = reactor
        self._bus = bus
        self._recording = recording
        self._look = look
        self._reload = reload
        self._recall = recall
        self._asked: admin.AdminRequest | None = None
        """What the core is answering now."""
        self._came = 0
        """Operators so far."""
        self._at: dict[bytes, ZmtpConnection] = {}
        self._operator_of: dict[ZmtpConnection, bytes] = {}

    @override
    def welcome(self, connection: ZmtpConnection) -> bool:
        # A number and not the connection: an answer that comes when it has gone finds nobody.
        self._came += 1
        operator = b"%d" % self._came
        self._at[operator] = connection
        self._operator_of[connection] = operator
        return True

    @override
    def gone(self, connection: ZmtpConnection, closed: ConnectionClosed) -> None:
        del self._at[self._operator_of.pop(connection)]

    def report(self, effect: effects.AnswerOperator) -> None:
        """Carry out ``AnswerOperator``; what is over is remembered by others than the core."""
        message, asked = effect.message, self._asked
        if isinstance(asked, admin.Why):
            message = self._recall(asked, message)
        self._send(effect.operator, message)

    @override
    def take(self, connection: ZmtpConnection, frames: Frames) -> None:
        operator = self._operator_of[connection]
        message: admin.AdminRequest | Refusal
        if len(frames) == 1:
            message = ADMIN_REQUESTS.decode(frames[0])
        else:
            message = Refusal(Code.BAD_REQUEST, f"{len(frames)} frames, a request has one")
        if isinstance(message, Refusal):
            # Most often a tool of another version: nothing else on this socket says which this is.
            words = f"{message.message}; this node is kvd {__version__}: ask it with that version"
            message = replace(message, message=words, side=self._reactor.node.settings.name)
            call = ADMIN_REQUESTS.call_of(frames[0]) if len(frames) == 1 else NO_CALL
            self._send(operator, admin.AdminFailed(call, message))
            sender = f"operator {operator.decode()}"
            self._reactor.feed(
                Unreadable(
                    at_s=self._reactor.clock(), socket="admin", sender=sender, refusal=message
                )
            )
        elif isinstance(message, admin.Look):
            self._show(operator, message)
        elif isinstance(message, admin.ListEvents):
            self._list_events(operator, message)
        elif isinstance(message, admin.Record):
            self._record(operator, message)
        elif isinstance(message, admin.Reload):
            self._reload_for(operator, message.call)
        else:
            # For ``report``, which is called while the input is fed, and needs to know what was
            # asked.
            self._asked = message
            self._reactor.feed(FromOperator(self._reactor.clock(), operator, message))
            self._asked = None

    def _reload_for(self, operator: bytes, call: int) -> None:
        reply = self._reactor.attempt("reload", lambda: self._reload(call))
        self._send(
            operator, admin.AdminFailed(call, reply) if isinstance(reply, Refusal) else reply
        )

    def _show(self, operator: bytes, asked: admin.Look) -> None:
        """A frame now, or with the next beat; a bug in it costs this console this look."""
        looked = self._reactor.attempt("look", lambda: self._look(operator, asked))
        if isinstance(looked, Refusal):
            self._send(operator, admin.AdminFailed(asked.call, looked))
            return
        if looked.ended_call is not None:
            self._send(operator, admin.AdminFailed(looked.ended_call, self._ended()))
        if looked.frame is not None:
            self.send_frame(operator, looked.frame)

    def _ended(self) -> Refusal:
        return Refusal(
            Code.CANCELLED,
            "the next look of this console ended this one before its first frame",
            side=self._reactor.node.settings.name,
        )

    def send_frame(self, console: bytes, frame: bytes) -> Sent:
        """One more frame for a console that watches."""
        connection = self._at.get(console)
        return Sent.GONE if connection is None else connection.send([frame])

    def _list_events(self, operator: bytes, asked: admin.ListEvents) -> None:
        lost, events = self._bus.after(asked.after_seq)
        if events or not asked.wait_s > 0:  # NaN is no time to wait for either
            page = admin.EventPage(asked.call, lost, events[:PAGE_EVENTS])
            self._send(operator, page)
            return

        def answer() -> None:
            # Whichever comes first, event or time, takes the other away: it is answered once.
            timer.cancel()
            self._bus.stop_waking(answer)
            missed, found = self._bus.after(asked.after_seq)
            self._send(operator, admin.EventPage(asked.call, missed, found[:PAGE_EVENTS]))

        timer = self.batch.loop.call_later(min(asked.wait_s, MAX_WAIT_S), answer)
        self._bus.wake_on_next(answer)

    def _record(self, operator: bytes, asked: admin.Record) -> None:
        node = self._reactor.node
        steps, last_event = node.steps, node.out.seq
        try:
            # In the same turn as the save is ordered: no input lies between the two, so a replay
            # can compare.
            live_hash = state_hash(node, max_objects=asked.hash_objects)
        except TooManyObjects:
            live_hash = ""

        def answer(report: SavedFile | NotSaved) -> None:
            reply: admin.AdminReply
            match report:
                case SavedFile(_, path, _, seconds, inputs, n_bytes):
                    reply = admin.Recorded(
                        call=asked.call,
                        path=path,
                        seconds=seconds,
                        inputs=inputs,
                        file_bytes=n_bytes,
                        steps=steps,
                        last_event=last_event,
                        state_hash=live_hash,
                    )
                case NotSaved(_, why):
                    refusal = Refusal(Code.NOT_SUPPORTED, why, side=node.settings.name)
                    reply = admin.AdminFailed(asked.call, refusal)
            self._send(operator, reply)

        self._recording.save("record", "an operator asked for it", live_hash, answer)

    def _send(self, operator: bytes, message: admin.AdminReply) -> None:
        self.send_frame(operator, ADMIN_REPLIES.encode(message))
