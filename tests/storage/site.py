"""A pool in memory, a directory, and one storage process after the other over both."""

from __future__ import annotations

import mmap
import os
from hashlib import blake2b
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np

from kvd.core.effects import AgeObjects, Demote, DropNamespace, DropObjects, ProbeTier, Promote
from kvd.core.inputs import Demoted, Promoted, TierProbed
from kvd.core.layout.geometry import Geometry, PieceRow
from kvd.storage.orders import DirectoryPlan, Found, ObjectPart, Searched, StorePlan
from kvd.storage.process import StorageProcess
from kvd.transfer.orders import RegionPlan
from kvd.types import Pages, pack_ids
from tests.support.hearing import HeardReports

if TYPE_CHECKING:
    from pathlib import Path

    from kvd.harness.store import SeaweedStore
    from kvd.storage.orders import TierPlan
    from tests.support.moto import MotoStore

LIMIT_S = 20.0
PAGES = 33
KIB = 1024
PAGE_FIRST = Geometry(PAGES, 64 * KIB, (PieceRow(0, 64 * KIB, 64 * KIB),), ())
LAYER_FIRST = Geometry(
    PAGES,
    24 * KIB,
    tuple(PieceRow(PAGES * at * KIB, 4 * KIB, 4 * KIB) for at in range(0, 24, 4)),
    (),
)
SCALES = Geometry(2 * PAGES, 96, (PieceRow(0, 96, 96),), ())
"""Two pages of it go with each of the pool."""


def key(number: int) -> bytes:
    """A key like no other."""
    return blake2b(str(number).encode(), digest_size=20).digest()


class Region:
    """One region of its own memfd."""

    def __init__(self, name: str, shape: Geometry, seed: int) -> None:
        size = -(-shape.total_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.name, self.shape = name, shape
        self.fd = os.memfd_create(name)
        os.ftruncate(self.fd, size)
        self.bytes = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)

    def page(self, page: int) -> bytes:
        """Its bytes, in the order of its rows."""
        starts = [(row.offset_bytes + page * row.stride_bytes, row) for row in self.shape.rows]
        return b"".join(
            self.bytes[start : start + row.piece_bytes].tobytes() for start, row in starts
        )


