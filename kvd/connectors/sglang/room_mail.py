"""What the two engines of a room tell each other, beside kvd: who wants it, and where it is open.

SGLang's prefill engine has a socket, whose address its bootstrap server tells. The decode engine
writes there once it has pages for a prompt; from then on the daemons meet, and the handoff is
theirs. A letter may come before its request does, so it is kept for a while.

A letter is about one life of a room: the receiver draws a word for each, since routers may use the
number of a room again.

Letters get lost: with a connection, and with an engine whose address another one has. So one that
has to be heard says where its writer reads. Whoever gets it answers ``RoomHeard``, also where its
request is not there or is over, and until then it is written again.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

K = TypeVar("K")

TAG: Final = b"KVD1"
"""The first frame of a letter."""

MOST_EARLY: Final = 4096
"""Letters that are kept for requests that have not come, and requests that answer; the oldest go
first."""


class RoomWanted(msgspec.Struct, frozen=True, tag="wanted"):
    """The decode engine has pages for this prompt: open the room."""

    room: int
    kvd_room: int
    """Each rank has one of its own."""
    life: str
    host: str
    """Where answers go ..."""
    port: int
    node: str
    """The daemon that will receive."""
    namespace: str
    n_tokens: int
    is_shared: bool
    """Whether tokens alone say what the KV is; else keys are of this life of the room alone."""


class RoomOpen(msgspec.Struct, frozen=True, tag="open"):
    """The room is open at the daemon ``node``."""

    room: int
    life: str
    node: str


class RoomOver(msgspec.Struct, frozen=True, tag="over"):
    """The request has failed, or was given up; ``life`` empty: whichever it is."""

    room: int
    life: str
    host: str
    """Where answers go ..."""
    port: int
    why: str


class RoomHeard(msgspec.Struct, frozen=True, tag="heard"):
    """A letter has come: it need not be written again."""

    room: int
    life: str
    is_over: bool
    """Which one: ``RoomOver``, or ``RoomWanted``."""
    engine: str
    """Who has it: a word that each process draws anew."""


Letter = RoomWanted | RoomOpen | RoomOver | RoomHeard


def frames_of(letter: Letter) -> list[bytes]:
    """As it is sent."""
    return [TAG, msgspec.msgpack.encode(letter)]


def letter_of(frames: list[bytes]) -> Letter | None:
    """What was sent; None: it is none."""
    if len(frames) != 2 or frames[0] != TAG:
        return None
    try:
        letter: Letter = msgspec.msgpack.decode(frames[1], type=Letter)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return letter


class _Kept(Generic[K]):
    """By room, for a while; the oldest go first where they are too many."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._found: OrderedDict[int, tuple[float, K]] = OrderedDict()

    def keep(self, room: int, what: K) -> None:
        self._found[room] = time.monotonic() + self._keep_s, what
        self._found.move_to_end(room)
        while len(self._found) > MOST_EARLY:
            self._found.popitem(last=False)

    def get(self, room: int) -> K | None:
        until_s, what = self._found.get(room, (0.0, None))
        return what if time.monotonic() < until_s else None

    def pop(self, room: int) -> K | None:
        what = self.get(room)
        self._found.pop(room, None)
        return what


class RoomMail:
    """Letters by room, and who reads them; any thread may use it.

    Args:
        keep_s: a letter is kept for so long where nobody reads it yet; and so long it is answered
            that a request has failed.
    """

    def __init__(self, keep_s: float) -> None:
        self._lock = threading.Lock()
        self._readers: dict[int, Callable[[Letter], object]] = {}
        self._failed = _Kept["Callable[[Letter], object]"](keep_s)
        self._early = _Kept[Letter](keep_s)

    def open(self, room: int, read: Callable[[Letter], object]) -> bool:
        """Have letters about a room read from now on; False: another request has it."""
        with self._lock:
            if room in self._readers:
                return False
            self._failed.pop(room)
            self._readers[room] = read
            letter = self._early.pop(room)
        if letter is not None:
            read(letter)
        return True

    def close(self, room: int, *, is_answered: bool = False) -> None:
        """The request of that room is over; whoever still writes may get an answer. Repeatable."""
        with self._lock:
            read = self._readers.pop(room, None)
            if read is not None and is_answered:
                self._failed.keep(room, read)

    def came(self, letter: Letter) -> None:
        """Deliver it, or keep it."""
        with self._lock:
            read = self._readers.get(letter.room) or self._failed.get(letter.room)
            if read is None and not isinstance(letter, RoomHeard):
                self._early.keep(letter.room, letter)
        if read is not None:
            read(letter)
