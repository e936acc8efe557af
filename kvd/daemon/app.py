"""The composition root: builds every part of a daemon, runs it, and takes it down again.

Order up: lock, pool memory, node, sockets, transfer process, HTTP. READY means that the pool is
registered with the transport and every socket is bound. Order down is the reverse; what was
answered still goes out.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, get_args

from msgspec import structs

from kvd.config.address import host_port
from kvd.core import effects
from kvd.core.handoff.drain import SETTLE_S
from kvd.core.inputs import StopAsked, Tick
from kvd.core.inspect.words import node_word
from kvd.core.node import NodeState
from kvd.daemon.admins import AdminPort
from kvd.daemon.attach import AttachServer, device_memory
from kvd.daemon.auditor import Auditor
from kvd.daemon.beats import Beats
from kvd.daemon.clients import ClientPort
from kvd.daemon.consoles import BACKLOG_FRAMES, Consoles
from kvd.daemon.epochs_file import EpochKeeper, EpochsFile, epochs_path
from kvd.daemon.heap import give_back, spare_what_stays
from kvd.daemon.http_pages import exposition_of, http_pages
from kvd.daemon.kv_event_numbers import KvEventNumbers
from kvd.daemon.kv_events import KvEventPublisher, KvEventReplay, bounds_of_routers
from kvd.daemon.launch import launch
from kvd.daemon.listeners import Listeners
from kvd.daemon.peerlinks import PeerLinks
from kvd.daemon.reactor import Paranoid, Reactor
from kvd.daemon.recording import FlightRecorder
from kvd.daemon.reload import Reloader
from kvd.daemon.sessions import NO_PAST, Past
from kvd.daemon.settings_from_config import (
    attach_limits,
    bounds_of,
    peer_keys,
    recordings_directory,
    settings_of,
)
from kvd.daemon.socket_activation import UnfitConfig
from kvd.daemon.storage_supervisor import StorageSupervisor
from kvd.daemon.systemd import Systemd
from kvd.daemon.transfer_supervisor import TransferSupervisor
from kvd.daemon.warm_restart import leave
from kvd.daemon.watchdog import Watchdog
from kvd.journal.engines import NO_NOTES
from kvd.journal.reader import VerifyDepth
from kvd.observe.bus import Bus
from kvd.observe.http import HttpServer
from kvd.observe.metrics import Metrics
from kvd.pools.build import pool_memory
from kvd.zmtp.turns import WriteBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.config import Config
    from kvd.daemon.consoles import Looked
    from kvd.daemon.journalist import Journalist
    from kvd.daemon.launch import Launch
    from kvd.daemon.reload import Read
    from kvd.journal.reader import Reading
    from kvd.observe.log import EventLog
    from kvd.wire.admin import Look

LATE_S = 1.0
"""So late a stop may be by the core's reckoning."""