class Site(HeardReports):
    """Starts storage processes, and hears what they say."""

    tier = "disk"

    def __init__(
        self,
        directory: Path,
        shapes: dict[str, Geometry] | None = None,
        parts: tuple[ObjectPart, ...] = (ObjectPart("kv"),),
        *,
        layout: str = "ours",
        max_rate: int = 0,
    ) -> None:
        super().__init__(LIMIT_S)
        self.directory = directory
        self.max_rate = max_rate
        self.regions = [
            Region(name, shape, seed)
            for seed, (name, shape) in enumerate((shapes or {"kv": PAGE_FIRST}).items())
        ]
        self.parts = parts
        self.layout = blake2b(layout.encode(), digest_size=20).hexdigest()
        self.process: StorageProcess | None = None
        self._tickets = iter(range(1, 100_000))
        self._lives = 0

    # ---- lives -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin the next life; return when all that lies there is found."""
        self._lives += 1
        self.reports.clear()
        self.process = StorageProcess(
            f"test-{os.getpid()}-{id(self)}-{self._lives}",
            [
                RegionPlan(region.name, region.fd, region.shape, in_huge_pages=False)
                for region in self.regions
            ],
            self.parts,
            layout=self.layout,
            tiers=[self.plan()],
        )
        await self.process.start(self._hear, self._gone)
        await self.until(lambda: self.heard(Searched))

    def plan(self) -> TierPlan:
        """Where its objects lie."""
        return DirectoryPlan(tier=self.tier, directory=str(self.directory), max_rate=self.max_rate)

    async def stop(self) -> None:
        if self.process is not None:
            await self.process.stop()

    def close(self) -> None:
        for region in self.regions:
            os.close(region.fd)

    def found(self) -> list[tuple[str, bytes]]:
        """What was told of the search: namespace and key, in the order of telling."""
        return [
            (report.namespace, report.keys[at : at + 20])
            for report in self.heard(Found)
            for at in range(0, len(report.keys), 20)
        ]

    # ---- orders ----------------------------------------------------------------------------------

    def order_demote(
        self, keys: list[bytes], pages: list[int], namespace: str = "n", **more: int
    ) -> int:
        return self._order(Demote, keys, pages, namespace, **more)

    def order_promote(self, keys: list[bytes], pages: list[int], namespace: str = "n") -> int:
        return self._order(Promote, keys, pages, namespace)

    def _order(self, kind, keys: list[bytes], pages: list[int], namespace: str, **more: int) -> int:
        ticket = next(self._tickets)
        self.process.order(
            kind(
                ticket=ticket,
                tier=self.tier,
                namespace=namespace,
                keys=b"".join(keys),
                pages=Pages(pack_ids(pages)),
                **more,
            )
        )
        return ticket

    async def demote(
        self, keys: list[bytes], pages: list[int], namespace: str = "n", **more: int
    ) -> Demoted:
        ticket = self.order_demote(keys, pages, namespace, **more)
        return (await self.until(lambda: self.heard(Demoted, ticket=ticket)))[0]

    async def promote(self, keys: list[bytes], pages: list[int], namespace: str = "n") -> Promoted:
        ticket = self.order_promote(keys, pages, namespace)
        return (await self.until(lambda: self.heard(Promoted, ticket=ticket)))[0]

    def age(self, keys: list[bytes], behind: int, namespace: str = "n") -> None:
        self.process.order(AgeObjects(self.tier, namespace, b"".join(keys), behind))

    def drop(self, keys: list[bytes], namespace: str = "n") -> None:
        self.process.order(DropObjects(self.tier, namespace, b"".join(keys)))

    def drop_namespace(self, namespace: str) -> None:
        self.process.order(DropNamespace(self.tier, namespace))

    # ---- bytes -----------------------------------------------------------------------------------

    def page(self, page: int) -> bytes:
        """A page of the pool with all that goes in lockstep with it."""
        factors = {part.region: part.factor for part in self.parts}
        return b"".join(
            region.page(page * factors[region.name] + nth)
            for region in self.regions
            for nth in range(factors[region.name])
        )

    def files(self, namespace: str | None = None) -> list[Path]:
        """The files of objects, by name."""
        below = "*" if namespace is None else f"{self.layout}/={quote(namespace)}/*/*"
        found = (path for path in self.directory.glob(f"**/{below}") if path.is_file())
        return sorted((path for path in found if len(path.name) == 40), key=lambda path: path.name)

    def file(self, key: bytes, namespace: str) -> Path:
        """That of one object."""
        (found,) = [path for path in self.files(namespace) if path.name == key.hex()]
        return found


class StoreSite(Site):
    """The same over a store that others share."""

    tier = "store"

    def __init__(
        self, store: SeaweedStore | MotoStore, *of, answer_s: float = 3.0, **other
    ) -> None:
        super().__init__(store.directory, *of, **other)
        self.store, self.answer_s = store, answer_s
        self.endpoint, self.credentials_file = store.endpoint, store.credentials_file

    def plan(self) -> StorePlan:
        return StorePlan(
            tier=self.tier,
            endpoint=self.endpoint,
            bucket="kvd",
            prefix="tests",
            region="us-east-1",
            credentials_file=str(self.credentials_file),
            profile=None,
            ca_file=None,
            answer_s=self.answer_s,
            deadline_s=40.0,
            max_bytes=2**24,
        )

    async def probe(self, keys: list[bytes], namespace: str = "n") -> TierProbed:
        ticket = next(self._tickets)
        self.process.order(ProbeTier(ticket, self.tier, namespace, b"".join(keys)))
        return (await self.until(lambda: self.heard(TierProbed, ticket=ticket)))[0]

    def forget(self) -> None:
        """Its pages are nothing that anybody wrote."""
        for region in self.regions:
            region.bytes[:] = 0

    def names(self, namespace: str) -> list[str]:
        """Of its objects."""
        below = f"tests/{self.layout}/={quote(namespace, safe='')}/"
        return [name for name in self.store.names() if name.startswith(below)]

    def name(self, key: bytes, namespace: str) -> str:
        """Of one object."""
        (found,) = [name for name in self.names(namespace) if name.endswith(key.hex())]
        return found
