"""The doors of a daemon: its ZMQ sockets and their files, and the directories those lie in.

What lives here: who may open a door, and what is left when it is closed. What must not: what comes
in through it.
"""

from __future__ import annotations

import os
import shutil
import stat
from socket import SOCK_SEQPACKET, SOCK_STREAM
from typing import TYPE_CHECKING

import zmq

from kvd.config.address import IPC, attach_path
from kvd.daemon.passed import Unfit
from kvd.daemon.seqpacket import clear_stale, remove_own
from kvd.sockets import is_ipv6, open_router

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AsyncExitStack
    from pathlib import Path

    from kvd.config import Config
    from kvd.daemon.passed import Passed


class Doors:
    """Opens sockets as ``config`` says, or takes those that systemd listens on already.

    ``undo`` removes the files of those that were made here; the others are not ours to remove.
    """

    def __init__(self, config: Config, undo: AsyncExitStack, passed: Passed) -> None:
        self._config = config
        self._undo = undo
        self._passed = passed

    def claim_attach(self) -> int | None:
        """The attach socket that was handed over, if one was.

        Raises:
            Unfit: it is another one than the configuration says.
        """
        path = attach_path(self._config.sockets.client)
        return self._passed.claim_listener("attach", path, SOCK_SEQPACKET)

    def bind(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        prepare: Callable[[zmq.Socket[bytes]], None] | None = None,
    ) -> zmq.Socket[bytes]:
        """A ROUTER that listens on ``endpoint``, after ``prepare`` has had it.

        Raises:
            AddressInUse: another process listens there.
            Unfit: systemd listens for it somewhere else.
            OSError: the address cannot be had.
        """
        config = self._config
        path = endpoint.removeprefix(IPC) if endpoint.startswith(IPC) else None
        passed = None
        if path is not None:
            name = "client" if endpoint == config.sockets.client else "admin"
            passed = self._passed.claim_listener(name, path, SOCK_STREAM)
            if passed is None:
                clear_stale(path, SOCK_STREAM)
        socket = open_router(context, max_frame_bytes=config.limits.max_frame_bytes)
        if is_ipv6(endpoint):
            socket.setsockopt(zmq.IPV6, 1)
        if prepare is not None:
            prepare(socket)
        if passed is not None:
            socket.setsockopt(zmq.USE_FD, passed)  # libzmq closes it with the socket
        before = os.umask(0o177)  # or a socket file is open to others until its mode is set
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise OSError(error.errno, f"cannot listen on {endpoint}: {error.strerror}") from error
        finally:
            os.umask(before)
        if path is not None and passed is None:
            os.chmod(path, int(config.sockets.mode, 8))
            if config.sockets.group is not None:
                shutil.chown(path, group=config.sockets.group)
            self._undo.callback(remove_own, path, os.stat(path).st_ino)
        return socket


def own_directory(directory: Path, group: str | None) -> None:
    """Make the directory of a socket for ``group``, or see that nobody else owns the one there is.

    Raises:
        Unfit: another user could put sockets of their own there.
        OSError: it cannot be made.
    """
    try:
        directory.mkdir(mode=0o750, parents=True)
    except FileExistsError:
        pass
    else:
        if group is not None:
            shutil.chown(directory, group=group)
            directory.chmod(0o750)
    found = directory.stat()
    if found.st_uid not in {0, os.geteuid()}:
        msg = (
            f"{directory} belongs to uid {found.st_uid}, this daemon runs as uid {os.geteuid()}: "
            "set sockets.client and sockets.admin to a directory of your own"
        )
        raise Unfit(msg)
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        msg = (
            f"{directory} has mode {stat.S_IMODE(found.st_mode):04o}, so anyone may put a socket "
            f"of theirs in the place of ours: chmod o-w {directory}"
        )
        raise Unfit(msg)