class Daemon:
    """One node. ``start`` and ``stop`` it once; ``stopped`` is set by a signal or by a test."""

    def __init__(
        self,
        config: Config,
        log: EventLog,
        systemd: Systemd | None = None,
        read: Read | None = None,
        launched: Launch | None = None,
    ) -> None:
        self.config = config
        self._launched = launched
        self.is_up = False
        self.reloader = Reloader(self, read or (lambda: config))
        self.systemd = Systemd() if systemd is None else systemd
        self.stopped = asyncio.Event()
        self.failure = ""
        """Why it ended without being asked to; empty while it has not."""
        self.is_stopping = False
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._up = contextlib.AsyncExitStack()
        self._beats: Beats | None = None
        self._clock: Callable[[], float] = time.monotonic

    async def start(self) -> None:
        """Come up to READY.

        Raises:
            CANNOT_SERVE: one of these; what to do about it is in its message.
        """
        config = self.config
        launched = self._launched or launch(config, self.systemd)
        # First in, so last out: memory and lock go when nobody is left who could use them.
        self._up.callback(launched.close)
        self.pool, spec = launched.pool, launched.spec
        settings = settings_of(config, launched)
        self.node = NodeState(settings, self._clock())
        self.bus = Bus()
        self.metrics = Metrics(spec.name)
        self.bus.subscribe(self.metrics.take, wants=self.metrics.counts)
        self.bus.subscribe(self._log.write, wants=self._log.is_written)
        reactor = Paranoid if config.audit.paranoid else Reactor
        self.reactor = reactor(self.node, self.bus, clock=self._clock, on_bug=self._bug)
        self.auditor = Auditor(self.reactor, self.bus, config.audit.budget)
        self.recording = self._recording()
        self.transfer = TransferSupervisor(
            self.reactor,
            launched.process,
            config.transfer.silent_s,
            region=self.pool.region,
            page_bytes=self.pool.page_bytes,
            on_pool_lost=self._pool_lost,
        )
        self._up.push_async_callback(self.transfer.stop)
        # While the transfer process loads: to read the journal of a large pool takes as long.
        reading = self.pool.read(VerifyDepth(config.pool.verify))
        await self.transfer.start("start")
        # After the transfer process, which sums what was left, and before any socket: an engine
        # that comes back must find its leases.
        self._find_epochs()
        await self._take_over(reading)
        self._listeners = Listeners(config, self._up, self.systemd.passed)
        self._batch = WriteBatch(self._loop, give_back)
        # Last, when all answers are on their way: an engine that sees us hang up waits no more.
        self._hang_up = self._up.enter_context(contextlib.ExitStack())
        # Bound now, and served when this turn ends: until ``_wire`` nobody would carry out an
        # effect.
        self._open_engines()
        self._open_admin()
        self._open_peers()
        self._wire()
        self._open_kv_events()
        if launched.has_tiers:
            self._begin_storage(launched)
        # After ``_wire``: its first input says Hello, which is an effect.
        self.links.dial(config.peers.connect)
        await self._serve_http()
        # Behind everything that came up: the copy of the node that it begins with has all of it.
        self.recording.begin()
        self.watchdog = Watchdog(self.systemd, self.reactor, self.transfer, self._log, self.state)
        self._beats = Beats(self._loop, self.reactor, beat=self._beat, dues=self._dues)
        self._beats.begin()
        spare_what_stays()
        self.is_up = True

    async def stop(self) -> None:
        """Take everything down, last first."""
        if self._beats is not None:
            # First: nothing new is begun while what is under way is awaited.
            self._beats.end()
            if self.journalist is not None:
                # While the transfer process runs, which makes the sums.
                await leave(self.journalist, self.node.leases.tree, self.systemd.advance)
        await self._up.aclose()

    def _recording(self) -> FlightRecorder:
        """The flight recorder; it is told goodbye only if the daemon was asked to stop."""
        directory = recordings_directory(self.config)
        recording = FlightRecorder(self.reactor, self.config.recorder, directory)

        async def stop() -> None:
            await recording.stop(is_clean=self.stopped.is_set() and not self.failure)

        self._up.push_async_callback(stop)
        return recording

    def _bug(self, task: str, error: BaseException) -> None:
        self._log.crashed(task, error)
        self.recording.bug(task, error)

    # ---- parts -------------------------------------------------------------------------------

    def _find_epochs(self) -> None:
        """Before the pool is taken over: what is found in it is found in an epoch."""
        keeper = EpochKeeper(EpochsFile(epochs_path(self.config)), self.reactor)
        self._up.push_async_callback(keeper.close)
        # Before its first input, which may ask for a write.
        self.reactor.perform[effects.KeepEpochs] = keeper.keep
        keeper.begin()

    def _tell_routers(self) -> None:
        """Before the pool is taken over: what is found in it is told as well."""
        self.kv_events: KvEventPublisher | None = None
        if self.node.announcer is not None:
            # Beside the epochs, whose lock keeps every other daemon of this name from it.
            numbers = KvEventNumbers(epochs_path(self.config).with_suffix(".kv-events"))
            page_tokens = self.node.leases.tree.match_page_tokens
            self.kv_events = KvEventPublisher(self.config, self.reactor, numbers, page_tokens)
            self.reactor.perform |= self.kv_events.perform

    async def _take_over(self, reading: Reading | None) -> None:
        """What the daemon before left is this one's now, as far as it was proven."""
        self._tell_routers()
        self.past: Past = NO_PAST
        self.journalist: Journalist | None = None
        taken = await self.pool.take(reading, self.transfer.sums, self._clock, self.systemd.advance)
        if taken is None:
            return
        if taken.adopted is not None:
            wrong = self.node.former_leases.why_not(taken.adopted)
            # Refused and not begun anew: engines may still read those pages.
            if wrong:
                raise UnfitConfig(
                    f"the journal of the pool contradicts itself: {wrong}; kvd drop removes both, "
                    "once no engine of before the restart runs any more"
                )
        self.past = taken.past
        self.journalist = taken.journalist
        self.reactor.perform |= {
            effects.NoteHeld: self.journalist.writer.held,
            effects.NoteCached: self.journalist.cached,
            effects.NoteFreed: self.journalist.writer.freed,
            effects.NoteEnded: self.journalist.writer.ended,
        }
        # Behind the notes: what nobody may read any more is noted as freed in this step.
        if taken.adopted is not None:
            self.reactor.feed(taken.adopted)

    def _open_engines(self) -> None:
        config, spec = self.config, self.node.settings.spec
        placed = self.pool.memory.placed
        attach = self.attach = AttachServer(
            self.reactor,
            (pool_memory(spec),),
            [region.arena.fd for region in placed if region.is_pool and region.arena is not None],
            on_devices=device_memory(spec, self.transfer.shared),
            past=self.past,
            notes=NO_NOTES if self.journalist is None else self.journalist.writer.engines,
            limits=attach_limits(config),
            endpoint=config.sockets.client,
        )
        self.clients = ClientPort(self.reactor, self.bus, attach, self.metrics)
        bounds = bounds_of(config, share=2, at_least=config.limits.max_clients)
        self.clients.start(self._listeners.listen(config.sockets.client), self._batch, bounds)
        self._up.push_async_callback(self.clients.close)
        attach.start(self._loop, self._listeners.listen_for_processes(), self.clients)
        self._hang_up.callback(attach.close)

    def _open_admin(self) -> None:
        budget = self.config.console.budget
        self.consoles = Consoles(self.node, self.bus, budget, self.clients.calls, self._clock)
        self.admins = AdminPort(
            self.reactor,
            self.bus,
            self.recording,
            self._look,
            self.reloader.reload,
            self.consoles.recall,
        )
        bounds = structs.replace(bounds_of(self.config, share=16), backlog_messages=BACKLOG_FRAMES)
        self.admins.start(self._listeners.listen(self.config.sockets.admin), self._batch, bounds)
        self._up.push_async_callback(self.admins.close)

    def _open_peers(self) -> None:
        self.links = PeerLinks(
            self.reactor,
            self._batch,
            peer_keys(self.config),
            bounds_of(self.config, share=8),
            count_failed=self.metrics.handshake_failed,
        )
        self.links.listen(self._listeners.listen(self.config.peers.listen))
        self._up.push_async_callback(self.links.close)

    def _open_kv_events(self) -> None:
        if self.kv_events is None:
            return
        config = self.config
        bounds = bounds_of_routers(bounds_of(config, share=16))
        listen = self._listeners.listen(config.kv_events.listen)
        self.kv_events.publish_on(listen, self._batch, bounds)
        self._up.push_async_callback(self.kv_events.close)
        replay = KvEventReplay(self.kv_events)
        replay.start(self._listeners.listen(config.kv_events.replay), self._batch, bounds)
        self._up.push_async_callback(replay.close)

    def _wire(self) -> None:
        self.reactor.perform |= {
            effects.AnswerEngine: self.clients.answer,
            effects.AnswerWorker: self.attach.answer,
            effects.AnswerOperator: self.admins.report,
            effects.SendToPeer: self.links.send,
            effects.HangUpLink: self.links.hang_up,
            **dict.fromkeys(get_args(effects.TransferOrder), self.transfer.order),
            effects.RestartTransfer: self.transfer.restart,
            effects.Recall: self.auditor.recall,
            effects.ReadyToStop: lambda _: self.stopped.set(),
        }

    def _begin_storage(self, launched: Launch) -> None:
        """Tiers are there when they are: nobody waits for what lies in them to be found."""
        storage = StorageSupervisor(self.reactor, launched.storage)
        self.reactor.perform |= {
            **dict.fromkeys(get_args(effects.StorageOrder), storage.order),
            effects.RestartStorage: storage.restart,
        }
        storage.begin()
        # Ended before the transfer process, and before anything that it writes is let go.
        self._up.push_async_callback(storage.stop)

    async def _serve_http(self) -> None:
        address = host_port(self.config.http.listen)
        if address is None:
            return
        exposition = exposition_of(self.node, self.metrics)
        server = HttpServer(
            http_pages(self.config, self.node, exposition),
            self._log.crashed,
            self.metrics.http_refused,
        )
        self.http_port = await server.start(address.host, address.port)
        self._up.push_async_callback(server.stop)
        self._loop.run_in_executor(None, exposition.load)

    # ---- what happens ------------------------------------------------------------------------

    def set_log_level(self, level: str) -> None:
        """Write events from this level on."""
        self._log.set_level(level)
        self.bus.ask_again()

    def state(self) -> str:
        """Of the node, in a word or two."""
        return node_word(self.node)

    def ask_to_stop(self, why: str) -> None:
        """Drain, and set ``stopped`` when that is over; at once where nothing is under way."""
        # A second signal finds this, and ends the process at once.
        self.is_stopping = True
        drain_s = self.config.admission.drain_s
        self.systemd.stopping(f"{why}: draining for {drain_s:g} s at most")
        if self._beats is None:  # not up yet
            self.stopped.set()
            return
        # Whatever becomes of the core, the process ends.
        most_s = drain_s + SETTLE_S + self.node.tiers.stop_s + LATE_S
        self._loop.call_later(most_s, self.stopped.set)
        self.reactor.feed(StopAsked(self._clock(), why, drain_s))

    def _pool_lost(self, why: str) -> None:
        """The pool was memory of the transfer process: without it there is nothing to serve."""
        # The first reason: what comes after it is its consequence.
        self.failure = self.failure or why
        self.stopped.set()

    def _look(self, console: bytes, asked: Look) -> Looked:
        """A console looks: its next frames come with the beats."""
        if self._beats is not None:
            self._beats.stir()
        return self.consoles.look(console, asked)

    def _dues(self) -> list[float]:
        """When a beat has something to do for the shell; none while consoles wait for frames."""
        if self.consoles.is_watched:
            return []
        return [self.transfer.due_s, self.watchdog.due_s, self.auditor.due_s]

    def _beat(self, now_s: float, lag_s: float) -> None:
        self.metrics.loop_lag(lag_s)
        self.consoles.lagged(lag_s)
        self.reactor.feed(Tick(now_s))
        self.transfer.beat()
        self.auditor.turn(now_s)
        # Behind the ``Tick``, of which it wants to see that it was stepped.
        self.watchdog.beat(now_s, lag_s)
        self.reactor.attempt("frames", lambda: self.consoles.beat(self.admins.send_frame))
