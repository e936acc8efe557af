"""``benchmarks copies``: an engine's own blocks saved into pages and loaded from them, on a CPU.

One daemon, and an engine whose KV memory is its own. What it copies is compared with memcpy of as
many threads, of the same pieces and of one long stretch, in turns. One block from the order to the
daemon's last word on it, and what the order takes of the engine's thread, are of orders that come
one by one. What the mover's thread takes of a processor for a piece is measured without the copies:
a lane takes them and moves nothing, once for processors and once for the streams of a device.
"""

from __future__ import annotations

import ctypes
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import click
import numpy as np

import kvd.client
from benchmarks.harness import benchmark
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_least, at_most, figure
from kvd.client.mover.device_lane import DeviceCopy, DeviceLane
from kvd.client.mover.host_lane import HostLane, RunningCopy
from kvd.client.mover.pieces import PoolBytes, merged_pieces
from kvd.harness.daemons import one_daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from kvd.bench.report import Measured, Told
    from kvd.client import EngineBlocks, SyncLease, SyncNode
    from kvd.client.mover.mover import CopyLane
    from kvd.client.mover.pieces import PieceColumns
    from kvd.device.cuda import Runtime

PAGE: Final = 16
LAYERS: Final = 8
PIECES: Final = (16 * 1024, 64 * 1024, 512 * 1024)
BYTES: Final = 256 * 2**20
"""Copied at once."""

COPY_COLUMNS: Final = (
    ResultColumn("piece_kib", "piece KiB"),
    ResultColumn("threads", "threads"),
    ResultColumn("save_gb", "save GB/s", ".2f"),
    ResultColumn("load_gb", "load GB/s", ".2f"),
    ResultColumn("pieces_gb", "memcpy of the pieces GB/s", ".2f"),
    ResultColumn("long_gb", "memcpy of one stretch GB/s", ".2f"),
    ResultColumn("to_pieces", "of the pieces", ".2f"),
    ResultColumn("to_long", "of one stretch", ".2f"),
)
ORDER_COLUMNS: Final = (
    ResultColumn("what", "what"),
    ResultColumn("p50_us", "p50 us", ".1f"),
    ResultColumn("p99_us", "p99 us", ".1f"),
)
PIECE_COLUMNS: Final = (
    ResultColumn("what", "what"),
    ResultColumn("us", "us", ".3f"),
)


