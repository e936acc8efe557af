"""Draining: nothing new is begun, what both sides have joined ends, and everybody is told.

``Drainer.drain`` is a value, or None while the node serves. From the step that sets it

- engines are refused new leases, receives and sends, peers new Offers; those who wait, for room,
  for a peer or for an engine, are told so in that step (``draining``, there ``peer-draining``);
- handoffs under way go on, leases may commit, extend, retract, resume and be released;
- peers hear it with a Ping at once, and with every heartbeat until it is over;
- at its deadline what is still under way is given up.

Two ways to end. An operator drains for maintenance: engines keep their leases for as long as they
like, the deadline is for handoffs alone, and ``undrain`` serves again. A stop is a drain whose end
is the end of the process: leases do not delay it. They are released (``drained``), unless the pool
outlives the process: then they stay noted, because their engines may still write there, and the
next daemon waits for those. The last word to every peer is that this node leaves. Where the pool
ends with the process, what is cached is written to the tiers after it (``tiers.at_stop``).

What only a lost peer could end is not waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.core import effects
from kvd.core.handoff.protocol import Prefill
from kvd.core.handoff.rooms import takers_of
from kvd.core.handoff.send import WRITING
from kvd.core.peers.peer import DRAINING, LEAVING, SERVING, Life, PeerDrain, peer_drains
from kvd.errors import Code, Refusal
from kvd.wire import events
from kvd.wire.bounds import MAX_REASON
from kvd.wire.peer import ReceiveOutcome
from kvd.wire.snapshot import DrainState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.core.handoff.parts import ReceivePart, SendPart
    from kvd.core.handoff.receive import Decoder
    from kvd.core.handoff.send import Prefiller
    from kvd.core.inputs import StopAsked
    from kvd.core.leases.admission import Admission, Waiter
    from kvd.core.leases.sessions import Sessions
    from kvd.core.outbox import Outbox
    from kvd.core.peers.peer import Peer
    from kvd.core.peers.registry import Peers
    from kvd.core.settings import Settings
    from kvd.core.tiers.tiers import Tiers
    from kvd.wire.peer import Ping

FOREVER = float("inf")

SETTLE_S = 2.0
"""After its deadline a stop waits so long for the last words about what it has given up."""

WAITING = {Prefill.AWAIT_ENGINE, Prefill.AWAIT_OFFER}
"""A send of which one side is here: it has not begun."""


class Draining(msgspec.Struct, frozen=True):
    """Who wants it and why, since when, until when what is under way may take (FOREVER: always)."""

    who: str
    why: str
    since_s: float
    until_s: float = FOREVER
    is_stop: bool = False
    is_cut: bool = False
    """Its deadline has passed: what was under way was given up."""


class Drainer:
    """Whether this node begins anything new, and which peers do."""

    def __init__(
        self,
        settings: Settings,
        admission: Admission,
        sessions: Sessions,
        peers: Peers,
        decoder: Decoder,
        prefiller: Prefiller,
        tiers: Tiers,
        out: Outbox,
    ) -> None:
        self.drain: Draining | None = None
        self.is_drained = False
        self.has_left = False
        """The process ends: nothing is said to peers any more, and nothing heard."""
        self._is_ready = False
        self.cut = 0
        """Handoffs given up at the deadline."""
        self._settings = settings
        self._name = settings.name
        self._admission = admission
        self._sessions = sessions
        self._peers = peers
        self._decoder = decoder
        self._prefiller = prefiller
        self._tiers = tiers
        self._out = out

    # ---- what is asked -----------------------------------------------------------------------

    def begin_drain(self, who: str, why: str, deadline_s: float) -> None:
        """An operator drains this node; 0: what is under way has all the time that it takes."""
        until_s = self._out.at_s + deadline_s if deadline_s > 0 else FOREVER
        since_s = self._out.at_s if self.drain is None else self.drain.since_s
        self._begin(Draining(who=who, why=why, since_s=since_s, until_s=until_s))

    def stop_node(self, got: StopAsked) -> None:
        """The process ends as soon as it is drained, and soon after the deadline in any case."""
        # A second SIGTERM is no new stop: the first one's deadline stays.
        if self.drain is None or not self.drain.is_stop:
            until_s = self._out.at_s + max(0.0, got.drain_s)
            self._begin(
                Draining(who="", why=got.why, since_s=self._out.at_s, until_s=until_s, is_stop=True)
            )

    def end_drain(self) -> None:
        """Serve again."""
        drain, out = self.drain, self._out
        if drain is not None:
            self.drain, self.is_drained, self.cut = None, False, 0
            self._tell_peers(SERVING, "")
            out.emit(events.DrainEnded(lasted_s=out.at_s - drain.since_s))

    def _begin(self, drain: Draining) -> None:
        # Asked before ``drain`` is set: the event tells what was there when it began.
        waiters, waiting_sends = self.would_refuse()
        receives, sends = self.under_way()
        self.drain, self.is_drained, self.cut = drain, False, 0
        self._out.emit(
            events.DrainBegan(
                who=drain.who,
                why=drain.why,
                receives=len(receives),
                sends=len(sends),
                leases=self._n_engine_leases(),
                refused=len(waiters) + len(waiting_sends),
                deadline_s=drain.until_s - self._out.at_s if drain.until_s < FOREVER else 0.0,
                is_stop=drain.is_stop,
            )
        )
        # In the step that sets ``drain``: from here on nobody can join who would wait for nothing.
        self._refuse(waiters, waiting_sends)
        self._tell_peers(DRAINING, drain.why)
        self.tick()

    def _refuse(self, waiters: list[Waiter], sends: list[SendPart]) -> None:
        refusal = self.refusal()
        assert refusal is not None
        # By the lists that were counted in the event: whoever joins while these are told is not
        # among them.
        self._admission.turn_away(waiters, refusal)
        for send in sends:
            send.outcome = ReceiveOutcome.REFUSED
            self._prefiller.give_up_send(send, refusal)

    # ---- what becomes of it ------------------------------------------------------------------

    def tick(self) -> None:
        """Deadlines."""
        drain = self.drain
        if drain is None or self.is_drained:
            return
        if not drain.is_cut and drain.until_s <= self._out.at_s:
            # Marked before anything is given up, so that no later tick gives it up again.
            self.drain = msgspec.structs.replace(drain, is_cut=True)
            self._cut()
        # A peer that never says Settled or Closed must not keep the process alive.
        if drain.is_stop and drain.until_s + SETTLE_S <= self._out.at_s:
            self._drained()

    def end_if_over(self) -> None:
        """After every step: whether it is drained by now, and may stop."""
        if self.drain is not None and not self.is_drained and self._is_over():
            # Even while parts are under way: their pages are in quarantine in a process that ends,
            # and the next daemon's Hello is the proof for the peers.
            self._drained()
        if self.has_left and not self._is_ready and self._tiers.is_written():
            self._is_ready = True
            self._out.effects.append(effects.ReadyToStop())

    def _is_over(self) -> bool:
        return not (self._admission.queue or any(self._receives()) or any(self._sends()))

    def _cut(self) -> None:
        receives, sends = self.under_way()
        # What was given up before for another reason keeps that reason.
        receives = [part for part in receives if part.ended is None]
        sends = [part for part in sends if part.state in WRITING]
        self.cut += len(receives) + len(sends)
        refusal = self._refusal(
            f"{self.words()}, and the time for what was under way is over: hand it over again, "
            "through another node"
        )
        for receive in receives:
            self._decoder.cancel_attempt(receive.attempt, refusal)
        for send in sends:
            send.outcome = ReceiveOutcome.ABORTED
            self._prefiller.give_up_send(send, refusal)

    def _drained(self) -> None:
        drain, out = self.drain, self._out
        assert drain is not None
        # Before anything is told or ended: ``end_if_over`` comes after every step, and this is
        # once.
        self.is_drained = True
        lasted_s = out.at_s - drain.since_s
        out.emit(events.Drained(lasted_s=lasted_s, cut=self.cut, leases=self._n_engine_leases()))
        if drain.is_stop:
            self._leave(drain)

    def _leave(self, drain: Draining) -> None:
        # With a journal the pool outlives the process, and engines go on writing their pages.
        if not self._settings.is_journaled:
            for lease in self._sessions.engine_leases():
                self._sessions.end_lease(lease, "drained")
        # The goodbye is the last message: whoever hears it gives up on us without waiting for its
        # silence limit. After it nothing may be said, and nothing heard would be answered.
        self._tell_peers(LEAVING, drain.why)
        self.has_left = True
        # Behind it: no peer waits for our disk.
        if not self._settings.is_journaled:
            self._tiers.begin_stop()

    # ---- what is said ------------------------------------------------------------------------

    def refusal(self) -> Refusal | None:
        """Why nothing new is begun; None while the node serves."""
        drain = self.drain
        if drain is None:
            return None
        then = "ask again when it is back" if drain.is_stop else "ask again after kvd undrain"
        return self._refusal(f"{self.words()} and begins nothing new: ask another node, or {then}")

    def words(self) -> str:
        """Who drains, since when, by whom and why; empty while it serves."""
        drain = self.drain
        if drain is None:
            return ""
        for_s = self._out.at_s - drain.since_s
        if drain.is_stop:
            n_pages = self._n_unwritten()
            writes = f", and writes {n_pages} more pages to its tiers" if n_pages else ""
            return f"{self._name} has been stopping for {for_s:.1f} s ({drain.why}){writes}"
        by = f" by {drain.who}" if drain.who else ""
        why = f" ({drain.why})" if drain.why else ""
        return f"{self._name} has been drained for {for_s:.1f} s{by}{why}"

    def _refusal(self, message: str) -> Refusal:
        assert self.drain is not None
        since_s = round(self._out.at_s - self.drain.since_s, 3)
        return Refusal(Code.DRAINING, message, side=self._name, numbers={"since_s": since_s})

    def state(self) -> DrainState | None:
        """For the snapshot."""
        drain = self.drain
        if drain is None:
            return None
        receives, sends = self.under_way()
        at_s = self._out.at_s
        return DrainState(
            who=drain.who,
            why=drain.why,
            since_s=at_s - drain.since_s,
            deadline_in_s=drain.until_s - at_s if drain.until_s < FOREVER else None,
            is_stop=drain.is_stop,
            is_drained=self.is_drained,
            receives=len(receives),
            sends=len(sends),
            waiting=len(self._admission),
            leases=self._n_engine_leases(),
            unwritten=self._n_unwritten(),
        )

    def _n_unwritten(self) -> int:
        """Cached pages that are still to be written before the process ends."""
        return sum([stop.left_pages for stop in self._tiers.at_stop])

    # ---- what is under way -------------------------------------------------------------------

    def would_refuse(self) -> tuple[list[Waiter], list[SendPart]]:
        """Who waits in the queue for something new, and the sends that wait for a side.

        A lease that resumes is nothing new.
        """
        # Its engine computed with it before the drain began, and its tokens must come to an end.
        waiters = [waiter for waiter in self._admission.queue if not waiter.claim.resumes]
        rooms = self._prefiller.rooms
        waiting = [send for send in rooms.live() if send.state in WAITING]
        # A room that is kept goes on for who receives it already, and nobody else gets it.
        return waiters, [send for send in waiting if not takers_of(send, rooms)]

    def under_way(self) -> tuple[list[ReceivePart], list[SendPart]]:
        """Receives and sends that end by themselves, if everybody goes on."""
        return list(self._receives()), list(self._sends())

    def _receives(self) -> Iterator[ReceivePart]:
        is_lost = self._peers.is_lost
        for part in self._decoder.open.parts.values():
            if part.waiter is None and not is_lost(part.incarnation):
                yield part

    def _sends(self) -> Iterator[SendPart]:
        # What only a lost peer could end is not waited for: its silence has no limit.
        is_lost = self._peers.is_lost
        for part in self._prefiller.known():
            if part.state not in WAITING and not is_lost(part.incarnation):
                yield part

    def _n_engine_leases(self) -> int:
        return len(self._sessions.engine_leases())

    # ---- peers -------------------------------------------------------------------------------

    def greet(self, peer: Peer) -> None:
        """It has just said Hello, and may not know."""
        if self.drain is not None:
            self._beat(peer)

    def _tell_peers(self, state: str, why: str) -> None:
        pulse = self._peers.pulse
        pulse.state, pulse.why = state, why
        for peer in self._peers.by_name.values():
            if peer.life is not Life.LOST:
                self._beat(peer)

    def _beat(self, peer: Peer) -> None:
        offer_floor = self._decoder.open.offer_floor(peer.incarnation)
        self._peers.pulse.beat(peer, offer_floor, self._prefiller.settled_sends.floor(peer))

    def heard(self, peer: Peer, message: Ping) -> None:
        """What a peer says of itself: whoever waits to receive from one that drains is told."""
        state, why, before = message.state, message.why[:MAX_REASON], peer.drain
        # Every heartbeat says it again; an echo, or an older daemon, says nothing.
        if not state or (state, why) == (before.state, before.why):
            return
        now_s, out = self._out.at_s, self._out
        # Noted first: the refusal below is made of it, and whoever asks again in this step must see
        # it.
        peer.drain = PeerDrain(state, why, now_s)
        refusal = peer_drains(peer, now_s, self._name)
        if refusal is None:
            if not before.is_serving:
                out.emit(events.PeerDraining(peer=peer.name, state=state, why=why, refused=0))
            return
        queued = [part for part in self._decoder.open.parts.values() if part.peer == peer.name]
        waiters = [part.waiter for part in queued if part.waiter is not None]
        n_refused = len(waiters)
        out.emit(events.PeerDraining(peer=peer.name, state=state, why=why, refused=n_refused))
        self._admission.turn_away(waiters, refusal)
        # Goodbye is no proof that its transfer process is reaped: its pages stay in quarantine.
        if state == LEAVING and peer.life is not Life.LOST:
            self._peers.lose_peer(peer)
            self._decoder.peer_lost(peer)
            self._prefiller.peer_lost(peer)
            self._admission.wake()
