"""What happened lately: how long handoffs took, which ended, where tokens came from.

A subscriber of the bus. Everything here is bounded, and costs about a microsecond per event.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvd.wire import events
from kvd.wire.console import Latency, Sources

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.wire.events import Event, HandoffEnded

WINDOW_S = 60.0
MAX_ENDED = 4096
MAX_PEERS = 256
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
        self.cached = self.received = self.restored = self.lost = 0
        self._takers: dict[type, Callable[..., None]] = {
            events.HandoffEnded: self._handoff_ended,
            events.LeaseOpened: self._lease_opened,
            events.Resumed: self._resumed,
        }

    def wants(self, kind: type[Event]) -> bool:
        """Whether events of this kind are looked at."""
        return kind in self._takers

    def take(self, event: Event) -> None:
        """One event, in order."""
        self._takers[type(event)](event)

    def sources(self) -> Sources:
        """Where the tokens of all leases came from."""
        return Sources(self.cached, self.received, self.restored, 0, 0, self.lost, 0)

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
        traffic = self.by_peer.get(event.peer)
        if traffic is None:
            if len(self.by_peer) >= MAX_PEERS:
                return
            traffic = self.by_peer[event.peer] = Traffic()
        traffic.delivered += is_delivered
        traffic.failed += not is_delivered
        if event.side == "decode":
            traffic.in_bytes += event.moved_bytes
            delta_tokens = event.prompt_tokens - event.decode_prefix_len
            if is_delivered:
                self.received += delta_tokens
            else:
                self.lost += delta_tokens
        else:
            traffic.out_bytes += event.moved_bytes

    def _lease_opened(self, event: events.LeaseOpened) -> None:
        self.cached += event.prefix_tokens

    def _resumed(self, event: events.Resumed) -> None:
        self.restored += event.restored_tokens
