"""Pings, and what their echoes prove: a peer lives, and which connections are its own.

Bytes of a dead writer come on a connection that it had made to us. Neither side knows whose a
connection is that the other one made, so the living say it: an echo names the *streams* of the
sending agent that leads to us now. Which of them are of no dead writer is then certain:

- an echo of a ping that went out after something was known was sent after that too. So a claim
  counts only for what began to be waited for before its ping: the agent of which it speaks lives,
  and is none that had been destroyed then;
- of two peers that claim one stream one is wrong, so it is nobody's then;
- a stream that nobody claims may be anybody's. So what is not said, not heard or not believed costs
  time, and nothing else.

A peer that lies here could free pages that a third one still writes. It is trusted with memory
anyway: its writes land where it says.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.peers.peer import LEAVING, SERVING, StreamClaim
from kvd.wire.peer import MAX_STREAMS, Ping

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.core.outbox import Outbox
    from kvd.core.peers.peer import Peer
    from kvd.core.settings import Settings


@mypyc_attr(allow_interpreted_subclasses=True)
class Pulse:
    """The pings of this node, numbered through whoever they go to."""

    def __init__(self, settings: Settings, out: Outbox) -> None:
        self.state, self.why = SERVING, ""
        """Of this node, as every Ping tells it."""
        self.last_ping = self.claims = 0
        """Numbers: of the ping that left last, and of the claims that were heard."""
        self._settings = settings
        self._out = out
        self._beat_s = float("-inf")

    @property
    def due_s(self) -> float:
        """When it is time to ping next."""
        return self._beat_s + self._settings.heartbeat_s

    def is_due(self) -> bool:
        """Whether it is time to ping; says so once per heartbeat."""
        if self._out.at_s - self._beat_s < self._settings.heartbeat_s:
            return False
        self._beat_s = self._out.at_s
        return True

    def beat(self, peer: Peer, offer_floor: int, settled_floor: int) -> None:
        """Ping one peer with the floors that stand towards it."""
        # One count for all peers: ``quarantine`` compares a claim's ping with the last that had
        # left, to whomever.
        self.last_ping += 1
        peer.ping = self.last_ping
        peer.ping_sent_s = self._out.at_s
        ping = Ping(
            source=self._settings.incarnation,
            target=peer.incarnation,
            number=peer.ping,
            echo=0,
            offer_floor=offer_floor,
            settled_floor=settled_floor,
            state=self.state,
            why=self.why,
        )
        self._out.send(peer.link, ping)

    def leave(self, peer: Peer, why: str) -> None:
        """Say goodbye to one peer: its link ends, and this node does not."""
        mine = self._settings.incarnation
        ping = Ping(
            source=mine,
            target=peer.incarnation,
            number=0,
            echo=0,
            offer_floor=0,
            settled_floor=0,
            state=LEAVING,
            why=why,
        )
        self._out.send(peer.link, ping)

    def ask(self, link: str, incarnation: str) -> int:
        """Ping somebody who is no peer yet; returns the number that its echo must name."""
        self.last_ping += 1
        mine = self._settings.incarnation
        ping = Ping(
            source=mine,
            target=incarnation,
            number=self.last_ping,
            echo=0,
            offer_floor=0,
            settled_floor=0,
        )
        self._out.send(link, ping)
        return self.last_ping

    def heard(self, peer: Peer, message: Ping) -> None:
        """Take the floors; answer a ping, or take what an echo of our own says."""
        # Pings may overtake each other, and a floor never goes back.
        peer.offer_floor = max(peer.offer_floor, message.offer_floor)
        peer.settled_floor = max(peer.settled_floor, message.settled_floor)
        if message.echo:
            # An older echo would tell the time of two pings, not of one.
            if message.echo == peer.ping:
                peer.round_trip_s = self._out.at_s - peer.ping_sent_s
            if peer.claim.number < message.echo <= peer.ping:  # echoes may overtake each other
                peer.claim = StreamClaim(message.echo, message.streams)
                self.claims += 1
        elif message.number > 0:  # an echo of nothing would be echoed for ever
            mine, theirs, streams = self._settings.incarnation, peer.incarnation, peer.streams
            echo = Ping(
                source=mine,
                target=theirs,
                number=0,
                echo=message.number,
                offer_floor=0,
                settled_floor=0,
                # The rest is claimed by nobody, which costs whoever waits for them time and nothing
                # else.
                streams=streams[:MAX_STREAMS],
            )
            self._out.send(peer.link, echo)


def claimed(peers: Iterable[Peer]) -> dict[str, Peer]:
    """Whose each stream is that exactly one of these peers claims."""
    owners = {stream: peer for peer in peers for stream in peer.claim.streams}
    # A set a peer: naming one stream twice in a claim is no second claimant.
    times = Counter([stream for peer in peers for stream in {*peer.claim.streams}])
    return {stream: peer for stream, peer in owners.items() if times[stream] == 1}
