"""The two kinds of parts: one attempt to move one room's KV, as either side remembers it.

Plain records. Who writes them: of the decode side ``receive`` and ``verify``, of the prefill side
``send``, ``posts`` and ``settled``; of both, their state, ``protocol`` alone.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.effects import Doubt
from kvd.core.handoff.protocol import Decode, Prefill
from kvd.types import NO_PAGES, Pages, Tokens, count
from kvd.wire.admin import Mark
from kvd.wire.peer import ALL, ReceiveOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.handoff.payload_route import PayloadRoute
    from kvd.core.layout.seal import Seal
    from kvd.core.leases.admission import Waiter
    from kvd.core.settings import Settings
    from kvd.errors import Refusal
    from kvd.wire.peer import Abort, Offer, SourceShare


HISTORY_LINES = 16
"""Transitions kept per part: twice the longest path through either table."""


@mypyc_attr(allow_interpreted_subclasses=True)
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


@mypyc_attr(allow_interpreted_subclasses=True)
class Flow:
    """Bytes moved in the window that runs; it runs only while a post of the part is under way.

    What is reported is whole handles of the transfer process (16 MiB at most), so a window must be
    long enough for one of them at the slowest rate that is still progress.
    """

    __slots__ = ("moved_bytes", "peer_bytes", "since_s", "turn_bytes", "turn_posts")

    def __init__(self) -> None:
        self.since_s = 0.0
        self.moved_bytes = 0
        """Of the part."""
        self.peer_bytes = 0
        """What had been moved to its peer when the window began."""
        self.turn_bytes = 0
        """What had been moved to its peer when the part itself moved last, or began."""
        self.turn_posts = 0
        """How many posts to its peer there were then: what comes later stands behind it."""


@mypyc_attr(allow_interpreted_subclasses=True)
class PeerFlow:
    """The posts to one peer, and what has moved there since the first of them."""

    __slots__ = ("moved_bytes", "posts")

    def __init__(self) -> None:
        self.posts = 0
        self.moved_bytes = 0


@mypyc_attr(allow_interpreted_subclasses=True)
class HandoffPart:
    """What either side remembers of an attempt: with whom, which pages, and what is said when."""

    __slots__ = (
        "handoff",
        "history",
        "id",
        "incarnation",
        "moved_bytes",
        "peer",
        "resend_gap_s",
        "resend_s",
        "routes",
        "seals",
        "share",
        "total_bytes",
    )

    def __init__(self, part_id: int, peer: str) -> None:
        self.id = part_id
        self.peer = peer
        self.incarnation = ""
        """Of the peer: whoever else speaks of ``handoff`` speaks of another one."""
        self.handoff = 0
        """Assigned by the decode side when it offers; 0 before."""
        self.share: SourceShare = ALL
        self.resend_s = 0.0
        self.resend_gap_s = 0.0
        self.moved_bytes = 0
        self.total_bytes = 0
        """Of the pages that were granted."""
        self.routes: tuple[PayloadRoute, ...] = ()
        """What was granted, for each shard of the decode side."""
        self.seals: tuple[Seal, ...] = ()
        """One per route; none where nothing is summed."""
        self.history = PartHistory()

    def plan_resend(self, at_s: float, mine: Settings) -> None:
        """Its last message is said now, and again later."""
        self.resend_s = at_s + self.resend_gap_s
        # Doubled up to a limit: a peer that is gone for minutes is not flooded when it is back.
        self.resend_gap_s = min(2 * self.resend_gap_s, mine.max_resend_s)


RequestName = tuple[int, int, str]
"""What a call that comes again has in common with the first: session, room, request id."""


@mypyc_attr(allow_interpreted_subclasses=True)
class NamedRequest:
    """A request id, and what it was asked for: a call for anything else is another one."""

    __slots__ = (
        *("cache", "digest", "have_tokens", "id", "lease", "n_tokens", "namespace", "pages"),
        "verb",
    )

    def __init__(  # noqa: PLR0913 - the request, field by field
        self,
        request_id: str,
        *,
        verb: str,
        namespace: str,
        digest: bytes,
        n_tokens: int,
        lease: int = 0,
        pages: Pages = NO_PAGES,
        have_tokens: int = 0,
        cache: bool = True,
    ) -> None:
        self.id = request_id
        self.verb = verb
        """``receive``, ``send`` or ``hand_over``."""
        self.namespace = namespace
        """With its epoch."""
        self.digest = digest
        """Of the whole prompt, with the namespace."""
        self.n_tokens = n_tokens
        self.lease = lease
        """The lease that was sent, or the arena that is sent from or received into."""
        self.pages = pages
        """Of an arena."""
        self.have_tokens = have_tokens
        """The first of its pages is for the tokens behind these."""
        self.cache = cache
        """Whether what is written into its lease may be found by others."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ReceiveAttempt:
    """What an engine asked for with one ``receive``: one lease, filled by one part per source.

    Its number is that of its first part. It ends as a whole: every part is delivered and verified,
    or the engine hears why not, once, and what is left of it is drained.
    """

    __slots__ = (
        "arrived_tokens",
        "as_it_comes",
        "aux",
        "deadline_s",
        "doubt",
        "ended",
        "id",
        "is_open",
        "is_preloaded",
        "is_pulled",
        "lease",
        "parts",
        "prefix_tokens",
        "prompt_tokens",
        "request",
        "room",
        "session",
        "since_s",
        "waiter",
    )

    def __init__(
        self,
        attempt_id: int,
        *,
        room: int,
        session: int,
        since_s: float,
        deadline_s: float,
        prompt_tokens: int,
        is_preloaded: bool,
        request: NamedRequest | None,
    ) -> None:
        self.id = attempt_id
        self.room = room
        self.session = session
        self.since_s = since_s
        self.deadline_s = deadline_s
        self.prompt_tokens = prompt_tokens
        self.is_preloaded = is_preloaded
        """Whether its pages are to be in the device buffer too when the engine hears of it."""
        self.request = request
        """What its engine calls it; None: nothing."""
        self.is_open = False
        """Whether its engine was told of a room that was open by then."""
        self.as_it_comes = False
        """Whether its engine hears how far it has come; from OFFERED on, whether it can."""
        self.arrived_tokens = 0
        """What it has heard."""
        self.is_pulled = False
        """Whether its source sends what it has cached, and no engine of it does."""
        self.prefix_tokens = 0
        self.parts: tuple[ReceivePart, ...] = ()
        """In the order in which the engine named the sources; none when it is over."""
        self.aux = b""
        self.lease: LeaseRecord | None = None
        self.waiter: Waiter | None = None
        self.ended: Refusal | None = None
        """Why the engine no longer wants it, or why it failed."""
        self.doubt: Doubt = Doubt.NONE
        """What the writers that are over have left that may still land."""

    @property
    def name(self) -> RequestName | None:
        """By which a call that comes again finds it."""
        return (self.session, self.room, self.request.id) if self.request is not None else None

    @property
    def verb(self) -> str:
        """What it is, in words."""
        return "pull" if self.is_pulled else "receive"

    @property
    def sources(self) -> str:
        """Their names."""
        return ", ".join([part.peer for part in self.parts])

    def in_state(self, *states: Decode) -> list[ReceivePart]:
        """Its parts that are in one of these states."""
        return [part for part in self.parts if part.state in states]


