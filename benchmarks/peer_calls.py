"""The disk of another cache, driven: ``python peer_calls.py LIBRARY SPEC OBJECTS BYTES``.

It runs beside LMCache or vLLM. Each line that it reads is a call, ``store ROUND`` or ``load
ROUND``, of objects that are named by their round; each line that it writes says what that took, in
seconds of the wall and of all threads of this process, how many came, and whether they were right.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

OF_A_CALL = 16
"""Objects, as of one request; all calls of a round are made at once."""


def fill(memory: Any, number: int) -> None:
    """Objects that no other round has."""
    for n, row in enumerate(memory):
        row[:] = (7 * number + n) % 251


class LMCacheDisk:
    """One adapter of LMCache's server, by its spec."""

    def __init__(self, spec: Any, objects: int, n_bytes: int) -> None:
        # Imported here: the process of the other library does not have it.
        from lmcache.v1.distributed.api import ObjectKey  # noqa: PLC0415

        from benchmarks.lmcache_calls import TimedTier  # noqa: PLC0415

        self._key = ObjectKey
        self._tier = TimedTier(spec, objects, n_bytes)
        memory = self._tier.memory.numpy().reshape(2 * objects, n_bytes)
        self.source, self.target = memory[:objects], memory[objects:]

    def _keys(self, number: int) -> list[Any]:
        objects = len(self.source)
        hashes = [(number * objects + n).to_bytes(32, "big") for n in range(objects)]
        return [self._key(chunk_hash=one, model_name="m", kv_rank=0) for one in hashes]

    def _calls(self, number: int, objects: list[Any]) -> list[tuple[list[Any], list[Any]]]:
        keys = self._keys(number)
        starts = range(0, len(keys), OF_A_CALL)
        return [(keys[at : at + OF_A_CALL], objects[at : at + OF_A_CALL]) for at in starts]

    def store(self, number: int) -> int:
        """Write the objects of a round; how many were."""
        tier, adapter = self._tier, self._tier.adapter
        calls = self._calls(number, tier.sources)
        open_tasks = {adapter.submit_store_task(*call) for call in calls}
        while open_tasks:
            done = tier.waited(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
            if not all(result.is_successful() for result in done.values()):
                return 0
            open_tasks -= set(done)
        return len(self.source)

    def load(self, number: int) -> int:
        """Look the objects of a round up, and read them; how many came."""
        tier, adapter = self._tier, self._tier.adapter
        found, calls = 0, self._calls(number, tier.targets)
        looked = [adapter.submit_lookup_and_lock_task(keys, tier.layouts) for keys, _ in calls]
        for task in looked:
            tier.waited(
                adapter.get_lookup_and_lock_event_fd(),
                lambda task=task: adapter.query_lookup_and_lock_result(task),
            )
        loads = [adapter.submit_load_task(*call) for call in calls]
        for task in loads:
            loaded = tier.waited(
                adapter.get_load_event_fd(), lambda task=task: adapter.query_load_result(task)
            )
            found += loaded.popcount()
        for keys, _ in calls:
            adapter.submit_unlock(keys)
        return found


class VllmDisk:
    """The ``fs`` tier of vLLM's tiered offloading, over memory as its CPU tier has it."""

    def __init__(self, spec: Any, objects: int, n_bytes: int) -> None:
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key  # noqa: PLC0415
        from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: PLC0415
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager  # noqa: PLC0415

        self._job, self._key, self._request = TransferJob, make_offload_key, ReqContext
        memory = np.frombuffer(mmap.mmap(-1, 2 * objects * n_bytes), np.uint8)
        view: Any = memory.reshape(2 * objects, n_bytes)
        self.source, self.target = view[:objects], view[objects:]
        ways = {f"{name}_size": 1 for name in ("tp", "pp", "pcp", "dcp")}
        config = SimpleNamespace(
            groups=[SimpleNamespace(tokens_per_block=16, layer_names=["kv"])],
            parallel=SimpleNamespace(**ways, rank=0, is_parallelism_agnostic=True),
            model=SimpleNamespace(name="m", dtype="uint8"),
            cache=SimpleNamespace(tokens_per_hash=16),
            canonical_layout=False,
            replicated_layout=False,
        )
        offloading = SimpleNamespace(config=config, blocks_per_chunk=1)
        self._tier = FileSystemTierManager(offloading, memoryview(view), "fs", spec["base_path"])
        self._jobs = 0

    def _keys(self, number: int) -> list[Any]:
        objects = len(self.source)
        hashes = [(number * objects + n).to_bytes(32, "big") for n in range(objects)]
        return [self._key(one, 0) for one in hashes]

    def _run(self, submit: Any, keys: list[Any], first: int, *, is_promotion: bool) -> int:
        jobs, done = {}, 0
        for at in range(0, len(keys), OF_A_CALL):
            of_call = keys[at : at + OF_A_CALL]
            self._jobs += 1
            jobs[self._jobs] = len(of_call)
            submit(
                self._job(
                    job_id=self._jobs,
                    keys=of_call,
                    chunk_ids=np.arange(first + at, first + at + len(of_call)),
                    is_promotion=is_promotion,
                    req_context=self._request(req_id=str(self._jobs)),
                )
            )
        self._tier.drain_jobs()
        for result in self._tier.get_finished_jobs():
            done += jobs[result.job_id] if result.success else 0
        return done

    def store(self, number: int) -> int:
        """Write the objects of a round; how many were."""
        return self._run(self._tier.submit_store, self._keys(number), 0, is_promotion=False)

    def load(self, number: int) -> int:
        """Look the objects of a round up, and read them; how many came."""
        keys, request = self._keys(number), self._request(req_id=f"look {number}")
        while any(self._tier.lookup(key, request).name == "RETRY" for key in keys):
            self._tier.on_schedule_end(None)
            time.sleep(0.0005)
        self._tier.on_request_finished(request)
        first = len(self.source)
        return self._run(self._tier.submit_load, keys, first, is_promotion=True)


def main(library: str, spec: str, objects: str, n_bytes: str) -> None:
    """Do what each line says, and say how it went."""
    kind = LMCacheDisk if library == "lmcache" else VllmDisk
    disk: LMCacheDisk | VllmDisk = kind(json.loads(spec), int(objects), int(n_bytes))
    for line in sys.stdin:
        call, number = line.split()
        if call == "store":
            fill(disk.source, int(number))
        else:
            disk.target[:] = 255
        began_s, processor_s = time.perf_counter(), time.process_time()
        n_done = (disk.store if call == "store" else disk.load)(int(number))
        took_s, processor_s = time.perf_counter() - began_s, time.process_time() - processor_s
        is_right = call == "store" or bool(np.array_equal(disk.source, disk.target))
        answer = {"s": took_s, "processor_s": processor_s, "found": n_done, "right": is_right}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
