"""One order to copy, from when it was given until no byte of it can move any more.

    WAITING --mark--> ASKING --the daemon's word--> MOVING --> ENDING --its word--> OVER
       |                 |                             |
       +--- cancelled ---+---- what has begun ends ----+            DOUBT: nobody can tell

WAITING: its mark has not come. ASKING: the daemon is told which pages, and may refuse them. MOVING:
bytes move. ENDING: none does any more, and the daemon is told; a load need not wait for its answer.
DOUBT: a device failed under it, and whether it still writes is known once this process is gone.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import threading
import time
from typing import TYPE_CHECKING, Final

from kvd.client.mover.pieces import NO_BLOCK
from kvd.errors import Code, KvdError, Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvd.client.lease_key import LeaseKey
    from kvd.client.mover.pieces import PieceTable

    Numbers = NDArray[np.int64]

MARK_WITHIN_S: Final = 60.0
"""A mark that has not come by then is not going to: what is computed before it hangs."""

RESULT_WITHIN_S: Final = 60.0
"""How long ``result`` and ``await`` wait, unless they are told otherwise."""


class CopyState(enum.Enum):
    """How far an order is."""

    WAITING = "waiting"
    ASKING = "asking"
    MOVING = "moving"
    ENDING = "ending"
    OVER = "over"
    DOUBT = "doubt"


class CopyMark(enum.Enum):
    """A mark of a processor: whatever it was to wait for has been done by then."""

    COME = "come"


class MemoryFault(Exception):
    """Memory that was to be copied is not there, or a copy was refused; the message says why."""


class LaneDead(Exception):
    """A device is lost to this process, and nobody can tell what it still writes."""


class OrderPart:
    """What of one component an order copies: blocks and pages, from a page of the lease's row.

    ``blocks``: a row, or one for each group of layers; ``used``: those that there are.
    """

    __slots__ = ("blocks", "first_page", "n_bytes", "page_sum", "pages", "table", "units", "used")

    def __init__(
        self, table: PieceTable, blocks: Numbers, pages: Numbers, first_page: int, page_sum: int
    ) -> None:
        self.table = table
        self.blocks = blocks
        self.used = blocks if blocks.ndim == 1 else blocks[blocks != NO_BLOCK]
        self.pages = pages
        self.first_page = first_page
        self.page_sum = page_sum
        self.units = table.units(blocks.shape[-1], len(pages))
        self.n_bytes = table.bytes_of(blocks, self.units)

    @property
    def end_token(self) -> int:
        """The token behind all that its blocks and its pages both have room for."""
        return self.first_page * self.table.page_size + self.units * self.table.unit_tokens


class PendingCopy:
    """An order under way. ``poll`` it, wait for its ``result``, or ``await`` it.

    It ends by itself, also where nobody asks. ``n_bytes``, ``waited_s`` (for its mark and for the
    daemon's word), of that ``mark_s`` (for its mark) and ``moved_s`` are known once it is over.
    """

    def __init__(
        self,
        key: LeaseKey,
        parts: Sequence[OrderPart],
        *,
        to_pages: bool,
        upto_tokens: int = 0,
        after: object = None,
        mark_within_s: float = MARK_WITHIN_S,
    ) -> None:
        """Use ``begin_save`` or ``begin_load``."""
        self.key = key
        self.to_pages = to_pages
        """A save; otherwise blocks are written."""
        self.parts = parts
        self.upto_tokens = upto_tokens
        self.after = after
        self.mark_within_s = mark_within_s
        self.state = CopyState.WAITING
        self.is_cancelled = False
        self.refusal: Refusal | None = None
        """Why it does not count, once it is over."""
        self.n_bytes = 0
        self.ordered_s = time.monotonic()
        self.waited_s = self.mark_s = 0.0
        self.moved_s = 0.0
        self._ring: Callable[[], object] | None = None
        self._require_own: Callable[[], object] | None = None
        self._let_go: Callable[[PendingCopy], object] | None = None
        self._tell: Callable[[PendingCopy], object] | None = None
        self._lock = threading.Lock()
        self._over: threading.Event | None = None
        self._wakes: list[Callable[[], object]] = []

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not."""
        return self.state in {CopyState.OVER, CopyState.DOUBT}

    def safe(self) -> bool:
        """Whether no byte of it can move any more, however it has ended; never waits.

        Until then its blocks are nobody else's. True for each order in the end, but for one that a
        failed device has left in doubt: then end this process.
        """
        return self.state in {CopyState.OVER, CopyState.ENDING}

    def poll(self) -> bool:
        """Whether it is done and counts; never waits.

        Raises:
            KvdError: it does not: ``cancelled``; ``deadline`` for a mark that did not come;
                ``unreachable`` where the daemon ended or was restarted meanwhile; ``post-failed``
                where a device or the kernel failed; what the daemon refused it for; ``wrong-state``
                in a forked child, which never hears how it ends.
        """
        if not self.is_over:
            self._require_news()
            return False
        if self.refusal is not None:
            raise KvdError(self.refusal)
        return True

    def result(self, within_s: float = RESULT_WITHIN_S) -> None:
        """Wait until it is done and counts.

        Raises:
            KvdError: as ``poll``; ``deadline`` after that time, and it goes on.
        """
        if not self.is_over:
            self._require_news()
            with self._lock:
                self._over = self._over or threading.Event()
                over = self._over
            if self.is_over:
                over.set()
            over.wait(within_s)
        if not self.poll():
            raise KvdError(self._pending(within_s))

    def __await__(self) -> Generator[object, None, None]:
        """As ``result``, on an event loop."""
        return self._arrived().__await__()

    def cancel(self) -> bool:
        """Give it up; whether it was not over yet. Returns at once, and what has begun goes on.

        Wait for ``safe`` before its blocks are another's. It ends with ``cancelled``, unless all of
        it is done by then.

        Raises:
            KvdError: ``wrong-state`` in a forked child, whose order it is not.
        """
        if self.is_over:
            return False
        self._require_news()
        self.is_cancelled = True
        if self._ring is not None:
            self._ring()
        return True

    def begun(self, ring: Callable[[], object], require_own: Callable[[], object]) -> None:
        """Somebody sees it through, who is woken by ``ring``; not in a child of this process."""
        self._ring, self._require_own = ring, require_own

    def when_safe(self, let_go: Callable[[PendingCopy], object]) -> None:
        """Call ``let_go`` once, right before ``safe`` says so; set before it is begun."""
        self._let_go = let_go

    def when_over(self, tell: Callable[[PendingCopy], object]) -> None:
        """Call ``tell`` once it is over and not in doubt, before whoever waits goes on."""
        self._tell = tell

    def landed(self) -> None:
        """No byte of it moves any more, and the daemon is to hear so; as ``end``."""
        self._is_safe_now()
        self.state = CopyState.ENDING

    def end(self, refusal: Refusal | None, *, is_doubted: bool = False) -> None:
        """It is over; only by who sees it through, once."""
        self.refusal = refusal
        self.after = None
        if not is_doubted:
            self._is_safe_now()
        with self._lock:
            self.state = CopyState.DOUBT if is_doubted else CopyState.OVER
            over, wakes, self._wakes = self._over, self._wakes, []
        if self._tell is not None and not is_doubted:
            self._tell(self)
        if over is not None:
            over.set()
        for wake in wakes:
            wake()

    def _is_safe_now(self) -> None:
        # Before the state says it: who reads that may order the next copy of the same blocks.
        let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go(self)

    def _require_news(self) -> None:
        if self._require_own is not None:
            self._require_own()

    async def _arrived(self) -> None:
        if not self.is_over:
            self._require_news()
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()
        wake = functools.partial(_call_soon, loop, arrived)
        with self._lock:
            if not self.is_over:
                self._wakes.append(wake)
        try:
            if not self.is_over:
                async with asyncio.timeout(RESULT_WITHIN_S):
                    await arrived
        except TimeoutError:
            raise KvdError(self._pending(RESULT_WITHIN_S)) from None
        finally:
            with self._lock:
                if wake in self._wakes:
                    self._wakes.remove(wake)
        self.poll()

    def _pending(self, within_s: float) -> Refusal:
        return Refusal(
            Code.DEADLINE,
            f"{self.words} is {self.state.value} after {within_s:g} s, and goes on: ask again, or "
            "cancel it",
            side="client",
            numbers={"within_s": within_s, "lease": self.key.lease},
        )

    @property
    def words(self) -> str:
        """What it is, for people."""
        n_pages = sum(len(part.pages) for part in self.parts)
        verb = "save into" if self.to_pages else "load from"
        return f"the {verb} {n_pages} pages of lease {self.key.lease}"


def _call_soon(loop: asyncio.AbstractEventLoop, arrived: asyncio.Future[None]) -> None:
    # A loop that was closed waits for nothing.
    if not loop.is_closed():
        loop.call_soon_threadsafe(_set_arrived, arrived)


def _set_arrived(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)
