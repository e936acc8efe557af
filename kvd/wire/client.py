"""Messages between an engine and its daemon, on the client socket.

ZMQ, a DEALER to the daemon's ROUTER; the routing id is the session's token, issued on the attach
socket (``attach``). Frames are ``[header]`` or ``[header, tokens]``: the header is one ``Request``;
tokens are raw little-endian int32, and so are page ids and page numbers inside a message.

Every request gets exactly one answer with its ``call`` (``Failed`` or the one named in its
docstring); pushes carry no call. What the daemon has to say in one turn of its loop comes as one
message, ``Several``. Evolution: new fields at the end with defaults, tags never reused.

Rows. A lease has a row of page ids for the first component (``pages``), and whole rows for every
other with a page pool of its own (``beside``), in the order of the specification. A companion's
pages follow from the first component's: it has no row. Id 0 in a row beside means: no page.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvd.errors import Refusal
from kvd.wire.bounds import (
    MAX_PROMPTS,
    Call,
    EventHandle,
    Figure,
    Name,
    Namespace,
    Priority,
    Reason,
)
from kvd.wire.events import Event
from kvd.wire.pins import PinPrefix, PrefetchPrompt, PrefixPinned, UnpinPrefix
from kvd.wire.snapshot import Snapshot

# ---- requests on the client socket ---------------------------------------------------------------


class RequestHead(msgspec.Struct, frozen=True, array_like=True):
    """What every request begins with; a reader of this alone skips what follows."""

    tag: str
    call: Call


class SentShare(msgspec.Struct, frozen=True, array_like=True):
    """What a send has to send: KV of tokens ``[start_tokens, end_tokens)``, all of it or a share.

    Sources with the same shards divide the pages: this is number ``rank`` of ``ranks`` of them. A
    dummy sends nothing, and concludes all the same. The aux of ``finish`` travels from the
    authoritative source alone.
    """

    rank: int
    ranks: int
    start_tokens: int
    end_tokens: int
    is_dummy: bool
    is_authoritative: bool


class OpenLease(msgspec.Struct, frozen=True, array_like=True, tag="lease"):
    """Lock the cached prefix of the tokens frame, hold pages for the rest. Answer: ``Leased``.

    ``promise_tokens``: pages for so many more, behind the reserve, are never short: they are not
    taken, and whoever extends the lease by these tokens has them. ``step_tokens``: window pages are
    wanted for so many tokens ahead of what is computed, and move on with ``SlideLease``; 0: for all
    tokens at once. ``tiers``: ``wait`` for pages of the prompt that lie in a tier below the pool,
    for a bounded time; ``now`` takes what is in the pool; nothing said is ``wait``.
    """

    call: Call
    namespace: Namespace = ""
    reserve_tokens: Figure = 0
    priority: Priority = 0
    deadline_s: float = 30.0
    cache: bool = True
    step_tokens: Figure = 0
    promise_tokens: Figure = 0
    tiers: Name = ""


class HoldPrefix(msgspec.Struct, frozen=True, array_like=True, tag="hold"):
    """Lock what is cached of the tokens frame and hold no pages for the rest. Answer: ``Leased``.

    Never waits, and goes past whoever waits for room: it takes none. The lease has the cached
    tokens, and grows by ``ExtendLease``.
    """

    call: Call
    namespace: Namespace = ""
    priority: Priority = 0
    cache: bool = True


class ExtendLease(msgspec.Struct, frozen=True, array_like=True, tag="extend"):
    """Hold pages for ``n_tokens`` more, now or not at all. Answer: ``PageTable``."""

    call: Call
    lease: int
    n_tokens: Figure


class CommitLease(msgspec.Struct, frozen=True, array_like=True, tag="commit"):
    """KV of the known tokens and of the tokens frame is written. Answer: ``PageTable``."""

    call: Call
    lease: int


class ReleaseLease(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """Unlock and free; what was said to be written stays cached. Answer: ``Done``."""

    call: Call
    lease: int


class CommitAndRelease(msgspec.Struct, frozen=True, array_like=True, tag="commit-release"):
    """``CommitLease`` with the tokens frame, then ``ReleaseLease``. Answer: ``Done``."""

    call: Call
    lease: int


class SayWritten(msgspec.Struct, frozen=True, array_like=True, tag="written"):
    """KV of the tokens below ``upto_tokens`` is in the lease's pages. Answer: ``Done``.

    Number ``rank`` of the ``ranks`` processes that each write a part of every page says so for its
    part; what the least of them has said counts. From the first word on, a commit that names no
    number means what was said and no more. Sends of the prompt post as far as that least is.
    ``after``: so it is once this event has come.
    """

    call: Call
    lease: int
    upto_tokens: Figure
    rank: Figure = 0
    ranks: Figure = 1
    after: EventHandle = b""


class CommitUpTo(msgspec.Struct, frozen=True, array_like=True, tag="commit-upto"):
    """The lease knows the tokens frame too; KV below ``upto_tokens`` is written.

    Answer: ``PageTable``. None: as far as was said before, or all of it where nothing was.
    Without ``swaps`` the lease's pages stay in its row where the tree has equal ones, until a later
    commit with it. A tag of its own: a daemon that does not know the number must not commit more.
    """

    call: Call
    lease: int
    upto_tokens: Figure | None = None
    swaps: bool = True


class CommitAndExtend(msgspec.Struct, frozen=True, array_like=True, tag="commit-extend"):
    """``ExtendLease``, then ``CommitUpTo`` with the tokens frame: both, or none of them.

    Answer: ``PageTable``. A tag of its own: a daemon that does not know it must not commit alone.
    """

    call: Call
    lease: int
    extend_tokens: Figure
    upto_tokens: Figure | None = None
    swaps: bool = True


class ReleaseUpTo(msgspec.Struct, frozen=True, array_like=True, tag="release-upto"):
    """``CommitUpTo`` with the tokens frame, then ``ReleaseLease``. Answer: ``Done``."""

    call: Call
    lease: int
    upto_tokens: Figure


class ReceiveRequest(msgspec.Struct, frozen=True, array_like=True, tag="receive"):
    """Decode side of a handoff. Answer ``Receiving``, then push ``Received``/``ReceiveFailed``.

    ``tier``: where the prompt's pages shall lie, in a pool with KV in host memory and a device
    buffer: ``device`` has page ``n`` of the prompt in page ``n`` of the buffer row too when
    ``Received`` comes; ``host``, or nothing said, in host memory alone. ``step_tokens``: as in
    ``OpenLease``, for the tokens after the prompt. Each ``source`` sends a part, or all fail.
    Room 0: there is none. The one source sends what it has cached of the prompt; the lease knows
    as many tokens, and has pages for all.
    """

    call: Call
    room: int
    source: tuple[Name, ...]
    namespace: Namespace = ""
    reserve_tokens: Figure = 0
    priority: Priority = 0
    deadline_s: float = 30.0
    cache: bool = True
    tier: Name | None = None
    step_tokens: Figure = 0
    request_id: Name = ""
    """Asked again with the same one, by the same session, it is the same receive; it names one
    prompt in one namespace, and any other is refused."""
    arena: int = 0
    """The KV lands in ``pages`` of it, one for each page of the tokens from ``have_tokens`` on."""
    pages: bytes = b""
    have_tokens: Figure = 0
    """The KV of so many first tokens is there already, in whatever pages; it is not sent."""
    promise_tokens: Figure = 0
    """As in ``OpenLease``."""
    is_open: bool = False
    """The room was opened before this is asked: where no engine has it, none is waited for."""
    as_it_comes: bool = False
    """Push ``Arriving`` as pages come, where that can be told of this pool and this source."""
    tiers: Name = ""
    """As in ``OpenLease``, of the decode side; what was in a tier is not sent then."""


class CancelReceive(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """The engine no longer wants it. Answer: ``Done``; the push says ``cancelled``."""

    call: Call
    receive: int


class SendRequest(msgspec.Struct, frozen=True, array_like=True, tag="send"):
    """Prefill side of a handoff. Answer ``Sending`` at once; pushes ``Accepted``/``SendFailed``.

    An empty tokens frame: all tokens that the lease knows.
    """

    call: Call
    room: int
    lease: int
    namespace: Namespace = ""
    deadline_s: float = 30.0
    peer: Name | None = None
    """The node that the room is for; None: the first one whose prompt is the same has it."""
    ttl_s: float = 0.0
    """Kept so long behind ``finish``, for whoever takes it; 0: not kept, unless ``takers``."""
    takers: Figure = 0
    """So many receives end a kept room; 0: as many as come while it is kept."""
    request_id: Name = ""
    """Asked again with the same one, by the same session, it is the same send; see ``receive``."""
    pages: bytes = b""
    """Of an arena, which ``lease`` is then: one for each page of the tokens."""
    when_written: bool = False
    """Of a kept room: it is finished, without an aux, as soon as all of the prompt is written."""


class Advance(msgspec.Struct, frozen=True, array_like=True, tag="advance"):
    """KV below ``upto_tokens`` is written; legal before the offer came. Answer: ``Done``.

    ``after``: it is when this event has come; nothing of it is read before.
    """

    call: Call
    send: int
    upto_tokens: Figure
    after: EventHandle = b""


class Finish(msgspec.Struct, frozen=True, array_like=True, tag="finish"):
    """All KV is written (``after``: as in ``Advance``). Answer, in the end: ``Finished``."""

    call: Call
    send: int
    aux: bytes = b""
    after: EventHandle = b""


class AbortSend(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """The engine failed. Answer: ``Done``."""

    call: Call
    send: int
    reason: Reason


class MatchPrefix(msgspec.Struct, frozen=True, array_like=True, tag="match"):
    """How much of the tokens frame is cached here; changes nothing. Answer: ``MatchReply``."""

    call: Call
    namespace: Namespace = ""


class GetSnapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """Answer: ``Snapshotted``."""

    call: Call


class Subscribe(msgspec.Struct, frozen=True, array_like=True, tag="subscribe"):
    """From now on push every event as ``Events``. Answer: ``Done``."""

    call: Call


class Unsubscribe(msgspec.Struct, frozen=True, array_like=True, tag="unsubscribe"):
    """No more ``Events``. Answer: ``Done``."""

    call: Call


class CancelCall(msgspec.Struct, frozen=True, array_like=True, tag="cancel-call"):
    """Nobody waits any more for the lease, receive or resumption of call ``of``: leave the queue.

    The send of a ``HandOver`` is given up. Answer: ``Done``; the call itself is answered too, with
    ``cancelled`` if it was still waiting.
    """

    call: Call
    of: Call


class RetractLease(msgspec.Struct, frozen=True, array_like=True, tag="retract"):
    """KV of the known tokens and of the tokens frame is written; give every page back.

    ``keep``: ``host`` saves the bytes of those pages first, ``nothing`` does not. Answer, when the
    pages are free: ``Retracted``.
    """

    call: Call
    lease: int
    keep: Name = "host"


class ResumeLease(msgspec.Struct, frozen=True, array_like=True, tag="resume"):
    """A retracted lease wants its pages again; waits before every new one. Answer: ``Resumed``."""

    call: Call
    lease: int
    deadline_s: float = 30.0


class SlideLease(msgspec.Struct, frozen=True, array_like=True, tag="slide"):
    """KV from ``upto_tokens`` on is computed next: window pages wholly behind the window go back.

    Never waits. Answer: ``PageTable``.
    """

    call: Call
    lease: int
    upto_tokens: Figure


class FetchPages(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Pages of the lease's host KV are wanted in its device buffer. Answer: ``FetchReply``.

    ``pages`` are logical page numbers, the first page of the prompt is 0; ``ahead`` are those that
    the next step is likely to want: they are copied without anybody waiting for them.
    """

    call: Call
    lease: int
    pages: bytes
    ahead: bytes = b""


