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
    is_demotion = move.verb == "demotion"
    does = "read" if is_demotion else "written"
    until = f"order {move.ticket} of tier {move.tier.name} to be answered"
    way_s = move.tier.gives_way_s
    # What is read makes way for nobody.
    way = "" if way_s is None or not is_demotion else f"; {way_made(way_s)}"
    return f"{until}, or its storage process to end: until then its pages are {does}{way}"


def way_made(for_s: float) -> str:
    """That what is written goes slowly, beside handoffs."""
    return f"writing makes way for handoffs, for {for_s:.1f} s now"
