"""Messages between daemons: one frame each, a tagged msgpack array.

``source`` is the sender's incarnation, ``target`` the addressee's as the sender knows it (empty in
a first ``Hello``). A message for another incarnation, or from a superseded one, is never acted on.
All messages are safe to repeat. Evolution: new fields at the end with defaults, tags never reused.
"""

from __future__ import annotations

import enum

import msgspec

from kvd.errors import Refusal

PROTOCOL = 1
"""Version of the peer protocol; another one is refused at Hello with both numbers."""


class Outcome(enum.Enum):
    """How a handoff ended, as the side that says it sees it."""

    DELIVERED = "delivered"
    REFUSED = "refused"
    ABORTED = "aborted"
    TIMED_OUT = "timed-out"
    FAILED = "failed"
    COMMITTED = "committed"
    CORRUPT = "corrupt"


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Opens a link, and announces a new generation of the sender's receiving transfer process.

    Sent only after the sender has reaped every older transfer process of its own: a Hello with a
    new incarnation is the proof that the old writer is gone.
    """

    source: str
    target: str
    node: str
    layout: str
    generation: int
    metadata: bytes
    max_prompt_tokens: int
    max_aux_bytes: int
    protocol: int = PROTOCOL


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Keeps the link, and bounds what both sides remember.

    ``offer_floor``: the lowest handoff id still open at the sender's decode side.
    ``settled_floor``: the lowest id whose Settled the sender's prefill side still repeats.
    Ids below a floor are over.
    """

    source: str
    target: str
    number: int
    echo: int
    offer_floor: int
    settled_floor: int


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """Destination pages of one component, with the token range that they stand for."""

    component: str
    start_tokens: int
    end_tokens: int
    pages: bytes


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """Decode to prefill: pages for ``[decode_prefix_len, prompt_tokens)`` of this prompt."""

    source: str
    target: str
    handoff: int
    room: int
    generation: int
    prompt_tokens: int
    decode_prefix_len: int
    digest: bytes
    grants: tuple[Grant, ...]
    deadline_s: float


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Decode to prefill: stop, and say Settled when no byte can land any more."""

    source: str
    target: str
    handoff: int
    room: int
    reason: str


class Closed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """Decode to prefill: how the handoff ended here. The answer to Settled, for ever."""

    source: str
    target: str
    handoff: int
    outcome: Outcome
    reason: Refusal | None = None


class Accept(msgspec.Struct, frozen=True, array_like=True, tag="accept"):
    """Prefill to decode: the engine is here and agrees with the offer."""

    source: str
    target: str
    handoff: int


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """Prefill to decode, lossy: bytes written so far."""

    source: str
    target: str
    handoff: int
    moved_bytes: int


class Settled(msgspec.Struct, frozen=True, array_like=True, tag="settled"):
    """Prefill to decode, the writer's last word: I will never again write for this handoff.

    ``in_doubt``: the writer destroyed its agent with bytes sent and not confirmed. They may sit in
    the decode side's own socket buffers, so that side frees the pages only when it is quiet.
    """

    source: str
    target: str
    handoff: int
    outcome: Outcome
    reason: Refusal | None = None
    aux: bytes = b""
    moved_bytes: int = 0
    in_doubt: bool = False


class Reject(msgspec.Struct, frozen=True, array_like=True, tag="reject"):
    """What you sent could not be acted on. Never answered."""

    source: str
    target: str
    refusal: Refusal


Message = Hello | Ping | Offer | Abort | Closed | Accept | Progress | Settled | Reject
