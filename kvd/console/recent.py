"""What happened lately: how long handoffs took, which ended, where tokens came from.

A subscriber of the bus. Everything here is bounded; of a lease it takes one event, in 0.4 us.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvd.wire import events
from kvd.wire.console import Latency, Sources

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.wire.events import Event, HandoffEnded, MessageRefused

WINDOW_S = 60.0
MAX_ENDED = 4096
MAX_PEERS = 256
MAX_REFUSED = 64
"""Refused messages that are remembered: enough to tell a flood from a mistake."""
RECEIVE = "receive from "
"""How the reason of a lease begins whose tokens come from a peer."""
GIVEN_UP = frozenset({"aborted", "cancelled", "client-gone"})
"""Codes of handoffs that somebody did not want any more: their tokens are not lost."""
DELIVERED = frozenset({"delivered", "committed"})


class Traffic:
    """Handoffs with one peer that have ended."""

    __slots__ = ("delivered", "failed", "in_bytes", "out_bytes")

    def __init__(self) -> None:
        self.delivered = self.failed = self.in_bytes = self.out_bytes = 0


class Recent:
    """The last minute, and counters since the incarnation began."""

    def __init__(self) -> None:
        self.ended: deque[HandoffEnded] = deque(maxlen=MAX_ENDED)
        """Handoffs by their end, the newest last."""
        self.by_peer: dict[str, Traffic] = {}
        self.cached = self.received = self.restored = 0
        self.new = self.evicted = self.lost = self.unaligned = 0
        """Tokens: see ``Sources``."""
        self.quarantined: dict[int, float] = {}
        """By lease: since when, the oldest first."""
        self.refused: deque[MessageRefused] = deque(maxlen=MAX_REFUSED)
        """The newest last."""
        self._takers: dict[type, Callable[..., None]] = {
            events.HandoffEnded: self._handoff_ended,
            events.LeaseOpened: self._lease_opened,
            events.LeaseResumed: self._resumed,
            events.Quarantined: self._lease_quarantined,
            events.QuarantineEnded: self._quarantine_ended,
            events.MessageRefused: self.refused.append,
        }

    def wants(self, kind: type[Event]) -> bool:
        """Whether events of this kind are looked at."""
        return kind in self._takers

    def take(self, event: Event) -> None:
        """One event, in order."""
        self._takers[type(event)](event)

    def sources(self) -> Sources:
        """Where the tokens of all leases came from."""
        return Sources(
            self.cached,
            self.received,
            self.restored,
            self.new,
            self.evicted,
            self.lost,
            self.unaligned,
        )

    def latency(self, now_s: float) -> Latency:
        """Of the handoffs that ended in the last minute, as far as they are remembered."""
        lately = []
        for one in reversed(self.ended):
            if now_s - one.at_s > WINDOW_S:
                break
            lately.append(one)
        took = sorted(one.took_s for one in lately if one.outcome in DELIVERED)
        failed = len(lately) - len(took)
        if not took:
            return Latency(len(lately), failed)
        last = len(took) - 1
        return Latency(
            len(lately), failed, took[len(took) // 2], took[min(last, len(took) * 99 // 100)]
        )

    def traffic(self, peer: str) -> Traffic:
        """With one peer; a stranger's is nothing."""
        return self.by_peer.get(peer) or Traffic()

    def _handoff_ended(self, event: HandoffEnded) -> None:
        self.ended.append(event)
        is_delivered = event.outcome in DELIVERED
        is_receive = event.side == "decode"
        if is_receive and event.lease:
            delta_tokens = event.prompt_tokens - event.decode_prefix_len
            if is_delivered:
                self.received += delta_tokens
            elif event.code not in GIVEN_UP:
                self.lost += delta_tokens
        traffic = self.by_peer.get(event.peer)
        if traffic is None:
            if len(self.by_peer) >= MAX_PEERS:
                return
            traffic = self.by_peer[event.peer] = Traffic()
        traffic.delivered += is_delivered
        traffic.failed += not is_delivered
        traffic.in_bytes += event.moved_bytes * is_receive
        traffic.out_bytes += event.moved_bytes * (not is_receive)

    def _lease_quarantined(self, event: events.Quarantined) -> None:
        self.quarantined[event.lease] = event.at_s

    def _quarantine_ended(self, event: events.QuarantineEnded) -> None:
        self.quarantined.pop(event.lease, None)

    def _lease_opened(self, event: events.LeaseOpened) -> None:
        self.cached += event.prefix_tokens
        if event.reason.startswith(RECEIVE):
            return  # what it misses is on its way: its handoff tells what became of it
        missed = event.missed_tokens
        self.unaligned += event.prompt_tokens - event.prefix_tokens - missed
        if event.why_missed == "new":
            self.new += missed
        else:
            self.evicted += missed

    def _resumed(self, event: events.LeaseResumed) -> None:
        self.restored += event.restored_tokens
