"""The disk of another cache, driven: ``python peer_calls.py LIBRARY SPEC OBJECTS BYTES``.

It runs beside LMCache or vLLM. Each line that it reads is a call, ``store ROUND`` or ``load
ROUND``, of objects that are named by their round, or ``serve SECOND KEY...``: of these the first
that are there are read, and the rest is written. Each line that it writes says what that took, in
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


def fill_named(source: Any, target: Any, keys: Any) -> None:
    """The objects of these keys in the first rows, and nothing where they will be read."""
    for row, key in zip(source, keys, strict=False):
        row.view(np.uint64)[:] = int.from_bytes(key[:8], "little")
    target[: len(keys)] = 0


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
        self._evict: Any = None
        self._second = 0.0
        if "eviction" in spec:
            self._evict = self._eviction(spec["eviction"])

    def _eviction(self, spec: Any) -> Any:
        """One look of its controller at this adapter."""
        from lmcache.v1.distributed.config import EvictionConfig  # noqa: PLC0415
        from lmcache.v1.distributed.storage_controllers.eviction_controller import (  # noqa: PLC0415
            L2AdapterEvictionState,
            L2EvictionController,
        )

        state = L2AdapterEvictionState(0, self._tier.adapter, EvictionConfig(**spec))
        controller = L2EvictionController([state])
        # Not started: its thread would look by the clock of this host.
        return lambda: controller._check_and_evict(state)  # noqa: SLF001 - what its thread does

    def _named(self, hashes: list[bytes]) -> list[Any]:
        return [self._key(chunk_hash=one, model_name="m", kv_rank=0) for one in hashes]

    def _keys(self, number: int) -> list[Any]:
        objects = len(self.source)
        return self._named([(number * objects + n).to_bytes(32, "big") for n in range(objects)])

    def serve(self, second: float, hashes: list[bytes]) -> int:
        """One request; how many of its first objects came."""
        tier, adapter, keys = self._tier, self._tier.adapter, self._named(hashes)
        if self._evict is not None and second >= self._second + 1:
            self._second = second
            self._evict()
        task = adapter.submit_lookup_and_lock_task(keys, tier.layouts)
        there = tier.waited(
            adapter.get_lookup_and_lock_event_fd(),
            lambda: adapter.query_lookup_and_lock_result(task),
        )
        n_there = _leading(there, len(keys))
        if n_there:
            load = adapter.submit_load_task(keys[:n_there], tier.targets[:n_there])
            loaded = tier.waited(
                adapter.get_load_event_fd(), lambda: adapter.query_load_result(load)
            )
            n_there = _leading(loaded, n_there)
        adapter.submit_unlock([key for at, key in enumerate(keys) if there.test(at)])
        if not self._write(self._calls(keys[n_there:], tier.sources[n_there : len(keys)])):
            raise OSError("not all was written")
        return n_there

    @staticmethod
    def _calls(keys: list[Any], objects: list[Any]) -> list[tuple[list[Any], list[Any]]]:
        starts = range(0, len(keys), OF_A_CALL)
        return [(keys[at : at + OF_A_CALL], objects[at : at + OF_A_CALL]) for at in starts]

    def store(self, number: int) -> int:
        """Write the objects of a round; how many were."""
        calls = self._calls(self._keys(number), self._tier.sources)
        return len(self.source) if self._write(calls) else 0

    def _write(self, calls: list[tuple[list[Any], list[Any]]]) -> bool:
        """Whether all of it was written."""
        tier, adapter = self._tier, self._tier.adapter
        open_tasks = {adapter.submit_store_task(*call) for call in calls}
        while open_tasks:
            done = tier.waited(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
            if not all(result.is_successful() for result in done.values()):
                return False
            open_tasks -= set(done)
        return True

    def load(self, number: int) -> int:
        """Look the objects of a round up, and read them; how many came."""
        tier, adapter = self._tier, self._tier.adapter
        found, calls = 0, self._calls(self._keys(number), tier.targets)
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


def _leading(there: Any, n_keys: int) -> int:
    return next((at for at in range(n_keys) if not there.test(at)), n_keys)


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

    def serve(self, second: float, hashes: list[bytes]) -> int:
        """One request; how many of its first objects came."""
        keys = [self._key(one, 0) for one in hashes]
        there = self._looked_up(keys, f"at {second}")
        n_there = [*there, False].index(False)
        first = len(self.source)
        if n_there:
            run = self._run(self._tier.submit_load, keys[:n_there], first, is_promotion=True)
            n_there = run if run == n_there else 0
        self._run(self._tier.submit_store, keys[n_there:], n_there, is_promotion=False)
        return n_there

    def _looked_up(self, keys: list[Any], name: str) -> list[bool]:
        """Which of them are there, once that is known of all."""
        request = self._request(req_id=name)
        while True:
            said = [self._tier.lookup(key, request).name for key in keys]
            if "RETRY" not in said:
                break
            self._tier.on_schedule_end(None)
            time.sleep(0.0005)
        self._tier.on_request_finished(request)
        return [one == "HIT" for one in said]

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
        keys = self._keys(number)
        self._looked_up(keys, f"look {number}")
        first = len(self.source)
        return self._run(self._tier.submit_load, keys, first, is_promotion=True)


def main(library: str, spec: str, objects: str, n_bytes: str) -> None:
    """Do what each line says, and say how it went."""
    kind = LMCacheDisk if library == "lmcache" else VllmDisk
    disk: LMCacheDisk | VllmDisk = kind(json.loads(spec), int(objects), int(n_bytes))
    for line in sys.stdin:
        call, number, *words = line.split()
        keys = [bytes.fromhex(word).ljust(32, b"\0") for word in words]
        if call == "serve":
            fill_named(disk.source, disk.target, keys)
        elif call == "store":
            fill(disk.source, int(number))
        else:
            disk.target[:] = 255
        began_s, processor_s = time.perf_counter(), time.process_time()
        if call == "serve":
            n_done = disk.serve(float(number), keys)
        else:
            n_done = (disk.store if call == "store" else disk.load)(int(number))
        took_s, processor_s = time.perf_counter() - began_s, time.process_time() - processor_s
        n_same = n_done if call == "serve" else len(disk.source)
        is_right = call == "store" or bool(
            np.array_equal(disk.source[:n_same], disk.target[:n_same])
        )
        answer = {"s": took_s, "processor_s": processor_s, "found": n_done, "right": is_right}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
