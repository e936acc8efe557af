"""The posts to one peer: their turns, their handles in flight, their progress.

A queue is one sending agent and the posts that go through it. Posts take turns, one handle each, so
a small post waits for a few handles of a large one and never for all of it; small ones that wait
together share a handle, unless they are packed first (see ``staging``). At most
``IN_FLIGHT_HANDLES`` are in flight; a handle done makes room for the next post's turn::

    turns      [post 7 | handle 12 of 32] [post 9 | handle 0 of 1] ...
    in flight  7.8  7.9  7.10  7.11        oldest first; that one is done first, mostly

Invariants:
  - ``moved_bytes`` of a post counts handles seen done, so it never exceeds what has arrived.
  - Over a network, every byte of a handle counts as unacknowledged until the handle is seen done,
    whether it runs, has failed, or was refused: one that failed may have written part of itself.
  - ``pages`` of a post counts those of its first handles that are all seen done: packed ones are
    posted as they get packed, not by number.
  - A post leaves by exactly one of ``PostDone`` and ``PostFailed``, and posts nothing afterwards.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvd.core.inputs import PathFound, PathSide, PostDone, PostFailed, PostMoved, WritePath
from kvd.transfer.metadata import MemoryKind
from kvd.transfer.nixl import NixlUnusable
from kvd.transfer.orders import UNSTAMPED
from kvd.transfer.paths import SeenPaths
from kvd.transfer.plans import found, plan
from kvd.types import amount, count
from kvd.wire.peer import Integrity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvd.core.effects import Post
    from kvd.transfer.copies import Area
    from kvd.transfer.metadata import RegionNote
    from kvd.transfer.nixl import SendingAgent
    from kvd.transfer.orders import Report
    from kvd.transfer.paths import AgentKey, PathLook
    from kvd.transfer.plans import PostPlan
    from kvd.transfer.staging import PackedPost, Staging, StagingSlot

SIDE: Final = {MemoryKind.DRAM: PathSide.HOST, MemoryKind.VRAM: PathSide.DEVICE}
IN_FLIGHT_HANDLES: Final = 4
MERGED_BYTES: Final = 2**20
"""Posts that are small together share a handle: one costs as long as half of this takes to copy,
and more than this they would have to wait for one another."""
ALONE_HANDLES: Final = 4
"""Of a post's plan that go as one where nothing else waits, and the post itself copies: 256 MiB on
one host at 0.87 of the speed of bare NIXL in 16 handles, 0.90 in 8, 0.92 in 4, 0.96 in one. What
comes meanwhile waits for them, 64 MiB and about 7 ms at 10 GB/s."""
PROGRESS_EVERY_S: Final = 0.05
TOLD_EVERY_BYTES: Final = {
    Integrity.OFF: math.inf,
    Integrity.SAMPLED: 256 * 2**20,
    Integrity.FULL: 32 * 2**20,
}
"""So often the other side is told what has landed: it sums that while the rest is on its way.
Telling costs the copy about a millisecond where cores are scarce; of what is sampled that pays for
much of it only."""


class _Running:
    """One post on its way."""

    def __init__(
        self, order: Post, plan: PostPlan, ours: tuple[Area, ...], packed: PackedPost | None
    ) -> None:
        self.post = order.post
        self.ours = ours
        self.told_every_bytes = TOLD_EVERY_BYTES[order.seal.integrity]
        self.is_summed_whole = order.seal.integrity is Integrity.FULL
        made = plan.writes
        self.group_pages = made.whole_pages
        """So many become whole at a time; 0: all at the end."""
        self.group_bytes = sum(made.sizes) // count(order.source) * made.whole_pages
        self.plan, _, self.sides = plan
        self.packed = packed
        self.is_of_device = MemoryKind.VRAM in self.sides
        self.is_between_devices = set(self.sides) == {MemoryKind.VRAM}
        self.turns = 0
        self.arrived: set[int] = set()
        self.moved_bytes = 0
        self.whole = 0
        """Its handles before this one have all arrived, of ``whole_bytes``."""
        self.whole_bytes = 0
        self.started_s = 0.0
        self.said_s = 0.0
        self.said_bytes = 0
        self.is_over = False

    def goes_with(self, other: _Running) -> bool:
        """Whether one handle may write both."""
        return self.sides == other.sides and self.packed is None and other.packed is None

    @property
    def pages(self) -> int:
        """So many of its first pages have arrived whole."""
        if not self.group_pages:
            return 0
        return self.whole_bytes // self.group_bytes * self.group_pages

    def note_arrived(self, handle: int) -> None:
        """One of its handles has arrived."""
        sizes = self.plan.sizes
        self.arrived.add(handle)
        self.moved_bytes += sizes[handle]
        while self.whole in self.arrived:
            self.whole_bytes += sizes[self.whole]
            self.whole += 1

    def must_tell(self, now_s: float) -> bool:
        """Whether it is time to say how far it has come."""
        # Before the last handle in any case: what is not summed by then is waited for.
        if self.is_summed_whole and len(self.arrived) == self.plan.handles - 1:
            return True
        news_bytes = self.moved_bytes - self.said_bytes
        return now_s - self.said_s >= PROGRESS_EVERY_S or news_bytes >= self.told_every_bytes


class _Turn(NamedTuple):
    """What one post has in a handle: all of one of its plan's, by number."""

    running: _Running
    part: int

    @property
    def size(self) -> int:
        """Bytes of this handle of the post."""
        return self.running.plan.sizes[self.part]