class OwnEngine:
    """A session whose blocks are memory of its own, as many as the pool has pages."""

    def __init__(self, node: SyncNode, piece: int, threads: int) -> None:
        self.node = node
        self.n_blocks = min(BYTES // (LAYERS * piece), node.pool("main").memory.components[0].pages - 1)
        self.memory = np.ones((LAYERS, self.n_blocks, piece), np.uint8)
        self.blocks: EngineBlocks = node.blocks(
            dict(enumerate(self.memory)), block_size=PAGE, threads=threads
        )
        self._rng = np.random.default_rng(1)
        self._prompts = iter(range(1, 2**31))

    def lease(self, n_blocks: int) -> SyncLease:
        """Pages for so many, of a prompt that nobody has asked for."""
        first = next(self._prompts) * 1000
        return self.node.lease(np.arange(first, first + n_blocks * PAGE, dtype=np.int32))

    def chosen(self, n_blocks: int) -> NDArray[np.int64]:
        """Blocks here and there."""
        return self._rng.permutation(self.n_blocks)[:n_blocks]

    def save(self, lease: SyncLease, blocks: NDArray[np.int64]) -> kvd.client.PendingCopy:
        """Begin it."""
        upto = len(blocks) * PAGE
        return self.blocks.begin_save(lease, {"kv": blocks}, upto_tokens=upto)

    def load(self, lease: SyncLease, blocks: NDArray[np.int64]) -> kvd.client.PendingCopy:
        """Begin it."""
        return self.blocks.begin_load(lease, {"kv": blocks})


def measure_copies(node: SyncNode, piece: int, threads: int, rounds: int) -> Measured:
    """Both directions beside both references, in turns; medians."""
    engine = OwnEngine(node, piece, threads)
    taken: dict[str, list[float]] = {}
    other = np.ones_like(engine.memory)
    total = engine.memory.nbytes
    for _ in range(rounds):
        blocks = engine.chosen(engine.n_blocks)
        lease = engine.lease(engine.n_blocks)
        for name, copy in (("save", engine.save), ("load", engine.load)):
            began_s = time.perf_counter()
            copy(lease, blocks).result()
            taken.setdefault(name, []).append(total / (time.perf_counter() - began_s) / 1e9)
        lease.release()
        for name, seconds in (
            ("pieces", _memcpy_pieces(other, engine.memory, blocks, threads)),
            ("long", _memcpy_long(other, engine.memory, threads)),
        ):
            taken.setdefault(name, []).append(total / seconds / 1e9)
    engine.blocks.close()
    found = {name: statistics.median(rates) for name, rates in taken.items()}
    slower = min(found["save"], found["load"])
    return {
        "piece_kib": piece // 1024,
        "threads": threads,
        **{f"{name}_gb": rate for name, rate in found.items()},
        "to_pieces": slower / found["pieces"],
        "to_long": slower / found["long"],
    }


def _memcpy_pieces(
    to: NDArray[np.uint8], source: NDArray[np.uint8], blocks: NDArray[np.int64], threads: int
) -> float:
    """numpy's ``take``: a loop of memcpy in C, over scattered rows."""

    def part(number: int) -> None:
        chosen = np.array_split(np.arange(len(blocks)), threads)[number]
        low, high = int(chosen[0]), int(chosen[-1]) + 1
        for there, here in zip(to, source, strict=True):
            np.take(here, blocks[low:high], axis=0, out=there[low:high], mode="clip")

    return _in_threads(part, threads)


def _memcpy_long(to: NDArray[np.uint8], source: NDArray[np.uint8], threads: int) -> float:
    """One call a thread."""
    step = source.nbytes // threads

    def part(number: int) -> None:
        at = number * step
        ctypes.memmove(to.ctypes.data + at, source.ctypes.data + at, step)

    return _in_threads(part, threads)


def _in_threads(part: Callable[[int], None], threads: int) -> float:
    workers = [threading.Thread(target=part, args=(number,)) for number in range(threads)]
    began_s = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - began_s


def measure_orders(node: SyncNode, orders: int) -> list[Measured]:
    """One block of 8 layers in 64 KiB at a time."""
    engine = OwnEngine(node, PIECES[1], 1)
    begun: list[float] = []
    over: dict[str, list[float]] = {"save": [], "load": []}
    for number in range(orders):
        lease = engine.lease(1)
        blocks = engine.chosen(1)
        for name, copy in (("save", engine.save), ("load", engine.load)):
            # As between two steps: whatever was done for the order before is done.
            time.sleep(0.0005)
            began_s = time.perf_counter()
            pending = copy(lease, blocks)
            begun.append(time.perf_counter() - began_s)
            pending.result()
            over[name].append(time.perf_counter() - began_s)
        lease.release()
        assert number >= 0
    engine.blocks.close()
    rows = {"begin_save and begin_load in the engine's thread": begun}
    rows |= {f"{name} of one block, order to answer": taken for name, taken in over.items()}
    return [
        {
            "what": what,
            "p50_us": float(np.percentile(taken, 50)) * 1e6,
            "p99_us": float(np.percentile(taken, 99)) * 1e6,
        }
        for what, taken in rows.items()
    ]


class _DryRuntime:
    """What a device lane calls, and nothing happens."""

    has_batches: Final = True

    def __getattr__(self, _: str) -> Callable[..., int]:
        return lambda *_, **__: 1


def measure_pieces() -> list[Measured]:
    """Of the mover's thread, for each piece of an order of 65,536, and for a call by ctypes."""
    lanes: dict[str, CopyLane] = {
        "for processors": _dry_host(),
        "for a device, without what CUDA takes": _dry_device(),
    }
    rows: list[Measured] = [
        {"what": f"a piece, {what}", "us": _piece_us(lane)} for what, lane in lanes.items()
    ]
    libc = ctypes.CDLL(None)
    libc.abs.argtypes, libc.abs.restype = (ctypes.c_int,), ctypes.c_int
    began_s = time.perf_counter()
    for _ in range(100_000):
        libc.abs(1)
    call_us = (time.perf_counter() - began_s) * 10
    return [*rows, {"what": "a call of the runtime by ctypes", "us": call_us}]
