"""The listening sockets of a daemon and their files, and the directories those lie in.

What lives here: who may open a socket, and what is left when it is closed. What must not: what
comes in through it.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
from socket import SOCK_SEQPACKET, SOCK_STREAM
from typing import TYPE_CHECKING

from kvd.config.address import IPC, attach_path, tcp_address
from kvd.daemon.socket_activation import UnfitConfig
from kvd.zmtp.listener import BACKLOG

if TYPE_CHECKING:
    from contextlib import AsyncExitStack
    from pathlib import Path

    from kvd.config import Config
    from kvd.daemon.socket_activation import PassedDescriptors


class AddressInUse(Exception):
    """Another process listens on this path, or something else lies there."""


class Listeners:
    """Opens sockets as ``config`` says, or takes those that systemd listens on already.

    ``undo`` removes the files of those that were made here; the others are not ours to remove.
    """

    def __init__(self, config: Config, undo: AsyncExitStack, passed: PassedDescriptors) -> None:
        self._config = config
        self._undo = undo
        self._passed = passed

    def listen_for_processes(self) -> socket.socket:
        """The attach socket, beside that of clients.

        Raises:
            AddressInUse, UnfitConfig, OSError: as ``listen``.
        """
        path = attach_path(self._config.sockets.client)
        return self._listen_at("attach", path, SOCK_SEQPACKET)

    def listen(self, endpoint: str) -> socket.socket:
        """A socket that listens on ``endpoint``.

        Raises:
            AddressInUse: another process listens there.
            UnfitConfig: systemd listens for it somewhere else.
            OSError: the address cannot be had.
        """
        if endpoint.startswith(IPC):
            name = "client" if endpoint == self._config.sockets.client else "admin"
            return self._listen_at(name, endpoint.removeprefix(IPC), SOCK_STREAM)
        place = tcp_address(endpoint)
        assert place is not None, "the configuration is valid"
        family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        host = "" if place.host == "*" else place.host
        sock = socket.socket(family, SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # A restart must get its port back while connections of the life before linger.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            sock.bind((host, place.port))
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            raise _cannot(endpoint, error) from error
        return sock

    def _listen_at(self, name: str, path: str, kind: socket.SocketKind) -> socket.socket:
        """The socket that was handed over, or one in a file of our own."""
        passed = self._passed.claim_listener(name, path, kind)
        if passed is not None:
            return socket.socket(fileno=passed)
        sockets = self._config.sockets
        sock = listen_at(path, kind, mode=int(sockets.mode, 8), group=sockets.group)
        self._undo.callback(remove_own, path, os.stat(path).st_ino)
        return sock


def listen_at(path: str, kind: socket.SocketKind, *, mode: int, group: str | None) -> socket.socket:
    """A listening unix socket; a file that a dead daemon left there gives way.

    Raises:
        AddressInUse: another process listens on the path, or what lies there is no socket.
        OSError: the directory is missing or not ours, or there is no such group.
    """
    # Looked at before it is bound: a bind cannot tell a file that was left from one that is
    # listened on.
    clear_stale(path, kind)
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
    try:
        before = os.umask(0o177)  # or a socket file is open to others until its mode is set
        try:
            sock.bind(path)
        finally:
            os.umask(before)
        if group is not None:
            shutil.chown(path, group=group)
        # After the group: open to it from now on, and never to the group that it was made with.
        os.chmod(path, mode)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise _cannot(path, error) from error
    return sock


def _cannot(endpoint: str, error: OSError) -> OSError:
    return OSError(error.errno, f"cannot listen on {endpoint}: {error.strerror}")


def clear_stale(path: str, kind_of_socket: socket.SocketKind) -> None:
    """Remove a socket file that nobody listens on; libzmq would remove one that somebody does.

    Raises:
        AddressInUse: somebody listens, or what lies there is no socket.
    """
    try:
        kind = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise AddressInUse(
            f"{path} exists and is no socket: remove it, or set sockets.client and sockets.admin"
        )
    with socket.socket(socket.AF_UNIX, kind_of_socket | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            # Refused: nobody listens there any more. A full queue would be somebody who does.
            os.unlink(path)
            return
        except OSError as error:
            if error.errno not in {errno.EAGAIN, errno.EPROTOTYPE}:
                raise
    raise AddressInUse(
        f"a process listens on {path}: another kvd runs here; stop it, or give this one its own "
        "sockets.client and sockets.admin, in another directory"
    )


def remove_own(path: str, inode: int) -> None:
    """Remove the socket file that we made, unless it is someone else's by now."""
    try:
        if os.stat(path).st_ino == inode:
            os.unlink(path)
    except FileNotFoundError:
        pass


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
        raise UnfitConfig(
            f"{directory} belongs to uid {found.st_uid}, this daemon runs as uid {os.geteuid()}: "
            "set sockets.client and sockets.admin to a directory of your own"
        )
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise UnfitConfig(
            f"{directory} has mode {stat.S_IMODE(found.st_mode):04o}, so anyone may put a socket "
            f"of theirs in the place of ours: chmod o-w {directory}"
        )
