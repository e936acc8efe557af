"""``kvd demo --model embedding``: an encoder with KV that nobody reads, and without any.

One engine has a session with two daemons. One has the pool that a generating model would need, and
K and V of every text are written to it; the other is told ``cache.mode = "prefill-only"`` and only
counts. Batches go both ways in turn, and what comes out must be the same.

The JSON form is the ``EmbeddingReport`` as it is.
"""

from __future__ import annotations

import random
import statistics
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from rich.table import Table

from kvd.demo.layout import PageCounts, PoolPart
from kvd.demo.messages import (
    DEADLINE_S,
    Connected,
    ConnectEncoder,
    Embed,
    Embedded,
    Keeping,
    Started,
)
from kvd.demo.processes import (
    START_S,
    EngineProcess,
    Watcher,
    ask,
    open_processes,
)
from kvd.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from kvd.client import SyncNode
    from kvd.demo.settings import DemoSettings
    from kvd.wire.snapshot import PoolState


REFUSED = "not-supported"

LEGEND = (
    "without: leases count tokens, no KV; written: K and V of every layer also go to the pool's "
    "pages; ratio: texts per second without KV over those with it, and nothing else differs"
)


class Batch(msgspec.Struct, frozen=True):
    """One batch, both ways: leases, the model, releases; the faster of two times each."""

    texts: int
    tokens: int
    counted_ms: float
    written_ms: float
    max_difference: float

    @property
    def ratio(self) -> float:
        """How many times the throughput is that of the written pool."""
        return self.written_ms / self.counted_ms


class EmbeddingMemory(msgspec.Struct, frozen=True):
    """What the pools take, as the daemons say; ``pool_bytes_expected`` is worked out."""

    pages: int
    counted_pages: int
    pool_bytes: int
    pool_bytes_expected: int
    counted_pool_bytes: int
    placeholder_bytes: int
    pages_still_held: int


class EmbeddingReport(msgspec.Struct, frozen=True):
    """Everything; ``problems`` is empty when the demo shows what it must.

    The differences are between the first batch without KV and the same texts one by one with the
    attention of transformers; read back from the pool; and read back with a page zeroed, which must
    be noticed. ``refused``: the code with which a node without KV answers what needs some.
    ``throughput_ratio``: the median of the batches.
    """

    ok: bool
    problems: tuple[str, ...]
    weights: str
    torch: str
    transformers: str
    seed: int
    dtype: str
    tolerance: float
    batches: tuple[Batch, ...]
    alone_difference: float
    read_back_difference: float
    damaged_difference: float
    memory: EmbeddingMemory
    refused: dict[str, str]
    throughput_ratio: float
    seconds: float

    @property
    def max_difference(self) -> float:
        """Between the two ways, over all batches."""
        return max(batch.max_difference for batch in self.batches)

    def judged(self, found: tuple[str, ...]) -> EmbeddingReport:
        """The same with its problems."""
        return msgspec.structs.replace(self, ok=not found, problems=found)


def problems(report: EmbeddingReport) -> tuple[str, ...]:
    """Every way in which the demo failed to show what it must, in sentences."""
    tolerance = report.tolerance
    compared = {
        f"batch {number}, with KV written": batch.max_difference
        for number, batch in enumerate(report.batches, start=1)
    }
    compared["batch 1, text by text"] = report.alone_difference
    compared["batch 1, read back from the pool"] = report.read_back_difference
    found = [
        f"{what}: the embeddings differ by {difference:.3g}, more than {tolerance:.0e}"
        for what, difference in compared.items()
        if not difference <= tolerance
    ]
    if not report.damaged_difference > tolerance:
        found.append(
            "negative control: a page was zeroed, yet no embedding differs by more than "
            f"{report.damaged_difference:.1e}: equal embeddings would prove nothing"
        )
    found += [
        f"{verb} on a node without KV: {code}, it must be {REFUSED}"
        for verb, code in report.refused.items()
        if code != REFUSED
    ]
    return (*found, *_memory_problems(report.memory))


def _memory_problems(memory: EmbeddingMemory) -> list[str]:
    found: list[str] = []
    if memory.pool_bytes != memory.pool_bytes_expected:
        found.append(f"pool: {memory.pool_bytes} bytes, not {memory.pool_bytes_expected}")
    if memory.counted_pool_bytes:
        found.append(f"the pool without KV takes {memory.counted_pool_bytes} bytes, not 0")
    if memory.counted_pages != memory.pages:
        found.append(f"{memory.counted_pages} pages counted, {memory.pages} written")
    if not 0 < memory.placeholder_bytes * memory.pages == memory.pool_bytes:
        found.append(f"placeholder: {memory.placeholder_bytes} bytes are not one page of the pool")
    if memory.pages_still_held:
        found.append(f"{memory.pages_still_held} pages held although every lease was released")
    return found


