"""Real daemons for measurements and tests: started, asked, stopped.

What lives here: one ``kvd serve`` as a child process, and pairs of them that know each other. What
must not: what is measured or asserted.

A daemon gets a directory for its sockets and its log, free ports on loopback unless it is placed
elsewhere, and a session of its own, so that Ctrl-C reaches only whoever started it. Nothing but
processes started here is ever stopped.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from kvd import curve
from kvd.client.admin import AdminClient
from kvd.wire import admin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvd.wire.snapshot import Snapshot

R = TypeVar("R", bound=admin.AdminReply)

START_S: Final = 30.0
STOP_S: Final = 10.0
ASK_S: Final = 10.0
LOOK_EVERY_S: Final = 0.005
LOG_LINES: Final = 20

_BYTECODE: Final = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")

LLAMA_8B: Final = {"pool.layers": "32", "pool.heads": "8", "pool.head_dim": "128"}
"""32 layers, 8 KV heads of 128, bfloat16: a page of 16 tokens has 2 MiB."""


@contextlib.contextmanager
def bytecode_kept() -> Iterator[None]:
    """Have what is started find its bytecode after its first start, as what is installed does.

    A checkout may be told to keep none: then every start compiles all of it, for half a second.
    """
    with tempfile.TemporaryDirectory(prefix="kvd-bytecode-") as directory:
        before = {name: os.environ.pop(name, None) for name in _BYTECODE}
        os.environ["PYTHONPYCACHEPREFIX"] = directory
        try:
            yield
        finally:
            del os.environ["PYTHONPYCACHEPREFIX"]
            os.environ.update({name: kept for name, kept in before.items() if kept is not None})


class DaemonFailed(Exception):
    """A daemon did not do what it should; the message quotes the end of its log."""


class DaemonPlace(msgspec.Struct, frozen=True):
    """Where a daemon lives on the network: the start of its command line, and its addresses."""

    prefix: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    """Port for peers; 0 takes a free one."""


HERE: Final = DaemonPlace()


class DaemonProcess:
    """One ``kvd serve``: start it once, stop it once."""

    def __init__(
        self,
        name: str,
        directory: Path,
        settings: Mapping[str, str],
        place: DaemonPlace = HERE,
        *,
        module: str = "kvd",
    ) -> None:
        """Not started yet. ``python -m MODULE serve`` is what will be."""
        self.name = name
        self.directory = directory / name
        self.directory.mkdir()
        self.client = f"ipc://{self.directory}/client.sock"
        self.admin = f"ipc://{self.directory}/admin.sock"
        self.attach = f"{self.directory}/attach.sock"
        self.peers = f"tcp://{place.host}:{place.port or free_port()}"
        self.http_port = free_port()
        self._place = place
        self._module = module
        self._settings = {
            "node.name": name,
            "sockets.client": self.client,
            "sockets.admin": self.admin,
            "peers.listen": self.peers,
            "http.listen": f"127.0.0.1:{self.http_port}",
            "log.level": "warning",
            "recorder.enabled": "false",  # measured by itself, in ``footprint``
            **settings,
        }
        self.config_file: Path | None = None
        """Read by it too; what is set here is stronger."""
        self._log = self.directory / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._children: list[int] = []
        """Descriptors of its processes, from when it was asked to end."""

    @property
    def pid(self) -> int:
        """Of the daemon itself."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def knows(self, other: DaemonProcess) -> None:
        """Configure ``other`` as a peer; before the start."""
        self._settings[f"peers.connect.{other.name}"] = other.peers

    def make_keys(self) -> str:
        """Give it a key pair, new each time, and return the public key; before the start."""
        pair = curve.new_pair()
        curve.replace_files(self.directory, pair)
        self._settings["peers.secret_key_file"] = str(self.directory / curve.SECRET_FILE)
        return pair.public

    def trusts(self, name: str, public: str) -> None:
        """Configure whose public key that is; before the start."""
        self._settings[f"peers.keys.{name}"] = public

    def start(self) -> None:
        """Start it; ``wait_ready`` says when it serves."""
        sets = [
            word for key, value in self._settings.items() for word in ("--set", f"{key}={value}")
        ]
        file = [] if self.config_file is None else ["--config", str(self.config_file)]
        command = [*self._place.prefix, sys.executable, "-m", self._module, "serve", *file, *sets]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVD_")}
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=environment,
                start_new_session=True,
            )

    def wait_ready(self, within_s: float = START_S) -> None:
        """Return when it says that it serves.

        Raises:
            DaemonFailed: it ended, or took longer.
        """
        self.wait_for(lambda: b" ready\n" in self._log.read_bytes(), "is not ready", within_s)

    def wait_for(self, is_so: Callable[[], bool], otherwise: str, within_s: float) -> None:
        """Look until ``is_so``.

        Raises:
            DaemonFailed: it ended, or it took longer; ``otherwise`` says what is missing.
        """
        deadline_s = time.monotonic() + within_s
        while not is_so():
            if not self.is_running:
                raise self.failed("has ended")
            if time.monotonic() > deadline_s:
                raise self.failed(f"{otherwise} after {within_s:g} s")
            time.sleep(LOOK_EVERY_S)

    def failed(self, what: str) -> DaemonFailed:
        """``what`` happened to this daemon, with the end of its log."""
        return DaemonFailed(f"{self.name} {what}\n{self.quoted_log()}")

    def quoted_log(self) -> str:
        """The end of its log, each line under its name."""
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join(f"  {self.name}| {line}" for line in lines)

    def ask(self, request: admin.AdminRequest, answer: type[R]) -> R:
        """One admin request and its answer.

        Raises:
            DaemonFailed: it was refused.
            KvdError: nobody answered.
        """
        with AdminClient(self.admin) as client:
            reply = client.request(request, timeout_s=ASK_S)
        if not isinstance(reply, answer):
            raise self.failed(f"answered {request} with {reply}")
        return reply

    def snapshot(self) -> Snapshot:
        """Its whole state."""
        return self.ask(admin.ShowStatus(1), admin.Status).snapshot

    def metrics(self, connection: socket.socket | None = None) -> str:
        """What it says at /metrics, over a ``connection`` that is closed, or a new one."""
        link = http.client.HTTPConnection("127.0.0.1", self.http_port)
        link.sock = connection
        try:
            link.request("GET", "/metrics", headers={"Connection": "close"})
            return link.getresponse().read().decode()
        finally:
            link.close()

    def transfer_pid(self) -> int:
        """Of its transfer process."""
        return self._child("kvd.transfer.worker")

    def storage_pid(self) -> int:
        """Of its storage process."""
        return self._child("kvd.storage.worker")

    def recorder_pid(self) -> int:
        """Of its recorder process."""
        return self._child("kvd.recorder")

    def _child_pids(self) -> list[int]:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [int(pid) for pid in children.read_text("ascii").split()]

    def _child(self, module: str) -> int:
        for pid in self._child_pids():
            with contextlib.suppress(OSError):  # a child may end meanwhile
                if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    return pid
        raise self.failed(f"has no child that runs {module}")

    def ask_to_stop(self) -> None:
        """Ask it to end, and wait for nothing."""
        if self.is_running and self._process is not None:
            for child in self._child_pids():
                with contextlib.suppress(OSError):  # it may end meanwhile
                    self._children.append(os.pidfd_open(child))
            self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """Ask it to end; enforce it after a while. Repeatable, and legal before the start.

        Its processes have ended too when this returns: a recorder writes what it has seen into the
        directory when the daemon is gone.
        """
        self.ask_to_stop()
        if self._process is None:
            return
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        children, self._children = self._children, []
        until_s = time.monotonic() + STOP_S
        for child in children:
            select.select([child], [], [], max(0.0, until_s - time.monotonic()))
            os.close(child)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()