class HandOver(msgspec.Struct, frozen=True, array_like=True, tag="hand-over"):
    """``SendRequest`` and ``Finish`` of what is all computed. Answer, in the end: ``Finished``.

    An empty tokens frame: all tokens that the lease knows. No push comes of it, as its engine hears
    of no number. ``ends_lease``: the lease is over with it, and what was said to be written stays
    cached; not with ``after``, which has yet to come.
    """

    call: Call
    room: int
    lease: int
    namespace: Namespace = ""
    deadline_s: float = 30.0
    peer: Name | None = None
    aux: bytes = b""
    after: EventHandle = b""
    ends_lease: bool = False
    ttl_s: float = 0.0
    takers: Figure = 0
    request_id: Name = ""
    pages: bytes = b""


class KeepRoom(msgspec.Struct, frozen=True, array_like=True, tag="keep-room"):
    """Keep a room of this session for ``ttl_s`` from now on; 0 ends it. Answer: ``RoomKept``.

    Who receives it already goes on to its end. With 0 also a room for one receive of another
    session, that has finished: who was to receive it has the prompt on this node.
    """

    call: Call
    room: int
    ttl_s: float


class FinishAndRelease(msgspec.Struct, frozen=True, array_like=True, tag="finish-release"):
    """``Finish``, then the end of the send's lease as in ``HandOver``.

    Answer, in the end: ``Finished``, also where the send had failed before: the lease is over.
    ``Failed``: it is not.
    """

    call: Call
    send: int
    aux: bytes = b""


