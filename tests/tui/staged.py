"""One page of a console on a real node, and what was asked beside its frames."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from tests.tui.golden import text_of
from tests.tui.opened import brought, opened
from tui.draw import spans

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from textual.pilot import Pilot

    from kvd.wire.admin import AdminReply, AdminRequest
    from tests.tui.fake import FakeLink
    from tui.app import KvdTui
    from tui.widgets.canvas import Canvas

SMALL, MIDDLE, LARGE = (80, 24), (132, 40), (200, 60)


class Stage(NamedTuple):
    """The console on ``link``; ``asked`` are the requests beside the frames."""

    app: KvdTui
    link: FakeLink
    pilot: Pilot[object]
    asked: list[AdminRequest]

    @property
    def text(self) -> str:
        return text_of(self.app)

    def lines(self, panel: type[Canvas] | str) -> list[str]:
        """What stands on a panel of the page."""
        return [spans.text_of(line).rstrip() for line in self.app.page.query_one(panel).lines]

    async def press(self, *keys: str) -> None:
        """Press, and wait until what is wanted then has come."""
        for key in keys:
            await self.pilot.press(key)
            await self.frame()

    async def frame(self) -> None:
        """What is wanted now comes, and what is wanted then."""
        for _ in range(2):
            self.link.frame()
            self.app.tick()
            await self.pilot.pause()

    async def pass_time(self, seconds: float) -> None:
        """The nodes live on; then the next frame."""
        self.link.pass_time(seconds)
        await self.frame()


@asynccontextmanager
async def staged(
    page: str,
    situation: str = "normal",
    size: tuple[int, int] = MIDDLE,
    prepare: Callable[[FakeLink], None] = lambda _: None,
) -> AsyncIterator[Stage]:
    """The page with its first frames on it; ``prepare`` does something to the nodes before."""
    app, link = opened(situation, page=page)
    prepare(link)
    asked: list[AdminRequest] = []
    answer = link.answer

    def listen(request: AdminRequest) -> AdminReply:
        asked.append(request)
        return answer(request)

    link.answer = listen  # type: ignore[method-assign]
    async with app.run_test(size=size, notifications=True) as pilot:
        stage = Stage(app, link, pilot, asked)
        await brought(app, link, pilot)
        await stage.pass_time(0.4)
        yield stage
