"""The file in which a daemon keeps the epochs of namespaces for the one after it.

    write      NAME.epochs.new, fsync --> renamed over NAME.epochs --> fsync of the directory
    read       before anything is served; one that is damaged is not guessed at

A daemon that began in an older epoch would find KV of old weights, and pull it from others: so an
epoch is answered when it is here (``core.leases.epochs``), and a daemon that cannot read this file
does not start. It is read on the loop, once, and written in a thread: a disk may take its time.

Whoever writes it writes all of it, so it has one daemon at a time: NAME.epochs.lock is held while
that lives, also where two daemons of one name have sockets of their own.

What must not live here: what an epoch means.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from kvd.config.address import IPC
from kvd.core.inputs import EpochsFound, EpochsKept
from kvd.core.leases.epochs import MAX_EPOCH
from kvd.daemon.socket_activation import UnfitConfig

if TYPE_CHECKING:
    from kvd.config import Config
    from kvd.core.effects import KeepEpochs
    from kvd.daemon.reactor import Reactor

FORMAT: Final = 1
_MODE: Final = 0o600


class KeptEpochs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in the file, as JSON."""

    epochs: dict[str, Annotated[int, Meta(ge=0, le=MAX_EPOCH)]]
    """By base of namespaces."""
    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)] = FORMAT


class EpochsFile:
    """NAME.epochs of one daemon, which holds its lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def lock(self) -> None:
        """Keep every other daemon from it, until ``unlock`` or the end of this process; repeatable.

        Raises:
            UnfitConfig: another one has it.
            OSError: the directory cannot be written.
        """
        if self._lock is not None:
            return
        self.path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        path = self.path.with_name(f"{self.path.name}.lock")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(path, flags, _MODE)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(file)
            raise UnfitConfig(
                f"{path} is locked by pid {owner}: another kvd of this node.name keeps its epochs "
                "there, and each would undo what the other has kept; set node.name or "
                "cache.epochs_directory to another one"
            ) from None
        except OSError:
            os.close(file)
            raise
        self._lock = file
        # For people; nothing is read from it.
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)

    def unlock(self) -> None:
        """Let the next one have it; repeatable."""
        file, self._lock = self._lock, None
        if file is not None:
            os.close(file)

    def read(self) -> KeptEpochs | None:
        """What the daemon before has kept; None where none has kept any.

        Raises:
            UnfitConfig: it cannot be read, or not be believed.
        """
        try:
            # Not waiting: a pipe in its place must not keep the daemon from saying so.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.open(self.path, flags)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unfit(f"cannot be read: {error.strerror}") from error
        # A directory is opened too, and has no bytes that ``open`` would take.
        seen = os.fstat(file)
        if not stat.S_ISREG(seen.st_mode):
            os.close(file)
            raise self._unfit("is no file")
        with open(file, "rb") as opened:
            if seen.st_uid not in {0, os.geteuid()} or seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                mode = f"{stat.S_IMODE(seen.st_mode):04o}"
                raise self._unfit(f"is of uid {seen.st_uid} with mode {mode}: others can write it")
            try:
                return msgspec.json.decode(opened.read(), type=KeptEpochs)
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise self._unfit(f"is damaged: {error}") from error

    def write(self, epochs: dict[str, int]) -> None:
        """Put these in its place; a crash of the host then leaves them there.

        Raises:
            OSError: they may not be there, and what was before is then; never a half of them.
            UnfitConfig: they are another daemon's.
        """
        self.lock()
        said = msgspec.json.format(msgspec.json.encode(KeptEpochs(epochs))) + b"\n"
        fresh = self.path.with_name(f"{self.path.name}.new")
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()  # of a daemon that was killed while it wrote
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        with open(file, "wb") as opened:
            opened.write(said)
            opened.flush()
            os.fsync(file)
        fresh.replace(self.path)
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _unfit(self, why: str) -> UnfitConfig:
        return UnfitConfig(
            f"{self.path}, which says the epochs of namespaces, {why}. Restore it; or remove it, "
            "drop what is cached (kvd drop), and say the epochs of now again (kvd epoch)"
        )


class EpochKeeper:
    """Carries out ``KeepEpochs``; the core asks for one at a time."""

    def __init__(self, file: EpochsFile, reactor: Reactor) -> None:
        self._file = file
        self._reactor = reactor
        self._write: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """Tell the node what was kept, and see that something can be.

        Raises:
            UnfitConfig: what was kept cannot be read, or nothing can be written, or it is another
                daemon's.
        """
        # First: who had it before writes no more when we read. Where nobody can write there we read
        # all the same: the epochs of now are known, and those that are said later are refused.
        with contextlib.suppress(OSError):
            self._file.lock()
        kept = self._file.read()
        if kept is None:
            try:
                self._file.write({})
            except OSError as error:
                raise UnfitConfig(
                    f"{self._file.path} cannot be written ({error.strerror}), and no epoch of a "
                    "namespace outlives this daemon: set cache.epochs_directory to one that can"
                ) from error
        epochs = {} if kept is None else kept.epochs
        self._reactor.feed(EpochsFound(self._reactor.clock(), epochs, is_first=kept is None))

    def keep(self, effect: KeepEpochs) -> None:
        """Write them in a thread, and say how it went."""
        loop = asyncio.get_running_loop()
        write = self._write = loop.run_in_executor(None, self._file.write, effect.by_base)

        def over(done: asyncio.Future[None]) -> None:
            error = None if done.cancelled() else done.exception()
            why = "" if error is None else f"{self._file.path}: {error}"
            self._reactor.feed(EpochsKept(self._reactor.clock(), effect.ticket, why))

        write.add_done_callback(over)

    async def close(self) -> None:
        """What is being written still is."""
        if self._write is not None:
            await asyncio.wait([self._write])
        self._file.unlock()


def epochs_path(config: Config) -> Path:
    """Where the daemon of this configuration keeps its epochs."""
    directory = config.cache.epochs_directory
    if directory is None:
        directory = str(Path(config.sockets.client.removeprefix(IPC)).parent)
    return Path(directory) / f"{config.node.name}.epochs"
