"""What the prefill side of the model does by itself: its engine, its posts, its clocks, its death.

The companion of ``prefill_side``, which holds the side's state and what it answers.
"""

from __future__ import annotations

from kvd.core.handoff.protocol import Prefill, PrefillTrigger, prefill_next
from tests.model.prefill_side import (
    ACTIVE,
    Call,
    Phase,
    PrefillPart,
    PrefillSide,
    PrefillStep,
    changed,
    close,
    conclude,
    fire,
    folded,
    left_behind,
    meet,
    say,
    stream,
    with_call,
    with_part,
)
from tests.model.protocol import NOBODY, OUTSTANDING, Cause, Kind, Post, Rules

P, T = Prefill, PrefillTrigger


def steps(side: PrefillSide, rules: Rules) -> list[PrefillStep]:
    """Everything the prefill side may do now without hearing anything."""
    if not side.is_up:
        return [restart(side)]
    found = [crash(side, rules)]
    for index, call in enumerate(side.calls):
        found += call_steps(side, index, call, rules)
    for index, part in enumerate(side.parts):
        if part.state not in (None, P.CLOSED):
            found += part_steps(side, index, part, rules)
    return found


def call_steps(side: PrefillSide, index: int, call: Call, rules: Rules) -> list[PrefillStep]:
    """The engine opens, advances, finishes, or fails."""
    match call.phase:
        case Phase.NOT_OPENED:
            return opened(side, index, rules)
        case Phase.PREFILLING:
            ahead = [Phase.ADVANCED, Phase.FINISHING]
        case Phase.ADVANCED:
            ahead = [Phase.FINISHING]
        case _:
            ahead = []
    found = [wrote(side, index, phase, rules) for phase in ahead]
    if call.phase is not Phase.OVER:
        found.append(engine_gone(side, index, rules))
    return found


def opened(side: PrefillSide, index: int, rules: Rules) -> list[PrefillStep]:
    """``send``, or ``hand_over`` of what is all computed: one at a time for a room."""
    for earlier in side.calls[:index]:
        ended = earlier.phase is Phase.OVER or (
            earlier.part != NOBODY and side.parts[earlier.part].state not in ACTIVE
        )
        if not ended:
            return []
    found = []
    for phase in (Phase.PREFILLING, Phase.FINISHING):
        came = with_call(side, index, Call(phase))
        words = "the engine opens the room"
        if phase is Phase.FINISHING:
            words = "the engine hands its prompt over"
        waiting = (i for i, part in enumerate(came.parts) if part.state is P.AWAIT_ENGINE)
        first = next(waiting, None)
        if first is None:
            found.append(PrefillStep(Cause.PROGRESS, words, came))
        else:
            found += meet(came, first, index, T.ENGINE_OPENED, rules)
    return found


def wrote(side: PrefillSide, index: int, phase: Phase, rules: Rules) -> PrefillStep:
    """``advance`` or ``finish``: posts where there is a grant, nothing where there is none yet."""
    words = "the engine advances" if phase is Phase.ADVANCED else "the engine finishes"
    call = side.calls[index]._replace(phase=phase)
    side = with_call(side, index, call)
    if call.part == NOBODY:
        trigger = T.ADVANCED if phase is Phase.ADVANCED else T.FINISHED
        prefill_next(P.AWAIT_OFFER, trigger)
        return PrefillStep(Cause.PROGRESS, words, side)
    part = side.parts[call.part]
    if part.state is P.STREAMING:
        side, sends = stream(side, call.part, rules)
        return PrefillStep(Cause.PROGRESS, words, side, tuple(sends))
    if part.state in (None, P.CLOSED) and phase is Phase.FINISHING:
        side = with_call(side, index, call._replace(phase=Phase.OVER))
        side = folded(side)
    return PrefillStep(Cause.PROGRESS, words, side)


def engine_gone(side: PrefillSide, index: int, rules: Rules) -> PrefillStep:
    """The engine fails or leaves, or its room's deadline passes while it waits for an Offer."""
    call = side.calls[index]
    side = with_call(side, index, call._replace(phase=Phase.OVER))
    if call.part == NOBODY:
        prefill_next(P.AWAIT_OFFER, T.GIVEN_UP)
        words = "the engine's room gets no Offer before its deadline"
        return PrefillStep(Cause.PROGRESS, words, side)
    words, part = "the engine is gone", side.parts[call.part]
    if part.state in (None, P.CLOSED):
        return PrefillStep(Cause.WILL, words, folded(side))
    side = with_part(side, call.part, fire(part, T.GIVEN_UP))
    side, sends = conclude(side, call.part, rules)
    return PrefillStep(Cause.WILL, words, side, tuple(sends))


