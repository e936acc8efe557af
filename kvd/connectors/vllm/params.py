"""``kv_transfer_params``: what routers say of a request, and what this engine answers with it.

Two keys are the router's: ``do_remote_decode`` (another node decodes this prompt) and
``do_remote_prefill`` (another node has prefilled it). Ours is ``kvd``, which routers pass on as it
is. ``max_load_tokens`` is vLLM's, of what may be loaded; other keys are others', and null is
nothing. A request without ours, or with one that cannot be read, is looked up in the cache like any
other: it is never an error.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from kvd.types import MAX_ROOM

VERSION: Final = 1

ROOM_DIGITS: Final = len(str(MAX_ROOM))

OURS: Final = "kvd"
"""The one key that is answered: behind a connector of several, another one's answer has its own."""


class Meeting(msgspec.Struct, frozen=True):
    """Where a prompt's KV is: on node ``peer``, for who comes to ``room``, or in its cache.

    A room is text: the numbers of JSON are too short for it. Empty: there is none. ``at``: when
    this was told, in seconds as that host has them; 0: nobody says. ``open``: the room was open by
    then; else it is soon after. ``soon``: a router says so, which asks the other engine for the
    prompt now. ``opens``: of the prompt that this one is asked for, the room that it is to open.
    """

    peer: str = ""
    room: str = ""
    v: int = VERSION
    at: float = 0.0
    open: bool = False
    soon: bool = False
    opens: str = ""

    @property
    def number(self) -> int:
        """The room; 0: none that is one."""
        return _room_of(self.room)

    @property
    def opened_number(self) -> int:
        """The room that is to be opened; 0: none that is one."""
        return _room_of(self.opens)

    @property
    def is_odd(self) -> bool:
        """Whether it makes no sense."""
        is_odd = self.v != VERSION or not (self.peer or self.opened_number)
        return is_odd or bool((self.room and not self.number) or (self.room and not self.peer))


class Transfer(msgspec.Struct, frozen=True):
    """What the params of one request mean here. ``is_odd``: ours was there and made no sense."""

    sends: bool = False
    """Its KV is kept for the node that decodes it."""
    meeting: Meeting | None = None
    """Where to get what is not here."""
    room: int = 0
    """Where it is kept for that node, as the router wants it; 0: where this engine likes."""
    most_loaded: int | None = None
    """So many tokens may be loaded for it at a time; None: all."""
    is_odd: bool = False


NO_TRANSFER: Final = Transfer()


def transfer_of(params: object, *, hands_over: bool = True) -> Transfer:
    """What they mean; whatever cannot be read means nothing.

    Args:
        params: of a request: a mapping, most often. vLLM passes on other values that its users
            send, so one of them must not cost the session of all others.
        hands_over: whether this engine does; else only what may be loaded is read.
    """
    if not params:
        return NO_TRANSFER
    if not isinstance(params, Mapping):
        return Transfer(is_odd=hands_over)
    most = params.get("max_load_tokens")
    if type(most) is int and most >= 0:
        found = Transfer(most_loaded=most)
    else:
        found = Transfer(is_odd=most is not None)
    return _handed(params, found) if hands_over else found


def _handed(params: Mapping[str, object], found: Transfer) -> Transfer:
    """``found`` with what they say of other nodes."""
    sends = params.get("do_remote_decode") is True
    told = params.get(OURS)
    if told is None:
        return replace(found, sends=sends)
    try:
        meeting = msgspec.convert(told, Meeting)
        meeting.peer.encode()
    except (msgspec.ValidationError, ValueError, TypeError, RecursionError):
        # Texts may be none, as JSON has them: halves of characters.
        return replace(found, sends=sends, is_odd=True)
    if meeting.is_odd:
        return replace(found, sends=sends, is_odd=True)
    room = meeting.opened_number if sends else 0
    return replace(found, sends=sends, meeting=meeting if meeting.peer else None, room=room)


def kept_for_decode(node: str, room: int, at_s: float, *, is_open: bool) -> dict[str, object]:
    """The answer of an engine that has prefilled: whoever decodes finds the KV there."""
    told: dict[str, object] = {"v": VERSION, "peer": node, "room": str(room), "at": round(at_s, 3)}
    return {OURS: told | {"open": True} if is_open else told}


def cached_at(node: str) -> dict[str, object]:
    """The answer of an engine that has decoded: the next turn may be pulled from there."""
    return {OURS: {"v": VERSION, "peer": node, "room": ""}}


def _room_of(text: str) -> int:
    # Longer than any number: python reads thousands of digits slowly, and more not at all.
    is_read = len(text) <= ROOM_DIGITS and text.isdecimal()
    number = int(text) if is_read else 0
    return number if number <= MAX_ROOM else 0


def draw_room() -> int:
    """A room that nobody else has."""
    return 1 + secrets.randbelow(MAX_ROOM)
