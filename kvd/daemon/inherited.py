"""Who has the connection of a process that is dead: children that it had forked.

A process that dies closes its connection, unless a child of it inherited that. Such a child maps
the pool too and may write its pages, so they stay held; and whoever asks is told of the child, and
not of a process that is not there any more.

The other end of a connection is known by its inode, which the kernel tells of ours, and each
process that has it open by ``/proc/PID/fd``. Neither is told of every process: those of other users
may be hidden, and one in another network namespace is. So nobody may be found.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from typing import TYPE_CHECKING, Final

from kvd.daemon.former_processes import is_alive, process_now

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    from kvd.daemon.sessions import AttachConnection
    from kvd.journal.engines import Process

LOOK_EVERY_S: Final = 1.0
MOST_A_LOOK: Final = 64
"""Processes: some 20 us each."""
SHARE_OF_A_CORE: Final = 0.05
"""Looking through all processes of the host may take no more, in a thread."""

_NETLINK_SOCK_DIAG: Final = 4
_SOCK_DIAG_BY_FAMILY: Final = 20
_NLM_F_REQUEST: Final = 1
_UDIAG_SHOW_PEER: Final = 4
_UNIX_DIAG_PEER: Final = 2
_ANY: Final = 0xFFFFFFFF
_HEAD_BYTES: Final = 16
_ANSWER_BYTES: Final = 16
_ANSWER_LIMIT_S: Final = 1.0


class InheritedConnections:
    """Looks from ``start`` to ``close``; in the loop, but for the search."""

    def __init__(
        self,
        attached: Callable[[], Iterable[AttachConnection]],
        on_found: Callable[[AttachConnection, tuple[Process, ...]], None],
    ) -> None:
        """Prepare.

        Args:
            attached: connections that are open.
            on_found: takes one whose process is dead, and who has it; nobody: that is not seen.
        """
        self._attached = attached
        self._on_found = on_found
        self._left: list[AttachConnection] = []
        """Of this round, not looked at yet."""
        self._next: asyncio.TimerHandle | None = None
        self._search: asyncio.Future[tuple[dict[int, tuple[Process, ...]], float]] | None = None
        self._not_before_s = 0.0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look each second."""
        self._loop = loop
        self._next = loop.call_later(LOOK_EVERY_S, self._look)

    def close(self) -> None:
        """Look no more; repeatable."""
        if self._next is not None:
            self._next.cancel()
        if self._search is not None:
            self._search.cancel()

    def _look(self) -> None:
        self._next = self._loop.call_later(LOOK_EVERY_S, self._look)
        if not self._left:
            self._left = list(self._attached())
        batch, self._left = self._left[:MOST_A_LOOK], self._left[MOST_A_LOOK:]
        # A connection that was closed since has no socket to be asked.
        dead = [one for one in batch if one.pid > 0 and not is_alive(one.process) and is_open(one)]
        if not dead or self._search is not None or self._loop.time() < self._not_before_s:
            return
        inodes = {connection.number: other_end(connection.sock) for connection in dead}
        self._search = self._loop.run_in_executor(None, who_has, frozenset(inodes.values()))
        self._search.add_done_callback(lambda search: self._found(search, dead, inodes))

    def _found(
        self,
        search: asyncio.Future[tuple[dict[int, tuple[Process, ...]], float]],
        dead: list[AttachConnection],
        inodes: dict[int, int],
    ) -> None:
        self._search = None
        if search.cancelled():
            return
        found, took_s = search.result()
        self._not_before_s = self._loop.time() + took_s / SHARE_OF_A_CORE
        for connection in dead:
            # It may have been closed meanwhile, and then its hang-up says all there is to say.
            if is_open(connection):
                self._on_found(connection, found.get(inodes[connection.number], ()))


def is_open(connection: AttachConnection) -> bool:
    """Whether somebody has the other end of it."""
    try:
        return bool(connection.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False


def other_end(sock: socket.socket) -> int:
    """The inode of the socket that is connected to this one; 0 where the kernel does not say."""
    ours = os.fstat(sock.fileno()).st_ino
    asked = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, _ANY, ours, _UDIAG_SHOW_PEER, _ANY, _ANY)
    head = struct.pack(
        "=IHHII", _HEAD_BYTES + len(asked), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0
    )
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(_ANSWER_LIMIT_S)
            kernel.send(head + asked)
            answer = kernel.recv(4096)
    except OSError:
        return 0
    kind = struct.unpack_from("=H", answer, 4)[0]
    attributes = answer[_HEAD_BYTES + _ANSWER_BYTES :] if kind == _SOCK_DIAG_BY_FAMILY else b""
    while len(attributes) >= 8:  # head and one word
        length, name, value = struct.unpack_from("=HHI", attributes)
        if name == _UNIX_DIAG_PEER:
            return int(value)
        attributes = attributes[max(4, -(-length // 4) * 4) :]
    return 0


def who_has(inodes: frozenset[int]) -> tuple[dict[int, tuple[Process, ...]], float]:
    """The processes that have each socket open, and the processor time that it took to find them.

    Some 0.2 ms a process of the host.
    """
    began_s = time.thread_time()
    wanted = {f"socket:[{inode}]": inode for inode in inodes if inode}
    found: dict[int, tuple[Process, ...]] = {}
    for pid in sorted(map(int, filter(str.isdecimal, os.listdir("/proc")))) if wanted else ():
        for inode in {wanted[name] for name in files_of(pid) if name in wanted}:
            found[inode] = (*found.get(inode, ()), process_now(pid))
    return found, time.thread_time() - began_s


def files_of(pid: int) -> list[str]:
    """What a process has open; nothing where that is hidden, or there is no such process."""
    found = []
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return found
