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

import re
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from kvd.core import effects
from kvd.core.cache.namespaces import base_of, epoch_in, epochs_differ
from kvd.core.layout.spec import fingerprint
from kvd.core.peers.agents import Agents
from kvd.core.peers.allowed import allowed_by_name, unlisted, unreadable
from kvd.core.peers.claims import NameClaims, replace
from kvd.core.peers.compatibility import read_layout
from kvd.core.peers.hello import NEWS_AT_ONCE, NEWS_PER_S, NODE, unwelcome
from kvd.core.peers.peer import (
    NO_CLAIM,
    TOGETHER,
    UNHEARD,
    UNSAID,
    Dialed,
    EpochsApart,
    Heard,
    Life,
    Peer,
    lost_because,
)
from kvd.core.peers.pulse import Pulse
from kvd.core.settings import DialRule
from kvd.errors import Code, Refusal
from kvd.wire import events
from kvd.wire.peer import Hello, Message, Ping, Reject

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.inputs import HandshakeFailed, LinkDialed
    from kvd.core.outbox import Outbox
    from kvd.core.settings import Settings


TELL_AGAIN_S: Final = 60.0

BY_ADDRESS: Final = "at:"
"""Links that were dialed by an address begin with it; what follows is what the engine called it."""

MAX_BY_ADDRESS: Final = 64
"""Links that engines made this node dial, at once."""

IDLE_S: Final = 60.0
"""Nothing was open on it for so long: it is hung up on."""

ADDRESS: Final = re.compile(
    r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?):[1-9]\d{0,4}"
)
MAX_PORT: Final = 65_535
LOOPBACK: Final = re.compile(r"localhost|\[::1\]|127(?:\.\d{1,3}){3}")

MAX_TOLD: Final = 1024
"""Kept at most; strangers may invent any number. Above it all are told anew."""


def is_for_epoch(refusal: Refusal) -> bool:
    """Whether two nodes are in different epochs."""
    return refusal.code is Code.PROMPT_MISMATCH and "peer_epoch" in refusal.numbers


