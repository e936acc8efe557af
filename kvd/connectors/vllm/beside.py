"""Beside a step: work that may take long, and looks while there is no step.

Each has a thread of its own. The outcome of work is taken later; who looks is kept apart from the
steps by a lock of theirs.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[[Callable[[], None]], object]

T = TypeVar("T")


def in_thread(work: Callable[[], None]) -> None:
    """Do it in a thread that does not keep the process alive."""
    threading.Thread(target=work, name="kvd-beside", daemon=True).start()


class BesideTask(Generic[T]):
    """One such piece of work. Its outcome is of whoever takes it, or is disposed of.

    Args:
        work: its outcome, or an exception.
        dispose: what becomes of an outcome that nobody wants any more.
        start: has the work done; for tests, which do it at once.
    """

    def __init__(
        self,
        work: Callable[[], T],
        dispose: Callable[[T], object] | None = None,
        start: Start = in_thread,
    ) -> None:
        self._work = work
        self._dispose = dispose
        self._lock = threading.Lock()
        self._is_unwanted = False
        self._outcome: list[T] = []
        self._error: Exception | None = None
        self._ended = threading.Event()
        try:
            start(self._do)
        except RuntimeError as error:  # no thread is left for it
            self._error = error
            self._ended.set()

    def _do(self) -> None:
        try:
            outcome = self._work()
        except Exception as error:  # noqa: BLE001 - it is raised where the outcome is taken
            self._error = error
        else:
            with self._lock:
                is_unwanted = self._is_unwanted
                if not is_unwanted:
                    self._outcome.append(outcome)
            if is_unwanted and self._dispose is not None:
                self._dispose(outcome)
        finally:
            self._ended.set()

    def ended(self, within_s: float = 0.0) -> bool:
        """Whether it has ended, now or within that time."""
        return self._ended.wait(within_s) if within_s > 0 else self._ended.is_set()

    def take(self) -> T:
        """The outcome of one that has ended, once.

        Raises:
            Exception: what the work raised.
        """
        if self._error is not None:
            raise self._error
        return self._outcome.pop()

    def abandon(self) -> None:
        """Nobody wants it: what it has got, or gets, is disposed of."""
        with self._lock:
            self._is_unwanted = True
            outcome, self._outcome = self._outcome, []
        if outcome and self._dispose is not None:
            self._dispose(outcome[0])


class RegularLook:
    """A look now and then, until it is closed. In a process without a thread for it there is none.

    Args:
        look: raises nothing.
        every_s: between two of them.
    """

    def __init__(self, look: Callable[[], None], every_s: float) -> None:
        self._look = look
        self._every_s = every_s
        self._is_over = threading.Event()
        with contextlib.suppress(RuntimeError):
            in_thread(self._go_on)

    def _go_on(self) -> None:
        while not self._is_over.wait(self._every_s):
            self._look()

    def close(self) -> None:
        """No more of them, but for one that has begun; repeatable."""
        self._is_over.set()
