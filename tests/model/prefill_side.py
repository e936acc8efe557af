"""The prefill side of the model: rendezvous with the engine, posts, drain, Settled.

Pure functions from a side and a message to steps. Every change of a part's state is a call of
``prefill_next``. A room that waits for an Offer has no id and is the engine's ``Call`` alone;
tombstones and refusals of other ids stand beside it.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from kvd.core.handoff.protocol import Prefill, PrefillTrigger, prefill_next
from tests.model.protocol import (
    NOBODY,
    OUTSTANDING,
    Cause,
    Kind,
    Message,
    Post,
    Rules,
    Side,
    Step,
)

P, T = Prefill, PrefillTrigger
ACTIVE = (P.STREAMING, P.FLUSHING, P.DRAINING)
"""``send`` is a holder of the source lease."""


class PrefillPart(NamedTuple):
    """One handoff as the prefill side has it; ``state`` None: no record, or folded."""

    state: Prefill | None = None
    born: int = NOBODY
    """Decode incarnation that offered it."""
    generation: int = NOBODY
    posts: tuple[Post, ...] = ()
    call: int = NOBODY
    """The engine's call it serves."""
    delivered: bool = False
    heard_committed: bool = False
    in_doubt: bool = False
    """Its agent was destroyed with posts under way."""
    is_orphan: bool = False
    """The daemon died; its transfer process, not yet reaped, goes on with the posts."""


class Phase(enum.IntEnum):
    """How far the engine is with one ``send``."""

    NOT_OPENED = 0
    PREFILLING = 1
    ADVANCED = 2
    """All but the last chunk are written."""
    FINISHING = 3
    """All is written, its own lease released; ``finish`` waits for an answer."""
    OVER = 4
    """Answered, or the engine is gone."""


class Call(NamedTuple):
    """One ``send`` of the engine for the room; ``part`` NOBODY while it waits for an Offer."""

    phase: Phase = Phase.NOT_OPENED
    part: int = NOBODY


class PrefillSide(NamedTuple):
    """The daemon and its sending transfer process."""

    parts: tuple[PrefillPart, ...]
    calls: tuple[Call, ...]
    posts_per_part: int
    incarnation: int = 0
    is_up: bool = True
    sees: int = 0
    """Newest decode incarnation greeted."""
    sees_generation: int = 0
    peer_floor: int = 0
    """The decode side has nothing open below it."""
    left: tuple[int, ...] = (NOBODY,)
    """Of each handoff: the generation to which bytes of a sender that is over are still on their
    way. It belongs to the network: no restart here changes it."""
    superseded: frozenset[int] = frozenset()
    """Only for the variant that remembers the superseded instead of ordering incarnations."""


PrefillStep = Step[PrefillSide]


def floor(side: PrefillSide) -> int:
    """The lowest id whose outcome is still wanted here; never above what the peer has closed."""
    wanted = (i for i, p in enumerate(side.parts) if p.state not in (None, P.CLOSED))
    return min(side.peer_floor, next(wanted, side.peer_floor))


def with_part(side: PrefillSide, index: int, part: PrefillPart) -> PrefillSide:
    return side._replace(parts=(*side.parts[:index], part, *side.parts[index + 1 :]))


def with_call(side: PrefillSide, index: int, call: Call) -> PrefillSide:
    return side._replace(calls=(*side.calls[:index], call, *side.calls[index + 1 :]))


def left_behind(side: PrefillSide, index: int, generation: int) -> PrefillSide:
    """Bytes of this handoff stay on their way; NOBODY: they have arrived, and the end behind."""
    return side._replace(left=(*side.left[:index], generation, *side.left[index + 1 :]))


def say(side: PrefillSide, index: int, kind: Kind) -> Message:
    part = side.parts[index]
    word = 0
    if kind is Kind.SETTLED:
        word = 1 if part.delivered else 2 * int(part.in_doubt)
    return Message(Side.DECODE, kind, index, side.incarnation, part.born, word)


def fire(part: PrefillPart, trigger: PrefillTrigger) -> PrefillPart:
    assert part.state is not None
    return part._replace(state=prefill_next(part.state, trigger))


