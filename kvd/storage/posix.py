"""A tier in a directory of this host: one file an object.

    DIRECTORY/kvd-tier                                     says that kvd may remove what lies here
    DIRECTORY/lock                                         held by the process that writes here
    DIRECTORY/LAYOUT/writing/N                             an object that is being written
    DIRECTORY/LAYOUT/=NAMESPACE/KK/KEY                     an object; KK are the first digits of KEY

``LAYOUT`` and ``KEY`` are hexadecimal digests; a namespace is escaped as in an URL, and one that is
too long for a file name is a digest, with its name in a file beside its objects.

An object is written under ``writing`` and gets its name when it is whole, so a process that is
killed at any moment leaves a whole object or none. A host that loses power may leave one whose page
did not reach the disk: its sum says so when it is read. When an object was last used is the time of
its file, and of those that were used together the first of a prompt has the latest. Room for it is
taken before anything is written, so a full disk is said in its own words.

What was written or read lately is in the kernel's page cache, and a copy out of it is the fastest.
What is not would be read into it first, one piece after the other, on the processor of who asks,
and push out what others have there. So it is read past the cache (``O_DIRECT``): the disk writes to
the pool itself, many pieces at a time. It takes whole blocks in file and memory; where they are
none, or the file system does not do it, all goes through the cache. Which of the two a file is, its
head tells: that is read through the cache in any case, as it is judged before a byte of the page is
asked for, and put out of it again where the page was read past it.

Only the user of the daemon may read the directory: the pages of prompts are in it. All the same
anything may come to lie there in the place of anything. What is no file is no object, what is no
directory is not searched, and nothing behind a link is removed. A process whose lock lies there no
more has lost the directory, which may be another daemon's by now: it ends.

What is to go and cannot be removed counts in no bound, and may be of a namespace that was flushed.
So nothing more is written until it is gone. A directory goes with the last object in it: namespaces
come and go, and what each of them left would grow for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import shutil
import stat
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote

import numpy as np
from typing_extensions import override

from kvd.core.tiers.keys import KEY_BYTES
from kvd.storage.backend import (
    Backend,
    Capabilities,
    Existence,
    ObjectName,
    SearchOutcome,
    StorageLost,
    StoredObject,
)
from kvd.storage.nixl_files import FileMove, FileQueue
from kvd.storage.objects import BadObject, escaped
from kvd.storage.sizes import BLOCK_BYTES, HEAD_BYTES, object_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvd.storage.backend import ObjectRead, ObjectWrite
    from kvd.storage.objects import ObjectHead
    from kvd.storage.pages import ObjectPages
    from kvd.transfer.nixl import Binding, MemorySpan

MARK: Final = "kvd-tier"
LOCK: Final = "lock"
WRITING: Final = "writing"
TRIAL: Final = "trial"
NAME: Final = "namespace"
"""The file that has the name of a namespace whose directory is a digest."""

LOCK_S: Final = 5.0
"""How long the process before may take to end."""
LOCK_EVERY_S: Final = 0.02

_HEX: Final = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


class DirectoryTier(Backend):
    """One directory, of which this process has the lock."""

    def __init__(self, directory: str, layout: bytes, pages: ObjectPages) -> None:
        """Take the directory; ``begin`` makes it ready to move bytes.

        Raises:
            StorageLost: it cannot be used; the message says why, and what to do.
        """
        self.capabilities = Capabilities(
            transport="nixl POSIX (libaio)",
            batch_bytes=16 * 2**20,
            batch_objects=64,
            write_bytes=4 * 2**20,
        )
        self._directory = directory
        self._root = os.path.join(directory, layout.hex())
        self._writing = os.path.join(self._root, WRITING)
        self._size = object_bytes(pages.page_bytes)
        self._shape = (pages.offsets + np.uint64(HEAD_BYTES), pages.sizes)
        self._pruning = threading.Lock()
        """Held by who removes directories that are empty, or puts something in one that was."""
        self._left: dict[str, None] = {}
        """Paths of what is to go and could not be removed."""
        self._drafts = 0
        try:
            self._lock = _taken(directory)
            for place in (self._root, self._writing):
                _own(place)
        except OSError as exc:
            raise StorageLost(f"the directory {directory} cannot be used: {exc.strerror}") from exc
        trial = os.path.join(self._writing, TRIAL)
        self._skips_cache = pages.are_blocks and reads_past_cache(trial)
        """Whether a page that is not in the kernel's page cache is read past it."""

    def begin(self, binding: Binding, name: str, spans: Sequence[MemorySpan]) -> None:
        """Be ready to write and to read.

        Raises:
            NixlUnusable: NIXL refuses.
        """
        # One each: a queue's completions are told to whoever asks, and two threads would.
        self._writes = FileQueue(binding, f"{name}-writes", spans, self._shape)
        self._reads = FileQueue(binding, f"{name}-reads", spans, self._shape)

    # ---- objects ---------------------------------------------------------------------------------

    @override
    def put(self, objects: Sequence[ObjectWrite]) -> list[str]:
        self._look()
        why = self._remove_left()
        if why:
            return [why] * len(objects)
        with contextlib.ExitStack() as opened:
            drafts = [self._draft(write.head, opened) for write in objects]
            self._writes.write(
                [
                    FileMove(draft.fd, write.addresses)
                    for draft, write in zip(drafts, objects, strict=True)
                    if isinstance(draft, _Draft)
                ]
            )
            return [
                self._named(draft, write) if isinstance(draft, _Draft) else draft.why
                for draft, write in zip(drafts, objects, strict=True)
            ]

    def _draft(self, head: bytes, opened: contextlib.ExitStack) -> _Draft | BadObject:
        """A file with room for an object, and its head; closed with ``opened``."""
        path = self._new_path()
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            opened.callback(os.close, fd)
            _reserve(fd, self._size)
            os.pwrite(fd, head, 0)
        except OSError as exc:
            return BadObject(self._refused(path, exc))
        return _Draft(fd, path)

    def _named(self, draft: _Draft, write: ObjectWrite) -> str:
        """Give a written file its time and its name; why it has none."""
        path = self._path(write.name)
        try:
            _date(draft.fd, write.used_ns)
            try:
                os.rename(draft.path, path)
            except FileNotFoundError:
                with self._pruning:
                    self._make_directory(write.name)
                    os.rename(draft.path, path)
            except IsADirectoryError:
                self._remove(path)
                os.rename(draft.path, path)
        except OSError as exc:
            return self._refused(draft.path, exc)
        return ""

    def _new_path(self) -> str:
        """Where nothing lies, among what is being written."""
        self._drafts += 1
        # It is missing where somebody has removed more than objects.
        with contextlib.suppress(OSError):
            os.makedirs(self._writing, mode=0o700, exist_ok=True)
        return os.path.join(self._writing, str(self._drafts))

    def _refused(self, path: str, exc: OSError) -> str:
        with contextlib.suppress(OSError):
            os.unlink(path)
        return f"{self._directory}: {exc.strerror}"

    @override
    def get(self, objects: Sequence[ObjectRead]) -> list[ObjectHead | BadObject]:
        self._look()
        with contextlib.ExitStack() as opened:
            # All of them first: then the disk reads all heads that it has to at the same time.
            files = [self._opened(read.name, opened) for read in objects]
            found = [
                _source(file, read, self._size) if isinstance(file, _File) else file
                for file, read in zip(files, objects, strict=True)
            ]
            sources = [
                (source, read)
                for source, read in zip(found, objects, strict=True)
                if isinstance(source, _Source)
            ]
            try:
                self._reads.read([FileMove(source.fd, read.addresses) for source, read in sources])
            except StorageLost:
                # Any of them may be what cannot be read: the next process must not meet it again.
                self.drop(read.name for _, read in sources)
                raise
            for source, read in sources:
                _date(source.fd, read.used_ns)
                if source.is_cold:
                    _forget_head(source.fd)
        return [source.head if isinstance(source, _Source) else source for source in found]

    def _opened(self, name: ObjectName, opened: contextlib.ExitStack) -> _File | BadObject:
        """The file of an object; closed with ``opened``."""
        try:
            fd = _opened(self._path(name))
            opened.callback(os.close, fd)
            return _File(fd, is_cold=self._skips_cache and _is_cold(fd))
        except FileNotFoundError:
            return BadObject("it is not there", is_there=False)
        except OSError as exc:
            return BadObject(f"{exc.strerror}")

    @override
    def exists(self, names: Sequence[ObjectName]) -> Existence:
        return Existence([os.path.exists(self._path(name)) for name in names], "")

    @override
    def drop(self, names: Iterable[ObjectName]) -> None:
        self._look()
        paths = [self._path(name) for name in names]
        for path in paths:
            self._remove_or_leave(path)
        with self._pruning:
            for directory in {os.path.dirname(path) for path in paths}:
                _prune(directory)

    @override
    def age(self, objects: Iterable[StoredObject]) -> None:
        for name, used_ns in objects:
            _date(self._path(name), used_ns)

    @override
    def drop_namespace(self, namespace: str) -> None:
        self._look()
        self._remove_or_leave(os.path.join(self._root, escaped(namespace)))

    def _remove_or_leave(self, path: str) -> None:
        """It is gone, or will be before anything more is written."""
        try:
            self._remove(path)
        except OSError:
            self._left[path] = None

    def _remove(self, path: str) -> None:
        """An object, or the directory of a namespace: that is gone as a whole, or not.

        Raises:
            OSError: it is there still.
        """
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except IsADirectoryError:
            going = self._new_path()
            while os.path.lexists(going):
                going = self._new_path()
            os.rename(path, going)
            shutil.rmtree(going, ignore_errors=True)

    def _remove_left(self) -> str:
        """Remove what could not be removed before; why it still cannot."""
        for path in list(self._left):
            try:
                self._remove(path)
            except OSError as exc:
                name = _shown(os.path.relpath(path, self._root))
                return f"{self._directory}: {name} cannot be removed: {exc.strerror}"
            self._left.pop(path, None)
        return ""

    def _look(self) -> None:
        """See whether the directory is the one that this process has the lock of.

        Raises:
            StorageLost: it is not.
        """
        held, why = os.fstat(self._lock), ""
        try:
            seen = os.stat(os.path.join(self._directory, LOCK), follow_symlinks=False)
            if not os.path.samestat(seen, held):
                why = "its lock is another file"
        except OSError as exc:
            why = f"its lock: {exc.strerror}"
        if why:
            raise StorageLost(f"the directory {self._directory} is another one than it was: {why}")

    def _path(self, name: ObjectName) -> str:
        key = name.key.hex()
        return os.path.join(self._root, escaped(name.namespace), key[:2], key)

    def _make_directory(self, name: ObjectName) -> None:
        """Make that of an object, and before it the file that says of which namespace it is.

        Raises:
            OSError: the kernel refuses.
        """
        directory = os.path.dirname(self._path(name))
        above = os.path.dirname(directory)
        os.makedirs(above, mode=0o700, exist_ok=True)
        named = os.path.join(above, NAME)
        if not os.path.basename(above).startswith("=") and not os.path.exists(named):
            # As a whole or not at all: without it all that is there goes at the next start.
            path = self._new_path()
            try:
                with open(path, "w", encoding="utf-8") as file:
                    file.write(name.namespace)
                os.rename(path, named)
            except OSError:
                self._remove_or_leave(path)
                raise
        os.makedirs(directory, mode=0o700, exist_ok=True)

    # ---- what lies there -------------------------------------------------------------------------

    @override
    def search(self) -> SearchOutcome:
        removed: list[str] = []
        try:
            objects = list(self._searched(removed))
        except OSError as exc:
            raise StorageLost(
                f"what lies in the directory {self._directory} cannot be searched: {exc.strerror}: "
                f"{_shown(str(exc.filename))}"
            ) from exc
        objects.sort(key=lambda found: found.used_ns)
        return SearchOutcome(objects, len(removed), removed[0] if removed else "")

    def _searched(self, removed: list[str]) -> Iterator[StoredObject]:
        """All objects; what is none is removed, and named."""
        # First: what is removed below goes by there.
        for entry in _entries(self._writing):
            self._throw_out(entry, "one was being written when its process ended", removed)
        for entry in _entries(self._directory):
            if _HEX.fullmatch(entry.name) and entry.path != self._root:
                why = f"{entry.name[:12]} is of a pool with another layout"
                self._throw_out(entry, why, removed)
        for entry in _entries(self._root):
            if entry.name == WRITING:
                continue
            namespace = _unescaped(entry)
            if namespace is None:
                self._throw_out(entry, f"{_shown(entry.name)[:40]} is no namespace", removed)
            else:
                yield from self._found(namespace, entry.path, removed)

    def _throw_out(self, entry: os.DirEntry[str], why: str, removed: list[str]) -> None:
        removed.append(why)
        self._remove_or_leave(entry.path)

    def _found(self, namespace: str, path: str, removed: list[str]) -> Iterator[StoredObject]:
        """The objects of one namespace."""
        for digits in _entries(path):
            if digits.name == NAME and digits.is_file(follow_symlinks=False):
                continue
            if not digits.is_dir(follow_symlinks=False):
                self._throw_out(digits, f"{_shown(digits.name)[:40]} is no directory", removed)
                continue
            for entry in _entries(digits.path):
                seen = entry.stat(follow_symlinks=False)
                why = ""
                if not _HEX.fullmatch(entry.name) or not stat.S_ISREG(seen.st_mode):
                    why = "is no object"
                elif entry.name[:2] != digits.name:
                    why = "lies in another directory than it should"
                elif seen.st_size != self._size:
                    why = f"has {seen.st_size} bytes where {self._size} are right"
                if why:
                    self._throw_out(entry, f"{_shown(entry.name)[:40]} {why}", removed)
                    continue
                key = bytes.fromhex(entry.name)
                yield StoredObject(ObjectName(namespace, key), seen.st_mtime_ns)
            _prune(digits.path)
        _prune_namespace(path)


