"""Two network namespaces joined by a cable: two hosts on one, where root may make them.

Processes are placed in one by a prefix of their command line. ``ip netns exec`` is more than a
setns: it shows the namespace's own interfaces under /sys, where UCX looks for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTS: Final = ("10.231.77.1", "10.231.77.2")
DEVICE: Final = "kvd0"
UP_WITHIN_S: Final = 5.0

_FAST, _SLOW = "10", "20"
_NO_LIMIT: Final = 1e9
_BURSTS: Final = ("quantum", "65536", "burst", "128kb", "cburst", "128kb")
"""Packets of 64 KiB pass a veth pair in one piece."""

_CLONE_NEWNET: Final = 0x40000000


class NoNamespaces(Exception):
    """They cannot be made here; the message says why."""


class Namespace(msgspec.Struct, frozen=True):
    """One of the two: its name, and its address on the cable."""

    name: str
    host: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to put before a command line to run it inside."""
        return ("ip", "netns", "exec", self.name)

    def connect(self, host: str, port: int) -> socket.socket:
        """A TCP connection made inside, usable here.

        Raises:
            OSError: nobody listens there.
        """
        made: list[socket.socket | OSError] = []

        def dial() -> None:
            try:
                _enter(self.name)
                made.append(socket.create_connection((host, port), timeout=10))
            except OSError as exc:
                made.append(exc)

        thread = threading.Thread(target=dial)  # it alone changes its namespace, and then ends
        thread.start()
        thread.join()
        match made:
            case [socket.socket() as connection]:
                return connection
            case [OSError() as exc]:
                raise exc
            case _:
                raise OSError("the connecting thread died")


@contextlib.contextmanager
def two_namespaces() -> Iterator[tuple[Namespace, Namespace]]:
    """Two namespaces joined by a veth pair, for as long as the block lasts.

    Raises:
        NoNamespaces: not root, no ``ip`` command, or the kernel forbids it.
    """
    need_namespaces()
    names = [f"kvd-bench-{os.getpid()}-{side}" for side in "pd"]
    with contextlib.ExitStack() as made:
        for name in names:
            ip("netns", "add", name)
            made.callback(ip, "netns", "delete", name)
        cable = ["type", "veth", "peer", "name", DEVICE, "netns", names[1]]
        ip("link", "add", DEVICE, "netns", names[0], *cable)
        for name, host in zip(names, HOSTS, strict=True):
            ip("-n", name, "address", "add", f"{host}/30", "dev", DEVICE)
            ip("-n", name, "link", "set", DEVICE, "up")
            ip("-n", name, "link", "set", "lo", "up")
        for name in names:
            wait_until_up(name)
        first, second = (Namespace(*each) for each in zip(names, HOSTS, strict=True))
        yield first, second


def need_namespaces() -> None:
    """See that they can be made.

    Raises:
        NoNamespaces: not root, or no ``ip`` command.
    """
    if os.geteuid() != 0:
        raise NoNamespaces("network namespaces need root")
    if shutil.which("ip") is None:
        raise NoNamespaces("there is no ip command (install iproute2)")


def slow_down(space: Namespace, bytes_per_s: float, fast_port: int) -> None:
    """Let what leaves ``space`` over the cable wait for its turn, but for TCP of ``fast_port``.

    Raises:
        NoNamespaces: there is no ``tc`` command, or the kernel cannot do it.
    """
    on = ("dev", DEVICE)
    _tc(space, "qdisc", "add", *on, "root", "handle", "1:", "htb", "default", _SLOW)
    for name, rate, first in ((_SLOW, bytes_per_s, "1"), (_FAST, _NO_LIMIT, "0")):
        words = ("classid", f"1:{name}", "htb", "rate", f"{rate:.0f}bps", "prio", first)
        _tc(space, "class", "add", *on, "parent", "1:", *words, *_BURSTS)
    for end in ("sport", "dport"):
        match = ("u32", "match", "ip", end, str(fast_port), "0xffff", "flowid", f"1:{_FAST}")
        _tc(space, "filter", "add", *on, "parent", "1:", "protocol", "ip", *match)


def slow_bytes(space: Namespace) -> int:
    """What has left ``space`` over the cable that was slowed down, headers included."""
    said = _tc(space, "-s", "class", "show", "dev", DEVICE)
    sent = re.search(rf"^class htb 1:{_SLOW} .*\n\s*Sent (\d+) bytes", said, re.MULTILINE)
    if sent:
        return int(sent[1])
    raise NoNamespaces(f"nothing was slowed down in {space.name}")


def _tc(space: Namespace, *words: str) -> str:
    if shutil.which("tc") is None:
        raise NoNamespaces("there is no tc command (install iproute2)")
    command = ["tc", "-n", space.name, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def ip(*words: str) -> None:
    """Run ``ip`` with these words.

    Raises:
        NoNamespaces: it failed; the message says what it said.
    """
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"`ip {' '.join(words)}` failed: {done.stderr.strip()}")


def wait_until_up(name: str) -> None:
    """Until the kernel has noticed that the cable is plugged in: before that UCX sees no device."""
    deadline_s = time.monotonic() + UP_WITHIN_S
    look = ["ip", "-n", name, "-o", "link", "show", "dev", DEVICE]
    while (
        "state UP" not in subprocess.run(look, capture_output=True, text=True, check=False).stdout
    ):
        if time.monotonic() > deadline_s:
            raise NoNamespaces(f"{DEVICE} in {name} is not up after {UP_WITHIN_S:g} s")


def _enter(name: str) -> None:
    """Move the calling thread into a namespace."""
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"entering the network namespace {name}")
    finally:
        os.close(descriptor)
