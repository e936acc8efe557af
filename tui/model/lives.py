"""What is known of one handoff: the daemon's own story of it, and that of the daemon at its peer.

Pure. Stories are asked for now and then, and shown in between: marks get older by the daemon's
clock, and those that a frozen screen does not know yet are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.errors import Refusal
from kvd.wire.admin import Because, Mark, OtherEnd
from tui.draw.phases import End
from tui.model.handoffs import ENDED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tui.model.dress import Facts

UNNAMED = "the other end"
OTHER_SIDE = {"decode": "prefill", "prefill": "decode"}


class Heard(msgspec.Struct, frozen=True):
    """An answer of the daemon, and its clock when it came."""

    at_s: float
    answer: Because | Refusal | tuple[OtherEnd, ...]


class Life(msgspec.Struct, frozen=True):
    """A handoff that is looked at. ``here`` and ``there`` are None until they were asked for."""

    ref: str
    here: Heard | None = None
    there: Heard | None = None

    def with_here(self, at_s: float, answer: Because | Refusal) -> Life:
        """With what the daemon says now. One that has ended is forgotten: its story stays."""
        kept = self.here
        if isinstance(answer, Refusal) and kept is not None and isinstance(kept.answer, Because):
            return self
        return msgspec.structs.replace(self, here=Heard(at_s, answer))

    def with_there(self, at_s: float, answer: tuple[OtherEnd, ...] | Refusal) -> Life:
        """With what the other daemon says now; of all ends of the room those of this part.

        Where there is no answer, what it said before stays: the head says how old that is.
        """
        kept = self.there.answer if self.there is not None else ()
        was_told = isinstance(kept, tuple) and any(not one.why_none for one in kept)
        if isinstance(answer, Refusal) and was_told:
            return self
        if isinstance(answer, tuple):
            answer = tuple(one for one in answer if one.ours == self.ref)
        return msgspec.structs.replace(self, there=Heard(at_s, answer))


def ends(life: Life, row: Facts, node: str, now_s: float) -> tuple[End, ...]:
    """Our end, then the other one, as of ``now_s`` on the daemon's clock."""
    peer = row.text("peer").removeprefix("peer:")
    return (_ours(life, row, node, now_s), *_others(life, row, peer, now_s))


def _ours(life: Life, row: Facts, node: str, now_s: float) -> End:
    side, state, why = row.text("side"), row.text("state"), row.text("waiting_for")
    match life.here:
        case Heard(at_s=at_s, answer=Because(marks=marks)):
            shown = seen(marks, now_s - at_s)
        case Heard(answer=Refusal(message=message)) if state not in ENDED:
            return End(node, side, state, (), why, message)
        case _:
            shown = _began(row, now_s)
    if state in ENDED:
        return End(node, side, "closed", _closed(shown, row, now_s))
    return End(node, side, state, shown, why)


def _began(row: Facts, now_s: float) -> tuple[Mark, ...]:
    """What the row alone tells."""
    since_s = row.number("since")
    return (Mark(max(0.0, now_s - since_s), "began"),) if since_s is not None else ()


def _closed(marks: tuple[Mark, ...], row: Facts, now_s: float) -> tuple[Mark, ...]:
    """The end itself, which came after the last story was asked for."""
    ended_s = row.number("ended")
    if ended_s is None or not marks or marks[-1].what.partition(" (")[0].endswith("-> closed"):
        return marks
    before = marks[-1].what.partition("-> ")[2].partition(" (")[0] or "open"
    ago_s = min(max(0.0, now_s - ended_s), marks[-1].ago_s)
    why = row.text("waiting_for") or row.text("state")
    return (*marks, Mark(ago_s, f"{before} -> closed ({why})"))


def _others(life: Life, row: Facts, peer: str, now_s: float) -> tuple[End, ...]:
    side = OTHER_SIDE.get(row.text("side"), "?")
    match life.there:
        case None:
            trouble = "asked; no answer yet" if peer else "nobody yet"
            if row.text("state") in ENDED:
                trouble = "not asked: it has ended"
            return (End(peer or UNNAMED, side, "", (), "", trouble),)
        case Heard(answer=Refusal(message=message)):
            return (End(peer or UNNAMED, side, "", (), "", message),)
        case Heard(at_s=at_s, answer=tuple() as found):
            if not found:
                return (
                    End(
                        peer or UNNAMED,
                        side,
                        "",
                        (),
                        "",
                        "this daemon tells of no other end",
                    ),
                )
            return tuple(_other(one, now_s - at_s) for one in found)
        case _:
            return ()


def _other(one: OtherEnd, by_s: float) -> End:
    marks = seen(one.marks, by_s)
    return End(one.peer or UNNAMED, one.side, one.state, marks, one.waiting_for, one.why_none)


def seen(marks: Iterable[Mark], by_s: float) -> tuple[Mark, ...]:
    """The marks ``by_s`` later; earlier where negative, without those that were yet to come."""
    return tuple(Mark(mark.ago_s + by_s, mark.what) for mark in marks if mark.ago_s + by_s >= 0.0)


def story(shown: Iterable[End]) -> list[tuple[float, str, str]]:
    """Everything that happened at either end, oldest first: how long ago, where, what."""
    return sorted(
        ((mark.ago_s, end.name, mark.what) for end in shown for mark in end.marks),
        key=lambda one: -one[0],
    )
