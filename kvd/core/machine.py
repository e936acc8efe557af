"""One transition: the table decides, the story remembers, the event tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.tables import DecodeTrigger, PrefillTrigger, decode_next, prefill_next
from kvd.wire.events import Moved

if TYPE_CHECKING:
    from kvd.core.effects import Outbox
    from kvd.core.parts import DecodePart, PrefillPart


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