@mypyc_attr(allow_interpreted_subclasses=True)
class ReceivePart(HandoffPart):
    """One attempt to receive one prompt, or what one of several sources sends of it."""

    __slots__ = (
        *("arrived", "attempt", "heard", "is_verified", "landed", "state", "summed", "sums"),
        *("tickets", "unanswered", "unsaid"),
    )

    def __init__(self, part_id: int, peer: str, attempt: ReceiveAttempt) -> None:
        super().__init__(part_id, peer)
        self.attempt = attempt
        self.state: Decode = Decode.QUEUED
        self.sums: dict[int, bytes] = {}
        """What the writer says of the pages of each route, while they are verified."""
        self.tickets: dict[int, int] = {}
        """By route, of what our transfer process is asked to sum, or was told has landed."""
        self.landed: dict[int, int] = {}
        """By route: so many of its first pages our transfer process knows to be whole."""
        self.heard: dict[int, int] = {}
        """By route: of so many of its first pages the writer has said the sums."""
        self.unsaid: dict[int, bytes] = {}
        """By route: those of them that our transfer process was not told."""
        self.summed: dict[int, int] = {}
        """By route: of so many of these it knows what the writer says."""
        self.arrived: dict[int, int] = {}
        """By route: and so many are what was sent, it has said."""
        self.is_verified = False
        """What it sent is good; it waits for the other sources, if there are any."""
        self.unanswered: Offer | Abort | None = None
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
    same = [part for part in parts if part.room == room]  # a thousand may expire at once
    return any(part.peer == peer for part in same)


