"""Several network namespaces on one switch, and the cable of each can be pulled.

A namespace in the middle holds the switch, so nothing of this host's own network is touched. Where
the kernel or the rights for it are missing, ``NoNamespaces`` says what.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from tests.support.daemons import Place
from tests.support.netns import DEVICE, ip, need_namespaces, wait_until_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NET = "10.231.79"
SWITCH_HOST = f"{NET}.254"
PEERS_PORT = 7402


class Switch:
    """A star of namespaces. ``places`` says where a daemon of that name runs."""

    def __init__(self, prefix: str, names: Sequence[str]) -> None:
        self.name = f"{prefix}-switch"
        self.namespaces = {name: f"{prefix}-{name}" for name in names}
        self.hosts = {name: f"{NET}.{number}" for number, name in enumerate(names, 1)}

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to put before a command line to run it at the switch, where all can be reached."""
        return ("ip", "netns", "exec", self.name)

    def place(self, name: str) -> Place:
        """Where the daemon of this name listens."""
        prefix = ("ip", "netns", "exec", self.namespaces[name])
        return Place(prefix, self.hosts[name], PEERS_PORT)

    def cut(self, name: str) -> None:
        """Pull the cable of one namespace: packets are lost in silence, both ways."""
        ip("-n", self.name, "link", "set", f"to-{name}", "down")

    def join(self, name: str) -> None:
        """Plug it in again; repeatable."""
        ip("-n", self.name, "link", "set", f"to-{name}", "up")


@contextlib.contextmanager
def switch(names: Sequence[str]) -> Iterator[Switch]:
    """A namespace for each name, joined by a switch, for as long as the block lasts.

    Raises:
        NoNamespaces: not root, no ``ip`` command, or the kernel forbids it.
    """
    need_namespaces()
    made = Switch(f"kvd-fault-{os.getpid()}", names)
    with contextlib.ExitStack() as stack:
        for space in (made.name, *made.namespaces.values()):
            ip("netns", "add", space)
            stack.callback(ip, "netns", "delete", space)
        ip("-n", made.name, "link", "add", "hub", "type", "bridge")
        ip("-n", made.name, "address", "add", f"{SWITCH_HOST}/24", "dev", "hub")
        for device in ("hub", "lo"):
            ip("-n", made.name, "link", "set", device, "up")
        for name, space in made.namespaces.items():
            cable = ["type", "veth", "peer", "name", f"to-{name}", "netns", made.name]
            ip("link", "add", DEVICE, "netns", space, *cable)
            ip("-n", made.name, "link", "set", f"to-{name}", "master", "hub", "up")
            ip("-n", space, "address", "add", f"{made.hosts[name]}/24", "dev", DEVICE)
            for device in (DEVICE, "lo"):
                ip("-n", space, "link", "set", device, "up")
        for space in made.namespaces.values():
            wait_until_up(space)
        yield made
