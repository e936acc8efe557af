"""One simulated host: a real node, its transfer process, its engines, and what its pages hold.

Every input goes through ``feed``; what is cheap is checked there after each step: event numbers
(I8), that pages add up (the heart of I1), that no request is answered twice. The whole list of
invariants is ``audit``, which the world calls now and then; the standing audit has its turn at
some ticks, and must find nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvd.core import effects, inputs
from kvd.core.audit import component_rules
from kvd.core.audit.invariants import violations
from kvd.core.layout.spec import companion_pages
from kvd.sim.memory import Memory
from kvd.sim.mover import Mover
from kvd.sim.session import Session
from kvd.sim.violation import Violated, require
from kvd.types import Incarnation, Pages, count, page_ids
from kvd.wire.peer import Offer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.cache.lease import Lease
    from kvd.core.inputs import Input
    from kvd.core.node import Node
    from kvd.core.settings import Settings
    from kvd.sim.world import World
    from kvd.wire.admin import AdminRequest
    from kvd.wire.peer import Message

TICK_S = 0.05
"""As often as the daemon ticks."""

SWEEPS, SWEEP_WORK = 0.2, 40
"""Share of ticks with a turn of the standing audit, and so little work at each that every sweep is
cut in the middle of its phases."""


class Host:
    """One node, over all its lives."""

    def __init__(self, world: World, settings: Settings) -> None:
        self.world = world
        self.name = settings.name
        self.settings = settings
        self.dials: list[Host] = []
        self.links: dict[str, tuple[Host, str]] = {}
        """Where each link leads, and what it is called there."""
        self.life = 0
        self.is_up = False
        self.asleep_until_s = 0.0
        self.node: Node
        self.mover: Mover
        self.session: Session
        self.memory: Memory
        self.grants: dict[int, int] = {}
        """Lease of every handoff that was offered in this life."""
        self._n_sessions = 0
        self._seq = 0
        self._balance = (-1, -1)
        # Any: each effect goes to a function that takes its type.
        self._perform: dict[type, Callable[[Any], None]] = {
            effects.AnswerEngine: self._answer,
            effects.AnswerOperator: self._report,
            effects.SendToPeer: self._send,
            effects.LoadAgent: self._load_agent,
            effects.DropAgent: self._drop_agent,
            effects.Post: self._post,
            effects.Forget: lambda _: None,  # no engine here names events
            effects.Verify: lambda effect: self.mover.verify(effect),  # noqa: PLW0108 - the mover changes
            effects.Quiesce: self._quiesce,
            effects.Exempt: self._exempt,
            effects.Copy: self._copy,
            effects.RestartTransfer: lambda effect: self.restart_transfer(effect.why),
        }

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
        self.memory = Memory(self.settings.spec, world.contents)
        self.grants = {}
        self._seq = 0
        self._balance = (-1, -1)
        self._n_sessions = 0
        self.attach()
        self.mover = Mover(self, 1)
        self.mover.start("start")
        world.agenda.after(TICK_S * world.rng.random(), self.tick, self.life)

    def dial(self) -> None:
        """Tell the node of the peers that it is configured with."""
        for other in self.dials:
            self.world.network.connect(self, other)
            self.feed(
                inputs.LinkDialed(
                    self.world.agenda.now_s, f"out:{other.name}", other.name, f"tcp://{other.name}"
                )
            )

    def crash(self) -> None:
        """The daemon dies with its engines and its transfer process."""
        self.is_up = False
        self.session.die()
        self.mover.die()

    def attach(self) -> None:
        """An engine opens a session."""
        self._n_sessions += 1
        self.session = Session(self, self._n_sessions)
        now_s = self.world.agenda.now_s
        self.feed(inputs.ClientJoined(now_s, self._n_sessions, f"engine of {self.name}", 1000))

    def hang_up(self) -> None:
        """The engine dies, and the daemon sees it."""
        session = self.session
        session.die()
        self.feed(inputs.ClientHungUp(self.world.agenda.now_s, session.id))
        for lease in self.node.leases.leases.values():
            if lease.session == session.id and "engine" in lease.holders:
                raise Violated(f"{self.name}: lease {lease.id} outlives its session {session.id}")

    def restart_transfer(self, why: str) -> None:
        """Kill and reap the transfer process, then start the next generation."""
        old = self.mover
        if not old.is_alive:
            return  # it is being replaced already
        # An order comes in the middle of a step's effects: carried out when that step is over.
        self.world.agenda.after(0.0, self._replace_transfer, old, why)

    def _replace_transfer(self, old: Mover, why: str) -> None:
        if self.mover is not old or not old.is_alive:
            return
        old.die()
        self.feed(inputs.TransferGone(self.world.agenda.now_s, why))
        self.world.agenda.after(
            0.02 + 0.3 * self.world.rng.random(), self._revive, old, self.life, why
        )

    def _revive(self, old: Mover, life: int, why: str) -> None:
        if self.life == life and self.is_up and self.mover is old:
            self.mover = Mover(self, old.generation + 1)
            self.mover.start(why)

    # ---- inputs ------------------------------------------------------------------------------

    def feed(self, happened: Input) -> None:
        """One input to the node; its effects are carried out."""
        world = self.world
        world.steps += 1
        world.recent.append((self.name, happened))
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
        perform = self._perform
        for effect in step.effects:
            carry_out = perform.get(type(effect))
            if carry_out is None:
                raise Violated(
                    f"the simulator does not know the effect {type(effect).__name__}: add a row to "
                    "the table of kvd.sim.host"
                )
            carry_out(effect)

    def tick(self, life: int) -> None:
        """Time passes, unless the node is down or suspended."""
        if self.life != life or not self.is_up:
            return
        agenda = self.world.agenda
        if self.asleep_until_s <= agenda.now_s:
            self.feed(inputs.Tick(agenda.now_s))
            if self.world.rng.random() < SWEEPS:
                self._sweep()
            agenda.after(TICK_S, self.tick, life)
        else:
            agenda.at(self.asleep_until_s, self.tick, life)

    def _sweep(self) -> None:
        """A turn of the standing audit; no step of the protocol, so it is not counted as one."""
        step = self.node.step(inputs.AuditTurn(self.world.agenda.now_s, SWEEP_WORK))
        audit = self.node.audit
        if step.events or audit.refuted:
            found = "; ".join(f"{one.rule}: {one.what}" for one in audit.findings.states())
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

    def _answer(self, effect: effects.AnswerEngine) -> None:
        session = self.session
        if effect.session == session.id and session.is_alive:
            session.heard(effect.message)

    def _report(self, _: effects.AnswerOperator) -> None:
        """Operators only look."""

    def _send(self, effect: effects.SendToPeer) -> None:
        message = effect.message
        if type(message) is Offer and message.handoff not in self.grants:
            self._grant(message)
        self.world.network.send(self, effect.link, message)

    # Each looks for the transfer process that serves now: they come and go.

    def _load_agent(self, effect: effects.LoadAgent) -> None:
        self.mover.load(effect)

    def _drop_agent(self, effect: effects.DropAgent) -> None:
        self.mover.drop(effect.incarnation, effect.generation)

    def _post(self, effect: effects.Post) -> None:
        self.mover.post(effect)

    def _quiesce(self, effect: effects.Quiesce) -> None:
        self.mover.inbound.quiesce(effect)

    def _exempt(self, effect: effects.Exempt) -> None:
        self.mover.inbound.exempt(effect)

    def _copy(self, effect: effects.Copy) -> None:
        self.mover.copy(effect)

    def _grant(self, offer: Offer) -> None:
        """Remember which lease the pages of an Offer belong to: a check of every write."""
        for part in self.node.decoder.parts.values():
            if part.handoff == offer.handoff and part.lease is not None:
                for grant in offer.grants:
                    own = set(page_ids(self.own_pages(part.lease, grant.component)))
                    require(
                        own.issuperset(page_ids(Pages(grant.pages))),
                        f"{self.name}: handoff {offer.handoff} grants pages of {grant.component} "
                        "that its lease lacks",
                    )
                self.grants[offer.handoff] = part.lease.id
                return
        raise Violated(f"{self.name}: Offer {offer.handoff} of no part")

    def own_pages(self, lease: Lease, component: str) -> Pages:
        """The pages of a component that are this lease's and nobody else's."""
        keeper = self.node.leases.components.named(component)
        if keeper is not None:
            return keeper.own_pages(lease)
        for name, factor, _ in self.memory.kinds.companions:
            if name == component:
                return companion_pages(lease.held, factor)
        return lease.held

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

    def receive(self, handoff: int, component: str, pages: list[int]) -> None:
        """Bytes of a handoff land on these pages: they must be granted to it, now.

        Raises:
            Violated: They are somebody else's, or nobody's, or committed.
        """
        lease = self.node.leases.leases.get(self.grants[handoff])
        require(lease, f"{self.name}: {pages} of handoff {handoff} written after their lease ended")
        assert lease is not None
        if lease.id in self.node.decoder.ready:
            raise Violated(f"{self.name}: handoff {handoff} is committed, and written again")
        held = page_ids(self.own_pages(lease, component))
        if not set(held).issuperset(pages):
            raise Violated(
                f"{self.name}: {pages} of {component} of handoff {handoff} not held by it: {held}"
            )

    # ---- checks ------------------------------------------------------------------------------

    def _check_balance(self) -> None:
        """Free + cached + held is the pool, whenever one of them has changed."""
        table = self.node.leases
        for keeper in table.components.each:
            if component_rules.is_uncounted(keeper):
                raise Violated(f"I1: {self.name}: pages of {keeper.component.name} do not add up")
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


def incarnation(name: str, life: int) -> Incarnation:
    """Of the ``life``-th process of a node, readable in a failure."""
    return Incarnation(f"{life:016x}{name.encode().hex()}".ljust(32, "0"))
