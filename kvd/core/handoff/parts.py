"""The two kinds of parts: one attempt to move one room's KV, as either side remembers it.

Plain records. Who writes them: of the decode side ``receive`` and ``verify``, of the prefill side
``send``, ``posts`` and ``settled``; of both, their state, ``protocol`` alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from kvd.core.cache.lease_record import LeaseRecord
from kvd.core.effects import Doubt
from kvd.core.handoff.protocol import Decode, Prefill
from kvd.errors import Refusal
from kvd.types import Tokens, count
from kvd.wire.admin import Mark
from kvd.wire.peer import ALL, ReceiveOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.core.handoff.payload import PayloadRoute
    from kvd.core.layout.seal import Seal
    from kvd.core.leases.admission import Waiter
    from kvd.core.settings import Settings
    from kvd.wire.peer import Abort, Offer, SourceShare


HISTORY_LINES = 16
"""Transitions kept per part: twice the longest path through either table."""


class PartHistory:
    """Its last transitions, each with its time: a bug report and ``kvd why`` carry them."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str]] = deque(maxlen=HISTORY_LINES)

    def add_line(self, at_s: float, line: str) -> None:
        """Append what happened."""
        self._lines.append((at_s, line))

    def lines(self, now_s: float) -> tuple[str, ...]:
        """Oldest first, each with its age."""
        return tuple(f"{now_s - at_s:.3f} s ago: {line}" for at_s, line in self._lines)

    def marks(self, now_s: float) -> tuple[Mark, ...]:
        """The same as data."""
        return tuple(Mark(now_s - at_s, line) for at_s, line in self._lines)

    @property
    def last_s(self) -> float:
        """When the last transition was; 0 where there was none."""
        return self._lines[-1][0] if self._lines else 0.0


@dataclass(slots=True, eq=False, repr=False)
class Flow:
    """Bytes moved in the window that runs; it runs only while a post of the part is under way.

    What is reported is whole handles of the transfer process (16 MiB at most), so a window must be
    long enough for one of them at the slowest rate that is still progress.
    """

    since_s: float = 0.0
    moved_bytes: int = 0
    """Of the part."""
    peer_bytes: int = 0
    """What had been moved to its peer when the window began."""
    turn_bytes: int = 0
    """What had been moved to its peer when the part itself moved last, or began."""
    turn_posts: int = 0
    """How many posts to its peer there were then: what comes later stands behind it."""


@dataclass(slots=True, eq=False, repr=False)
class PeerFlow:
    """The posts to one peer, and what has moved there since the first of them."""

    posts: int = 0
    moved_bytes: int = 0


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class HandoffPart:
    """What either side remembers of an attempt: with whom, which pages, and what is said when."""

    id: int
    peer: str = ""
    incarnation: str = ""
    """Of the peer: whoever else speaks of ``handoff`` speaks of another one."""
    handoff: int = 0
    """Assigned by the decode side when it offers; 0 before."""
    share: SourceShare = ALL
    resend_s: float = 0.0
    resend_gap_s: float = 0.0
    moved_bytes: int = 0
    total_bytes: int = 0
    """Of the pages that were granted."""
    routes: tuple[PayloadRoute, ...] = ()
    """What was granted, for each shard of the decode side."""
    seals: tuple[Seal, ...] = ()
    """One per route; none where nothing is summed."""
    history: PartHistory = field(default_factory=PartHistory)

    def plan_resend(self, at_s: float, mine: Settings) -> None:
        """Its last message is said now, and again later."""
        self.resend_s = at_s + self.resend_gap_s
        # Doubled up to a limit: a peer that is gone for minutes is not flooded when it is back.
        self.resend_gap_s = min(2 * self.resend_gap_s, mine.max_resend_s)


@dataclass(slots=True, eq=False, repr=False)
class ReceiveAttempt:
    """What an engine asked for with one ``receive``: one lease, filled by one part per source.

    Its number is that of its first part. It ends as a whole: every part is delivered and verified,
    or the engine hears why not, once, and what is left of it is drained.
    """

    id: int
    room: int
    session: int
    since_s: float
    deadline_s: float
    prompt_tokens: int
    is_preloaded: bool
    """Whether its pages are to be in the device buffer too when the engine hears of it."""
    prefix_tokens: int = 0
    parts: tuple[ReceivePart, ...] = ()
    """In the order in which the engine named the sources; none when it is over."""
    aux: bytes = b""
    lease: LeaseRecord | None = None
    waiter: Waiter | None = None
    ended: Refusal | None = None
    """Why the engine no longer wants it, or why it failed."""
    doubt: Doubt = Doubt.NONE
    """What the writers that are over have left that may still land."""

    @property
    def sources(self) -> str:
        """Their names."""
        return ", ".join([part.peer for part in self.parts])

    def in_state(self, *states: Decode) -> list[ReceivePart]:
        """Its parts that are in one of these states."""
        return [part for part in self.parts if part.state in states]


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class ReceivePart(HandoffPart):
    """One attempt to receive one prompt, or what one of several sources sends of it."""

    attempt: ReceiveAttempt
    state: Decode = Decode.QUEUED
    sums: dict[int, bytes] = field(default_factory=dict)
    """What the writer says of the pages of each route, while they are verified."""
    tickets: dict[int, int] = field(default_factory=dict)
    """By route, of what our transfer process is asked to sum, or was told has landed."""
    landed: dict[int, int] = field(default_factory=dict)
    """By route: so many of its first pages our transfer process knows to be whole."""
    is_verified: bool = False
    """What it sent is good; it waits for the other sources, if there are any."""
    unanswered: Offer | Abort | None = None
    """What is repeated until the prefill side answers."""

    @property
    def room(self) -> int:
        """The rendezvous number."""
        return self.attempt.room

    @property
    def session(self) -> int:
        """Of the engine."""
        return self.attempt.session

    @property
    def since_s(self) -> float:
        """When the engine asked for it."""
        return self.attempt.since_s

    @property
    def deadline_s(self) -> float:
        """When it is given up."""
        return self.attempt.deadline_s

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.attempt.prompt_tokens

    @property
    def prefix_tokens(self) -> int:
        """Of these, cached here."""
        return self.attempt.prefix_tokens

    @property
    def lease(self) -> LeaseRecord | None:
        """Whose pages it fills, with the other sources."""
        return self.attempt.lease

    @property
    def waiter(self) -> Waiter | None:
        """While it is queued."""
        return self.attempt.waiter

    @property
    def ended(self) -> Refusal | None:
        """Why the engine no longer wants it, or why it failed."""
        return self.attempt.ended


