"""Messages between daemons: one frame each, a tagged msgpack array.

``source`` is the sender's incarnation, ``target`` the addressee's as the sender knows it (empty in
a first ``Hello``). A message for another incarnation, or from a superseded one, is never acted on.
All messages are safe to repeat. Evolution: new fields at the end with defaults, tags never reused.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from kvd.errors import Refusal
from kvd.wire.bounds import (
    MAX_GRANTS,
    MAX_MESSAGE,
    OLD_PEER_BYTES,
    Checksums,
    Counter,
    Digest,
    Figure,
    Layout,
    Metadata,
    Name,
    Namespace,
    PromptBytes,
    Relayed,
)

PROTOCOL = 1
"""Version of the peer protocol; another one is refused at Hello with both numbers."""

MAX_TOLD = 512
"""Characters of a sentence about a handoff that crosses the link."""

MAX_TOLD_MARKS = 32

MAX_ROUTES = 1024
"""Of one handoff, whose landed pages are told; of more nothing is."""

MAX_STREAMS = 16
"""Connections of one sending agent that are told."""

Streams = Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_STREAMS)]
"""TCP connections as their sender sees them: ``10.0.0.1:40112>10.0.0.2:39001``."""

Saying = Annotated[str, msgspec.Meta(max_length=MAX_TOLD)]


class ReceiveOutcome(enum.Enum):
    """How a handoff ended, as the side that says it sees it."""

    DELIVERED = "delivered"
    REFUSED = "refused"
    ABORTED = "aborted"
    TIMED_OUT = "timed-out"
    FAILED = "failed"
    COMMITTED = "committed"
    CORRUPT = "corrupt"


class Integrity(enum.Enum):
    """Which pages of a handoff are summed by both sides before anything is kept."""

    FULL = "full"
    SAMPLED = "sampled"
    OFF = "off"


class PeerMessage(msgspec.Struct, frozen=True, array_like=True):
    """What every message begins with: who speaks, and to whom, as incarnations."""

    source: Name
    target: Name


class Hello(PeerMessage, frozen=True, tag="hello"):
    """Opens a link, and announces a new generation of the sender's receiving transfer process.

    Sent only after the sender has reaped every older transfer process of its own: a Hello with a
    new incarnation is the proof that the old writer is gone. ``max_frame_bytes``: the longest
    message that it reads. ``serves_pulls``: it answers ``AskPrefix``. ``knows_epochs``: it reads
    the epoch in ``Offer`` and ``AskPrefix``. ``home``: processes of one home never live at once,
    and their incarnations compare by age; of an older version, empty.
    """

    node: Name
    layout: Layout
    generation: Counter
    metadata: Metadata
    max_prompt_tokens: Counter
    max_aux_bytes: Counter
    protocol: Figure = PROTOCOL
    max_frame_bytes: Counter = OLD_PEER_BYTES
    serves_pulls: bool = False
    knows_epochs: bool = False
    home: Name = ""


class Ping(PeerMessage, frozen=True, tag="ping"):
    """Keeps the link, and bounds what both sides remember.

    ``offer_floor``: the lowest handoff id still open at the sender's decode side.
    ``settled_floor``: the lowest id whose Settled the sender's prefill side still repeats.
    Ids below a floor are over.
    ``state``: ``serving``, ``draining`` (it begins nothing new, ``why`` says why) or ``leaving``
    (its last message: the process ends). Empty in an echo, and from a daemon that does not say.
    ``streams``: in an echo, the connections of the sender's agent towards the addressee, if it
    lives: of nobody whose end was known when the ping left.
    """

    number: Counter
    echo: Counter
    offer_floor: Counter
    settled_floor: Counter
    state: Name = ""
    why: Relayed = ""
    streams: Streams = ()


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """Destination pages of one component, with the token range that they stand for."""

    component: Name
    start_tokens: Figure
    end_tokens: Figure
    pages: bytes


class Role(enum.Enum):
    """What one source of a handoff is asked for."""

    WRITER = "writer"
    """Its share of the pages, which may be none."""
    DUMMY = "dummy"
    """Nothing: it has no part of what the decode side keeps. It concludes all the same."""


class SourceShare(msgspec.Struct, frozen=True, array_like=True):
    """What one source of a handoff sends: source ``part`` of ``parts``, as the engine listed them.

    The pages of the delta are cut among the ``ranks`` sources that have the same, of which it is
    number ``rank``: see ``kvd.core.layout.shards.page_share``. One of all sources is
    ``authoritative``: it sends the aux, and what belongs to no single token (windows, states).
    """

    part: Counter = 0
    parts: Counter = 1
    rank: Counter = 0
    ranks: Counter = 1
    role: Role = Role.WRITER
    is_authoritative: bool = True


ALL = SourceShare()
"""Of the only source."""


class Offer(PeerMessage, frozen=True, tag="offer"):
    """Decode to prefill: pages for ``[decode_prefix_len, prompt_tokens)`` of this prompt.

    ``integrity``: the sums that Settled(DELIVERED) must bring; the decode side decides.
    ``waited_s``: how long ago the engine asked for it. A peer that does not say has asked just now.
    ``share``: which part of it this source sends; the grants are for that part alone.
    ``epoch``: of the prompt's namespace; the digest covers it too.
    ``is_open``: its engine was told of a room that was open by then, so none that comes later is
    meant.
    ``as_it_comes``: its engine uses what has come before the rest: Progress is to have sums.
    """

    handoff: Counter
    room: int
    generation: Counter
    prompt_tokens: Figure
    decode_prefix_len: Figure
    digest: Digest
    grants: Annotated[tuple[Grant, ...], msgspec.Meta(max_length=MAX_GRANTS)]
    deadline_s: float
    integrity: Integrity = Integrity.OFF
    waited_s: float = 0.0
    share: SourceShare = ALL
    epoch: Counter = 0
    is_open: bool = False
    as_it_comes: bool = False


class Abort(PeerMessage, frozen=True, tag="abort"):
    """Decode to prefill: stop, and say Settled when no byte can land any more."""

    handoff: Counter
    room: int
    reason: Relayed


class Closed(PeerMessage, frozen=True, tag="closed"):
    """Decode to prefill: how the handoff ended here. The answer to Settled, for ever."""

    handoff: Counter
    outcome: ReceiveOutcome
    reason: Refusal | None = None


class Accept(PeerMessage, frozen=True, tag="accept"):
    """Prefill to decode: the engine is here and agrees with the offer.

    ``decode_prefix_len``: where it begins to send. All sources of a handoff must begin at the same
    token; None from a peer that does not say.
    """

    handoff: Counter
    decode_prefix_len: Figure | None = None


class Progress(PeerMessage, frozen=True, tag="progress"):
    """Prefill to decode, lossy: bytes written so far.

    ``landed``: of each route of the Offer, in the order of its sums, how many of the pages from the
    first one on are whole over there; empty where nothing is summed, or from a peer that does not
    say.
    ``checksums``: where the Offer asks for it, as in Settled, those of some pages of each route;
    ``summed`` says behind which one and up to which, two numbers a route. Each sum is said once:
    who has missed one waits for Settled.
    """

    handoff: Counter
    moved_bytes: Counter
    landed: Annotated[tuple[Counter, ...], msgspec.Meta(max_length=MAX_ROUTES)] = ()
    summed: Annotated[tuple[Counter, ...], msgspec.Meta(max_length=2 * MAX_ROUTES)] = ()
    checksums: Checksums = b""


class Settled(PeerMessage, frozen=True, tag="settled"):
    """Prefill to decode, the writer's last word: I will never again write for this handoff.

    ``in_doubt``: the writer destroyed its agent, or died, with bytes sent and not confirmed. They
    may still come, after this message too, so the decode side frees the pages only when every
    connection has ended on which they can.
    ``checksums``: of a delivered prompt, what the Offer asked for: a sum of 8 bytes for each page
    that ``kvd.core.layout.seal.chosen`` names, ascending.
    """

    handoff: Counter
    outcome: ReceiveOutcome
    reason: Refusal | None = None
    aux: bytes = b""
    moved_bytes: Counter = 0
    in_doubt: bool = False
    checksums: Checksums = b""


class Withdrawn(PeerMessage, frozen=True, tag="withdrawn"):
    """Decode to prefill, lossy: this room was given up before an Offer went out for it.

    Not answered where it is acted on: the prefill engine that waits for the Offer of this node
    hears it before its deadline. A room that is open for another node is not touched: Reject.
    ``ask``: room 0, nobody waits any more for the answer to that ``AskPrefix``.
    """

    room: int
    reason: Relayed
    ask: Counter = 0


class Reject(PeerMessage, frozen=True, tag="reject"):
    """What you sent could not be acted on. Never answered."""

    refusal: Refusal


class AskStory(PeerMessage, frozen=True, tag="ask-story"):
    """What do you know of your end of this handoff of ours? Answer: ``Story``, lossy.

    ``side`` is the addressee's: ``decode`` or ``prefill``. A daemon that does not know the question
    says Reject, and the asker stops waiting after a second.
    """

    ask: Counter
    handoff: Counter
    room: int
    side: Name


class Told(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened to a handoff over there, and how long before it was told."""

    ago_s: float
    what: Saying


