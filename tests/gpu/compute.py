"""What computing takes beside copies, over what it takes alone: large GEMMs, and a graph of small.

The first are as a prefill's, the others as those of a decode step: many short kernels that one
launch of a graph begins.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import torch

from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most, figure
from tests.gpu.engine import COPIED_WITHIN_S, copying_engine
from tests.gpu.results import PartSkipped, Setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvd.bench.report import Measured
    from kvd.client import PendingCopy, SyncLease
    from tests.gpu.engine import CopyingEngine

LAYERS: Final = 32
PIECE: Final = 64 * 2**10
ROUNDS: Final = 5
UNDER_WAY: Final = 2
MOST: Final = 1.05

COLUMNS = (
    ResultColumn("work", "what computes"),
    ResultColumn("alone_ms", "alone, ms", ".1f"),
    ResultColumn("saving", "beside saves", ".3f"),
    ResultColumn("save_gb_s", "at GB/s", ".1f"),
    ResultColumn("loading", "beside loads", ".3f"),
    ResultColumn("load_gb_s", "at GB/s", ".1f"),
)


class Copies:
    """Orders that follow each other as long as they are wanted, some always under way."""

    def __init__(self, begin: Callable[[], PendingCopy]) -> None:
        self._begin = begin
        self._is_wanted = True
        self.n_bytes = 0
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        under_way: deque[PendingCopy] = deque()
        try:
            while self._is_wanted:
                under_way.append(self._begin())
                if len(under_way) >= UNDER_WAY:
                    self._end(under_way.popleft())
            while under_way:
                self._end(under_way.popleft())
        except Exception as error:  # noqa: BLE001 - raised again where the thread is joined
            self.error = error

    def _end(self, copy: PendingCopy) -> None:
        copy.result(COPIED_WITHIN_S)
        self.n_bytes += copy.n_bytes

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """For as long as the block lasts, and until the last one is over."""
        self._thread.start()
        try:
            yield
        finally:
            self._is_wanted = False
            self._thread.join()
        if self.error is not None:
            raise RuntimeError("a copy failed meanwhile") from self.error


def beside(setting: Setting) -> BenchmarkResult:
    """Both, beside saves and beside loads, in turns with themselves alone."""
    if not setting.is_rehearsal and not torch.cuda.is_available():
        raise PartSkipped(f"torch {torch.__version__} finds no device")
    pages = setting.of(512, 8)
    rows: list[Measured] = []
    with copying_engine(layers=LAYERS, piece_bytes=PIECE, pages=2 * pages) as engine:
        orders = Orders(engine, pages)
        for name, work in {
            "large GEMMs": large(setting),
            "small GEMMs in a graph": small(setting),
        }.items():
            alone_ms: list[float] = []
            saving, save_gb_s = _ratio(work, alone_ms, orders.save)
            loading, load_gb_s = _ratio(work, alone_ms, orders.load)
            rows.append(
                {
                    "work": name,
                    "alone_ms": statistics.median(alone_ms),
                    "saving": saving,
                    "save_gb_s": save_gb_s,
                    "loading": loading,
                    "load_gb_s": load_gb_s,
                }
            )
        orders.close()
    notes = () if torch.cuda.is_available() else ("nothing was captured as a graph: no device",)
    return BenchmarkResult(
        tables=(ResultTable("time of computing beside copies, over alone", COLUMNS, tuple(rows)),),
        goals=tuple(
            at_most(f"{row['work']} {way}, over alone", MOST, figure(row, way))
            for row in rows
            for way in ("saving", "loading")
        ),
        notes=notes,
    )


class Orders:
    """One copy after another, of so many pages each, from or to one half of the blocks in turn."""

    def __init__(self, engine: CopyingEngine, pages: int) -> None:
        self._engine = engine
        self._pages = pages
        blocks = engine.scattered(2 * pages)
        self._halves = deque((blocks[:pages], blocks[pages:]))
        self._leases: deque[SyncLease] = deque()

    def save(self) -> PendingCopy:
        """Into pages of a lease that is new: what was written is not written again."""
        if len(self._leases) == UNDER_WAY:
            self._leases.popleft().release()
        self._leases.append(self._engine.lease(self._pages))
        self._halves.rotate()
        return self._engine.save(self._leases[-1], self._halves[0])

    def load(self) -> PendingCopy:
        """From pages of the last of them."""
        self._halves.rotate()
        return self._engine.load(self._leases[-1], self._halves[0])

    def close(self) -> None:
        """Give the pages back."""
        for lease in self._leases:
            lease.release()


def _ratio(
    work: Callable[[], None], alone_ms: list[float], begin: Callable[[], PendingCopy]
) -> tuple[float, float]:
    """Beside copies over alone, and the copies' GB/s meanwhile; in turns."""
    found, beside_ms, rates = [], [], []
    for _ in range(ROUNDS):
        found.append(_ms(work))
        copies = Copies(begin)
        began_s = time.perf_counter()
        with copies.under_way():
            beside_ms.append(_ms(work))
        rates.append(copies.n_bytes / 1e9 / (time.perf_counter() - began_s))
    alone_ms += found
    return statistics.median(beside_ms) / statistics.median(found), statistics.median(rates)


def _ms(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return (time.perf_counter() - began_s) * 1e3


def large(setting: Setting) -> Callable[[], None]:
    """As a prefill's, some 200 ms of a fast device."""
    size, times = setting.of(8192, 256), setting.of(120, 8)
    a, b = (_random(size, size) for _ in range(2))
    out = torch.empty_like(a)

    def work() -> None:
        for _ in range(times):
            torch.matmul(a, b, out=out)
        _settle()

    work()
    return work


def small(setting: Setting) -> Callable[[], None]:
    """As those of a decode step, captured once and launched time after time."""
    size, layers, times = setting.of(4096, 64), setting.of(128, 4), setting.of(60, 8)
    x, weight = _random(32, size), _random(size, size)
    out = torch.empty_like(x)

    def step() -> None:
        for _ in range(layers):
            torch.matmul(x, weight, out=out)

    launch = step
    if torch.cuda.is_available():
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()  # what is loaded at its first use is not captured
        side.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        launch = graph.replay

    def work() -> None:
        for _ in range(times):
            launch()
        _settle()

    work()
    return work


def _random(rows: int, columns: int) -> torch.Tensor:
    if torch.cuda.is_available():
        return torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda:0")
    return torch.randn(rows, columns)


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
