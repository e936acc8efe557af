"""Who has a room of the prefill side: one part, and behind it Offers that wait for its engine.

A room is a number that anybody can guess, so none is given away by coming first. While no engine
is there, the Offers of several peers wait side by side, one of each, and the engine's word decides:
the peer that it names, or the first one whose prompt is the same. While an engine waits, a peer
that it does not name has no part in the room: its Offer is refused, its Withdrawn is answered and
changes nothing.

An engine that names nobody can be served by any peer that knows the prompt, and is told by any that
it need not wait; but by one of several that is only noted, because another may be the one. When all
that could offer have withdrawn, it is over.

Rooms that a prefill engine opened and gave up before an Offer came are remembered
(``ExpiredRooms``), and the Offer hears why at once. Otherwise the decode side would wait for an
engine until its deadline, for a failure that this side has known all along. An engine that opens
the room again is a new attempt: the old one is over. So is a receive that was asked for after the
end of the old one: it waits for its engine as any does that comes first. Where an engine failed, a
receive may be late by ``LATE_S`` and belong to it. A room that was kept is one prompt's alone: who
asks for it after its end hears why.

What must not live here: transitions (``send``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.handoff.offer import disagreement
from kvd.core.handoff.protocol import Prefill
from kvd.core.peers.peer import Life
from kvd.errors import Code, Refusal

if TYPE_CHECKING:
    from kvd.core.handoff.parts import SendingEngine, SendPart
    from kvd.core.handoff.payload import Payload
    from kvd.core.peers.registry import Peers
    from kvd.core.settings import Settings


MAX_EXPIRED_ROOMS = 4096
"""Rooms remembered; the oldest is forgotten first."""

LATE_S = 1.0
"""A router asks both engines at about the same time; one of them may fail before the other asks.

A deadline has passed when both have had time to ask: then there is no such doubt.
"""


@mypyc_attr(allow_interpreted_subclasses=True)
class ExpiredRoom:
    """How one of them ended, and whom that concerns."""

    __slots__ = ("asked_until_s", "refusal", "until_s")

    def __init__(self, until_s: float, asked_until_s: float, refusal: Refusal) -> None:
        self.until_s = until_s
        self.asked_until_s = asked_until_s
        """Receives asked for until then belong to it."""
        self.refusal = refusal


@mypyc_attr(allow_interpreted_subclasses=True)
class ExpiredRooms:
    """Why each such room ended, for as long as a decode side may wait for it."""

    def __init__(self, settings: Settings) -> None:
        self.by_room: dict[int, ExpiredRoom] = {}
        """Oldest first: all of them are kept equally long."""
        self.pulled: dict[int, ExpiredRoom] = {}
        """Those that no engine ever opens, apart: who pulls makes none of the others be forgotten
        before its time."""
        self._settings = settings

    def remember_engines(
        self, room: int, why: Refusal, at_s: float, *, is_kept: bool = False
    ) -> None:
        """The engine of ``room`` gave up."""
        refusal = Refusal(
            why.code,
            f"the prefill engine gave up before the offer came: {why.message}",
            side=self._settings.name,
            numbers=why.numbers,
        )
        self.remember(room, refusal, at_s, is_kept=is_kept)

    def remember(
        self,
        room: int,
        refusal: Refusal,
        at_s: float,
        *,
        is_pulled: bool = False,
        is_kept: bool = False,
    ) -> None:
        """Whoever offers pages for ``room`` is told this.

        ``is_pulled``: no receive is asked for after the end of such a room. ``is_kept``: it was one
        prompt's alone, so a receive that is asked for after its end is too late, as any.
        """
        rooms = self.pulled if is_pulled else self.by_room
        # Out and in again: the dict stays in the order in which its rooms are forgotten.
        rooms.pop(room, None)
        late_s = 0.0 if refusal.code is Code.DEADLINE else LATE_S
        until_s = at_s + self._settings.max_deadline_s
        asked_until_s = until_s if is_pulled or is_kept else at_s + late_s
        rooms[room] = ExpiredRoom(until_s, asked_until_s, refusal)
        if len(rooms) > MAX_EXPIRED_ROOMS:
            # An Offer for it waits for an engine then, as if nothing had been remembered.
            del rooms[next(iter(rooms))]

    def forget(self, room: int) -> None:
        """An engine opened it again."""
        self.by_room.pop(room, None)

    def refusal(self, room: int, asked_s: float) -> Refusal | None:
        """What an Offer for ``room`` is told; None where an engine may still come."""
        expired = self.by_room.get(room) or self.pulled.get(room)
        return expired.refusal if expired is not None and asked_s <= expired.asked_until_s else None

    def expire(self, at_s: float) -> None:
        """Forget what no Offer asks about any more."""
        for rooms in (self.by_room, self.pulled):
            # In the order of their ends, so this stops at the first that is not due.
            while rooms:
                room, expired = next(iter(rooms.items()))
                if expired.until_s > at_s:
                    break
                del rooms[room]


MAX_WAITING = 64
"""Offers that wait for the engine of one room, each of another peer."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TurnedAway:
    """An Offer that is not served, and why."""

    __slots__ = ("part", "refusal")

    def __init__(self, part: SendPart, refusal: Refusal) -> None:
        self.part = part
        self.refusal = refusal


@mypyc_attr(allow_interpreted_subclasses=True)
class RoomMatch:
    """What an engine finds that opens a room: the Offer that is served, and those that are not.

    ``refusal``: why the engine itself is refused.
    """

    __slots__ = ("part", "refusal", "turned")

    def __init__(
        self,
        part: SendPart | None,
        turned: tuple[TurnedAway, ...],
        refusal: Refusal | None = None,
    ) -> None:
        self.part = part
        self.turned = turned
        self.refusal = refusal


