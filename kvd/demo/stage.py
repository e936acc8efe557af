"""Everything that a demo runs on: its daemons, three engines, and a look into each daemon.

Processes start side by side, because importing torch and transformers is most of the time. Leaving
the stage stops them, whatever happened; a failure quotes the last lines of the daemons' logs.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvd.client import connect_sync
from kvd.demo.division import pool_keys
from kvd.demo.messages import Connect, Connected, Reply, Request, Started
from kvd.demo.processes import (
    Child,
    DaemonPlan,
    DemoDaemon,
    DemoFailed,
    EngineProcess,
    free_addresses,
)
from kvd.errors import KvdError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvd.client import SyncNode
    from kvd.demo.layout import PageCounts
    from kvd.demo.settings import Settings
    from kvd.wire.snapshot import Snapshot

DECODE = "decode-0"
START_S = 120.0
ANSWER_S = 60.0
POLL_S = 0.02

C = TypeVar("C", bound=Child)
R = TypeVar("R", bound=Reply)

Engines = tuple[EngineProcess, EngineProcess, EngineProcess]
"""Prefill, decode, reference."""


class Watcher(Protocol):
    """Whoever shows the progress."""

    def stage(self, what: str) -> None:
        """``what`` begins."""


class Processes:
    """The processes that run, to be stopped together."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def add(self, child: C) -> C:
        """One more to be stopped."""
        self._children.append(child)
        return child

    def failed(self, failure: DemoFailed) -> DemoFailed:
        """``failure`` with what the daemons said last."""
        daemons = [child for child in self._children if isinstance(child, DemoDaemon)]
        return DemoFailed("\n".join([str(failure), *(daemon.quoted_log() for daemon in daemons)]))

    def stop(self) -> None:
        """Ask all of them, then wait for each."""
        for child in self._children:
            child.ask_to_stop()
        for child in self._children:
            child.stop()


class Stage:
    """The engines and daemons of one demo, ready for its turns."""

    def __init__(
        self,
        engines: Engines,
        daemons: Sequence[SyncNode],
        models: Started,
    ) -> None:
        """All of one demo; the last of ``daemons`` is the decode node's."""
        self.prefill, self.decode, self.reference = engines
        *self._prefill_nodes, self._decode_node = daemons
        self.models = models

    def prefill_daemons(self) -> list[Snapshot]:
        """The state of the prefill engine's daemons: one, or one for each of its ranks."""
        return [node.snapshot() for node in self._prefill_nodes]

    def decode_daemon(self) -> Snapshot:
        """The state of the decode node's daemon."""
        return self._decode_node.snapshot()


@contextmanager
def open_stage(settings: Settings, *, pages: PageCounts, watcher: Watcher) -> Iterator[Stage]:
    """Start everything, give it out once it is connected, and stop it at the end.

    Raises:
        DemoFailed: a process did not start, or failed later; quotes the logs.
    """
    with ExitStack() as open_:
        directory = Path(open_.enter_context(tempfile.TemporaryDirectory(prefix="kvd-demo-")))
        processes = Processes()
        open_.callback(processes.stop)
        try:
            n_daemons = settings.prefill.daemons + 1
            watcher.stage(
                f"starting {n_daemons} daemons and 3 engines; importing torch takes longest"
            )
            engines = _start_engines(settings, processes, directory)
            daemons = _start_daemons(settings, pages, processes, directory)
            nodes = [open_.enter_context(session(daemon)) for daemon in daemons]
            for node, daemon in zip(nodes, daemons, strict=True):
                _wait_until_linked(node, daemon, 1 if node is not nodes[-1] else len(nodes) - 1)
            watcher.stage("the daemons know each other; building the model in every engine")
            models = _built(engines)
            endpoints = tuple(daemon.endpoint for daemon in daemons)
            prefill, decode, _ = engines
            ask(prefill, Connect(endpoints[:-1], prefill.name), Connected)
            ask(decode, Connect(endpoints[-1:], decode.name), Connected)
            yield Stage(engines, nodes, models)
        except KvdError as refusal:
            raise processes.failed(DemoFailed(f"a daemon refused: {refusal}")) from refusal
        except DemoFailed as failure:
            raise processes.failed(failure) from failure


def ask(engine: EngineProcess, request: Request, kind: type[R]) -> R:
    """One request and its answer."""
    engine.tell(request)
    return engine.hear(kind, within_s=ANSWER_S)


def _start_engines(settings: Settings, processes: Processes, directory: Path) -> Engines:
    """Prefill, decode and reference: the same program, told to build the same model."""
    names = ("prefill-engine", "decode-engine", "reference")
    prefill, decode, reference = (processes.add(EngineProcess(name, directory)) for name in names)
    prefill.tell(settings.start(settings.prefill))
    decode.tell(settings.start(settings.decode))
    reference.tell(settings.start())
    return prefill, decode, reference


def _start_daemons(
    settings: Settings, pages: PageCounts, processes: Processes, directory: Path
) -> list[DemoDaemon]:
    """The prefill nodes and, last, the decode node, which knows all of them and is known to all."""
    names, shape = settings.prefill_nodes, settings.architecture.shape
    *here, there = free_addresses(len(names) + 1)
    sources = dict(zip(names, here, strict=True))
    plans = [
        DaemonPlan(
            name=name,
            address=address,
            peers={DECODE: there},
            pool=settings.pool,
            pages=pages,
            keys=pool_keys(shape, settings.prefill, number),
        )
        for number, (name, address) in enumerate(sources.items())
    ]
    keys = pool_keys(shape, settings.decode, 0)
    plans.append(
        DaemonPlan(
            name=DECODE, address=there, peers=sources, pool=settings.pool, pages=pages, keys=keys
        )
    )
    return [processes.add(DemoDaemon(plan, directory)) for plan in plans]


def session(daemon: DemoDaemon) -> SyncNode:
    """The demo's own session with a daemon that is starting."""
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            return connect_sync(daemon.endpoint, name="demo")
        except KvdError as refusal:
            if not daemon.is_running or time.monotonic() > deadline_s:
                raise daemon.failed(f"does not answer: {refusal}") from refusal
            time.sleep(POLL_S)


def _wait_until_linked(node: SyncNode, daemon: DemoDaemon, peers: int) -> None:
    """Until the daemon has exchanged a Hello with so many peers."""
    deadline_s = time.monotonic() + START_S
    while sum(peer.state == "up" for peer in node.snapshot().peers) < peers:
        if not daemon.is_running or time.monotonic() > deadline_s:
            raise daemon.failed(f"has no link to each of its {peers} peers")
        time.sleep(POLL_S)


def _built(engines: Engines) -> Started:
    """What the engines built, which must be the same thing."""
    first, *others = (engine.hear(Started, within_s=START_S) for engine in engines)
    for engine, other in zip(engines[1:], others, strict=True):
        if other != first:
            raise engine.failed(f"built {other}, the prefill engine {first}")
    return first
