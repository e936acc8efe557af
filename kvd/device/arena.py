"""The memory that gathers send from and receive into, allocated once.

Two areas, each carved by a ``SpanRing``. The **window** is fixed at the start: symmetric memory,
which every rank can address on its peers, or nothing at all. What is larger than the window goes
through **plain** memory, which grows to the largest such request and is then kept. Both decisions
follow from the sizes asked for, so all ranks take the same, without a word between them.

What lives here: who uses which bytes. What must not: collectives; how a window is had
(``symmetric``).

Invariant: bytes that are handed out have no unfinished user.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from kvd.device.ring import RingSpan, SpanRing

if TYPE_CHECKING:
    from collections.abc import Callable

IN_FLIGHT = 2
"""Gathers of the largest size that plain memory has room for: one moves while the next is made."""


class Usage(msgspec.Struct, frozen=True):
    """What an arena was asked for. ``too_large`` counts what did not fit into its window."""

    window_bytes: int
    in_window: int
    too_large: int
    largest_bytes: int
    """The largest of those that did not fit: a window of so many bytes would have had room."""
    plain_bytes: int
    allocations: int
    """How often plain memory was allocated: the same after a warm-up as long as nothing larger
    comes."""


class ArenaBlock:
    """Bytes of one area. ``memory``: uint8, shape (size,)."""

    def __init__(self, area: ArenaArea, span: RingSpan) -> None:
        self.memory = area.memory[span.start : span.end]
        self.is_symmetric = area.is_symmetric
        self.span = span
        self._area = area

    def hold(self, finish: Callable[[], object]) -> None:
        """In use until ``release``, which ``finish`` does when a later block needs the bytes."""
        self._area.users[self] = finish

    def release(self) -> None:
        """Its user is done: what comes next may lie over it."""
        del self._area.users[self]


class ArenaArea:
    """One piece of memory, and who uses which of its bytes."""

    def __init__(self, memory: torch.Tensor, *, is_symmetric: bool) -> None:
        self.memory = memory
        self.is_symmetric = is_symmetric
        self.ring = SpanRing(memory.numel())
        self.users: dict[ArenaBlock, Callable[[], object]] = {}

    def take(self, size: int) -> ArenaBlock | None:
        """The next block, after every user of its bytes has finished; None: too large."""
        span = self.ring.take(size)
        if span is None:
            return None
        over = [finish for user, finish in self.users.items() if user.span.overlaps(span)]
        for finish in over:
            finish()
        return ArenaBlock(self, span)


class DeviceArena:
    """Memory of one device for the gathers of one group, in one order.

    Args:
        window: uint8, shape (bytes,): symmetric memory, or empty where there is none.
    """

    def __init__(self, window: torch.Tensor) -> None:
        self.device = window.device
        self._window = ArenaArea(window, is_symmetric=True)
        self._plain = ArenaArea(window[:0], is_symmetric=False)
        self._in_window = self._too_large = self._largest_bytes = self._allocations = 0

    @property
    def usage(self) -> Usage:
        """What it was asked for so far."""
        return Usage(
            window_bytes=self._window.ring.capacity,
            in_window=self._in_window,
            too_large=self._too_large,
            largest_bytes=self._largest_bytes,
            plain_bytes=self._plain.ring.capacity,
            allocations=self._allocations,
        )

    def take(self, size: int) -> ArenaBlock:
        """``size`` bytes that nobody uses; earlier users of them are made to finish.

        Args:
            size: in bytes, the same on all ranks: so they finish the same users here.
        """
        block = self._window.take(size)
        if block is not None:
            self._in_window += 1
            return block
        self._too_large += 1
        self._largest_bytes = max(self._largest_bytes, size)
        if size * IN_FLIGHT > self._plain.ring.capacity:
            # Blocks of the old memory keep it for as long as they are used.
            self._plain = ArenaArea(_plain_bytes(size * IN_FLIGHT, self.device), is_symmetric=False)
            self._allocations += 1
        block = self._plain.take(size)
        assert block is not None
        return block


def plain_arena(device: torch.device) -> DeviceArena:
    """An arena without a window."""
    return DeviceArena(_plain_bytes(0, device))


def _plain_bytes(size: int, device: torch.device) -> torch.Tensor:
    # Memory that is made in inference mode could not be written outside it later.
    with torch.inference_mode(mode=False):
        return torch.empty(size, dtype=torch.uint8, device=device)
