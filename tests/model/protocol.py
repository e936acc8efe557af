"""The handoff protocol as a model: its words, and the sentences it lives by.

One decode side asks, one prefill side writes into its pages, over a link that loses, repeats and
reorders, with processes that die and posts whose bytes may land long after everyone gave up. The
model explores every order of events (``explore``) and looks for two things:

- UNSAFE: a post may land in a page that is neither held nor quarantined for its handoff; a post
  reads source pages both of whose holders have let go; a commit lacks bytes or its aux, or has
  the aux twice; the prefill engine is told "committed" of what was not; a table lacks a row for
  what can happen.
- STUCK: a state from which the end cannot be reached: nothing known of the handoff on either side,
  every page free or cached, no engine waiting for an answer. The way to the end may use neither a
  fault nor a clock, but for one: a room where engine and Offer wait for each other may time out.

What this is for, and what it is not
    It shares the two transition tables with ``kvd.core`` and writes every edge again, so it proves
    the design and not the code: a bug planted in ``kvd.core`` passes here. The code is explored by
    ``tests/explore``, which drives the real core through every order of a few steps. What only the
    model can, because its states are small: up to four faults at once and no bound on the steps, so
    that STUCK means no way out and not none that was tried; two handoffs in one room; two writers
    of one prompt (``parts_world``); every sentence negated. What it has not, and the explorer has:
    admission, Withdrawn, lapsed rooms, retries by a clock, sums by value, what is done with pages
    and leases on the way. Neither has the buffers of a kernel beyond what ``tests/core/side`` has.

How the pages stay safe
    The decode side holds pages before it names them in an Offer, and from that moment somebody may
    write into them. Giving up therefore frees nothing: it quarantines. What ends a quarantine is
    the writer's last word (Settled: *I will never again write for this handoff*) or a proof that
    the writer cannot: a newer incarnation of it, which greets only once its old transfer process
    is reaped; a fence, which ends the process that its posts are meant for; our own restart, once
    our old receiving process is reaped. A clock or a silence is never a proof.

    What a writer had sent when its agent was destroyed or its process died is still on its way: on
    a connection of its own, ahead of or behind every message about it, and the end of that
    connection comes last. So where the last word is in doubt, and always after a newer
    incarnation, the pages stay in quarantine until the connection has ended.

How the last word gets through
    Whoever still wants something repeats it. The decode side wants Settled and repeats Offer, then
    Abort; the prefill side wants the outcome and repeats Settled until Closed. Whoever is asked
    again answers again, from the record, from its tombstone, or (below the floor in the other
    side's Ping) not at all. A refusal and an Abort for an unknown id are last words as well, so
    they leave a tombstone too: the next copy of the Offer must not find the door open.

How the writer knows that it has stopped
    A post that failed, timed out or was released is outstanding until its sending agent is
    destroyed. Only a part without outstanding posts settles, and only then does ``send`` let go of
    the source pages. Posts go through the generation that the Offer names and no other.

What else the model needed (rules that the tables do not show)
    1. Incarnations are *ordered*. A Hello may be late: one of a dead incarnation that arrives after
       its successor's would "prove" the living writer gone. Remembering the superseded is not
       enough, since a restarted daemon remembers nothing (``orders_incarnations``: two restarts).
    2. A message must come from the newest incarnation seen *and* be meant for this one; both checks
       carry weight, and neither side acts on anything from a peer whose Hello it has not seen.
    3. The engine outruns its handoff: ``advance`` and ``finish`` arrive for parts in DRAINING,
       SETTLED and CLOSED. They are no triggers there; ``finish`` is answered when CLOSED, and a
       CLOSED record is not folded before it has answered.
    4. An Offer that is refused at the rendezvous, or an Abort for it, settles *that id*; the
       engine's room goes on waiting in AWAIT_OFFER.
    5. Meeting a room whose engine is already done fires two triggers: OFFERED, then FINISHED.
    6. "A newer decode incarnation" is a condition, not an event: a part that is still DRAINING when
       the Hello arrives goes to CLOSED as soon as it is SETTLED.
    7. Closed may arrive before this side has settled (a fence closed the other one). It counts as
       ABORTED there, and as nothing where there is no record. Ignoring it is safe, only slower.
    8. An agent's destruction gives up every part with a post outstanding through it, and no other.
    9. DELIVERED and SETTLED never follow one another for one id: the first last word stays.
    10. A tombstone that closes below the floor already heard is folded at once.
    11. VERIFYING waits for our own transfer process and for nobody else: whatever the writer or its
        successor says meanwhile changes nothing, and a fence takes the question along.

How far it has been explored
    One handoff of two posts, any four faults: 1,126,845 states, none unsafe and none stuck (three
    to four minutes, 0.4 GB). Any two faults, as in the default run: 74,321. Counted before bytes
    could be left on their way: two handoffs in one room,
    a post each, the engine opening it twice, one fault of one kind: 727,685 states (a duplicate,
    which repetition subsumes), 748,293 (a failed post), 812,539 (prefill restarts), 1,687,257 (a
    loss), 1,754,718 (decode restarts), 3,905,299 (a fence; eight minutes, 1.1 GB; counted before
    VERIFYING was a wait): likewise. Run:
    ``KVD_MODEL=full python -m pytest -s -m slow tests/model``. 32 sentences are negated one by one
    in ``mutations``, and each is missed; six more guard nothing and are listed as courtesies.

Several parts
    Two writers and one lease are another world, ``reception`` and ``parts_world``, made of the same
    sides: 87,020 states without a fault, 1,213,808 with any one, where one writer has a post and
    one has none. There a Ping arrives at once and no Accept is sent: what they do is explored here.

What is not modelled
    Admission (QUEUED ends in OFFERED or nothing; headroom, locks and eviction are not here); more
    than two posts, or posts that differ; a crash of the prefill
    side's transfer process alone; a decode daemon that never returns; an engine that attaches anew
    after a restart; sums (pages are damaged or not, and verifying tells); prompts (they agree or
    not); Progress;
    connections (a handoff has its own path, with one end; whose it is, is known); clocks (a
    deadline may pass at any time); an id used again by a later incarnation (an id here
    means incarnation and id). A link holds a *set* of messages: copies beyond the first are the
    fault "duplicate", and a repeat can be late without any fault. Pings are taken from the sender
    as it is, since a late one only says less. READY counts as released in the end. An end that can
    be reached is taken to be reached: that each message gets through at last is not modelled.

A page that is FREE stands for one that somebody else has by now, so nothing is modelled of reuse
but that a write into it is wrong. The engine lets go of the source pages as early as it may (at
``finish`` or death), since that is the worst it can do.
"""

