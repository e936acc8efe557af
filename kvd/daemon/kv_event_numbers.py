"""The numbers of batches of KV events: contiguous over all lives of a node, and never used twice.

Consumers take a number that goes back for a batch that they know, and keep what is stale. So a
block of numbers is written down before the first of them is used, and the next daemon goes on
behind it. What of a block was not used when a daemon was killed is no gap: it is served as empty
batches (``kv_events``).

    NAME.kv-events      {"format": 1, "first": 4096, "end": 8192}: those in between may be used
    after a stop        first = end: all before it were used

It lies beside NAME.epochs, which one daemon at a time has, and like it is read on the loop, once,
and written in a thread. No number is used before it is on disk: while the disk is slow nothing is
published.

What must not live here: batches.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from kvd.daemon.socket_activation import UnfitConfig
from kvd.daemon.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BLOCK: Final = 4096
"""Written down at a time. A busy node uses some hundred a second."""

MOST_UNUSED: Final = 2 * BLOCK
"""Served as empty batches; whoever asks for one of before is told of everything anew."""

_FORMAT: Final = 1
_MOST: Final = 2**62


class KeptNumbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in the file, as JSON."""

    first: Annotated[int, Meta(ge=0, le=_MOST)]
    end: Annotated[int, Meta(ge=0, le=_MOST)]
    format: Annotated[int, Meta(ge=_FORMAT, le=_FORMAT)] = _FORMAT


class KvEventNumbers:
    """Gives the numbers of one daemon.

    Attributes:
        unused: The first number that the daemon before may not have used.
        first: The first one of this daemon.
        next: The one that is given next.
    """

    def __init__(self, path: Path) -> None:
        """See what the daemon before has used, and write down the first block.

        Raises:
            UnfitConfig: it cannot be known, or not be written.
        """
        self._path = path
        kept = self._read()
        self.first = kept.end
        self.unused = max(kept.first, kept.end - MOST_UNUSED)
        self.next = self.first
        self.on_more: Callable[[], None] = lambda: None
        """Called when there are numbers again, after ``take`` had none."""
        self.flaw = ""
        """Why the last block could not be written."""
        self._end = self.first
        self._is_short = False
        self._write: asyncio.Future[None] | None = None
        try:
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._keep(self.unused, self.first + BLOCK)
        except OSError as error:
            raise UnfitConfig(
                f"{path} cannot be written ({error.strerror}), and a batch of KV events needs a "
                "number that outlives this daemon: set cache.epochs_directory to a directory that "
                "can, or kv_events.enabled = false"
            ) from error
        self._end = self.first + BLOCK

    def take(self) -> int | None:
        """The next number; None: the disk has not said yet that there is one."""
        number = self.next
        if number + BLOCK // 2 >= self._end and self._write is None:
            self._write_more()
        if number >= self._end:
            self._is_short = True
            return None
        self.next = number + 1
        return number

    def _write_more(self) -> None:
        end = self._end + BLOCK
        loop = asyncio.get_running_loop()
        write = self._write = loop.run_in_executor(None, self._keep, self.next, end)

        def over(done: asyncio.Future[None]) -> None:
            self._write = None
            error = None if done.cancelled() else done.exception()
            if error is not None:
                self.flaw = f"{self._path}: {error}"
                return
            self.flaw, self._end = "", end
            if self._is_short:
                self._is_short = False
                self.on_more()

        write.add_done_callback(over)

    async def close(self) -> None:
        """All that were given are used, and no other: the next daemon goes on there."""
        if self._write is not None:
            await asyncio.wait([self._write])
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, self._keep, self.next, self.next)
        except OSError as error:
            self.flaw = f"{self._path}: {error}"  # as after a kill: the block is left out

    def _keep(self, first: int, end: int) -> None:
        write_whole(self._path, msgspec.json.encode(KeptNumbers(first, end)) + b"\n")

    def _read(self) -> KeptNumbers:
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=KeptNumbers)
        except FileNotFoundError:
            return KeptNumbers(0, 0)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UnfitConfig(
                f"{self._path}, which says the numbers of KV events, cannot be read: {error}. "
                "Restore it; or remove it and restart every router that listens, because the "
                "numbers begin anew"
            ) from error
        return kept
