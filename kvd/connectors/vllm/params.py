"""``kv_transfer_params``: what routers say of a request, and what this engine answers with it.

Two keys are the router's: ``do_remote_decode`` (another node decodes this prompt) and
``do_remote_prefill`` (another node has prefilled it). Ours is ``kvd``, which routers pass on as it
is; other keys are others', and null is nothing. A request without ours, or with one that cannot be
read, is looked up in the cache like any other: it is never an error.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Final

import msgspec

from kvd.types import MAX_ROOM

VERSION: Final = 1

ROOM_DIGITS: Final = len(str(MAX_ROOM))

OURS: Final = "kvd"
"""The one key that is answered: behind a connector of several, another one's answer has its own."""


class Meeting(msgspec.Struct, frozen=True):
    """Where a prompt's KV is: on node ``peer``, for who comes to ``room``, or in its cache.

    The room is text: the numbers of JSON are too short for it. Empty: there is none. ``at``: when
    this was told, in seconds as that host has them; 0: nobody says. The room was open soon after.
    """

    peer: str
    room: str = ""
    v: int = VERSION
    at: float = 0.0

    @property
    def number(self) -> int:
        """The room; 0: none that is one."""
        # Longer than any number: python reads thousands of digits slowly, and more not at all.
        is_read = len(self.room) <= ROOM_DIGITS and self.room.isdecimal()
        number = int(self.room) if is_read else 0
        return number if number <= MAX_ROOM else 0


class Transfer(msgspec.Struct, frozen=True):
    """What the params of one request mean here. ``is_odd``: ours was there and made no sense."""

    sends: bool = False
    """Its KV is kept for the node that decodes it."""
    meeting: Meeting | None = None
    """Where to get what is not here."""
    is_odd: bool = False


NO_TRANSFER: Final = Transfer()


def transfer_of(params: object) -> Transfer:
    """What they mean; whatever cannot be read means nothing.

    Args:
        params: of a request: a mapping, most often. vLLM passes on other values that its users
            send, so one of them must not cost the session of all others.
    """
    if not params:
        return NO_TRANSFER
    if not isinstance(params, Mapping):
        return Transfer(is_odd=True)
    sends = params.get("do_remote_decode") is True
    told = params.get(OURS)
    if told is None:
        return Transfer(sends=sends)
    try:
        meeting = msgspec.convert(told, Meeting)
        meeting.peer.encode()
    except (msgspec.ValidationError, ValueError, TypeError, RecursionError):
        # Texts may be none, as JSON has them: halves of characters.
        return Transfer(sends=sends, is_odd=True)
    is_odd = meeting.v != VERSION or bool(meeting.room and not meeting.number) or not meeting.peer
    return Transfer(sends=sends, meeting=None if is_odd else meeting, is_odd=is_odd)


def kept_for_decode(node: str, room: int, at_s: float) -> dict[str, object]:
    """The answer of an engine that has prefilled: whoever decodes finds the KV there."""
    return {OURS: {"v": VERSION, "peer": node, "room": str(room), "at": round(at_s, 3)}}


def cached_at(node: str) -> dict[str, object]:
    """The answer of an engine that has decoded: the next turn may be pulled from there."""
    return {OURS: {"v": VERSION, "peer": node, "room": ""}}


def draw_room() -> int:
    """A room that nobody else has."""
    return 1 + secrets.randbelow(MAX_ROOM)
