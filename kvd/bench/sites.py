"""Where handoffs are measured: on one host, and between two network namespaces; on which memory."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Final

import msgspec

from kvd.harness.daemons import HERE, Place
from kvd.harness.netns import DEVICE, Namespace, two_namespaces

if TYPE_CHECKING:
    from collections.abc import Iterator

PEERS_PORT: Final = 7402

HUGE, SMALL = "huge", "4k"


class Loopback(msgspec.Struct, frozen=True):
    """The network namespace we are in."""

    def connect(self, host: str, port: int) -> socket.socket:
        """A TCP connection.

        Raises:
            OSError: nobody listens there.
        """
        return socket.create_connection((host, port), timeout=10)


Link = Loopback | Namespace


class Site(msgspec.Struct, frozen=True):
    """A pair of places. ``links`` reach what listens on loopback there.

    ``stream_host`` is where the second one takes a plain TCP stream; empty for memcpy.
    """

    network: str
    memory: str
    places: tuple[Place, Place]
    links: tuple[Link, Link]
    settings: dict[str, str]
    environment: dict[str, str]
    stream_host: str


def shared_host(memory: str) -> Site:
    """Both on this host, as it is."""
    return Site(
        network="shared host",
        memory=memory,
        places=(HERE, HERE),
        links=(Loopback(), Loopback()),
        settings=_memory_settings(memory),
        environment={},
        stream_host="",
    )


@contextlib.contextmanager
def namespaces(memory: str) -> Iterator[Site]:
    """One in each of two network namespaces, for as long as the block lasts.

    Raises:
        NoNamespaces: they cannot be made here.
    """
    # UCX would copy from process to process all the same: it looks at the host, not at the network.
    ucx = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": DEVICE}
    settings = {f"transfer.ucx.{name}": value for name, value in ucx.items()}
    with two_namespaces() as (first, second):
        yield Site(
            network="TCP, two namespaces",
            memory=memory,
            places=(
                Place(first.prefix, first.host, PEERS_PORT),
                Place(second.prefix, second.host, PEERS_PORT),
            ),
            links=(first, second),
            settings={**settings, **_memory_settings(memory), "peers.insecure": "true"},
            environment=ucx,
            stream_host=second.host,
        )


def _memory_settings(memory: str) -> dict[str, str]:
    return {"pool.huge_pages": "collapse" if memory == HUGE else "off"}
