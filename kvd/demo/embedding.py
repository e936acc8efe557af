"""``kvd demo --model embedding``: an encoder with KV that nobody reads, and without any.

One engine has a session with two daemons. One has the pool that a generating model would need, and
K and V of every text are written to it; the other is told ``cache.mode = "prefill-only"`` and only
counts. Batches go both ways in turn, and what comes out must be the same.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvd.demo.embedding_report import Batch, EmbeddingReport, Memory, problems
from kvd.demo.layout import PageCounts, Part
from kvd.demo.messages import (
    DEADLINE_S,
    Connected,
    ConnectEncoder,
    Embed,
    Embedded,
    Keeping,
    Started,
)
from kvd.demo.processes import DaemonPlan, DemoDaemon, DemoFailed, EngineProcess, free_addresses
from kvd.demo.stage import ANSWER_S, START_S, Processes, Watcher, ask, session
from kvd.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from kvd.client import SyncNode
    from kvd.demo.settings import Settings
    from kvd.wire.snapshot import PoolState

BATCHES = 12
TEXTS = 8
SHORTEST_TOKENS, LONGEST_TOKENS = 32, 192

Texts = tuple[tuple[int, ...], ...]

WRITTEN: dict[str, dict[str, object]] = {
    "cache": {"mode": "off"},
    "engine": {"workload": "embedding"},
}
COUNTED: dict[str, dict[str, object]] = {
    "cache": {"mode": "prefill-only"},
    "engine": {"workload": "embedding", "attention": "varlen"},
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


def run(settings: Settings, watcher: Watcher) -> EmbeddingReport:
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


def _texts(settings: Settings, number: int) -> Texts:
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


def _memory(settings: Settings, stage: _Stage) -> Memory:
    """What both daemons say of their pools, and what the pool must take."""
    counted, written = _pool(stage.counted), _pool(stage.written)
    return Memory(
        pages=written.total_pages,
        counted_pages=counted.total_pages,
        pool_bytes=written.total_pages * written.page_bytes,
        pool_bytes_expected=written.total_pages * settings.pool.page_bytes(Part.KV),
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
def _open_stage(settings: Settings, pages: PageCounts, watcher: Watcher) -> Iterator[_Stage]:
    """Start two daemons that know no peer, and one engine; stop them at the end.

    Raises:
        DemoFailed: a process did not start, or failed later; quotes the logs.
    """
    with ExitStack() as open_:
        directory = Path(open_.enter_context(tempfile.TemporaryDirectory(prefix="kvd-demo-")))
        processes = Processes()
        open_.callback(processes.stop)
        try:
            watcher.stage("starting 2 daemons and 1 engine; importing torch takes longest")
            engine = processes.add(EngineProcess("embedding-engine", directory))
            engine.tell(settings.start())
            daemons = [
                processes.add(
                    DemoDaemon(
                        DaemonPlan(
                            name=name,
                            address=address,
                            peers={},
                            pool=settings.pool,
                            pages=pages,
                            sections=sections,
                        ),
                        directory,
                    )
                )
                for name, address, sections in zip(
                    ("counting", "writing"), free_addresses(2), (COUNTED, WRITTEN), strict=True
                )
            ]
            nodes = [open_.enter_context(session(daemon)) for daemon in daemons]
            watcher.stage("building the model")
            started = engine.hear(Started, within_s=START_S)
            order = ConnectEncoder(daemons[0].endpoint, daemons[1].endpoint, engine.name)
            engine.tell(order)
            engine.hear(Connected, within_s=ANSWER_S)
            yield _Stage(engine, started, nodes)
        except KvdError as refusal:
            raise processes.failed(DemoFailed(f"a daemon refused: {refusal}")) from refusal
        except DemoFailed as failure:
            raise processes.failed(failure) from failure
