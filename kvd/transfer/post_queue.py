"""The posts to one peer: their turns, their handles in flight, their progress.

A queue is one sending agent and the posts that go through it. Posts take turns, one handle each, so
a small post waits for a few handles of a large one and never for all of it. At most
``IN_FLIGHT_HANDLES`` are in flight; a handle done makes room for the next post's turn::

    turns      [post 7 | handle 12 of 32] [post 9 | handle 0 of 1] ...
    in flight  7.8  7.9  7.10  7.11        oldest first; completions come in this order

Invariants:
  - ``moved_bytes`` of a post counts handles seen done, so it never exceeds what has arrived.
  - Over a network, every byte of a handle counts as unacknowledged until the handle is seen done,
    whether it runs, has failed, or was refused: one that failed may have written part of itself.
  - A post leaves by exactly one of ``PostDone`` and ``PostFailed``, and posts nothing afterwards.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from kvd.core.inputs import PostDone, PostFailed, PostMoved, WritePath
from kvd.transfer.metadata import MemoryKind
from kvd.transfer.nixl import NixlUnusable
from kvd.transfer.orders import UNSTAMPED
from kvd.transfer.plans import found, plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvd.core.effects import Post
    from kvd.transfer.copies import Area
    from kvd.transfer.metadata import RegionNote
    from kvd.transfer.nixl import SendingAgent
    from kvd.transfer.orders import Report
    from kvd.transfer.plans import PostPlan
    from kvd.transfer.staging import Staging, StagingSlot

IN_FLIGHT_HANDLES: Final = 4
PROGRESS_EVERY_S: Final = 0.05


class _Running:
    """One post on its way."""

    def __init__(self, post: int, plan: PostPlan, ours: tuple[Area, ...]) -> None:
        self.post = post
        self.ours = ours
        self.plan, self.packing, self.sides = plan
        self.is_of_device = MemoryKind.VRAM in self.sides
        self.is_between_devices = set(self.sides) == {MemoryKind.VRAM}
        self.turns = 0
        self.arrived = 0
        self.moved_bytes = 0
        self.started_s = 0.0
        self.said_s = 0.0
        self.is_over = False


class _Flight:
    """One handle in flight."""

    def __init__(self, handle: int, running: _Running, size: int, slot: StagingSlot | None) -> None:
        self.handle = handle
        self.running = running
        self.size = size
        self.slot = slot


class PostQueue:
    """One sending agent and the posts through it; driven by the worker's loop."""

    def __init__(
        self,
        sender: SendingAgent,
        *,
        path: WritePath,
        regions: dict[str, RegionNote],
        staging: Staging,
        report: Callable[[Report], None],
    ) -> None:
        self.sender = sender
        self.path = path
        self._theirs = regions
        self._report = report
        self._turns: deque[_Running] = deque()
        self._flights: deque[_Flight] = deque()
        self._open: dict[int, _Running] = {}
        self._lost_bytes = 0
        self._staging = staging
        self._lost_slots: list[StagingSlot] = []
        """Of handles that failed: they may still be read until the agent is gone."""

    @property
    def has_flights(self) -> bool:
        """Whether handles are in flight, so that ``step`` may find one done."""
        return bool(self._flights)

    @property
    def is_blind(self) -> bool:
        """Whether no descriptor would wake the loop when a handle in flight is done."""
        if not self._flights:
            return False
        # Of host memory on one host the post itself copies; what concerns a device is copied behind
        # our back, and no descriptor tells when that is over.
        is_here = self.path is WritePath.SAME_HOST
        return not self.sender.polls or (
            is_here and any(one.running.is_of_device for one in self._flights)
        )

    @property
    def is_fast(self) -> bool:
        """Whether handles go from device to device of one host: some take less than 100 us."""
        return self.path is WritePath.SAME_HOST and any(
            one.running.is_between_devices for one in self._flights
        )

    @property
    def can_post(self) -> bool:
        """Whether ``post_next`` would start a handle."""
        if not self._turns or len(self._flights) >= IN_FLIGHT_HANDLES:
            return False
        return self._turns[0].packing is None or bool(self._staging.free)

    def add(self, order: Post, ours: Mapping[str, Area]) -> None:
        """Take a post of pages of our regions in, or refuse it with ``PostFailed``."""
        regions = found(order, ours, self._theirs)
        if order.post in self._open:
            self._report(PostFailed(UNSTAMPED, order.post, f"post {order.post} is already running"))
        elif isinstance(regions, str):
            self._report(PostFailed(UNSTAMPED, order.post, regions))
        # An empty delta has nothing to wait for, and a post must be answered once.
        elif not order.source:
            self._report(PostDone(UNSTAMPED, order.post, 0))
        else:
            running = _Running(order.post, plan(order, regions), regions.ours)
            self._open[order.post] = running
            self._turns.append(running)

    def post_next(self) -> None:
        """Start one handle of the post whose turn it is."""
        running = self._turns.popleft()
        plan = running.plan
        low, high = plan.bounds[running.turns], plan.bounds[running.turns + 1]
        if not running.turns:
            running.started_s = running.said_s = time.monotonic()
        size = plan.sizes[running.turns]
        source, slot = plan.source[low:high], None
        if running.packing is not None:
            slot = self._staging.free.pop()
            running.packing.fill(running.turns, slot.memory)
            source = source + np.array([slot.address, 0, 0], np.uint64)
        # Before it is posted: a handle that is refused is not tried again.
        running.turns += 1
        try:
            handle = self.sender.post(source, plan.destination[low:high], running.sides)
        except NixlUnusable as exc:
            # Before the post fails: what may have left counts as open until the agent is destroyed.
            self._lose(size, slot)
            self._fail(running, str(exc))
            return
        self._flights.append(_Flight(handle, running, size, slot))
        # At the end of the line: a small post behind waits for one handle of a large one.
        if running.turns < plan.handles:
            self._turns.append(running)

    def step(self) -> None:
        """Take note of the handles that are done, oldest first."""
        while self._flights:
            # The oldest only: they are done in this order, so behind one under way none is.
            flight = self._flights[0]
            try:
                if not self.sender.step(flight.handle):
                    return
            except NixlUnusable as exc:
                self._flights.popleft()
                self._lose(flight.size, flight.slot)
                self._fail(flight.running, str(exc))
                continue
            self._flights.popleft()
            if flight.slot is not None:
                self._staging.free.append(flight.slot)
            self._arrived(flight)

    def destroy(self, why: str) -> int:
        """Fail what is outstanding and destroy the agent; the bytes the peer had not confirmed.

        On one host a handle's bytes were all copied when it was posted, so nothing is open; but
        what concerns a device is copied behind our back, and counts as open.
        """
        for running in list(self._open.values()):
            self._fail(running, why)
        # Before any slot is free again: until it is gone a handle in flight may read it.
        self.sender.destroy()
        for area in {area for one in self._flights for area in one.running.ours}:
            area.reach.settle()  # what the device copies of its own accord is over after this
        slots = [flight.slot for flight in self._flights if flight.slot is not None]
        self._staging.free += [*slots, *self._lost_slots]
        match self.path:
            case WritePath.SAME_HOST:
                return sum(one.size for one in self._flights if one.running.is_of_device)
            case WritePath.NETWORK:
                return self._lost_bytes + sum(flight.size for flight in self._flights)

    def _lose(self, size: int, slot: StagingSlot | None) -> None:
        """A handle failed, which may have written part of itself."""
        self._lost_bytes += size
        if slot is not None:
            self._lost_slots.append(slot)

    def _arrived(self, flight: _Flight) -> None:
        running = flight.running
        if running.is_over:
            return
        running.arrived += 1
        running.moved_bytes += flight.size
        now_s = time.monotonic()
        if running.arrived == running.plan.handles:
            running.is_over = True
            del self._open[running.post]
            active_s = now_s - running.started_s
            self._report(PostDone(UNSTAMPED, running.post, running.moved_bytes, active_s=active_s))
        elif now_s - running.said_s >= PROGRESS_EVERY_S:
            running.said_s = now_s
            self._report(PostMoved(UNSTAMPED, running.post, running.moved_bytes))

    def _fail(self, running: _Running, why: str) -> None:
        if running.is_over:
            return
        running.is_over = True
        del self._open[running.post]
        self._turns = deque(other for other in self._turns if other is not running)
        done = f"{running.moved_bytes} bytes had arrived"
        self._report(PostFailed(UNSTAMPED, running.post, f"{why}; {done}"))
