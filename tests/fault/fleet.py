"""The processes of a campaign: engines to give jobs to, and daemons that come back.

Every signal goes through a pidfd, so it reaches the process it was meant for or nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.client.admin import AdminClient
from kvd.errors import KvdError
from kvd.wire import admin
from tests.fault.jobs import ENGINE_DIED, REPORTS, Report, encode
from tests.support.daemons import HERE, Daemon, DaemonFailed, Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvd.wire.snapshot import Snapshot
    from tests.fault.jobs import Job

START_S = 30.0
START_AGAIN_S = 0.2
LOOK_EVERY_S = 0.02
ASK_S = 20.0


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """The process is stopped for as long as the block lasts; it may die meanwhile."""
    with contextlib.ExitStack() as stack:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            yield
            return
        stack.callback(os.close, handle)
        stack.callback(_thaw, handle, pid)
        _freezers[pid] += 1
        _signal(handle, signal.SIGSTOP)
        yield


_freezers: Counter[int] = Counter()
"""By pid, how many blocks want it stopped: faults overlap, and the last one lets it go on."""


def _thaw(handle: int, pid: int) -> None:
    _freezers[pid] -= 1
    if not _freezers[pid]:
        del _freezers[pid]
        _signal(handle, signal.SIGCONT)


def kill(pid: int) -> None:
    """End it; it may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _signal(handle: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, number)


class Engine:
    """One engine process, started again after each death."""

    def __init__(self, name: str, node: Server) -> None:
        self.name = name
        self._node = node
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: dict[int, asyncio.Future[Report]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._is_heard = False
        self._log = node.directory / f"{name}.log"

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        assert self._process is not None
        return self._process.pid

    @property
    def was_started(self) -> bool:
        """Whether it ever was."""
        return self._process is not None

    async def start(self) -> None:
        """Run it until it has a session."""
        with self._log.open("ab") as sink:
            words = (self._node.daemon.client, self.name, *(["kept"] if self._node.is_kept else []))
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.fault.engine", *words),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=sink,
            )
        ready = self._expect(0)
        self._reader = asyncio.create_task(self._read(self._process))
        await asyncio.wait_for(ready, START_S)
        self._is_heard = self._process.returncode is None

    async def do(self, job: Job) -> Report:
        """Its report, or one that says that the engine was killed."""
        assert self._process is not None, f"{self.name} was never started"
        assert self._process.stdin is not None
        if not self._is_heard:
            return Report(job.id, ENGINE_DIED, ended_s=time.monotonic())
        report = self._expect(job.id)
        self._process.stdin.write(encode(job) + b"\n")
        return await report

    async def kill(self) -> None:
        """End it at once, and start another."""
        await self.end()
        await self.start()

    async def end(self) -> None:
        if self._process is None:
            return
        kill(self._process.pid)
        await self._process.wait()
        if self._reader is not None:
            await self._reader

    def complaints(self) -> str:
        """What it wrote to its standard error: an engine that works writes nothing."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def _expect(self, number: int) -> asyncio.Future[Report]:
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        return future

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            report = REPORTS.decode(line)
            self._waiting.pop(report.id).set_result(report)
        self._mourn()

    def _mourn(self) -> None:
        self._is_heard = False
        now_s = time.monotonic()
        for number, future in list(self._waiting.items()):
            future.set_result(Report(number, ENGINE_DIED, ended_s=now_s))
        self._waiting.clear()


class Server:
    """One daemon that lives as long as the campaign, whatever becomes of its processes."""

    def __init__(
        self, name: str, directory: Path, settings: Mapping[str, str], place: Place = HERE
    ) -> None:
        self.name = name
        self.daemon = Daemon(name, directory, settings, place)
        self.directory = self.daemon.directory
        self.is_kept = settings.get("pool.backing", "anon") != "anon"
        """Whether its pool outlives it."""
        self.lives = 0
        self.last_event = 0

    def start(self) -> None:
        """Start it, on the address that it always had; its log begins again, the old one stays."""
        self.lives += 1
        self.last_event = 0
        log = self.directory / "log"
        if log.exists():
            log.rename(self.directory / f"log.{self.lives - 1}")
        self.daemon.start()

    async def ready(self, within_s: float = START_S) -> None:
        """Return when it serves."""
        log = self.directory / "log"
        await self.until(lambda: b" ready\n" in log.read_bytes(), "is not ready", within_s)

    async def until(self, is_so, otherwise: str, within_s: float) -> None:
        """Look until ``is_so()``.

        Raises:
            DaemonFailed: it ended, or it took longer.
        """
        deadline_s = time.monotonic() + within_s
        while not is_so():
            if not self.daemon.is_running:
                raise self.daemon.failed("has ended")
            if time.monotonic() > deadline_s:
                raise self.daemon.failed(f"{otherwise} after {within_s:g} s")
            await asyncio.sleep(LOOK_EVERY_S)

    async def restart(self) -> None:
        """Kill -9, and start again at once.

        Again and again, as a service manager would: while its cable is pulled it finds no network
        to serve on, says so, and ends.
        """
        kill(self.daemon.pid)
        self.daemon.kill()
        give_up_s = time.monotonic() + START_S
        while True:
            self.start()
            try:
                await self.ready()
            except DaemonFailed:
                if self.daemon.is_running or time.monotonic() > give_up_s:
                    raise
                await asyncio.sleep(START_AGAIN_S)
            else:
                return

    def transfer_pid(self) -> int | None:
        """Of its transfer process; None between two of them."""
        return self._child("kvd.transfer.worker")

    def recorder_pid(self) -> int | None:
        """Of its recorder process; None between two of them."""
        return self._child("kvd.recorder")

    def _child(self, module: str) -> int | None:
        children = Path(f"/proc/{self.daemon.pid}/task/{self.daemon.pid}/children")
        with contextlib.suppress(OSError):  # it may end meanwhile
            for pid in children.read_text().split():
                if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    return int(pid)
        return None

    async def ask(self, request: admin.AdminRequest) -> admin.AdminReply:
        """One admin request, off the loop, for the daemon may be stopped.

        Raises:
            KvdError: nobody answered.
        """
        return await asyncio.to_thread(self._ask, request)

    async def snapshot(self) -> Snapshot:
        reply = await self.ask(admin.ShowStatus(1))
        assert isinstance(reply, admin.Status), reply
        return reply.snapshot

    def _ask(self, request: admin.AdminRequest) -> admin.AdminReply:
        with AdminClient(self.daemon.admin) as client:
            return client.request(request, timeout_s=ASK_S)


def rss_bytes(pid: int) -> int:
    """Resident memory that is its own: the pool, shared with the engines, is left out."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)


def descriptors(pid: int) -> int:
    """How many it has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


__all__ = ["Engine", "KvdError", "Server", "descriptors", "frozen", "kill", "rss_bytes"]
