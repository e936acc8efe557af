"""The directory of one daemon's pool files: opened with care, locked, and looked through.

What lives here: finding, making and removing files on a tmpfs or a hugetlbfs. What must not: which
files make a pool, and when they are believed (``memory``).

A file here is believed later without having been watched, so nobody else may ever have been able
to write to it: the directory is ours and closed to others, every file is ours with mode 0600 and
one name, and no symbolic link is followed. Unlike a memfd such a file cannot be sealed: an engine
that is handed the descriptor could truncate it, and all who map it would die of it. Whoever may
attach is trusted that far, as it is with the pages of others.

A file is made without a name and gets it when it is whole (O_TMPFILE, then a link), so a process
killed at any moment leaves a whole file or none.

The lock is a file and no directory, because the transfer process holds it by mapping it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from kvd.pools.arena import HUGE_PAGE_BYTES, Arena, NotReserved, fill, mib
from kvd.pools.kept_memory import JOURNAL, MISSING, PREFIX, KeptMemory, UnfitMemory, flaw_of
from kvd.pools.mounts import HUGETLBFS, TMPFS, free_huge_bytes, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvd.pools.location import PoolLocation

LOCK_NAME: Final = f"{PREFIX}lock"

_LOOK_S: Final = 0.02
_MODE: Final = 0o600


class FileMemory(KeptMemory):
    """One directory of pool files, locked until the last copy of the lock's descriptor goes.

    ``keep_open`` is the lock.
    """

    def __init__(self, path: Path, kind: str, *, fd: int, lock_fd: int) -> None:
        """Take over both descriptors; ``open_directory`` checks what they are of."""
        self.path = path
        self._lock_fd = lock_fd
        self._fd = fd
        self.is_apart = kind == HUGETLBFS
        page = os.statvfs(fd).f_bsize if self.is_apart else 0
        self.grain_bytes = max(HUGE_PAGE_BYTES, page)
        self.where = f"in {path}"
        self.keep_open = (lock_fd,)

    @override
    def find(self, name: str, size_bytes: int) -> Arena | UnfitMemory:
        """The file ``name``, if it is whole and nobody but us can have written to it.

        Raises:
            NotReserved: it belongs to somebody else.
        """
        try:
            seen = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return MISSING
        self._check_owner(name, seen)
        mode = stat.S_IMODE(seen.st_mode)
        reasons = {
            "is no regular file": not stat.S_ISREG(seen.st_mode),
            f"has mode {mode:04o} where 0600 keeps others out": mode != _MODE,
            f"has {seen.st_nlink} names": seen.st_nlink != 1,
        }
        flaw = flaw_of(seen, size_bytes, reasons)
        if flaw is not None:
            return flaw
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        opened = os.fstat(fd)
        if (opened.st_dev, opened.st_ino) != (seen.st_dev, seen.st_ino):
            os.close(fd)
            return UnfitMemory("was exchanged while it was looked at")
        return Arena(name, fd=fd, size_bytes=size_bytes)

    @override
    def make(self, name: str, size_bytes: int, advance: Callable[[int], None]) -> Arena:
        """A new file of ``size_bytes``, which has its name once it is whole.

        Raises:
            NotReserved: there is no room for it; nothing stays taken.
        """
        fd = -1
        try:
            fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, _MODE, dir_fd=self._fd)
            os.fchmod(fd, _MODE)
            fill(fd, size_bytes, advance)
            os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=self._fd, follow_symlinks=True)
        except OSError as exc:
            if fd >= 0:
                os.close(fd)
            raise NotReserved(
                f"making {self.path / name} of {mib(size_bytes)} failed: {exc.strerror}; "
                f"{self._said_room()}"
            ) from exc
        return Arena(name, fd=fd, size_bytes=size_bytes)

    @override
    def kept_bytes(self) -> int:
        """What our files take."""
        return sum(seen.st_blocks * 512 for _, seen in _entries(self._fd))

    @override
    def check_room(self, size_bytes: int) -> None:
        """Refuse what this file system cannot hold even without our files."""
        free = self._free_bytes()
        if free is not None and size_bytes > free + self.kept_bytes():
            raise NotReserved(
                f"the pool needs {mib(size_bytes)} in {self.path}; {self._said_room()}"
            )

    @override
    def clear(self, keep: frozenset[str] = frozenset()) -> None:
        """Remove our files but ``keep``. The journal goes first: without it the rest is nothing.

        Raises:
            NotReserved: one belongs to somebody else.
        """
        entries = sorted(_entries(self._fd), key=lambda entry: entry[0] != JOURNAL)
        for name, seen in entries:
            if name not in keep:
                self._check_owner(name, seen)
                os.unlink(name, dir_fd=self._fd)

    def discard(self) -> None:
        """Remove our files and the lock. A daemon that waits for the lock notices, and makes one.

        Raises:
            NotReserved: a file belongs to somebody else.
        """
        self.clear()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(LOCK_NAME, dir_fd=self._fd)

    @override
    def close(self) -> None:
        """Drop our descriptors, and the lock unless another process has a copy; repeatable."""
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock_fd = -1

    def _check_owner(self, name: str, seen: os.stat_result) -> None:
        if seen.st_uid != os.geteuid():
            raise NotReserved(_foreign(self.path / name, seen.st_uid))

    def _free_bytes(self) -> int | None:
        """What the file system says it has left; None where it has no limit of its own."""
        if self.is_apart:
            return free_huge_bytes(self.grain_bytes)
        shape = os.statvfs(self._fd)
        return shape.f_bavail * shape.f_frsize if shape.f_blocks else None

    def _said_room(self) -> str:
        free = self._free_bytes()
        if self.is_apart:
            what = f"{(free or 0) // self.grain_bytes} huge pages of {mib(self.grain_bytes)}"
            return (
                f"{what} are free on this host: raise vm.nr_hugepages (sysctl), or lower "
                "pool.pages or pool.size"
            )
        left = "no limit is set" if free is None else f"{mib(free)} are free"
        return (
            f"{left} on this tmpfs: enlarge it (mount -o remount,size=...; in a container: "
            "--shm-size), or lower pool.pages or pool.size"
        )


def open_directory(place: PoolLocation, *, wait_s: float) -> FileMemory:
    """Open the directory of ``place`` and take its lock; the directory is made if it is not there.

    Args:
        place: where it is.
        wait_s: how long another one may take to let go of the lock.

    Raises:
        NotReserved: it is no place for a pool, or another daemon uses it; the message says which.
    """
    path = place.path()
    end_s = time.monotonic() + wait_s
    while True:
        with contextlib.ExitStack() as undo:
            fd = _open_directory(path, place)
            undo.callback(os.close, fd)
            lock_fd = _open_lock(path, fd)
            undo.callback(os.close, lock_fd)
            if _is_locked(lock_fd) and _is_still(path, fd, lock_fd):
                undo.pop_all()
                return FileMemory(path, place.backing.file_system, fd=fd, lock_fd=lock_fd)
            holder = _holder(lock_fd)
        if time.monotonic() >= end_s:
            raise NotReserved(
                f"{path} is in use by a daemon that runs{holder}: stop it, or give each daemon a "
                "pool.directory of its own"
            )
        time.sleep(_LOOK_S)


def left_over(path: Path) -> dict[str, int]:
    """The bytes that each file of a pool takes in a directory, whoever uses it; the lock apart.

    Nothing is opened for writing, and nothing made: ``{}`` where there is no such directory, or
    where it is not ours to look into.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        return {name: seen.st_blocks * 512 for name, seen in _entries(fd)}
    finally:
        os.close(fd)


