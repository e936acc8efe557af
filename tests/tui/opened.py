"""A console that looks at a real node in a situation: what its screens are tested with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.tui.fake import FakeLink
from tests.tui.golden import settled
from tui.app import KvdTui, Options
from tui.model.mirror import Mirror

if TYPE_CHECKING:
    from textual.pilot import Pilot

NOON_S = 1_768_478_400.0
"""What the clock on the wall says is this later than the town's: it began at noon."""
ROUNDS = 3
"""Of frames until a screen has what it wants: it knows how much that is when it has been laid out,
and what a card is about when its table has come."""


def opened(situation: str = "normal", seed: int = 1, **options: object) -> tuple[KvdTui, FakeLink]:
    """The console, which has the clock of its link, and the link."""
    link = FakeLink(situation, seed)
    app = KvdTui(
        Mirror(), link.connect, Options(**options), link.clock, lambda: NOON_S + link.town.now_s
    )
    return app, link


async def brought(app: KvdTui, link: FakeLink, pilot: Pilot[object]) -> None:
    """Whatever is wanted now has come, and is painted."""
    for _ in range(ROUNDS):
        await settled(pilot)
        link.frame()
        app.tick()
    await settled(pilot)
