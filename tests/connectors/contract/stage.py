"""A daemon, and another engine of its node that takes every page it can get and writes there."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvd.client import KvdError, connect_sync
from tests.support.daemons import one_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvd.client import SyncLease, SyncNode
    from tests.support.daemons import Daemon

FOREIGN = 0x55
FREE_S = 60.0
JOURNAL_HEAD = 4096


class Others:
    """Another engine: what it holds, nobody may write."""

    def __init__(self, endpoint: str) -> None:
        self._node: SyncNode = connect_sync(endpoint, name="others")
        self._leases: list[SyncLease] = []
        pool = self._node.pool("main")
        tensors = {tensor.layer for tensor in pool.memory.components[0].tensors}
        self._memory = [
            view
            for layer in sorted(tensors)
            for view in pool.arrays(pool.memory.components[0].name, layer=layer).values()
        ]

    def take_all(self, pages: int) -> None:
        """Every page that can be had, of so many, and bytes of its own in each."""
        count = pages
        while count:
            try:
                lease = self._node.lease([7], reserve_tokens=(count - 1) * 16, deadline_s=0)
            except KvdError:
                count -= 1
                continue
            self._leases.append(lease)
            for view in self._memory:
                view.view(np.uint8)[lease.pages] = FOREIGN
            count = min(count, pages - count)
            pages = count

    def close(self) -> None:
        """Give them back.

        Raises:
            AssertionError: somebody has written to one.
        """
        for lease in self._leases:
            for view in self._memory:
                wrong = (view.view(np.uint8)[lease.pages] != FOREIGN).any()
                assert not wrong, "a page was written that another engine holds"
        self._memory.clear()
        self._node.close()


class Stage:
    """What a case needs of a daemon."""

    def __init__(self, daemon: Daemon, settings: Mapping[str, str]) -> None:
        self.daemon, self._settings = daemon, settings
        self._pages = int(settings["pool.pages"])
        self._others: list[Others] = []

    @property
    def endpoint(self) -> str:
        return self.daemon.client

    def crowd(self) -> None:
        """Others take all that is free, and all that is cached and nobody holds."""
        self._others.append(Others(self.endpoint))
        self._others[-1].take_all(self._pages)

    def fill(self) -> None:
        """Others take what is free, and leave what is cached."""
        (pool,) = self.daemon.snapshot().pools
        self._others.append(Others(self.endpoint))
        self._others[-1].take_all(pool.free_pages)

    def disperse(self) -> None:
        """They go; what they held was theirs until then."""
        others, self._others = self._others, []
        for other in others:
            other.close()

    def kill(self) -> None:
        self.daemon.kill()

    def start(self) -> None:
        self.daemon.start()
        self.daemon.wait_ready()

    def restart(self) -> None:
        """With other memory, where the page numbers of before are somebody else's at once."""
        self.kill()
        self.start()
        self.crowd()

    def come_back(self) -> None:
        """With the same memory, where that outlives it."""
        self.kill()
        self.start()

    def wait_until_proven(self) -> None:
        """The journal has the sum of every cached page: a word above 2**63 for each."""
        journal = Path(self._settings["pool.directory"]) / "kvd.journal"

        def is_so() -> bool:
            words = np.fromfile(journal, np.uint64, self._pages, offset=JOURNAL_HEAD)
            proven = np.count_nonzero(words >> np.uint64(63))
            return bool(proven >= self.daemon.snapshot().pools[0].cached_pages)

        self.daemon.wait_for(is_so, "a cached page is never summed", FREE_S)

    def hang(self) -> None:
        os.kill(self.daemon.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.daemon.pid, signal.SIGCONT)

    def clear(self) -> None:
        """Nothing is cached."""
        self.crowd()
        self.disperse()

    def is_free(self) -> bool:
        """Whether nobody holds anything."""
        snapshot = self.daemon.snapshot()
        held = (pool.held_pages + pool.locked_pages for pool in snapshot.pools)
        kept = (pool.quarantined_pages for pool in snapshot.pools)
        return not snapshot.leases and not sum(held) and not sum(kept)

    def wait_until_free(self) -> None:
        """A lease is left without waiting for it."""
        self.daemon.wait_for(self.is_free, "something is held", FREE_S)


@contextlib.contextmanager
def stage_for(settings: Mapping[str, str], *, outlives: bool = False) -> Iterator[Stage]:
    """A daemon with such a pool; ``outlives``: its memory outlives it."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-c-"))
        if outlives:
            memory = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
            settings = {**settings, "pool.backing": "shm", "pool.directory": memory}
        daemon = stack.enter_context(one_daemon(Path(directory), settings))
        yield Stage(daemon, settings)
