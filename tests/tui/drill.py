"""A console before a real daemon, and who sits at it: what is pressed, and what is read."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from typing import TYPE_CHECKING

from tests.support.daemons import is_linked
from tui import endpoint as places
from tui.app import KvdTui, Options
from tui.link import Link
from tui.model.commands import PAGES
from tui.model.mirror import Mirror

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from textual.pilot import Pilot

    from tests.support.daemons import Daemon, Pair

SIZE = (132, 40)
FOUND_S = 5.0
"""What a quiet machine needs at most for anything; most of it takes one or two seconds."""
BUSY = 4.0
"""A machine that does much else may take so many times as long."""
LOOK_S = 0.05
KEYS = {" ": "space", ":": "colon", "_": "underscore", "-": "minus"}


class Operator:
    """Somebody at a console; ``told`` gets how long each thing took, since ``causes``."""

    def __init__(self, app: KvdTui, pilot: Pilot[None], told: dict[str, float]) -> None:
        self.app = app
        self.told = told
        self._pilot = pilot
        self._cause_s = time.monotonic()

    def causes(self) -> None:
        """What is to be found happens now."""
        self._cause_s = time.monotonic()

    @property
    def text(self) -> str:
        """What the screen says; what lies over a page is in front."""
        strips = self.app.screen._compositor.render_strips()
        return "".join(f"{strip.text.rstrip()}\n" for strip in strips)

    async def presses(self, *keys: str) -> None:
        """One key after the other."""
        await self._pilot.press(*keys)

    async def turns(self, page: str) -> None:
        await self._pilot.press(str(PAGES.index(page) + 1))

    async def types(self, command: str) -> None:
        await self._pilot.press("colon", *(KEYS.get(sign, sign) for sign in command), "enter")

    async def reads(self, name: str, *sentences: str, within_s: float = FOUND_S) -> str:
        """The screen, once it says all of this (patterns); how long that took is told.

        Raises:
            AssertionError: it does not, or too late; the message has the screen.
        """
        while missing := [one for one in sentences if not re.search(one, self.text)]:
            waited_s = time.monotonic() - self._cause_s
            assert waited_s < BUSY * within_s, f"{name}: no {missing}:\n{self.text}"
            await self._pilot.pause(LOOK_S)
        self.told[name] = time.monotonic() - self._cause_s
        return self.text


@contextlib.asynccontextmanager
async def operator(
    daemon: Daemon, told: dict[str, float], page: str = "overview"
) -> AsyncIterator[Operator]:
    """Somebody before this daemon, for as long as the block lasts."""
    where = places.read(daemon.admin)
    assert not isinstance(where, places.BadEndpoint)
    app = KvdTui(Mirror(), lambda one, wanted: Link(where, one, wanted), Options(page=page))
    async with app.run_test(size=SIZE) as pilot:
        person = Operator(app, pilot, told)
        await person.reads("first frame", r"\A [A-Z]+  \S+  serving ")
        told.clear()
        yield person


@contextlib.contextmanager
def stopped(daemon: Daemon) -> Iterator[None]:
    """Its process does nothing for as long as the block lasts."""
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def wait_linked(pair: Pair) -> None:
    """Return when both can send to each other again."""
    for one in (pair.prefill, pair.decode):
        one.wait_for(lambda one=one: is_linked(one), "has no agent for its peer", 20.0)  # type: ignore[misc]
