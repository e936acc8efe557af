"""What a scheduler pays for calls that it begins and polls, and for nothing having come.

What lives here: bursts of begun calls, timed one by one in the thread that makes them. What must
not: how long an answer takes; that is measured with the blocking verbs.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from kvd.bench.report import Measured
    from kvd.client.api import Matched
    from kvd.client.pending import PendingCall
    from kvd.client.sync import SyncNode

BURSTS: Final = 50
CALLS: Final = 16
"""Begun in one step of a scheduler, before it looks for the answer of any."""
WITHIN_S: Final = 10.0


def pending_row(node: SyncNode, prompt: np.ndarray) -> Measured:
    """Medians, in us, of a match of ``prompt`` that is begun, and polled until it ends."""
    begin_s: list[float] = []
    poll_s: list[float] = []
    pump_s: list[float] = []
    for _ in range(BURSTS):
        calls: list[PendingCall[Matched]] = []
        for _ in range(CALLS):
            _timed(begin_s, lambda: calls.append(node.begin_match(prompt)))  # noqa: B023 - at once
        end_s = time.monotonic() + WITHIN_S
        while not all(call.is_done for call in calls) and time.monotonic() < end_s:
            for call in calls:
                if not call.is_done:
                    _timed(poll_s, call.poll)
        _timed(pump_s, node.pump)
    return {
        "calls": CALLS,
        "begin_us": statistics.median(begin_s) * 1e6,
        "poll_us": statistics.median(poll_s) * 1e6,
        "pump_us": statistics.median(pump_s) * 1e6,
    }


def _timed(into: list[float], act: Callable[[], object]) -> None:
    began_s = time.perf_counter()
    act()
    into.append(time.perf_counter() - began_s)