class Pair(msgspec.Struct, frozen=True):
    """Two daemons, each with the other as a peer."""

    prefill: DaemonProcess
    decode: DaemonProcess

    def other(self, one: DaemonProcess) -> DaemonProcess:
        """The one of the two that ``one`` is not."""
        return self.decode if one is self.prefill else self.prefill


@contextlib.contextmanager
def _serving(every: Mapping[DaemonProcess, int]) -> Iterator[None]:
    """These daemons serve, each linked to so many peers, for as long as the block lasts."""
    try:
        for daemon in every:
            daemon.start()
        for daemon in every:
            daemon.wait_ready()
        for daemon, peers in every.items():
            if peers:
                daemon.wait_for(
                    lambda daemon=daemon, peers=peers: is_linked(daemon, peers),  # type: ignore[misc]
                    "has no agent for a peer",
                    START_S,
                )
        yield
    finally:
        for daemon in every:
            daemon.stop()


@contextlib.contextmanager
def one_daemon(
    directory: Path, settings: Mapping[str, str], *, name: str = "solo", place: DaemonPlace = HERE
) -> Iterator[DaemonProcess]:
    """A daemon that serves, for as long as the block lasts."""
    daemon = DaemonProcess(name, directory, settings, place)
    with _serving({daemon: 0}):
        yield daemon


