"""What the daemon and its recorder process say to each other: one message a packet of a socketpair.

The inputs themselves never travel here: they lie in the ring. A socket that ends without
``Goodbye`` means that the daemon is gone, and is itself an order: save.
"""

from __future__ import annotations

import signal
import sys
from typing import Final

import msgspec

PACKET_BYTES: Final = 64 * 1024
"""Longer than any message here."""


DEAF_TO: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that are meant for the daemon, though the whole group gets them."""


class BeginRecording(msgspec.Struct, frozen=True, tag="begin"):
    """The first order: who is recorded, how far back, and where recordings are saved.

    ``at_s``: the time of the node that comes with it, before its first recorded input.
    """

    node: str
    incarnation: str
    kvd: str
    keep_s: float
    directory: str
    at_s: float


class Save(msgspec.Struct, frozen=True, tag="save"):
    """Write a file with every record before position ``upto``; answered by ``SavedFile`` or not.

    ``kind`` becomes part of its name: record or bug. ``state_hash`` is of the live node there, or
    empty when it was too large to be hashed.
    """

    ticket: int
    kind: str
    why: str
    upto: int
    state_hash: str


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The daemon ends as it should: save nothing, end."""


Order = BeginRecording | Save | Goodbye


class Covered(msgspec.Struct, frozen=True, tag="covered"):
    """How far back the recording reaches, now and then."""

    seconds: float
    inputs: int
    n_bytes: int


class SavedFile(msgspec.Struct, frozen=True, tag="saved"):
    """The recording that was asked for under this ticket is written, whole."""

    ticket: int
    path: str
    why: str
    seconds: float
    inputs: int
    n_bytes: int


class NotSaved(msgspec.Struct, frozen=True, tag="not-saved"):
    """The file could not be written; the recording goes on."""

    ticket: int
    why: str


class ShadowStrayed(msgspec.Struct, frozen=True, tag="strayed"):
    """The shadow is in another state than the node was: nothing more can be replayed from it."""

    why: str


Report = Covered | SavedFile | NotSaved | ShadowStrayed

encode = msgspec.msgpack.Encoder().encode
ORDERS: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
REPORTS: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def command(descriptors: tuple[int, int, int], begin: BeginRecording | None = None) -> list[str]:
    """How a recorder process is executed: with its socket, its ring, and the node as bytes.

    ``begin`` is left out where the daemon says it, as its first order.
    """
    said = [] if begin is None else [encode(begin).hex()]
    return [sys.executable, "-P", "-m", "kvd.recorder", *map(str, descriptors), *said]