def table_of(report: EmbeddingReport) -> Table:
    """The batches as a table for people."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("batch", "texts", "tokens", "without", "written", "ratio", "difference"):
        table.add_column(heading, justify="right")
    for number, batch in enumerate(report.batches, start=1):
        table.add_row(
            str(number),
            str(batch.texts),
            str(batch.tokens),
            f"{batch.counted_ms:.1f} ms",
            f"{batch.written_ms:.1f} ms",
            f"{batch.ratio:.2f}",
            f"{batch.max_difference:.0e}",
        )
    return table


def told(report: EmbeddingReport) -> list[str]:
    """What else was seen, a line each."""
    memory = report.memory
    low, _, high = statistics.quantiles([batch.ratio for batch in report.batches], n=4)
    return [
        f"throughput without KV: {report.throughput_ratio:.2f} times that with KV written, the "
        f"median of {len(report.batches)} batches; half of them from {low:.2f} to {high:.2f}",
        f"memory: a pool of {memory.pages} pages takes {_size(memory.pool_bytes)}; without KV "
        f"{memory.counted_pages} pages are counted in {memory.counted_pool_bytes} bytes; an "
        f"engine that must have tensors needs one page of them, {_size(memory.placeholder_bytes)}",
        f"embeddings of batch 1: text by text they differ by {report.alone_difference:.1e}, read "
        f"back from the pool by {report.read_back_difference:.1e}",
        f"refused without KV: {', '.join(report.refused)}",
        "negative control, a page zeroed before it is read back: the embeddings differ by "
        f"{report.damaged_difference:.2g}",
    ]


def verdict(report: EmbeddingReport) -> str:
    """One line: what was shown, or what was not."""
    if report.problems:
        more = len(report.problems) - 1
        rest = f" (and {more} more)" if more else ""
        return f"FAILED: {report.problems[0]}{rest}"
    memory = report.memory
    texts = sum(batch.texts for batch in report.batches)
    rate = statistics.median(batch.texts / batch.counted_ms * 1e3 for batch in report.batches)
    return (
        f"OK: embeddings of {texts} texts are the same with KV and without (largest difference "
        f"{report.max_difference:.0e}, {report.tolerance:.0e} allowed); "
        f"{_size(memory.pool_bytes - memory.placeholder_bytes)} saved of "
        f"{_size(memory.pool_bytes)}; {rate:.0f} texts/s, {report.throughput_ratio:.2f} times "
        f"those with KV written; {report.seconds:.0f} s"
    )


def _size(n_bytes: int) -> str:
    if n_bytes < 2**20:
        return f"{n_bytes / 2**10:.0f} KiB"
    return f"{n_bytes / 2**20:.1f} MiB"


BATCHES = 12
TEXTS = 8
SHORTEST_TOKENS, LONGEST_TOKENS = 32, 192

Texts = tuple[tuple[int, ...], ...]

WRITTEN = {"cache.mode": "off", "engine.workload": "embedding"}
COUNTED = {
    "cache.mode": "prefill-only",
    "engine.workload": "embedding",
    "engine.attention": "varlen",
}


class _Stage:
    """The engine, a look into each daemon, and what runs."""

    def __init__(self, engine: EngineProcess, started: Started, nodes: list[SyncNode]) -> None:
        self.engine = engine
        self.started = started
        self.counted, self.written = nodes

    def embed(self, texts: Texts, keeping: Keeping, *, damage: bool = False) -> Embedded:
        """One batch."""
        return ask(self.engine, Embed(texts, keeping, damage), Embedded)


def run(settings: DemoSettings, watcher: Watcher) -> EmbeddingReport:
    """The whole demo.

    Raises:
        DemoFailed: it could not be carried through; a wrong outcome is in the report instead.
    """
    began_s = time.monotonic()
    batches = [_texts(settings, number) for number in range(BATCHES)]
    pages = TEXTS * -(-LONGEST_TOKENS // settings.pool.page_size) + 1
    with _open_stage(settings, PageCounts(pages), watcher) as stage:
        watcher.stage("once each way, unmeasured")
        for keeping in (Keeping.COUNTED, Keeping.WRITTEN):
            stage.embed(batches[0], keeping)
        measured: list[Batch] = []
        for number, texts in enumerate(batches, start=1):
            watcher.stage(f"batch {number} of {BATCHES}, with KV written and without KV")
            measured.append(_batch(stage, texts))
        watcher.stage("text by text; read back from the pool; and with one page zeroed")
        counted = vectors(stage.embed(batches[0], Keeping.COUNTED))
        differences = {
            name: _difference(counted, stage.embed(batches[0], keeping, damage=damage))
            for name, keeping, damage in (
                ("alone", Keeping.ALONE, False),
                ("read-back", Keeping.READ_BACK, False),
                ("damaged", Keeping.READ_BACK, True),
            )
        }
        refused = refusals(stage.counted)
        memory = _memory(settings, stage)
        started = stage.started
    report = EmbeddingReport(
        ok=False,
        problems=(),
        weights=started.weights,
        torch=started.torch,
        transformers=started.transformers,
        seed=settings.seed,
        dtype=settings.dtype,
        tolerance=settings.tolerance,
        batches=tuple(measured),
        alone_difference=differences["alone"],
        read_back_difference=differences["read-back"],
        damaged_difference=differences["damaged"],
        memory=memory,
        refused=refused,
        throughput_ratio=round(statistics.median(one.ratio for one in measured), 3),
        seconds=round(time.monotonic() - began_s, 2),
    )
    return report.judged(problems(report))


def _texts(settings: DemoSettings, number: int) -> Texts:
    """The same texts for the same seed and number."""
    chance = random.Random(settings.seed * 1000 + number)
    vocabulary = settings.architecture.shape.vocabulary
    lengths = [chance.randint(SHORTEST_TOKENS, LONGEST_TOKENS) for _ in range(TEXTS)]
    return tuple(
        tuple(chance.randrange(1, vocabulary) for _ in range(length)) for length in lengths
    )


ORDER = (Keeping.COUNTED, Keeping.WRITTEN, Keeping.WRITTEN, Keeping.COUNTED)
"""Each way first and second: whoever comes second finds the texts in the processor's caches."""


