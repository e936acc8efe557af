"""Whoever keeps memory while the daemon is away: what ``memory`` asks of files and of systemd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvd.pools.arena import Arena

PREFIX: Final = "kvd."
"""Of every name under which memory is kept; whatever is called otherwise is left alone."""
JOURNAL: Final = f"{PREFIX}journal"
"""The name of the journal's memory; that of a component is ``kvd.<component>``."""


class UnfitMemory(msgspec.Struct, frozen=True):
    """Why a piece of memory cannot be taken over, as what is said of it by name."""

    why: str


MISSING: Final = UnfitMemory("is missing")


class KeptMemory(Protocol):
    """Named memory. Sizes are multiples of ``grain_bytes``; ``where`` ends a sentence."""

    grain_bytes: int
    where: str
    is_apart: bool
    """Whether its memory was set apart before, and is none of what the host has free."""

    @property
    def keep_open(self) -> tuple[int, ...]:
        """What the transfer process must hold as long as it lives."""
        ...

    @property
    def to_store(self) -> Mapping[str, int]:
        """Descriptors that systemd is to hold."""
        ...

    @property
    def stale(self) -> tuple[str, ...]:
        """Names that systemd is to let go of."""
        ...

    def find(self, name: str, size_bytes: int) -> Arena | UnfitMemory:
        """What was kept under ``name``, or why it does not fit."""
        ...

    def make(self, name: str, size_bytes: int, advance: Callable[[int], None]) -> Arena:
        """New zeroed memory under a name that is free; NotReserved if it cannot be had."""
        ...

    def kept_bytes(self) -> int:
        """What ``clear`` would give back, if nobody maps it."""
        ...

    def check_room(self, size_bytes: int) -> None:
        """NotReserved if there is a limit other than the host's that so much would exceed."""
        ...

    def clear(self, keep: frozenset[str] = frozenset()) -> None:
        """Let go of everything but ``keep``, the journal first; NotReserved if it is not ours."""
        ...

    def close(self) -> None:
        """Stop using it; what is kept stays."""
        ...
