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
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvd.cli import main
from kvd.demo.messages import EngineFailed, Reply, Request, Started, StartEngine
from kvd.errors import KvdError
from kvd.harness.daemons import DaemonFailed, DaemonProcess, is_linked

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvd.demo.report import ProgressLines

PREFILL, DECODE = "prefill-0", "decode-0"
START_S = 120.0
ANSWER_S = 60.0
STOP_S = 10.0
LOG_LINES = 15
PR_SET_PDEATHSIG = 1
DAEMON_SETTINGS = {"http.listen": "off", "log.level": "info", "recorder.enabled": "true"}
"""As a daemon is that nobody measures, but without a port for probes."""
ENGINE_VARIABLES = {
    "HF_HUB_OFFLINE": "1",  # nothing is downloaded: models are built from numbers
    "OMP_NUM_THREADS": "1",
}

R = TypeVar("R", bound=Reply)


class DemoFailed(Exception):
    """The demo could not go on; the message says which process, why, and quotes its log."""


class EngineProcess:
    """An engine: requests go in, answers come out, in order."""

    def __init__(self, name: str, model: str, directory: Path) -> None:
        self.name = name
        self._log = directory / f"{name}.log"
        self._link, theirs = Pipe()
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVD_")}
        command = [sys.executable, "-m", "kvd.demo.engine", name, model, str(theirs.fileno())]
        # Appending: libraries in the process may open the file once more, as /dev/stderr.
        with self._log.open("ab") as sink, theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                pass_fds=(theirs.fileno(),),
                env=inherited | ENGINE_VARIABLES,
                start_new_session=True,
            )

    def failed(self, what: str) -> DemoFailed:
        """``what`` happened to this process, with the end of its log."""
        status = self._process.poll()
        ended = "" if status is None else f" (it ended with status {status})"
        said = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        quoted = "\n".join(f"  {self.name}| {line}" for line in said)
        return DemoFailed(f"{self.name}: {what}{ended}\n{quoted}".rstrip())

    def ask_to_stop(self) -> None:
        """SIGTERM: it has nothing to lose."""
        self._link.close()
        self._process.terminate()

    def stop(self) -> None:
        """Wait for its end, and enforce it after a while."""
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def tell(self, request: Request) -> None:
        """Hand over one request; ``hear`` gives its answer."""
        with contextlib.suppress(BrokenPipeError):  # then nothing is to be heard
            self._link.send_bytes(msgspec.msgpack.encode(request))

    def hear(self, kind: type[R], *, within_s: float = ANSWER_S) -> R:
        """The next answer, which must be a ``kind``."""
        try:
            if not self._link.poll(within_s):
                raise self.failed("no answer in time")
            reply = msgspec.msgpack.decode(self._link.recv_bytes(), type=Reply)
        except (EOFError, ConnectionResetError) as gone:
            self._process.wait(STOP_S)
            raise self.failed("the engine is gone") from gone
        if isinstance(reply, EngineFailed):
            raise self.failed(reply.error)
        if not isinstance(reply, kind):
            raise self.failed(f"answered {type(reply).__name__} instead of {kind.__name__}")
        return reply


class Stage(msgspec.Struct, frozen=True):
    """The engines and daemons of one demo, ready for its turns; ``started`` is what all built."""

    prefill: EngineProcess
    decode: EngineProcess
    reference: EngineProcess
    prefill_daemon: DaemonProcess
    decode_daemon: DaemonProcess
    started: Started


@contextmanager
def open_stage(
    model: str, pool: Mapping[str, str], watcher: ProgressLines, device: str | None = None
) -> Iterator[Stage]:
    """Start everything, give it out once it is connected, and stop it at the end.

    ``pool`` is the ``[pool]`` section of both daemons; ``watcher`` is told what is waited for.
    ``device``: as in ``StartEngine``.

    Raises:
        DemoFailed: a process did not start, or failed later; quotes the logs.
    """
    daemons: list[DaemonProcess] = []
    engines: list[EngineProcess] = []
    with ExitStack() as open_:
        directory = Path(open_.enter_context(tempfile.TemporaryDirectory(prefix="kvd-demo-")))
        open_.callback(_stop, engines, daemons)
        try:
            watcher.stage("starting 2 daemons and 3 engines; importing torch takes longest")
            names = ("prefill-engine", "decode-engine", "reference")
            engines.extend(EngineProcess(name, model, directory) for name in names)
            _start_daemons(pool, directory, daemons)
            watcher.stage("the daemons know each other; building the model in every engine")
            endpoints = [*(daemon.client for daemon in daemons), None]
            started = _built(engines, [StartEngine(one, device) for one in endpoints])
            yield Stage(
                prefill=engines[0],
                decode=engines[1],
                reference=engines[2],
                prefill_daemon=daemons[0],
                decode_daemon=daemons[1],
                started=started,
            )
        except (DemoFailed, DaemonFailed, KvdError) as failure:
            why = f"a daemon refused: {failure}" if isinstance(failure, KvdError) else str(failure)
            raise DemoFailed(
                "\n".join([why, *(daemon.quoted_log() for daemon in daemons)])
            ) from failure


def _start_daemons(pool: Mapping[str, str], directory: Path, daemons: list[DaemonProcess]) -> None:
    """Start the prefill and the decode node, add them to ``daemons``, and wait for their link."""
    settings = {**DAEMON_SETTINGS, **pool}
    daemons.extend(
        DaemonProcess(name, directory, settings, module="kvd.demo.processes")
        for name in (PREFILL, DECODE)
    )
    prefill, decode = daemons
    prefill.knows(decode)
    decode.knows(prefill)
    for daemon in daemons:
        daemon.start()
    for daemon in daemons:
        daemon.wait_ready(START_S)
        daemon.wait_for(
            lambda daemon=daemon: is_linked(daemon),  # type: ignore[misc]
            "has no agent for its peer",
            START_S,
        )


def _built(engines: list[EngineProcess], orders: list[StartEngine]) -> Started:
    """What the engines built, which must be the same thing."""
    for engine, order in zip(engines, orders, strict=True):
        engine.tell(order)
    first, *others = (engine.hear(Started, within_s=START_S) for engine in engines)
    for engine, other in zip(engines[1:], others, strict=True):
        if other != first:
            raise engine.failed(f"built {other}, the prefill engine {first}")
    return first


def _stop(engines: list[EngineProcess], daemons: list[DaemonProcess]) -> None:
    """Ask all of them, then wait for each."""
    every: list[EngineProcess | DaemonProcess] = [*engines, *daemons]
    for process in every:
        process.ask_to_stop()
    for process in every:
        process.stop()


def end_with_parent() -> None:
    """Have the kernel send us SIGTERM when the parent's thread that started us ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    end_with_parent()
    main()