class Story(PeerMessage, frozen=True, tag="story"):
    """The answer to ``AskStory``; ``state`` is empty where the asker has no such handoff here."""

    ask: Counter
    state: Name = ""
    waiting_for: Saying = ""
    prompt_tokens: Figure = 0
    decode_prefix_len: Figure = 0
    moved_bytes: Counter = 0
    total_bytes: Counter = 0
    outstanding_posts: Counter = 0
    deadline_in_s: float = 0.0
    marks: Annotated[tuple[Told, ...], msgspec.Meta(max_length=MAX_TOLD_MARKS)] = ()


class AskPrefix(PeerMessage, frozen=True, tag="ask-prefix"):
    """Decode to prefill: what have you cached of this prompt? Send it, from what I have on.

    Answer: ``PrefixFound``; to a repetition the same. ``have_tokens`` are cached over here.
    ``epoch``: of the namespace; one that is in another epoch over there is refused.
    """

    ask: Counter
    namespace: Namespace
    tokens: PromptBytes
    have_tokens: Figure
    deadline_s: float
    epoch: Counter = 0


class PrefixFound(PeerMessage, frozen=True, tag="prefix-found"):
    """Prefill to decode: ``n_tokens`` of it are cached here, and sent to you in this room.

    Room 0: they are no more than you have, so nothing is sent and nothing is kept.
    """

    ask: Counter
    room: int = 0
    n_tokens: Figure = 0
    refusal: Refusal | None = None


Message = (
    Hello
    | Ping
    | Offer
    | Abort
    | Closed
    | Accept
    | Progress
    | Settled
    | Withdrawn
    | Reject
    | AskStory
    | Story
    | AskPrefix
    | PrefixFound
)


def flaw(message: Message) -> str | None:
    """What is too long in the refusal that a message carries; None if nothing is."""
    match message:
        case Reject(refusal=refusal) | Closed(reason=Refusal() as refusal):
            return _excess(refusal)
        case Settled(reason=Refusal() as refusal) | PrefixFound(refusal=Refusal() as refusal):
            return _excess(refusal)
        case _:
            return None


def _excess(refusal: Refusal) -> str | None:
    numbers = refusal.numbers
    texts = [refusal.message, refusal.side, *numbers]
    texts += [value for value in numbers.values() if isinstance(value, str)]
    longest = max(map(len, texts))
    if longest > MAX_MESSAGE:
        return f"a text of {longest} characters in a refusal, at most {MAX_MESSAGE} are read"
    return None