@mypyc_attr(allow_interpreted_subclasses=True)
class SendingEngine:
    """The engine's half of a send: who, which pages, and the prompt it has. It never changes."""

    __slots__ = ("digest", "lease", "namespace", "pages", "prompt_tokens", "session", "tokens")

    def __init__(
        self,
        session: int,
        lease: LeaseRecord,
        tokens: Tokens,
        digest: bytes,
        pages: Pages = NO_PAGES,
        namespace: str | None = None,
    ) -> None:
        self.session = session
        self.lease = lease
        # An arena has none of its own: what its pages hold is told with each send.
        self.namespace = lease.namespace if namespace is None else namespace
        """The key of it."""
        self.pages = pages
        """Of an arena: those of the prompt; none: those of the lease's row."""
        self.tokens = tokens
        self.digest = digest
        self.prompt_tokens = count(tokens)

    @property
    def row(self) -> Pages:
        """The page of every ``page_size`` tokens of the prompt, from its start."""
        return self.pages or self.lease.page_table


@mypyc_attr(allow_interpreted_subclasses=True)
class FailedSend:
    """What is left of a send whose engine knows that it failed, until that engine ends it."""

    __slots__ = ("lease", "prompt_tokens", "refusal", "session")

    def __init__(self, session: int, refusal: Refusal, lease: int, prompt_tokens: int) -> None:
        self.session = session
        self.refusal = refusal
        self.lease = lease
        """0: it had none."""
        self.prompt_tokens = prompt_tokens


@mypyc_attr(allow_interpreted_subclasses=True)
class PostSums:
    """The sums of the pages that a part has sent, and how many of them were said before its end."""

    __slots__ = ("by_post", "said_posts", "said_units")

    def __init__(self) -> None:
        self.by_post: dict[tuple[int, int], bytes] = {}
        """By route and post, of the pages of each post that is done; ids of posts grow."""
        self.said_units: dict[int, int] = {}
        """By route: so many of its units from the first one on."""
        self.said_posts: dict[int, int] = {}
        """By route: the last of the posts whose sums these are."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Awaited:
    """Whose Offer an engine waits for, and what has become of others'."""

    __slots__ = ("destination", "turned_away", "withdrawn")

    def __init__(self) -> None:
        self.destination = ""
        """The node that the engine names; empty: any whose prompt is the same."""
        self.turned_away = ""
        """The last Offer that was refused, and why."""
        self.withdrawn: dict[str, str] = {}
        """By peer, why it does not offer pages after all."""

    def is_by(self, peer: str) -> bool:
        """Whether an Offer of this node may have the room."""
        return self.destination in {"", peer}