class _Draft(NamedTuple):
    """A file that is being written."""

    fd: int
    path: str


class _File(NamedTuple):
    """Of an object that is to be read; ``is_cold``: past the page cache."""

    fd: int
    is_cold: bool


class _Source(NamedTuple):
    """An object that is read."""

    fd: int
    head: ObjectHead
    is_cold: bool


def _source(file: _File, read: ObjectRead, n_bytes: int) -> _Source | BadObject:
    """The object in a file, if it is what it should be, and ``n_bytes`` long."""
    try:
        size = os.fstat(file.fd).st_size
        head = read.judge(os.pread(file.fd, HEAD_BYTES, 0))
        if isinstance(head, BadObject):
            return head
        # A read beyond the end would fail without saying of which file.
        if size != n_bytes:
            return BadObject(f"its file has {size} bytes where {n_bytes} are right")
        if file.is_cold:
            _read_past_cache(file.fd)
    except OSError as exc:
        return BadObject(f"{exc.strerror}")
    return _Source(file.fd, head, file.is_cold)


# ---- past the page cache -------------------------------------------------------------------------


def reads_past_cache(path: str) -> bool:
    """Whether files where ``path`` would lie can be read so; one is made there to try, and removed.

    Not on a disk that is full, where none can be made.
    """
    try:
        with open(path, "wb+", buffering=0) as file, mmap.mmap(-1, BLOCK_BYTES) as block:
            os.unlink(path)
            file.write(bytes(HEAD_BYTES + BLOCK_BYTES))
            _read_past_cache(file.fileno())
            return os.preadv(file.fileno(), [block], HEAD_BYTES) == BLOCK_BYTES
    except OSError:
        return False


