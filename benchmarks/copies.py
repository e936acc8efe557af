"""``benchmarks copies``: an engine's own blocks saved into pages and loaded from them, on a CPU.

One daemon, and an engine whose KV memory is its own. What it copies is compared with memcpy of as
many threads, of the same pieces and of one long stretch, in turns. One block from the order to the
daemon's last word on it, and what the order takes of the engine's thread, are of orders that come
one by one. What the mover's thread takes of a processor for a piece is measured without the copies,
for processors and for the streams of a device; what CUDA takes for one comes to that there.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import click
import numpy as np

import kvd.client
from benchmarks.harness import benchmark
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_least, at_most, figure
from kvd.client.mover.engine_memory import BlockLayout
from kvd.client.mover.pieces import PieceTable, PieceUnits, merged_pieces
from kvd.device.copies import CopyStream, KnownMemory, Pieces, Stretch
from kvd.harness.daemons import one_daemon
from kvd.wire.memory import ComponentMemory, TensorPlace

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvd.bench.report import Measured, Told
    from kvd.client import EngineBlocks, SyncLease, SyncNode
    from kvd.client.mover.pieces import PieceColumns
    from kvd.device.cuda import Runtime

PAGE: Final = 16
LAYERS: Final = 8
PIECES: Final = (16 * 1024, 64 * 1024, 512 * 1024)
BYTES: Final = 256 * 2**20
"""Copied at once."""
BLOCK: Final = 64 * 1024
"""Of one order: so small that it is not the copy that takes the time."""

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
    ResultColumn("p10_us", "p10 us", ".1f"),
    ResultColumn("p50_us", "p50 us", ".1f"),
    ResultColumn("p99_us", "p99 us", ".1f"),
)
PIECE_COLUMNS: Final = (
    ResultColumn("what", "what"),
    ResultColumn("us", "us", ".3f"),
)


_PROMPTS: Final = itertools.count(1)
"""The first token of the next one."""


class OwnEngine:
    """A session whose blocks are memory of its own, as many as the pool has pages."""

    def __init__(self, node: SyncNode, piece: int, threads: int) -> None:
        self.node = node
        self.n_blocks = BYTES // (LAYERS * piece)
        self.memory = np.ones((LAYERS, self.n_blocks, piece), np.uint8)
        self.blocks: EngineBlocks = node.blocks(
            dict(enumerate(self.memory)), block_size=PAGE, threads=threads
        )
        self._rng = np.random.default_rng(1)

    def lease(self, n_blocks: int) -> SyncLease:
        """Pages for so many, of a prompt that nobody has asked for."""
        first = next(_PROMPTS)
        tokens = np.arange(first, first + n_blocks * PAGE, dtype=np.int32)
        return self.node.lease(tokens, cache=False)

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
    """Numpy's ``take``: a loop of memcpy in C, over scattered rows."""

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


