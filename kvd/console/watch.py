"""One console's look, answered frame by frame: what it has by now, and when the next one is due."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kvd.wire.admin import Look


class Watch:
    """Plain record; the desk writes what the console has, the shell when it is due."""

    __slots__ = ("after", "asked", "due_s", "have", "left", "queries")

    def __init__(self, asked: Look, now_s: float) -> None:
        self.asked = asked
        self.queries = tuple([msgspec.structs.replace(query, have=0) for query in asked.queries])
        """What is asked, whoever asks it."""
        self.have = [query.have for query in asked.queries]
        """The revision of each answer that it was sent last."""
        self.after = asked.events.after if asked.events is not None else 0
        self.left = asked.frames
        self.due_s = now_s

    def sent(self, now_s: float) -> None:
        """One frame less; the next one is due in its turn, or later if this one came late."""
        self.left -= 1
        self.due_s = max(self.due_s + self.asked.every_s, now_s)
