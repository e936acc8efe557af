"""The decode side of the model: what it does by itself and what it answers.

Pure functions from a side and a message to steps. Every change of a part's state is a call of
``decode_next``; what is written here is only the edges. Pages are modelled per handoff: a page that
is FREE may be anybody's, so a write into it is the violation (``world`` looks for it).
"""

from __future__ import annotations

from typing import NamedTuple

from kvd.core.handoff.protocol import Decode, DecodeTrigger, decode_next
from tests.model.protocol import NOBODY, Cause, Kind, Message, Pages, Rules, Side, Step

D, T = Decode, DecodeTrigger
OPEN = (D.OFFERED, D.RECEIVING, D.DRAINING)


class DecodePart(NamedTuple):
    """One handoff as the decode side has it; ``state`` None is forgotten."""

    state: Decode | None = D.QUEUED
    born: int = NOBODY
    """Own incarnation that offered it; a handoff id is worth nothing without it."""
    peer: int = NOBODY
    """Prefill incarnation it was offered to."""
    generation: int = NOBODY
    pages: Pages = Pages.FREE
    landed: int = 0
    """Posts whose bytes are certainly in the pages."""
    auxes: int = 0
    """Times the aux was handed on."""
    leaving: bool = False
    """Given up while verifying: applied on READY."""
    asked: bool = False
    """The transfer process that lives now is verifying the pages."""
    in_doubt: bool = False
    """Its writer is over, and what it had sent may still come."""
    damaged: bool = False
    """A page is not what was sent."""
    committed: bool = False
    verified: bool = False
    """One of several parts: what it sent is good, and it waits for the other."""


class DecodeSide(NamedTuple):
    """The daemon and its receiving transfer process."""

    parts: tuple[DecodePart, ...]
    incarnation: int = 0
    is_up: bool = True
    generation: int = 0
    """Of the receiving process that lives now; it grows over fences and restarts."""
    sees: int = 0
    """Newest prefill incarnation greeted, NOBODY after a restart."""
    peer_floor: int = 0
    """The prefill side keeps no outcome below it."""
    superseded: frozenset[int] = frozenset()
    """Only for the variant that remembers the superseded instead of ordering incarnations."""


DecodeStep = Step[DecodeSide]


def floor(side: DecodeSide) -> int:
    """The lowest id still open here: below it nothing from the prefill side is awaited."""
    waits = (D.QUEUED, *OPEN)
    return next((i for i, p in enumerate(side.parts) if p.state in waits), len(side.parts))


def with_part(side: DecodeSide, index: int, part: DecodePart) -> DecodeSide:
    if part.state is D.CLOSED and index < side.peer_floor:
        part = forgotten(part)
    return side._replace(parts=(*side.parts[:index], part, *side.parts[index + 1 :]))


def say(part: DecodePart, index: int, kind: Kind, word: int = 0) -> Message:
    return Message(Side.PREFILL, kind, index, part.born, part.peer, word)


def fire(part: DecodePart, trigger: DecodeTrigger) -> DecodePart:
    """The part after ``trigger``, with its pages where the edge puts them."""
    assert part.state is not None
    after = decode_next(part.state, trigger)
    if after is part.state:
        return part
    match after:
        case D.OFFERED:
            return part._replace(state=after, pages=Pages.HELD)
        case D.DRAINING:
            return part._replace(state=after, pages=Pages.QUARANTINED)
        case D.READY:
            return part._replace(state=after, pages=Pages.CACHED, committed=True, asked=False)
        case D.CLOSED if part.state is not D.READY:
            return DecodePart(after, part.born, part.peer)
        case _:
            return part._replace(state=after)


# --- what arrives ---------------------------------------------------------------------------