def changed(posts: tuple[Post, ...], before: Post, after: Post) -> tuple[Post, ...]:
    """``posts`` with one that was ``before`` now ``after``; they differ in nothing else."""
    at = posts.index(before)
    return tuple(sorted((*posts[:at], after, *posts[at + 1 :])))


def is_drained(part: PrefillPart, rules: Rules) -> bool:
    """Nothing outstanding: a failed post counts until its sending agent is destroyed."""
    outstanding = OUTSTANDING if rules.failed_post_is_outstanding else (Post.FLYING,)
    return not rules.settles_when_drained or not any(post in outstanding for post in part.posts)


def conclude(side: PrefillSide, index: int, rules: Rules) -> tuple[PrefillSide, list[Message]]:
    """Take a part as far as it goes by itself: FLUSHED, DRAINED, OUTLIVED, the call answered."""
    part, before = side.parts[index], side.parts[index].state
    if part.state is P.FLUSHING:
        still = any(post is not Post.DONE for post in part.posts)
        if not (still and rules.flushes_after_last_post):
            part = fire(part, T.FLUSHED)._replace(delivered=True)
    elif part.state is P.DRAINING and is_drained(part, rules):
        part = fire(part, T.DRAINED)
    if part.state is P.SETTLED and not any(post in OUTSTANDING for post in part.posts):
        part = part._replace(posts=(), generation=NOBODY)  # nothing left to tell apart
    side = with_part(side, index, part)
    sends = []
    if part.state is P.SETTLED:
        if before is not P.SETTLED:
            sends = [say(side, index, Kind.SETTLED)]
        if part.born < side.sees and rules.newer_decode_ends_settled:
            side = close(side, index, T.OUTLIVED)
    return side, sends


def close(side: PrefillSide, index: int, trigger: PrefillTrigger) -> PrefillSide:
    """SETTLED to CLOSED: the waiting ``finish`` is answered, the source holder long gone."""
    part = fire(side.parts[index], trigger)
    side = with_part(side, index, part)
    if part.call != NOBODY and side.calls[part.call].phase is Phase.FINISHING:
        call = side.calls[part.call]
        side = with_call(side, part.call, call._replace(phase=Phase.OVER))
    return folded(side)


def folded(side: PrefillSide) -> PrefillSide:
    """Fold the tombstones nobody can ask for: below the floor, or of a superseded incarnation."""
    parts = tuple(
        PrefillPart()
        if part.state is P.CLOSED
        and (i < side.peer_floor or part.born < side.sees)
        and not is_awaited(side, part)
        else part
        for i, part in enumerate(side.parts)
    )
    return side._replace(parts=parts)


def is_awaited(side: PrefillSide, part: PrefillPart) -> bool:
    """The engine has not yet called ``finish``: its answer is kept."""
    return part.call != NOBODY and side.calls[part.call].phase is not Phase.OVER


# --- what arrives ---------------------------------------------------------------------------


def deliver(side: PrefillSide, message: Message, rules: Rules) -> list[PrefillStep]:
    """What the arrival of ``message`` may do."""
    words = f"{message} arrives"
    if message.kind is Kind.HELLO:
        return [greet(side, message, rules)]
    stranger = rules.checks_sender and message.src != side.sees
    if stranger or (rules.checks_addressee and message.dst != side.incarnation):
        return [PrefillStep(Cause.PROGRESS, f"{words} and is refused: not between us", side)]
    match message.kind:
        case Kind.PING:
            floored = side._replace(peer_floor=max(side.peer_floor, message.word))
            return [PrefillStep(Cause.PROGRESS, words, folded(floored))]
        case Kind.OFFER:
            return offered(side, message, rules)
        case Kind.ABORT:
            return [aborted(side, message, rules)]
        case _:
            return [closed(side, message, rules)]


