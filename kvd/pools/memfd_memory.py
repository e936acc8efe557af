"""Memory without a name on any file system: sealed memfds that systemd holds.

What lives here: judging what systemd gave back. What must not: its protocol, by which it gives
the descriptors and takes them (``kvd.daemon``).
"""

from __future__ import annotations

import fcntl
import os
import stat
from typing import TYPE_CHECKING

from typing_extensions import override

from kvd.pools.arena import SEALS, Arena
from kvd.pools.kept_memory import MISSING, PREFIX, KeptMemory, UnfitMemory, flaw_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class StoredMemory(KeptMemory):
    """What was given back, by name.

    ``to_store`` is what was made and is to be held from now on; ``stale`` are the names of what is
    held and of no more use. Whoever talks to systemd acts on both.
    """

    where = "in systemd's store of descriptors"

    def __init__(self, given: Mapping[str, int]) -> None:
        """Take over the descriptors of ``given`` that are pool memory; others are left alone."""
        self.to_store: dict[str, int] = {}
        self._given = {name: fd for name, fd in given.items() if _is_memory(name, fd)}

    @override
    def find(self, name: str, size_bytes: int) -> Arena | UnfitMemory:
        """The memfd that came back under ``name``, as a descriptor of its own."""
        fd = self._given.get(name)
        if fd is None:
            return MISSING
        flaw = _flaw(fd, size_bytes)
        if flaw is not None:
            return flaw
        return Arena(name, fd=fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0), size_bytes=size_bytes)

    @override
    def make(self, name: str, size_bytes: int, advance: Callable[[int], None]) -> Arena:
        """A new sealed memfd, noted in ``to_store``.

        Raises:
            NotReserved: there is not enough memory.
        """
        arena = super().make(name, size_bytes, advance)
        self.to_store[name] = arena.fd
        return arena

    @override
    def kept_bytes(self) -> int:
        """What came back."""
        return sum(os.fstat(fd).st_blocks * 512 for fd in self._given.values())

    @override
    def clear(self, keep: frozenset[str] = frozenset()) -> None:
        """Close what came back but ``keep``, and forget what was made; all that is stale."""
        gone = [name for name in self._given if name not in keep]
        for name in gone:
            os.close(self._given.pop(name))
        self.stale += (*gone, *self.to_store)
        self.to_store = {}

    @override
    def close(self) -> None:
        """Close what came back; systemd has copies of its own. Repeatable."""
        for fd in self._given.values():
            os.close(fd)
        self._given = {}


def _is_memory(name: str, fd: int) -> bool:
    """Whether this is ours: sockets come the same way, under names that may look alike."""
    return name.startswith(PREFIX) and stat.S_ISREG(os.fstat(fd).st_mode)


def _flaw(fd: int, size_bytes: int) -> UnfitMemory | None:
    """What keeps a descriptor from being believed."""
    seen = os.fstat(fd)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return UnfitMemory("is no memfd")
    is_writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    reasons = {
        f"belongs to uid {seen.st_uid}": seen.st_uid != os.geteuid(),
        "is not sealed as kvd seals it": seals != SEALS,
        "cannot be written to": not is_writable,
    }
    return flaw_of(seen, size_bytes, reasons)
