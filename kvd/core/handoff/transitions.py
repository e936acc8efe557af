"""One transition of a part: the table decides, its history remembers, an event tells.

What must not live here: which trigger leads where (``protocol``), what is done on the edge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.handoff.protocol import (
    DECODE,
    PREFILL,
    Decode,
    DecodeTrigger,
    Prefill,
    PrefillTrigger,
    decode_next,
    prefill_next,
)
from kvd.wire.events import HandoffEnded, Moved

if TYPE_CHECKING:
    from kvd.core.handoff.parts import PartHistory, ReceivePart, SendPart
    from kvd.core.outbox import Outbox
    from kvd.errors import Refusal
    from kvd.wire.peer import ReceiveOutcome


@mypyc_attr(allow_interpreted_subclasses=True)
class RowWords:
    """A row of a table in the words of events and histories: made once, told for every part."""

    __slots__ = ("after", "before", "line", "side", "trigger")

    def __init__(self, side: str, before: str, trigger: str, after: str) -> None:
        self.side = side
        self.before = before
        self.trigger = trigger
        self.after = after
        self.line = f"{before} -> {after} ({trigger}"

    def tell(
        self, part_id: int, room: int, peer: str, why: str, history: PartHistory, out: Outbox
    ) -> None:
        """A part has gone from one state to another."""
        history.add_line(out.at_s, f"{self.line}: {why})" if why else f"{self.line})")
        out.seq = seq = out.seq + 1
        # By position, as the events of leases.
        out.events.append(
            Moved(
                seq,
                out.at_s,
                self.side,
                part_id,
                room,
                peer,
                self.before,
                self.after,
                self.trigger,
                why,
            )
        )


_DECODE_WORDS: dict[tuple[Decode, DecodeTrigger], RowWords] = {
    row: RowWords("decode", row[0].value, row[1].value, after.value)
    for row, after in DECODE.items()
}

_PREFILL_WORDS: dict[tuple[Prefill, PrefillTrigger], RowWords] = {
    row: RowWords("prefill", row[0].value, row[1].value, after.value)
    for row, after in PREFILL.items()
}


def move_decode(part: ReceivePart, trigger: DecodeTrigger, why: str, out: Outbox) -> None:
    """Apply ``trigger`` to a part of the decode side."""
    before = part.state
    part.state = after = decode_next(before, trigger)
    # A repeated message fires its row again; only what has changed is worth a line and an event.
    if after is not before:
        words = _DECODE_WORDS[before, trigger]
        words.tell(part.id, part.attempt.room, part.peer, why, part.history, out)


def move_prefill(part: SendPart, trigger: PrefillTrigger, why: str, out: Outbox) -> None:
    """Apply ``trigger`` to a part of the prefill side."""
    before = part.state
    part.state = after = prefill_next(before, trigger)
    if after is not before:
        words = _PREFILL_WORDS[before, trigger]
        words.tell(part.id, part.room, part.peer, why, part.history, out)


def tell_ended(
    part: ReceivePart | SendPart,
    outcome: ReceiveOutcome,
    reason: Refusal | None,
    *,
    prefix_tokens: int,
    saved_bytes: int,
    lease: int,
    out: Outbox,
) -> None:
    """A part of either side is over; ``lease`` had its pages, 0 on the prefill side."""
    out.seq = seq = out.seq + 1
    # By position, as the events of leases.
    out.events.append(
        HandoffEnded(
            seq,
            out.at_s,
            "decode" if isinstance(part.state, Decode) else "prefill",
            part.id,
            part.room,
            part.peer,
            outcome._value_,  # ``value`` is two calls
            reason.code.value if reason else "",
            reason.message if reason else "",
            part.prompt_tokens,
            prefix_tokens,
            part.moved_bytes,
            saved_bytes,
            out.at_s - part.since_s,
            lease,
        )
    )
