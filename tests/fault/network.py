"""Several network namespaces on one switch, and the cable of each can be pulled.

A namespace in the middle holds the switch, so nothing of this host's own network is touched. Where
the kernel or the rights for it are missing, ``NoNamespaces`` says what.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

from kvd.bench.daemons import Place
from kvd.bench.netns import DEVICE, NoNamespaces

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NET = "10.231.79"
SWITCH_HOST = f"{NET}.254"
PEERS_PORT = 7402
UP_WITHIN_S = 5.0


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
        _ip("-n", self.name, "link", "set", f"to-{name}", "down")

    def join(self, name: str) -> None:
        """Plug it in again; repeatable."""
        _ip("-n", self.name, "link", "set", f"to-{name}", "up")


@contextlib.contextmanager
def switch(names: Sequence[str]) -> Iterator[Switch]:
    """A namespace for each name, joined by a switch, for as long as the block lasts.

    Raises:
        NoNamespaces: not root, no ``ip`` command, or the kernel forbids it.
    """
    if os.geteuid() != 0:
        raise NoNamespaces("network namespaces need root")
    if shutil.which("ip") is None:
        raise NoNamespaces("there is no ip command (install iproute2)")
    made = Switch(f"kvd-fault-{os.getpid()}", names)
    with contextlib.ExitStack() as stack:
        for space in (made.name, *made.namespaces.values()):
            _ip("netns", "add", space)
            stack.callback(_ip, "netns", "delete", space)
        _ip("-n", made.name, "link", "add", "hub", "type", "bridge")
        _ip("-n", made.name, "address", "add", f"{SWITCH_HOST}/24", "dev", "hub")
        for device in ("hub", "lo"):
            _ip("-n", made.name, "link", "set", device, "up")
        for name, space in made.namespaces.items():
            cable = ["type", "veth", "peer", "name", f"to-{name}", "netns", made.name]
            _ip("link", "add", DEVICE, "netns", space, *cable)
            _ip("-n", made.name, "link", "set", f"to-{name}", "master", "hub", "up")
            _ip("-n", space, "address", "add", f"{made.hosts[name]}/24", "dev", DEVICE)
            for device in (DEVICE, "lo"):
                _ip("-n", space, "link", "set", device, "up")
        for space in made.namespaces.values():
            _wait_until_up(space)
        yield made


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")


def _wait_until_up(space: str) -> None:
    """Until the kernel has noticed that the cable is plugged in: before that UCX sees no device."""
    deadline_s = time.monotonic() + UP_WITHIN_S
    look = ["ip", "-n", space, "-o", "link", "show", "dev", DEVICE]
    while "state UP" not in subprocess.run(look, capture_output=True, text=True, check=True).stdout:
        if time.monotonic() > deadline_s:
            raise NoNamespaces(f"{DEVICE} in {space} is not up after {UP_WITHIN_S:g} s")
        time.sleep(0.01)
