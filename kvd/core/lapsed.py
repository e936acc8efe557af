"""Rooms that a prefill engine opened and gave up before an Offer came: the Offer hears why at once.

Otherwise the decode side would wait for an engine until its deadline, for a failure that this side
has known all along. An engine that opens the room again is a new attempt: the old one is over. So
is a receive that was asked for after the end of the old one: it waits for its engine as any does
that comes first. Where an engine failed, a receive may be late by ``LATE_S`` and belong to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.errors import Code, Refusal

if TYPE_CHECKING:
    from kvd.core.settings import Settings

MAX_LAPSED = 4096
"""Rooms remembered; the oldest is forgotten first."""

LATE_S = 1.0
"""A router asks both engines at about the same time; one of them may fail before the other asks.

A deadline has passed when both have had time to ask: then there is no such doubt.
"""


class _Lapse(msgspec.Struct, frozen=True):
    until_s: float
    asked_until_s: float
    """Receives asked for until then belong to it."""
    refusal: Refusal


class LapsedRooms:
    """Why each such room ended, for as long as a decode side may wait for it."""

    def __init__(self, settings: Settings) -> None:
        self.by_room: dict[int, _Lapse] = {}
        """Oldest first: all of them are kept equally long."""
        self._settings = settings

    def remember(self, room: int, why: Refusal, at_s: float) -> None:
        """The engine of ``room`` gave up."""
        refusal = Refusal(
            why.code,
            f"the prefill engine gave up before the offer came: {why.message}",
            side=self._settings.name,
            numbers=why.numbers,
        )
        self.by_room.pop(room, None)
        late_s = 0.0 if why.code is Code.DEADLINE else LATE_S
        self.by_room[room] = _Lapse(at_s + self._settings.max_deadline_s, at_s + late_s, refusal)
        if len(self.by_room) > MAX_LAPSED:
            del self.by_room[next(iter(self.by_room))]

    def forget(self, room: int) -> None:
        """An engine opened it again."""
        self.by_room.pop(room, None)

    def refusal(self, room: int, asked_s: float) -> Refusal | None:
        """What an Offer for ``room`` is told; None where an engine may still come."""
        lapse = self.by_room.get(room)
        return lapse.refusal if lapse is not None and asked_s <= lapse.asked_until_s else None

    def expire(self, at_s: float) -> None:
        """Forget what no Offer asks about any more."""
        while self.by_room:
            room, lapse = next(iter(self.by_room.items()))
            if lapse.until_s > at_s:
                break
            del self.by_room[room]
