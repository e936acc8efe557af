"""One simulated host: a real node, its transfer process, its engines, and what its pages hold.

Every input goes through ``feed``; what is cheap is checked there after each step: event numbers
(I8), that pages add up (the heart of I1), that no request is answered twice. The whole list of
invariants is ``audit``, which the world calls now and then; the standing audit has its turn at
some ticks, and must find nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from typing_extensions import override

from kvd.core import effects, inputs
from kvd.core.audit.invariants import violations
from kvd.core.audit.rules import is_uncounted
from kvd.core.handoff.drain import SETTLE_S
from kvd.core.inspect.page_states import pools_of
from kvd.core.peers.peer import Agent
from kvd.core.rest import TICK_S, is_still, next_tick_s, tick_dues
from kvd.errors import Code, Refusal
from kvd.sim.engine import SimSession
from kvd.sim.epochs import SimEpochs
from kvd.sim.node_shell import NodeShell, incarnation
from kvd.sim.pool import SimMemory
from kvd.sim.router import SimRouter
from kvd.sim.storage import SimDisk, SimStorageProcess
from kvd.sim.transfer_process import SimTransferProcess
from kvd.sim.violation import Violated, require
from kvd.sim.worker import SimWorker
from kvd.types import Pages, count, page_ids
from kvd.wire.peer import Offer

if TYPE_CHECKING:
    from kvd.core.inputs import Input
    from kvd.core.node import NodeState
    from kvd.core.settings import Settings, TierSettings
    from kvd.sim.world import World
    from kvd.wire.admin import AdminRequest
    from kvd.wire.peer import Message

STOP_S = 0.5
"""So long a daemon that is asked to end drains at most, and is down then."""

REST_S = 0.5
"""From tick to tick at most, of a daemon at rest."""

RANKS = (1, 1, 2)
"""Processes of an engine that copies."""

LINGERS_S = 1.0
"""At most, until a process is dead that has lost its connection."""

SWEEPS, SWEEP_WORK = 0.2, 40
"""Share of ticks with a turn of the standing audit, and so little work at each that every sweep is
cut in the middle of its phases."""

GAPS = 0.02
"""Of the ticks, those by which a router has missed some KV events."""


class SimHost(NodeShell):
    """One node, over all its lives."""

    def __init__(self, world: World, settings: Settings) -> None:
        self.world = world
        self.name: str = settings.name
        self.settings = settings
        self.dials: list[SimHost] = []
        self.links: dict[str, tuple[SimHost, str]] = {}
        """Where each link leads, and what it is called there."""
        self.life = 0
        self.is_up = False
        self.asleep_until_s = 0.0
        self.node: NodeState
        self.router: SimRouter | None = None
        """Who hears its KV events, if anybody does."""
        self.transfer: SimTransferProcess
        self.session: SimSession
        self.memory: SimMemory
        self.deaf: list[SimSession] = []
        """Hung up on, and not dead yet."""
        self.workers: dict[int, SimWorker] = {}
        """By connection: processes that copy, until the daemon knows that they are dead."""
        self.grants: dict[int, int] = {}
        """Lease of every handoff that was offered in this life."""
        self.storage: SimStorageProcess | None = None
        """None where there is no tier."""
        self.disks: dict[str, SimDisk[int]] = {
            tier.name: self._disk_of(tier) for tier in settings.tiers
        }
        self.epochs = SimEpochs(self, world.agenda, world.rng, is_found=world.profile.has_epochs)
        self._n_sessions = self._n_workers = 0
        self._seq = 0
        self._balance = (-1, -1)
        self._n_ticks = 0
        self._tick_s = 0.0
        """When the last of so many comes."""
        self._is_stirred = True
        """Whether anything has happened since the one before."""

    def _disk_of(self, tier: TierSettings) -> SimDisk[int]:
        if not tier.is_shared:
            return SimDisk(tier)
        world = self.world
        world.store = world.store or SimDisk(tier)
        return world.store

    # ---- lives -------------------------------------------------------------------------------

    def start(self) -> None:
        """A new process: another incarnation, no memory of anything."""
        world = self.world
        self.life += 1
        self.is_up = True
        self.asleep_until_s = 0.0
        self.settings = msgspec.structs.replace(
            self.settings, incarnation=incarnation(self.name, self.life)
        )
        self.node = world.make_node(self.settings, world.agenda.now_s)
        self.router = None if self.settings.kv_events is None else SimRouter(self.name)
        self.memory = SimMemory(self.settings.spec, world.contents)
        self.grants = {}
        self._seq = 0
        self._balance = (-1, -1)
        self._n_sessions = 0
        self.epochs.begin_life()
        self.attach()
        self.transfer = SimTransferProcess(self, 1)
        self.transfer.start("start")
        if self.settings.tiers:
            self.storage = SimStorageProcess(self, self.disks, 1)
        self._tick_after(TICK_S * world.rng.random())

    def dial(self) -> None:
        """Tell the node of the peers that it is configured with."""
        for other in self.dials:
            self.world.network.connect(self, other)
            self.feed(
                inputs.LinkDialed(
                    at_s=self.world.agenda.now_s,
                    link=f"out:{other.name}",
                    name=other.name,
                    address=f"tcp://{other.name}",
                )
            )

    def is_held_back(self, sender: str) -> bool:
        """Whether what that host writes to us waits for the end of a partition."""
        world = self.world
        return world.profile.cuts_data and world.network.is_cut(sender, self.name)

    def crash(self) -> None:
        """The daemon dies with its engines and its transfer process."""
        self.is_up = False
        self.epochs.end_life()
        self.session.die()
        self.transfer.die()
        if self.storage is not None:
            self.storage.die()
        for worker in self.workers.values():
            worker.die()
        self.workers.clear()
        self.deaf.clear()

    def ask_to_stop(self) -> None:
        """SIGTERM: it drains, writes what its tiers have not, and ends; in any case soon."""
        world, node = self.world, self.node
        # Its engine went first: here nobody takes a lease that is given back for it.
        self.hang_up()
        self.attach()
        world.agenda.after(STOP_S + SETTLE_S + node.tiers.stop_s, self._stopped, self.life)
        self.feed(inputs.StopAsked(world.agenda.now_s, "simulated", STOP_S))

    def _stopped(self, life: int) -> None:
        if self.is_up and self.life == life:
            self.crash()
            self.world.agenda.after(STOP_S, self.world.start, self)

    def attach(self) -> None:
        """An engine opens a session."""
        self._n_sessions += 1
        self.session = SimSession(self, self._n_sessions)
        now_s = self.world.agenda.now_s
        self.feed(
            inputs.ClientJoined(
                at_s=now_s, session=self._n_sessions, name=f"engine of {self.name}", pid=1000
            )
        )
        if self.world.profile.copying:
            ranks = self.world.rng.choice(RANKS)
            self.session.workers = [self._join(self.session, rank, ranks) for rank in range(ranks)]
            self.session.workers[0].keep_blocks()

    def _join(self, session: SimSession, rank: int, ranks: int) -> SimWorker:
        """A process of the engine that copies."""
        self._n_workers += 1
        worker = self.workers[self._n_workers] = SimWorker(session, self._n_workers, rank, ranks)
        return worker

    def hang_up(self) -> None:
        """The engine dies, and the daemon sees it."""
        self.session.die()
        self._session_gone(self.session)

    def _session_gone(self, session: SimSession) -> None:
        """The last process of an engine is dead."""
        now_s = self.world.agenda.now_s
        workers = [worker for worker in self.workers.values() if worker.session is session]
        for worker in workers:
            worker.die()
            del self.workers[worker.number]
        # Whether each is seen to be dead first, or all at once.
        if workers and self.world.rng.random() < 0.5:
            for worker in workers:
                self.feed(inputs.WorkerGone(now_s, session.id, worker.number))
        self.feed(inputs.ClientHungUp(now_s, session.id))
        for lease in self.node.leases.leases.values():
            if lease.session == session.id and "engine" in lease.holders:
                raise Violated(f"{self.name}: lease {lease.id} outlives its session {session.id}")

    def hang_up_on(self) -> None:
        """The daemon hangs up on the engine, whose processes go on copying for a while."""
        session, agenda = self.session, self.world.agenda
        session.die()
        why = Refusal(Code.CLIENT_GONE, "it reads no answers")
        self.feed(inputs.HungUpOn(at_s=agenda.now_s, session=session.id, why=why, pids=(1000,)))
        self.deaf.append(session)
        agenda.after(LINGERS_S * self.world.rng.random(), self._deaf_dies, session, self.life)
        self.attach()

    def _deaf_dies(self, session: SimSession, life: int) -> None:
        agenda = self.world.agenda
        if self.life != life or not self.is_up:
            return
        if self.asleep_until_s > agenda.now_s:
            agenda.at(self.asleep_until_s, self._deaf_dies, session, life)
        else:
            self.deaf.remove(session)
            self._session_gone(session)

    def lose_worker(self) -> None:
        """A process of the engine is lost, and another one comes in its place."""
        session, world = self.session, self.world
        if not session.workers:
            return
        old = world.rng.choice(session.workers)
        old.is_connected = False
        session.workers[old.rank] = self._join(session, old.rank, old.ranks)
        if world.rng.random() < 0.5:
            self._worker_gone(old)
        else:  # its connection is gone, and it goes on copying
            world.agenda.after(LINGERS_S * world.rng.random(), self._worker_gone, old)
        self.feed(
            inputs.RankLeft(
                at_s=world.agenda.now_s,
                session=session.id,
                rank=old.rank,
                ranks=old.ranks,
                pid=1000,
            )
        )

    def _worker_gone(self, worker: SimWorker) -> None:
        agenda = self.world.agenda
        if not worker.is_alive:
            return
        if self.asleep_until_s > agenda.now_s:
            agenda.at(self.asleep_until_s, self._worker_gone, worker)
            return
        worker.die()
        del self.workers[worker.number]
        self.feed(inputs.WorkerGone(agenda.now_s, worker.session.id, worker.number))
        worker.gone()

    @override
    def restart_transfer(self, why: str) -> None:
        old = self.transfer
        if not old.is_alive:
            return  # it is being replaced already
        # An order comes in the middle of a step's effects: carried out when that step is over.
        self.world.agenda.after(0.0, self._replace_transfer, old, why)

    def _replace_transfer(self, old: SimTransferProcess, why: str) -> None:
        if self.transfer is not old or not old.is_alive:
            return
        old.die()
        self.feed(inputs.TransferGone(self.world.agenda.now_s, why))
        self.world.agenda.after(
            0.02 + 0.3 * self.world.rng.random(), self._revive, old, self.life, why
        )

    def _revive(self, old: SimTransferProcess, life: int, why: str) -> None:
        if self.life == life and self.is_up and self.transfer is old:
            self.transfer = SimTransferProcess(self, old.generation + 1)
            self.transfer.start(why)

    @override
    def keep_epochs(self, effect: effects.KeepEpochs) -> None:
        self.epochs.keep(effect)

    def damage(self, place: int) -> None:
        """An object of one of its tiers lies from now on, or is gone."""
        list(self.disks.values())[place % len(self.disks)].damage(place)

    @override
    def order_storage(self, order: effects.StorageOrder) -> None:
        if self.storage is not None:
            self.storage.order(order)

    @override
    def restart_storage(self, why: str) -> None:
        # As with the transfer process: once the effects of the running step are carried out.
        old = self.storage
        if old is not None and old.is_alive:
            self.world.agenda.after(0.0, self._replace_storage, old, why)

    def _replace_storage(self, old: SimStorageProcess, why: str) -> None:
        if self.storage is not old or not old.is_alive:
            return
        agenda = self.world.agenda
        if self.asleep_until_s > agenda.now_s:
            agenda.at(self.asleep_until_s, self._replace_storage, old, why)
            return
        old.die()
        self.feed(inputs.StorageGone(agenda.now_s, old.generation, why))
        self.storage = SimStorageProcess(self, self.disks, old.generation + 1)

    # ---- inputs ------------------------------------------------------------------------------

    def feed(self, happened: Input) -> None:
        """One input to the node; its effects are carried out."""
        world = self.world
        world.steps += 1
        world.recent.append((self.name, happened))
        if world.profile.rests and not is_still(happened):
            self._stir()
        step = self.node.step(happened)
        if step.events:
            seq = self._seq
            for event in step.events:
                seq += 1
                if event.seq != seq:
                    raise Violated(f"I8: {self.name}: event {event.seq} where {seq} was due")
            self._seq = seq
            self._check_balance()
            world.watch(self, step)
        elif step.effects:
            world.watch(self, step)
        for effect in step.effects:
            self.perform(effect)
        if self.router is not None:
            self.router.agree(self.node)

    def tick(self, life: int, number: int) -> None:
        """Time passes, unless the node is down or suspended."""
        if self.life != life or not self.is_up or self._n_ticks != number:
            return
        agenda = self.world.agenda
        if self.asleep_until_s <= agenda.now_s:
            self.feed(inputs.Tick(agenda.now_s))
            if self.router is not None and self.world.rng.random() < GAPS:
                self.feed(inputs.BlocksMissed(agenda.now_s))
            # At rest there is nothing that the sweep before has not seen.
            has_news = self._is_stirred or not self.world.profile.rests
            if has_news and self.world.rng.random() < SWEEPS:
                self._sweep()
            self._tick_after(self._until_tick_s())
        else:
            agenda.at(self.asleep_until_s, self.tick, life, number)

    def _tick_after(self, wait_s: float) -> None:
        """The next tick comes then, and none before it."""
        self._n_ticks += 1
        self._tick_s = self.world.agenda.now_s + wait_s
        self.world.agenda.after(wait_s, self.tick, self.life, self._n_ticks)

    def _until_tick_s(self) -> float:
        """As ``kvd.daemon.beats`` has it, where daemons rest."""
        was_stirred, self._is_stirred = self._is_stirred, False
        if was_stirred or not self.world.profile.rests:
            return TICK_S
        dues, now_s = tick_dues(self.node), self.world.agenda.now_s
        if not dues:
            return TICK_S
        return max(TICK_S, next_tick_s(now_s, [*dues, now_s + REST_S]) - now_s)

    def _stir(self) -> None:
        self._is_stirred = True
        if self._tick_s > self.world.agenda.now_s + TICK_S:
            self._tick_after(TICK_S)

    def _sweep(self) -> None:
        """A turn of the standing audit; no step of the protocol, so it is not counted as one."""
        step = self.node.step(inputs.AuditTurn(self.world.agenda.now_s, SWEEP_WORK))
        audit = self.node.audit
        if step.events or audit.refuted:
            found = "; ".join(
                f"{finding.rule}: {finding.what}" for finding in audit.findings.states()
            )
            raise Violated(f"{self.name}: the standing audit: {found or 'a page moves unnoted'}")

    def hear(self, life: int, link: str, message: Message) -> None:
        """A message of a peer arrives for the process that it was sent to."""
        if self.life != life or not self.is_up:
            return
        now_s = self.world.agenda.now_s
        if self.asleep_until_s > now_s:
            self.world.agenda.at(self.asleep_until_s, self.hear, life, link, message)
        else:
            self.feed(inputs.FromPeer(now_s, link, message))

    def ask(self, request: AdminRequest) -> None:
        """An operator asks for something."""
        self.feed(inputs.FromOperator(self.world.agenda.now_s, b"operator", request))

    # ---- effects -----------------------------------------------------------------------------

    @override
    def tell_engine(self, effect: effects.AnswerEngine) -> None:
        session = self.session
        if effect.session == session.id and session.is_alive:
            session.heard(effect.message)

    @override
    def perform_other(self, effect: effects.Effect) -> None:
        if isinstance(effect, effects.ReadyToStop):
            # When this step is over: the process ends with all that it was told to do done.
            self.world.agenda.after(0.0, self._stopped, self.life)
            return
        if self.router is not None and isinstance(effect, effects.BlockEvent):
            self.router.hear(effect)
            return
        if not isinstance(effect, effects.AnswerWorker):
            super().perform_other(effect)
            return
        worker = self.workers.get(effect.worker)
        if worker is not None:
            worker.heard(effect)

    @override
    def tell_operator(self, effect: effects.AnswerOperator) -> None:
        """Operators only look."""

    @override
    def send_message(self, effect: effects.SendToPeer) -> None:
        message = effect.message
        if type(message) is Offer and message.handoff not in self.grants:
            self._grant(message)
        self.world.network.send(self, effect.link, message)

    @override
    def order(self, order: effects.TransferOrder) -> None:
        self.transfer.order(order)

    def _grant(self, offer: Offer) -> None:
        """Remember which lease the pages of an Offer belong to: a check of every write."""
        lease = self.lease_of(offer)
        for grant in offer.grants:
            own = set(page_ids(self.own_pages(lease, grant.component)))
            require(
                own.issuperset(page_ids(Pages(grant.pages))),
                f"{self.name}: handoff {offer.handoff} grants pages of {grant.component} "
                "that its lease lacks",
            )
        self.grants[offer.handoff] = lease.id

    # ---- pages -------------------------------------------------------------------------------

    def check(self, pages: list[int], contents: list[int], n_tokens: int, what: str) -> None:
        """The pages hold exactly these contents, which stand for so many tokens.

        Raises:
            Violated: One does not.
        """
        wrong = self.memory.wrong(pages, contents, n_tokens)
        if wrong:
            raise Violated(f"{self.name}: {what}: {wrong}")

    def check_beside(self, name: str, pages: list[int], contents: list[int], what: str) -> None:
        """The same of a component with pages of its own."""
        wrong = self.memory.wrong_beside(name, pages, contents)
        if wrong:
            raise Violated(f"{self.name}: {what}: {wrong}")

    # ---- checks ------------------------------------------------------------------------------

    def _check_balance(self) -> None:
        """Free + cached + held is the pool, whenever one of them has changed."""
        table = self.node.leases
        for pool in pools_of(table)[1:]:
            if is_uncounted(pool):
                raise Violated(f"I1: {self.name}: pages of {pool.component} do not add up")
        free, cached = table.pool.free_pages, table.tree.cached_pages
        if (free, cached) == self._balance:
            return
        self._balance = (free, cached)
        held = 0
        for lease in table.leases.values():
            held += lease.held_pages
        if free + cached + held != table.capacity_pages:
            raise Violated(
                f"I1: {self.name}: {free} free + {cached} cached + {held} held is not "
                f"{table.capacity_pages}"
            )

    def audit(self) -> None:
        """Everything that must be true between two steps, the content of the tree included.

        Raises:
            Violated: Something is not.
        """
        found = violations(self.node)
        if found:
            raise Violated(f"{self.name}: {'; '.join(found)}")
        self._audit_copies()
        self._audit_ways()
        tree = self.node.leases.tree
        of = self.world.contents.of
        for node in tree.nodes():
            units = self.memory.units(page_ids(node.pages))
            contents = of(tree.path_tokens(node), node.namespace)[-len(units) :]
            what = f"cached {node.describe()}"
            self.check(units, contents, count(node.edge), what)
            for keeper in self.node.leases.components.each:
                # A window is as long as the node, a snapshot stands for the end of it.
                pages = page_ids(keeper.pages_at(node))
                dues = contents[len(contents) - len(pages) :]
                self.check_beside(keeper.component.name, pages, dues, what)

    def _audit_ways(self) -> None:
        """How bytes travel to a peer is known of the agent that serves, and of no other.

        Raises:
            Violated: It is not.
        """
        peers = self.node.peers
        if not self.transfer.is_alive or peers.generation != self.transfer.generation:
            return
        for peer in peers.by_name.values():
            if peer.agent is Agent.LOADED:
                self.transfer.paths.check(peer)

    def _audit_copies(self) -> None:
        """What engines copy is what the node keeps pages for, and those are nobody else's.

        Raises:
            Violated: It is not, or they are.
        """
        node = self.node
        copies = [
            (worker, copy)
            for worker in self.workers.values()
            for copy in worker.owners
            if copy.is_known
        ]
        known = {(worker.number, copy.call) for worker, copy in copies}
        kept = {(copy.worker, copy.call) for copy in node.engine_copies}
        require(
            known == kept,
            f"{self.name}: copies {sorted(known - kept)} are under way and not kept for, "
            f"{sorted(kept - known)} are over",
        )
        late = {(worker.number, call) for worker in self.workers.values() for call in worker.late}
        told = {(wait.worker, wait.call) for wait in node.engine_copies.marks}
        require(late == told, f"{self.name}: marks {sorted(late ^ told)} are late, or are not")
        for worker, copy in copies:
            worker.check(copy)
        saved = {page: copy.lease for _, copy in copies if copy.upto_tokens for page in copy.pages}
        if not saved:
            return
        others = set(page_ids(node.leases.pool.free_ids()))
        for cached in node.leases.tree.nodes():
            others.update(page_ids(cached.pages))
        wrong = sorted(others & saved.keys())
        require(not wrong, f"{self.name}: pages {wrong} are free or cached under a save")
        for lease in node.leases.leases.values():
            wrong = [page for page in page_ids(lease.held) if saved.get(page, lease.id) != lease.id]
            require(not wrong, f"{self.name}: lease {lease.id} has {wrong}, which others save")
