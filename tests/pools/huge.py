"""What is done with a hugetlbfs, by a process that sees one: ``python -m tests.pools.huge``.

Prints what it found, as JSON.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import sys

from kvd.client.mapping import Mapping
from kvd.core.layout.geometry import geometry
from kvd.core.layout.spec import PageOrder
from kvd.pools.arena import NotReserved
from kvd.pools.location import Backing, PoolLocation
from kvd.pools.memory import open_memory
from kvd.pools.mounts import free_huge_bytes
from kvd.transfer.mapping import keep_map, map_region
from kvd.transfer.orders import RegionPlan
from tests.pools.keeping import JOURNAL_BYTES, KV, LARGER, content, opened, spec, written

PLACE = PoolLocation(Backing.HUGETLBFS, None, "/run/kvd")
HUGE = 2 * 2**20


def life() -> dict[str, object]:
    """Made, found by the next one, and no ordinary memory taken for it."""
    before = free_huge_bytes(HUGE)
    with opened(PLACE, pages=LARGER) as memory:
        made = (memory.origin.value, memory.reason)
        sizes = [one.arena.size_bytes for one in memory.placed]
        written(memory.placed[0].arena, b"kept")
    with opened(PLACE, pages=LARGER) as memory:
        found = (memory.origin.value, content(memory.placed[0].arena, 4)[1].decode())
    taken = before - free_huge_bytes(HUGE)
    try:
        open_memory(spec(10**6), PLACE, JOURNAL_BYTES)
    except NotReserved as exc:
        refused = str(exc)
    return {"made": made, "sizes": sizes, "found": found, "taken": taken, "refused": refused}


def lock() -> bool:
    """Whether the transfer process's mapping of the lock holds it when the daemon has gone."""
    with opened(PLACE) as memory:
        (descriptor,) = memory.keeper.keep_open
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        keep_map(descriptor)
    again = os.open(name, os.O_RDWR)
    try:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def mappings() -> dict[str, object]:
    """Where both sides map it, and that neither reaches beyond what it reserved for that."""
    with opened(PLACE) as memory:
        place = memory.placed[0]
        shape = geometry(KV, pages=10, order=PageOrder.PAGE_FIRST)
        note = map_region(RegionPlan("kv", place.arena.fd, shape))
        engines, neighbours = [], []
        for _ in range(4):  # the kernel gives addresses downwards: each just above the next
            neighbours.append(mmap.mmap(-1, HUGE))
            neighbours[-1][:] = b"n" * HUGE
            engines.append(Mapping(place.arena.fd, shape.total_bytes))
        engines[0].bytes[0] = 7
        seen = {int(one.bytes[0]) for one in engines}
        for one in engines:
            one.close()
        return {
            "address": note.address % HUGE,
            "bytes": note.region_bytes,
            "seen": sorted(seen),
            "intact": all(one[:] == b"n" * HUGE for one in neighbours),
        }


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"life": life(), "mappings": mappings(), "is_locked": lock()}))
