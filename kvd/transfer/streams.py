"""The TCP connections of this process: whose they are, how far they have come, and their end.

A connection is told by its *stream*, ``sender>receiver``: both ends name it alike, whoever of them
dialed. Sockets are found among all descriptors, because UCX takes one out of its epoll set for a
moment when it hands it from one endpoint to another.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import os
import socket
import sys
import termios
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

_BYTES_RECEIVED_AT: Final = 128  # in struct tcp_info of linux/tcp.h
_BYTES_SENT_AT: Final = 200
_ESTABLISHED: Final = 1  # of include/net/tcp_states.h
_NOT_CONNECTED: Final = {2, 10}  # SYN_SENT, LISTEN
_ENDED: Final = {6, 7, 8, 9, 11}  # TIME_WAIT, CLOSE, CLOSE_WAIT, LAST_ACK, CLOSING
_RDMA: Final = "/dev/infiniband/"
SILENT_S: Final = 10
"""A far end that answers nothing for so long is given up, where we ask."""
_ASKING: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000),
)


class StreamMark(NamedTuple):
    """How far one connection has come.

    ``stream`` has the far end as the sender, and is empty once the connection is over.
    ``received`` counts its life, ``unread`` what waits to be read. ``is_established`` is what both
    directions are; ``has_ended``: the far end sends no more, and all that it sent is here.
    """

    stream: str
    received: int
    unread: int
    is_established: bool
    has_ended: bool


def marks() -> dict[str, StreamMark]:
    """Every connection of this process, by the name of its socket.

    Not those that are still being dialed: nobody can have sent anything on them.
    """
    found = {}
    for descriptor, kind in descriptors():
        if kind.startswith("socket:["):
            with contextlib.suppress(OSError), _held(descriptor) as tcp:
                mark = _mark(tcp)
                if mark is not None:  # by the name of what is held: a number may mean another now
                    found[os.readlink(f"/proc/self/fd/{tcp.fileno()}")] = mark
    return found


def names(polls: Iterable[int]) -> set[str]:
    """The sockets that these epoll descriptors watch; by a thread that alone closes them."""
    found = set()
    for descriptor in sockets_of(polls):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


def outward(polls: Iterable[int]) -> tuple[str, ...]:
    """The streams that leave by the connections which these epoll descriptors watch.

    Not those of an agent with itself, which come back to this process.
    """
    found = set()
    for descriptor in sockets_of(polls):
        with contextlib.suppress(OSError), _held(descriptor) as tcp:
            found.add((_address(tcp.getsockname()), _address(tcp.getpeername())))
    return tuple(sorted(f"{near}>{far}" for near, far in found if (far, near) not in found))


def ask_alive(wanted: set[str]) -> None:
    """Have the kernel ask whether the far ends of these sockets live, and end those that do not.

    UCX asks on connections that it dialed, and on none that it accepted. The time limit covers what
    we have sent and is not acknowledged, too, for which TCP alone would try for a quarter hour.
    """
    for descriptor, kind in descriptors():
        if kind in wanted:
            with contextlib.suppress(OSError), _held(descriptor) as tcp:
                for level, option, value in _ASKING:
                    tcp.setsockopt(level, option, value)


def inward(of_process: dict[str, StreamMark]) -> dict[str, StreamMark]:
    """Of these connections, those whose other end is not among them too."""
    streams = {mark.stream for mark in of_process.values() if mark.stream}
    return {name: mark for name, mark in of_process.items() if _turned(mark.stream) not in streams}


def rdma_devices() -> tuple[str, ...]:
    """The RDMA devices that this process has open: what comes by them passes no socket."""
    return tuple(sorted({kind for _, kind in descriptors() if kind.startswith(_RDMA)}))


def sent_bytes(polls: Iterable[int]) -> int:
    """Payload bytes that the connections of these epoll descriptors have sent so far."""
    total = 0
    for descriptor in sockets_of(polls):
        with contextlib.suppress(OSError), _held(descriptor) as tcp:
            total += _counter(_info(tcp), _BYTES_SENT_AT)
    return total


def event_polls() -> set[int]:
    """UCX's TCP interfaces: epoll descriptors inside another one that watch sockets, if anything.

    An interface that has no connection yet watches nothing, and must not be missed.
    """
    polls = {fd: _targets(fd) for fd, kind in descriptors() if kind == "anon_inode:[eventpoll]"}
    kinds = dict(descriptors())
    inner = {target for targets in polls.values() for target in targets} & set(polls)
    return {
        fd
        for fd in inner
        if all(kinds.get(target, "").startswith("socket:[") for target in polls[fd])
    }


def sockets_of(polls: Iterable[int]) -> list[int]:
    """The sockets watched by ``polls`` now."""
    return [target for poll in polls for target in _targets(poll)]


def descriptors() -> list[tuple[int, str]]:
    """The open descriptors of this process and what they are."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            # Closed by another thread since it was listed: then it is none.
            found.append((int(entry), os.readlink(f"/proc/self/fd/{entry}")))
    return found


def _targets(poll: int) -> list[int]:
    """The descriptors an epoll descriptor watches; none if it is closed."""
    try:
        with open(f"/proc/self/fdinfo/{poll}", encoding="ascii") as lines:
            return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
    except OSError:
        return []


def _held(descriptor: int) -> socket.socket:
    """The socket under a descriptor of its own, which no other thread can close.

    Raises:
        OSError: the descriptor is closed, or is no socket any more.
    """
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _mark(held: socket.socket) -> StreamMark | None:
    """None of what is no TCP connection, or not one yet."""
    if held.family not in {socket.AF_INET, socket.AF_INET6} or held.type != socket.SOCK_STREAM:
        return None
    info = _info(held)
    # Nobody can have sent anything on it yet.
    if info[0] in _NOT_CONNECTED:
        return None
    # After the state. The other way round data and the end could both come between the two looks,
    # and it would look ended with nothing left to read.
    unread = array.array("i", [0])
    fcntl.ioctl(held, termios.FIONREAD, unread)
    stream = ""
    # The other side has reset it: there is no far end to name, and what is unread still counts.
    with contextlib.suppress(OSError):
        stream = f"{_address(held.getpeername())}>{_address(held.getsockname())}"
    received = _counter(info, _BYTES_RECEIVED_AT)
    return StreamMark(stream, received, unread[0], info[0] == _ESTABLISHED, info[0] in _ENDED)


def _info(tcp: socket.socket) -> bytes:
    return tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)


def _counter(info: bytes, offset: int) -> int:
    """One 64-bit counter; 0 where the kernel does not keep it."""
    return int.from_bytes(info[offset : offset + 8], sys.byteorder)


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """The same at both ends: IPv4 in IPv6 is IPv4, and the interface's name is one host's own."""
    host = ipaddress.ip_address(name[0].partition("%")[0])
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    host = mapped or host
    return f"{host}:{name[1]}" if host.version == 4 else f"[{host}]:{name[1]}"


def _turned(stream: str) -> str:
    sender, _, receiver = stream.partition(">")
    return f"{receiver}>{sender}"