def _entries(directory: int) -> Iterator[tuple[str, os.stat_result]]:
    """What is called like a file of ours, and is no directory."""
    for name in sorted(os.listdir(directory)):
        if not name.startswith(PREFIX) or name == LOCK_NAME:
            continue
        with contextlib.suppress(FileNotFoundError):  # whoever has the lock may remove it
            seen = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if not stat.S_ISDIR(seen.st_mode):
                yield name, seen


def _open_directory(path: Path, place: PoolLocation) -> int:
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        raise NotReserved(
            f"{path} is a symbolic link or no directory, so somebody else could have put a pool "
            "in the place of ours: remove it, or set pool.directory to another one"
        ) from None
    except OSError as exc:
        raise NotReserved(
            f"the directory {path} cannot be used: {exc.strerror}: make it with mode 0700 for the "
            "user of the daemon, or set pool.directory to another one"
        ) from exc
    try:
        _check_directory(path, os.fstat(fd), place.backing.file_system)
    except NotReserved:
        os.close(fd)
        raise
    return fd


def _check_directory(path: Path, seen: os.stat_result, wanted: str) -> None:
    """Refuse a directory in which others may put files, or which lies in no memory."""
    if seen.st_uid != os.geteuid():
        raise NotReserved(_foreign(path, seen.st_uid))
    if seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotReserved(
            f"{path} has mode {stat.S_IMODE(seen.st_mode):04o}, so others could put files of "
            "theirs in the place of ours: set pool.directory to a directory with mode 0700 of its "
            "own, below it for example"
        )
    kind = kind_of(seen.st_dev)
    if kind != wanted:
        other = f", or set pool.backing = '{_FITTING[kind]}'" if kind in _FITTING else ""
        raise NotReserved(
            f"{path} lies on {kind}, and pool.backing wants a directory on {wanted}: set "
            f"pool.directory to one{other}"
        )


_FITTING: Final = {TMPFS: "shm", HUGETLBFS: "hugetlbfs"}


def _open_lock(path: Path, directory: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(LOCK_NAME, flags, _MODE, dir_fd=directory)
    except OSError as exc:
        raise NotReserved(
            f"{path / LOCK_NAME} cannot be opened: {exc.strerror}: remove it"
        ) from exc
    return fd


def _is_locked(lock_fd: int) -> bool:
    """Take the lock if it is free."""
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(path: Path, directory: int, lock_fd: int) -> bool:
    """Whether both are what their names lead to, and were not removed before we had the lock."""
    try:
        at_path = os.stat(path, follow_symlinks=False)
        at_name = os.stat(LOCK_NAME, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(at_path, os.fstat(directory)) and os.path.samestat(
        at_name, os.fstat(lock_fd)
    )


def _holder(lock_fd: int) -> str:
    """Who took the lock, as the kernel lists it; empty where it does not say."""
    seen = os.fstat(lock_fd)
    place = f"{os.major(seen.st_dev):02x}:{os.minor(seen.st_dev):02x}:{seen.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if place in fields and "->" not in fields:
                return f" (pid {fields[fields.index(place) - 1]})"
    return ""


def _foreign(path: Path, uid: int) -> str:
    return (
        f"{path} belongs to uid {uid}, and this process runs as uid {os.geteuid()}: remove it as "
        "that user, or set pool.directory to a directory of your own"
    )
