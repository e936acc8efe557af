"""What LMCache asks of a tier, timed: ``python lmcache_calls.py JSON OBJECTS KIB ROUNDS``.

It runs beside LMCache. Objects are stored, looked up and loaded by calls of LMCache's interface, as
its controllers make them, and each outcome is waited for at its descriptor. The last line is JSON:
milliseconds of each round by call, of the wall and of all threads of this process, and what was
wrong.
"""

from __future__ import annotations

import json
import select
import sys
import time
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

WITHIN_MS = 60_000


def clocks() -> tuple[float, float]:
    """Of the wall, and of all threads of this process, in seconds."""
    return time.perf_counter(), time.process_time()


def since(begun: tuple[float, float]) -> tuple[float, float]:
    """Milliseconds of both."""
    wall_s, processor_s = clocks()
    return (wall_s - begun[0]) * 1e3, (processor_s - begun[1]) * 1e3


class TimedTier:
    """One adapter, and objects in memory that is LMCache's."""

    def __init__(self, spec: Any, objects: int, n_bytes: int) -> None:
        self.memory = torch.zeros(2 * objects * n_bytes, dtype=torch.uint8)
        desc = L1MemoryDesc(ptr=self.memory.data_ptr(), size=len(self.memory), align_bytes=1)
        config = get_l2_adapter_config_class(spec["type"]).from_dict(spec)
        self.adapter = create_l2_adapter(config, desc)
        self._n, self._bytes = objects, n_bytes
        shape = torch.Size([n_bytes])
        self.layouts = {0: MemoryLayoutDesc(shapes=[shape], dtypes=[torch.uint8])}
        self.sources = [self._object(n) for n in range(objects)]
        self.targets = [self._object(objects + n) for n in range(objects)]

    def _object(self, number: int) -> TensorMemoryObj:
        data = self.memory[number * self._bytes : (number + 1) * self._bytes]
        shape = torch.Size([self._bytes])
        meta = MemoryObjMetadata(
            shape=shape,
            dtype=torch.uint8,
            address=number * self._bytes,
            phy_size=self._bytes,
            fmt=MemoryFormat.KV_2LTD,
            ref_count=1,
            shapes=[shape],
            dtypes=[torch.uint8],
        )
        return TensorMemoryObj(raw_data=data, metadata=meta, parent_allocator=None)

    def round(self, number: int) -> tuple[dict[str, tuple[float, float]], list[str]]:
        """New objects, by all three calls."""
        adapter, wrong = self.adapter, []
        for n, one in enumerate(self.sources):
            one.raw_data.fill_((7 * number + n) % 251)
        self.memory[self._n * self._bytes :] = 255
        hashes = [(number * self._n + n).to_bytes(32, "big") for n in range(self._n)]
        keys = [ObjectKey(chunk_hash=one, model_name="m", kv_rank=0) for one in hashes]
        times: dict[str, tuple[float, float]] = {}
        begun = clocks()
        task = adapter.submit_store_task(keys, self.sources)
        stored = self.waited(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
        times["store"] = since(begun)
        if not stored[task].is_successful():
            wrong.append("a store failed")
        begun = clocks()
        task = adapter.submit_lookup_and_lock_task(keys, self.layouts)
        ask = adapter.query_lookup_and_lock_result
        found = self.waited(adapter.get_lookup_and_lock_event_fd(), lambda: ask(task))
        times["look up"] = since(begun)
        begun = clocks()
        task = adapter.submit_load_task(keys, self.targets)
        query = adapter.query_load_result
        loaded = self.waited(adapter.get_load_event_fd(), lambda: query(task))
        times["load"] = since(begun)
        adapter.submit_unlock(keys)
        if found.popcount() < self._n or loaded.popcount() < self._n:
            wrong.append(f"{found.popcount()} found and {loaded.popcount()} loaded of {self._n}")
        half = self._n * self._bytes
        if not torch.equal(self.memory[:half], self.memory[half:]):
            wrong.append("other bytes came back")
        return times, wrong

    @staticmethod
    def waited(descriptor: int, ask: Any) -> Any:
        """What ``ask`` answers, once it does."""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not (found := ask()):
            if not poll.poll(WITHIN_MS):
                raise TimeoutError("no outcome came")
            consume_fd(descriptor)
        return found


def main(spec: str, objects: str, kib: str, rounds: str) -> None:
    """Time it; the first round is not counted."""
    torch.set_num_threads(1)
    tier = TimedTier(json.loads(spec), int(objects), int(kib) << 10)
    found: dict[str, list[tuple[float, float]]] = {}
    wrong: list[str] = []
    for number in range(int(rounds) + 1):
        times, flaws = tier.round(number)
        wrong += flaws
        for call, spent in times.items() if number else ():
            found.setdefault(call, []).append(spent)
    tier.adapter.close()
    sys.stdout.write(json.dumps({"times": found, "wrong": wrong}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
