"""A tier in a store: a storage process, beside bare NIXL on the same SeaweedFS (``tiers``).

Both write and read as many objects of as many bytes, as many requests at a time, through NIXL's OBJ
backend. The reference sums nothing, copies nothing and names nothing. The server runs on the same
processors as both.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

from benchmarks.disk_tier import TierRound, TierSite, row_of
from kvd.core.effects import Demote, Promote
from kvd.harness.store import BUCKET, SeaweedStore
from kvd.storage.nixl_objects import CUDA_MAJOR, ObjectMove, ObjectQueue, StoreSite
from kvd.storage.orders import StorePlan
from kvd.storage.sizes import HEAD_BYTES
from kvd.storage.store import REQUESTS
from kvd.transfer.nixl import Binding

if TYPE_CHECKING:
    from pathlib import Path

    from kvd.bench.report import Measured, Told

TIER: Final = "store"
SILENT_S: Final = 60.0
WAYS: Final = ("write to a store", "read from a store")


class BareObjects:
    """A queue of NIXL, and memory that nobody looks at."""

    def __init__(self, store: SeaweedStore, objects: int, n_bytes: int) -> None:
        site = StoreSite(store.endpoint, BUCKET, "us-east-1")
        name = f"bare-{os.getpid()}-{n_bytes}"
        self._queue = ObjectQueue(Binding(CUDA_MAJOR), name, site, REQUESTS, n_bytes)
        self._moves = [ObjectMove(f"bare/{n_bytes}/{at}", n_bytes) for at in range(objects)]

    def write(self) -> float:
        """All of them; the seconds."""
        began_s = time.perf_counter()
        outcomes = self._queue.write(self._moves, SILENT_S, SILENT_S)
        assert not any(outcomes), outcomes
        return time.perf_counter() - began_s

    def read(self) -> float:
        """All of them; the seconds."""
        began_s = time.perf_counter()
        outcomes = self._queue.read(self._moves, SILENT_S, SILENT_S)
        assert not any(outcomes), outcomes
        return time.perf_counter() - began_s


async def measure(
    store: SeaweedStore, page_bytes: int, total_bytes: int, rounds: int, told: Told
) -> list[Measured]:
    """One page size: a row for each way."""
    plan = StorePlan(
        tier=TIER,
        endpoint=store.endpoint,
        bucket=BUCKET,
        prefix="kvd",
        region="us-east-1",
        credentials_file=str(store.credentials_file),
        profile=None,
        ca_file=None,
        answer_s=SILENT_S,
        deadline_s=4 * SILENT_S,
        max_bytes=total_bytes,
    )
    site = TierSite(plan, total_bytes // page_bytes, page_bytes)
    await site.start()
    bare = BareObjects(store, site.n_pages, HEAD_BYTES + page_bytes)
    found: list[TierRound] = []
    for number in range(rounds + 1):
        told(f"a store, pages of {page_bytes // 1024} KiB, round {number}")
        one = TierRound({}, {})
        one.kvd_s[WAYS[0]] = await site.move(Demote)
        one.bare_s[WAYS[0]] = bare.write()
        one.kvd_s[WAYS[1]] = await site.move(Promote)
        one.bare_s[WAYS[1]] = bare.read()
        found.append(one)
    await site.process.stop()
    return [row_of(way, page_bytes, site.n_pages * page_bytes, found[1:]) for way in WAYS]


async def measure_all(directory: Path, mib: int, rounds: int, told: Told) -> list[Measured]:
    """Pages of two sizes, over a server that is started for it.

    Raises:
        RuntimeError: it does not come up.
    """
    store = SeaweedStore(directory / "seaweedfs")
    store.start()
    os.environ["AWS_SHARED_CREDENTIALS_FILE"] = str(store.credentials_file)
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    try:
        rows: list[Measured] = []
        for page_bytes in (2**19, 2**21):
            rows += await measure(store, page_bytes, mib * 2**20, rounds, told)
    finally:
        store.stop()
    return rows
