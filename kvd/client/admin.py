"""The operator's client: one request, one answer, over the admin socket. Needs no session."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import msgspec
import zmq

from kvd import __version__
from kvd.errors import Code, KvdError, Refusal
from kvd.sockets import nobody_listens, open_dealer
from kvd.wire.codec import ADMIN_REPLIES, ADMIN_REQUESTS, MAX_REPLY_BYTES

if TYPE_CHECKING:
    from kvd.wire.admin import AdminReply, AdminRequest


class AdminClient:
    """A connection to one daemon's admin socket. Blocking; one thread at a time.

    Numbers its requests itself: the ``call`` they come with does not matter.
    """

    def __init__(self, endpoint: str) -> None:
        """Nothing is sent yet; ``request`` finds out whether anyone is there."""
        self._endpoint = endpoint
        self._last_call = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = open_dealer(self._context, max_frame_bytes=MAX_REPLY_BYTES)
        self._dealer.connect(endpoint)

    def request(self, message: AdminRequest, *, timeout_s: float = 5.0) -> AdminReply:
        """Send ``message`` and return its answer; an ``AdminFailed`` is an answer too.

        Raises:
            KvdError: ``unreachable`` when nobody listens, or nobody has answered in time;
                ``bad-request`` when the answer cannot be read.
        """
        why = nobody_listens(self._endpoint)
        if why:
            raise KvdError(Refusal(Code.UNREACHABLE, why, side="client"))
        self._last_call += 1
        numbered = msgspec.structs.replace(message, call=self._last_call)
        end_s = time.monotonic() + timeout_s
        try:
            self._dealer.send(ADMIN_REQUESTS.encode(numbered), zmq.NOBLOCK)
        except zmq.Again:
            raise self._silent(timeout_s) from None
        while True:
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not self._dealer.poll(math.ceil(left_s * 1000)):
                raise self._silent(timeout_s)
            reply = ADMIN_REPLIES.decode(self._dealer.recv_multipart(zmq.NOBLOCK)[0])
            if isinstance(reply, Refusal):
                words = (
                    f"kvd {__version__} cannot read the answer of {self._endpoint}: "
                    f"{reply.message}; use the version of its daemon"
                )
                raise KvdError(msgspec.structs.replace(reply, message=words, side="client"))
            if reply.call in {self._last_call, -1}:
                return reply

    def close(self) -> None:
        """Hang up; repeatable."""
        self._dealer.close(linger=0)
        self._context.term()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _silent(self, timeout_s: float) -> KvdError:
        return KvdError(
            Refusal(
                Code.UNREACHABLE,
                f"no answer from {self._endpoint} within {timeout_s:g} s",
                side="client",
                numbers={"timeout_s": timeout_s},
            )
        )
