"""A session's sockets for a thread that blocks. One thread at a time may use them."""

from __future__ import annotations

import math
import select
import time
from typing import TYPE_CHECKING, Any

import zmq

from kvd.client.attachment import ATTACH_WITHIN_S, Attachment, ask, dial, take_answer, too_late
from kvd.client.endpoint import attach_path
from kvd.client.port import unread
from kvd.sockets import Sent, open_dealer, pusher, receive_now, send_now

if TYPE_CHECKING:
    from socket import socket

    from kvd.client.connection import Connection
    from kvd.client.state import Slot
    from kvd.wire.attach import AttachRequest


def attach(endpoint: str, request: AttachRequest) -> Attachment:
    """Open or join a session of the daemon at ``endpoint``.

    Raises:
        KvdError: ``unreachable``, or the daemon's refusal.
    """
    path = attach_path(endpoint)
    end_s = time.monotonic() + ATTACH_WITHIN_S
    sock = dial(path, wait_s=ATTACH_WITHIN_S)
    if sock is None:
        raise too_late(path)
    try:
        ask(sock, request)
        attachment = _answer(sock, end_s)
    except BaseException:
        sock.close()
        raise
    if attachment is None:
        sock.close()
        raise too_late(path)
    return attachment


def _answer(sock: socket, end_s: float) -> Attachment | None:
    ready = select.poll()
    ready.register(sock, select.POLLIN)
    ready.poll(max(0.0, end_s - time.monotonic()) * 1000)
    return take_answer(sock)


class BlockingChannel:
    """The client socket and the attach socket of one session; ``wait`` blocks its thread."""

    def __init__(self, endpoint: str, attachment: Attachment, connection: Connection) -> None:
        """Takes the attachment over."""
        self._attachment = attachment
        self._connection = connection
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = open_dealer(self._context, routing_id=attachment.attached.token)
        self._dealer.connect(endpoint)
        self._push = pusher(self._dealer)
        pollin = int(zmq.POLLIN)
        self._watched: list[tuple[Any, int]] = [
            (self._dealer, pollin),
            (attachment.fileno(), pollin),
        ]
        self._is_closed = False

    def flush(self) -> None:
        """Send what the connection has queued; a call that cannot be sent fails."""
        for outgoing in self._connection.take_outgoing():
            if send_now(self._push, outgoing.frames) is not Sent.TAKEN:
                self._connection.not_sent(outgoing, unread())

    async def wait(self, slot: Slot[Any], within_s: float) -> None:
        """Block until ``slot`` is filled or the time is up; never suspends.

        Reads no further than it must: what else has come is read by a later call.
        """
        end_s = time.monotonic() + within_s
        while slot.value is None and self._connection.end is None:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return
            zmq.zmq_poll(self._watched, math.ceil(left_s * 1000))
            frames = receive_now(self._dealer)
            if frames is not None:
                self._connection.feed(frames)
                self.flush()
            else:
                self._hung_up()

    def close(self) -> None:
        """Leave the session; repeatable."""
        if self._is_closed:
            return
        self._is_closed = True
        self._dealer.close(linger=0)
        self._context.term()
        self._attachment.close()

    def _hung_up(self) -> None:
        why = self._attachment.last_word()
        if why is not None:
            self._connection.fail_all(why)
