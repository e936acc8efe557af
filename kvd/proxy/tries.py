"""What has come of one request so far: answers that are there, and engines that failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from aiohttp import web

from kvd.proxy.exchange import EngineFault, FaultKind

if TYPE_CHECKING:
    from multidict import CIMultiDict

    from kvd.proxy.engines import ProxiedEngine

TOO_MANY: Final = 429

MOST_BROKEN: Final = 3
"""Engines that may break, or hang, on one request, which may be what breaks them."""


@dataclass(frozen=True)
class HeardAnswer:
    """An engine's answer that is there as a whole."""

    status: int
    headers: CIMultiDict[str]
    body: bytes

    def for_client(self) -> web.Response:
        """The same, for whoever asked."""
        return web.Response(status=self.status, headers=self.headers, body=self.body)


class Tries:
    """What came of the engines that one request was tried at.

    Attributes:
        until_s: by the clock of the loop, when an answer must have ended.
        is_for_tokens: an answer is a JSON object or a stream of events.
        without: engines that are not tried again.
        busy: the answer of one that takes no more now.
        faults: of the others.
    """

    def __init__(self, until_s: float, *, is_for_tokens: bool) -> None:
        self.until_s = until_s
        self.is_for_tokens = is_for_tokens
        self.without: set[ProxiedEngine] = set()
        self.busy: HeardAnswer | None = None
        self.is_answering = False
        """One of them has begun to, and the client hears of it."""
        self._said_503 = False
        self.faults: list[EngineFault] = []

    def note_busy(self, engine: ProxiedEngine, answer: HeardAnswer) -> None:
        """It is not asked again; if all say so, its answer is the client's."""
        self.without.add(engine)
        self.busy = answer
        self._said_503 = self._said_503 or answer.status != TOO_MANY

    def note_fault(self, engine: ProxiedEngine, fault: EngineFault) -> None:
        """It is not asked again, and why is told if nobody else answers."""
        self.without.add(engine)
        self.faults.append(fault)

    @property
    def may_have_taken(self) -> bool:
        """One of them may have fetched the KV: it was reached, and did not say 429."""
        return self._said_503 or any(
            fault.fault is not FaultKind.UNREACHABLE for fault in self.faults
        )

    @property
    def may_go_on(self) -> bool:
        """Another engine may be tried."""
        faults = [fault.fault for fault in self.faults]
        broken = len(faults) - faults.count(FaultKind.UNREACHABLE)
        return broken < MOST_BROKEN and FaultKind.OURS not in faults