def offered(side: PrefillSide, message: Message, rules: Rules) -> list[PrefillStep]:
    """An Offer: known, below the floor, refused, or the rendezvous."""
    index, words = message.part, f"{message} arrives"
    part = side.parts[index]
    if part.state is not None:
        return [again(side, index, T.OFFERED, message, rules)]
    if index < side.peer_floor and rules.keeps_floor:
        return [PrefillStep(Cause.PROGRESS, f"{words}, below the floor", side)]
    if message.word > side.sees_generation:
        return [PrefillStep(Cause.PROGRESS, f"{words}, before its Hello", side)]
    part = PrefillPart(
        P.AWAIT_ENGINE,
        message.src,
        message.word,
        (Post.NOT_POSTED,) * side.posts_per_part,
    )
    busy = any(p.state in (P.AWAIT_ENGINE, *ACTIVE) for p in side.parts)
    if busy and rules.one_handoff_per_room:
        return [refuse(side, index, part, rules, f"{words}: duplicate room")]
    waiting = [i for i, call in enumerate(side.calls) if waits_for_offer(call)]
    if not waiting:
        return [PrefillStep(Cause.PROGRESS, words, with_part(side, index, part))]
    return meet(with_part(side, index, part), index, waiting[0], T.OFFERED, rules)


def waits_for_offer(call: Call) -> bool:
    return call.part == NOBODY and call.phase not in (Phase.NOT_OPENED, Phase.OVER)


def refuse(
    side: PrefillSide, index: int, part: PrefillPart, rules: Rules, words: str
) -> PrefillStep:
    """Settled(REFUSED), with a tombstone: a repeat of the Offer must not find the door open."""
    side = with_part(side, index, fire(part, T.REFUSED))
    sends = (say(side, index, Kind.SETTLED),)
    if not rules.refusal_leaves_tombstone:
        side = with_part(side, index, PrefillPart())
    return PrefillStep(Cause.PROGRESS, words, side, sends)


def meet(
    side: PrefillSide, index: int, call_index: int, trigger: PrefillTrigger, rules: Rules
) -> list[PrefillStep]:
    """Offer and engine are both here: validate; accept and post what is written, or refuse."""
    engine_came_last = trigger is T.ENGINE_OPENED
    words = "the engine opens the room" if engine_came_last else f"Offer({index}) arrives"
    waited = P.AWAIT_ENGINE if engine_came_last else P.AWAIT_OFFER
    part, call = side.parts[index], side.calls[call_index]
    disagree = refuse(side, index, part, rules, f"{words}: the prompts disagree, refused")
    if part.generation < side.sees_generation and rules.refuses_older_generation:
        return [disagree._replace(words=f"{words}: an older generation, refused")]
    part = fire(part._replace(state=waited), trigger)._replace(call=call_index)
    side = with_call(with_part(side, index, part), call_index, call._replace(part=index))
    accept = say(side, index, Kind.ACCEPT)
    side, sends = stream(side, index, rules)
    # Where Settled leaves in the same step no Accept does.
    sends = sends or [accept]
    accepted = PrefillStep(Cause.PROGRESS, f"{words}: accepted", side, tuple(sends))
    return [accepted, disagree._replace(cause=Cause.WILL)]


def stream(side: PrefillSide, index: int, rules: Rules) -> tuple[PrefillSide, list[Message]]:
    """Post what the engine has written and the cursor has not passed; the last chunk flushes."""
    part = side.parts[index]
    phase = side.calls[part.call].phase
    if phase is Phase.PREFILLING:
        return side, []
    ready = len(part.posts) - int(phase is Phase.ADVANCED)
    unposted = max(0, part.posts.count(Post.NOT_POSTED) - len(part.posts) + ready)
    posts = part.posts
    for _ in range(unposted):
        posts = changed(posts, Post.NOT_POSTED, Post.FLYING)
    trigger = T.ADVANCED if phase is Phase.ADVANCED else T.FINISHED
    side = with_part(side, index, fire(part, trigger)._replace(posts=posts))
    return conclude(side, index, rules)


def again(
    side: PrefillSide, index: int, trigger: PrefillTrigger, message: Message, rules: Rules
) -> PrefillStep:
    """A message for a part with a record: say what was said before."""
    part, words = side.parts[index], f"{message} arrives again"
    if part.state is not P.CLOSED:
        part = fire(part, trigger)
        side = with_part(side, index, part)
    if not rules.answers_again:
        return PrefillStep(Cause.PROGRESS, words, side)
    match part.state:
        case P.STREAMING | P.FLUSHING:
            return PrefillStep(Cause.PROGRESS, words, side, (say(side, index, Kind.ACCEPT),))
        case P.SETTLED | P.CLOSED:
            return PrefillStep(Cause.PROGRESS, words, side, (say(side, index, Kind.SETTLED),))
        case _:
            return PrefillStep(Cause.PROGRESS, words, side)


