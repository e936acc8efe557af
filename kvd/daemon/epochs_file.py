"""The file in which a daemon keeps for the one after it the epochs of namespaces, and its flushes.

    write      NAME.epochs.new, fsync --> renamed over NAME.epochs --> fsync of the directory
    read       before anything is served; one that is damaged is not guessed at

A daemon that began in an older epoch would find KV of old weights, and pull it from others; one
that knew no flush would find what was flushed in its tiers. So both are answered when they are here
(``core.leases.kept_answers``), and a daemon that cannot read this file does not start. It is read
on the loop, once, and written in a thread: a disk may take its time.

How long ago a flush was is counted by the clock of the host since its start, which nobody sets;
from one start to another by the calendar. Where that was set back in between no time has passed: a
flush then counts for longer than it need.

Whoever writes it writes all of it, so it has one daemon at a time: NAME.epochs.lock is held while
that lives, also where two daemons of one name have sockets of their own.

What must not live here: what an epoch means, and a flush.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from kvd.config.address import IPC
from kvd.core.effects import KeptFlush
from kvd.core.inputs import EpochsFound, EpochsKept
from kvd.core.leases.epochs import MAX_EPOCH
from kvd.daemon.socket_activation import UnfitConfig
from kvd.daemon.whole_file import write_whole

if TYPE_CHECKING:
    from kvd.config import Config
    from kvd.core.effects import KeepEpochs
    from kvd.daemon.reactor import Reactor

FORMAT: Final = 1
_MODE: Final = 0o600

_HOST_START: Final = Path("/proc/sys/kernel/random/boot_id")
_HOST_CLOCK: Final = time.CLOCK_BOOTTIME


class WrittenAt(msgspec.Struct, frozen=True):
    """When a file was written: by the calendar, and since which start of the host."""

    calendar_s: float
    host: str
    host_s: float

    @classmethod
    def now(cls) -> WrittenAt:
        """This moment."""
        return cls(time.time(), _HOST_START.read_text().strip(), time.clock_gettime(_HOST_CLOCK))

    def passed_s(self, now: WrittenAt) -> float:
        """How long ago it was, then."""
        is_same = self.host == now.host
        passed_s = now.host_s - self.host_s if is_same else now.calendar_s - self.calendar_s
        return max(0.0, passed_s)


class KeptFlushes(msgspec.Struct, frozen=True):
    """What was flushed, and how long before that was written."""

    flushes: tuple[KeptFlush, ...]
    written: WrittenAt


class KeptEpochs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in the file, as JSON."""

    epochs: dict[str, Annotated[int, Meta(ge=0, le=MAX_EPOCH)]]
    """By base of namespaces."""
    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)] = FORMAT
    flushed: KeptFlushes | UnsetType = UNSET
    """Left out where nothing was that a tier could have."""

    def flushes(self, now: WrittenAt) -> tuple[KeptFlush, ...]:
        """What was flushed, and how long ago by now."""
        flushed = self.flushed
        if flushed is UNSET:
            return ()
        passed_s = flushed.written.passed_s(now)
        return tuple([replace(flush, ago_s=flush.ago_s + passed_s) for flush in flushed.flushes])


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

    def write(self, epochs: dict[str, int], flushes: tuple[KeptFlush, ...] = ()) -> None:
        """Put these in its place; a crash of the host then leaves them there.

        Raises:
            OSError: they may not be there, and what was before is then; never a half of them.
            UnfitConfig: they are another daemon's.
        """
        self.lock()
        flushed = KeptFlushes(flushes, WrittenAt.now()) if flushes else UNSET
        kept = KeptEpochs(epochs, flushed=flushed)
        said = msgspec.json.format(msgspec.json.encode(kept)) + b"\n"
        write_whole(self.path, said)

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
        found = kept or KeptEpochs({})
        self._reactor.feed(
            EpochsFound(
                at_s=self._reactor.clock(),
                by_base=found.epochs,
                is_first=kept is None,
                flushes=found.flushes(WrittenAt.now()),
            )
        )

    def keep(self, effect: KeepEpochs) -> None:
        """Write them in a thread, and say how it went."""
        loop = asyncio.get_running_loop()
        write = self._write = loop.run_in_executor(
            None, self._file.write, effect.by_base, effect.flushes
        )

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
