"""Work in one thread, for callers that never wait: each task has a number, and an outcome.

A daemon that hangs is waited for here, by nobody else.
"""

from __future__ import annotations

import itertools
import queue
import threading
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

T = TypeVar("T")

LOOK_EVERY_S: Final = 0.25
"""So often the daemon is looked at while nobody asks: one that is back is found so."""


class TaskOutcomes(Generic[T]):
    """Of tasks of one kind, each taken once. ``told``: is called when there is one more."""

    def __init__(self, told: Callable[[], object]) -> None:
        self._told = told
        self._lock = threading.Lock()
        self._ready: dict[int, T] = {}

    def put(self, number: int, outcome: T) -> None:
        """There is one more."""
        with self._lock:
            self._ready[number] = outcome
        self._told()

    def take(self, number: int) -> T | None:
        """Of that task, if it is over."""
        with self._lock:
            return self._ready.pop(number, None)

    def take_all(self) -> dict[int, T]:
        """Of all that are over."""
        with self._lock:
            ready, self._ready = self._ready, {}
            return ready


class TaskThread:
    """Does what it is given, in order. ``idle``: done now and then while there is nothing."""

    def __init__(self, name: str, *, idle: Callable[[], object], logger: logging.Logger) -> None:
        self._idle, self._logger = idle, logger
        self._numbers = itertools.count(1)
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, outcomes: TaskOutcomes[T], work: Callable[[], T], otherwise: T) -> int:
        """Have it done; the number of the task. ``otherwise``: its outcome if that raises."""
        number = next(self._numbers)

        def task() -> None:
            outcome = otherwise
            try:
                outcome = work()
            finally:
                outcomes.put(number, outcome)

        self._queue.put(task)
        return number

    def tell(self, work: Callable[[], object]) -> None:
        """Have it done; nobody asks what came of it."""
        self._queue.put(work)

    def close(self) -> None:
        """Return when all that was begun is done; repeatable."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                work = self._queue.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                work = self._idle
            if work is None:
                return
            try:
                work()
            except Exception:
                self._logger.exception("kvd: a task failed; what it was about is not cached")
