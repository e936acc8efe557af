"""The decode side of one receive from two writers: two links, one lease, one outcome.

Each link is a ``DecodeSide`` with one part, which does what it always does; what is joint is here:
the lease's pages, admission, giving up, the commit, and what one part's end does to the other.

- UNSAFE, in addition: a page is free or committed while a writer of the lease may write into it;
  something is committed that is not verified as a whole; the aux arrives but once.
- STUCK, in addition: a part that nothing ends, because the other one has ended the receive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvd.core.handoff.protocol import Decode, DecodeTrigger
from tests.model import decode_side
from tests.model.decode_side import DecodePart, DecodeSide, fire, forgotten, say, with_part
from tests.model.protocol import NOBODY, Cause, Kind, Message, Pages, Rules

if TYPE_CHECKING:
    from collections.abc import Iterator

D, T = Decode, DecodeTrigger
ASKING = (D.OFFERED, D.RECEIVING)
WRITABLE = (*ASKING, D.DRAINING)
USUAL = Rules()


class Joint(NamedTuple):
    """The sentences about several parts. A mutation negates one of them."""

    commits_when_all_are_verified: bool = True
    """One part that is verified waits for the others."""
    frees_with_the_last_writer: bool = True
    """The lease's pages come back when no part may be written any more."""
    gives_up_the_others: bool = True
    """What is still asked for is given up when one part fails: Abort, DRAINING."""
    drops_what_is_delivered: bool = True
    """A part that has arrived ends with the one that failed: it would wait for ever."""
    takes_aux_from_one: bool = True
    """One source is authoritative; the aux of the others is dropped."""


class Reception(NamedTuple):
    """Both links of one daemon; they share its incarnation, its processes, and the lease."""

    links: tuple[DecodeSide, DecodeSide]
    auxes: int = NOBODY
    """How often the aux was handed on when it was committed."""

    @property
    def parts(self) -> tuple[DecodePart, DecodePart]:
        return self.links[0].parts[0], self.links[1].parts[0]


class Sent(NamedTuple):
    """A message, and over which link."""

    link: int
    message: Message


class ReceptionStep(NamedTuple):
    """As ``Step``, of both links together."""

    cause: Cause
    words: str
    after: Reception
    sends: tuple[Sent, ...] = ()


def put(whole: Reception, link: int, part: DecodePart) -> Reception:
    side = with_part(whole.links[link], 0, part)
    return on(whole, link, side)


def on(whole: Reception, link: int, side: DecodeSide) -> Reception:
    other = whole.links[1 - link]
    return whole._replace(links=(side, other) if link == 0 else (other, side))


def over(link: int, messages: tuple[Message, ...]) -> tuple[Sent, ...]:
    return tuple(Sent(link, message) for message in messages)


# --- one lease for both ---------------------------------------------------------------------


def leased(whole: Reception, joint: Joint) -> Reception:
    """Both parts with their pages where the lease has them."""
    states = [part.state for part in whole.parts]
    if any(part.pages is Pages.CACHED for part in whole.parts):
        pages = Pages.CACHED
    elif D.DRAINING in states:
        pages = Pages.QUARANTINED
    elif any(state in (*ASKING, D.VERIFYING) for state in states):
        pages = Pages.HELD
    elif any(part.in_doubt for part in whole.parts):
        pages = Pages.QUARANTINED
    else:
        pages = Pages.FREE
    ended = any(state in (D.CLOSED, None) for state in states)
    if not joint.frees_with_the_last_writer and ended and pages is not Pages.CACHED:
        pages = Pages.FREE
    for link, part in enumerate(whole.parts):
        side = whole.links[link]
        whole = on(whole, link, side._replace(parts=(part._replace(pages=pages),)))
    return whole


def joined(whole: Reception, link: int, joint: Joint) -> tuple[Reception, tuple[Sent, ...]]:
    """What follows for the other part when that of ``link`` has just ended or drains."""
    other = 1 - link
    part = whole.parts[other]
    sends: tuple[Sent, ...] = ()
    if part.state in ASKING and joint.gives_up_the_others:
        whole = put(whole, other, fire(part, T.GIVEN_UP))
        sends = (Sent(other, say(part, 0, Kind.ABORT)),)
    elif part.state is D.VERIFYING and joint.drops_what_is_delivered:
        whole = put(whole, other, fire(part, T.DROPPED))
        sends = (Sent(other, say(part, 0, Kind.CLOSED, 0)),)
    return leased(whole, joint), sends


def has_failed(before: DecodePart, after: DecodePart) -> bool:
    """Whether the part was wanted, and is not any more."""
    was_wanted = before.state in (*ASKING, D.VERIFYING)
    return was_wanted and after.state in (D.DRAINING, D.CLOSED, None) and not after.committed


def quiet(whole: Reception, link: int, joint: Joint) -> Reception:
    """Nothing that one writer had sent can land any more."""
    part = whole.parts[link]
    return leased(put(whole, link, part._replace(in_doubt=False)), joint)


# --- what arrives ---------------------------------------------------------------------------


def deliver(whole: Reception, link: int, message: Message, joint: Joint) -> ReceptionStep:
    """What the arrival of ``message`` over ``link`` does."""
    before = whole.parts[link]
    step = decode_side.deliver(whole.links[link], message, USUAL)
    after = on(whole, link, step.after)
    if joint.takes_aux_from_one and link == 1:
        after = put_quietly(after, link, after.parts[link]._replace(auxes=0))
    sends = over(link, step.sends)
    if has_failed(before, after.parts[link]):
        after, more = joined(after, link, joint)
        sends += more
    else:
        after = leased(after, joint)
    return ReceptionStep(step.cause, f"{step.words} ({link})", after, sends)