@mypyc_attr(allow_interpreted_subclasses=True)
class Complaints:
    """Tells those who watch what was refused on the links, once and not with every repetition.

    A daemon that may not speak says the same several times a second, for as long as both live. Each
    is answered and counted; those who watch hear of the first, and then of one in a minute.
    """

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self._told_s: dict[tuple[str, str, str], float] = {}

    def is_news(self, *about: str) -> bool:
        """Whether these three words were not told in the last minute; they count as told now."""
        link, who, what = about
        key, now_s = (link, who, what), self._out.at_s
        if now_s - self._told_s.get(key, float("-inf")) < TELL_AGAIN_S:
            return False
        if len(self._told_s) >= MAX_TOLD:
            self._told_s.clear()
        self._told_s[key] = now_s
        return True

    def tell(self, link: str, source: str, code: Code, why: str, *, what: str = "") -> None:
        """A message of ``source`` was refused; ``what`` tells apart what has one code."""
        if self.is_news(link, source, what or code.value):
            self._out.emit(
                events.MessageRefused(socket="peers", sender=link, code=code.value, why=why)
            )


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
        self.claims = NameClaims(settings, self.pulse, out)
        self.complaints = Complaints(out)

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

    def is_answer(self, link: str, message: Message) -> bool:
        """Whether somebody who is no peer answers us: it lives, and may be one, or it refuses."""
        match message:
            case Ping(echo=echo) if echo > 0:
                return self.claims.heard(message)
            case Reject(source=source, target=target, refusal=refusal):
                dialed = self.dialed.get(link)
                if dialed is None or target != self._settings.incarnation:
                    return False
                dialed.trouble = f"it refuses this node: {refusal.message}"
                dialed.trouble_s = self._out.at_s
                self._tell_refused(link, source, dialed.name, refusal)
                return True
            case _:
                return False

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
        # Engines may give one name several addresses: the last one that was tried says most.
        links = [dialed for dialed in self.dialed.values() if dialed.name == name]
        last = max(links, key=lambda dialed: dialed.trouble_s, default=None)
        # Older than its last word: it has been heard since, so that trouble is over.
        if last is not None and (peer is None or last.trouble_s > peer.heard_s):
            return last.trouble
        if peer is not None and peer.refused.at_s > peer.heard_s:
            return peer.refused.why
        return ""

    def take_hello(self, link: str, message: Hello) -> tuple[Peer, str] | None:
        """Take a Hello.

        Returns:
            The peer, and the incarnation that this Hello proves gone (empty: none); or None where
            it was refused.
        """
        peer = self.by_name.get(message.node)
        refusal = unwelcome(message, link, self, self._settings)
        if refusal is None and peer is not None and self._is_doubted(peer, message):
            self._ask(link, message)
            return None
        if refusal is None:
            refusal = self._too_often(peer, message)
        if refusal is not None:
            self._remember_refusal(link, peer, refusal)
            self.reject(link, message.source, refusal)
            return None
        # Made only for a Hello that was welcome: what may not speak leaves no record.
        if peer is None:
            peer = self.by_name[message.node] = Peer(message.node)
        # Before generations are compared: a new process begins at any number, also at a lower one.
        gone = self._take_incarnation(peer, message)
        dialed = self.dialed.get(link)
        if dialed is not None:
            dialed.answered = True
        peer.refused = UNHEARD
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

    def _is_doubted(self, peer: Peer, message: Hello) -> bool:
        return peer.incarnation != message.source and not self.claims.is_proven(peer, message)

    def _ask(self, link: str, message: Hello) -> None:
        """Whether the sender of a Hello lives, that wants the name of a lost peer."""
        # It answers only whom it knows, and without a transfer process we do not say who we are.
        if self.generation and self.claims.is_due(message.node):
            self._say_hello(link, message.source)
            self.claims.ask(link, message)

    def _too_often(self, peer: Peer | None, message: Hello) -> Refusal | None:
        """Why a new process or generation is not believed yet: so many were, moments ago."""
        if peer is None or (
            peer.incarnation == message.source and message.generation <= peer.generation
        ):
            return None
        now_s = self._out.at_s
        peer.news = max(0.0, peer.news - NEWS_PER_S * (now_s - peer.news_s))
        peer.news_s = now_s
        if peer.news >= NEWS_AT_ONCE:
            return Refusal(
                Code.NO_ROOM,
                f"{peer.name} has been {NEWS_AT_ONCE} new processes or transfer processes within "
                f"moments: {NEWS_PER_S:g} a second are believed; see in its log what restarts it",
                side=self._settings.name,
            )
        peer.news += 1
        return None

    def _remember_refusal(self, link: str, peer: Peer | None, refusal: Refusal) -> None:
        """For who asks why nothing is heard of it: a lost peer has not said that itself."""
        heard, dialed = Heard(refusal.message, self._out.at_s), self.dialed.get(link)
        if peer is not None:
            peer.refused = heard
        if dialed is not None:
            dialed.trouble, dialed.trouble_s = heard.why, heard.at_s

    def refused_by(self, peer: Peer, refusal: Refusal) -> None:
        """It did not act on a message of ours."""
        peer.refuses = Heard(refusal.message, self._out.at_s)
        self._tell_refused(peer.link, peer.incarnation, peer.name, refusal)

    def _tell_refused(self, link: str, source: str, name: str, refusal: Refusal) -> None:
        code, why = refusal.code.value, f"it refused our message: {refusal.message}"
        if self.complaints.is_news(link, source, f"refuses {code}"):
            self._out.emit(events.PeerRefused(peer=name, code=code, why=why))

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
        replace(peer, message)
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
                home=mine.home,
            ),
        )

    def reject(self, link: str, source: str, refusal: Refusal) -> None:
        """Tell whoever sent it why it was not acted on, and everybody who watches."""
        self._out.send(link, Reject(self._settings.incarnation, source, refusal))
        self.complaints.tell(link, source, refusal.code, refusal.message)

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

    def note_epochs(self, peer: Peer, refusal: Refusal) -> None:
        """We have refused it something; where that is for its epoch, it is told."""
        if is_for_epoch(refusal):
            base, epoch = refusal.numbers["base"], refusal.numbers["epoch"]
            assert isinstance(base, str)
            assert isinstance(epoch, int)
            self._note_apart(peer, base, epoch, refusal.message)

    def heard_epochs(self, peer: Peer, key: str, refusal: Refusal) -> None:
        """The same where it has refused us something: of what it says the number alone is taken.

        The words are ours, because they name a command.
        """
        theirs = refusal.numbers.get("epoch")
        if is_for_epoch(refusal) and type(theirs) is int and theirs != epoch_in(key):
            mine = self._settings.name
            why = epochs_differ(key, side=mine, peer=peer.name, peer_epoch=theirs)
            self._note_apart(peer, base_of(key), epoch_in(key), why)

    def _note_apart(self, peer: Peer, base: str, epoch: int, why: str) -> None:
        peer.epochs = EpochsApart(base=base, epoch=epoch, why=why, at_s=self._out.at_s)
        code = Code.PROMPT_MISMATCH
        self.complaints.tell(peer.link, peer.incarnation, code, why, what="another epoch")

    def in_one_epoch(self, peer: Peer, key: str) -> None:
        """Something of a namespace was asked for in the epoch that we are in: that is mended."""
        if peer.epochs.why and peer.epochs.base == base_of(key):
            peer.epochs = TOGETHER

    def unlisted(self, peer: str) -> Refusal | None:
        """Why it may exchange nothing with this node."""
        return unlisted(self.allowed, peer, self._settings.name)

    def not_to_read(self, peer: str, namespace: str) -> Refusal | None:
        """Why a peer may not pull what is cached in a namespace."""
        return unreadable(self.allowed, peer, namespace, self._settings.name)

    # ---- by address --------------------------------------------------------------------------

    def dial_address(self, source: str) -> Refusal | None:
        """Dial who is called by an address that no configuration has; None: it is under way.

        Its name is the address until it has said its own, or what stands before an ``@`` there.
        """
        side = self._settings.name
        name, _, address = source.rpartition("@")
        found = ADDRESS.fullmatch(address)
        is_place = found is not None and int(address.rpartition(":")[2]) <= MAX_PORT
        if found is None or not is_place or (name and not NODE.fullmatch(name)):
            known = ", ".join(self.names()) or "none"
            return Refusal(
                Code.PEER_UNKNOWN,
                f"no peer is called {source!r} (known: {known}): add it to peers.connect, or give "
                "its address as tcp://HOST:PORT",
                side=side,
            )
        rule, is_here = self._settings.dials, LOOPBACK.fullmatch(found[1]) is not None
        if rule is DialRule.NONE or (rule is DialRule.LOOPBACK and not is_here):
            why = (
                "no other node's key is in peers.keys"
                if rule is DialRule.NONE
                else "without keys nothing leaves this host: set peers.secret_key_file and "
                "peers.keys, or peers.insecure"
            )
            return Refusal(Code.PEER_UNKNOWN, f"{side} does not dial {address}: {why}", side=side)
        passing = sum(dialed.by_address for dialed in self.dialed.values())
        if passing >= MAX_BY_ADDRESS:
            return Refusal(
                Code.PEER_UNKNOWN,
                f"{side} has dialed {passing} peers by their addresses, {MAX_BY_ADDRESS} are its "
                "limit: add those that are used all the time to peers.connect",
                side=side,
                numbers={"dialed": passing, "limit": MAX_BY_ADDRESS},
            )
        link = BY_ADDRESS + source
        self.dialed[link] = Dialed(name or address, address, by_address=True, used_s=self._out.at_s)
        self._say_hello(link, "")
        return None

    def named(self, link: str) -> str:
        """What a node was called before its first Hello on this link, if that was its address."""
        dialed = self.dialed.get(link)
        if dialed is None or dialed.name != dialed.address:
            return ""
        peer = next((peer for peer in self.by_name.values() if peer.link == link), None)
        if peer is None:
            return ""
        dialed.name = peer.name
        return dialed.address

    def hang_up_idle(self, is_used: Callable[[str], bool]) -> None:
        """End the links that were dialed by address, and that nothing has been open on for long."""
        for link, dialed in list(self.dialed.items()):
            if not dialed.by_address:
                continue
            if is_used(dialed.name):
                dialed.used_s = self._out.at_s
            elif self._out.at_s - dialed.used_s >= IDLE_S:
                del self.dialed[link]
                peer = self.by_name.get(dialed.name)
                if peer is not None and peer.link == link:
                    self.pulse.leave(peer, "nothing is open on a link that was dialed by address")
                    self.forget_peer(peer)
                self._out.effects.append(effects.HangUpLink(link))

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
            if source in {dialed.name, dialed.address, f"{dialed.name}@{dialed.address}"}:
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
        self.claims.forget(peer.name)
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
