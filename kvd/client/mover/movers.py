"""The movers of one process of a session: one for each device that it has blocks on.

They are made when blocks are given, so a process that gives none has no thread for them.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvd.client.mover.blocks import EngineBlocks, tables_of
from kvd.client.mover.engine_memory import HOST, unfit
from kvd.client.mover.host_lane import HostLane
from kvd.client.mover.mover import MARK_WITHIN_S, Bell, Mover

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.client.lease_key import LeaseKey
    from kvd.client.mover.blocks import Caches
    from kvd.client.mover.mover import CopyLane
    from kvd.client.pool import Pool
    from kvd.client.rank_words import RankWords
    from kvd.errors import Refusal

    Check = Callable[[LeaseKey], None]


class Movers:
    """Makes blocks of an engine's tensors, and has them moved."""

    def __init__(self, words: RankWords, check: Check) -> None:
        """``words``: to the daemon; ``check`` refuses keys that are not of this session now."""
        self._words = words
        self._check = check
        self._lock = threading.Lock()
        self._movers: dict[tuple[str, int], Mover] = {}

    @property
    def is_quiet(self) -> bool:
        """Whether the daemon keeps no page for a copy of this process; for any thread."""
        return all(mover.is_quiet for mover in list(self._movers.values()))

    def blocks(
        self,
        pool: Pool,
        caches: Caches,
        *,
        block_size: int,
        shard: int,
        threads: int,
        mark_within_s: float = MARK_WITHIN_S,
        check: Check | None = None,
    ) -> EngineBlocks:
        """As ``Worker.blocks``."""
        tables, counts, device, keep = tables_of(pool, caches, block_size=block_size, shard=shard)
        mover = self._mover(device, threads, mark_within_s)
        return EngineBlocks(mover, tables, counts, keep, check or self._check)

    def close(self, why: Refusal) -> bool:
        """End what does not move, wait for what does; whether nothing is left of it."""
        with self._lock:
            movers = list(self._movers.values())
        ended = [mover.close(why) for mover in movers]
        return all(ended)

    def _mover(self, device: str, threads: int, mark_within_s: float) -> Mover:
        with self._lock:
            found = self._movers.get((device, threads))
            if found is None:
                bell = Bell()
                found = self._movers[device, threads] = Mover(
                    self._lane(device, threads, bell),
                    bell,
                    self._words,
                    self._check,
                    mark_within_s=mark_within_s,
                )
            return found

    def _lane(self, device: str, threads: int, bell: Bell) -> CopyLane:
        if device == HOST:
            return HostLane(threads, bell.ring)
        raise unfit(f"blocks on {device}: only blocks in host memory are copied yet")
