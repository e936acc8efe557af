"""One stream of events to whoever watches: takers at once, a bounded ring for those who ask later.

A taker is called for every event of the kinds it wants, in order, on the loop; it must be quick.
Who wants a kind is asked once and remembered, so an event that nobody takes costs one look-up. A
reader of the ring that has fallen behind is told how many events it lost, never nothing.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd.wire.events import Event

RING_EVENTS = 4096
"""About a minute of a busy node; an event is some 200 bytes."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Bus:
    """Fans events out. Invariant: the ring holds the last events, with contiguous numbers (I8)."""

    def __init__(self) -> None:
        self._takers: list[tuple[Callable[[Event], None], Callable[[type[Event]], bool]]] = []
        self._by_kind: dict[type, list[Callable[[Event], None]]] = {}
        self._ring: deque[Event] = deque(maxlen=RING_EVENTS)
        self._waiting: list[Callable[[], None]] = []

    def subscribe(
        self,
        take: Callable[[Event], None],
        *,
        wants: Callable[[type[Event]], bool] = lambda kind: True,
    ) -> None:
        """Call ``take`` with every event from now on, or those of the kinds it ``wants``."""
        self._takers.append((take, wants))
        self._by_kind.clear()

    def ask_again(self) -> None:
        """A taker wants other kinds than it did."""
        self._by_kind.clear()

    def publish(self, events: Sequence[Event]) -> None:
        """What happened in one step, in order, to everybody."""
        by_kind = self._by_kind
        self._ring.extend(events)
        for event in events:
            kind = type(event)
            takers = by_kind.get(kind)
            if takers is None:
                takers = by_kind[kind] = [take for take, wants in self._takers if wants(kind)]
            for take in takers:
                take(event)
        if self._waiting and events:
            waiting, self._waiting = self._waiting, []
            for wake in waiting:
                wake()

    def after(self, seq: int) -> tuple[int, tuple[Event, ...]]:
        """How many events after number ``seq`` have left the ring, and those that have not."""
        if not self._ring or self._ring[-1].seq <= seq:
            return 0, ()
        first, last = self._ring[0].seq, self._ring[-1].seq
        count = min(last - seq, len(self._ring))  # few, for who asks often
        newest = list(islice(reversed(self._ring), count))
        return max(0, first - seq - 1), tuple(reversed(newest))

    def wake_on_next(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` once, with the next event."""
        self._waiting.append(wake)

    def stop_waking(self, wake: Callable[[], None]) -> None:
        """Take that back."""
        if wake in self._waiting:
            self._waiting.remove(wake)
