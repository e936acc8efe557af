"""What a peer says about beginning anything new, and what is said of it here.

A daemon that drains says so in its Pings, at once and then with every heartbeat; so whoever wants
something of it is refused at once, and not after a deadline. A daemon that does not say so knows
nothing of it, nor of the codes that came with it: it is told in words that it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.errors import Code, Refusal

if TYPE_CHECKING:
    from kvd.core.peers.peer import Peer

SERVING, DRAINING, LEAVING = "serving", "draining", "leaving"


class PeerDrain(msgspec.Struct, frozen=True):
    """What it said last: its ``state``, empty before it has said any, why, and since when."""

    state: str = ""
    why: str = ""
    since_s: float = 0.0

    @property
    def is_serving(self) -> bool:
        """Whether something new can be asked of it."""
        return self.state not in {DRAINING, LEAVING}


UNSAID = PeerDrain()


def peer_drains(peer: Peer, now_s: float, side: str) -> Refusal | None:
    """Why nothing is received from this peer now; None while it serves."""
    if peer.drain.is_serving:
        return None
    return Refusal(
        Code.PEER_DRAINING,
        f"{drain_words(peer, now_s)}: receive from another node, or ask again when it is back",
        side=side,
        numbers={"since_s": round(now_s - peer.drain.since_s, 3)},
    )


def drain_words(peer: Peer, now_s: float) -> str:
    """That it begins nothing new, or has said goodbye; empty while it serves."""
    said = peer.drain
    if said.is_serving:
        return ""
    ago_s = now_s - said.since_s
    why = f" ({said.why})" if said.why else ""
    if said.state == LEAVING:
        return f"{peer.name} said goodbye {ago_s:.1f} s ago{why}"
    return f"{peer.name} has been draining for {ago_s:.1f} s{why} and begins nothing new"


def lost_because(peer: Peer, now_s: float) -> str:
    """Why it counts as lost: it said goodbye, or has been silent."""
    if peer.drain.state == LEAVING:
        return drain_words(peer, now_s)
    return f"{peer.name} has been silent for {now_s - peer.heard_s:.1f} s"


def as_told(refusal: Refusal | None, peer: Peer) -> Refusal | None:
    """The refusal as it crosses the link: over there it is the *peer* that drains.

    A daemon that never said its state cannot read the new code, so it hears an older one.
    """
    if refusal is None or refusal.code not in {Code.DRAINING, Code.PEER_DRAINING}:
        return refusal
    code = Code.PEER_DRAINING if peer.drain.state else Code.SHUTTING_DOWN
    return msgspec.structs.replace(refusal, code=code)
