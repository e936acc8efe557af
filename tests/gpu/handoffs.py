"""GB/s of handoffs between pools on a GPU and in DRAM, beside cudaMemcpy and bare NIXL."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import kvd.client
from tests.support.daemons import LLAMA_8B, two_daemons

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.device.cuda import Runtime

ROUNDS = 5
PAGE_TOKENS, PAGE_MIB = 16, 2
RAW_WITHIN_S = 60.0


class Row(NamedTuple):
    """One line of the table: GB/s, the best and the median of the rounds."""

    what: str
    best: float
    median: float


def copies(runtime: Runtime, mib: int) -> Iterator[Row]:
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


def bare(mib: int) -> Iterator[Row]:
    command = [sys.executable, "-m", "tests.gpu.raw", str(mib), str(ROUNDS)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RAW_WITHIN_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"bare NIXL failed: {done.stderr[-2000:]}")
    for what, best in json.loads(done.stdout.splitlines()[-1]).items():
        yield Row(f"bare NIXL in one process, {what}", best, best)


def handoffs(mib: int) -> Iterator[Row]:
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


def _row(what: str, size: int, took_s: list[float]) -> Row:
    ordered = sorted(took_s)
    return Row(what, size / 1e9 / ordered[0], size / 1e9 / ordered[len(ordered) // 2])
