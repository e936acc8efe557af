"""Descriptors that systemd handed over when it started us: listening sockets, and kept memory.

They begin at 3 and have names: what they were stored under, or the ``FileDescriptorName=`` of their
socket unit. A socket is known by its path first, so that one unit may listen on all of them.

Invariant: every descriptor is here until it is claimed or closed, and is close-on-exec.
"""

from __future__ import annotations

import os
import socket
import stat
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

NAMELESS: Final = "unknown"
_DIRECTIVES: Final = {
    socket.SOCK_STREAM: "ListenStream",
    socket.SOCK_SEQPACKET: "ListenSequentialPacket",
}


class UnfitConfig(Exception):
    """The configuration does not fit how this daemon was started; starting again changes nothing.

    The message says what to change, and where.
    """


class PassedDescriptors:
    """What was handed over and is not claimed yet, by name; a name may come several times."""

    def __init__(self, by_name: Mapping[str, list[int]]) -> None:
        self._by_name = {name: list(found) for name, found in by_name.items()}

    def claim(self, name: str) -> int | None:
        """The descriptor of that name, which is the caller's from now on; None if there is none."""
        found = self._by_name.get(name)
        if not found:
            return None
        descriptor = found.pop(0)
        if not found:
            del self._by_name[name]
        return descriptor

    def claim_listener(self, name: str, path: str, kind: socket.SocketKind) -> int | None:
        """The socket that listens on ``path``; None if none was handed over for it.

        Args:
            name: what a socket unit calls it.
            path: where it must listen.
            kind: SOCK_STREAM or SOCK_SEQPACKET.

        Raises:
            UnfitConfig: a socket of that name listens elsewhere, or it is not of that kind.
        """
        for called, descriptors in self._by_name.items():
            for descriptor in descriptors:
                at = _path_of(descriptor)
                if at != path and not (called == name and at is not None):
                    continue
                _check(name, descriptor, at, path, kind)
                descriptors.remove(descriptor)
                if not descriptors:
                    del self._by_name[called]
                os.set_blocking(descriptor, False)
                return descriptor
        return None

    def close_rest(self) -> tuple[str, ...]:
        """Close what nobody claimed; its names."""
        rest, self._by_name = self._by_name, {}
        for descriptors in rest.values():
            for descriptor in descriptors:
                os.close(descriptor)
        return tuple(rest)


def descriptors_passed(environ: Mapping[str, str], pid: int, first: int) -> PassedDescriptors:
    """What LISTEN_PID, LISTEN_FDS and LISTEN_FDNAMES say was passed to process ``pid``.

    Args:
        environ: the variables.
        pid: ours; descriptors for another process are not touched.
        first: number of the first one: 3.
    """
    count = environ.get("LISTEN_FDS", "")
    if environ.get("LISTEN_PID") != str(pid) or not count.isdecimal():
        return PassedDescriptors({})
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    by_name: dict[str, list[int]] = {}
    for place, descriptor in enumerate(range(first, first + int(count))):
        os.set_inheritable(descriptor, False)  # noqa: FBT003 - its only form
        name = names[place] if place < len(names) and names[place] else NAMELESS
        by_name.setdefault(name, []).append(descriptor)
    return PassedDescriptors(by_name)


def _path_of(descriptor: int) -> str | None:
    """Where a unix socket listens; None for anything else."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return None
    with socket.socket(fileno=os.dup(descriptor)) as found:
        is_listening = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if found.family is not socket.AF_UNIX or not is_listening:
            return None
        return str(found.getsockname())


def _check(name: str, descriptor: int, at: str | None, path: str, kind: socket.SocketKind) -> None:
    """Raise UnfitConfig unless it is what the configuration says."""
    if at != path:
        raise UnfitConfig(
            f"systemd passes {at} as {name!r}, and the configuration puts it at {path}: make the "
            "socket unit and [sockets] equal"
        )
    with socket.socket(fileno=os.dup(descriptor)) as found:
        if found.type is not kind:
            raise UnfitConfig(
                f"{path} must be a {_DIRECTIVES[kind]}= of its socket unit, not {found.type.name}"
            )
