"""Whoever keeps memory while the daemon is away: nobody here; files and systemd derive from it."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from kvd.pools.arena import HUGE_PAGE_BYTES, mib, reserve

if TYPE_CHECKING:
    import os
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


def flaw_of(seen: os.stat_result, size_bytes: int, reasons: dict[str, bool]) -> UnfitMemory | None:
    """What keeps memory from being believed: the first of ``reasons`` that holds, or its size."""
    kept = seen.st_blocks * 512
    reasons |= {
        f"has {mib(seen.st_size)} where {mib(size_bytes)} are needed": seen.st_size != size_bytes,
        f"has lost {mib(size_bytes - kept)} of its {mib(size_bytes)}": kept < size_bytes,
    }
    return next((UnfitMemory(said) for said, is_so in reasons.items() if is_so), None)


class KeptMemory:
    """Named memory. This one ends with those who map it: sealed memfds, of which none is found."""

    where = "as anonymous memory"
    """Ends a sentence."""
    grain_bytes = HUGE_PAGE_BYTES
    """Sizes are multiples of it."""
    is_apart = False
    """Whether its memory was set apart before, and is none of what the host has free."""
    keep_open: tuple[int, ...] = ()
    """What the transfer process must hold as long as it lives."""
    to_store: Mapping[str, int] = MappingProxyType({})
    """Descriptors that systemd is to hold."""
    stale: tuple[str, ...] = ()
    """Names that systemd is to let go of."""

    def find(self, name: str, size_bytes: int) -> Arena | UnfitMemory:
        """What was kept under ``name``, or why it does not fit."""
        del name, size_bytes
        return MISSING

    def make(self, name: str, size_bytes: int, advance: Callable[[int], None]) -> Arena:
        """New zeroed memory under a name that is free; NotReserved if it cannot be had."""
        return reserve(name.removeprefix(PREFIX), size_bytes, advance)

    def kept_bytes(self) -> int:
        """What ``clear`` would give back, if nobody maps it."""
        return 0

    def check_room(self, size_bytes: int) -> None:
        """NotReserved if there is a limit other than the host's that so much would exceed."""

    def clear(self, keep: frozenset[str] = frozenset()) -> None:
        """Let go of everything but ``keep``, the journal first; NotReserved if it is not ours."""

    def close(self) -> None:
        """Stop using it; what is kept stays. Repeatable."""