ABOUT_PROMPTS = (
    OpenLease
    | HoldPrefix
    | ReceiveRequest
    | SendRequest
    | MatchPrefix
    | HandOver
    | PinPrefix
    | PrefetchPrompt
)
"""Requests whose tokens frame is a prompt from its start."""


PromptNumbers = Annotated[tuple[Figure, ...], msgspec.Meta(max_length=MAX_PROMPTS)]


class AboutPrompt(msgspec.Struct, frozen=True, array_like=True, tag="about-prompt"):
    """A request whose prompt is number ``prompt`` of the session, as far as it is known.

    The tokens frame goes on after ``known_tokens`` of it; what the daemon kept behind them is
    dropped. It keeps the whole from now on, whatever comes of the request. Answer: that of the
    request; ``Failed`` with ``prompt-unknown`` where fewer are kept, and nothing is done then.
    """

    call: Call
    """That of the request."""
    prompt: Figure
    known_tokens: Figure
    request: ABOUT_PROMPTS


class ForgetPrompts(msgspec.Struct, frozen=True, array_like=True, tag="forget-prompts"):
    """The session names these prompts no more. Answer: ``Done``."""

    call: Call
    prompts: PromptNumbers


class FlushNamespace(msgspec.Struct, frozen=True, array_like=True, tag="flush"):
    """Drop what is cached of a namespace now and not locked. Answer: ``FlushReport``.

    The name of a base (without ``#``) means all its members.
    """

    call: Call
    namespace: Namespace = ""


