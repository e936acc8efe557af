"""GB/s of handoffs between pools on a GPU and in DRAM, beside cudaMemcpy and bare NIXL.

And of what one daemon copies itself: the pages of a retracted lease, from its pool on the device to
its saved area in host memory, and back.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import kvd.client
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_least, figure
from tests.gpu.engine import device_runtime
from tests.support.daemons import LLAMA_8B, one_daemon, two_daemons

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.bench.report import Measured
    from kvd.device.cuda import Runtime
    from tests.gpu.results import Setting

ROUNDS = 5
PAGE_TOKENS, PAGE_MIB = 16, 2
RAW_WITHIN_S = 60.0
MIB, REHEARSED_MIB = 512, 32

COLUMNS = (
    ResultColumn("way", "way"),
    ResultColumn("best_gb_s", "best GB/s", ".1f"),
    ResultColumn("median_gb_s", "median", ".1f"),
)


def handoffs(setting: Setting) -> BenchmarkResult:
    """Between two daemons, and what there is to compare them with."""
    mib = setting.of(MIB, REHEARSED_MIB)
    rows = (*_copies(device_runtime(), mib), *_bare(mib), *_handoffs(mib))
    title = f"handoffs of {mib} MiB, from finish to done"
    return BenchmarkResult(tables=(ResultTable(title, COLUMNS, rows),))


def pools(setting: Setting) -> BenchmarkResult:
    """A pool on the device, and host memory of the same daemon."""
    device_runtime()
    mib = setting.of(MIB, REHEARSED_MIB)
    rows = tuple(_retractions(mib))
    return BenchmarkResult(
        tables=(ResultTable(f"{mib} MiB of a pool on a device, one daemon", COLUMNS, rows),),
        goals=tuple(
            at_least(f"GB/s, {row['way']}", 40.0, figure(row, "best_gb_s")) for row in rows
        ),
    )


def _retractions(mib: int) -> Iterator[Measured]:
    pages = mib // PAGE_MIB
    settings = {
        **LLAMA_8B,
        "pool.pages": str(pages + 1),
        "pool.device": "cuda:0",
        "pool.saved_size": f"{mib + 8 * PAGE_MIB}MiB",
    }
    with (
        tempfile.TemporaryDirectory(prefix="kvd-gpu-") as directory,
        one_daemon(Path(directory), settings) as daemon,
        kvd.client.connect_sync(daemon.client, name="engine") as node,
    ):
        lease = node.lease(np.arange(pages * PAGE_TOKENS, dtype=np.int32), cache=False)
        lease.written(pages * PAGE_TOKENS)
        saved_s, restored_s = [], []
        for _ in range(ROUNDS + 1):
            began_s = time.perf_counter()
            lease.retract()
            between_s = time.perf_counter()
            lease.resume()
            saved_s.append(between_s - began_s)
            restored_s.append(time.perf_counter() - between_s)
        lease.release()
    yield _row("retracted, device to host memory", mib * 2**20, saved_s[1:])
    yield _row("resumed, host memory to device", mib * 2**20, restored_s[1:])


def _copies(runtime: Runtime, mib: int) -> Iterator[Measured]:
    """cudaMemcpy, of pageable host memory."""
    size = mib * 2**20
    first, second = (runtime.allocate(0, size) for _ in range(2))
    host = np.ones(size, np.uint8).ctypes
    for what, to, source in (
        ("cudaMemcpy, GPU to GPU (one device)", second, first),
        ("cudaMemcpy, GPU to DRAM (pageable)", host.data, first),
        ("cudaMemcpy, DRAM (pageable) to GPU", first, host.data),
    ):
        took_s = []
        for _ in range(ROUNDS + 1):
            began_s = time.perf_counter()
            runtime.copy(to, source, size)
            runtime.synchronize()
            took_s.append(time.perf_counter() - began_s)
        yield _row(what, size, took_s[1:])
    runtime.free(first)
    runtime.free(second)


def _bare(mib: int) -> Iterator[Measured]:
    command = [sys.executable, "-m", "tests.gpu.raw", str(mib), str(ROUNDS)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RAW_WITHIN_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"bare NIXL failed: {done.stderr[-2000:]}")
    for what, best in json.loads(done.stdout.splitlines()[-1]).items():
        yield {"way": f"bare NIXL in one process, {what}", "best_gb_s": best}


def _handoffs(mib: int) -> Iterator[Measured]:
    """Two daemons on this host: from finish to done, of prompts that are nowhere cached."""
    pages = mib // PAGE_MIB + 1
    shape = {**LLAMA_8B, "pool.pages": str(pages), "pool.saved_size": "0KiB"}
    far = {**shape, "pool.device": "cuda:0"}
    ways = {"GPU to GPU": (far, far), "GPU to DRAM": (far, shape), "DRAM to GPU": (shape, far)}
    for what, (prefill, decode) in ways.items():
        with (
            tempfile.TemporaryDirectory(prefix="kvd-gpu-") as directory,
            two_daemons(Path(directory), decode, prefill=prefill) as pair,
        ):
            took_s = asyncio.run(_hand_over(pair.prefill.client, pair.decode.client, mib))
        yield _row(f"kvd, {what}", mib * 2**20, took_s[1:])


async def _hand_over(prefill: str, decode: str, mib: int) -> list[float]:
    tokens = np.arange(mib // PAGE_MIB * PAGE_TOKENS, dtype=np.int32)
    took_s = []
    async with (
        kvd.client.connect(prefill, name="prefill-engine") as p,
        kvd.client.connect(decode, name="decode-engine") as d,
    ):
        for room in range(1, ROUNDS + 2):
            lease = await p.lease(tokens, cache=False)
            receive = await d.receive(room, tokens, "p", cache=False)
            send = await p.send(room, tokens, lease=lease)
            await send.accepted()
            began_s = time.perf_counter()
            finishing = asyncio.ensure_future(send.finish(b""))
            await receive.done()
            took_s.append(time.perf_counter() - began_s)
            assert (await finishing).committed
            await receive.lease.release()
            await lease.release(())
    return took_s


def _row(way: str, size: int, took_s: list[float]) -> Measured:
    ordered = sorted(took_s)
    rates = [size / 1e9 / one_s for one_s in (ordered[0], ordered[len(ordered) // 2])]
    return {"way": way, "best_gb_s": rates[0], "median_gb_s": rates[1]}