@contextlib.contextmanager
def two_daemons(
    directory: Path,
    settings: Mapping[str, str],
    *,
    prefill: Mapping[str, str] | None = None,
    places: tuple[DaemonPlace, DaemonPlace] = (HERE, HERE),
    with_keys: bool = False,
) -> Iterator[Pair]:
    """Two daemons, ``p`` and ``d``, that can send to each other, for as long as the block lasts.

    Where their pools differ they know that of each other, and whoever can send soon will.
    ``prefill``: the settings of ``p``, where they are others than those of ``d``.
    ``with_keys``: each has a key pair, and knows the other's public key.
    """
    of_p = settings if prefill is None else prefill
    pair = Pair(
        DaemonProcess("p", directory, of_p, places[0]),
        DaemonProcess("d", directory, settings, places[1]),
    )
    for daemon in (pair.prefill, pair.decode):
        daemon.knows(pair.other(daemon))
        if with_keys:
            pair.other(daemon).trusts(daemon.name, daemon.make_keys())
    with _serving({pair.prefill: 1, pair.decode: 1}):
        yield pair


@contextlib.contextmanager
def star_of_daemons(
    directory: Path, settings: Mapping[str, str], sources: int
) -> Iterator[tuple[list[DaemonProcess], DaemonProcess]]:
    """Daemons ``p0``, ``p1`` ... that can send to one ``d``, for as long as the block lasts."""
    decode = DaemonProcess("d", directory, settings)
    prefill = [DaemonProcess(f"p{number}", directory, settings) for number in range(sources)]
    for daemon in prefill:
        daemon.knows(decode)
        decode.knows(daemon)
    with _serving({**dict.fromkeys(prefill, 1), decode: sources}):
        yield prefill, decode


def is_linked(daemon: DaemonProcess, peers: int = 1) -> bool:
    """Whether it can send to so many peers, or knows that their pools differ."""
    linked = [
        peer
        for peer in daemon.snapshot().peers
        if peer.state == "up"
        and (peer.agent == "loaded" or (peer.agent == "none" and peer.layout != "same"))
    ]
    return len(linked) >= peers


OWN_PORTS: Final = (20_000, 32_768)
"""Below the ports of outgoing connections."""

_given_ports: set[int] = set()


def free_port() -> int:
    """A TCP port of loopback that nobody listens on now, another one at each call.

    None of those that the kernel gives to outgoing connections: any of them could take it before a
    daemon has.
    """
    while True:
        port = random.randrange(*OWN_PORTS)
        if port in _given_ports:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given_ports.add(port)
            return port