from __future__ import annotations

import enum
from typing import Generic, NamedTuple, TypeVar

from typing_extensions import override


class Pages(enum.IntEnum):
    """Who has the destination pages of one handoff. ``FREE``: anyone may have them by now."""

    FREE = 0
    HELD = 1
    QUARANTINED = 2
    CACHED = 3


class Post(enum.IntEnum):
    """One transfer post as the prefill side's transfer process knows it."""

    NOT_POSTED = 0
    FLYING = 1
    DONE = 2
    IN_DOUBT = 3
    """It failed, and its bytes may land yet."""
    DESTROYED = 4
    """Its sending agent is gone: it reads and writes nothing any more."""


OUTSTANDING = (Post.FLYING, Post.IN_DOUBT)


class Kind(enum.Enum):
    """The messages; their words as in the design."""

    HELLO = "Hello"
    PING = "Ping"
    OFFER = "Offer"
    ABORT = "Abort"
    CLOSED = "Closed"
    ACCEPT = "Accept"
    SETTLED = "Settled"


class Side(enum.Enum):
    """The two ends of the link."""

    DECODE = "decode"
    PREFILL = "prefill"


NOBODY = -1
"""No incarnation, no part, no generation."""


class Message(NamedTuple):
    """One message in flight.

    ``word`` is what it says: the generation in Hello and Offer, the floor in Ping, 1 (delivered,
    committed) or 0 in Settled and Closed; 2 in a Settled with bytes in doubt.
    """

    to: Side
    kind: Kind
    part: int
    src: int
    """Incarnation of the sender."""
    dst: int
    """Incarnation it is meant for; NOBODY in a Hello."""
    word: int

    @override
    def __str__(self) -> str:
        match self.kind:
            case Kind.HELLO:
                what = f"Hello of incarnation {self.src}, generation {self.word}"
            case Kind.PING:
                what = f"Ping with floor {self.word}"
            case Kind.OFFER:
                what = f"Offer({self.part}) naming generation {self.word}"
            case Kind.SETTLED:
                what = f"Settled({self.part}, {('other', 'delivered', 'in doubt')[self.word]})"
            case Kind.CLOSED:
                what = f"Closed({self.part}, {'committed' if self.word else 'not committed'})"
            case _:
                what = f"{self.kind.value}({self.part})"
        return f"{what} to {self.to.value}"


