"""Everything that a demo runs on: its daemons and engines, started, spoken to, stopped.

Each writes its standard error to a log file, whose end is shown when something fails. They get a
session of their own, so that Ctrl-C reaches only the demo, which then stops them; if the demo is
killed outright, they end by themselves. Nothing but these processes is ever stopped. They start
side by side, because importing torch and transformers is most of the time. Leaving the stage stops
them, whatever happened.

``python -m kvd.demo.processes serve ...`` is ``kvd``, but it ends with whoever started it: a daemon
must outlive that, the one of a demo must not, even if the demo is killed outright.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvd.cli import main
from kvd.client import connect_sync
from kvd.demo.division import pool_settings
from kvd.demo.messages import (
    LENGTH_BYTES,
    Connected,
    ConnectEngine,
    EngineFailed,
    Reply,
    Request,
    Started,
    StartEngine,
    decode_reply,
    frame,
)
from kvd.errors import KvdError
from kvd.harness.daemons import DaemonFailed, DaemonProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvd.client import SyncNode
    from kvd.demo.layout import PageCounts
    from kvd.demo.settings import DemoSettings
    from kvd.wire.snapshot import Snapshot


PR_SET_PDEATHSIG = 1
LOG_LINES = 15
STOP_S = 10.0

R = TypeVar("R", bound=Reply)


class DemoFailed(Exception):
    """The demo could not go on; the message says which process, why, and quotes its log."""


ENGINE_VARIABLES = {
    "HF_HUB_OFFLINE": "1",  # nothing is downloaded: models are built from numbers
    "OMP_NUM_THREADS": "1",  # no library starts a thread, which a fork would not copy
    "GLOO_SOCKET_IFNAME": "lo",
}


def end_with_parent() -> None:
    """Have the kernel send us SIGTERM when the parent's thread that started us ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class EngineProcess:
    """An engine: requests go in, answers come out, in order."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self._unread = bytearray()
        self._log = directory / f"{name}.log"
        inherited = {key: one for key, one in os.environ.items() if not key.startswith("KVD_")}
        # Appending: libraries in the process may open the file once more, as /dev/stderr.
        with self._log.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvd.demo.engine", name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env=inherited | ENGINE_VARIABLES,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input = self._process.stdin
        self._output = self._process.stdout

    def failed(self, what: str) -> DemoFailed:
        """``what`` happened to this process, with the end of its log."""
        status = self._process.poll()
        ended = "" if status is None else f" (it ended with status {status})"
        said = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        quoted = "\n".join(f"  {self.name}| {line}" for line in said)
        return DemoFailed(f"{self.name}: {what}{ended}\n{quoted}".rstrip())

    def ask_to_stop(self) -> None:
        """SIGTERM: it has nothing to lose."""
        with contextlib.suppress(BrokenPipeError):  # a request it will never read
            self._input.close()
        self._process.terminate()

    def stop(self) -> None:
        """Wait for its end, and enforce it after a while."""
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def tell(self, request: Request) -> None:
        """Hand over one request; ``hear`` gives its answer."""
        try:
            self._input.write(frame(request))
            self._input.flush()
        except BrokenPipeError as gone:
            self._process.wait(STOP_S)
            raise self.failed("the engine is gone") from gone

    def hear(self, kind: type[R], *, within_s: float) -> R:
        """The next answer, which must be a ``kind``."""
        deadline_s = time.monotonic() + within_s
        size = int.from_bytes(self._take(LENGTH_BYTES, deadline_s), "big")
        reply = decode_reply(self._take(size, deadline_s))
        if isinstance(reply, EngineFailed):
            raise self.failed(reply.error)
        if not isinstance(reply, kind):
            raise self.failed(f"answered {type(reply).__name__} instead of {kind.__name__}")
        return reply

    def _take(self, size_bytes: int, deadline_s: float) -> bytes:
        """The next bytes of its standard output."""
        while len(self._unread) < size_bytes:
            left_s = max(deadline_s - time.monotonic(), 0)
            if not select.select([self._output], [], [], left_s)[0]:
                raise self.failed("no answer in time")
            piece = os.read(self._output.fileno(), 1 << 20)
            if not piece:
                self._process.wait(STOP_S)
                raise self.failed("the engine is gone")
            self._unread += piece
        taken = bytes(self._unread[:size_bytes])
        del self._unread[:size_bytes]
        return taken


DECODE = "decode-0"
START_S = 120.0
ANSWER_S = 60.0
POLL_S = 0.02
DAEMON_SETTINGS = {"http.listen": "off", "log.level": "info", "recorder.enabled": "true"}
"""As a daemon is that nobody measures, but without a port for probes."""

ThreeEngines = tuple[EngineProcess, EngineProcess, EngineProcess]
"""Prefill, decode, reference."""


class Watcher(Protocol):
    """Whoever shows the progress."""

    def stage(self, what: str) -> None:
        """``what`` begins."""


class DemoProcesses:
    """The processes of one demo and its sessions with their daemons; see ``open_processes``."""

    def __init__(self, directory: Path, open_: ExitStack) -> None:
        self._directory = directory
        self._open = open_
        self._engines: list[EngineProcess] = []
        self._daemons: list[DaemonProcess] = []

    def start_engine(self, name: str, start: StartEngine) -> EngineProcess:
        """An engine that builds its model; it answers ``Started``."""
        engine = EngineProcess(name, self._directory)
        self._engines.append(engine)
        engine.tell(start)
        return engine

    def make_daemon(self, name: str, settings: Mapping[str, str]) -> DaemonProcess:
        """A daemon that ends with the demo; it is told whom it knows, and then started."""
        daemon = DaemonProcess(
            name, self._directory, {**DAEMON_SETTINGS, **settings}, module="kvd.demo.processes"
        )
        self._daemons.append(daemon)
        return daemon

    def open_session(self, daemon: DaemonProcess) -> SyncNode:
        """The demo's own session with a daemon that was started."""
        daemon.wait_ready(START_S)
        return self._open.enter_context(connect_sync(daemon.client, name="demo"))

    def failed(self, why: str) -> DemoFailed:
        """``why``, with what the daemons said last."""
        return DemoFailed("\n".join([why, *(one.quoted_log() for one in self._daemons)]))

    def stop(self) -> None:
        """Ask all of them, then wait for each."""
        every: list[EngineProcess | DaemonProcess] = [*self._engines, *self._daemons]
        for process in every:
            process.ask_to_stop()
        for process in every:
            process.stop()


