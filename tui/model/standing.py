"""How the link stands: one of four, each with its sentence; there is no fifth called unknown."""

from __future__ import annotations

from typing import assert_never

import msgspec

from kvd.text import duration

LATE_FRAMES = 2.0
"""So many intervals without a frame are lag, not chance."""
LATE_S = 0.5
"""And never less than this: a terminal that paints twenty times a second is not that precise."""


class Connecting(msgspec.Struct, frozen=True):
    """Nobody has answered yet; ``why`` is what is known about it."""

    why: str


class Live(msgspec.Struct, frozen=True):
    """Frames come as they are wanted; the last one came ``lag_s`` ago."""

    lag_s: float


class Lagging(msgspec.Struct, frozen=True):
    """The next frame is due and has not come, ``lag_s`` after the last one."""

    lag_s: float


class Down(msgspec.Struct, frozen=True):
    """There was an answer once, and there is none any more; ``since_s`` is on our clock."""

    why: str
    since_s: float


Standing = Connecting | Live | Lagging | Down


def aged(standing: Standing, heard_s: float, now_s: float, interval_s: float) -> Standing:
    """``standing`` at ``now_s``: a live link lags when the frame that is due has not come.

    Args:
        standing: what the link last said.
        heard_s: when the last frame came, on our clock.
        now_s: on our clock.
        interval_s: how often a frame is wanted.
    """
    match standing:
        case Live() | Lagging():
            lag_s = max(0.0, now_s - heard_s)
            is_late = lag_s > max(LATE_S, LATE_FRAMES * interval_s)
            return Lagging(lag_s) if is_late else Live(lag_s)
        case Connecting() | Down():
            return standing
        case _:
            assert_never(standing)


def sentence(standing: Standing, now_s: float) -> str:
    """What the head of the screen says; ``LIVE`` is the only word without a story."""
    match standing:
        case Connecting(why):
            return f"CONNECTING: {why}" if why else "CONNECTING"
        case Live():
            return "LIVE"
        case Lagging(lag_s):
            return f"LAGGING {duration(lag_s)}"
        case Down(why, since_s):
            return f"DOWN {duration(max(0.0, now_s - since_s))}: {why}"
        case _:
            assert_never(standing)
