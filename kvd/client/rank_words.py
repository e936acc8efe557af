"""What a joined process says by itself, and what it hears: packets of the attach socket.

A word is sent at once, and answered in the order of words. Whoever waits for an answer reads for
all: one thread at a time, or an event loop. Nobody reads while nobody waits, so an answer costs no
thread a turn.

Invariants: a word is answered, or fails with the end of the connection; what ended that is kept for
those who come later, until it is renewed.
"""

from __future__ import annotations

import asyncio
import functools
import select
import threading
import time
from typing import TYPE_CHECKING

from kvd.errors import Code, KvdError, Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from kvd.client.attachment import Attachment
    from kvd.wire.attach import ProcessWord

ANSWER_WITHIN_S = 10.0
"""By then the daemon is stuck or gone."""


LOOK_EVERY_S = 0.5


class PendingWord:
    """A word that was sent. ``poll`` it, wait for its ``result``, or ``await`` it."""

    def __init__(
        self, words: RankWords, call: int, wake: Callable[[], object] | None = None
    ) -> None:
        """Use ``Worker.begin_written``."""
        self._words = words
        self.call = call
        """What it was said as."""
        self._is_over = False
        self._refusal: Refusal | None = None
        self._wake = wake

    def poll(self) -> bool:
        """Whether it counts now; never waits.

        Raises:
            KvdError: it does not, see ``Worker.written``.
        """
        if not self._is_over:
            self._words.read()
        if self._refusal is not None:
            raise KvdError(self._refusal)
        return self._is_over

    def result(self, within_s: float = ANSWER_WITHIN_S) -> None:
        """Wait until it counts.

        Raises:
            KvdError: it does not, see ``Worker.written``; ``deadline`` when the daemon has not said
                within that time.
        """
        if not self._is_over:
            self._words.wait_for(self, within_s)
        if not self.poll():
            raise _silent(within_s)

    def __await__(self) -> Generator[object, None, None]:
        """As ``result``, on an event loop."""
        return self._arrived().__await__()

    def settle(self, refusal: Refusal | None) -> None:
        """Its answer, or why there will be none."""
        self._refusal, self._is_over = refusal, True
        if self._wake is not None:
            self._wake()

    @property
    def is_over(self) -> bool:
        """Whether it has been answered, or never will be."""
        return self._is_over

    @property
    def refusal(self) -> Refusal | None:
        """Why it does not count, once it is over."""
        return self._refusal

    async def _arrived(self) -> None:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[None] = loop.create_future()
        # From whichever thread reads it: a thread of this process may wait for another word.
        self._wake = functools.partial(loop.call_soon_threadsafe, _set, answered)
        self._words.watch(loop)
        try:
            # After it is watched: what another thread has read meanwhile wakes nobody.
            if not self.poll():
                async with asyncio.timeout(ANSWER_WITHIN_S):
                    await answered
                self.poll()
        except TimeoutError:
            raise _silent(ANSWER_WITHIN_S) from None
        finally:
            self._wake = None
            self._words.unwatch(loop)


