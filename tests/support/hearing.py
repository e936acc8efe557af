"""What processes of a daemon report, for tests that wait for it."""

from __future__ import annotations

import asyncio

import msgspec


class HeardReports:
    """Everything that a process has reported, and why it ended."""

    def __init__(self, limit_s: float) -> None:
        """``limit_s``: nothing is waited for longer."""
        self.reports: list[msgspec.Struct] = []
        self.exits: list[str] = []
        self._limit_s = limit_s
        self._news = asyncio.Event()

    def _hear(self, reports) -> None:
        self.reports += reports
        self._news.set()

    def _gone(self, why: str) -> None:
        self.exits.append(why)
        self._news.set()

    async def until(self, found):
        """What ``found`` returns, as soon as that is something."""
        async with asyncio.timeout(self._limit_s):
            while not (result := found()):
                self._news.clear()
                await self._news.wait()
        return result

    def heard(self, kind, **fields):
        """The reports of this kind with these fields."""
        return [
            report
            for report in self.reports
            if isinstance(report, kind) and fields.items() <= msgspec.structs.asdict(report).items()
        ]
