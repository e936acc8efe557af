"""Copies from and to pages of SGLang's that it may take back at any time.

SGLang frees the pages of a request that was aborted, or that has failed on another rank, in the
step in which it hears so. A copy that moves then would read, or write, another request's KV. So
every copy of a request is ordered through its guard, nothing is ordered behind the word that it was
given up, and whoever frees pages waits until no byte moves: some pieces of a copy of this process,
which need no answer of a daemon's.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final

from kvd.client import KvdError
from kvd.client.mover.pending_copy import CopyState

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.client import PendingCopy

LOOK_S: Final = 0.02
"""Of a copy that was given up it is looked so often whether it has ended, if it does not say so."""

IN_DOUBT: Final = (
    "kvd: a device failed under a copy, and nobody can tell whether it still writes this engine's "
    "pages: end this process"
)


class GivenUp(Exception):
    """The request's pages are SGLang's again: nothing is read from them or written any more."""


class CopyGuard:
    """Of one request. Copies are ordered in one thread; any thread may give them up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders: list[PendingCopy] = []
        self._is_given_up = False

    def order(self, begin: Callable[[], PendingCopy]) -> PendingCopy:
        """Begin a copy.

        Raises:
            GivenUp: it was not begun.
        """
        with self._lock:
            if self._is_given_up:
                raise GivenUp
            self._orders = [order for order in self._orders if not order.safe()]
            self._orders.append(begin())
            return self._orders[-1]

    def write(self, make: Callable[[], None]) -> None:
        """Write what is short, at once.

        Raises:
            GivenUp: it was not written.
        """
        with self._lock:
            if self._is_given_up:
                raise GivenUp
            make()

    def give_up(self) -> bool:
        """Order nothing any more; whether no byte moves now, too.

        Raises:
            RuntimeError: nobody can tell, for as long as this process lives.
        """
        with self._lock:
            self._is_given_up = True
            orders = list(self._orders)
        for order in orders:
            order.cancel()
        return all(_is_safe(order) for order in orders)

    def wait(self) -> None:
        """Give up, and return when no byte moves.

        Raises:
            RuntimeError: as ``give_up``.
        """
        self.give_up()
        # Nothing is added to them any more.
        for order in self._orders:
            while not _is_safe(order):
                with contextlib.suppress(KvdError):
                    order.result(LOOK_S)


def _is_safe(order: PendingCopy) -> bool:
    if order.state is CopyState.DOUBT:
        raise RuntimeError(IN_DOUBT)
    return order.safe()
