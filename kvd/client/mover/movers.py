"""The movers of one process of a session: one for each device that it has blocks on.

They are made when blocks are given, so a process that gives none has no thread for them.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from kvd.client.arguments import seconds
from kvd.client.mover.bell import Bell
from kvd.client.mover.blocks import EngineBlocks, given_memory
from kvd.client.mover.engine_memory import HOST
from kvd.client.mover.host_lane import HostLane
from kvd.client.mover.mover import Mover
from kvd.client.mover.pending_copy import MARK_WITHIN_S
from kvd.errors import Code, KvdError, Refusal
from kvd.wire.attach import KeepsBlocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.client.lease_key import LeaseKey
    from kvd.client.mover.blocks import Caches, GivenMemory
    from kvd.client.mover.lane import CopyLane
    from kvd.client.pool import Pool
    from kvd.client.rank_words import RankWords

    Check = Callable[[LeaseKey], None]


MOST_THREADS: Final = 256


class Movers:
    """Makes blocks of an engine's tensors, and has them moved."""

    def __init__(self, words: RankWords, check: Check) -> None:
        """``words``: to the daemon; ``check`` refuses keys that are not of this session now."""
        self._words = words
        self._check = check
        self.has_blocks = False
        """Whether the daemon knows, and the next one is to know, that KV is in blocks first."""
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
        """As ``Worker.blocks``; ``check`` refuses keys as well."""
        self._words.require_own()
        if not 1 <= threads <= MOST_THREADS:
            why = f"threads is {threads}: 1 to {MOST_THREADS} copy"
            raise KvdError(Refusal(Code.BAD_REQUEST, why, side="client"))
        mark_within_s = seconds(mark_within_s, "mark_within_s")
        if not mark_within_s >= 0:
            why = f"mark_within_s is {mark_within_s}: it is 0 or more seconds"
            raise KvdError(Refusal(Code.BAD_REQUEST, why, side="client"))
        checks = (self._check,) if check is None else (self._check, check)
        given = given_memory(pool, caches, block_size=block_size, shard=shard)
        is_host = given.device == HOST
        mover = self._mover(HOST, threads) if is_host else self._mover_of_device(given)
        if not self.has_blocks:
            # Before the first order: a commit that the daemon hears sooner than that one must not
            # stand for what is still to be saved.
            # First, so that whoever goes back to the next daemon meanwhile says it there.
            self.has_blocks = True
            try:
                self._words.begin(lambda call: KeepsBlocks(call=call)).result()
            except KvdError:
                self.has_blocks = False  # nothing was given, and it is said again with the next
                raise
        return EngineBlocks(mover, given, checks, mark_within_s=mark_within_s)

    @property
    def doubt(self) -> Refusal | None:
        """Why nobody can tell whether a copy of this process still moves; None while none does."""
        return next((mover.doubt for mover in list(self._movers.values()) if mover.doubt), None)

    def close(self, why: Refusal, within_s: float) -> bool:
        """End what does not move, wait for what does; whether nothing is left of it."""
        with self._lock:
            movers = list(self._movers.values())
        ended = [mover.close(why, within_s) for mover in movers]
        return all(ended)

    def _mover(self, device: str, threads: int) -> Mover:
        with self._lock:
            found = self._movers.get((device, threads))
            if found is None:
                bell = Bell()
                lane = HostLane(threads, bell.ring)
                found = self._begun((device, threads), lane, bell)
            return found

    def _mover_of_device(self, given: GivenMemory) -> Mover:
        # A process without blocks on a device loads nothing of CUDA.
        from kvd.client.mover.device_lane import DeviceLane, device_of  # noqa: PLC0415

        runtime, number = device_of(given.layouts, given.device)
        with self._lock:
            found = self._movers.get((f"cuda:{number}", 0))
            lane = found.lane if found is not None else DeviceLane(runtime, number)
            assert isinstance(lane, DeviceLane)
            try:
                lane.knows(given.layouts, given.pools)
            except KvdError:
                if found is None:
                    lane.close()
                raise
            return found or self._begun((lane.device, 0), lane, Bell())

    def _begun(self, name: tuple[str, int], lane: CopyLane, bell: Bell) -> Mover:
        mover = self._movers[name] = Mover(lane, bell, self._words, self._check)
        return mover
