"""Where the memory of a pool is to lie: what ``pool.backing`` and ``pool.directory`` mean here.

Only names and paths; ``file_memory`` opens them.
"""

from __future__ import annotations

import enum
import hashlib
import os
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from kvd.pools.arena import NotReserved
from kvd.pools.mounts import DEFAULT_TMPFS, HUGETLBFS, TMPFS, first_hugetlbfs

_LONGEST_NAME: Final = 200
"""A file name has 255 bytes at most, with what stands before it."""


class Backing(enum.Enum):
    """Who keeps the memory: this process, a directory of files, or systemd."""

    ANON = "anon"
    """A sealed memfd: gone when the last process that maps it has ended."""
    SHM = "shm"
    """Files on a tmpfs."""
    HUGETLBFS = "hugetlbfs"
    """Files of huge pages."""
    FDSTORE = "fdstore"
    """Sealed memfds that systemd holds while the daemon is away."""

    @property
    def file_system(self) -> str:
        """The type of file system that its files must lie on; empty where it has none."""
        return {Backing.SHM: TMPFS, Backing.HUGETLBFS: HUGETLBFS}.get(self, "")


class PoolLocation(msgspec.Struct, frozen=True):
    """Where a daemon keeps its pool.

    ``directory`` is ``pool.directory``; ``runtime`` the absolute path of the directory of
    ``sockets.client``, which no two daemons of a host share.
    """

    backing: Backing
    directory: str | None
    runtime: str

    @property
    def is_chosen(self) -> bool:
        """Whether somebody named the directory, so that it is not ours to remove."""
        return self.directory is not None

    def path(self) -> Path:
        """The directory of the files.

        Raises:
            NotReserved: there is no hugetlbfs; the message says how to mount one.
        """
        if self.directory is not None:
            return Path(self.directory)
        if self.backing is Backing.HUGETLBFS:
            return _hugetlbfs() / own_name(self.runtime)
        return DEFAULT_TMPFS / own_name(self.runtime)


def own_name(runtime: str) -> str:
    """A name that no other user and no other runtime directory of this host gives."""
    path = os.path.normpath(runtime).strip("/")
    said = quote(path, safe="/").replace("-", "%2D").replace("/", "-")
    if len(said) > _LONGEST_NAME:
        said = hashlib.sha256(path.encode()).hexdigest()
    return f"kvd-{os.geteuid()}-{said}"


def _hugetlbfs() -> Path:
    found = first_hugetlbfs()
    if found is None:
        raise NotReserved(
            "pool.backing = hugetlbfs needs a mounted hugetlbfs, and there is none here: "
            "mount -t hugetlbfs -o mode=1777 none /dev/hugepages, name it in pool.directory, or "
            "set pool.backing = 'shm'"
        )
    return found
