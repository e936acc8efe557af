"""How pages of a pool on a device would travel: three transfers between two processes of this host.

    here     host (out)                      device (across) --copy--> device (back)
               |                                ^                        |
    there    device (out) --copy--> device (across)                    host (back) --> compare

The bytes that come back are those that went out, or one of the three is wrong. Which of them UCX
has a way of its own for is seen as a daemon sees it (``transfer.paths``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Final

import msgspec

from kvd.cli.doctor.finding import good, poor, wrong
from kvd.cli.doctor.transport import (
    LIMIT_S,
    PAGE_BYTES,
    PAGES,
    POSTS,
    SHAPE,
    TransferEnd,
    end_of,
    fill,
    holds,
    memory,
    of_host,
)
from kvd.config.pool import pool_spec
from kvd.core.effects import Copy, LoadAgent, Post
from kvd.core.inputs import AgentLoaded, Copied, PathFound, PostDone
from kvd.core.peers.peer import GB, PeerWay
from kvd.pools.build import device_bytes
from kvd.text import clean
from kvd.transfer.orders import NO_FD, RegionPlan
from kvd.transfer.process import TransportDown
from kvd.types import Pages, amount, pack_ids

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvd.cli.doctor.finding import DoctorFinding, Subject

OUT, ACROSS, BACK = "out", "across", "back"
MOVED_BYTES: Final = PAGE_BYTES * (PAGES - 1)
_CHECK: Final = "device transfer"
_FREE: Final = "see cuda above; two processes need a context each, half a gigabyte of the device"


class MeasuredWay(msgspec.Struct, frozen=True):
    """How bytes went, and how fast the fastest of some posts was."""

    way: PeerWay
    best_s: float

    @property
    def words(self) -> str:
        """Like ``64.0 MiB at 0.9 GB/s from device to host, emulated``."""
        way, speed = self.way, MOVED_BYTES / self.best_s / GB
        sides = f"from {way.source.value} to {way.destination.value}"
        return f"{amount(MOVED_BYTES)} at {speed:.1f} GB/s {sides}, {way.path.value}"


def device_transfer(subject: Subject) -> list[DoctorFinding]:
    """Where the pool is to lie on a device: move pages there, on, and back, and compare them."""
    devices = device_bytes(pool_spec(subject.config))
    if not devices:
        return []
    try:
        ways, are_equal = asyncio.run(measure_devices(subject.config.transfer.ucx, min(devices)))
    except (TransportDown, TimeoutError) as exc:
        return [poor(_CHECK, clean(str(exc) or "no end within its time limit"), _FREE)]
    if not are_equal:
        what = "the bytes that came back are not those that were sent"
        return [wrong(_CHECK, what, "see nixl above; install the build of NIXL for this CUDA")]
    return [_judged(measured) for measured in ways]


def _judged(measured: MeasuredWay) -> DoctorFinding:
    _, _, fix = measured.way.advice.partition(": ")
    if fix:
        return poor(_CHECK, f"{measured.words}: UCX has no way of its own for that", fix)
    return good(_CHECK, measured.words)


async def measure_devices(
    environment: Mapping[str, str], device: int
) -> tuple[list[MeasuredWay], bool]:
    """Run it: the three ways, and whether the bytes are those that were sent.

    Raises:
        TransportDown: a process ended, or refused; the message says why.
        TimeoutError: no end within ``LIMIT_S``.
    """
    async with asyncio.timeout(LIMIT_S), contextlib.AsyncExitStack() as stack:
        first, last = stack.enter_context(memory()), stack.enter_context(memory())
        ends = []
        far = {name: _of_device(name, device) for name in (OUT, ACROSS, BACK)}
        for name, regions in (
            ("here", [of_host(first, OUT), far[ACROSS], far[BACK]]),
            ("there", [far[OUT], far[ACROSS], of_host(last, BACK)]),
        ):
            ends.append(await stack.enter_async_context(end_of(name, regions, environment)))
        payload = os.urandom(PAGE_BYTES)
        fill(first, payload)
        here, there = ends
        for sender, receiver in ((here, there), (there, here)):
            sender.process.order(LoadAgent(_PEER, 1, receiver.metadata))
            await sender.reports.next(AgentLoaded)
        ways = [await _sent(here, OUT)]
        await _copied(there, OUT, ACROSS)
        ways.append(await _sent(there, ACROSS))
        await _copied(here, ACROSS, BACK)
        ways.append(await _sent(here, BACK))
        return ways, holds(last, payload)


_PEER: Final = "the other"


_ALL: Final = Pages(pack_ids(list(range(1, PAGES))))
"""But the null page."""


def _of_device(name: str, device: int) -> RegionPlan:
    return RegionPlan(name, NO_FD, SHAPE, in_huge_pages=False, device=device)


async def _copied(end: TransferEnd, source: str, onto: str) -> None:
    """From one region to another of one process."""
    end.process.order(
        Copy(
            ticket=1,
            source_region=source,
            source=_ALL,
            destination_region=onto,
            destination=_ALL,
        )
    )
    await end.reports.next(Copied)


async def _sent(sender: TransferEnd, component: str) -> MeasuredWay:
    """Every page, a few times."""
    found: PathFound | None = None
    times: list[float] = []
    for number in range(POSTS):
        post = Post(
            post=number,
            incarnation=_PEER,
            generation=1,
            component=component,
            source=_ALL,
            destination=_ALL,
        )
        sender.process.order(post)
        if found is None:
            found = await sender.reports.next(PathFound)
        times.append((await sender.reports.next(PostDone)).active_s)
    assert found is not None
    way = PeerWay(source=found.source, destination=found.destination, path=found.path)
    return MeasuredWay(way, min(times))
