"""Our end of the attach socket: what it told us, the memory it passed, and its hang-up.

Nothing here waits: who calls waits for the descriptor to become readable, on a loop or with poll.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import stat
import struct
from typing import Final

from kvd.errors import Code, KvdError, Refusal
from kvd.wire.attach import Attached, AttachRequest, Rejected
from kvd.wire.codec import ATTACH_REPLIES, ATTACH_REQUESTS

ATTACH_WITHIN_S: Final = 10.0
"""A daemon that has not answered by then is not going to."""

_MAX_REPLY_BYTES: Final = 4 * 1024 * 1024
_MAX_DESCRIPTORS: Final = 253
"""SCM_MAX_FD of Linux."""


class Attachment:
    """One process of a session. Closing it, or dying, ends that process' part in it."""

    def __init__(self, sock: socket.socket, attached: Attached, fds: list[int]) -> None:
        """Take over the socket and the descriptors: one for each component that has bytes."""
        self.attached = attached
        self._sock = sock
        self._fds = fds

    def fileno(self) -> int:
        """Readable when the daemon hung up."""
        return self._sock.fileno()

    def memory_fd(self, pool: str, component: str) -> int:
        """The descriptor of one component's memory; it stays ours.

        Raises:
            KvdError: ``bad-request`` when there is no such component, or it has no bytes;
                ``wrong-state`` after ``close``.
        """
        if self._sock.fileno() < 0:
            raise _failure(Code.WRONG_STATE, "this session was closed: map its memory before")
        names = [
            (one.name, part.name)
            for one in self.attached.pools
            for part in one.components
            if part.total_bytes
        ]
        for name, fd in zip(names, self._fds, strict=True):
            if name == (pool, component):
                return fd
        known = ", ".join(f"{one}.{part}" for one, part in names)
        raise _failure(
            Code.BAD_REQUEST, f"{pool}.{component} has no memory here; there is: {known or 'none'}"
        )

    def last_word(self) -> Refusal | None:
        """Why the daemon hung up; None while it has not."""
        try:
            packet = self._sock.recv(_MAX_REPLY_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            packet = b""
        reply = ATTACH_REPLIES.decode(packet) if packet else None
        if isinstance(reply, Rejected):
            return reply.refusal
        return Refusal(
            Code.UNREACHABLE,
            f"{self.attached.node} hung up: the daemon ended or was restarted; its memory stays "
            "mapped, but leases and handoffs of this session are gone: connect again",
            side="client",
        )

    def close(self) -> None:
        """Leave the session; repeatable. Mappings made from its memory stay valid."""
        self._sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def dial(path: str, *, wait_s: float = 0.0) -> socket.socket | None:
    """A non-blocking socket connected to the daemon at ``path``.

    Args:
        path: of the attach socket.
        wait_s: blocks so long at most when the daemon's queue of connections is full.

    Returns:
        None when that queue is still full.

    Raises:
        KvdError: ``unreachable``; the message says what is wrong and what to do.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        if wait_s:
            timeval = struct.pack("ll", int(wait_s), int(wait_s % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        else:
            sock.settimeout(0)
        sock.connect(path)
        sock.settimeout(0)
    except BlockingIOError:
        sock.close()
        return None
    except OSError as exc:
        sock.close()
        raise _failure(Code.UNREACHABLE, _why_not(path, exc)) from exc
    return sock


def ask(sock: socket.socket, request: AttachRequest) -> None:
    """Send the one request. A hang-up is found when the answer is read."""
    with contextlib.suppress(OSError):
        sock.send(ATTACH_REQUESTS.encode(request))


def take_answer(sock: socket.socket) -> Attachment | None:
    """The attachment; None when the answer has not come yet. Takes the socket over on success.

    Raises:
        KvdError: the daemon refused, hung up, or answered nonsense.
    """
    space = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
    try:
        packet, passed, _, _ = sock.recvmsg(_MAX_REPLY_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return None
    except OSError:
        packet, passed = b"", []
    fds = array.array("i")
    for level, kind, content in passed:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    try:
        attached = _read_answer(packet)
        _check_memory(attached, list(fds))
    except KvdError:
        for fd in fds:
            os.close(fd)
        raise
    return Attachment(sock, attached, list(fds))


def too_late(path: str) -> KvdError:
    """The error for a daemon that accepted the connection and then said nothing."""
    return _failure(
        Code.UNREACHABLE,
        f"the daemon at {path} gave no answer for {ATTACH_WITHIN_S:g} s: it is stopped or "
        "overloaded; look at `kvd status`",
    )


def _read_answer(packet: bytes) -> Attached:
    if not packet:
        raise _failure(Code.UNREACHABLE, "the daemon hung up without an answer: read its log")
    answer = ATTACH_REPLIES.decode(packet)
    match answer:
        case Attached():
            return answer
        case Rejected(refusal) | (Refusal() as refusal):
            raise KvdError(refusal)


def _check_memory(attached: Attached, fds: list[int]) -> None:
    """Refuse descriptors that do not hold what the description says."""
    parts = [part for pool in attached.pools for part in pool.components if part.total_bytes]
    if len(parts) != len(fds):
        raise _failure(
            Code.INTERNAL, f"{attached.node} described {len(parts)} memories and passed {len(fds)}"
        )
    for part, fd in zip(parts, fds, strict=True):
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size < part.total_bytes:
            raise _failure(
                Code.INTERNAL,
                f"{attached.node} passed {found.st_size} bytes for {part.name}, which has "
                f"{part.total_bytes}",
            )


def _why_not(path: str, exc: OSError) -> str:
    match exc:
        case FileNotFoundError():
            return f"no daemon at {path}: start it (`systemctl start kvd`), or name its endpoint"
        case ConnectionRefusedError():
            return f"nobody listens on {path} any more: the daemon ended; start it again"
        case PermissionError():
            return f"permission denied on {path}: join the group of the socket (usually kvd)"
        case _:
            return f"{path} cannot be reached: {exc.strerror}"


def _failure(code: Code, message: str) -> KvdError:
    return KvdError(Refusal(code, message, side="client"))
