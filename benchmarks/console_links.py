"""Consoles without a screen: each asks for what one screen shows, ten times a second."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Final

import msgspec
import zmq
import zmq.asyncio

from kvd.wire.admin import Frame, Look
from kvd.wire.codec import ADMIN_REPLIES, ADMIN_REQUESTS
from kvd.wire.console import EventQuery, MapQuery, PageMap, Query, Table

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LINES: Final = 45
FRAMES_ASKED: Final = 20
SCREENS: Final[tuple[tuple[Query | MapQuery, ...], ...]] = (
    (Query("pools"), Query("concerns", limit=6)),
    (Query("pools"), MapQuery("", "state", pages_each=128, cells=8000)),
    (Query("tree", limit=LINES),),
    (Query("rooms", limit=LINES, sort="since"),),
    (Query("peers", limit=LINES),),
    (Query("concerns", limit=LINES),),
    (Query("clients", limit=LINES), Query("leases", limit=LINES, sort="-held")),
    (Query("locked", limit=LINES),),
)
"""One link after the other takes the next of these."""


class Console:
    """One link. ``ages_s`` are of the tables when they arrived; ``waits_s`` of the frames."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, number: int) -> None:
        self.frames = self.received_bytes = 0
        self.ages_s: list[float] = []
        self.waits_s: list[float] = []
        self._queries = SCREENS[number % len(SCREENS)]
        self._have = [0] * len(self._queries)
        self._after = self._call = 0
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect(endpoint)

    async def run(self, hz: float) -> None:
        """Ask for frames at that rate, and for more before they are used up."""
        try:
            while True:
                await self._ask(1 / hz)
                for _ in range(FRAMES_ASKED // 2):
                    self._take(await self._socket.recv())
        finally:
            self._socket.close(linger=0)

    async def _ask(self, every_s: float) -> None:
        queries = tuple(
            msgspec.structs.replace(query, have=have)
            for query, have in zip(self._queries, self._have, strict=True)
        )
        self._call += 1
        look = Look(self._call, queries, EventQuery(self._after, limit=100), FRAMES_ASKED, every_s)
        begun_s = time.monotonic()
        await self._socket.send(ADMIN_REQUESTS.encode(look))
        while self._take(await self._socket.recv()) != self._call:
            pass
        self.waits_s.append(time.monotonic() - begun_s)

    def _take(self, answer: bytes) -> int:
        """One frame; returns the call that it answers. Those of an older look are only counted."""
        frame = ADMIN_REPLIES.decode(answer)
        assert isinstance(frame, Frame), frame
        self.frames += 1
        self.received_bytes += len(answer)
        if frame.call == self._call:
            self._after = frame.upto
            for place, part in enumerate(frame.answers):
                table = msgspec.msgpack.decode(part, type=Table | PageMap)
                self._have[place] = table.revision
                if table.revision:
                    self.ages_s.append(max(0.0, frame.vitals.at_s - table.at_s))
        return frame.call


@contextlib.asynccontextmanager
async def consoles(endpoint: str, count: int, hz: float) -> AsyncIterator[list[Console]]:
    """So many links that ask, for as long as the block lasts."""
    context = zmq.asyncio.Context()
    links = [Console(context, endpoint, number) for number in range(count)]
    tasks = [asyncio.create_task(link.run(hz)) for link in links]
    try:
        yield links
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        context.destroy(linger=0)
