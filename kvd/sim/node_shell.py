"""What surrounds a node in memory: who performs its effects, and where bytes may land.

The simulator plays the daemon and its transfer process in its own time and at random; the tests of
the core play both step by step, as a test says. What must not differ between the two is here: that
no effect is forgotten, whose pages a peer may write, and what a process waits for before it says
that it is quiet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvd.core import effects
from kvd.core.layout.spec import companion_factor, companion_pages
from kvd.sim.violation import Violated
from kvd.types import Incarnation, Pages, page_ids

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.node import NodeState
    from kvd.wire.peer import Offer


class Stream:
    """One connection of a sending agent, as both of its ends know it.

    ``left``: what was sent and has not all arrived yet, in order; what it is, the two worlds say.
    """

    def __init__(self, name: str, to: InboundStreams) -> None:
        self.name = name
        self.to = to
        # Any: each world has flights of its own.
        self.left: list[Any] = []


class InboundQuestion:
    """An order to say Quiet that is not carried out yet; ``ends``: what must end before."""

    def __init__(self, lease: int, ends: set[str]) -> None:
        self.lease = lease
        self.ends = ends


class InboundStreams:
    """The connections into one transfer process, and who waits for their ends. No time passes."""

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        """Those that have not ended here."""
        self.questions: list[InboundQuestion] = []

    def waits_for(self, question: InboundQuestion) -> None:
        """A question is new, or waits for less than before; for nothing: it can be answered."""
        raise NotImplementedError

    def over(self, stream: Stream) -> None:
        """Its sender sends no more: what it has left arrives, and then its ``end``."""
        raise NotImplementedError

    def connect(self, name: str) -> Stream:
        """A sending agent has made a connection to us."""
        stream = self.streams[name] = Stream(name, self)
        return stream

    def look(self, order: effects.Quiesce) -> None:
        """Wait for the connections that there are now, if what they carry is in doubt."""
        ends = set(self.streams) if order.doubt is effects.Doubt.SENT else set()
        question = InboundQuestion(order.lease, ends)
        self.questions.append(question)
        self.waits_for(question)

    def exempt(self, order: effects.Exempt) -> None:
        """These are of living writers."""
        for question in [question for question in self.questions if question.lease in order.leases]:
            if question.ends & set(order.streams):
                question.ends -= set(order.streams)
                self.waits_for(question)

    def end(self, stream: Stream) -> None:
        """What it had left has arrived, and nothing follows."""
        del self.streams[stream.name]
        for question in [question for question in self.questions if stream.name in question.ends]:
            question.ends.discard(stream.name)
            self.waits_for(question)


class NodeShell:
    """The daemon of a node in memory: each effect of a step goes to whoever performs it."""

    name: str
    node: NodeState

    def perform(self, effect: effects.Effect) -> None:
        """Carry out one effect.

        Raises:
            Violated: nobody here knows it.
        """
        match effect:
            case effects.AnswerEngine():
                self.tell_engine(effect)
            case effects.AnswerOperator():
                self.tell_operator(effect)
            case effects.SendToPeer():
                self.send_message(effect)
            case effects.HangUpLink():
                pass  # here a link costs nothing, and whoever is left says goodbye
            case effects.RestartTransfer():
                self.restart_transfer(effect.why)
            case effects.KeepEpochs():
                self.keep_epochs(effect)
            case (
                effects.LoadAgent()
                | effects.DropAgent()
                | effects.Post()
                | effects.Forget()
                | effects.Verify()
                | effects.SumLanded()
                | effects.ForgetSums()
                | effects.Quiesce()
                | effects.Exempt()
                | effects.Copy()
            ):
                self.order(effect)
            case (
                effects.Demote()
                | effects.Promote()
                | effects.DropObjects()
                | effects.AgeObjects()
                | effects.DropNamespace()
                | effects.ProbeTier()
                | effects.PaceWrites()
            ):
                self.order_storage(effect)
            case effects.RestartStorage():
                self.restart_storage(effect.why)
            case _:
                self.perform_other(effect)

    def tell_engine(self, effect: effects.AnswerEngine) -> None:
        """Deliver an answer or a push to the engine of that session."""
        raise NotImplementedError

    def tell_operator(self, effect: effects.AnswerOperator) -> None:
        """An operator is told."""
        raise NotImplementedError

    def send_message(self, effect: effects.SendToPeer) -> None:
        """A message goes out on a link."""
        raise NotImplementedError

    def restart_transfer(self, why: str) -> None:
        """A fence; carried out once the effects of the running step are."""
        raise NotImplementedError

    def keep_epochs(self, effect: effects.KeepEpochs) -> None:
        """Have the next life of this node begin with these; in this world no disk is slow or full.

        Raises:
            Violated: no node here has epochs.
        """
        raise Violated(f"{self.name}: this world has no epochs: {effect}")

    def order(self, order: effects.TransferOrder) -> None:
        """For the transfer process that serves now."""
        raise NotImplementedError

    def order_storage(self, order: effects.StorageOrder) -> None:
        """For the storage process that serves now.

        Raises:
            Violated: no node here has tiers.
        """
        raise Violated(f"{self.name}: this world has no tiers: {order}")

    def restart_storage(self, why: str) -> None:
        """Kill it and begin another; carried out once the effects of the running step are.

        Raises:
            Violated: no node here has tiers.
        """
        raise Violated(f"{self.name}: this world has no tiers, and is to restart storage: {why}")

    def perform_other(self, effect: effects.Effect) -> None:
        """Of journal, audit, KV events or stop: whoever has none of these sees none of them."""
        raise Violated(
            f"{self.name}: this shell does not know the effect {type(effect).__name__}: add a case "
            "to kvd.sim.node_shell"
        )

    # ---- whose pages -------------------------------------------------------------------------

    def lease_of(self, offer: Offer) -> LeaseRecord:
        """The lease whose pages an Offer of this node grants.

        Raises:
            Violated: it is of no part.
        """
        for part in self.node.decoder.open.parts.values():
            if part.handoff == offer.handoff and part.lease is not None:
                return part.lease
        raise Violated(f"{self.name}: Offer {offer.handoff} of no part")

    def own_pages(self, lease: LeaseRecord, component: str) -> Pages:
        """The pages of a component that are this lease's and nobody else's."""
        keeper = self.node.leases.components.named(component)
        if keeper is not None:
            return keeper.own_pages(lease)
        spec = self.node.settings.spec
        factor = companion_factor(spec, spec.components[spec.index(component)])
        return companion_pages(lease.held, factor)

    def check_landing(self, handoff: int, lease_id: int, component: str, pages: list[int]) -> None:
        """Bytes of a handoff land on these pages: its lease must hold them, now, uncommitted.

        This is the safety of the whole protocol: no page changes hands while a remote write to it
        may still land.

        Raises:
            Violated: They are somebody else's, or nobody's, or committed.
        """
        lease = self.node.leases.leases.get(lease_id)
        what = f"{self.name}: {pages} of {component} of handoff {handoff}"
        if lease is None:
            raise Violated(f"{what} written after their lease ended")
        if lease.id in self.node.decoder.open.ready:
            raise Violated(f"{self.name}: handoff {handoff} is committed, and written again")
        held = page_ids(self.own_pages(lease, component))
        if not set(held).issuperset(pages):
            raise Violated(f"{what} not held by it: {held}")


def incarnation(name: str, life: int) -> Incarnation:
    """Of the ``life``-th process of a node, readable in a failure."""
    return Incarnation(f"{life:016x}{name.encode().hex()}".ljust(32, "0"))
