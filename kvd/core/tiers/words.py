"""What an engine says about tiers with a request, and what is said of a move, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd.errors import Code, Refusal

if TYPE_CHECKING:
    from kvd.core.tiers.moves import TierMove

WAIT: Final = "wait"
NOW: Final = "now"
"""For pages that lie in a tier: wait for them, or take what is in the pool."""


def bad_word(tiers: str, side: str) -> Refusal | None:
    """Why a request cannot be served so."""
    if tiers in {"", WAIT, NOW}:
        return None
    return Refusal(Code.BAD_REQUEST, f"tiers={tiers!r} is none of {WAIT!r} and {NOW!r}", side=side)


def waits_for(move: TierMove | None) -> str:
    """What would end a lease that is kept for it."""
    if move is None:
        return "the storage process, of which nobody knows an order for it"
    does = "read" if move.verb == "demotion" else "written"
    until = f"order {move.ticket} of tier {move.tier.name} to be answered"
    return f"{until}, or its storage process to end: until then its pages are {does}"