def waits_for_others(part: ReceivePart) -> bool:
    """Whether what it sent is good, and that of another source is not known to be."""
    return part.is_verified and not all(one.is_verified for one in part.attempt.parts)


def is_wanted(room: int, peer: str, parts: Iterable[ReceivePart]) -> bool:
    """Whether a receive waits for that room of that peer, as where two attempts overlap."""
    same = [one for one in parts if one.room == room]  # a thousand may expire at once
    return any(one.peer == peer for one in same)


class SendingEngine(msgspec.Struct, frozen=True):
    """The engine's half of a send: who, which pages, and the prompt it has."""

    session: int
    lease: LeaseRecord
    tokens: Tokens
    digest: bytes

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return count(self.tokens)


class FailedSend(msgspec.Struct, frozen=True):
    """What is left of a send whose engine knows that it failed, until that engine ends it."""

    session: int
    refusal: Refusal
    lease: int
    """0: it had none."""
    prompt_tokens: int


@dataclass(slots=True, eq=False, repr=False)
class Awaited:
    """Whose Offer an engine waits for, and what has become of others'."""

    destination: str = ""
    """The node that the engine names; empty: any whose prompt is the same."""
    turned_away: str = ""
    """The last Offer that was refused, and why."""
    withdrawn: dict[str, str] = field(default_factory=dict)
    """By peer, why it does not offer pages after all."""

    def is_by(self, peer: str) -> bool:
        """Whether an Offer of this node may have the room."""
        return self.destination in {"", peer}


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class SendPart(HandoffPart):
    """One attempt to send one prompt; ``engine`` and ``offer`` are its halves."""

    room: int
    state: Prefill
    since_s: float
    deadline_s: float
    drain_s: float = 0.0
    linger_s: float = 0.0
    answer_s: float = 0.0
    """Settled, but not Closed: ``finish`` is answered without the outcome from here on."""
    session: int = 0
    """Of the engine; 0 while there is none."""
    is_numbered: bool = True
    """Whether its engine knows its number, and hears of it before ``finish`` is answered."""
    engine: SendingEngine | None = None
    offer: Offer | None = None
    awaited: Awaited = field(default_factory=Awaited)
    generation: int = 0
    prompt_tokens: int = 0
    decode_prefix_len: int = 0
    start_tokens: int = 0
    end_tokens: int = 0
    """What of the prompt it sends: all behind ``decode_prefix_len``, or its share of that."""
    cursor_tokens: int = 0
    after: bytes = b""
    """The event behind which all tokens below the cursor are written; none: they are."""
    posted_tokens: int = 0
    posted_pages: int = 0
    ordered_units: dict[int, int] = field(default_factory=dict)
    """By route: its units before this one are posted."""
    outstanding: set[int] = field(default_factory=set)
    flow: Flow = field(default_factory=Flow)
    split: tuple[int, ...] = ()
    """How many of the decode side's pages each of ours is, for each component compared."""
    posted_last: bool = True
    """Whether what goes with the last chunk is posted; true where there is nothing."""
    sums: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """By route and post, of the pages of each post that is done; ids of posts grow."""
    aux: bytes | None = None
    """Given with ``finish``; None: the engine has not finished."""
    finish_call: int | None = None
    outcome: ReceiveOutcome = ReceiveOutcome.FAILED
    in_doubt: bool = False
    """A post ended with bytes sent and not confirmed."""
    ended: Refusal | None = None

    @property
    def is_posted(self) -> bool:
        """Whether nothing is left to be posted."""
        return self.posted_last and self.posted_tokens >= self.end_tokens

    @property
    def checksums(self) -> bytes:
        """The sums of all its posts, route by route in the order of the pages."""
        return b"".join(sums for _, sums in sorted(self.sums.items()))
