"""What all connections of one loop share: when to write, and what is given back.

What is sent while a message is dealt with goes out together when that turn is over, in as few
system calls as there are connections; what is sent besides, with the next turn of the loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class BufferedWriter(Protocol):
    """A connection with something to write."""

    def flush(self) -> None:
        """Write what can be written now."""
        ...


def keep_memory() -> None:
    """Leave it to the allocator what is given back."""


class WriteBatch:
    """One for each loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, relieve: Callable[[], None] = keep_memory
    ) -> None:
        """``relieve`` is called when much that was kept is not needed any more."""
        self.loop = loop
        self.relieve = relieve
        self.is_in_turn = False
        self._written: list[BufferedWriter] = []
        self._wake: asyncio.Handle | None = None

    def written(self, writer: BufferedWriter) -> None:
        """It has something to write; once until it is flushed."""
        self._written.append(writer)
        if not self.is_in_turn and self._wake is None:
            self._wake = self.loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write what was sent by now."""
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        while self._written:
            written, self._written = self._written, []
            for writer in written:
                writer.flush()