def deliver(side: DecodeSide, message: Message, rules: Rules) -> DecodeStep:
    """What the arrival of ``message`` does."""
    words = f"{message} arrives"
    if message.kind is Kind.HELLO:
        return greet(side, message, rules)
    stranger = rules.checks_sender and message.src != side.sees
    if stranger or (rules.checks_addressee and message.dst != side.incarnation):
        return DecodeStep(Cause.PROGRESS, f"{words} and is refused: not between us", side)
    if message.kind is Kind.PING:
        return DecodeStep(Cause.PROGRESS, words, forget_below(side, message.word))
    index, part = message.part, side.parts[message.part]
    if message.kind is Kind.ACCEPT:
        if part.state in (None, D.CLOSED, D.QUEUED):
            return DecodeStep(Cause.PROGRESS, words, side)
        after = fire(part, T.ACCEPTED)
        return DecodeStep(Cause.PROGRESS, words, with_part(side, index, after))
    is_unaccepted = part.state is D.OFFERED and message.word == 1
    if is_unaccepted and not rules.takes_delivered_unaccepted:
        return DecodeStep(Cause.PROGRESS, f"{words} and is not heard", side)
    part, answers = settled(part, message, rules)
    if part.state is D.VERIFYING and side.parts[index].state is not D.VERIFYING:
        part = part._replace(asked=True)
    return DecodeStep(Cause.PROGRESS, words, with_part(side, index, part), answers)


def settled(
    part: DecodePart, message: Message, rules: Rules
) -> tuple[DecodePart, tuple[Message, ...]]:
    """The writer's last word, the first time or again."""
    if part.state is None:  # forgotten: whoever still asks is told that nothing is known
        unknown = Message(Side.PREFILL, Kind.CLOSED, message.part, message.dst, message.src, 0)
        return part, ((unknown,) if rules.answers_settled_when_forgotten else ())
    if part.state is not D.CLOSED:
        before = part.state
        part = fire(part, T.DELIVERED if message.word == 1 else T.SETTLED)
        if message.word == 2 and part.state is D.CLOSED:
            part = doubted(part)
        took_aux = message.word == 1 and part.state in (D.VERIFYING, D.READY)
        if took_aux and (before is not part.state or not rules.takes_aux_once):
            part = part._replace(auxes=min(part.auxes + 1, 2))
        if part.state is D.VERIFYING:
            return part, ()  # ``deliver`` asks, or asked already
    elif not rules.answers_settled_when_closed:
        return part, ()
    return part, (say(part, message.part, Kind.CLOSED, int(part.committed)),)


def greet(side: DecodeSide, message: Message, rules: Rules) -> DecodeStep:
    """Hello of a prefill incarnation: a newer one proves that the older writer is gone."""
    words = f"{message} arrives"
    if rules.orders_incarnations:
        is_news = message.src > side.sees
    else:
        is_news = message.src != side.sees and message.src not in side.superseded
        side = side._replace(superseded=side.superseded | ({side.sees} if is_news else set()))
    if not is_news:
        return DecodeStep(Cause.PROGRESS, f"{words} and says nothing new", side)
    parts = tuple(writer_gone(part) for part in side.parts)
    after = side._replace(sees=message.src, peer_floor=0, parts=parts)
    return DecodeStep(Cause.PROGRESS, words, after)


def writer_gone(part: DecodePart) -> DecodePart:
    """A part whose prefill incarnation is superseded; its tombstone has nobody left to answer."""
    if part.state in (None, D.QUEUED):
        return part
    if part.state is not D.CLOSED:
        part = fire(part, T.WRITER_GONE)
        part = doubted(part) if part.state is D.CLOSED else part
    return forgotten(part) if part.state is D.CLOSED else part


def doubted(part: DecodePart) -> DecodePart:
    """CLOSED, and its pages wait until this host is quiet."""
    return part._replace(pages=Pages.QUARANTINED, in_doubt=True)


def quiet(part: DecodePart) -> DecodePart:
    """Nothing that was in doubt can land any more."""
    return part._replace(pages=Pages.FREE, in_doubt=False)


def is_quiet(side: DecodeSide, left: int, rules: Rules) -> bool:
    """Whether nothing is on its way to the receiving process that lives."""
    return left != side.generation or not rules.waits_for_ends


def forgotten(part: DecodePart) -> DecodePart:
    """Nothing is kept of it but where its pages are."""
    return DecodePart(state=None, pages=part.pages, in_doubt=part.in_doubt)


