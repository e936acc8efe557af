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
from kvd.client.returning import LAST_WORDS_S, WayBack, go_back, main_way
from kvd.sockets import open_dealer, pusher, receive_last, receive_now, send_now
from kvd.types import Sent

if TYPE_CHECKING:
    from socket import socket

    from kvd.client.connection import Connection
    from kvd.client.state import Slot
    from kvd.wire.attach import AttachRequest


def attach(endpoint: str, request: AttachRequest, within_s: float = ATTACH_WITHIN_S) -> Attachment:
    """Open or join a session of the daemon at ``endpoint``, whose answer may take ``within_s``.

    Raises:
        KvdError: ``unreachable``, or the daemon's refusal.
    """
    path = attach_path(endpoint)
    end_s = time.monotonic() + within_s
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
        raise too_late(path, within_s)
    return attachment


def _answer(sock: socket, end_s: float) -> Attachment | None:
    ready = select.poll()
    ready.register(sock, select.POLLIN)
    ready.poll(max(0.0, end_s - time.monotonic()) * 1000)
    return take_answer(sock)


class BlockingChannel:
    """The client socket and the attach socket of one session; ``wait`` blocks its thread."""

    def __init__(
        self, endpoint: str, attachment: Attachment, connection: Connection, name: str
    ) -> None:
        """Takes the attachment over."""
        self._endpoint = endpoint
        self._name = name
        self._attachment = attachment
        self._connection = connection
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._way: WayBack | None = None
        self._is_closed = False
        self._open()

    def flush(self) -> None:
        """Send what the connection has queued; a call that cannot be sent fails."""
        for outgoing in self._connection.take_outgoing():
            if send_now(self._push, outgoing.frames) is not Sent.TAKEN:
                self._connection.not_sent(outgoing, unread())

    async def wait(self, slot: Slot[Any], within_s: float) -> None:
        """Block until ``slot`` is filled or the time is up; never suspends.

        Reads no further than it must: what else has come is read by a later call. While the daemon
        is away it goes back, step by step.
        """
        end_s = time.monotonic() + within_s
        if self._way is not None:
            self._way.pause_s = 0.0
        while slot.value is None and self._connection.end is None:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return
            if self._way is not None:
                self._go_back(self._way, left_s)
                continue
            zmq.zmq_poll(self._watched, math.ceil(left_s * 1000))
            frames = receive_now(self._dealer)
            if frames is not None:
                self._connection.feed(frames)
                self.flush()
            else:
                self.look()

    def close(self) -> None:
        """Leave the session; repeatable."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._way is not None:
            self._way.abandon()
        self._dealer.close(linger=0)
        self._context.term()
        self._attachment.close()

    def look(self) -> None:
        """Nobody else looks between two calls. One that is away is stepped towards by ``wait``."""
        if self._way is not None or self._connection.end is not None:
            return
        why = self._attachment.last_word()
        if why is None:
            return
        connection = self._connection
        receive_last(self._dealer, connection.feed, lambda: connection.is_waiting, LAST_WORDS_S)
        # What waits in it must not reach the daemon that is back: libzmq would deliver it.
        self._dealer.close(linger=0)
        if not why.is_retryable:
            self._connection.fail_all(why)
            return
        path = attach_path(self._endpoint)
        self._way = main_way(path, self._attachment, self._name, self._connection)
        self._connection.lost(why)

    def _open(self) -> None:
        """Speak with the daemon that the attachment is with."""
        self._dealer = open_dealer(self._context, routing_id=self._attachment.route)
        self._dealer.connect(self._endpoint)
        self._push = pusher(self._dealer)
        pollin = int(zmq.POLLIN)
        self._watched: list[tuple[Any, int]] = [
            (self._dealer, pollin),
            (self._attachment.fileno(), pollin),
        ]

    def _go_back(self, way: WayBack, left_s: float) -> None:
        """One step, and the wait for the next one; ``left_s`` at most."""
        if go_back(way, self._attachment, self._connection):
            self._way = None
            self._open()
            self.flush()
        elif way.sock is not None:
            ready = select.poll()
            ready.register(way.sock, select.POLLIN)
            ready.poll(left_s * 1000)
        elif self._connection.end is None:
            time.sleep(min(way.pause_s, left_s))