NO_OFFERS = RoomMatch(None, ())


@mypyc_attr(allow_interpreted_subclasses=True)
class Rooms:
    """The parts of the prefill side that are in a LIVE state."""

    def __init__(self, payload: Payload, side: str) -> None:
        self._payload = payload
        self._side = side
        self.by_room: dict[int, SendPart] = {}
        """The part that has the room; of Offers that wait for an engine, the first."""
        self.behind: dict[int, list[SendPart]] = {}
        """The other Offers that wait for the same engine, oldest first."""

    def live(self) -> list[SendPart]:
        """All of them."""
        found = list(self.by_room.values())
        for parts in self.behind.values():
            found += parts
        return found

    def parts_of(self, room: int) -> list[SendPart]:
        """Those of one room, the one that has it first."""
        part = self.by_room.get(room)
        return [] if part is None else [part, *self.behind.get(room, ())]

    def has(self, part: SendPart) -> bool:
        """Whether the part is one of them."""
        return any(known is part for known in self.parts_of(part.room))

    def add_part(self, part: SendPart) -> None:
        """It has the room, or waits behind the Offer that came first."""
        if part.room in self.by_room:
            self.behind.setdefault(part.room, []).append(part)
        else:
            self.by_room[part.room] = part

    def open_room(self, part: SendPart) -> None:
        """Its engine has it: Offers that wait for that stand behind."""
        behind = self.parts_of(part.room)
        if behind:
            self.behind[part.room] = behind
        self.by_room[part.room] = part

    def remove_part(self, part: SendPart) -> None:
        """It is over for the room: the next Offer moves up, or the room is free."""
        behind = self.behind.get(part.room)
        # It waits behind another part, or never had a room: a refused Offer settles without one.
        if self.by_room.get(part.room) is not part:
            if behind is not None and part in behind:
                behind.remove(part)
        elif behind:
            self.by_room[part.room] = behind.pop(0)
        else:
            del self.by_room[part.room]
        if behind is not None and not behind:
            del self.behind[part.room]

    def match_engine(self, room: int, destination: str, engine: SendingEngine) -> RoomMatch:
        """Which waiting Offer an engine serves: of the peer that it names, or the first that fits.

        The engine is refused where the peer that it names has another prompt, and where it has not
        kept what is asked for. A stranger with another prompt is turned away alone.
        """
        if room not in self.by_room:
            return NO_OFFERS
        chosen: SendPart | None = None
        turned: list[TurnedAway] = []
        for part in self.parts_of(room):
            assert part.offer is not None
            # Asked first: whoever is not meant learns nothing about the prompt, nor whether it is
            # the same.
            if destination not in {"", part.peer}:
                turned.append(TurnedAway(part, not_for(room, destination, part.peer, self._side)))
            # The first that fits is the one: a room is one prompt, and a second receiver of it asks
            # again.
            elif chosen is not None:
                turned.append(TurnedAway(part, taken(chosen, self._side)))
            else:
                refusal = disagreement(part.offer, part.peer, engine, self._payload, self._side)
                if refusal is None:
                    chosen = part
                # The named peer has another prompt, or pages are missing here: the engine has to
                # hear of it.
                elif destination or refusal.code is not Code.PROMPT_MISMATCH:
                    return RoomMatch(None, (TurnedAway(part, refusal),), refusal)
                else:
                    turned.append(TurnedAway(part, refusal))
        return RoomMatch(chosen, tuple(turned))

    def refusal(self, room: int, peer: str) -> Refusal | None:
        """Why an Offer of ``peer`` cannot have the room, nor wait for its engine."""
        part = self.by_room.get(room)
        if part is None:
            return None
        # Only the engine's word counts while it waits; the room is nobody's yet.
        if part.state is Prefill.AWAIT_OFFER:
            awaited = part.awaited
            if awaited.is_by(peer):
                return None
            return not_for(room, awaited.destination, peer, self._side)
        if part.state is Prefill.AWAIT_ENGINE:
            parts = self.parts_of(room)
            # One Offer of each peer: a second one of the same is a duplicate, whoever waits first.
            own = [other for other in parts if other.peer == peer]
            if not own and len(parts) < MAX_WAITING:
                return None
            part = own[0] if own else part
        return taken(part, self._side)


def takers_of(keeper: SendPart, rooms: Rooms) -> list[SendPart]:
    """The receives of a kept room that are under way; none of any other."""
    if keeper.keeping is None:
        return []
    return [part for part in rooms.parts_of(keeper.room) if part.kept_by is keeper]


def turned_away(part: SendPart, peer: str, refusal: Refusal, at_s: float) -> None:
    """The Offer of this peer is not what the engine waits for, and it waits on."""
    part.awaited.turned_away = f"the Offer of {peer} was refused: {refusal.message}"
    part.history.add_line(at_s, part.awaited.turned_away)


def taken(part: SendPart, side: str, whose: str = "") -> Refusal:
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


def may_offer_still(part: SendPart, peers: Peers) -> list[str]:
    """Who else could offer pages for a room, now that those in ``withdrawn`` do not."""
    if part.awaited.destination:
        return []
    known = {peer.name for peer in peers.by_name.values() if peer.life is not Life.LOST}
    return sorted(
        (known | {dialed.name for dialed in peers.dialed.values()}) - part.awaited.withdrawn.keys()
    )
