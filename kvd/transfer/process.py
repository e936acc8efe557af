"""The daemon's handle on a process that maps its pool: spawn, orders out, reports in, reap.

The transfer process is one, the storage process another (``kvd.storage.process``). Nothing here
imports NIXL. Orders are written straight to a socket pair; what it does not take is kept and
written when it is writable, so the loop never waits. The first order takes descriptors with it. The
end of the process is noticed by its pidfd, whatever ended it.

    NEW --spawn--> SPAWNED --start--> STARTING --Ready--> UP --stop--> GONE
                                         '- died -> raises    '- died -> GONE, on_exit(why)

``start`` spawns too; who has other things to do meanwhile may call ``spawn`` before.

Invariant: on GONE the process is reaped and its memory map is gone, so nothing it or a peer had
under way can write into the regions through it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec

from kvd.core.inputs import AgentFailed, PostFailed
from kvd.transfer.child import MOST_DESCRIPTORS, TRANSFER_WORKER, WorkerChild
from kvd.transfer.mapping import create_witness, is_map_gone
from kvd.transfer.orders import (
    TRANSFER_STREAM,
    BadStream,
    BeginTransfer,
    Dying,
    Frames,
    Order,
    OrderStream,
    Ready,
    Report,
    descriptors_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvd.transfer.orders import RegionPlan

R = TypeVar("R")
OrderT = TypeVar("OrderT")
ReportT = TypeVar("ReportT")
ReadyT = TypeVar("ReadyT")

OnReports = Callable[[list[Report]], None]
"""Takes reports in the order they were made; called on the event loop."""

OnExit = Callable[[str], None]
"""Takes why a process ended by itself; called once, after it was reaped."""

READ_BYTES: Final = 2**18
START_LIMIT_S: Final = 30.0
WITNESS_EVERY_S: Final = 0.001
"""Usually the first look suffices; there is no limit, for a limit would prove nothing."""


class TransportDown(Exception):
    """A process did not start, or was asked for something after its end."""


class ReportQueue:
    """What a transfer process reports, for who waits for one report after the other."""

    def __init__(self) -> None:
        self._reports: asyncio.Queue[Report | str] = asyncio.Queue()

    async def start(self, process: TransferProcess) -> Ready:
        """``TransferProcess.start``, with what it reports from then on in here."""
        return await process.start(self._take, self._reports.put_nowait)

    def _take(self, reports: list[Report]) -> None:
        for report in reports:
            self._reports.put_nowait(report)

    async def next(self, kind: type[R]) -> R:
        """The next report of ``kind``; others on the way are passed over.

        Raises:
            TransportDown: a failure came before it, or the end of the process.
        """
        while True:
            report = await self._reports.get()
            if isinstance(report, kind):
                return report
            if isinstance(report, AgentFailed | PostFailed):
                raise TransportDown(report.why)
            if isinstance(report, str):
                raise TransportDown(report)


class _State(enum.Enum):
    NEW = "new"
    SPAWNED = "spawned"
    STARTING = "starting"
    UP = "up"
    GONE = "gone"


class ProcessKind(msgspec.Struct, Generic[OrderT, ReportT, ReadyT], frozen=True):
    """What processes of one kind are called and run, what they are told, and how they begin."""

    what: str
    module: str
    stream: OrderStream[OrderT, ReportT]
    ready: type[ReadyT]
    """Its first report, where all is well; ``Dying`` where it is not."""


class WorkerProcess(Generic[OrderT, ReportT, ReadyT]):
    """One life of such a process.

    Args:
        kind: of which kind it is.
        name: of this life, in what is said about it.
        begin: makes the first order, and the descriptors that go with it, of the descriptor of the
            witness that the process keeps mapped.
        child: to be told all this, where one was started before; else it starts one.
    """

    def __init__(
        self,
        kind: ProcessKind[OrderT, ReportT, ReadyT],
        name: str,
        begin: Callable[[int], tuple[OrderT, Sequence[int]]],
        child: WorkerChild | None = None,
    ) -> None:
        self._kind = kind
        self._name = name
        self._begin = begin
        self._early = child
        self._state = _State.NEW
        self._frames = Frames()
        self._unsent = bytearray()
        self._last_words = ""
        self._is_confused = False
        """Whether it has sent what is no report; nothing that it sends is read any more."""

    @property
    def pid(self) -> int:
        """The process id; meaningful from ``start`` to ``stop``."""
        return self._child.process.pid

    def spawn(self) -> None:
        """Begin its life; needs no loop. Whoever does not ``start`` it then must ``stop`` it.

        Raises:
            TransportDown: this host has no process or descriptor left for it.
        """
        try:
            self._spawn()
        except OSError as exc:
            raise TransportDown(
                f"{self._kind.what} {self._name} could not be started: {exc}"
            ) from exc

    async def start(self, on_reports: Callable[[list[ReportT]], None], on_exit: OnExit) -> ReadyT:
        """Spawn the process and wait until it has mapped every region.

        Raises:
            TransportDown: it ended, said that it cannot serve, or this host has no process or
                descriptor left for it; the message says which.
        """
        if self._state is _State.NEW:
            self.spawn()
        if self._state is not _State.SPAWNED:
            raise TransportDown(
                f"{self._kind.what} {self._name} was started before; make a new one"
            )
        self._loop = asyncio.get_running_loop()
        self._on_reports, self._on_exit = on_reports, on_exit
        self._ready: asyncio.Future[ReadyT] = self._loop.create_future()
        self._gone = asyncio.Event()
        self._state = _State.STARTING
        self._loop.add_reader(self._child.pidfd, self._died)
        self._loop.add_reader(self._socket, self._readable)
        if self._unsent:
            self._write()
        try:
            async with asyncio.timeout(START_LIMIT_S):
                return await self._ready
        except TimeoutError:
            await self.stop()
            raise TransportDown(
                f"{self._kind.what} {self.pid} was not ready within {START_LIMIT_S:.0f} s"
            ) from None
        # Whoever gave up waiting, by a cancel too, must not leave a process behind that maps the
        # pool.
        except BaseException:
            await self.stop()
            raise

    def order(self, order: OrderT) -> None:
        """Send an order, in the order of the calls; dropped when the process is gone."""
        if self._state in {_State.NEW, _State.GONE}:
            return
        waiting = bool(self._unsent)
        self._unsent += self._kind.stream.frame_of(order)
        if not waiting:
            self._write()

    async def stop(self) -> None:
        """Kill the process; return when it is reaped and its memory map is gone."""
        if self._state is _State.NEW:
            self._state = _State.GONE
            return
        if self._state is _State.SPAWNED:
            # Reaped the way any other is: its end is what ``start`` waits for, and it raises then.
            with contextlib.suppress(TransportDown):
                self._child.process.kill()
                await self.start(_ignore, _ignore)
            return
        # Before the kill: an end that was ordered is no misfortune, and nobody starts another one.
        self._on_exit = _ignore
        if self._child.process.returncode is None:
            signal.pidfd_send_signal(self._child.pidfd, signal.SIGKILL)
        await self._gone.wait()

    def _spawn(self) -> None:
        self._witness = create_witness()
        try:
            self._child = (self._early or WorkerChild(self._kind.module)).take()
        except OSError:
            os.close(self._witness)
            raise
        self._socket = self._child.socket
        self._state = _State.SPAWNED
        begin, descriptors = self._begin(self._witness)
        frame = self._kind.stream.frame_of(begin)
        # At once, with no loop needed: it begins to load NIXL while the rest of the daemon is
        # imported. To one that has died nothing is sent, and the pidfd tells.
        with contextlib.suppress(ConnectionError):
            # Descriptors go with the first bytes, as many with each as the kernel takes: all of
            # them are there before the order is whole.
            for start in range(0, len(descriptors), MOST_DESCRIPTORS):
                some = descriptors[start : start + MOST_DESCRIPTORS]
                frame = frame[socket.send_fds(self._socket, [frame[:1]], some) :]
            self._unsent += frame[self._socket.send(frame) :]

    def _readable(self) -> None:
        """Take what there is; at the end of the stream the pidfd tells the rest."""
        data = self._receive()
        if data is None:
            return
        if not data:
            self._loop.remove_reader(self._socket)
        self._hear(data)

    def _hear(self, data: bytes) -> None:
        """Deliver what is whole. A process that babbles cannot be believed again: it is ended."""
        # What comes after garbage may begin anywhere: nothing of it is believed.
        if self._is_confused:
            return
        try:
            for body in self._frames.feed(data):
                self._deliver(self._kind.stream.reports_of(body))
        except BadStream as exc:
            self._is_confused = True
            self._last_words = f": it sent {exc}"
            self._frames = Frames()
            signal.pidfd_send_signal(self._child.pidfd, signal.SIGKILL)

    def _receive(self) -> bytes | None:
        """Bytes, none for the end of the stream, or None for nothing at the moment."""
        try:
            return self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _deliver(self, reports: list[ReportT]) -> None:
        if reports and self._state is _State.STARTING:
            first, *reports = reports
            self._began(first)
        for report in reports:
            if isinstance(report, Dying):
                self._last_words = f": {report.why}"
        if reports:
            self._on_reports(reports)

    def _began(self, first: ReportT) -> None:
        """The first report; whoever waited for it may have given up by now."""
        is_awaited = not self._ready.done()
        if isinstance(first, self._kind.ready):
            # Before the future: whoever waits may be gone, and its reports count from here on.
            self._state = _State.UP
            if is_awaited:
                self._ready.set_result(first)
            return
        if isinstance(first, Dying):
            why = first.why
        else:
            why = f"{self._kind.what} began with {type(first).__name__}"
        if is_awaited:
            self._ready.set_exception(TransportDown(why))

    def _write(self) -> None:
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._write)
            return
        except OSError:
            self._unsent.clear()  # it is dying; the pidfd tells
        self._loop.remove_writer(self._socket)

    def _died(self) -> None:
        """The process is a zombie: hear it out, reap it, then wait for its memory map."""
        self._loop.remove_reader(self._child.pidfd)
        while data := self._receive():  # a PostDone among its last words is as true as ever
            self._hear(data)
        # Reaped here and nowhere else; it is a zombie, so this does not block.
        status = self._child.process.wait()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        os.close(self._child.pidfd)
        why = f"{self._kind.what} {self.pid} {_ending(status)}{self._last_words}"
        self._bury(why)

    def _bury(self, why: str) -> None:
        """Be gone once no memory map of it is left; look again in a moment if one is."""
        # Dead is not enough: a peer's copy may hold its memory map, and write through it.
        if not is_map_gone(self._witness):
            self._loop.call_later(WITNESS_EVERY_S, self._bury, why)
            return
        os.close(self._witness)
        was, self._state = self._state, _State.GONE
        self._gone.set()
        if not self._ready.done():
            self._ready.set_exception(TransportDown(why))
        elif was is _State.UP:
            self._on_exit(why)


TRANSFER: Final = ProcessKind(
    what="transfer process", module=TRANSFER_WORKER, stream=TRANSFER_STREAM, ready=Ready
)


class TransferProcess(WorkerProcess[Order, Report, Ready]):
    """One life of the transfer process.

    Args:
        name: unique among all transfer processes that ever meet: incarnation and generation.
        regions: what to map and register; their descriptors stay the caller's.
        environment: added to the daemon's own, for NIXL and UCX settings.
        keep_open: descriptors that are held until its memory map is gone: the daemon's lock.
        child: as ``WorkerProcess`` has it.
    """

    def __init__(
        self,
        name: str,
        regions: Sequence[RegionPlan],
        *,
        environment: Mapping[str, str],
        keep_open: Sequence[int] = (),
        child: WorkerChild | None = None,
    ) -> None:
        def begin(witness: int) -> tuple[Order, Sequence[int]]:
            order = BeginTransfer(
                name=name,
                kept=(witness, *keep_open),
                regions=tuple(regions),
                environment=dict(environment),
            )
            return order, descriptors_of(order)

        super().__init__(TRANSFER, name, begin, child)


def _ending(status: int) -> str:
    """How a process ended, in words."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def _ignore(_: object) -> None:
    """Stand in for ``on_exit`` when the end was ordered."""
