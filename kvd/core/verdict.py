"""What a Settled must satisfy before its aux goes to an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.errors import Code, Refusal
from kvd.wire.peer import Outcome, Settled

if TYPE_CHECKING:
    from kvd.core.settings import Settings


def bounded(message: Settled, mine: Settings) -> Settled:
    """The message, or a failure in its place where its aux is longer than we take."""
    n_bytes, limit = len(message.aux), mine.max_aux_bytes
    if n_bytes <= limit:
        return message
    refusal = Refusal(
        Code.TOO_LARGE,
        f"the prefill side sent aux of {n_bytes} bytes, {mine.name} takes {limit} at most: make "
        "limits.max_aux_bytes equal on both",
        side=mine.name,
        numbers={"bytes": n_bytes, "limit": limit},
    )
    return msgspec.structs.replace(message, outcome=Outcome.FAILED, reason=refusal, aux=b"")
