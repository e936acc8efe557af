"""The listening sockets of a daemon and their files, and the directories those lie in.

What lives here: who may open a socket, and what is left when it is closed. What must not: what
comes in through it.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
from socket import SOCK_SEQPACKET, SOCK_STREAM
from typing import TYPE_CHECKING

from kvd.config.address import IPC, attach_path, tcp_address
from kvd.daemon.seqpacket import clear_stale, remove_own
from kvd.daemon.socket_activation import UnfitConfig
from kvd.zmtp.listener import BACKLOG

if TYPE_CHECKING:
    from contextlib import AsyncExitStack
    from pathlib import Path

    from kvd.config import Config
    from kvd.daemon.socket_activation import PassedDescriptors


class Listeners:
    """Opens sockets as ``config`` says, or takes those that systemd listens on already.

    ``undo`` removes the files of those that were made here; the others are not ours to remove.
    """

    def __init__(self, config: Config, undo: AsyncExitStack, passed: PassedDescriptors) -> None:
        self._config = config
        self._undo = undo
        self._passed = passed

    def claim_attach(self) -> int | None:
        """The attach socket that was handed over, if one was.

        Raises:
            UnfitConfig: it is another one than the configuration says.
        """
        path = attach_path(self._config.sockets.client)
        return self._passed.claim_listener("attach", path, SOCK_SEQPACKET)

    def listen(self, endpoint: str) -> socket.socket:
        """A socket that listens on ``endpoint``.

        Raises:
            AddressInUse: another process listens there.
            UnfitConfig: systemd listens for it somewhere else.
            OSError: the address cannot be had.
        """
        if endpoint.startswith(IPC):
            return self._listen_at(endpoint)
        place = tcp_address(endpoint)
        assert place is not None, "the configuration is valid"
        family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        host = "" if place.host == "*" else place.host
        sock = socket.socket(family, SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            sock.bind((host, place.port))
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            raise _cannot(endpoint, error) from error
        return sock

    def _listen_at(self, endpoint: str) -> socket.socket:
        """The same at a path: the socket that was handed over, or one in a file of our own."""
        config = self._config
        path = endpoint.removeprefix(IPC)
        name = "client" if endpoint == config.sockets.client else "admin"
        passed = self._passed.claim_listener(name, path, SOCK_STREAM)
        if passed is not None:
            return socket.socket(fileno=passed)
        clear_stale(path, SOCK_STREAM)
        sock = socket.socket(socket.AF_UNIX, SOCK_STREAM | socket.SOCK_NONBLOCK)
        before = os.umask(0o177)  # or a socket file is open to others until its mode is set
        try:
            sock.bind(path)
        except OSError as error:
            sock.close()
            raise _cannot(endpoint, error) from error
        finally:
            os.umask(before)
        self._undo.callback(remove_own, path, os.stat(path).st_ino)
        os.chmod(path, int(config.sockets.mode, 8))
        if config.sockets.group is not None:
            shutil.chown(path, group=config.sockets.group)
        sock.listen(BACKLOG)
        return sock


def _cannot(endpoint: str, error: OSError) -> OSError:
    return OSError(error.errno, f"cannot listen on {endpoint}: {error.strerror}")


def own_directory(directory: Path, group: str | None) -> None:
    """Make the directory of a socket for ``group``, or see that nobody else owns the one there is.

    Raises:
        UnfitConfig: another user could put sockets of their own there.
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
        raise UnfitConfig(msg)
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        msg = (
            f"{directory} has mode {stat.S_IMODE(found.st_mode):04o}, so anyone may put a socket "
            f"of theirs in the place of ours: chmod o-w {directory}"
        )
        raise UnfitConfig(msg)
