"""Rooms that an engine keeps, and rooms that were served: who may take them, and who has had them.

A kept room stays open behind ``finish``: its part waits for Offers until its time is over, and
holds the pages all along. Each Offer that comes meanwhile is a taker: a part of its own behind it,
with its own ``decode_prefix_len``, its own hold of the pages and its own end. What a taker fails of
concerns nobody else; the room is over when its time is, or when so many receives as it was opened
for were committed. Who takes it then goes on to its end.

A room that was served is remembered for as long as a decode side may ask for it, so that a receive
that comes too late hears who has had it. A plain room may be opened anew at any time: a receive
that was asked for after its end waits for the next engine.

What must not live here: transitions (``send``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.handoff.parts import Keeping, TakenBy
from kvd.errors import Code, Refusal
from kvd.wire import client

if TYPE_CHECKING:
    from kvd.core.handoff.parts import SendPart
    from kvd.core.handoff.rooms import Rooms
    from kvd.core.settings import Settings

MAX_TAKERS = 4096
"""Receives that a room can be opened for."""

MAX_TAKING = 64
"""Receives of one room at a time."""

MAX_SERVED_ROOMS = 4096
"""Rooms remembered; the oldest is forgotten first."""


def keeping_of(message: client.SendRequest | client.HandOver) -> Keeping | None:
    """How the room is to be kept; None: its first receive ends it."""
    if not message.ttl_s and not message.takers:
        return None
    return Keeping(message.ttl_s or message.deadline_s, message.takers)


def bad_keeping(message: client.SendRequest | client.HandOver, side: str) -> Refusal | None:
    """Why a room cannot be kept so."""
    # A comparison that is false for NaN too.
    if message.ttl_s >= 0 and 0 <= message.takers <= MAX_TAKERS:
        return None
    return Refusal(
        Code.BAD_REQUEST,
        f"a room kept for ttl_s={message.ttl_s:g} and takers={message.takers}: seconds from 0 on, "
        f"and 0 (any number) to {MAX_TAKERS} receives",
        side=side,
        numbers={"takers": message.takers},
    )


def takers_of(keeper: SendPart, rooms: Rooms) -> list[SendPart]:
    """The receives of a kept room that are under way."""
    return [part for part in rooms.parts_of(keeper.room) if part.kept_by is keeper]


def no_place(keeper: SendPart, rooms: Rooms, side: str) -> Refusal | None:
    """Why one more receive of a kept room is not served now."""
    keeping = keeper.keeping
    assert keeping is not None
    taking = takers_of(keeper, rooms)
    limit = min(keeping.limit - keeping.takers, MAX_TAKING) if keeping.limit else MAX_TAKING
    if len(taking) < limit:
        return None
    names = ", ".join(sorted({part.peer for part in taking})[:8])
    return Refusal(
        Code.DUPLICATE_ROOM,
        f"room {keeper.room} is being received by {names} ({len(taking)} at a time, {limit} are "
        "let in): receive it again when one of them has failed, or open it for more takers",
        side=side,
        numbers={"taking": len(taking), "limit": limit},
    )


def room_kept(call: int, left_s: float, part: SendPart, rooms: Rooms, now_s: float) -> client.Reply:
    """What the engine of a kept room is told of it."""
    keeping = part.keeping
    assert keeping is not None
    return client.RoomKept(
        call=call,
        left_s=left_s,
        takers=keeping.takers,
        taking=len(takers_of(part, rooms)),
        taken=tuple(
            client.TakenReceive(
                peer=one.peer,
                decode_prefix_len=one.decode_prefix_len,
                sent_pages=one.sent_pages,
                sent_bytes=one.sent_bytes,
                ago_s=now_s - one.at_s,
            )
            for one in keeping.taken
        ),
    )


def told_keeping(part: SendPart, keeping: Keeping) -> str:
    """What a kept room waits for, for who asks; who receives it now has a row of its own."""
    who = part.awaited.destination or "any decode side with the prompt"
    limit = f" of {keeping.limit}" if keeping.limit else ""
    by = ", ".join(dict.fromkeys(one.peer for one in keeping.taken))
    return f"{who}, kept: received {keeping.takers}{limit} times" + (f" by {by}" if by else "")


@mypyc_attr(allow_interpreted_subclasses=True)
class ServedRoom:
    """Who had a room last, and when."""

    __slots__ = ("at_s", "peer", "request_id", "takers", "was_kept")

    def __init__(
        self, peer: str, at_s: float, *, request_id: str, takers: int, was_kept: bool
    ) -> None:
        self.peer = peer
        self.at_s = at_s
        self.request_id = request_id
        self.takers = takers
        self.was_kept = was_kept


@mypyc_attr(allow_interpreted_subclasses=True)
class ServedRooms:
    """Rooms whose prompt was committed, for as long as a decode side may ask for them."""

    def __init__(self, settings: Settings) -> None:
        self.by_room: dict[int, ServedRoom] = {}
        """Oldest first: all of them are kept equally long."""
        self._settings = settings

    def remember(self, part: SendPart, at_s: float) -> None:
        """A receive of that room was committed."""
        # Out and in again: the dict stays in the order in which its rooms are forgotten.
        self.by_room.pop(part.room, None)
        keeper = part.kept_by
        keeping = keeper.keeping if keeper is not None else None
        self.by_room[part.room] = ServedRoom(
            part.peer,
            at_s,
            request_id=(keeper or part).request_id,
            takers=keeping.takers if keeping is not None else 1,
            was_kept=keeping is not None,
        )
        if len(self.by_room) > MAX_SERVED_ROOMS:
            # An Offer for it waits for an engine then, as if nothing had been remembered.
            del self.by_room[next(iter(self.by_room))]

    def forget(self, room: int) -> None:
        """An engine opened it again."""
        self.by_room.pop(room, None)

    def refusal(self, room: int, asked_s: float, at_s: float) -> Refusal | None:
        """Why an Offer for ``room`` comes too late; None where an engine may still come."""
        served = self.by_room.get(room)
        # A plain room is a number that its router may use again.
        # One that was kept, or has a request id, is one request's alone.
        is_own = served is not None and (served.was_kept or served.request_id)
        if served is None or (asked_s >= served.at_s and not is_own):
            return None
        return self.served(room, at_s)

    def served(self, room: int, at_s: float, request_id: str = "") -> Refusal | None:
        """Who has had the room, and when, as a refusal; None where it is not known.

        With ``request_id``: only where it was for that request.
        """
        served = self.by_room.get(room)
        if served is None or (request_id and served.request_id != request_id):
            return None
        ago_s = at_s - served.at_s
        times = f" as the last of {served.takers}" if served.takers > 1 else ""
        return Refusal(
            Code.DUPLICATE_ROOM,
            f"room {room} was served {ago_s:.1f} s ago: {served.peer} has received it{times}; send "
            "it again in a room of its own, or keep the room with ttl_s for who comes later",
            side=self._settings.name,
            numbers={"served_ago_s": round(ago_s, 3), "served_to": served.peer},
        )

    def expire(self, at_s: float) -> None:
        """Forget what no Offer asks about any more."""
        while self.by_room:
            room, served = next(iter(self.by_room.items()))
            if served.at_s + self._settings.max_deadline_s > at_s:
                break
            del self.by_room[room]


def note_taken(keeper: SendPart, part: SendPart, at_s: float) -> bool:
    """One receive more was committed; whether it was the last that the room is open for."""
    keeping = keeper.keeping
    assert keeping is not None
    keeping.takers += 1
    keeping.taken.append(TakenBy(part, at_s))
    return keeping.takers == keeping.limit