def _batch(stage: _Stage, texts: Texts) -> Batch:
    """Both ways, twice; the faster time counts, since other work of the machine only adds."""
    found: dict[Keeping, list[Embedded]] = {Keeping.COUNTED: [], Keeping.WRITTEN: []}
    for keeping in ORDER:
        found[keeping].append(stage.embed(texts, keeping))
    took_s = {keeping: min(one.took_s for one in several) for keeping, several in found.items()}
    ours = vectors(found[Keeping.COUNTED][0])
    return Batch(
        texts=len(texts),
        tokens=sum(map(len, texts)),
        counted_ms=round(took_s[Keeping.COUNTED] * 1e3, 3),
        written_ms=round(took_s[Keeping.WRITTEN] * 1e3, 3),
        max_difference=max(_difference(ours, one) for several in found.values() for one in several),
    )


def vectors(embedded: Embedded) -> NDArray[np.float64]:
    """(texts, hidden)."""
    return np.frombuffer(embedded.vectors, "<f8")


def _difference(ours: NDArray[np.float64], other: Embedded) -> float:
    """The largest difference of an element."""
    return float(np.abs(ours - vectors(other)).max())


def _memory(settings: DemoSettings, stage: _Stage) -> EmbeddingMemory:
    """What both daemons say of their pools, and what the pool must take."""
    counted, written = _pool(stage.counted), _pool(stage.written)
    return EmbeddingMemory(
        pages=written.total_pages,
        counted_pages=counted.total_pages,
        pool_bytes=written.total_pages * written.page_bytes,
        pool_bytes_expected=written.total_pages * settings.pool.page_bytes(PoolPart.KV),
        counted_pool_bytes=counted.total_pages * counted.page_bytes,
        placeholder_bytes=counted.placeholder_bytes,
        pages_still_held=counted.held_pages + written.held_pages,
    )


def _pool(node: SyncNode) -> PoolState:
    return node.snapshot().pools[0]


def refusals(node: SyncNode) -> dict[str, str]:
    """What a node without KV answers to each attempt to use some: the code of its refusal."""
    prompt = [1, 2, 3]
    lease = node.lease(prompt, deadline_s=DEADLINE_S, cache=False)
    attempts: dict[str, Callable[[], object]] = {
        "map": lambda: node.pool("main").layer(0),
        "commit": lambda: lease.commit(()),
        "send": lambda: node.send(1, prompt, lease=lease, deadline_s=DEADLINE_S),
        "receive": lambda: node.receive(1, prompt, source="nobody", deadline_s=DEADLINE_S),
        "match": lambda: node.match(prompt),
    }
    found: dict[str, str] = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except KvdError as refusal:
            found[name] = refusal.code
        else:
            found[name] = "not refused"
    lease.release()
    return found


@contextmanager
def _open_stage(settings: DemoSettings, pages: PageCounts, watcher: Watcher) -> Iterator[_Stage]:
    """Start two daemons that know no peer, and one engine; stop them at the end.

    Raises:
        DemoFailed: a process did not start, or failed later; quotes the logs.
    """
    with open_processes() as processes:
        watcher.stage("starting 2 daemons and 1 engine; importing torch takes longest")
        engine = processes.start_engine("embedding-engine", settings.start())
        pool = settings.pool.settings(pages)
        daemons = [
            processes.make_daemon(name, {**pool, **more})
            for name, more in (("counting", COUNTED), ("writing", WRITTEN))
        ]
        for daemon in daemons:
            daemon.start()
        nodes = [processes.open_session(daemon) for daemon in daemons]
        watcher.stage("building the model")
        started = engine.hear(Started, within_s=START_S)
        counted, written = (daemon.client for daemon in daemons)
        ask(engine, ConnectEncoder(counted, written, engine.name), Connected)
        yield _Stage(engine, started, nodes)
