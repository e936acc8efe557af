"""Rooms that were served: who has had them, so that who comes too late hears it.

A room that was served is remembered for as long as a decode side may ask for it. A plain room may
be opened anew at any time: a receive that was asked for after its end waits for the next engine.

What must not live here: rooms that are still open (``rooms``, ``kept``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.errors import Code, Refusal

if TYPE_CHECKING:
    from kvd.core.handoff.parts import NamedRequest, SendPart
    from kvd.core.settings import Settings

MAX_SERVED_ROOMS = 4096
"""Rooms remembered; the oldest is forgotten first."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ServedRoom:
    """Who had a room last, and when."""

    __slots__ = ("at_s", "peer", "request", "takers", "was_kept")

    def __init__(
        self, peer: str, at_s: float, *, request: NamedRequest | None, takers: int, was_kept: bool
    ) -> None:
        self.peer = peer
        self.at_s = at_s
        self.request = request
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
            request=(keeper or part).request,
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
        is_own = served is not None and (served.was_kept or served.request)
        if served is None or (asked_s >= served.at_s and not is_own):
            return None
        return self.served(room, at_s)

    def served(self, room: int, at_s: float) -> Refusal | None:
        """Who has had the room, and when, as a refusal; None where it is not known."""
        served = self.by_room.get(room)
        if served is None:
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
