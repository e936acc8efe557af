"""Calls that come again: a request id names what its engine asked for before.

An engine, or the router before it, that does not know whether its call was heard makes it again
with the same request id. It gets the answer of the first one, and nothing is opened twice.

What must not live here: what a send or a receive does (``send_requests``, ``receive_requests``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.handoff.refusals import asked_again
from kvd.errors import Code, Refusal
from kvd.wire import client

if TYPE_CHECKING:
    from kvd.core.handoff.kept import KeptRooms
    from kvd.core.handoff.parts import ReceiveAttempt, SendPart
    from kvd.core.handoff.receive import Decoder
    from kvd.core.handoff.send import Prefiller
    from kvd.core.outbox import Outbox
    from kvd.core.settings import Settings


@mypyc_attr(allow_interpreted_subclasses=True)
class SendRetries:
    """Sends and hand-overs that come again."""

    def __init__(self, settings: Settings, sends: Prefiller, kept: KeptRooms, out: Outbox) -> None:
        self._settings = settings
        self._sends = sends
        self._kept = kept
        self._out = out

    def asked_before(
        self, session: int, message: client.SendRequest | client.HandOver
    ) -> SendPart | Refusal | None:
        """The send that this session has opened with the same request id: the call is answered.

        A refusal: it was served. None: there is none, or it was opened by the other verb.
        """
        request = message.request_id
        if not request:
            return None
        hands_over = type(message) is client.HandOver
        found = [
            self._sends.rooms.by_room.get(message.room),
            *self._sends.settled_sends.settled.values(),
        ]
        for part in found:
            if part is None or (part.session, part.room) != (session, message.room):
                continue
            if part.request_id == request and part.is_numbered is not hands_over:
                self._answer_call_again(part, message)
                return part
        return self._sends.served_rooms.served(message.room, self._out.at_s, request)

    def _answer_call_again(
        self, part: SendPart, message: client.SendRequest | client.HandOver
    ) -> None:
        if type(message) is not client.HandOver:
            self._out.answer(part.session, client.Sending(message.call, part.id))
            return
        # Its end is told once, to the call that came last.
        if part.finish_call is not None:
            earlier = asked_again(message, self._settings.name)
            self._out.answer(part.session, client.Failed(part.finish_call, earlier))
            if self._sends.handed_over.pop((part.session, part.finish_call), None) is not None:
                self._sends.handed_over[part.session, message.call] = part
        part.finish_call = message.call
        self._kept.answer_finish(part)


@mypyc_attr(allow_interpreted_subclasses=True)
class ReceiveRetries:
    """Receives that come again."""

    def __init__(self, settings: Settings, receives: Decoder) -> None:
        self._settings = settings
        self._receives = receives

    def asked_before(
        self, session: int, message: client.ReceiveRequest
    ) -> ReceiveAttempt | Refusal | None:
        """The receive that this session has asked for with the same request id, if it lives.

        A refusal: it was delivered, and its engine has the lease.
        """
        if not message.request_id:
            return None
        asked = session, message.room, message.request_id
        for one in self._receives.attempts.values():
            if (one.session, one.room, one.request_id) == asked and one.ended is None:
                return one
        for lease, one in self._receives.ready.items():
            if (one.session, one.room, one.request_id) == asked:
                return Refusal(
                    Code.DUPLICATE_ROOM,
                    f"request {message.request_id} has received room {message.room} already: "
                    f"lease {lease} has its KV until it is released",
                    side=self._settings.name,
                    numbers={"lease": lease},
                )
        return None