class Cause(enum.IntEnum):
    """Why a step happens."""

    PROGRESS = 0
    """Delivery, repetition, engines going on, rendezvous deadlines: what ends by itself."""
    WILL = 1
    """Cancel, deadline, false suspicion, failure of an engine, corruption: any time, uncounted."""
    LOSS = 2
    DUPLICATE = 3
    DECODE_CRASH = 4
    PREFILL_CRASH = 5
    FENCE = 6
    POST_FAILURE = 7


FAULTS = frozenset(cause for cause in Cause if cause >= Cause.LOSS)


class Rules(NamedTuple):
    """The sentences of the protocol that are no rows of a table. A mutation negates one of them."""

    # --- decode side
    quarantines_when_giving_up: bool = True
    """Giving up keeps the pages, quarantined."""
    quarantine_ignores_the_clock: bool = True
    """No timer ends a quarantine."""
    lost_peer_may_still_write: bool = True
    """A silent peer is not a dead one."""
    repeats_offer: bool = True
    repeats_offer_when_accepted: bool = True
    """RECEIVING repeats the Offer too: the writer may have stopped saying Settled by then."""
    repeats_abort: bool = True
    commits_what_is_verified: bool = True
    """Nothing is cached before our transfer process has said that it is what was sent."""
    asks_the_next_process: bool = True
    """A transfer process that ends takes the question along; its successor is asked again."""
    takes_delivered_unaccepted: bool = True
    """OFFERED takes DELIVERED: a writer with nothing to post settles without an Accept."""
    takes_aux_once: bool = True
    """A repeated Settled(DELIVERED) hands the aux on no second time."""
    answers_settled_when_closed: bool = True
    """Closed is said as often as Settled is heard."""
    answers_settled_when_forgotten: bool = True
    """Closed(not known), too. A courtesy: the floor keeps what is still wanted."""
    waits_for_ends: bool = True
    """Bytes in doubt are waited for until their connection has ended, not only its sender."""
    fence_starts_new_generation: bool = True
    """The process after a fence goes by another generation."""
    fence_is_remembered: bool = False
    """Giving up after a fence frees at once. Not in the tables, and safe."""
    decode_reaps_before_hello: bool = True
    """A restart frees its grants when the old receiving process is reaped, not before."""
    # --- prefill side
    settles_when_drained: bool = True
    """Settled comes after the last outstanding post, not after the wish to stop."""
    failed_post_is_outstanding: bool = True
    """A failed post is outstanding until its sending agent is destroyed."""
    failed_post_has_not_landed: bool = True
    """A failed post counts as failed, whatever may have landed."""
    tells_doubt: bool = True
    """Settled says that posts were under way when their agent was destroyed."""
    flushes_after_last_post: bool = True
    """DELIVERED is said when every post is done."""
    repeats_settled: bool = True
    answers_again: bool = True
    """A repeated Offer or Abort gets the answer it got before."""
    keeps_tombstone: bool = True
    """A closed id stays known until the floor has passed it."""
    keeps_floor: bool = True
    """Ids below the floor are refused when their tombstones are folded."""
    refusal_leaves_tombstone: bool = True
    abort_leaves_tombstone: bool = True
    """Abort of an unknown id refuses its Offer for good."""
    one_handoff_per_room: bool = True
    """A second Offer is refused at once. A courtesy: it could wait for its deadline."""
    posts_by_named_generation: bool = True
    """Posts go through the generation the Offer names, never through newer metadata."""
    refuses_older_generation: bool = True
    """An Offer older than the newest Hello is refused. A courtesy: its posts would fail."""
    closed_ends_unsettled: bool = True
    """Closed counts as Abort before Settled. A courtesy: the posts would fail."""
    newer_decode_ends_settled: bool = True
    """Whose decode incarnation is superseded awaits no Closed."""
    send_holds_source: bool = True
    """``send`` is a holder of the source lease until nothing is outstanding."""
    prefill_reaps_before_hello: bool = True
    """A restart greets when the old transfer process is reaped, not before."""
    # --- both sides
    checks_addressee: bool = True
    """What is meant for another incarnation is refused."""
    checks_sender: bool = True
    """What comes from another incarnation than the newest greeted is refused."""
    orders_incarnations: bool = True
    """A Hello of an older incarnation is no news, and not only if it was seen superseded."""
    orders_generations: bool = True
    """A Hello of an older generation is no news. A courtesy: the next Hello puts it right."""


S = TypeVar("S")


class Step(NamedTuple, Generic[S]):
    """One step of one side: why, in words, the side after it, and what it sends."""

    cause: Cause
    words: str
    after: S
    sends: tuple[Message, ...] = ()
