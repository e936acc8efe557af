"""Posts whose pages are still being written: each waits for the CUDA event that its engine named.

An engine gives its kernels to a stream, records an event behind them and says how far KV will be
written when that has come. Until then nothing of the pages is read, neither to send nor to sum::

    Post(after) -> waits -> event has come -> posted
                     |----> event failed, or is none -> Unposted
                     |----> Forget -> Unposted
                     '----> DropAgent of its agent -> Unposted

The loop looks about once a millisecond while anything waits. An event is opened once for all posts
that wait for it, and let go of when none does: its engine may destroy it from then on.

Invariants: no post leaves by more than one of these ways; those of one event leave in the order in
which they came; an opened event has a post that waits.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from kvd.core.inputs import PostMoved, Unposted
from kvd.device.cuda import CudaError
from kvd.transfer.devices import DeviceUnusable
from kvd.transfer.orders import UNSTAMPED

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.effects import DropAgent, Post
    from kvd.transfer.devices import Devices


class _Event(NamedTuple):
    """An opened event, and the posts that wait for it."""

    event: int
    posts: list[Post]


class EventWaits:
    """The posts that wait, by the handle of their event."""

    def __init__(
        self,
        devices: Devices,
        *,
        post: Callable[[Post], None],
        report: Callable[[PostMoved | Unposted], None],
    ) -> None:
        """``post`` takes each whose event has come; ``report`` tells that, and of the others."""
        self._devices = devices
        self._post = post
        self._report = report
        self._events: dict[bytes, _Event] = {}

    @property
    def is_pending(self) -> bool:
        """Whether ``step`` has something to look at."""
        return bool(self._events)

    def add(self, order: Post) -> None:
        """Let it wait; it is posted at once if its event has come."""
        found = self._events.get(order.after)
        if found is None:
            try:
                found = _Event(self._devices.open_event(order.after), [])
            except DeviceUnusable as exc:
                self._report(
                    Unposted(UNSTAMPED, order.post, f"its event cannot be waited for: {exc}")
                )
                return
            self._events[order.after] = found
        found.posts.append(order)
        # At once: it has often come by now, and the next look is a millisecond away.
        self._look(order.after, found)

    def step(self) -> None:
        """Look at every event."""
        for handle, one in list(self._events.items()):
            self._look(handle, one)

    def forget(self, post: int) -> None:
        """Nobody wants it any more; one that does not wait is no matter of ours."""
        self._remove(lambda order: order.post == post, "it was given up before its event came")

    def drop(self, order: DropAgent) -> None:
        """Its agent goes: those that were to go through it go too."""
        self._remove(
            lambda one: (one.incarnation, one.generation) == (order.incarnation, order.generation),
            f"the sending agent for {order.incarnation} was dropped before its event came",
        )

    def _look(self, handle: bytes, one: _Event) -> None:
        try:
            if not self._devices.runtime.has_come(one.event):
                return
        except CudaError as exc:
            why = f"what was to write its pages failed: {exc}"
            self._remove(lambda order: order.after == handle, why)
            return
        # Before they are posted: its engine may destroy it as soon as it hears of one of them.
        self._close(handle)
        for order in one.posts:
            # Said before it moves: from here on it waits its turn, which is no fault of the engine.
            self._report(PostMoved(UNSTAMPED, order.post, 0))
            self._post(order)

    def _remove(self, is_over: Callable[[Post], bool], why: str) -> None:
        for handle, one in list(self._events.items()):
            over = [order for order in one.posts if is_over(order)]
            one.posts[:] = [order for order in one.posts if not is_over(order)]
            # With the last: an event that nobody waits for would be looked at for ever.
            if not one.posts:
                self._close(handle)
            for order in over:
                self._report(Unposted(UNSTAMPED, order.post, why))

    def _close(self, handle: bytes) -> None:
        event = self._events.pop(handle).event
        with contextlib.suppress(CudaError):  # a device that has failed refuses this too
            self._devices.runtime.destroy(event)
