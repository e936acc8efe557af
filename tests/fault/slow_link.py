"""Two network namespaces, and a wire between them that is as slow as it is told to be.

Each has a TAP device; what one sends a process carries to the other (see ``shuttle``), so that a
link of 1 MB/s with megabytes of buffer in it can be had without any module of the kernel for it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec

from tests.fault.shuttle import PEERS_PORT, Command, Seen
from tests.support.daemons import Place
from tests.support.netns import DEVICE, NoNamespaces, ip, need_namespaces

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FAST = 40e6
"""Bytes a second: what the process carries without being busy all the time."""

QUEUE_FRAMES = 20_000
"""Of each device, so that the kernel loses nothing before the wire has it."""

_NET = "10.231.83"
_TUN = "/dev/net/tun"
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x2, 0x1000
_SEEN = msgspec.json.Decoder(Seen)
_MOST_ANSWER = 1 << 20


class SlowLink:
    """The wire, and the places at its ends. Data goes as ``command`` says, from the next frame."""

    def __init__(self, namespaces: dict[str, str], commands: socket.socket) -> None:
        self._commands = commands
        self.namespaces = namespaces
        self.command = Command(FAST)

    def place(self, name: str) -> Place:
        """Where the daemon of this name listens."""
        number = list(self.namespaces).index(name) + 1
        prefix = ("ip", "netns", "exec", self.namespaces[name])
        return Place(prefix, f"{_NET}.{number}", PEERS_PORT)

    def carry(self, command: Command) -> Seen:
        """Carry like that from now on."""
        self.command = command
        return self._say(msgspec.json.encode(command))

    def look(self) -> Seen:
        """What it has delivered and what is inside."""
        return self._say(b"?")

    def _say(self, line: bytes) -> Seen:
        self._commands.send(line)
        return _SEEN.decode(self._commands.recv(_MOST_ANSWER))


@contextlib.contextmanager
def slow_link(
    names: tuple[str, str], *, mtu: int = 9000, kernel: Mapping[str, str] | None = None
) -> Iterator[SlowLink]:
    """Two namespaces with a wire between them, for as long as the block lasts.

    Args:
        names: of the two ends.
        mtu: of both devices.
        kernel: what both namespaces have under ``/proc/sys/net/ipv4``, by file.

    Raises:
        NoNamespaces: not root, no ``ip`` command, no TAP devices, or the kernel forbids it.
    """
    need_namespaces()
    spaces = {name: f"kvd-slow-{os.getpid()}-{name}" for name in names}
    with contextlib.ExitStack() as stack:
        taps = []
        for number, space in enumerate(spaces.values(), 1):
            ip("netns", "add", space)
            stack.callback(ip, "netns", "delete", space)
            taps.append(_new_tap(space, f"kvdslow{os.getpid() % 100_000}{number}", mtu))
            stack.callback(os.close, taps[-1])
            ip("-n", space, "address", "add", f"{_NET}.{number}/24", "dev", DEVICE)
            for file, value in (kernel or {}).items():
                _tune(space, file, value)
            for device in (DEVICE, "lo"):
                ip("-n", space, "link", "set", device, "up")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        handed = (*taps, theirs.fileno())
        shuttle = subprocess.Popen(
            [sys.executable, "-m", "tests.fault.shuttle", *map(str, handed)],
            pass_fds=handed,
            start_new_session=True,  # Ctrl-C is not for it: it ends when nobody commands it
        )
        stack.callback(shuttle.wait)
        stack.callback(ours.close)
        theirs.close()
        link = SlowLink(spaces, ours)
        link.carry(link.command)
        yield link


def _new_tap(space: str, name: str, mtu: int) -> int:
    """The descriptor of a new device in that namespace; the device ends with it."""
    try:
        tap = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
    except OSError as why:
        hint = " (modprobe tun)" if why.errno in {errno.ENOENT, errno.ENODEV} else ""
        raise NoNamespaces(f"{_TUN} cannot be opened: {why.strerror}{hint}") from why
    try:
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
        ip("link", "set", name, "netns", space)
        ip("-n", space, "link", "set", name, "name", DEVICE)
        words = ("mtu", str(mtu), "txqueuelen", str(QUEUE_FRAMES))
        ip("-n", space, "link", "set", DEVICE, *words)
    except (OSError, NoNamespaces) as why:
        os.close(tap)
        raise NoNamespaces(f"no TAP device can be made here: {why}") from why
    return tap


def _tune(space: str, file: str, value: str) -> None:
    command = ["ip", "netns", "exec", space, "tee", f"/proc/sys/net/ipv4/{file}"]
    done = subprocess.run(command, input=value, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"net.ipv4.{file} = {value} in {space}: {done.stderr.strip()}")