def _is_cold(fd: int) -> bool:
    """Whether the head of an open file is not in the page cache; then its read begins now."""
    # Or the kernel reads more than the head.
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        os.posix_fadvise(fd, 0, HEAD_BYTES, os.POSIX_FADV_WILLNEED)
        return True
    except OSError:
        pass  # a file system that cannot say it
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL)
    return False


def _read_past_cache(fd: int) -> None:
    """From now on; what is read must be whole blocks.

    Raises:
        OSError: the file system does not do that.
    """
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)


def _forget_head(fd: int) -> None:
    """Let the page cache forget it."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, HEAD_BYTES, os.POSIX_FADV_DONTNEED)


# ---- files and directories -----------------------------------------------------------------------


def others_in(directory: str) -> list[str]:
    """Names of what is nobody's to remove: anything, but for a tier's, in one that has no mark.

    Raises:
        OSError: it cannot be listed.
    """
    names = os.listdir(directory)
    if MARK in names:
        return []
    # Of a tier whose mark was removed from under its process, which went on for a moment.
    layouts = [name for name in names if _HEX.fullmatch(name)]
    ours = [name for name in layouts if os.path.isdir(os.path.join(directory, name, WRITING))]
    return sorted({*names} - {"lost+found", LOCK, *ours})


def _taken(directory: str) -> int:
    """Make the directory if it is not there, and take its lock.

    Raises:
        OSError: the kernel refuses.
        StorageLost: somebody else's things are in it, others may look into it, or a process uses
            it.
    """
    os.makedirs(directory, mode=0o700, exist_ok=True)
    seen = os.stat(directory)
    mode = stat.S_IMODE(seen.st_mode)
    if seen.st_uid != os.geteuid() or mode & 0o077:
        raise StorageLost(
            f"the directory {directory} is of user {seen.st_uid} with mode {mode:04o}, and pages "
            f"of prompts are for user {os.geteuid()} alone: chown it, and chmod 0700"
        )
    mark = os.path.join(directory, MARK)
    if not os.path.exists(mark):
        # Whatever lies in a tier and is no object of it is removed: so nobody else's may.
        others = others_in(directory)
        if others:
            raise StorageLost(
                f"the directory {directory} has {others[0]!r} in it and is no tier of kvd: name an "
                "empty one, or one that is not there"
            )
        with open(mark, "w", encoding="ascii") as file:
            file.write("kvd removes from this directory whatever is no object of its pool.\n")
    lock = os.open(os.path.join(directory, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until_s = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until_s:
                os.close(lock)
                raise StorageLost(
                    f"the directory {directory} is in use by another process: a directory is of "
                    "one daemon"
                ) from None
            time.sleep(LOCK_EVERY_S)
        else:
            return lock


def _date(file: int | str, used_ns: int) -> None:
    """Keep when it was last used; dropped meanwhile is no error, nor is one that has no times."""
    with contextlib.suppress(OSError):
        os.utime(file, ns=(used_ns, used_ns))


def _reserve(fd: int, size: int) -> None:
    """Make the file that long, with room for all of it.

    Raises:
        OSError: there is none.
    """
    if not _libc.fallocate(fd, 0, 0, size):
        return
    code = ctypes.get_errno()
    if code != errno.EOPNOTSUPP:
        raise OSError(code, os.strerror(code))
    # A file system that takes no room ahead: what it says is free must do.
    room = os.fstatvfs(fd)
    if room.f_bavail * room.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, size)


def _own(path: str) -> None:
    """Make a directory, unless it is there.

    Raises:
        OSError: the kernel refuses.
        StorageLost: something else is there.
    """
    os.makedirs(path, mode=0o700, exist_ok=True)
    if os.path.islink(path):
        raise StorageLost(f"{path} is no directory, and is not followed: remove it")


def _opened(path: str) -> int:
    """A file that is read, and waits for nobody.

    Raises:
        OSError: it is none, or the kernel refuses.
    """
    # Who opens the end of a pipe waits for the other one.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "It is no file")


def _prune(directory: str) -> None:
    """Remove the directory of objects if it is empty, and that of its namespace."""
    try:
        os.rmdir(directory)
    except OSError:
        return
    _prune_namespace(os.path.dirname(directory))


def _prune_namespace(directory: str) -> None:
    """Remove the directory of a namespace if nothing but its name is in it."""
    with contextlib.suppress(OSError):
        is_named = os.path.basename(directory).startswith("=")
        if not is_named and os.listdir(directory) == [NAME]:
            os.unlink(os.path.join(directory, NAME))
        os.rmdir(directory)


def _unescaped(entry: os.DirEntry[str]) -> str | None:
    """The namespace of a directory; None if it is of none."""
    if not entry.is_dir(follow_symlinks=False):
        return None
    try:
        if entry.name.startswith("="):
            namespace = unquote(entry.name[1:])
        else:
            with open(_opened(os.path.join(entry.path, NAME)), encoding="utf-8") as file:
                namespace = file.read()
        return namespace if escaped(namespace) == entry.name else None
    except (OSError, UnicodeError):
        return None


def _shown(name: str) -> str:
    """The name of something, as text, which it need not be."""
    return os.fsencode(name).decode(errors="replace")


def _entries(path: str) -> list[os.DirEntry[str]]:
    """What is in a directory; nothing where it is gone."""
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
