"""One transition, and the end: the table decides, the story remembers, the event tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.tables import DecodeTrigger, PrefillTrigger, decode_next, prefill_next
from kvd.wire.events import HandoffEnded, Moved

if TYPE_CHECKING:
    from kvd.core.effects import Outbox
    from kvd.core.parts import DecodePart, PrefillPart
    from kvd.errors import Refusal
    from kvd.wire.peer import Outcome


def move_decode(part: DecodePart, trigger: DecodeTrigger, why: str, out: Outbox) -> None:
    """Apply ``trigger`` to a part of the decode side."""
    before = part.state
    part.state = decode_next(before, trigger)
    if part.state is not before:
        _tell(part, ("decode", before.value, part.state.value, trigger.value), why, out)


def move_prefill(part: PrefillPart, trigger: PrefillTrigger, why: str, out: Outbox) -> None:
    """Apply ``trigger`` to a part of the prefill side."""
    before = part.state
    part.state = prefill_next(before, trigger)
    if part.state is not before:
        _tell(part, ("prefill", before.value, part.state.value, trigger.value), why, out)


def tell_ended(
    part: DecodePart, outcome: Outcome, reason: Refusal | None, saved_bytes: int, out: Outbox
) -> None:
    """A part of the decode side is over."""
    out.emit(
        HandoffEnded(
            out.next_seq(),
            out.at_s,
            "decode",
            part.id,
            part.room,
            part.peer,
            outcome.value,
            reason.code.value if reason else "",
            reason.message if reason else "",
            part.prompt_tokens,
            part.prefix_tokens,
            part.moved_bytes,
            saved_bytes,
            out.at_s - part.since_s,
            part.lease.id if part.lease is not None else 0,
        )
    )


def _tell(
    part: DecodePart | PrefillPart, edge: tuple[str, str, str, str], why: str, out: Outbox
) -> None:
    side, before, after, trigger = edge
    reason = f"{trigger}: {why}" if why else trigger
    part.story.tell(out.at_s, f"{before} -> {after} ({reason})")
    out.emit(
        Moved(
            out.next_seq(),
            out.at_s,
            side,
            part.id,
            part.room,
            part.peer,
            before,
            after,
            trigger,
            why,
        )
    )