@contextmanager
def open_processes() -> Iterator[DemoProcesses]:
    """Processes with a directory of their own, all stopped at the end.

    Raises:
        DemoFailed: a process did not start, or failed later; quotes the logs.
    """
    with ExitStack() as open_:
        directory = Path(open_.enter_context(tempfile.TemporaryDirectory(prefix="kvd-demo-")))
        processes = DemoProcesses(directory, open_)
        open_.callback(processes.stop)
        try:
            yield processes
        except KvdError as refusal:
            raise processes.failed(f"a daemon refused: {refusal}") from refusal
        except (DemoFailed, DaemonFailed) as failure:
            raise processes.failed(str(failure)) from failure


class Stage:
    """The engines and daemons of one demo, ready for its turns."""

    def __init__(
        self,
        engines: ThreeEngines,
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
def open_stage(settings: DemoSettings, *, pages: PageCounts, watcher: Watcher) -> Iterator[Stage]:
    """Start everything, give it out once it is connected, and stop it at the end.

    Raises:
        DemoFailed: a process did not start, or failed later; quotes the logs.
    """
    with open_processes() as processes:
        n_daemons = settings.prefill.daemons + 1
        watcher.stage(f"starting {n_daemons} daemons and 3 engines; importing torch takes longest")
        prefill = processes.start_engine("prefill-engine", settings.start(settings.prefill))
        decode = processes.start_engine("decode-engine", settings.start(settings.decode))
        reference = processes.start_engine("reference", settings.start())
        daemons = _start_daemons(settings, pages, processes)
        nodes = [processes.open_session(daemon) for daemon in daemons]
        for daemon in daemons:
            peers = 1 if daemon is not daemons[-1] else len(daemons) - 1
            _wait_until_linked(daemon, peers)
        watcher.stage("the daemons know each other; building the model in every engine")
        models = _built((prefill, decode, reference))
        endpoints = tuple(daemon.client for daemon in daemons)
        ask(prefill, ConnectEngine(endpoints[:-1], prefill.name), Connected)
        ask(decode, ConnectEngine(endpoints[-1:], decode.name), Connected)
        yield Stage((prefill, decode, reference), nodes, models)


def ask(engine: EngineProcess, request: Request, kind: type[R]) -> R:
    """One request and its answer."""
    engine.tell(request)
    return engine.hear(kind, within_s=ANSWER_S)


def _start_daemons(
    settings: DemoSettings, pages: PageCounts, processes: DemoProcesses
) -> list[DaemonProcess]:
    """The prefill nodes and, last, the decode node, which knows all of them and is known to all."""
    shape, pool = settings.architecture.shape, settings.pool.settings(pages)
    prefill = [
        processes.make_daemon(name, {**pool, **pool_settings(shape, settings.prefill, number)})
        for number, name in enumerate(settings.prefill_nodes)
    ]
    decode = processes.make_daemon(DECODE, {**pool, **pool_settings(shape, settings.decode, 0)})
    for one in prefill:
        one.knows(decode)
        decode.knows(one)
    for one in (*prefill, decode):
        one.start()
    return [*prefill, decode]


def _wait_until_linked(daemon: DaemonProcess, peers: int) -> None:
    """Until the daemon has exchanged a Hello with so many peers."""
    daemon.wait_for(
        lambda: sum(peer.state == "up" for peer in daemon.snapshot().peers) >= peers,
        f"has no link to each of its {peers} peers",
        START_S,
    )


def _built(engines: ThreeEngines) -> Started:
    """What the engines built, which must be the same thing."""
    first, *others = (engine.hear(Started, within_s=START_S) for engine in engines)
    for engine, other in zip(engines[1:], others, strict=True):
        if other != first:
            raise engine.failed(f"built {other}, the prefill engine {first}")
    return first


if __name__ == "__main__":
    end_with_parent()
    main()
