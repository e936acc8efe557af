"""What must never be, and what the end looks like."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.model.prefill_side import ACTIVE, Phase
from tests.model.protocol import NOBODY, OUTSTANDING, Pages

if TYPE_CHECKING:
    from tests.model.decode_side import DecodeSide
    from tests.model.prefill_side import PrefillPart, PrefillSide
    from tests.model.protocol import Rules

KEPT = (Pages.HELD, Pages.QUARANTINED)
"""Where a remote may write."""


def violation(decode: DecodeSide, prefill: PrefillSide, rules: Rules) -> str | None:
    """What is unsafe in this state, in words."""
    for index, (there, part) in enumerate(zip(decode.parts, prefill.parts, strict=True)):
        if any(post in OUTSTANDING for post in part.posts):
            if there.pages not in KEPT and reaches(decode, prefill, part, rules):
                return f"a post of handoff {index} may land in pages that are {there.pages.name}"
            if source_is_free(prefill, part, rules):
                return f"a post of handoff {index} reads source pages that are free"
        if prefill.left[index] == decode.generation and there.pages not in KEPT:
            return f"late bytes of handoff {index} may land in pages that are {there.pages.name}"
        if part.heard_committed and there.pages is not Pages.CACHED:
            return f"the engine hears that handoff {index} is committed, and it is not"
        if there.committed and there.landed != prefill.posts_per_part:
            return f"handoff {index} is committed with {there.landed} of its posts landed"
        if there.committed and there.damaged:
            return f"handoff {index} is committed with a page that is not what was sent"
        if there.committed and there.auxes != 1:
            return f"the aux of handoff {index} is delivered {there.auxes} times"
    return None


def reaches(decode: DecodeSide, prefill: PrefillSide, part: PrefillPart, rules: Rules) -> bool:
    """Whether a post of ``part`` can still write: the process it is meant for lives.

    A fence and a restart leave the memory as it is, so only the name of the process tells.
    """
    if rules.posts_by_named_generation:
        return part.generation == decode.generation
    return max(part.generation, prefill.sees_generation) == decode.generation


def source_is_free(prefill: PrefillSide, part: PrefillPart, rules: Rules) -> bool:
    """Whether engine and ``send`` have both let go of the pages that ``part`` reads."""
    if part.call == NOBODY or prefill.calls[part.call].phase < Phase.FINISHING:
        return False
    is_holder = part.is_orphan or part.state in ACTIVE
    return not (is_holder and rules.send_holds_source)


def is_over(decode: DecodeSide, prefill: PrefillSide) -> bool:
    """No record or tombstone on either side, no page held, no call of an engine waiting."""
    return (
        decode.is_up
        and prefill.is_up
        and all(part.state is None for part in decode.parts)
        and all(part.pages in (Pages.FREE, Pages.CACHED) for part in decode.parts)
        and all(part.state is None and not part.is_orphan for part in prefill.parts)
        and all(left == NOBODY for left in prefill.left)
        and all(call.phase in (Phase.NOT_OPENED, Phase.OVER) for call in prefill.calls)
    )
