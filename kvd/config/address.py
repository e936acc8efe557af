"""Addresses as the configuration writes them: ``tcp://HOST:PORT``, ``ipc:///PATH``, ``IP:PORT``.

Only spelling: nothing here resolves a name or opens a socket.
"""

from __future__ import annotations

import ipaddress
import re

import msgspec

TCP = "tcp://"
IPC = "ipc://"
ATTACH_SOCKET = "attach.sock"

_HOST_PORT = re.compile(
    r"(\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?):(\d{1,5})"
)


class Address(msgspec.Struct, frozen=True):
    """``host`` is a name, an IP address without brackets, or ``*`` for every interface."""

    host: str
    port: int

    @property
    def is_ip(self) -> bool:
        """Whether the host is an IP address rather than a name or ``*``."""
        return _ip(self.host) is not None

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for every interface: ``*``, ``0.0.0.0`` or ``::``."""
        ip = _ip(self.host)
        return self.host == "*" or (ip is not None and ip.is_unspecified)

    @property
    def is_loopback(self) -> bool:
        """Whether it cannot be reached from another host. A name other than localhost might be."""
        ip = _ip(self.host)
        return self.host == "localhost" or (ip is not None and ip.is_loopback)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def host_port(text: str) -> Address | None:
    """``HOST:PORT`` with IPv6 addresses in brackets; None if it is not one."""
    match = _HOST_PORT.fullmatch(text)
    if match is None or int(match[2]) > 65535:
        return None
    host = match[1]
    if host.startswith("["):
        host = host[1:-1]
        return Address(host, int(match[2])) if _ip(host) is not None else None
    if re.fullmatch(r"[0-9.]+", host) and _ip(host) is None:
        return None
    return Address(host, int(match[2]))


def tcp_address(endpoint: str) -> Address | None:
    """The address of ``tcp://HOST:PORT``; None if it is not one."""
    return host_port(endpoint.removeprefix(TCP)) if endpoint.startswith(TCP) else None


def ipc_path(endpoint: str) -> str | None:
    """The absolute path of ``ipc:///PATH``; None if it is not one."""
    path = endpoint.removeprefix(IPC)
    is_path = endpoint.startswith(IPC) and path.startswith("/") and not path.endswith("/")
    return path if is_path and "\0" not in path else None


def attach_path(client: str) -> str:
    """The path of the attach socket beside the ``client`` endpoint."""
    return f"{client.removeprefix(IPC).rpartition('/')[0]}/{ATTACH_SOCKET}"