MAX_TAKEN = 64
"""Receives of one kept room that are remembered one by one; of older ones their number."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TakenBy:
    """A receive of a kept room that was committed."""

    __slots__ = ("at_s", "decode_prefix_len", "peer", "sent_bytes", "sent_pages")

    def __init__(self, part: SendPart, at_s: float) -> None:
        self.peer = part.peer
        self.at_s = at_s
        self.decode_prefix_len = part.decode_prefix_len
        self.sent_pages = part.posted_pages
        self.sent_bytes = part.moved_bytes


@mypyc_attr(allow_interpreted_subclasses=True)
class Keeping:
    """A room that stays open behind its engine: how long, for how many, and who has had it."""

    __slots__ = ("limit", "over", "taken", "takers", "ttl_s")

    def __init__(self, ttl_s: float, limit: int) -> None:
        self.ttl_s = ttl_s
        """From ``finish`` on."""
        self.limit = limit
        """So many receives end it; 0: its time alone does."""
        self.over: Refusal | None = None
        """Why nobody is let in any more, while those who are go on."""
        self.takers = 0
        self.taken: deque[TakenBy] = deque(maxlen=MAX_TAKEN)
        """The last of them, oldest first."""


@mypyc_attr(allow_interpreted_subclasses=True)
class SendPart(HandoffPart):
    """One attempt to send one prompt; ``engine`` and ``offer`` are its halves.

    Of a room that is kept the part with ``keeping`` has the room and the engine's word, and meets
    no Offer itself: each receive is a part behind it, with ``kept_by``.
    """

    __slots__ = (
        "after",
        "answer_s",
        "aux",
        "awaited",
        "cursor_tokens",
        "deadline_s",
        "decode_prefix_len",
        "drain_s",
        "end_tokens",
        "ended",
        "engine",
        "finish_call",
        "finishes",
        "flow",
        "generation",
        "in_doubt",
        "is_numbered",
        "keeping",
        "kept_by",
        "linger_s",
        "offer",
        "ordered_units",
        "outcome",
        "outstanding",
        "posted_last",
        "posted_pages",
        "posted_tokens",
        "prompt_tokens",
        "request",
        "room",
        "session",
        "since_s",
        "split",
        "start_tokens",
        "state",
        "sums",
    )

    def __init__(self, part_id: int, *, room: int, state: Prefill, at_s: float) -> None:
        super().__init__(part_id, "")
        self.room = room
        self.state = state
        self.since_s = at_s
        # Of a part that waits for nobody yet it is now; whoever makes it wait gives it another.
        self.deadline_s = at_s
        self.drain_s = 0.0
        self.linger_s = 0.0
        self.answer_s = 0.0
        """Settled, but not Closed: ``finish`` is answered without the outcome from here on."""
        self.session = 0
        """Of the engine; 0 while there is none."""
        self.is_numbered = True
        """Whether its engine knows its number, and hears of it before ``finish`` is answered."""
        self.engine: SendingEngine | None = None
        self.offer: Offer | None = None
        self.awaited = Awaited()
        self.request: NamedRequest | None = None
        """What its engine calls it; None: nothing."""
        self.keeping: Keeping | None = None
        self.kept_by: SendPart | None = None
        """The part that has the room, of one that takes it."""
        self.generation = 0
        self.prompt_tokens = 0
        self.decode_prefix_len = 0
        self.start_tokens = 0
        self.end_tokens = 0
        """What of the prompt it sends: all behind ``decode_prefix_len``, or its share of that."""
        self.cursor_tokens = 0
        self.after = b""
        """The event behind which all tokens below the cursor are written; none: they are."""
        self.posted_tokens = 0
        self.posted_pages = 0
        self.ordered_units: dict[int, int] = {}
        """By route: its units before this one are posted."""
        self.outstanding: set[int] = set()
        self.flow = Flow()
        self.split: tuple[int, ...] = ()
        """How many of the decode side's pages each of ours is, for each component compared."""
        self.posted_last = True
        """Whether what goes with the last chunk is posted; true where there is nothing."""
        self.sums = PostSums()
        self.aux: bytes | None = None
        """Given with ``finish``; None: the engine has not finished."""
        self.finish_call: int | None = None
        self.finishes = False  # by itself, once all of the prompt is written
        self.outcome: ReceiveOutcome = ReceiveOutcome.FAILED
        self.in_doubt = False
        """A post ended with bytes sent and not confirmed."""
        self.ended: Refusal | None = None

    @property
    def is_posted(self) -> bool:
        """Whether nothing is left to be posted."""
        return self.posted_last and self.posted_tokens >= self.end_tokens

    @property
    def checksums(self) -> bytes:
        """The sums of all its posts, route by route in the order of the pages."""
        return b"".join(sums for _, sums in sorted(self.sums.by_post.items()))