def aborted(side: PrefillSide, message: Message, rules: Rules) -> PrefillStep:
    """Abort: drain, or leave a tombstone where nothing was known of the id."""
    index, words = message.part, f"{message} arrives"
    part = side.parts[index]
    if part.state is None:
        if index < side.peer_floor and rules.keeps_floor:
            return PrefillStep(Cause.PROGRESS, f"{words}, below the floor", side)
        part = PrefillPart(P.AWAIT_ENGINE, message.src)
    elif part.state in (P.SETTLED, P.CLOSED, P.DRAINING):
        return again(side, index, T.ABORTED, message, rules)
    was_waiting = part.state is P.AWAIT_ENGINE
    side = with_part(side, index, fire(part, T.ABORTED))
    if was_waiting:
        sends = [say(side, index, Kind.SETTLED)]
        if not rules.abort_leaves_tombstone:
            side = with_part(side, index, PrefillPart())
    else:
        side, sends = conclude(side, index, rules)
    return PrefillStep(Cause.PROGRESS, words, side, tuple(sends))


def closed(side: PrefillSide, message: Message, rules: Rules) -> PrefillStep:
    """Closed: the outcome. Before our Settled it comes from a fence and counts as Abort."""
    index, words = message.part, f"{message} arrives"
    part = side.parts[index]
    if part.state in (None, P.CLOSED):
        return PrefillStep(Cause.PROGRESS, words, side)
    if part.state is P.SETTLED:
        side = with_part(side, index, part._replace(heard_committed=bool(message.word)))
        side = close(side, index, T.CLOSED)
        if not rules.keeps_tombstone:
            side = with_part(side, index, PrefillPart())
        return PrefillStep(Cause.PROGRESS, words, folded(side))
    if not rules.closed_ends_unsettled:
        return PrefillStep(Cause.PROGRESS, f"{words} and is ignored", side)
    return aborted(side, message, rules)


def greet(side: PrefillSide, message: Message, rules: Rules) -> PrefillStep:
    """Hello: a newer incarnation ends what the older one offered; a newer generation is noted."""
    words = f"{message} arrives"
    if rules.orders_incarnations:
        is_stale, is_new_peer = message.src < side.sees, message.src > side.sees
    else:
        is_stale, is_new_peer = message.src in side.superseded, message.src != side.sees
        if is_new_peer and not is_stale:
            side = side._replace(superseded=side.superseded | {side.sees})
    is_older = message.word < side.sees_generation and rules.orders_generations
    if is_stale or (not is_new_peer and (is_older or message.word == side.sees_generation)):
        return PrefillStep(Cause.PROGRESS, f"{words} and says nothing new", side)
    side = side._replace(sees=message.src, sees_generation=message.word)
    sends: list[Message] = []
    if is_new_peer:
        side = side._replace(peer_floor=0)
        for index, part in enumerate(side.parts):
            if part.born < side.sees and part.state not in (None, P.CLOSED):
                side = with_part(side, index, fire(part, T.GIVEN_UP))
                side, said = conclude(side, index, rules)
                sends += said
        side = folded(side)
    return PrefillStep(Cause.PROGRESS, words, side, tuple(sends))


def is_spent(side: PrefillSide, message: Message, rules: Rules) -> bool:
    """Whether ``message`` can change nothing any more, whenever it may arrive."""
    if message.kind is Kind.HELLO or not (rules.checks_addressee and rules.checks_sender):
        return False
    if message.dst < side.incarnation + int(not side.is_up) or message.src < side.sees:
        return True
    if not (rules.keeps_floor and rules.keeps_tombstone):
        return False
    state, is_below = side.parts[message.part].state, message.part < side.peer_floor
    if message.kind is Kind.CLOSED and state is P.CLOSED:
        return True
    return state is None and is_below and not side.parts[message.part].is_orphan