class BeginEpoch(msgspec.Struct, frozen=True, array_like=True, tag="epoch"):
    """A base and its members have new weights: what is cached of them is never found again.

    ``epoch`` goes up only; the one that it is in changes nothing, None is the next one. Answer,
    when the next daemon would know it too: ``FlushReport``.
    """

    call: Call
    namespace: Namespace
    """Of any member."""
    epoch: Figure | None = None


class OpenArena(msgspec.Struct, frozen=True, array_like=True, tag="arena"):
    """So many pages in a row, whose content is the engine's alone. Answer: ``Leased``.

    Now or not at all. They are pages of a lease without tokens, which ``ReleaseLease`` ends.
    """

    call: Call
    n_pages: Figure


Request = (
    OpenLease | ExtendLease | CommitLease | ReleaseLease | CommitAndRelease | ReceiveRequest
    | CancelReceive | SendRequest | Advance | Finish | AbortSend | MatchPrefix | GetSnapshot
    | Subscribe | Unsubscribe | CancelCall | RetractLease | ResumeLease | SlideLease | FetchPages
    | SayWritten | CommitUpTo | ReleaseUpTo | HandOver | FinishAndRelease | HoldPrefix
    | AboutPrompt | ForgetPrompts | FlushNamespace | BeginEpoch | KeepRoom | OpenArena
    | CommitAndExtend | PinPrefix | UnpinPrefix | PrefetchPrompt
)  # fmt: skip

