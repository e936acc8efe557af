"""One transfer between two transfer processes of this host, without a daemon.

    here: two regions of memory --> sender process ==Post==> receiver process --> compare

Two real children are started on fresh memory, the receiver's metadata goes to the sender as it
would over a peer link, and the same pages are written a few times. Everything is gone afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvd.core.effects import LoadAgent, Post
from kvd.core.inputs import AgentFailed, AgentLoaded, PostDone, PostFailed
from kvd.core.inputs import WritePath as Route
from kvd.core.layout.geometry import Geometry, PieceRow
from kvd.transfer.process import TransferProcess
from kvd.transfer.transport import RegionFd, TransportDown
from kvd.types import Pages, pack_ids

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

    from kvd.transfer.orders import Report

R = TypeVar("R", AgentLoaded, PostDone)

PAGE_BYTES = 2 * 2**20
PAGES = 33
POSTS = 4
LIMIT_S = 30.0
REGION = "doctor"
TELL_LANES = {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y"}


class Measured(msgspec.Struct, frozen=True):
    """What came of it: ``best_s`` is the fastest of the posts, each of ``moved_bytes``.

    ``lanes``: what UCX says that writes went by, like ``cma/memory``; empty if it did not say.
    """

    moved_bytes: int
    best_s: float
    route: Route
    bytes_equal: bool
    lanes: str = ""


async def measure(environment: Mapping[str, str]) -> Measured:
    """Run it.

    Raises:
        TransportDown: a process ended, or refused; the message says why.
        TimeoutError: no end within ``LIMIT_S``.
    """
    async with asyncio.timeout(LIMIT_S), contextlib.AsyncExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-doctor-"))) / "ucx"
        telling = {**environment, **TELL_LANES, "UCX_LOG_FILE": str(log)}
        source, target = stack.enter_context(_memory()), stack.enter_context(_memory())
        receiver = await stack.enter_async_context(_end("to", target, environment))
        sender = await stack.enter_async_context(_end("from", source, telling))
        payload = os.urandom(PAGE_BYTES)
        _fill(source, payload)
        measured = await _send(sender, receiver.metadata, lambda: _holds(target, payload))
        with contextlib.suppress(OSError):  # it is for people, and may change
            measured = msgspec.structs.replace(
                measured, lanes=lanes_of(log.read_text(errors="replace"))
            )
        return measured


def lanes_of(log: str) -> str:
    """What UCX's log says of long writes to the last connection that it made.

    It is a table for each connection and operation; the row of a write that has no end counts.
    """
    found, is_write = "", False
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.partition("]   |")[2].split("|")]
        if "cfg#" in line:
            is_write = False
        if "remote memory write" in line:
            is_write = True
        elif is_write and len(cells) >= 3 and cells[0].endswith("..inf"):
            found = cells[2]
    return found


async def _send(sender: _End, metadata: bytes, is_equal: Callable[[], bool]) -> Measured:
    """Write every page but the null page a few times."""
    sender.process.order(LoadAgent("to", 1, metadata))
    route = (await sender.next(AgentLoaded)).path
    pages = Pages(pack_ids(list(range(1, PAGES))))
    times: list[float] = []
    for number in range(POSTS):
        sender.process.order(
            Post(
                post=number,
                incarnation="to",
                generation=1,
                component=REGION,
                source=pages,
                destination=pages,
            )
        )
        times.append((await sender.next(PostDone)).active_s)
    return Measured(
        moved_bytes=PAGE_BYTES * (PAGES - 1), best_s=min(times), route=route, bytes_equal=is_equal()
    )


class _End:
    """One transfer process and what it reports."""

    def __init__(self, process: TransferProcess) -> None:
        self.process = process
        self.metadata = b""
        self._reports: asyncio.Queue[Report | str] = asyncio.Queue()

    async def start(self) -> None:
        """Wait until it serves."""

        def take(reports: list[Report]) -> None:
            for report in reports:
                self._reports.put_nowait(report)

        self.metadata = (await self.process.start(take, self._reports.put_nowait)).metadata

    async def next(self, kind: type[R]) -> R:
        """The next report of ``kind``; a failure or the end of the process raises."""
        while True:
            report = await self._reports.get()
            if isinstance(report, kind):
                return report
            if isinstance(report, AgentFailed | PostFailed):
                raise TransportDown(report.why)
            if isinstance(report, str):
                raise TransportDown(report)


@contextlib.asynccontextmanager
async def _end(name: str, fd: int, environment: Mapping[str, str]) -> AsyncIterator[_End]:
    """A transfer process over one region, for as long as the block lasts."""
    rows = (PieceRow(0, PAGE_BYTES, PAGE_BYTES),)
    region = RegionFd(
        REGION, fd, Geometry(pages=PAGES, page_bytes=PAGE_BYTES, rows=rows, tensors=())
    )
    process = TransferProcess(f"doctor-{os.getpid()}-{name}", [region], environment=environment)
    end = _End(process)
    try:
        await end.start()
        yield end
    finally:
        await process.stop()


@contextlib.contextmanager
def _memory() -> Iterator[int]:
    """A file in memory for one region."""
    fd = os.memfd_create("kvd-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, PAGE_BYTES * PAGES)
        yield fd
    finally:
        os.close(fd)


def _fill(fd: int, payload: bytes) -> None:
    """Give every page its own bytes: the payload, beginning with the page's number."""
    with mmap.mmap(fd, 0) as memory:
        memory[PAGE_BYTES:] = _pages(payload)


def _holds(fd: int, payload: bytes) -> bool:
    """Whether every page has arrived."""
    with mmap.mmap(fd, 0) as memory:
        return memory[PAGE_BYTES:] == _pages(payload)


def _pages(payload: bytes) -> bytes:
    """All but the null page."""
    return b"".join(page.to_bytes(4, "little") + payload[4:] for page in range(1, PAGES))
