"""The memory that gathers send from and receive into, allocated once.

Two areas, whose blocks are handed out one behind the other, round and round. The **window** is
fixed at the start: symmetric memory, which every rank can address on its peers, or nothing at all.
What is larger than the window goes through **plain** memory, which grows to the largest such
request and is then kept::

    capacity 1000     take 600    take 300    take 300        take 1001
                      [0, 600)    [600, 900)  [0, 300) again  None, and nothing moves

Where a block lies depends on the sizes that were asked for so far and on nothing else: not on who
is done, not on time. So ranks that ask for the same sizes in the same order have their blocks at
the same places, and agree on what does not fit, without a word between them. The price: a block may
lie over earlier ones, whose users must be done with them before it is written.

Invariant: bytes that are handed out have no unfinished user; every block begins at a multiple of
``ALIGNMENT``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

ALIGNMENT = 256
"""Bytes: what device allocators align to, and a multiple of every element's size."""

IN_FLIGHT = 2
"""Gathers of the largest size that plain memory has room for: one moves while the next is made."""


def aligned(size: int) -> int:
    """The first multiple of ``ALIGNMENT`` that is not below ``size``."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class ArenaUsage(msgspec.Struct):
    """What an arena was asked for so far. ``too_large`` counts what did not fit into its window."""

    window_bytes: int
    in_window: int = 0
    too_large: int = 0
    largest_bytes: int = 0
    """The largest of those that did not fit: a window of so many bytes would have had room."""
    plain_bytes: int = 0
    allocations: int = 0
    """How often plain memory was allocated: the same after a warm-up as long as nothing larger
    comes."""


class ArenaBlock:
    """Bytes ``[start, end)`` of one area. ``memory``: uint8, shape (size,)."""

    def __init__(self, area: ArenaArea, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.memory = area.memory[start:end]
        self.is_symmetric = area.is_symmetric
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
        self.users: dict[ArenaBlock, Callable[[], object]] = {}
        self._next = 0

    def take(self, size: int) -> ArenaBlock | None:
        """The next block, after every user of its bytes has finished; None: too large."""
        capacity = self.memory.numel()
        if size > capacity:
            return None
        start = self._next if self._next + size <= capacity else 0
        self._next = aligned(start + size)
        over = [
            finish
            for user, finish in self.users.items()
            if user.start < start + size and start < user.end
        ]
        for finish in over:
            finish()
        return ArenaBlock(self, start, start + size)


class DeviceArena:
    """Memory of one device for the gathers of one group, in one order.

    ``window``: uint8, shape (bytes,): symmetric memory, or empty where there is none.
    """

    def __init__(self, window: torch.Tensor) -> None:
        self.device = window.device
        self.usage = ArenaUsage(window.numel())
        self._window = ArenaArea(window, is_symmetric=True)
        self._plain = ArenaArea(window[:0], is_symmetric=False)

    def take(self, size: int) -> ArenaBlock:
        """So many bytes that nobody uses; earlier users of them are made to finish.

        The size is the same on all ranks: so they finish the same users here.
        """
        usage = self.usage
        block = self._window.take(size)
        if block is not None:
            usage.in_window += 1
            return block
        usage.too_large += 1
        usage.largest_bytes = max(usage.largest_bytes, size)
        if size * IN_FLIGHT > usage.plain_bytes:
            # Blocks of the old memory keep it for as long as they are used.
            usage.plain_bytes = size * IN_FLIGHT
            usage.allocations += 1
            memory = _plain_bytes(usage.plain_bytes, self.device)
            self._plain = ArenaArea(memory, is_symmetric=False)
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
