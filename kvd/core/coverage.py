"""Whether one peer alone has all that this node keeps: layers and heads of each of our shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.shards import lacking, listed
from kvd.core.spec import shards_of
from kvd.errors import Code, Refusal

if TYPE_CHECKING:
    from kvd.core.peer import Peers
    from kvd.core.settings import Settings
    from kvd.core.shards import Lane


def is_whole(lanes: tuple[Lane, ...], n_shards: int) -> bool:
    """Whether these lanes fill every page of each of so many shards."""
    return len(lanes) == n_shards and all(lane.window is None for lane in lanes)


def uncovered(source: str, peers: Peers, mine: Settings) -> Refusal | None:
    """Why a receive from this peer alone would leave pages of ours unfilled; None: it would not.

    Before its Hello nothing is known of it.
    """
    peer, ours = peers.by_name.get(peers.find(source) or source), shards_of(mine.spec)
    if peer is None or not peer.incarnation or is_whole(peer.incoming, len(ours)):
        return None
    missing = lacking(ours, peer.shards)
    has = lacking(peer.shards, ())
    return Refusal(
        Code.LAYOUT_MISMATCH,
        f"{peer.name} has {listed(has)}, which is not all that {mine.name} keeps: "
        f"{listed(missing)} must come from elsewhere too; name every source",
        side=mine.name,
    )
