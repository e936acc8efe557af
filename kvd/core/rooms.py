"""Who has a room of the prefill side: one part, and behind it Offers that wait for its engine.

A room is a number that anybody can guess, so none is given away by coming first. While no engine
is there, the Offers of several peers wait side by side, one of each, and the engine's word decides:
the peer that it names, or the first one whose prompt is the same. While an engine waits, a peer
that it does not name has no part in the room: its Offer is refused, its Withdrawn is answered and
changes nothing.

An engine that names nobody can be served by any peer that knows the prompt, and is told by any that
it need not wait; but by one of several that is only noted, because another may be the one. When all
that could offer have withdrawn, it is over.

What must not live here: transitions (``prefill``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvd.core.life import Life
from kvd.core.offer import disagreement
from kvd.core.tables import Prefill
from kvd.errors import Code, Refusal

if TYPE_CHECKING:
    from kvd.core.cargo import Cargo
    from kvd.core.parts import Engine, PrefillPart
    from kvd.core.peer import Peers

MAX_WAITING = 64
"""Offers that wait for the engine of one room, each of another peer."""


class Turned(NamedTuple):
    """An Offer that is not served, and why."""

    part: PrefillPart
    refusal: Refusal


class Meeting(NamedTuple):
    """What an engine finds that opens a room: the Offer that is served, and those that are not.

    ``refusal``: why the engine itself is refused.
    """

    part: PrefillPart | None
    turned: tuple[Turned, ...]
    refusal: Refusal | None = None


NOBODY = Meeting(None, ())


class Rooms:
    """The parts of the prefill side that are in a LIVE state."""

    def __init__(self, cargo: Cargo, side: str) -> None:
        self._cargo = cargo
        self._side = side
        self.by_room: dict[int, PrefillPart] = {}
        """The part that has the room; of Offers that wait for an engine, the first."""
        self.behind: dict[int, list[PrefillPart]] = {}
        """The other Offers that wait for the same engine, oldest first."""

    def live(self) -> list[PrefillPart]:
        """All of them."""
        found = list(self.by_room.values())
        for parts in self.behind.values():
            found += parts
        return found

    def of(self, room: int) -> list[PrefillPart]:
        """Those of one room, the one that has it first."""
        part = self.by_room.get(room)
        return [] if part is None else [part, *self.behind.get(room, ())]

    def has(self, part: PrefillPart) -> bool:
        """Whether the part is one of them."""
        return any(one is part for one in self.of(part.room))

    def enter(self, part: PrefillPart) -> None:
        """It has the room, or waits behind the Offer that came first."""
        if part.room in self.by_room:
            self.behind.setdefault(part.room, []).append(part)
        else:
            self.by_room[part.room] = part

    def leave(self, part: PrefillPart) -> None:
        """It is over for the room: the next Offer moves up, or the room is free."""
        behind = self.behind.get(part.room)
        if self.by_room.get(part.room) is not part:
            if behind is not None and part in behind:
                behind.remove(part)
        elif behind:
            self.by_room[part.room] = behind.pop(0)
        else:
            del self.by_room[part.room]
        if behind is not None and not behind:
            del self.behind[part.room]

    def meet(self, room: int, destination: str, engine: Engine) -> Meeting:
        """Which waiting Offer an engine serves: of the peer that it names, or the first that fits.

        The engine is refused where the peer that it names has another prompt, and where it has not
        kept what is asked for. A stranger with another prompt is turned away alone.
        """
        if room not in self.by_room:
            return NOBODY
        chosen: PrefillPart | None = None
        turned: list[Turned] = []
        for part in self.of(room):
            assert part.offer is not None
            if destination not in {"", part.peer}:
                turned.append(Turned(part, not_for(room, destination, part.peer, self._side)))
            elif chosen is not None:
                turned.append(Turned(part, taken(chosen, self._side)))
            else:
                refusal = disagreement(part.offer, engine, self._cargo, self._side)
                if refusal is None:
                    chosen = part
                elif destination or refusal.code is not Code.PROMPT_MISMATCH:
                    return Meeting(None, (Turned(part, refusal),), refusal)
                else:
                    turned.append(Turned(part, refusal))
        return Meeting(chosen, tuple(turned))

    def refusal(self, room: int, peer: str) -> Refusal | None:
        """Why an Offer of ``peer`` cannot have the room, nor wait for its engine."""
        part = self.by_room.get(room)
        if part is None:
            return None
        if part.state is Prefill.AWAIT_OFFER:
            awaited = part.awaited
            if awaited.is_by(peer):
                return None
            return not_for(room, awaited.destination, peer, self._side)
        if part.state is Prefill.AWAIT_ENGINE:
            parts = self.of(room)
            own = [one for one in parts if one.peer == peer]
            if not own and len(parts) < MAX_WAITING:
                return None
            part = own[0] if own else part
        return taken(part, self._side)


def taken(part: PrefillPart, side: str, whose: str = "") -> Refusal:
    """The room is another part's: in the words of who asks, a handoff or a send."""
    whose = whose or f"handoff {part.handoff} of {part.peer}"
    return Refusal(
        Code.DUPLICATE_ROOM,
        f"room {part.room} is already open here ({part.state.value}, {whose})",
        side=side,
    )


def not_for(room: int, destination: str, peer: str, side: str) -> Refusal:
    """The engine has named another node."""
    return Refusal(
        Code.DUPLICATE_ROOM,
        f"room {room} is open here for {destination}, not for {peer}: receive it there, or send it "
        f"with to={peer!r}",
        side=side,
    )


def may_offer_still(part: PrefillPart, peers: Peers) -> list[str]:
    """Who else could offer pages for a room, now that those in ``withdrawn`` do not."""
    if part.awaited.destination:
        return []
    known = {peer.name for peer in peers.by_name.values() if peer.life is not Life.LOST}
    return sorted(
        (known | {one.name for one in peers.dialed.values()}) - part.awaited.withdrawn.keys()
    )