def forget_below(side: DecodeSide, below: int) -> DecodeSide:
    """Fold the tombstones that the prefill side has no use for."""
    below = max(below, side.peer_floor)
    parts = tuple(
        forgotten(part) if part.state is D.CLOSED and i < below else part
        for i, part in enumerate(side.parts)
    )
    return side._replace(peer_floor=below, parts=parts)


def is_spent(side: DecodeSide, message: Message, rules: Rules) -> bool:
    """Whether ``message`` can change nothing any more, whenever it may arrive."""
    if message.kind is Kind.HELLO or not (rules.checks_addressee and rules.checks_sender):
        return False
    if message.dst < side.incarnation + int(not side.is_up) or message.src < side.sees:
        return True
    state = side.parts[message.part].state
    if message.kind is not Kind.ACCEPT:
        return False
    return state in (None, D.QUEUED, D.CLOSED) or decode_next(state, T.ACCEPTED) is state


# --- what happens by itself -----------------------------------------------------------------


def steps(side: DecodeSide, rules: Rules) -> list[DecodeStep]:
    """Everything the decode side may do now without hearing anything."""
    if not side.is_up:
        return [restart(side)]
    found = [crash(side, rules), fence(side, rules)]
    for index, part in enumerate(side.parts):
        match part.state:
            case D.QUEUED:
                found += queued_steps(side, index)
            case D.OFFERED | D.RECEIVING:
                was_accepted = part.state is D.RECEIVING
                if rules.repeats_offer_when_accepted if was_accepted else rules.repeats_offer:
                    offer = say(part, index, Kind.OFFER, part.generation)
                    words = f"decode repeats Offer({index})"
                    found.append(DecodeStep(Cause.PROGRESS, words, side, (offer,)))
                found.append(give_up(side, index, rules))
            case D.VERIFYING:
                found += verify_steps(side, index, rules)
            case D.DRAINING:
                found += draining_steps(side, index, rules)
            case D.READY:
                after = with_part(side, index, fire(part, T.RELEASED))
                words = f"decode's client releases the lease of handoff {index}"
                found.append(DecodeStep(Cause.PROGRESS, words, after))
            case D.CLOSED | None:
                pass
    return found


def queued_steps(side: DecodeSide, index: int) -> list[DecodeStep]:
    """Admission, once the peer has said Hello; ids grow in the order of admission."""
    part = side.parts[index]
    # Nothing was sent and no id assigned: no tombstone.
    gone = forgotten(fire(part, T.GIVEN_UP))
    words = f"handoff {index} is given up in the queue"
    found = [DecodeStep(Cause.WILL, words, with_part(side, index, gone))]
    is_next = all(earlier.state is not D.QUEUED for earlier in side.parts[:index])
    if side.sees != NOBODY and is_next:
        part = part._replace(born=side.incarnation, peer=side.sees, generation=side.generation)
        part = fire(part, T.ADMITTED)
        words = f"decode admits handoff {index}, holds its pages and sends Offer({index})"
        offer = say(part, index, Kind.OFFER, part.generation)
        found.append(DecodeStep(Cause.PROGRESS, words, with_part(side, index, part), (offer,)))
    return found


def give_up(side: DecodeSide, index: int, rules: Rules) -> DecodeStep:
    """Cancelled, deadline, stalled, client gone, or the peer is suspected, rightly or not."""
    part = fire(side.parts[index], T.GIVEN_UP)
    if not rules.quarantines_when_giving_up:
        part = part._replace(pages=Pages.FREE)
    abort = say(part, index, Kind.ABORT)
    words = f"decode gives handoff {index} up and sends Abort({index})"
    if rules.fence_is_remembered and part.generation < side.generation:
        part = fire(part, T.FENCED)
        abort = say(part, index, Kind.CLOSED, 0)
    if not rules.lost_peer_may_still_write:
        part = fire(part, T.WRITER_GONE)
    return DecodeStep(Cause.WILL, words, with_part(side, index, part), (abort,))


