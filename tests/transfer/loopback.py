"""A transport inside one process, for unit tests only: regions are mappings, posts are copies.

It keeps the contract of ``kvd.transfer.process`` and the order of reports of the real one: posts
take turns, one handle per turn of the loop, copies one slice, and reports come by ``call_soon``. A
test can hold posts, or kill a transport.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from collections import deque
from typing import TYPE_CHECKING, assert_never

import numpy as np

from kvd.core.effects import (
    Copy,
    DropAgent,
    Exempt,
    Forget,
    ForgetSums,
    LoadAgent,
    Post,
    Quiesce,
    SumLanded,
    Verify,
)
from kvd.core.inputs import (
    AgentDropped,
    AgentFailed,
    AgentLoaded,
    Copied,
    CopyFailed,
    PostDone,
    PostFailed,
    PostMoved,
    Quiet,
    Unposted,
    Verified,
    WritePath,
)
from kvd.transfer.copies import Area, CopyTurns, copy_job
from kvd.transfer.mapping import noted
from kvd.transfer.metadata import VERSION, BadMetadata, Metadata, extent_bytes, pack, unpack
from kvd.transfer.orders import (
    UNSTAMPED,
    Alive,
    BeginTransfer,
    Collapsed,
    Probe,
    Ready,
    Sum,
    Summed,
)
from kvd.transfer.plans import direct, found
from kvd.transfer.process import TransportDown
from kvd.transfer.sums import post_job, sum_job, verify_job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.transfer.descriptors import Writes
    from kvd.transfer.orders import Order, RegionPlan, Report
    from kvd.transfer.process import OnExit, OnReports

_alive: dict[str, Loopback] = {}


class _Copy:
    """One post on its way."""

    def __init__(self, order: Post, plan: Writes, peer: Loopback) -> None:
        self.order = order
        self.plan = plan
        self.peer = peer
        self.turns = 0
        self.moved_bytes = 0


class Loopback:
    """One life of a transport that copies between mappings of this process."""

    def __init__(self, name: str, regions: Sequence[RegionPlan]) -> None:
        self._name = name
        self._regions = tuple(regions)
        self._registered: dict[str, Area] = {}
        self._areas: dict[str, Area] = {}
        self._links: dict[tuple[str, int], Metadata] = {}
        self._copies: deque[_Copy] = deque()
        self._slices = CopyTurns()
        self._is_held = False
        self._is_turning = False

    async def start(self, on_reports: OnReports, on_exit: OnExit) -> Ready:
        """Map the regions and become reachable.

        Raises:
            TransportDown: a region's file is shorter than its pages.
        """
        self._loop = asyncio.get_running_loop()
        self._on_reports, self._on_exit = on_reports, on_exit
        for region in self._regions:
            self._map(region)
        _alive[self._name] = self
        notes = tuple(area.note for area in self._registered.values())
        for note in notes:
            self._say(Collapsed(note.name, 0, "loopback"))
        return Ready(pack(Metadata(VERSION, self._name, b"", 0, 1, notes)), "loopback")

    def order(self, order: Order) -> None:  # noqa: C901 - one line for each order
        """Obey at once; the reports come in the next turn of the loop."""
        if not self.is_alive:
            return
        match order:
            case LoadAgent():
                self._load(order)
            case DropAgent():
                self._drop(order)
            case Post():
                self._post(order)
            case Forget() | SumLanded() | ForgetSums() | Exempt() | BeginTransfer():
                pass  # no post waits here, nor is a connection waited for
            case Verify():
                self._verify(order)
            case Sum():
                self._sum(order)
            case Quiesce(lease):
                self._say(Quiet(UNSTAMPED, lease))
            case Copy():
                self._copy(order)
            case Probe(number):
                self._say(Alive(number))
            case _:
                assert_never(order)

    async def stop(self) -> None:
        """End it; nothing is copied into or out of its regions any more."""
        self._end()

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return _alive.get(self._name) is self

    def hold(self) -> None:
        """Let posts wait before their next handle until ``release``."""
        self._is_held = True

    def release(self) -> None:
        """Let held posts go on."""
        self._is_held = False
        self._turn_soon()

    def die(self, why: str) -> None:
        """End as if killed: ``on_exit`` is called."""
        self._end()
        self._loop.call_soon(self._on_exit, why)

    def _end(self) -> None:
        if self.is_alive:
            del _alive[self._name]
        self._copies.clear()
        self._slices.jobs.clear()

    def _map(self, region: RegionPlan) -> None:
        shape = region.geometry
        mapped = mmap.mmap(region.fd, 0)
        needed = extent_bytes(shape.pages, shape.rows)
        if needed > len(mapped):
            msg = (
                f"region {region.name!r} has {shape.pages} pages ending at byte {needed}, "
                f"its file has {len(mapped)} bytes"
            )
            raise TransportDown(msg)
        memory = np.frombuffer(mapped, np.uint8)
        area = Area(noted(region, memory.ctypes.data, len(mapped)), memory)
        self._areas[region.name] = area
        if region.is_registered:
            self._registered[region.name] = area

    def _load(self, order: LoadAgent) -> None:
        try:
            peer = unpack(order.metadata)
        except BadMetadata as exc:
            self._say(AgentFailed(UNSTAMPED, order.incarnation, order.generation, str(exc)))
            return
        if peer.agent not in _alive:
            self._say(
                AgentFailed(
                    UNSTAMPED, order.incarnation, order.generation, f"{peer.agent} does not answer"
                )
            )
            return
        self._links[order.incarnation, order.generation] = peer
        self._say(
            AgentLoaded(UNSTAMPED, order.incarnation, order.generation, path=WritePath.SAME_HOST)
        )

    def _drop(self, order: DropAgent) -> None:
        self._links.pop((order.incarnation, order.generation), None)
        mine = [
            copy
            for copy in self._copies
            if (copy.order.incarnation, copy.order.generation)
            == (order.incarnation, order.generation)
        ]
        for copy in mine:
            self._copies.remove(copy)
            why = f"sending agent for {order.incarnation} was dropped"
            self._say(PostFailed(UNSTAMPED, copy.order.post, why))
        self._say(AgentDropped(UNSTAMPED, order.incarnation, order.generation, 0))

    def _post(self, order: Post) -> None:
        peer = self._links.get((order.incarnation, order.generation))
        if peer is None:
            agent = f"peer {order.incarnation} generation {order.generation}"
            why = f"no sending agent for {agent} is loaded"
            self._say(PostFailed(UNSTAMPED, order.post, why))
            return
        regions = found(order, self._registered, {note.name: note for note in peer.regions})
        if isinstance(regions, str):
            self._say(PostFailed(UNSTAMPED, order.post, regions))
        elif order.after:
            self._say(
                Unposted(
                    UNSTAMPED, order.post, "inside one process there are no events to wait for"
                )
            )
        elif not order.source:
            self._say(PostDone(UNSTAMPED, order.post, 0))
        elif peer.agent not in _alive:
            self._say(PostFailed(UNSTAMPED, order.post, f"{peer.agent} is gone"))
        else:
            plan = direct(order, regions)
            self._copies.append(_Copy(order, plan, _alive[peer.agent]))
            self._turn_soon()

    def _copy(self, order: Copy) -> None:
        job = copy_job(order, self._areas)
        if isinstance(job, CopyFailed):
            self._say(job)
        elif not job.left_bytes:
            self._say(Copied(UNSTAMPED, job.ticket, 0))
        else:
            self._slices.jobs.append(job)
            if len(self._slices.jobs) == 1:
                self._loop.call_soon(self._slice)

    def _slice(self) -> None:
        """Copy one slice of the copy whose turn it is."""
        if not self._slices.jobs:
            return
        job = self._slices.step()
        if self._slices.jobs:
            self._loop.call_soon(self._slice)
        if job is not None:
            self._on_reports([Copied(UNSTAMPED, job.ticket, job.n_bytes)])

    def _turn_soon(self) -> None:
        if self._copies and not self._is_turning:
            self._is_turning = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Copy one handle of the post whose turn it is."""
        self._is_turning = False
        if self._is_held or not self._copies:
            return
        copy = self._copies.popleft()
        if not copy.peer.is_alive:
            why = f"{copy.order.incarnation} is gone"
            self._on_reports([PostFailed(UNSTAMPED, copy.order.post, why)])
        else:
            self._on_reports([self._advance(copy)])
        self._turn_soon()

    def _advance(self, copy: _Copy) -> Report:
        plan = copy.plan
        for row in range(plan.bounds[copy.turns], plan.bounds[copy.turns + 1]):
            at, size, _ = plan.source[row].tolist()
            ctypes.memmove(int(plan.destination[row, 0]), at, size)
            copy.moved_bytes += size
        copy.turns += 1
        if copy.turns == plan.handles:
            return PostDone(UNSTAMPED, copy.order.post, copy.moved_bytes, self._sums_of(copy.order))
        self._copies.append(copy)
        return PostMoved(UNSTAMPED, copy.order.post, copy.moved_bytes)

    def _sums_of(self, order: Post) -> bytes:
        job = post_job(order, self._areas)
        if job is None:
            return b""
        job.sum_slice(0, job.ids.size)
        return job.packed()

    def _verify(self, order: Verify) -> None:
        found = verify_job(order, self._areas)
        if isinstance(found, Verified):
            self._say(found)
        else:
            found.sum_slice(0, found.ids.size)
            self._say(found.report())

    def _sum(self, order: Sum) -> None:
        found = sum_job(order, self._areas)
        if isinstance(found, Summed):
            self._say(found)
        else:
            found.sum_slice(0, found.ids.size)
            self._say(Summed(found.ticket, found.packed()))

    def _say(self, report: Report) -> None:
        """Report in the next turn of the loop."""
        self._loop.call_soon(self._on_reports, [report])
