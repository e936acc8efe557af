"""Where the daemon of this node is reached."""

from __future__ import annotations

import os

from kvd import places
from kvd.errors import Code, KvdError, Refusal

SOCKET = "client.sock"


def client_endpoint(endpoint: str | None = None) -> str:
    """The client socket: the argument, else the environment, else where a daemon would put it.

    Of the places where one would, that of this user's own daemon comes first, then the system's.

    Raises:
        KvdError: ``bad-request`` when it is no ``ipc://`` address of this node.
    """
    found = endpoint or os.environ.get("KVD_SOCKETS__CLIENT") or _default()
    if not found.startswith("ipc:///"):
        raise KvdError(
            Refusal(
                Code.BAD_REQUEST,
                f"{found!r} is no client endpoint: engines reach the daemon of their own node by "
                "ipc:// and an absolute path, for example ipc:///run/kvd/client.sock",
                side="client",
            )
        )
    return found


def socket_path(endpoint: str) -> str:
    """Where the client socket at ``endpoint`` lies."""
    return endpoint.removeprefix("ipc://")


def attach_path(endpoint: str) -> str:
    """The attach socket beside the client socket at ``endpoint``.

    Where that is a symbolic link, beside the socket that it leads to.
    """
    path = socket_path(endpoint)
    if os.path.islink(path):
        path = os.path.realpath(path)
    return os.path.join(os.path.dirname(path), "attach.sock")


def _default() -> str:
    own = places.runtime_directory(os.environ, os.getuid()) / SOCKET
    system = places.SYSTEM_RUNTIME / SOCKET
    found = system if system.exists() and not own.exists() else own
    return f"ipc://{found}"