TAKES_TOKENS = (
    OpenLease,
    CommitLease,
    CommitAndRelease,
    ReceiveRequest,
    SendRequest,
    MatchPrefix,
    PinPrefix,
    PrefetchPrompt,
    RetractLease,
    CommitUpTo,
    ReleaseUpTo,
    HandOver,
    HoldPrefix,
    AboutPrompt,
    CommitAndExtend,
)
"""Requests that travel with a tokens frame; every other one is a single frame."""


# ---- answers -------------------------------------------------------------------------------------


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The call was refused; ``call`` is -1 where the request could not even be read."""

    call: int
    refusal: Refusal


class Leased(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="leased"):
    """A lease; ``pages`` covers all its tokens and the reserve, cached prefix first."""

    call: int
    lease: int
    prefix_tokens: int
    pages: bytes
    beside: tuple[bytes, ...] = ()
    promised_tokens: int = 0
    """So many more are promised; a daemon that knows no promises says none."""
    promoted_tokens: int = 0
    """Of the prefix, what came out of a tier for this lease."""
    tier_tokens: int = 0
    """So many that follow the prefix lie in a tier, and were not waited for."""
    tier_ms: float = 0.0
    """So long it would take to have them, as measured; 0: nothing was measured yet."""


class PageTable(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="row"):
    """The lease's pages from page index ``first`` on: replace what the client had there.

    The rows ``beside`` are whole.
    """

    call: int
    first: int
    pages: bytes
    beside: tuple[bytes, ...] = ()


class Done(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="done"):
    """The call did what it says."""

    call: int


class Receiving(msgspec.Struct, frozen=True, array_like=True, tag="receiving"):
    """Admitted: prefix locked, pages held, offer sent."""

    call: int
    receive: int
    prefix_tokens: int
    prompt_tokens: int | None = None
    """Of a receive without a room: so much of the prompt the lease will have; None: all of it."""
    promised_tokens: int = 0
    """As in ``Leased``."""
    promoted_tokens: int = 0
    """As in ``Leased``; none of it is in the Offer."""


class Sending(msgspec.Struct, frozen=True, array_like=True, tag="sending"):
    """The send is known under this id. ``finishes``: by itself, as ``when_written`` asks."""

    call: int
    send: int
    finishes: bool = False


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """What the decode side said: ``failure`` is None when it committed the prompt.

    ``kept_s``: nothing yet, the room is kept for so long; 0 of one that is not kept.
    """

    call: int
    failure: Refusal | None
    decode_prefix_len: int
    sent_pages: int
    sent_bytes: int
    kept_s: float = 0.0


class TakenReceive(msgspec.Struct, frozen=True, array_like=True):
    """A receive of a kept room that was committed by ``peer``, so long ago."""

    peer: Name
    decode_prefix_len: int
    sent_pages: int
    sent_bytes: int
    ago_s: float


class RoomKept(msgspec.Struct, frozen=True, array_like=True, tag="room-kept"):
    """How long a room is kept still, and who has taken it: the last 64 of ``takers``.

    ``taking``: receives under way. ``left_s`` is 0 of a room that was ended by this call.
    """

    call: int
    left_s: float
    takers: int
    taking: int
    taken: tuple[TakenReceive, ...]


class MatchReply(msgspec.Struct, frozen=True, array_like=True, tag="matched"):
    """For routers: cached tokens, open handoffs and waiting requests, pages obtainable now."""

    call: int
    tokens: int
    load: int
    free: int
    tier_tokens: int = 0
    """So many that follow lie in a tier below the pool."""
    tier_ms: float = 0.0
    """As in ``Leased``."""


class FlushReport(msgspec.Struct, frozen=True, array_like=True, tag="flushed"):
    """Pages of a namespace that went, pages that stayed under a lock, and who has those."""

    call: int
    freed_pages: int
    kept_pages: int
    kept: tuple[str, ...] = ()
    """One sentence for each of the first locked nodes."""
    epoch: Figure = 0
    """That the namespace is in."""


class Snapshotted(msgspec.Struct, frozen=True, array_like=True, tag="snapshotted"):
    """The whole state, as ``kvd status --format json`` prints it."""

    call: int
    snapshot: Snapshot


class Retracted(msgspec.Struct, frozen=True, array_like=True, tag="retracted"):
    """The lease holds no page any more; so much of it was saved."""

    call: int
    saved_pages: int
    saved_bytes: int


class Resumed(msgspec.Struct, frozen=True, array_like=True, tag="resumed"):
    """The lease runs again on ``pages``; KV of ``kv_tokens`` tokens is there.

    ``prefix_tokens`` of them were cached, the KV of ``restored_tokens`` was copied back.
    """

    call: int
    prefix_tokens: int
    restored_tokens: int
    kv_tokens: int
    pages: bytes
    beside: tuple[bytes, ...] = ()


class FetchReply(msgspec.Struct, frozen=True, array_like=True, tag="fetched"):
    """``pages``: the device page of each wanted page, in the order asked; their bytes are there.

    ``hits`` of them were there before or on their way, ``misses`` were copied: ``copied_bytes``.
    """

    call: int
    pages: bytes
    hits: int
    misses: int
    copied_bytes: int


# ---- pushes --------------------------------------------------------------------------------------


class Received(msgspec.Struct, frozen=True, array_like=True, tag="received"):
    """The prompt's KV is here and committed; the lease is the engine's.

    Of a receive into an arena: it is in those pages, and there is no lease (0).
    """

    receive: int
    lease: int
    pages: bytes
    aux: bytes
    beside: tuple[bytes, ...] = ()


class Arriving(msgspec.Struct, frozen=True, array_like=True, tag="arriving"):
    """The KV of so many first tokens of a receive is here and verified; the rest is to come.

    ``lease`` will be the engine's with ``Received``. Until then its pages may be loaded from as far
    as this says, and no more; what was loaded counts once all is here. ``pages``: its row, with the
    first of these.
    """

    receive: int
    lease: int
    tokens: int
    pages: bytes = b""


class ReceiveFailed(msgspec.Struct, frozen=True, array_like=True, tag="receive-failed"):
    """The handoff ended otherwise; nothing of it is held for the engine any more."""

    receive: int
    refusal: Refusal


class PagesBack(msgspec.Struct, frozen=True, array_like=True, tag="pages-back"):
    """No remote write can land any more in the pages of an arena that this receive was given.

    It has failed, or was given up, before; of one that was delivered ``Received`` says it.
    """

    receive: int


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The offer and the engine have met; only KV beyond ``decode_prefix_len`` is sent."""

    send: int
    decode_prefix_len: int
    share: SentShare | None = None