def part_steps(side: PrefillSide, index: int, part: PrefillPart, rules: Rules) -> list[PrefillStep]:
    """Deadlines and suspicion, post failures, destroyed agents, Settled again."""
    given = with_part(side, index, fire(part, T.GIVEN_UP))
    waits = part.state is P.AWAIT_ENGINE
    sends = [say(given, index, Kind.SETTLED)] if waits else []
    if not waits:
        given, sends = conclude(given, index, rules)
    cause = Cause.PROGRESS if waits else Cause.WILL
    words = f"prefill gives handoff {index} up"
    found = [PrefillStep(cause, words, given, tuple(sends))]
    if part.state is P.SETTLED:
        if rules.repeats_settled:
            settled = (say(side, index, Kind.SETTLED),)
            found.append(
                PrefillStep(Cause.PROGRESS, f"prefill repeats Settled({index})", side, settled)
            )
        late = close(side, index, T.OUTLIVED)
        found.append(PrefillStep(Cause.WILL, f"nobody says Closed({index}) in time", late))
    if Post.FLYING in part.posts:
        found.append(fail_post(side, index, Cause.POST_FAILURE, rules))
    if any(post in OUTSTANDING for post in part.posts):
        found.append(destroy_agent(side, part, rules))
    return found


def fail_post(side: PrefillSide, index: int, cause: Cause, rules: Rules) -> PrefillStep:
    """A post fails with its bytes in doubt; the part gives up."""
    part = side.parts[index]
    if rules.failed_post_has_not_landed:
        part = part._replace(posts=changed(part.posts, Post.FLYING, Post.IN_DOUBT))
        part = fire(part, T.GIVEN_UP)
    else:
        part = part._replace(posts=changed(part.posts, Post.FLYING, Post.DONE))
    side = with_part(side, index, part)
    side, sends = conclude(side, index, rules)
    words = f"a post of handoff {index} fails, its bytes in doubt"
    return PrefillStep(cause, words, side, tuple(sends))


def destroy_agent(side: PrefillSide, part: PrefillPart, rules: Rules) -> PrefillStep:
    """End the sending agent to one decode incarnation, and with it every post through it."""
    in_doubt = Post.IN_DOUBT in part.posts
    born, sends = part.born, []
    for index, other in enumerate(side.parts):
        if other.born != born or not any(post in OUTSTANDING for post in other.posts):
            continue
        posts = tuple(Post.DESTROYED if p in OUTSTANDING else p for p in other.posts)
        ended = fire(other._replace(posts=posts, in_doubt=rules.tells_doubt), T.GIVEN_UP)
        side = with_part(left_behind(side, index, other.generation), index, ended)
        side, said = conclude(side, index, rules)
        sends += said
    words = f"prefill destroys its sending agent to decode incarnation {born}"
    # Without a failed post it is the drain deadline's doing.
    cause = Cause.PROGRESS if in_doubt else Cause.WILL
    return PrefillStep(cause, words, side, tuple(sends))


def crash(side: PrefillSide, rules: Rules) -> PrefillStep:
    """The daemon dies. Its transfer process lives on until its successor reaps it."""
    parts = tuple(
        PrefillPart(None, NOBODY, part.generation, part.posts, part.call, is_orphan=True)
        if any(post in OUTSTANDING for post in part.posts)
        else PrefillPart()
        for part in side.parts
    )
    calls = tuple(
        call if call.phase is Phase.NOT_OPENED else Call(Phase.OVER) for call in side.calls
    )
    after = side._replace(
        is_up=False,
        superseded=frozenset(),
        sees=NOBODY,
        sees_generation=NOBODY,
        peer_floor=0,
        parts=parts,
        calls=calls,
    )
    if not rules.prefill_reaps_before_hello:
        after = after._replace(is_up=True, incarnation=side.incarnation + 1)
    return PrefillStep(Cause.PREFILL_CRASH, "the prefill daemon dies", after)


def restart(side: PrefillSide) -> PrefillStep:
    """Reap the old transfer process, then greet."""
    for index, part in enumerate(side.parts):
        if any(post in OUTSTANDING for post in part.posts):
            side = left_behind(side, index, part.generation)
    after = side._replace(
        is_up=True,
        incarnation=side.incarnation + 1,
        parts=tuple(PrefillPart() for _ in side.parts),
    )
    words = f"prefill is back as incarnation {after.incarnation}, its old transfer process reaped"
    return PrefillStep(Cause.PROGRESS, words, after)