def verify_steps(side: DecodeSide, index: int, rules: Rules) -> list[DecodeStep]:
    """Our transfer process answers, or its successor is asked; a client that leaves is remembered.

    A page may turn out damaged at any time before the answer.
    """
    part = side.parts[index]
    left = fire(part, T.GIVEN_UP)._replace(leaving=True)
    found = [DecodeStep(Cause.WILL, f"{index}'s client leaves", with_part(side, index, left))]
    if not part.damaged:
        torn = with_part(side, index, part._replace(damaged=True))
        found.append(DecodeStep(Cause.WILL, f"a page of {index} is not what was sent", torn))
    if part.asked and part.damaged:
        bad = fire(part, T.CORRUPTED)
        said = (say(bad, index, Kind.CLOSED, 0),)
        closed = with_part(side, index, bad)
        found.append(DecodeStep(Cause.PROGRESS, f"{index} is corrupt", closed, said))
    if (part.asked and not part.damaged) or not rules.commits_what_is_verified:
        good = fire(part, T.VERIFIED)
        if good.leaving:
            good = fire(good, T.RELEASED)
        said = (say(good, index, Kind.CLOSED, 1),)
        done = with_part(side, index, good)
        found.append(DecodeStep(Cause.PROGRESS, f"decode commits {index}", done, said))
    if not part.asked and rules.asks_the_next_process:
        asked = with_part(side, index, part._replace(asked=True))
        found.append(DecodeStep(Cause.PROGRESS, f"the new process verifies {index}", asked))
    return found


def draining_steps(side: DecodeSide, index: int, rules: Rules) -> list[DecodeStep]:
    """Abort again and again: DRAINING ends by the writer's word or by proof, never by a clock."""
    part = side.parts[index]
    again = with_part(side, index, fire(part, T.GIVEN_UP))
    found = [DecodeStep(Cause.WILL, f"handoff {index} is given up again", again)]
    if rules.repeats_abort:
        abort = say(part, index, Kind.ABORT)
        found.append(DecodeStep(Cause.PROGRESS, f"decode repeats Abort({index})", side, (abort,)))
    if not rules.quarantine_ignores_the_clock:
        freed = with_part(side, index, fire(part, T.WRITER_GONE))
        found.append(DecodeStep(Cause.WILL, f"a timer frees the quarantine of {index}", freed))
    return found


def fence(side: DecodeSide, rules: Rules) -> DecodeStep:
    """Kill and restart the receiving process: the old generation can never be written through."""
    sends = []
    parts = list(side.parts)
    for i, part in enumerate(parts):
        if part.in_doubt:
            parts[i] = quiet(part)
        if part.state in (None, D.CLOSED, D.QUEUED):
            continue
        parts[i] = fire(part, T.FENCED)._replace(asked=False)
        if part.state is D.DRAINING:
            sends.append(say(part, i, Kind.CLOSED, 0))
    generation = side.generation + int(rules.fence_starts_new_generation)
    after = side._replace(generation=generation, parts=tuple(parts))
    words = f"decode fences: receiving process restarted, generation {generation}"
    return DecodeStep(Cause.FENCE, words, after, tuple(sends))


def crash(side: DecodeSide, rules: Rules) -> DecodeStep:
    """The daemon dies. Its receiving process lives on until its successor reaps it."""
    parts = tuple(part if part.state is D.QUEUED else forgotten(part) for part in side.parts)
    after = side._replace(
        is_up=False, sees=NOBODY, peer_floor=0, superseded=frozenset(), parts=parts
    )
    if not rules.decode_reaps_before_hello:
        # The broken variant frees the journaled grants and greets while the process still lives.
        parts = tuple(free_grant(part) for part in parts)
        after = after._replace(is_up=True, incarnation=side.incarnation + 1, parts=parts)
    return DecodeStep(Cause.DECODE_CRASH, "the decode daemon dies", after)


def restart(side: DecodeSide) -> DecodeStep:
    """Reap the old receiving process; then the journaled grants are free; then greet."""
    after = side._replace(
        is_up=True,
        incarnation=side.incarnation + 1,
        generation=side.generation + 1,
        parts=tuple(free_grant(part) for part in side.parts),
    )
    words = f"decode is back as incarnation {after.incarnation}, its old receiving process reaped"
    return DecodeStep(Cause.PROGRESS, words, after)


def free_grant(part: DecodePart) -> DecodePart:
    return part if part.pages is Pages.CACHED else quiet(part)
