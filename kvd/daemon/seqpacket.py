"""Unix SOCK_SEQPACKET sockets: opening one for business, and asking the kernel who came.

Packets, not a stream: each message arrives whole or not at all, and a file descriptor travels with
the message it belongs to.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import struct

NOT_OURS = 0
"""No file has this inode."""


class AddressInUse(Exception):
    """Another process listens on this path, or something else lies there."""


def peer_pid(sock: socket.socket) -> int:
    """Who connected, as the kernel says; 0 for a process of another pid namespace."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


def open_listener(
    path: str, mode: int, group: str | None, listening: int | None
) -> tuple[socket.socket, int]:
    """The socket ``listening``, or one made at ``path``; with the inode of its file if we made it.

    Raises:
        AddressInUse, OSError: as ``listen``.
    """
    if listening is not None:
        return socket.socket(fileno=listening), NOT_OURS
    made = listen(path, mode=mode, group=group)
    return made, os.stat(path).st_ino


def listen(path: str, *, mode: int, group: str | None) -> socket.socket:
    """A listening socket at ``path``; a file that a dead daemon left there gives way.

    Raises:
        AddressInUse: another process listens on the path, or what lies there is no socket.
        OSError: the directory is missing or not ours, or there is no such group.
    """
    clear_stale(path, socket.SOCK_SEQPACKET)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        if group is not None:
            shutil.chown(path, group=group)
        os.chmod(path, mode)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


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
            os.unlink(path)
            return
        except OSError as error:
            if error.errno not in {errno.EAGAIN, errno.EPROTOTYPE}:
                raise
    raise AddressInUse(
        f"a process listens on {path}: another kvd runs here; stop it, or give this one its own "
        "sockets.client and sockets.admin"
    )


def remove_own(path: str, inode: int) -> None:
    """Remove the socket file that we made, unless it is someone else's by now."""
    try:
        if os.stat(path).st_ino == inode:
            os.unlink(path)
    except FileNotFoundError:
        pass
