"""The workers' half: it maps the pool and copies between its pages and vLLM's blocks.

Copies are made in the step that orders them: before its forward pass is waited for, or after it.
On a CPU they are done when they return. On a device they are made through host memory, and waited
for: that works, and is slow.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from kvd.client import KvdError, connect_sync, join
from kvd.connectors.vllm import layout
from kvd.connectors.vllm.orders import StepReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvd.client import Pool, Worker
    from kvd.connectors.vllm.layout import Rows
    from kvd.connectors.vllm.options import VllmOptions
    from kvd.connectors.vllm.orders import CopyOrder, StepOrders

CHECK_NAME = "vllm-check"
"""Of the session that only looks whether the pool fits."""


class CopyCounts:
    """What was copied since somebody asked."""

    def __init__(self) -> None:
        self.loaded_bytes = self.saved_bytes = 0
        self.load_seconds = self.save_seconds = 0.0


class WorkerHalf:
    """One rank of the engine.

    Args:
        options: what the user has set.
        block_size: tokens of a block.
        rank: of the ``ranks`` that each have a part of every page, this one.
        ranks: how many they are.
        open_session: joins the session with that token; for tests.
    """

    def __init__(
        self,
        options: VllmOptions,
        *,
        block_size: int,
        rank: int = 0,
        ranks: int = 1,
        open_session: Callable[[bytes], Worker] | None = None,
    ) -> None:
        self.counts = CopyCounts()
        self._options = options
        self._block = block_size
        self._rank = rank
        self._ranks = ranks
        self._tag = ""
        self._open = open_session or (lambda token: join(options.endpoint or None, token=token))
        self._layouts: list[layout.BlockLayout] = []
        self._blocks: list[Rows] = []
        self._pages: list[Rows] = []
        self._session: Worker | None = None
        self._token = b""
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._report = StepReport({}, set())

    # ---- the start ---------------------------------------------------------------------------

    def register(self, layers: Mapping[str, Any], *, tag: str = "") -> None:
        """These are the engine's blocks, and ``tag`` says who packs them.

        Raises:
            KvdError: ``layout-mismatch``: they are no pages of the pool. A daemon that is not there
                is no reason to raise: the pool is looked at when it is.
        """
        self._tag = tag
        self._layouts = layout.block_layouts(layers)
        self._blocks = [layout.rows_of(one, layers) for one in self._layouts]
        try:
            node = connect_sync(self._options.endpoint or None, name=CHECK_NAME)
        except KvdError:
            return
        with node:
            self._fit(node.pool(self._options.pool))

    def _fit(self, pool: Pool) -> None:
        layout.fitting(
            pool, self._layouts, block_size=self._block, ranks=self._ranks, tag=self._tag
        )

    def _join(self, token: bytes) -> None:
        """Be of the session whose pages are meant; map them."""
        if token == self._token and self._session is not None and self._session.end is None:
            return
        self.close()
        session = self._open(token)
        try:
            pool = session.pool(self._options.pool)
            self._fit(pool)
            shard = self._rank if pool.shards else 0
            self._pages = layout.pool_rows(pool, shard, self._blocks)
        except KvdError:
            session.close()
            raise
        self._session, self._token = session, token

    def close(self) -> None:
        """Leave the session."""
        session, self._session, self._pages = self._session, None, []
        if session is not None:
            with contextlib.suppress(KvdError):
                session.close()

    # ---- a step ------------------------------------------------------------------------------

    def load(self, orders: StepOrders) -> None:
        """Fill blocks from pages; every request that waits for it is heard of, whatever comes."""
        self._failed.update(orders.failed)
        began_s = time.perf_counter()
        for copy in orders.loads:
            if self._copied(orders, copy, to_pages=False):
                self._loaded.add(copy.request)
            else:
                self._failed.add(copy.request)
        self.counts.load_seconds += time.perf_counter() - began_s

    def save(self, orders: StepOrders) -> None:
        """Fill pages from blocks, which the forward pass has written."""
        began_s = time.perf_counter()
        for copy in orders.saves:
            if self._copied(orders, copy, to_pages=True):
                self._report.saved[copy.request] = copy.upto_tokens
            else:
                self._report.lost.add(copy.request)
        self.counts.save_seconds += time.perf_counter() - began_s

    def _copied(self, orders: StepOrders, copy: CopyOrder, *, to_pages: bool) -> bool:
        try:
            self._join(orders.token)
        except KvdError:
            return False
        if len(copy.pages) != len(copy.blocks):
            return False
        if to_pages:
            n_bytes = layout.copy_rows(self._pages, self._blocks, copy.pages, copy.blocks)
            self.counts.saved_bytes += n_bytes
        else:
            n_bytes = layout.copy_rows(self._blocks, self._pages, copy.blocks, copy.pages)
            self.counts.loaded_bytes += n_bytes
        return True

    def take_results(self) -> tuple[set[str], set[str]]:
        """Requests that were loaded, failed ones among them; and those that failed. Once each."""
        loaded, failed = self._loaded | self._failed, self._failed
        self._loaded, self._failed = set(), set()
        return loaded, failed

    def take_report(self) -> StepReport | None:
        """What was saved since the last time."""
        report, self._report = self._report, StepReport({}, set())
        return report if report.saved or report.lost else None
