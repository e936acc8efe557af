"""What looks remember from one to the next: when bytes last moved, who has most, since when.

Everything here is bounded by what the node has open now, and found out again after a restart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.console.named import kept_holder

if TYPE_CHECKING:
    from kvd.console.scene import Scene
    from kvd.core.handoff.parts import SendPart
    from kvd.wire.console import Holder

LOOK_EVERY_S = 0.2
"""How often bytes are compared: a part that moves is never called still for longer."""
RANK_EVERY_S = 2.0
"""Ranking takes a look at all leases, some 5 ms for ten thousand."""

Seen = tuple[int, float]
"""Bytes of a part, and when they, or its state, last changed."""


class Progress:
    """When each open handoff last moved: by its own record, and by what looks have seen."""

    def __init__(self) -> None:
        self.receives: dict[int, Seen] = {}
        self.sends: dict[int, Seen] = {}
        self._at_s = float("-inf")

    def look(self, scene: Scene) -> None:
        """Compare with the last look, unless that was just now; one look at all open parts."""
        now_s, prefiller = scene.now_s, scene.node.prefiller
        if now_s - self._at_s < LOOK_EVERY_S:
            return
        self._at_s = now_s
        before, self.receives = self.receives, {}
        for receive in scene.node.decoder.parts.values():
            known = before.get(receive.id)
            last_s, n_bytes = receive.history.last_s, receive.moved_bytes
            if known is None:
                self.receives[receive.id] = n_bytes, now_s if n_bytes else last_s
            else:
                self.receives[receive.id] = _next(known, n_bytes, last_s, now_s)
        before, self.sends = self.sends, {}
        live_bytes = prefiller.posts.live_bytes
        for send in prefiller.known():
            known = before.get(send.id)
            last_s, n_bytes = send.history.last_s, live_bytes(send)
            if known is None:
                self.sends[send.id] = n_bytes, _first_seen(send, n_bytes, last_s, now_s)
            else:
                self.sends[send.id] = _next(known, n_bytes, last_s, now_s)

    def moved_s(self, side: str, part: int) -> float | None:
        """When that part last moved; None for one that was not looked at."""
        found = (self.receives if side == "decode" else self.sends).get(part)
        return found[1] if found is not None else None


def _next(known: Seen, n_bytes: int, last_s: float, now_s: float) -> Seen:
    before, moved_s = known
    if n_bytes != before:
        return n_bytes, now_s
    return known if last_s <= moved_s else (n_bytes, last_s)


def _first_seen(send: SendPart, n_bytes: int, last_s: float, now_s: float) -> float:
    """Posts know since when not a byte of theirs has moved."""
    flow = send.flow
    if send.outstanding and not flow.moved_bytes:
        return max(last_s, flow.since_s)
    return now_s if n_bytes else last_s


class Biggest:
    """The leases that keep the most pages of each component, ranked now and then."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[float, tuple[Holder, ...]]] = {}

    def of(self, scene: Scene, budget: str) -> tuple[Holder, ...]:
        """As of ``RANK_EVERY_S`` ago at most."""
        at_s, holders = self._found.get(budget, (float("-inf"), ()))
        if scene.now_s - at_s >= RANK_EVERY_S:
            ranked = scene.node.owners.biggest(budget)
            holders = tuple(kept_holder(scene, one) for one in ranked)
            self._found[budget] = scene.now_s, holders
        return holders


class Since:
    """Since when something has been so, for what the node itself does not date.

    Who looks asks for all that is so, and says when that was all.
    """

    def __init__(self) -> None:
        self._first_s: dict[str, float] = {}
        self._asked: dict[str, float] = {}

    def of(self, key: str, now_s: float) -> float:
        """When it was first seen: now, if the last look did not see it."""
        found = self._asked[key] = self._first_s.get(key, now_s)
        return found

    def end_look(self) -> None:
        """Whatever was not asked for is no longer so."""
        self._first_s, self._asked = self._asked, {}
