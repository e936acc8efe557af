"""A tier in a directory: a storage process, beside bare NIXL on the same disk (``tiers``).

Both write and read as many files of as many bytes, out of the same memory, through NIXL's POSIX
backend over libaio. The reference has its files open before the clock starts, sums nothing and
names nothing; kvd makes a file an object, sums every page, verifies it, and says what came of it.
Reads are of files that the page cache has, and of files that were dropped from it before.

In the rows of direct I/O the reference opens its files with ``O_DIRECT``, and a page lies behind a
head as in an object. kvd writes through the page cache as ever, and what it has not kvd reads past
it: so the row of reads is one of like with like, and in that of writes the reference has on the
disk what kvd has in memory.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import statistics
import time
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvd.core.effects import Demote, DropNamespace, DropObjects, Promote
from kvd.core.inputs import Demoted, Promoted
from kvd.core.layout.geometry import Geometry, PieceRow
from kvd.storage.nixl_files import FileMove, FileQueue
from kvd.storage.nixl_objects import CUDA_MAJOR
from kvd.storage.orders import DirectoryPlan, ObjectPart, Searched
from kvd.storage.posix import reads_past_cache
from kvd.storage.process import StorageProcess
from kvd.storage.sizes import HEAD_BYTES
from kvd.transfer.mapping import map_region
from kvd.transfer.nixl import Binding, MemorySpan
from kvd.transfer.orders import RegionPlan
from kvd.types import Pages, pack_ids

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvd.bench.report import Measured, Told
    from kvd.storage.orders import StorageReports, TierPlan

REGION: Final = "kv"
NAMESPACE: Final = "bench"
TIER: Final = "disk"
LIMIT_S: Final = 120.0
_libc: Final = ctypes.CDLL(None)
WAYS: Final = ("write", "read, cached", "read from disk")
DIRECT_WAYS: Final = ("write, direct", "read, direct")


class TierSite:
    """A pool in memory and a storage process over it, and the same memory mapped here."""

    def __init__(self, tier: TierPlan, pages: int, page_bytes: int) -> None:
        self.tier = tier.tier
        self.n_pages, self.page_bytes = pages, page_bytes
        row = PieceRow(0, page_bytes, page_bytes)
        shape = Geometry(pages=pages + 1, page_bytes=page_bytes, rows=(row,), tensors=())
        fd = os.memfd_create(REGION)
        os.ftruncate(fd, shape.total_bytes)
        plan = RegionPlan(REGION, fd, shape)
        self.note = map_region(plan)
        self.process = StorageProcess(
            f"bench-{os.getpid()}-{tier.tier}-{page_bytes}",
            [plan],
            [ObjectPart(REGION)],
            layout=blake2b(b"bench", digest_size=20).hexdigest(),
            tiers=[tier],
        )
        self.name_for(0)
        self.pages = Pages(pack_ids(list(range(1, pages + 1))))
        self._reports: asyncio.Queue[StorageReports] = asyncio.Queue()
        self._ticket = 0

    def name_for(self, number: int) -> None:
        """From now on objects have the names of that round."""
        first = number * self.n_pages
        self.keys = b"".join(
            blake2b(name.to_bytes(8, "little"), digest_size=20).digest()
            for name in range(first, first + self.n_pages)
        )

    async def start(self) -> None:
        """Return when it serves."""
        await self.process.start(self._take, lambda _: None)
        await self._next(Searched)

    def _take(self, reports: list[StorageReports]) -> None:
        for report in reports:
            self._reports.put_nowait(report)

    async def _next(self, kind: type[Searched | Demoted | Promoted]) -> StorageReports:
        async with asyncio.timeout(LIMIT_S):
            while True:
                report = await self._reports.get()
                if isinstance(report, kind):
                    return report

    async def carried_out(
        self, order: type[Demote | Promote], keys: bytes, pages: Pages
    ) -> Demoted | Promoted:
        """The answer to an order of these."""
        self._ticket += 1
        self.process.order(
            order(ticket=self._ticket, tier=self.tier, namespace=NAMESPACE, keys=keys, pages=pages)
        )
        report = await self._next(Demoted if order is Demote else Promoted)
        assert isinstance(report, Demoted | Promoted)
        return report

    async def move(self, order: type[Demote | Promote]) -> float:
        """Write or read every page once; the seconds."""
        began_s = time.perf_counter()
        report = await self.carried_out(order, self.keys, self.pages)
        took_s = time.perf_counter() - began_s
        assert report.n_bytes == self.n_pages * self.page_bytes, report.why
        return took_s

    def drop_objects(self, keys: list[bytes]) -> None:
        """Remove these."""
        self.process.order(DropObjects(self.tier, NAMESPACE, b"".join(keys)))

    def drop(self) -> None:
        """Remove what was written."""
        self.process.order(DropNamespace(self.tier, NAMESPACE))


class BareFiles:
    """Files that are open, and a queue of NIXL."""

    def __init__(self, directory: Path, site: TierSite, flags: int = 0) -> None:
        """``flags`` are for opening the files; with ``O_DIRECT`` a page begins behind a head."""
        self._flags = flags | os.O_RDWR | os.O_CREAT
        self._directory = directory
        directory.mkdir(mode=0o700)
        self._site = site
        note = site.note
        first = HEAD_BYTES if flags & os.O_DIRECT else 0
        shape = (np.array([first], np.uint64), np.array([site.page_bytes], np.uint64))
        span = MemorySpan(note.address, note.region_bytes)
        name = f"{directory.name}-{flags}"
        self._queue = FileQueue(Binding(CUDA_MAJOR), name, [span], shape)
        self._fds: list[int] = []

    def make(self) -> None:
        """New files, open and empty."""
        self.remove()
        self._fds = [
            os.open(self._directory / str(number), self._flags)
            for number in range(self._site.n_pages)
        ]

    def remove(self) -> None:
        """Close and remove them."""
        for number, fd in enumerate(self._fds):
            os.close(fd)
            (self._directory / str(number)).unlink()
        self._fds = []

    def move(self, run: Callable[[list[FileMove]], None]) -> float:
        """Write or read all; the seconds."""
        site = self._site
        moves = [
            FileMove(fd, np.array([site.note.address + (at + 1) * site.page_bytes], np.uint64))
            for at, fd in enumerate(self._fds)
        ]
        began_s = time.perf_counter()
        run(moves)
        return time.perf_counter() - began_s

    def write(self) -> float:
        """All of them."""
        return self.move(self._queue.write)

    def read(self) -> float:
        """All of them."""
        return self.move(self._queue.read)


def forget(directory: Path) -> None:
    """Have the kernel drop what it has cached of the files there."""
    top = os.open(directory, os.O_RDONLY)
    # It drops nothing that is not on the disk; and one by one they would take a day.
    _libc.syncfs(top)
    os.close(top)
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class TierRound(NamedTuple):
    """Seconds of both, by way."""

    kvd_s: dict[str, float]
    bare_s: dict[str, float]


async def measure(
    directory: Path, page_bytes: int, total_bytes: int, rounds: int, told: Told
) -> list[Measured]:
    """One page size: a row for each way."""
    plan = DirectoryPlan(TIER, str(directory / f"kvd-{page_bytes}"))
    site = TierSite(plan, total_bytes // page_bytes, page_bytes)
    await site.start()
    bare = BareFiles(directory / f"bare-{page_bytes}", site)
    direct = None
    if reads_past_cache(str(directory / "direct")):
        direct = BareFiles(directory / f"direct-{page_bytes}", site, os.O_DIRECT)
    else:
        told("no direct I/O here: the file system refuses it")
    found: list[TierRound] = []
    for number in range(rounds + 1):
        told(f"pages of {page_bytes // 1024} KiB, round {number}")
        site.drop()
        bare.make()
        one = TierRound({}, {})
        one.kvd_s["write"] = await site.move(Demote)
        one.bare_s["write"] = bare.write()
        one.kvd_s["read, cached"] = await site.move(Promote)
        one.bare_s["read, cached"] = bare.read()
        forget(directory)
        one.kvd_s["read from disk"] = await site.move(Promote)
        forget(directory)
        one.bare_s["read from disk"] = bare.read()
        if direct is not None:
            direct.make()
            one.kvd_s["write, direct"] = one.kvd_s["write"]
            one.bare_s["write, direct"] = direct.write()
            one.kvd_s["read, direct"] = one.kvd_s["read from disk"]
            one.bare_s["read, direct"] = direct.read()
            direct.remove()
        found.append(one)
    bare.remove()
    await site.process.stop()
    n_bytes = site.n_pages * page_bytes
    # Without the first round: memory is touched for the first time there.
    ways = WAYS if direct is None else (*WAYS, *DIRECT_WAYS)
    return [row_of(way, page_bytes, n_bytes, found[1:]) for way in ways]


def row_of(way: str, page_bytes: int, n_bytes: int, found: list[TierRound]) -> Measured:
    """Medians over the rounds, and that of the ratios."""
    return {
        "way": way,
        "page_kib": page_bytes // 1024,
        "kvd_gb_s": n_bytes / statistics.median(one.kvd_s[way] for one in found) / 1e9,
        "raw_gb_s": n_bytes / statistics.median(one.bare_s[way] for one in found) / 1e9,
        "ratio": statistics.median(one.bare_s[way] / one.kvd_s[way] for one in found),
    }
