"""Posts whose pages are still being written: each waits for the CUDA event that its engine named.

An engine gives its kernels to a stream, records an event behind them and says how far KV will be
written when that has come. Until then nothing of the pages is read, neither to send nor to sum::

    Post(after) -> waits -> event has come -> posted
                     |----> event failed, or is none -> Unposted
                     |----> Forget -> Unposted
                     '----> DropAgent of its agent -> Unposted

Where several ranks write a page, a post names an event of each, and waits for one after the other.

The loop looks about once a millisecond while anything waits. An event is opened once for all posts
that wait for it, and let go of when none does: its engine may destroy it from then on.

Invariants: no post leaves by more than one of these ways; those of one event leave in the order in
which they came; an opened event has a post that waits.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd.core.inputs import PostMoved, Unposted
from kvd.device.cuda import CudaError
from kvd.transfer.devices import DeviceUnusable
from kvd.transfer.orders import UNSTAMPED

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.effects import DropAgent, Post
    from kvd.transfer.devices import Devices


HANDLE_BYTES: Final = 64
"""Of the IPC handle of an event."""


class _Waiting(NamedTuple):
    """A post, and the events behind the one that it waits for now."""

    order: Post
    rest: bytes


class _Event(NamedTuple):
    """An opened event, and the posts that wait for it."""

    event: int
    posts: list[_Waiting]


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
        """Let it wait; it is posted at once if its events have come."""
        self._wait(order, order.after)

    def _wait(self, order: Post, events: bytes) -> None:
        """Wait for the first of these events, and then for the others."""
        handle, rest = events[:HANDLE_BYTES], events[HANDLE_BYTES:]
        found = self._events.get(handle)
        if found is None:
            try:
                found = _Event(self._devices.open_event(handle), [])
            except DeviceUnusable as exc:
                self._report(
                    Unposted(UNSTAMPED, order.post, f"its event cannot be waited for: {exc}")
                )
                return
            self._events[handle] = found
        found.posts.append(_Waiting(order, rest))
        # At once: it has often come by now, and the next look is a millisecond away.
        self._look(handle, found)

    def step(self) -> None:
        """Look at every event."""
        for handle, event in list(self._events.items()):
            # Posts that waited for an earlier one may have met this one come, and it is let go of.
            if self._events.get(handle) is event:
                self._look(handle, event)

    def forget(self, post: int) -> None:
        """Nobody wants it any more; one that does not wait is no matter of ours."""
        self._remove(lambda order: order.post == post, "it was given up before its event came")

    def drop(self, order: DropAgent) -> None:
        """Its agent goes: those that were to go through it go too."""
        agent = (order.incarnation, order.generation)
        self._remove(
            lambda post: (post.incarnation, post.generation) == agent,
            f"the sending agent for {order.incarnation} was dropped before its event came",
        )

    def _look(self, handle: bytes, event: _Event) -> None:
        try:
            if not self._devices.runtime.has_come(event.event):
                return
        except CudaError as exc:
            why = f"what was to write its pages failed: {exc}"
            failed = {waiting.order.post for waiting in event.posts}
            self._remove(lambda order: order.post in failed, why)
            return
        # Before they are posted: its engine may destroy it as soon as it hears of one of them.
        self._close(handle)
        for order, rest in event.posts:
            if rest:
                self._wait(order, rest)
                continue
            # Said before it moves: from here on it waits its turn, which is no fault of the engine.
            self._report(PostMoved(UNSTAMPED, order.post, 0))
            self._post(order)

    def _remove(self, is_over: Callable[[Post], bool], why: str) -> None:
        for handle, event in list(self._events.items()):
            over = [waiting.order for waiting in event.posts if is_over(waiting.order)]
            event.posts[:] = [waiting for waiting in event.posts if not is_over(waiting.order)]
            # With the last: an event that nobody waits for would be looked at for ever.
            if not event.posts:
                self._close(handle)
            for order in over:
                self._report(Unposted(UNSTAMPED, order.post, why))

    def _close(self, handle: bytes) -> None:
        event = self._events.pop(handle).event
        with contextlib.suppress(CudaError):  # a device that has failed refuses this too
            self._devices.runtime.destroy(event)