class SendFailed(msgspec.Struct, frozen=True, array_like=True, tag="send-failed"):
    """The handoff ended before ``finish``; a later ``finish`` gets the same refusal."""

    send: int
    refusal: Refusal


class LeaseLost(msgspec.Struct, frozen=True, array_like=True, tag="lease-lost"):
    """The daemon found the lease broken: do not use its pages any more, release it.

    Every call that names it, but its release, gets the same refusal.
    """

    lease: int
    refusal: Refusal


class Events(msgspec.Struct, frozen=True, array_like=True, tag="events"):
    """Events in order; ``lost`` counts those skipped before the first because we lagged."""

    lost: int
    events: tuple[Event, ...]


Push = Received | Arriving | ReceiveFailed | PagesBack | Accepted | SendFailed | LeaseLost | Events

Reply = (
    Failed | Leased | PageTable | Done | Receiving | Sending | Finished | MatchReply | Snapshotted
    | Retracted | Resumed | FetchReply | FlushReport | RoomKept | PrefixPinned | Push
)  # fmt: skip


class Several(msgspec.Struct, frozen=True, array_like=True, tag="several"):
    """Answers and pushes of one turn of the daemon, in the order in which they came about.

    What comes alone comes without it. A turn that has more than 64 KiB to say says it in several
    of these, and whatever is longer by itself comes alone.
    """

    replies: tuple[Reply, ...]


# ---- what a later daemon says --------------------------------------------------------------------


class RepliesInParts(msgspec.Struct, array_like=True, tag="several"):
    """``Several``, each reply unread: one that is not known here must not cost the others."""

    replies: list[msgspec.Raw]


class EventsInParts(msgspec.Struct, array_like=True, tag="events"):
    """``Events``, each event unread."""

    lost: int
    events: list[msgspec.Raw]
