"""Whether the posts of a part move: bytes since a window began, against a floor.

What is reported is whole handles of the transfer process (16 MiB at most), so a window must be long
enough for one of them at the slowest rate that is still progress.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.errors import Code, Refusal

if TYPE_CHECKING:
    from kvd.core.parts import PrefillPart
    from kvd.core.settings import Settings


class Flow:
    """Bytes moved in the window that runs; it runs only while a post is under way."""

    __slots__ = ("moved_bytes", "since_s")

    def __init__(self) -> None:
        self.since_s = 0.0
        self.moved_bytes = 0

    def restart(self, at_s: float) -> None:
        """A new window."""
        self.since_s = at_s
        self.moved_bytes = 0


def stalled(part: PrefillPart, at_s: float, mine: Settings) -> Refusal | None:
    """Why the part is given up; None while it moves. Begins the next window when one is over."""
    flow = part.flow
    window_s = at_s - flow.since_s
    if not part.outstanding or window_s < mine.stall_s:
        return None
    moved, floor = flow.moved_bytes, int(mine.min_bytes_per_s * window_s)
    if moved >= floor:
        flow.restart(at_s)
        return None
    event = " and at the event that the engine named" if part.after else ""
    return Refusal(
        Code.STALLED,
        f"room {part.room} to {part.peer}: {moved} bytes moved in {window_s:.1f} s with "
        f"{len(part.outstanding)} posts under way, the least is {mine.min_bytes_per_s} bytes a "
        f"second: look at the network between the two{event}, or lower transfer.min_bytes_per_s",
        side=mine.name,
        numbers={"moved_bytes": moved, "floor_bytes": floor, "window_s": round(window_s, 3)},
    )
