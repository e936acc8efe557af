"""GB/s of saves and loads by the size of a piece, beside the copy engine alone; what they cost.

A page is all layers of a block, one piece each. Blocks are in no order, so no two pieces follow
each other on the device.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from kvd.bench.report import (
    BenchmarkResult,
    ResultColumn,
    ResultTable,
    at_least,
    at_most,
    figure,
)
from kvd.device.copies import CopyStream, KnownMemory, Pieces, Stretch
from tests.gpu.engine import COPIED_WITHIN_S, DEVICE, copying_engine
from tests.gpu.face import address_of, shared

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.bench.report import Measured
    from tests.gpu.engine import CopyingEngine
    from tests.gpu.results import Setting

KIB: Final = 2**10
PIECES_KIB: Final = (4, 16, 64, 512, 2048)
PAGE_KIB: Final = 2048
MOST_LAYERS: Final = 32
ROUNDS: Final = 5
CHECKED: Final = 4
LATENCIES: Final = 200

COLUMNS = (
    ResultColumn("piece_kib", "piece, KiB"),
    ResultColumn("layers", "pieces a page"),
    ResultColumn("save_gb_s", "save GB/s", ".1f"),
    ResultColumn("load_gb_s", "load GB/s", ".1f"),
    ResultColumn("alone_to_host_gb_s", "copy engine alone, to the host", ".1f"),
    ResultColumn("alone_to_device_gb_s", "to the device", ".1f"),
    ResultColumn("mover_us", "CPU us a piece", ".2f"),
)
SMALL_COLUMNS = (
    ResultColumn("what", "one block of 32 pieces of 64 KiB"),
    ResultColumn("median_us", "median us", ".0f"),
    ResultColumn("p90_us", "p90 us", ".0f"),
)


def copies(setting: Setting) -> BenchmarkResult:
    """All of it."""
    mib = setting.of(1024, 8)
    rows, small, wrong = [], [], []
    for kib in PIECES_KIB:
        layers = min(MOST_LAYERS, PAGE_KIB // kib)
        pages = mib * KIB // (layers * kib)
        with copying_engine(layers=layers, piece_bytes=kib * KIB, pages=pages) as engine:
            row, is_right = _by_piece(engine, pages)
            rows.append({"piece_kib": kib, "layers": layers, **row})
            if not is_right:
                wrong.append(f"pieces of {kib} KiB came back as other bytes")
            if kib == 64:
                small = _one_block(engine, min(LATENCIES, pages))
    of_64 = next(row for row in rows if row["piece_kib"] == 64)
    return BenchmarkResult(
        tables=(
            ResultTable(f"copies of {mib} MiB between a pool and a device", COLUMNS, tuple(rows)),
            ResultTable("one block, from the order on", SMALL_COLUMNS, tuple(small)),
        ),
        goals=(
            at_least("save GB/s in pieces of 64 KiB", 45.0, figure(of_64, "save_gb_s")),
            at_least("load GB/s in pieces of 64 KiB", 45.0, figure(of_64, "load_gb_s")),
            at_most("CPU us of the mover a piece", 0.6, figure(of_64, "mover_us")),
            at_most(
                "us from the order of one block to its end", 300.0, figure(small[0], "median_us")
            ),
        ),
        wrong=tuple(wrong),
    )


def _by_piece(engine: CopyingEngine, pages: int) -> tuple[Measured, bool]:
    """What a save and a load of all pages take; whether the bytes are those that were there."""
    blocks = engine.scattered(pages)
    checked = {int(block): 7 * number for number, block in enumerate(blocks[:CHECKED])}
    for block, value in checked.items():
        engine.paint(block, value)
    size, saved_s, lease = pages * engine.page_bytes, [], engine.lease(pages)
    for number in range(ROUNDS + 1):
        if number:  # what was written once is not written again
            lease.release()
            lease = engine.lease(pages, seed=number)
        saved_s += _times(1, functools.partial(engine.save, lease, blocks))
    for block in checked:
        engine.paint(block, 99)
    began_s = time.process_time()
    loaded_s = _times(ROUNDS + 1, functools.partial(engine.load, lease, blocks))
    # The thread that waits takes nothing of it.
    busy_s = time.process_time() - began_s
    is_right = all(engine.is_painted(block, value) for block, value in checked.items())
    lease.release()
    to_host_s, to_device_s = _alone(engine, pages)
    return {
        "save_gb_s": _rate(size, saved_s),
        "load_gb_s": _rate(size, loaded_s),
        "alone_to_host_gb_s": _rate(size, to_host_s),
        "alone_to_device_gb_s": _rate(size, to_device_s),
        "mover_us": busy_s * 1e6 / (len(loaded_s) * pages * len(engine.addresses)),
    }, is_right


def _times(times: int, begin: Callable[[], Waited]) -> list[float]:
    """How long it takes until it is over, time after time."""
    took_s = []
    for _ in range(times):
        began_s = time.perf_counter()
        begin().result(COPIED_WITHIN_S)
        took_s.append(time.perf_counter() - began_s)
    return took_s


def _rate(size: int, took_s: list[float]) -> float:
    """GB/s, of the median; the first does not count."""
    return size / 1e9 / statistics.median(took_s[1:])


class Waited(Protocol):
    """What can be waited for."""

    def result(self, within_s: float) -> object: ...


class _Stream(CopyStream):
    """The copy engine alone."""

    def copied(self, pieces: Pieces) -> Waited:
        self.begin(pieces)
        return self

    def result(self, within_s: float) -> None:
        self.wait()


def _alone(engine: CopyingEngine, pages: int) -> tuple[list[float], list[float]]:
    """The same pieces by the same calls, without daemon or mover."""
    piece, layers = engine.piece_bytes, len(engine.addresses)
    host = shared(pages * engine.page_bytes)
    host[::4096] = 1
    known = KnownMemory(engine.runtime)
    known.register(address_of(host), host.nbytes)
    for address in engine.addresses:
        known.add(Stretch(address, engine.n_blocks * piece, "a layer"))
    blocks = engine.scattered(pages).astype(np.uint64) * np.uint64(piece)
    there = (np.array(engine.addresses, np.uint64)[:, np.newaxis] + blocks).reshape(-1)
    rows = np.arange(pages, dtype=np.uint64) * np.uint64(engine.page_bytes)
    layer = np.arange(layers, dtype=np.uint64)[:, np.newaxis] * np.uint64(piece)
    here = (np.uint64(address_of(host)) + layer + rows).reshape(-1)
    sizes = np.full(there.size, piece, np.uint64)
    stream = _Stream(engine.runtime, DEVICE, known)
    try:
        return (
            _times(ROUNDS + 1, lambda: stream.copied(Pieces(here, there, sizes))),
            _times(ROUNDS + 1, lambda: stream.copied(Pieces(there, here, sizes))),
        )
    finally:
        stream.close()
        known.forget(address_of(host))


def _one_block(engine: CopyingEngine, times: int) -> list[Measured]:
    """From the order of a single block to its end, and what the order itself takes."""
    lease = engine.lease(times, seed=20)
    rows = []
    for what, begin in (("save", engine.save), ("load", engine.load)):
        ordered_us, done_us = [], []
        for page in range(times):
            done, ordered = _timed_order(lambda begin=begin, page=page: begin(lease, [0], page))
            ordered_us.append(ordered)
            done_us.append(done)
        rows += [
            {"what": f"{what}, to its end", **_spread(done_us)},
            {"what": f"{what}, the call that orders it", **_spread(ordered_us)},
        ]
    lease.release()
    return rows


def _timed_order(begin: Callable[[], Waited]) -> tuple[float, float]:
    """Microseconds until it is over, and until the order returned."""
    began_s = time.perf_counter()
    copy = begin()
    ordered_s = time.perf_counter()
    copy.result(COPIED_WITHIN_S)
    return (time.perf_counter() - began_s) * 1e6, (ordered_s - began_s) * 1e6


def _spread(us: list[float]) -> Measured:
    ordered = sorted(us)
    return {"median_us": ordered[len(us) // 2], "p90_us": ordered[len(us) * 9 // 10]}
