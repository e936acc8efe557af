"""Proof that a dead process's memory map is gone too.

A process that copies into another one (``process_vm_writev``, which UCX uses on one host) holds
the other's memory map while the call lasts. So a transfer process can be dead and reaped while a
peer still writes through its map, into pages that the daemon would like to use again.

The witness is a file the transfer process maps writable and nobody else maps. Linux refuses to seal
a file against writing while a writable mapping of it exists, so a seal that succeeds proves that
the map is gone, and with it every such copy.
"""

from __future__ import annotations

import errno
import fcntl
import os
from typing import Final

from kvd.transfer.mapping import hold

_SIZE: Final = 4096


def create_witness() -> int:
    """A new witness, as a file descriptor for the transfer process to inherit."""
    descriptor = os.memfd_create("kvd-witness", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, _SIZE)
    return descriptor


def keep_map(descriptor: int) -> None:
    """Map a witness, or a lock file, until this process's memory map goes.

    A mapping keeps the open file alive, and a lock that was taken through it: so whoever gets the
    lock next has the same proof. It is never touched, so the file may be empty.
    """
    hold(descriptor, _SIZE)


def is_map_gone(descriptor: int) -> bool:
    """Whether no memory map holds the witness any more; stays true once it was."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    except OSError as exc:
        if exc.errno == errno.EBUSY:
            return False
        raise
    return True