class _Watch:
    """A loop reads while ``words`` of it are awaited; ``fd`` is the one it began with."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.words = 0


class RankWords:
    """The words of one process that are not answered yet."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._last_call = 0
        self._open: dict[int, PendingWord] = {}
        self._end: Refusal | None = None
        self._watched: dict[asyncio.AbstractEventLoop, _Watch] = {}
        self._state = threading.RLock()
        """Held for an instant: what is open, and the end."""
        self._reading = threading.Lock()
        """Held by who waits on the socket: what it reads may be the answer of another."""

    @property
    def end(self) -> Refusal | None:
        """Why the daemon hung up, as far as was read; None while it has not."""
        return self._end

    def fileno(self) -> int:
        """Readable when something has come."""
        return self._attachment.fileno()

    @property
    def hears_waits(self) -> bool:
        """Whether the daemon takes ``CopyWaits``; an older one would take it for garbage."""
        return self._attachment.attached.hears_waits

    @property
    def is_own(self) -> bool:
        """Whether this is the process that attached, and none that was forked from it."""
        return self._attachment.is_own

    def require_own(self) -> None:
        """Refuse the child of a fork: what it says would be its parent's word."""
        self._attachment.require_own()

    def begin(
        self, word: Callable[[int], ProcessWord], wake: Callable[[], object] | None = None
    ) -> PendingWord:
        """Say it; ``word`` makes the message of the number that its answer will name.

        ``wake`` is called by whoever reads the answer, on any thread.

        Raises:
            KvdError: the daemon is away, or does not read; ``wrong-state`` in a forked child.
        """
        self.require_own()
        with self._state:
            if self._end is not None:
                raise KvdError(self._end)
            self._last_call += 1
            pending = PendingWord(self, self._last_call, wake)
            try:
                self._attachment.say(word(self._last_call))
            except BlockingIOError:
                raise KvdError(_unread(len(self._open))) from None
            except OSError:
                pass  # it is gone, and whoever reads the answer finds out why
            self._open[self._last_call] = pending
            return pending

    def read(self) -> None:
        """Take what has come, unless somebody waits for it: then that one takes it."""
        self._attachment.require_own()
        if self._reading.acquire(blocking=False):
            try:
                self._take()
            finally:
                self._reading.release()

    def look(self) -> Refusal | None:
        """Why the daemon has hung up; None while it has not."""
        with self._reading:
            self._take(is_all=True)
        return self._end

    def renewed(self) -> None:
        """The daemon is back."""
        with self._state:
            self._end = None

    def closed(self, why: Refusal) -> None:
        """This process has left: no answer comes any more."""
        with self._state:
            self._finish(self._end or why)

    def wait_for(self, word: PendingWord, within_s: float) -> None:
        """Block until it is answered, or the time is up."""
        self._attachment.require_own()
        end_s = time.monotonic() + within_s
        if not self._reading.acquire(timeout=within_s):
            return
        try:
            ready = select.poll()
            ready.register(self._attachment.fileno(), select.POLLIN)
            self._take()
            while not word.is_over and (left_s := end_s - time.monotonic()) > 0:
                # Not longer: closing a descriptor wakes nobody who waits on it.
                ready.poll(min(left_s, LOOK_EVERY_S) * 1000)
                self._take()
        finally:
            self._reading.release()

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read on that loop from now on; ``unwatch`` it as often."""
        watch = self._watched.get(loop)
        if watch is None:
            watch = self._watched[loop] = _Watch(self._attachment.fileno())
            loop.add_reader(watch.fd, self.read)
        watch.words += 1

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """One fewer waits on that loop."""
        watch = self._watched[loop]
        watch.words -= 1
        if not watch.words:
            del self._watched[loop]
            loop.remove_reader(watch.fd)

    def _take(self, *, is_all: bool = False) -> None:
        """What has come; the caller reads alone. ``is_all``: behind the last answer too."""
        while self._end is None:
            heard = self._attachment.hear()
            if heard is None:
                return
            with self._state:
                if isinstance(heard, Refusal):
                    self._finish(heard)
                    return
                word = self._open.pop(heard.call, None)
                is_last = not self._open
            if word is not None:
                word.settle(heard.refusal)
            if is_last and not is_all:
                return

    def _finish(self, why: Refusal) -> None:
        self._end = why
        words, self._open = self._open, {}
        for word in words.values():
            word.settle(why)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _unread(n_open: int) -> Refusal:
    return Refusal(
        Code.UNREACHABLE,
        f"the daemon does not read what this process says, {n_open} words of it are not answered: "
        "look at `kvd status`",
        side="client",
        numbers={"unanswered": n_open},
    )


def _silent(within_s: float) -> KvdError:
    return KvdError(
        Refusal(
            Code.DEADLINE,
            f"no answer from the daemon within {within_s:.1f} s (on the attach socket): it is "
            "alive, but stuck or overloaded; look at `kvd status`",
            side="client",
            numbers={"within_s": within_s},
        )
    )
