"""Where a console finds its daemon: a unix socket here, or one on a host that ssh reaches."""

from __future__ import annotations

import re

import msgspec

REMOTE_SOCKET = "/run/kvd/admin.sock"
"""Where a daemon under systemd is heard."""

_SSH = re.compile(
    r"ssh://(?:(?P<user>[\w][\w.-]*)@)?(?P<host>[\w][\w.-]*|\[[0-9A-Fa-f:.]+\])"
    r"(?::(?P<port>\d{1,5}))?(?P<path>/[^\s:]*)?",
    re.ASCII,
)


class Local(msgspec.Struct, frozen=True):
    """A unix socket of this host: ``ipc:///run/kvd/admin.sock``."""

    endpoint: str


class Remote(msgspec.Struct, frozen=True):
    """A unix socket of another host. ``user`` empty and ``port`` 0: as ssh is configured."""

    user: str
    host: str
    port: int
    path: str


class BadEndpoint(msgspec.Struct, frozen=True):
    """Why a text is neither, and what to write."""

    why: str


def read(text: str) -> Local | Remote | BadEndpoint:
    """What an endpoint names. Nothing that ssh would take for an option gets through."""
    if text.startswith("ipc://") and len(text) > len("ipc://"):
        return Local(text)
    found = _SSH.fullmatch(text)
    if found is None:
        return BadEndpoint(
            f"{text!r} names no daemon; write ipc:///run/kvd/admin.sock (sockets.admin of the "
            f"daemon), or ssh://[user@]host[:port][/path] for its socket on another host "
            f"(without a path: {REMOTE_SOCKET})"
        )
    path = found["path"] if found["path"] not in {None, "/"} else REMOTE_SOCKET
    host = found["host"].strip("[]")
    return Remote(user=found["user"] or "", host=host, port=int(found["port"] or 0), path=path)
