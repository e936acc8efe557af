"""Where the daemon of this node is reached."""

from __future__ import annotations

import os

from kvd.errors import Code, KvdError, Refusal

SYSTEM_ENDPOINT = "ipc:///run/kvd/client.sock"


def client_endpoint(endpoint: str | None = None) -> str:
    """The client socket: the argument, else the environment, else where a daemon would put it.

    Raises:
        KvdError: ``bad-request`` when it is no ``ipc://`` address of this node.
    """
    found = endpoint or os.environ.get("KVD_SOCKETS__CLIENT") or _default()
    if not found.startswith("ipc:///"):
        raise KvdError(
            Refusal(
                Code.BAD_REQUEST,
                f"{found!r} is no client endpoint: engines reach the daemon of their own node by "
                f"ipc:// and an absolute path, for example {SYSTEM_ENDPOINT}",
                side="client",
            )
        )
    return found


def attach_path(endpoint: str) -> str:
    """The attach socket beside the client socket at ``endpoint``."""
    directory = os.path.dirname(endpoint.removeprefix("ipc://"))
    return os.path.join(directory, "attach.sock")


def _default() -> str:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime is None or os.path.exists(SYSTEM_ENDPOINT.removeprefix("ipc://")):
        return SYSTEM_ENDPOINT
    return f"ipc://{runtime}/kvd/client.sock"