def put_quietly(whole: Reception, link: int, part: DecodePart) -> Reception:
    return on(whole, link, whole.links[link]._replace(parts=(part,)))


# --- what happens by itself -----------------------------------------------------------------


def steps(whole: Reception, joint: Joint) -> Iterator[ReceptionStep]:
    """Everything the decode side may do now without hearing anything."""
    if not whole.links[0].is_up:
        yield both(whole, [decode_side.restart(side) for side in whole.links])
        return
    yield both(whole, [decode_side.crash(side, USUAL) for side in whole.links])
    fenced = both(whole, [decode_side.fence(side, USUAL) for side in whole.links])
    yield fenced._replace(after=leased(fenced.after, joint))
    states = [part.state for part in whole.parts]
    if D.QUEUED in states:
        yield from queued_steps(whole, joint)
        return
    if any(state in ASKING for state in states) or states == [D.VERIFYING] * 2:
        yield given_up(whole, joint)
    if states == [D.READY] * 2:
        for link, part in enumerate(whole.parts):
            whole = put(whole, link, fire(part, T.RELEASED))
        yield ReceptionStep(Cause.PROGRESS, "decode's client releases the lease", whole)
        return
    for link in range(2):
        yield from part_steps(whole, link, joint)


def both(whole: Reception, taken: list[decode_side.DecodeStep]) -> ReceptionStep:
    """One step of the daemon, as each link takes it."""
    first, second = taken
    sends = over(0, first.sends) + over(1, second.sends)
    after = whole._replace(links=(first.after, second.after))
    return ReceptionStep(first.cause, first.words, after, sends)


def queued_steps(whole: Reception, joint: Joint) -> Iterator[ReceptionStep]:
    """Admission when both peers have said Hello; both Offers go out."""
    gone = Reception(
        tuple(  # type: ignore[arg-type]
            with_part(side, 0, forgotten(fire(side.parts[0], T.GIVEN_UP))) for side in whole.links
        )
    )
    yield ReceptionStep(Cause.WILL, "the receive is given up in the queue", gone)
    if NOBODY in (whole.links[0].sees, whole.links[1].sees):
        return
    sends = []
    for link, side in enumerate(whole.links):
        part = side.parts[0]._replace(
            born=side.incarnation, peer=side.sees, generation=side.generation
        )
        part = fire(part, T.ADMITTED)
        whole = put(whole, link, part)
        sends.append(Sent(link, say(part, 0, Kind.OFFER, part.generation)))
    words = "decode admits the receive, holds its pages and sends both Offers"
    yield ReceptionStep(Cause.PROGRESS, words, leased(whole, joint), tuple(sends))


def given_up(whole: Reception, joint: Joint) -> ReceptionStep:
    """Cancelled, deadline, client gone, or a peer is suspected, rightly or not."""
    words = "decode gives the receive up"
    for link, part in enumerate(whole.parts):
        if part.state in ASKING:
            after = put(whole, link, fire(part, T.GIVEN_UP))
            after, more = joined(after, link, joint)
            sends = (Sent(link, say(part, 0, Kind.ABORT)), *more)
            return ReceptionStep(Cause.WILL, words, after, sends)
    for link, part in enumerate(whole.parts):
        whole = put(whole, link, fire(part, T.GIVEN_UP)._replace(leaving=True))
    return ReceptionStep(Cause.WILL, f"{words}, all of which has arrived", whole)


def part_steps(whole: Reception, link: int, joint: Joint) -> Iterator[ReceptionStep]:
    part = whole.parts[link]
    if part.state in WRITABLE:
        is_over = part.state is D.DRAINING
        kind, word = (Kind.ABORT, 0) if is_over else (Kind.OFFER, part.generation)
        words = f"decode repeats {kind.value} ({link})"
        yield ReceptionStep(Cause.PROGRESS, words, whole, (Sent(link, say(part, 0, kind, word)),))
    if part.state is not D.VERIFYING or part.verified:
        return
    if not part.damaged:
        torn = put(whole, link, part._replace(damaged=True))
        yield ReceptionStep(Cause.WILL, f"a page of part {link} is not what was sent", torn)
    if not part.asked:
        asked = put(whole, link, part._replace(asked=True))
        yield ReceptionStep(Cause.PROGRESS, f"the new process verifies part {link}", asked)
    elif part.damaged:
        bad = fire(part, T.CORRUPTED)
        after, more = joined(put(whole, link, bad), link, joint)
        said = (Sent(link, say(bad, 0, Kind.CLOSED, 0)), *more)
        yield ReceptionStep(Cause.PROGRESS, f"part {link} is corrupt", after, said)
    else:
        good = put(whole, link, part._replace(verified=True, asked=False))
        yield committed(good, joint, f"part {link} is verified")


def committed(whole: Reception, joint: Joint, words: str) -> ReceptionStep:
    """READY, both at once; or one of them waits for the other."""
    if joint.commits_when_all_are_verified and not all(part.verified for part in whole.parts):
        return ReceptionStep(Cause.PROGRESS, words, whole)
    sends = []
    whole = whole._replace(auxes=sum(part.auxes for part in whole.parts))
    for link, part in enumerate(whole.parts):
        if part.state is not D.VERIFYING:
            continue
        good = fire(part, T.VERIFIED)
        if good.leaving:
            good = fire(good, T.RELEASED)
        whole = put(whole, link, good)
        sends.append(Sent(link, say(good, 0, Kind.CLOSED, 1)))
    return ReceptionStep(
        Cause.PROGRESS, f"{words}: decode commits", leased(whole, joint), tuple(sends)
    )
