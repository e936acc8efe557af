"""A link that runs against something, and a mirror that says when something has come."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path

from kvd.errors import Code, Refusal
from kvd.wire.admin import AdminFailed, Evict, Look, Report
from kvd.wire.console import EventQuery
from tests.tui.frames import LEASES, frame, lease, table
from tui.link import Link
from tui.model.mirror import LinkDown, LinkLive, Mirror, Subscription

LIMIT_S = 15.0
ROOT = Path(__file__).parents[2]
WANTED = Subscription((LEASES,), EventQuery(0))


class Watched(Mirror):
    """A mirror that says when something has come to it."""

    def __init__(self):
        super().__init__()
        self._news = asyncio.Event()

    def take(self, frame, heard_s):
        is_fit = super().take(frame, heard_s)
        self._news.set()
        return is_fit

    def failed(self, why, now_s):
        super().failed(why, now_s)
        self._news.set()

    def now(self):
        return self.link_state(asyncio.get_running_loop().time(), 60.0)

    async def until(self, is_it):
        async with asyncio.timeout(LIMIT_S):
            while not is_it(self.now()):
                self._news.clear()
                await self._news.wait()
        return self.now()

    async def live(self):
        return await self.until(lambda one: isinstance(one, LinkLive))

    async def down(self, words):
        return await self.until(lambda one: isinstance(one, LinkDown) and words in one.why)


@contextlib.asynccontextmanager
async def running(endpoint, mirror, **options):
    """A link that runs; it must end when it is told to."""
    link = Link(endpoint, mirror, lambda: WANTED, fps=20.0, **options)
    task = asyncio.ensure_future(link.run())
    try:
        yield link
    finally:
        task.cancel()
        async with asyncio.timeout(LIMIT_S):
            with contextlib.suppress(asyncio.CancelledError):
                await task


def answer(request):
    """Looks with two leases, evictions with a report, and refuses the rest."""
    match request:
        case Look(queries=queries):
            return frame(0, *[table(lease(1), lease(2)) for _ in queries])
        case Evict(pages=pages):
            return Report(0, {"evicted_pages": pages}, ())
        case _:
            return AdminFailed(0, Refusal(Code.UNKNOWN_LEASE, "there is no lease 8"))


@contextlib.contextmanager
def processes(endpoint):
    """Starts daemons in processes of their own, one socket file for all; ends them."""
    started = []

    def start(incarnation="a" * 32):
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.tui.looked_at", endpoint.endpoint, incarnation],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        started.append(child)
        assert child.stdout.readline() == b"ready\n"
        return child

    try:
        yield start
    finally:
        for child in started:
            child.kill()
            child.wait()
            child.stdout.close()
