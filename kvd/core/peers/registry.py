"""Other daemons: who they are now, and whether they live.

A peer is known by its node name; its incarnation is one process lifetime of it. Nothing is held
for a peer before its Hello. A Hello with a new incarnation is the proof that the old one will never
write again, because a daemon says it only after it has reaped its old transfer process; the old
incarnation is then superseded, and whatever still arrives from it is refused. What it had sent may
still be on its way: ``handoff.quarantine`` waits for that.

Silence makes a peer suspect, then lost. That is a guess, not a proof: its rooms are drained, and
their pages stay in quarantine until it settles, is replaced, or is fenced.

What must not live here: the sending agent towards a peer (``agents``), pings (``pulse``), and
handoffs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.layout.spec import fingerprint
from kvd.core.peers.agents import Agents
from kvd.core.peers.allowed import allowed_by_name, unreadable
from kvd.core.peers.compatibility import read_layout
from kvd.core.peers.hello import unwelcome
from kvd.core.peers.peer import NO_CLAIM, UNSAID, Dialed, Life, Peer, lost_because
from kvd.core.peers.pulse import Pulse
from kvd.wire import events
from kvd.wire.peer import Hello, Message, Reject

if TYPE_CHECKING:
    from kvd.core.inputs import HandshakeFailed, LinkDialed
    from kvd.core.outbox import Outbox
    from kvd.core.settings import Settings
    from kvd.errors import Refusal


@mypyc_attr(allow_interpreted_subclasses=True)
class Peers:
    """All peers, by name and by incarnation."""

    def __init__(self, settings: Settings, out: Outbox) -> None:
        self.agents = Agents(settings.load_limit_s, out)
        self.by_name: dict[str, Peer] = {}
        self.by_incarnation: dict[str, Peer] = {}
        self.dialed: dict[str, Dialed] = {}
        self.generation = 0
        """Of our own receiving transfer process; 0: none serves now."""
        self.metadata = b""
        self.allowed = allowed_by_name(settings.allow)
        """Who may say Hello, and what each may pull; nobody named: everybody, everything."""
        self._settings = settings
        self._layout = fingerprint(settings.spec)
        self._out = out
        self.pulse = Pulse(settings, out)

    # ---- links and Hello ---------------------------------------------------------------------

    def dial_link(self, got: LinkDialed) -> None:
        """A configured peer: say Hello there until it answers by its name."""
        self.dialed[got.link] = Dialed(got.name, got.address)
        self._say_hello(got.link, "")

    def announce(self, generation: int, metadata: bytes) -> None:
        """Our transfer process serves: tell everybody, as a new generation."""
        # Before anybody is greeted: a Hello says both.
        self.generation = generation
        self.metadata = metadata
        self.agents.is_serving = True
        for link, dialed in self.dialed.items():
            known = self.by_name.get(dialed.name)
            self._say_hello(link, known.incarnation if known else "")
        # Those that came to us hear it too: our new generation is what ends their posts to the old.
        for peer in self.by_name.values():
            if peer.link not in self.dialed:
                self._say_hello(peer.link, peer.incarnation)

    def transfer_gone(self) -> None:
        """Our transfer process is reaped, and all agents with it."""
        self.generation = 0
        self.agents.gone(self.by_name.values())

    def ask_hello(self, peer: Peer) -> None:
        """It speaks of a generation that we have not heard of: its Hello was lost."""
        self._say_hello(peer.link, "")

    def sender(self, link: str, message: Message) -> Peer | None:
        """The peer that speaks, if it may: the right incarnation, to the right incarnation.

        Anything else is answered with our Hello or a Reject, and None is returned.
        """
        peer = self.by_incarnation.get(message.source)
        # A message for our former life is for pages that this process does not have.
        if peer is None or message.target != self._settings.incarnation:
            # Never answered: two nodes that refuse each other would do so for ever.
            if isinstance(message, Reject):
                return None
            self._say_hello(link, peer.incarnation if peer else "")
            return None
        # A link that broke comes back under another identity: answer where it speaks now.
        peer.link = link
        # Any message proves that it lives, not pings alone: a busy link needs none to stay up.
        peer.heard_s = self._out.at_s
        if peer.life is not Life.UP:
            peer.life = Life.UP
            self._tell_up(peer)
            # While it was lost no agent was loaded for it: now there may be work for one.
            self.agents.load(peer)
        return peer

    def handshake_failed(self, got: HandshakeFailed) -> None:
        """Remember why a dialed peer cannot be talked to, and tell everybody who watches."""
        dialed = self.dialed.get(got.link)
        name = ""
        if dialed is not None:
            name, dialed.trouble, dialed.trouble_s = dialed.name, got.why, self._out.at_s
        self._out.emit(
            events.PeerHandshakeFailed(
                peer=name,
                address=got.address,
                reason=got.reason,
                why=got.why,
                times=got.times,
            )
        )

    def trouble(self, name: str) -> str:
        """Why a dialed peer was not heard again, if its handshake says so; empty if not."""
        peer = self.by_name.get(name)
        for dialed in self.dialed.values():
            # Older than its last word: it has been heard since, so that trouble is over.
            if dialed.name == name and (peer is None or dialed.trouble_s > peer.heard_s):
                return dialed.trouble
        return ""

    def take_hello(self, link: str, message: Hello) -> tuple[Peer, str] | None:
        """Take a Hello.

        Returns:
            The peer, and the incarnation that this Hello proves gone (empty: none); or None where
            it was refused.
        """
        refusal = unwelcome(message, link, self, self._settings)
        if refusal is not None:
            self.reject(link, message.source, refusal)
            return None
        peer = self.by_name.get(message.node)
        # Made only for a Hello that was welcome: what may not speak leaves no record.
        if peer is None:
            peer = self.by_name[message.node] = Peer(message.node)
        # Before generations are compared: a new process begins at any number, also at a lower one.
        gone = self._take_incarnation(peer, message)
        dialed = self.dialed.get(link)
        if dialed is not None:
            dialed.answered = True
        peer.link = link
        was_up = peer.life is Life.UP and not gone
        peer.life = Life.UP
        peer.heard_s = self._out.at_s
        # A repeated Hello of a peer that is up changes nothing, and must not load a second agent.
        if not was_up or message.generation > peer.generation:
            self._take_generation(peer, message)
            self._tell_up(peer)
            self.agents.load(peer)
        # It does not know us, or knew our life before: until it does, it would refuse what we say.
        if message.target != self._settings.incarnation:
            self._say_hello(link, peer.incarnation)
        return peer, gone

    def _take_incarnation(self, peer: Peer, message: Hello) -> str:
        """Returns the incarnation that is over now, empty where the peer is the same process."""
        gone = peer.incarnation
        if gone == message.source:
            return ""
        if gone:
            # From this step on every message of the old process is refused, whatever link it comes
            # by.
            self.by_incarnation.pop(gone, None)
            self.agents.leave(peer)
            self._out.emit(events.PeerReplaced(peer=peer.name, before=gone, after=message.source))
        peer.incarnation = message.source
        # Below every generation, so that the one in this Hello is taken with all that it says.
        peer.generation = 0
        # Handoff ids begin anew with an incarnation: old floors would refuse its first Offers.
        peer.offer_floor = peer.settled_floor = 0
        peer.round_trip_s = 0.0
        # Connections of the old process: nobody lives who could claim them.
        peer.claim = NO_CLAIM
        peer.drain = UNSAID
        self.by_incarnation[message.source] = peer
        return gone

    def _take_generation(self, peer: Peer, message: Hello) -> None:
        # Hellos may overtake each other: an older one says nothing new.
        if message.generation <= peer.generation:
            return
        self.agents.leave(peer)
        peer.generation = message.generation
        peer.metadata = message.metadata
        peer.max_prompt_tokens = message.max_prompt_tokens
        peer.max_aux_bytes = message.max_aux_bytes
        peer.max_frame_bytes = message.max_frame_bytes
        peer.serves_pulls = message.serves_pulls
        peer.knows_epochs = message.knows_epochs
        # With the generation, not with each Hello: only a new transfer process can bring another
        # pool.
        read_layout(peer, message.layout, self._settings)
        if peer.refusal is not None and peer.source_refusal is not None:
            why = peer.layout.difference
            self._out.emit(
                events.PeerRefused(peer=peer.name, code=peer.refusal.code.value, why=why)
            )
        self.agents.load(peer)

    def _tell_up(self, peer: Peer) -> None:
        self._out.emit(
            events.PeerUp(peer=peer.name, incarnation=peer.incarnation, generation=peer.generation)
        )

    def _say_hello(self, link: str, target: str) -> None:
        # Without a transfer process there is nothing to announce; ``announce`` says Hello to
        # everybody when there is one.
        if not self.generation:
            return
        mine = self._settings
        self._out.send(
            link,
            Hello(
                source=mine.incarnation,
                target=target,
                node=mine.name,
                layout=self._layout,
                generation=self.generation,
                metadata=self.metadata,
                max_prompt_tokens=mine.max_prompt_tokens,
                max_aux_bytes=mine.max_aux_bytes,
                max_frame_bytes=mine.max_frame_bytes,
                serves_pulls=True,
                knows_epochs=True,
            ),
        )

    def reject(self, link: str, source: str, refusal: Refusal) -> None:
        """Tell whoever sent it why it was not acted on, and everybody who watches."""
        self._out.send(link, Reject(self._settings.incarnation, source, refusal))
        self._out.emit(
            events.MessageRefused(
                socket="peers",
                sender=link,
                code=refusal.code.value,
                why=refusal.message,
            )
        )

    def not_ready(self, name: str) -> str | None:
        """What a receive from this node waits for; None when an Offer can go out."""
        peer = self.by_name.get(name)
        if peer is None or not peer.incarnation:
            return f"{name} has not said Hello yet{_because(self.trouble(name))}"
        if peer.source_refusal is not None:
            return peer.source_refusal.message
        if peer.life is Life.LOST:
            return f"{lost_because(peer, self._out.at_s)}{_because(self.trouble(name))}"
        if not self.generation:
            return "the transfer process of this node is restarting"
        return None

    def is_lost(self, incarnation: str) -> bool:
        """Whether it was silent for so long that nothing is asked of it."""
        peer = self.by_incarnation.get(incarnation)
        return peer is not None and peer.life is Life.LOST

    def drop_agent(self, incarnation: str, generation: int, why: str) -> None:
        """Destroy this agent; one of an older generation is being destroyed already."""
        peer = self.current(incarnation, generation)
        if peer is not None:
            self.agents.drop(peer, why)

    # ---- who may what ------------------------------------------------------------------------

    def allow(self, entries: tuple[str, ...]) -> None:
        """An operator has changed ``peers.allow``: it holds for what is asked from now on."""
        self.allowed = allowed_by_name(entries)

    def not_to_read(self, peer: str, namespace: str) -> Refusal | None:
        """Why a peer may not pull what is cached in a namespace."""
        return unreadable(self.allowed, peer, namespace, self._settings.name)

    # ---- finding one -------------------------------------------------------------------------

    def current(self, incarnation: str, generation: int) -> Peer | None:
        """The peer, if this incarnation and generation of it are the ones that serve."""
        peer = self.by_incarnation.get(incarnation)
        return peer if peer is not None and peer.generation == generation else None

    def find(self, source: str) -> str | None:
        """The node name behind a configured name or address, or of a peer that came to us."""
        if source in self.by_name:
            return source
        for dialed in self.dialed.values():
            if source in {dialed.name, dialed.address}:
                return dialed.name
        return None

    def names(self) -> list[str]:
        """Every node name that ``find`` knows."""
        return sorted({*self.by_name, *(dialed.name for dialed in self.dialed.values())})

    # ---- time --------------------------------------------------------------------------------

    def is_stale(self, peer: Peer) -> bool:
        """Whether it came to us, and has been silent for so long that it need not be known."""
        silent_s = self._out.at_s - peer.heard_s
        if peer.life is not Life.LOST or silent_s < self._settings.forget_s:
            return False
        # A configured one is waited for however long it takes; of strangers the memory is bounded.
        return all(dialed.name != peer.name for dialed in self.dialed.values())

    def forget_peer(self, peer: Peer) -> None:
        """Nothing is open with it: whoever comes by this name again says Hello first."""
        self.agents.leave(peer)
        self.by_incarnation.pop(peer.incarnation, None)
        del self.by_name[peer.name]

    def redial(self) -> None:
        """Say Hello again where nobody has answered yet, or the answerer is lost."""
        lost = {p.name for p in self.by_name.values() if p.life is Life.LOST}
        for link, dialed in self.dialed.items():
            # Elsewhere pings keep the link, and a Hello would only be answered by another one.
            if not dialed.answered or dialed.name in lost:
                self._say_hello(link, "")

    def lose_peer(self, peer: Peer) -> None:
        """It is gone: silent for too long, or it said so."""
        peer.life, silent_s = Life.LOST, self._out.at_s - peer.heard_s
        self._out.emit(
            events.PeerLost(peer=peer.name, incarnation=peer.incarnation, silent_s=silent_s)
        )

    def age_peers(self) -> list[Peer]:
        """Make silent peers suspect, then lost; returns those that became lost just now."""
        lost = []
        for peer in self.by_name.values():
            silent_s = self._out.at_s - peer.heard_s
            # Asked first: after a host slept, one look may find a peer silent beyond both limits.
            if peer.life is not Life.LOST and silent_s >= self._settings.lost_s:
                lost.append(peer)
                self.lose_peer(peer)
            elif peer.life is Life.UP and silent_s >= self._settings.suspect_s:
                peer.life = Life.SUSPECT
                self._out.emit(
                    events.PeerSuspect(
                        peer=peer.name,
                        incarnation=peer.incarnation,
                        silent_s=silent_s,
                    )
                )
        return lost


def _because(why: str) -> str:
    return f": {why}" if why else ""