class _Flight(NamedTuple):
    """One handle in flight, of one post or of several small ones; all of one kind of memory.

    ``look``: what is to be seen by it, where nobody knows yet how such bytes travel.
    """

    handle: int
    turns: list[_Turn]
    slot: StagingSlot | None
    look: PathLook | None = None

    @property
    def first(self) -> _Running:
        """The first of the posts that share the handle."""
        return self.turns[0].running

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return sum(turn.size for turn in self.turns)


class PostQueue:
    """One sending agent and the posts through it; driven by the worker's loop."""

    def __init__(
        self,
        sender: SendingAgent,
        *,
        key: AgentKey,
        path: WritePath,
        regions: dict[str, RegionNote],
        staging: Staging,
        report: Callable[[Report], None],
        posting: Callable[[int, float], None],
    ) -> None:
        """``posting`` is told before each handle how much of its post is posted with it."""
        self.sender = sender
        self.path = path
        self._key = key
        self._theirs = regions
        self._report = report
        self._posting = posting
        self._turns: deque[_Running] = deque()
        self._flights: deque[_Flight] = deque()
        self._open: dict[int, _Running] = {}
        self._lost_bytes = 0
        self._staging = staging
        self._paths = SeenPaths(sender, path)
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
            is_here and any(flight.first.is_of_device for flight in self._flights)
        )

    @property
    def is_fast(self) -> bool:
        """Whether handles go from device to device of one host: some take less than 100 us."""
        return self.path is WritePath.SAME_HOST and any(
            flight.first.is_between_devices for flight in self._flights
        )

    @property
    def can_post(self) -> bool:
        """Whether ``post_next`` would start a handle."""
        return len(self._flights) < IN_FLIGHT_HANDLES and any(map(self._can_go, self._turns))

    def add(self, order: Post, ours: Mapping[str, Area]) -> None:
        """Take a post of pages of our regions in, or refuse it with ``PostFailed``."""
        # Said twice: the one that runs is the answer. A failure would be told of that one as well,
        # which has the same number, and it would end by its own report once more.
        if order.post in self._open:
            return
        regions = found(order, ours, self._theirs)
        if isinstance(regions, str):
            self._report(PostFailed(UNSTAMPED, order.post, regions))
        # An empty delta has nothing to wait for, and a post must be answered once.
        elif not order.source:
            self._report(PostDone(UNSTAMPED, order.post, 0))
        else:
            made = plan(order, regions, self._paths.is_direct)
            packed = None if made.packing is None else self._staging.begin(made.packing)
            running = _Running(order, made, regions.ours, packed)
            self._open[order.post] = running
            self._turns.append(running)

    def post_next(self, *, is_alone: bool = False) -> None:
        """Start one handle of the post whose turn it is, and of small ones behind it.

        ``is_alone``: no other queue has anything to post.
        """
        # Past those whose next pages are still being packed: there is nothing to do for them.
        ready = filter(self._can_go, self._turns)
        first = next(ready)
        # Before it is packed: that is a part of what it takes.
        now_s, slot = time.monotonic(), None
        if first.packed is None:
            turns = _together(first, ready)
            if is_alone and len(self._turns) == 1 and self._may_take_more(first):
                turns += _further(first)
        else:
            portion = self._staging.take(first.packed)
            if portion is None:
                return
            turns, slot = [_Turn(first, portion.handle)], portion.slot
        rows = [running.plan.rows(part) for running, part in turns]
        source, destination = rows[0]
        if len(rows) > 1:
            source, destination = map(np.concatenate, zip(*rows, strict=True))
        if slot is not None:
            source = source + np.array([slot.address, 0, 0], np.uint64)
        for running, parts in Counter(running for running, _ in turns).items():
            self._turns.remove(running)
            if not running.turns:
                running.started_s = running.said_s = now_s
            # Before it is posted: a handle that is refused is not tried again.
            running.turns += parts
            self._posting(running.post, running.turns / running.plan.handles)
        in_flight = {flight.first.sides for flight in self._flights if flight.first.is_of_device}
        look = self._paths.look(first.sides, in_flight) if first.is_of_device else None
        try:
            handle = self.sender.post(source, destination, first.sides)
        except NixlUnusable as exc:
            # Before the post fails: what may have left counts as open until the agent is destroyed.
            self._lose(turns, slot, str(exc))
            return
        self._flights.append(_Flight(handle, turns, slot, look))
        # At the end of the line: a small post behind waits for one handle of a large one.
        posted = dict.fromkeys(running for running, _ in turns)
        self._turns += [running for running in posted if running.turns < running.plan.handles]

    def step(self) -> None:
        """Take note of the handles that are done."""
        # All of them: several rails, or what a device copies, need not end in the order in which
        # they began, and one that hangs must not hide that others are done or have failed.
        for flight in list(self._flights):
            try:
                if not self.sender.step(flight.handle):
                    continue
            except NixlUnusable as exc:
                self._flights.remove(flight)
                self._lose(flight.turns, flight.slot, str(exc))
                continue
            self._flights.remove(flight)
            if flight.slot is not None:
                self._staging.give([flight.slot])
            if flight.look is not None:
                self._see(flight.look, flight.size)
            for turn in flight.turns:
                turn.running.note_arrived(turn.part)
            for running in dict.fromkeys(turn.running for turn in flight.turns):
                self._tell(running)

    def _see(self, look: PathLook, n_bytes: int) -> None:
        """Say how these bytes have travelled, if that can be told by them."""
        seen = self._paths.seen(look, n_bytes)
        if seen is not None:
            path, bytes_s = seen
            self._report(
                PathFound(
                    at_s=UNSTAMPED,
                    incarnation=self._key.peer,
                    generation=self._key.generation,
                    source=SIDE[look.sides.source],
                    destination=SIDE[look.sides.destination],
                    path=path,
                    bytes_s=bytes_s,
                )
            )

    def destroy(self, why: str) -> int:
        """Fail what is outstanding and destroy the agent; the bytes the peer had not confirmed.

        On one host a handle's bytes were all copied when it was posted, so nothing is open; but
        what concerns a device is copied behind our back, and counts as open.
        """
        for running in list(self._open.values()):
            self._fail(running, why)
        # Before any slot is free again: until it is gone a handle in flight may read it.
        self.sender.destroy()
        turns = [turn for flight in self._flights for turn in flight.turns]
        for area in {area for turn in turns for area in turn.running.ours}:
            area.reach.settle()  # what the device copies of its own accord is over after this
        slots = [flight.slot for flight in self._flights if flight.slot is not None]
        self._staging.give([*slots, *self._lost_slots])
        match self.path:
            case WritePath.SAME_HOST:
                return sum(flight.size for flight in self._flights if flight.first.is_of_device)
            case WritePath.NETWORK | WritePath.EMULATED:
                return self._lost_bytes + sum(flight.size for flight in self._flights)

    def _can_go(self, running: _Running) -> bool:
        """Whether a handle of the post could be started."""
        return running.packed is None or self._staging.can_take(running.packed)

    def _may_take_more(self, running: _Running) -> bool:
        """Whether a handle may be larger than others: it is copied when it is posted."""
        # What is summed whole, here and there, is summed handle by handle beside the next copy.
        is_here = self.path is WritePath.SAME_HOST and not running.is_of_device
        return is_here and not running.is_summed_whole

    def _lose(self, turns: list[_Turn], slot: StagingSlot | None, why: str) -> None:
        """A handle failed, which may have written part of itself: all posts in it fail."""
        self._lost_bytes += sum(turn.size for turn in turns)
        if slot is not None:
            self._lost_slots.append(slot)
        for turn in turns:
            self._fail(turn.running, why)

    def _tell(self, running: _Running) -> None:
        """How far it has come, where that is worth a report."""
        if running.is_over:
            return
        now_s = time.monotonic()
        if len(running.arrived) == running.plan.handles:
            running.is_over = True
            del self._open[running.post]
            active_s = now_s - running.started_s
            self._report(PostDone(UNSTAMPED, running.post, running.moved_bytes, active_s=active_s))
        elif running.must_tell(now_s):
            running.said_s, running.said_bytes = now_s, running.moved_bytes
            moved = running.moved_bytes
            self._report(PostMoved(UNSTAMPED, running.post, moved, pages=running.pages))

    def _fail(self, running: _Running, why: str) -> None:
        if running.is_over:
            return
        running.is_over = True
        if running.packed is not None:
            self._staging.drop(running.packed)
        del self._open[running.post]
        self._turns = deque(other for other in self._turns if other is not running)
        done = f"{amount(running.moved_bytes)} had arrived"
        self._report(PostFailed(UNSTAMPED, running.post, f"{why}; {done}"))


def _together(first: _Running, behind: Iterable[_Running]) -> list[_Turn]:
    """What the first, which is not packed, posts next, and those behind it if all are small."""
    turns = [_Turn(first, first.turns)]
    room = MERGED_BYTES - turns[0].size
    for running in behind:
        turn = _Turn(running, running.turns)
        if turn.size > room or not running.goes_with(first):
            break
        turns.append(turn)
        room -= turn.size
    return turns


def _further(first: _Running) -> list[_Turn]:
    """What it posts with its next handle, being alone."""
    end = min(first.turns + ALONE_HANDLES, first.plan.handles)
    return [_Turn(first, part) for part in range(first.turns + 1, end)]