def measure_orders(node: SyncNode, endpoint: str, orders: int) -> list[Measured]:
    """One block at a time, beside a word of the attach socket."""
    engine = OwnEngine(node, BLOCK // LAYERS, 1)
    words: list[float] = []
    worker = kvd.client.join(endpoint, token=node.token, ranks=1)
    begun: list[float] = []
    over: dict[str, list[float]] = {"save": [], "load": []}
    for _ in range(orders):
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
        time.sleep(0.0005)
        began_s = time.perf_counter()
        worker.written(lease.id, PAGE)
        words.append(time.perf_counter() - began_s)
        lease.release()
    engine.blocks.close()
    worker.close()
    rows = {"a word of the attach socket and its answer": words}
    rows |= {"begin_save and begin_load in the engine's thread": begun}
    rows |= {f"{name} of one block, order to answer": taken for name, taken in over.items()}
    return [
        {
            "what": what,
            "p10_us": float(np.percentile(taken, 10)) * 1e6,
            "p50_us": float(np.percentile(taken, 50)) * 1e6,
            "p99_us": float(np.percentile(taken, 99)) * 1e6,
        }
        for what, taken in rows.items()
    ]


class _DryRuntime:
    """What a stream calls, and nothing happens."""

    has_batches: Final = True

    def use(self, device: int) -> None:
        """Nothing."""

    def stream(self, device: int) -> int:
        """A number."""
        return 1 + device

    def begin_copies(self, stream: int, columns: object, pieces: int) -> None:
        """Nothing."""


def measure_pieces() -> list[Measured]:
    """Of the mover's thread, for each piece of orders of 65,536, and for a call by ctypes."""
    table, numbers = _table(), np.random.default_rng(1).permutation(2047) + 1
    n = 2047
    memory = KnownMemory(cast("Runtime", _DryRuntime()))
    for address in (_ENGINE, _POOL):
        memory.add(Stretch(address, 2**40, "nothing"))
    stream = CopyStream(cast("Runtime", _DryRuntime()), 0, memory)

    def by_processors(columns: PieceColumns) -> None:
        engine, pool, sizes = merged_pieces(columns)
        np.column_stack((engine, sizes)), np.column_stack((pool, sizes))

    def by_a_device(columns: PieceColumns) -> None:
        memory.places(columns.pool, columns.sizes, "of the pool")
        stream.begin(Pieces(columns.pool, columns.engine, columns.sizes))

    rows: list[Measured] = []
    for what, begin in (("processors", by_processors), ("a device's stream", by_a_device)):
        taken = []
        for _ in range(9):
            began_ns = time.thread_time_ns()
            for first in range(0, n, table.units_at_once):
                units = PieceUnits(first, min(first + table.units_at_once, n))
                begin(table.pieces(numbers, numbers[::-1], units))
            taken.append((time.thread_time_ns() - began_ns) / 1000 / (n * _LAYERS))
        rows.append({"what": f"a piece for {what}", "us": statistics.median(taken)})
    return [*rows, {"what": "a call by ctypes", "us": _call_us()}]


_LAYERS: Final = 32
_ENGINE: Final = 2**44
_POOL: Final = 2**45


def _table() -> PieceTable:
    """64 KiB a layer and block, as an 8B shape has it; layers apart here, together in a page."""
    piece, blocks = 64 * 1024, 2048
    places = tuple(
        TensorPlace(
            layer=layer,
            part="raw",
            dtype="uint8",
            offset_bytes=layer * piece,
            page_stride_bytes=_LAYERS * piece,
            page_shape=(piece,),
        )
        for layer in range(_LAYERS)
    )
    component = ComponentMemory(
        name="kv",
        pages=blocks,
        page_size=PAGE,
        page_bytes=_LAYERS * piece,
        total_bytes=blocks * _LAYERS * piece,
        tensors=places,
    )
    layers = [
        [BlockLayout(_ENGINE + layer * blocks * piece, blocks, piece, piece)]
        for layer in range(_LAYERS)
    ]
    return PieceTable(component, [layers], block_size=PAGE, interior="opaque", address=_POOL)


def _call_us() -> float:
    """What ctypes takes for a call of two arguments that lets go of the interpreter."""
    call = ctypes.CDLL(None).strnlen
    call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_size_t
    memory = ctypes.create_string_buffer(b"a")
    address = ctypes.addressof(memory)
    best_s = min(_seconds(lambda: call(address, 1)) for _ in range(5))
    return best_s * 1e6


def _seconds(call: Callable[[], object], times: int = 20_000) -> float:
    began_s = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began_s) / times


def shape_of(piece: int) -> dict[str, str]:
    """A pool for all that is copied at once, and some pages more."""
    return {
        "pool.family": "raw",
        "pool.layers": str(LAYERS),
        "pool.page_bytes": str(piece),
        "pool.pages": str(BYTES // (LAYERS * piece) + 64),
        "pool.page_size": str(PAGE),
    }


def run(told: Told, *, rounds: int, orders: int, threads: tuple[int, ...]) -> BenchmarkResult:
    """An engine's own blocks, saved and loaded on a CPU."""
    copies: list[Measured] = []
    found: list[Measured] = []
    for piece in PIECES:
        with (
            tempfile.TemporaryDirectory(prefix="kvd-bench-") as name,
            one_daemon(Path(name), shape_of(piece)) as daemon,
            kvd.client.connect_sync(daemon.client, name="bench") as node,
        ):
            for n in threads:
                told(f"pieces of {piece // 1024} KiB, {n} threads")
                copies.append(measure_copies(node, piece, n, rounds))
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as name,
        one_daemon(Path(name), shape_of(BLOCK // LAYERS)) as daemon,
        kvd.client.connect_sync(daemon.client, name="bench") as node,
    ):
        told("one order at a time")
        found = measure_orders(node, daemon.client, orders)
    told("pieces")
    pieces = measure_pieces()
    answers = [figure(row, "p50_us") for row in found]
    return BenchmarkResult(
        tables=(
            ResultTable(title="256 MiB of blocks", columns=COPY_COLUMNS, rows=tuple(copies)),
            ResultTable(title="One order", columns=ORDER_COLUMNS, rows=tuple(found)),
            ResultTable(title="The mover's thread", columns=PIECE_COLUMNS, rows=tuple(pieces)),
        ),
        goals=(
            at_least(
                "copies over memcpy of the same pieces by as many threads, worst",
                0.7,
                min(figure(row, "to_pieces") for row in copies),
            ),
            at_most("one block from order to answer, us, worst p50", 300, max(answers[2:])),
            at_most(
                "processor time of the mover a piece, us, without CUDA's",
                0.18,
                max(figure(row, "us") for row in pieces[:2]),
            ),
        ),
    )


command = benchmark(
    "copies",
    run,
    click.option("--rounds", default=7, show_default=True, help="To take medians of."),
    click.option("--orders", default=300, show_default=True, help="One by one."),
    click.option(
        "--threads", multiple=True, default=(1, 2), show_default=True, help="Of the engine."
    ),
)
