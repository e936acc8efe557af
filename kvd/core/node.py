"""One node: the only place where an input becomes effects and events.

``Node.step`` is the single mutator. It never awaits, logs, reads a clock, draws a number or touches
memory; the same inputs give the same outputs and the same state, so a recorded input log replays.
This file routes; the parts are in ``node_parts``. What a message does is in ``engines`` (requests
of engines), ``operators`` (requests of operators), and in the rooms: ``handoff``, ``peers``,
``leases``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import structs
from mypy_extensions import mypyc_attr

from kvd.core import inputs as i
from kvd.core.audit.invariants import faults
from kvd.core.engines.engines import Engines
from kvd.core.leases.admission import OWN_TRANSFER
from kvd.core.node_parts import NodeParts
from kvd.core.operators import Operators
from kvd.core.peers.hello import impostor
from kvd.core.peers.peer import Life
from kvd.errors import Code, Refusal
from kvd.types import short
from kvd.wire import events
from kvd.wire.peer import (
    Abort,
    Accept,
    AskPrefix,
    AskStory,
    Closed,
    Hello,
    Offer,
    Ping,
    PrefixFound,
    Progress,
    Reject,
    Settled,
    Story,
    Withdrawn,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.effects import Step
    from kvd.core.peers.peer import Peer
    from kvd.core.settings import Settings
    from kvd.wire.peer import Message


@mypyc_attr(allow_interpreted_subclasses=True)
class NodeState(NodeParts):
    """The state of one daemon, and its one verb."""

    def __init__(self, settings: Settings, at_s: float) -> None:
        super().__init__(settings, at_s)
        self.engines = Engines(self)
        self.operators = Operators(self)
        # Last: the handlers are methods of what was made above.
        self._handlers = self._input_handlers()
        self._from_peers = self._peer_handlers()

    def _input_handlers(self) -> dict[type, Callable[[Any], None]]:
        """One handler per input type: Any, because each takes its own type of input."""
        return {
            i.FromClient: self.engines.request,
            i.FromWorker: self.engines.worker_said,
            i.WorkerCopies: self.engines.worker_copies,
            i.WorkerGone: self._worker_gone,
            i.SessionWhole: self.sessions.became_whole,
            i.RankLeft: self.sessions.rank_left,
            i.ClientJoined: self.owners.sessions.joined,
            i.ClientHungUp: self.sessions.hung_up,
            i.ProcessesNow: self.owners.sessions.kept_by,
            i.HungUpOn: self.sessions.hung_up_on,
            i.ClientCameBack: self.sessions.returned,
            i.PoolAdopted: self._pool_adopted,
            i.EpochsFound: self._epochs_found,
            i.EpochsKept: self.kept_answers.written,
            i.FromOperator: self.operators.request,
            i.StopAsked: self.drainer.stop_node,
            i.FromPeer: self._from_peer,
            i.Unreadable: self._unreadable,
            i.LinkDialed: self.peers.dial_link,
            i.HandshakeFailed: self.peers.handshake_failed,
            i.TransferReady: self._transfer_ready,
            i.TransferGone: self._transfer_gone,
            i.AgentLoaded: self.transfers.agent_loaded,
            i.PathFound: self.transfers.path_found,
            i.MemoryPinned: self.ways.memory_pinned,
            i.AgentFailed: self.transfers.agent_failed,
            i.AgentDropped: self.transfers.agent_dropped,
            i.PostMoved: self.transfers.post_moved,
            i.PostDone: self.transfers.post_done,
            i.PostFailed: self.transfers.post_failed,
            i.Unposted: self.transfers.unposted,
            i.Verified: self.decoder.verified,
            i.LandedGood: self.decoder.arriving.verified,
            i.Quiet: self.decoder.quarantines.quiet,
            i.Awaiting: self.decoder.quarantines.awaiting,
            i.Copied: self.copies.copied,
            i.CopyFailed: self.copies.copy_failed,
            i.TierFound: self.tiers.found,
            i.TierReady: self.tiers.ready,
            i.Demoted: self.tiers.demoted,
            i.Promoted: self.tiers.promoted,
            i.TierProbed: self.tiers.probed,
            i.StorageGone: self.tiers.gone,
            i.Tick: self._tick,
            i.AuditTurn: self.audit.turn,
            i.CheckedAll: self._checked_all,
            i.Recalled: self.audit.recalled,
            i.RecorderSaid: self.recorded.said,
            i.RecorderSaved: self.recorded.saved,
            i.BlocksMissed: self._blocks_missed,
            i.KvEventsSaid: self._kv_events_said,
            i.Reconfigured: self._reconfigured,
            i.ReloadRefused: self._reload_refused,
        }

    def _peer_handlers(self) -> dict[type, Callable[[Any, Any], None]]:
        """One handler per message of a peer."""
        return {
            Offer: self._offered,
            Abort: self.offers.aborted,
            Withdrawn: self._withdrawn,
            Closed: self.offers.closed,
            Accept: self.decoder.accepted,
            Progress: self.decoder.progressed,
            Settled: self.decoder.settled,
            Ping: self._pinged,
            Reject: self._rejected,
            AskStory: self.inquiries.asked,
            Story: self.inquiries.told,
            AskPrefix: self._prefix_asked,
            PrefixFound: self.pulls.prefix_found,
        }

    def _checked_all(self, _: i.CheckedAll) -> None:
        self.audit.looked_at_all(faults(self))

    def step(self, happened: i.Input) -> Step:
        """Apply one input; carry out the effects in order, then publish the events."""
        self.steps += 1
        out = self.out
        out.at_s = self.leases.tree.at = happened.at_s
        if type(happened) is i.FromClient:
            self.engines.request(happened)
        else:
            self._handlers[type(happened)](happened)
        # After every input, whatever it was: who frees a page need not think of who waits for it,
        # and only what is left then says whether a drain is over. Asked here what each of the two
        # asks first, because it is nearly always so.
        if self.admission.line:
            self.admission.pump()
        if self.leases.giving_way.gone:
            self.pins.end_given_way(self.leases.giving_way.gone)
            self.prefiller.end_given_way()
        if self.drainer.drain is not None:
            self.drainer.end_if_over()
        if self.misgiven:
            self.audit.caught(self.misgiven)
        # Last: what this step has ordered of a tier makes way too.
        if self.tiers.each and self._handoffs_move():
            self.tiers.give_way()
        return out.drain()

    def _handoffs_move(self) -> bool:
        """Whether bytes of handoffs are under way, from here or to here."""
        return self.prefiller.posts.is_moving or self.decoder.is_moving

    def _pool_adopted(self, got: i.PoolAdopted) -> None:
        self.former_leases.take_over(got)
        epochs, roots = self.epochs, self.leases.tree.roots
        if epochs.learn(roots):
            self.kept_answers.write()
        # Nobody asks for them any more, and nobody should wait until they are the oldest.
        over = epochs.over(roots)
        if over:
            self.tiers.end_epochs(over)

    def _epochs_found(self, got: i.EpochsFound) -> None:
        self.epochs.found(got)
        self.flushes.found(got.flushes, got.at_s)
        self.kept_answers.found(got)

    def _unreadable(self, got: i.Unreadable) -> None:
        self.refused += 1
        self.out.emit(
            events.MessageRefused(
                socket=got.socket,
                sender=got.sender,
                code=got.refusal.code.value,
                why=got.refusal.message,
            )
        )

    def _blocks_missed(self, _: i.BlocksMissed) -> None:
        if self.announcer is not None:
            self.announcer.tell_all()

    def _kv_events_said(self, got: i.KvEventsSaid) -> None:
        if self.announcer is not None:
            self.announcer.said(got)

    def _reconfigured(self, got: i.Reconfigured) -> None:
        """New figures: for the next Hello, and for the queue as it is now.

        Every other figure of ``settings`` stays as it was when the node was made.
        """
        self.peers.allow(got.allow)
        self.pull_source.end_unreadable(self.peers)
        self.admission.retune(max_queue=got.max_queue, overtakers=got.overtakers)
        self.leases.evictor.set_quotas(self.settings.policy, got.quotas)
        self.tiers.set_quotas(got.disk_quotas, got.store_quotas)
        self.out.emit(events.ConfigReloaded(changed=got.changed, needs_restart=got.needs_restart))

    def _reload_refused(self, got: i.ReloadRefused) -> None:
        self.out.emit(events.ConfigRefused(errors=got.errors))

    # ---- peers -------------------------------------------------------------------------------

    def _from_peer(self, got: i.FromPeer) -> None:
        # After the goodbye nobody listens: an answer would tell the peer that this node lives.
        if self.drainer.has_left:
            return
        message = got.message
        # Before the message is looked at: who speaks as another one must not even be heard as
        # alive.
        refusal = impostor(message, got.proven, self.peers, self.settings)
        if refusal is not None:
            self.refused += 1
            if not isinstance(message, Reject):  # which is never answered
                self.peers.reject(got.link, message.source, refusal)
            return
        if isinstance(message, Hello):
            self._hello(got.link, message)
            return
        # Asked before ``sender``, which makes it UP again: who waited for it must be woken.
        lost = self.peers.is_lost(message.source)
        peer = self.peers.sender(got.link, message)
        if peer is None:
            if not self.peers.is_answer(got.link, message):
                self._out_of_place(got.link, message)
            return
        if lost:
            self.admission.changed(peer.name)
        self._from_peers[type(message)](peer, message)

    def _out_of_place(self, link: str, message: Message) -> None:
        """Count a message of, or for, a process that is not, or no longer, what it says."""
        self.refused += 1
        kind, source = type(message).__name__, short(message.source)
        code, why = Code.PEER_STALE, f"{kind} of {source} is for another life of this node"
        if message.source not in self.peers.by_incarnation:
            code, why = Code.PEER_UNKNOWN, f"{kind} of {source}, which has not said Hello"
        self.peers.complaints.tell(link, message.source, code, why, what=kind)

    def _hello(self, link: str, message: Hello) -> None:
        # Read before the Hello is taken, which overwrites it.
        known = self.peers.by_incarnation.get(message.source)
        generation = known.generation if known else 0
        was_up = known is not None and known.life is Life.UP
        taken = self.peers.take_hello(link, message)
        if taken is None:
            self.refused += 1
            return
        peer, gone = taken
        # The life before this one is over, so nothing of it writes any more. That is settled before
        # anybody is admitted: a waiting receive may go to the same peer.
        if gone:
            self.decoder.writer_gone(gone)
            self.pull_source.outlived(gone)
            self.prefiller.outlived(gone)
            self.pulls.outlived(peer.name)
        elif peer.generation > generation > 0:
            self.transfers.generation_changed(peer)
        self.drainer.greet(peer)
        address = self.peers.named(link)
        if address:
            self.receives.rename(address, peer.name)
            self.pulls.rename(address, peer.name)
            self.admission.changed(address)
        # A Hello that says nothing new wakes nobody: it may be repeated at any rate, and there may
        # be a thousand who wait.
        if not was_up or peer.generation > generation:
            self.admission.changed(peer.name)

    def _offered(self, peer: Any, message: Offer) -> None:
        refusal = self.peers.unlisted(peer.name) or self.drainer.refusal()
        self.offers.offered(peer, message, refusal)

    def _prefix_asked(self, peer: Any, message: AskPrefix) -> None:
        # Before it is looked up whether it was answered before: an answer of another epoch must
        # not be repeated in this one.
        namespace, epoch = message.namespace, message.epoch
        key = self.peers.not_to_read(peer.name, namespace) or self.epochs.key_for_peer(
            peer.name, namespace, epoch
        )
        if isinstance(key, Refusal):
            self.peers.note_epochs(peer, key)
            mine = self.settings.incarnation
            told = PrefixFound(mine, peer.incarnation, ask=message.ask, refusal=key)
            self.out.send(peer.link, told)
            return
        self.peers.in_one_epoch(peer, key)
        named = structs.replace(message, namespace=key)
        self.pull_source.prefix_asked(peer, named, self.drainer.refusal())

    def _withdrawn(self, peer: Any, message: Withdrawn) -> None:
        if message.ask:
            self.pull_source.withdrawn(peer, message.ask)
        else:
            self.offers.withdrawn(peer, message)

    def _pinged(self, peer: Any, message: Ping) -> None:
        self.peers.pulse.heard(peer, message)
        self.drainer.heard(peer, message)
        # After ``pulse.heard``, which takes the floors that these two fold by.
        self.decoder.outcomes.fold_outcomes(peer)
        self.prefiller.settled_sends.fold_tombstones(peer.incarnation, peer.offer_floor)

    def _rejected(self, peer: Any, message: Reject) -> None:
        self.peers.refused_by(peer, message.refusal)

    # ---- processes of engines ----------------------------------------------------------------

    def _worker_gone(self, got: i.WorkerGone) -> None:
        self.engine_copies.gone(got)
        self.admission.wake()

    # ---- the transfer process ----------------------------------------------------------------

    def _transfer_ready(self, got: i.TransferReady) -> None:
        self.transport = got.transport
        self.out.emit(events.TransferStarted(generation=got.generation, why=got.why))
        # First: everything below asks whether a transfer process serves.
        self.peers.announce(got.generation, got.metadata)
        for peer in self.peers.by_name.values():
            self.peers.agents.load(peer)
        self.retractor.transfer_ready()
        self.fetcher.transfer_ready()
        self.decoder.serving()
        self.admission.changed(OWN_TRANSFER)

    def _transfer_gone(self, got: i.TransferGone) -> None:
        # The peers first: from here on ``generation`` is 0, and nobody orders a post or a copy of
        # a process that is not there while those of the dead one are cleared away.
        self.peers.transfer_gone()
        self.ways.gone()
        # Sends before receives and leases: a post that ends gives its read back, and with the last
        # one pages that a commit replaced.
        self.transfers.gone()
        self.copies.transfer_gone()
        self.retractor.transfer_gone()
        self.fetcher.transfer_gone()
        # Last of all: what it frees goes to who waits, and nothing of the dead process may be left
        # to write it.
        self.decoder.fenced()
        self.admission.wake()  # what waits for us and not for memory lets those behind it pass

    # ---- time --------------------------------------------------------------------------------

    def _tick(self, _: i.Tick) -> None:
        # After the goodbye nobody hears a heartbeat, and nothing ends but what tiers still move.
        if self.drainer.has_left:
            self._tick_tiers()
            return
        if self.announcer is not None:
            self.announcer.tick()
        lost = self.peers.age_peers()
        for peer in lost:
            self.decoder.peer_lost(peer)
            self.pull_source.peer_lost(peer)
            self.prefiller.peer_lost(peer)
        if lost:
            self.admission.wake()  # what waits for them lets those behind it pass
        if self.leases.evictor.evictions.fresh:
            self.leases.evictor.settle_evictions()
        self.pins.tick()
        self.admission.expire()
        self.pulls.tick()
        self.decoder.tick()
        self.decoder.quarantines.exempt()
        self.prefiller.tick()
        self.inquiries.tick()
        self.kept_answers.tick()
        self.drainer.tick()
        if self.tiers.each:
            self._tick_tiers()
        if self.peers.pulse.is_due():
            self.decoder.quarantines.fence_if_due()
            for peer in list(self.peers.by_name.values()):
                self._beat(peer)
            self.peers.redial()
            self.peers.hang_up_idle(self._is_used)

    def _tick_tiers(self) -> None:
        self.tiers.tick()
        # Here alone, and not with the last byte: one handoff may follow the other at once.
        if not self._handoffs_move():
            self.tiers.go_on()

    def _beat(self, peer: Peer) -> None:
        if peer.life is not Life.LOST:
            if self.peers.agents.is_overdue(peer):
                self.transfers.no_agent(peer)
            self.peers.agents.retry(peer)
            self.peers.pulse.beat(
                peer,
                self.decoder.open.offer_floor(peer.incarnation),
                self.prefiller.settled_sends.floor(peer),
            )
        # A lost peer gets no Ping: it would not be heard, and its Hello comes first when it is
        # back.
        elif self.peers.is_stale(peer) and not self._is_involved(peer):
            self.prefiller.settled_sends.forget_peer(peer.incarnation)
            self.peers.forget_peer(peer)

    def _is_used(self, name: str) -> bool:
        """Whether anything is open with a node of that name, or waits for it."""
        peer = self.peers.by_name.get(name)
        waits = (
            *[part.peer for part in self.decoder.open.parts.values()],
            *[ask.peer for ask in self.pulls.asks.by_id.values()],
            *[part.awaited.destination for part in self.prefiller.by_send.values()],
        )
        return name in waits or (peer is not None and self._is_involved(peer))

    def _is_involved(self, peer: Peer) -> bool:
        """Whether anything is open with it, or it may still ask how something ended."""
        incarnation = peer.incarnation
        settled_sends = self.prefiller.settled_sends
        return (
            any(
                part.incarnation == incarnation or part.peer == peer.name
                for part in self.decoder.open.parts.values()
            )
            or incarnation in self.decoder.outcomes.kept
            or bool(self.prefiller.parts_offered_by(incarnation))
            or any(part.incarnation == incarnation for part in settled_sends.settled.values())
        )
