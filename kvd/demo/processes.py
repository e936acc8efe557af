"""The processes of the demo: daemons and engines, started, spoken to, stopped.

Each writes its standard error to a log file, whose end is shown when something fails. They get a
session of their own, so that Ctrl-C reaches only the demo, which then stops them; if the demo is
killed outright, they end by themselves. Nothing but these processes is ever stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvd.demo.layout import PageCounts, PoolLayout
from kvd.demo.messages import LENGTH_BYTES, Failed, Reply, Request, decode_reply, frame

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

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


class Child:
    """One process that the demo started, its standard input and output, and its log.

    ``variables``: of its environment, beside ours.
    """

    def __init__(
        self, name: str, arguments: list[str], directory: Path, variables: Mapping[str, str]
    ) -> None:
        self.name = name
        self._log = directory / f"{name}.log"
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("KVD_")
        }
        environment |= variables
        # Appending: libraries in the process may open the file once more, as /dev/stderr.
        with self._log.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env=environment,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input = self._process.stdin
        self._output = self._process.stdout

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def failed(self, what: str) -> DemoFailed:
        """``what`` happened to this process, with the end of its log."""
        status = self._process.poll()
        ended = "" if status is None else f" (it ended with status {status})"
        return DemoFailed(f"{self.name}: {what}{ended}\n{self.quoted_log()}".rstrip())

    def quoted_log(self) -> str:
        """The end of its log, each line under its name."""
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join(f"  {self.name}| {line}" for line in lines)

    def ask_to_stop(self) -> None:
        """SIGTERM: a daemon goes down in order, an engine has nothing to lose."""
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


class EngineProcess(Child):
    """An engine: requests go in, answers come out, in order."""

    def __init__(self, name: str, directory: Path) -> None:
        arguments = ["-m", "kvd.demo.engine", name]
        super().__init__(name, arguments, directory, ENGINE_VARIABLES)
        self._unread = bytearray()

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
        if isinstance(reply, Failed):
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


class DaemonPlan(msgspec.Struct, frozen=True):
    """What one daemon is told: its name, its address for peers, whom it knows, and what it holds.

    ``sections``: of its configuration, beside these. ``keys``: of its pool, beside what follows
    from the model.
    """

    name: str
    address: str
    peers: dict[str, str]
    pool: PoolLayout
    pages: PageCounts
    sections: dict[str, dict[str, object]] = {}
    keys: dict[str, object] = {}


class DemoDaemon(Child):
    """A real ``kvd serve`` with a runtime directory of its own."""

    def __init__(self, plan: DaemonPlan, directory: Path) -> None:
        runtime = directory / plan.name
        runtime.mkdir()
        self.endpoint = f"ipc://{runtime}/client.sock"
        config = runtime / "kvd.toml"
        config.write_text(configuration(plan, runtime))
        arguments = ["-m", "kvd.demo.daemon", "serve", "--config", str(config)]
        super().__init__(plan.name, arguments, directory, {})


def configuration(plan: DaemonPlan, runtime: Path) -> str:
    """The kvd.toml of one daemon, whose sockets lie in ``runtime``."""
    sections: dict[str, dict[str, object]] = {
        "node": {"name": plan.name},
        "sockets": {
            "client": f"ipc://{runtime}/client.sock",
            "admin": f"ipc://{runtime}/admin.sock",
        },
        "peers": {"listen": plan.address},
        "peers.connect": dict(plan.peers),
        "pool": plan.pool.section(plan.pages) | plan.keys,
        "http": {"listen": "off"},
        "log": {"format": "console"},
        **plan.sections,
    }
    lines = [line for name, keys in sections.items() for line in _section(name, keys)]
    return "\n".join([*lines, ""])


def _section(name: str, keys: dict[str, object]) -> list[str]:
    """One section of TOML, and after it those that are among its values."""
    lines, below = [f"[{name}]"], []
    for key, value in keys.items():
        if isinstance(value, dict):
            below += _section(f"{name}.{key}", value)
        else:
            # A TOML basic string and number are written as in JSON.
            lines.append(f"{json.dumps(key)} = {json.dumps(value)}")
    return lines + below


def free_addresses(count: int) -> list[str]:
    """Addresses on loopback whose ports nobody uses at the moment."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"tcp://127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    for listener in listeners:
        listener.close()
    return addresses
