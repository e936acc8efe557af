"""Requests that wait for something other than memory, by what: out of the way of all the others.

A thousand receives may wait for one peer that is away. While memory moves nobody looks at them;
when what they wait for has changed, the queue takes them out by its name and asks each again.

What must not live here: the order of the queue, and what a request waits for (its asker says so).

Invariants: each waiter stands here under every name in its ``awaits``, and under no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvd.core.admission import Waiter

OWN_TRANSFER = ""
"""What waits for this node's own transfer process: no peer has this name."""


class Apart:
    """Those who stand apart. ``waiters`` are all of them by number, in no order that counts."""

    __slots__ = ("by_name", "waiters")

    def __init__(self) -> None:
        self.waiters: dict[int, Waiter] = {}
        self.by_name: dict[str, dict[int, Waiter]] = {}

    def put(self, waiter: Waiter) -> None:
        """It waits for what its ``awaits`` names."""
        self.waiters[waiter.number] = waiter
        for name in waiter.awaits:
            self.by_name.setdefault(name, {})[waiter.number] = waiter

    def remove(self, waiter: Waiter) -> None:
        """It waits for nothing of that any more."""
        del self.waiters[waiter.number]
        for name in waiter.awaits:
            here = self.by_name[name]
            del here[waiter.number]
            if not here:
                del self.by_name[name]
        waiter.awaits = ()

    def take(self, name: str) -> list[Waiter]:
        """All that wait for this; they stand here no longer."""
        found = list(self.by_name.get(name, {}).values())
        for waiter in found:
            self.remove(waiter)
        return found
