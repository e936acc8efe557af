"""The workers' half: it maps the pool and copies between its pages and vLLM's blocks.

Copies are made in the step that orders them: before its forward pass is waited for, or after it.
They are done when they return. Blocks in the memory of a device are refused when the engine starts:
this process cannot read them, and nothing here has a copy engine do it.

An order is obeyed only by a worker that is of its session, in its life (``Worker.check``): looked
at before the copy, and again behind it. A session is joined and left beside the step. Until
it is joined loads wait, ``JOIN_WITHIN_S`` at most, and saves are asked for again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from kvd.client import Code, KvdError, connect_sync, join
from kvd.connectors.vllm import layout
from kvd.connectors.vllm.beside import BesideTask, in_thread
from kvd.connectors.vllm.log import ConnectorLog
from kvd.connectors.vllm.orders import StepReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvd.client import LeaseKey, Pool, Worker
    from kvd.client.mover.engine_memory import BlockLayout
    from kvd.connectors.vllm.beside import Start
    from kvd.connectors.vllm.layout import Rows
    from kvd.connectors.vllm.options import VllmOptions
    from kvd.connectors.vllm.orders import CopyOrder, StepOrders

CHECK_NAME = "vllm-check"
"""Of the session that only looks whether the pool fits."""

CHECK_WITHIN_S: Final = 1.0
"""An engine that starts waits so long at most for a look at the pool."""

STEP_WAITS_S: Final = 0.001
"""So long a step that has something to copy waits for a session that is being joined."""

JOIN_WITHIN_S: Final = 0.05
"""So long a load waits for it, steps long; then its prompt is computed."""

SAVE_WITHIN_S: Final = 1.0
"""So long saves are asked for again; then they are lost."""

REJOIN_S: Final = 1.0
"""Between two attempts to join one session."""


class CopyCounts:
    """What was copied since somebody asked."""

    def __init__(self) -> None:
        self.loaded_bytes = self.saved_bytes = 0
        self.load_seconds = self.save_seconds = 0.0


class JoinedPool:
    """A session that this process is of, and the pages that it has mapped there."""

    def __init__(self, session: Worker, pages: list[Rows]) -> None:
        self.session = session
        self.pages = pages

    def leave(self) -> None:
        """Write no page of it any more."""
        self.pages = []
        with contextlib.suppress(KvdError, OSError):
            self.session.close()


class PoolJoin:
    """Which session this process is of, and the way to the one that it is to be of.

    Args:
        open_pool: joins the session of a token and maps its pool; may take long.
        log: where changes are told.
        now_s: a clock.
        start: has work done beside the step.
    """

    def __init__(
        self,
        open_pool: Callable[[bytes], JoinedPool],
        log: ConnectorLog,
        *,
        now_s: Callable[[], float] = time.monotonic,
        start: Start = in_thread,
    ) -> None:
        self.unfit = ""
        """Why the pool of the session that was to be joined does not fit."""
        self._open_pool = open_pool
        self._log = log
        self._now_s = now_s
        self._start = start
        self._token = b""
        self._joined: JoinedPool | None = None
        self._joining: BesideTask[JoinedPool] | None = None
        self._since_s = self._next_try_s = now_s()
        self._waited_s = 0.0

    def follow(self, token: bytes) -> None:
        """Be of the session of that token from now on; of none, where it is empty."""
        self._waited_s = 0.0
        if token != self._token:
            self._token, self.unfit = token, ""
            self._since_s = self._next_try_s = self._now_s()
            joined, self._joined = self._joined, None
            joining, self._joining = self._joining, None
            if joining is not None:
                joining.abandon()
            if joined is not None:
                BesideTask(joined.leave, start=self._start)
        self._take()
        if (
            token
            and self._joined is None
            and self._joining is None
            and not self.unfit
            and self._now_s() >= self._next_try_s
        ):
            self._joining = BesideTask(
                lambda: self._open_pool(token), JoinedPool.leave, self._start
            )
            self._take()

    def of(self, key: LeaseKey) -> JoinedPool | None:
        """The pages that an order with that key is about; waits a moment if it is being joined."""
        if self._joining is not None and self._waited_s < STEP_WAITS_S:
            began_s = time.perf_counter()
            self._joining.ended(STEP_WAITS_S - self._waited_s)
            self._waited_s += time.perf_counter() - began_s
            self._take()
        joined = self._joined
        return joined if joined is not None and joined.session.owns(key) else None

    def waits_longer_than(self, within_s: float) -> bool:
        """Whether the session is to be joined for that time already."""
        return bool(self.unfit) or not self._token or self._now_s() - self._since_s >= within_s

    def leave(self) -> None:
        """Be of none; at once."""
        if self._joining is not None:
            self._joining.abandon()
        joined, self._joined, self._joining, self._token = self._joined, None, None, b""
        if joined is not None:
            joined.leave()

    def _take(self) -> None:
        joining = self._joining
        if joining is None or not joining.ended():
            return
        self._joining = None
        self._next_try_s = self._now_s() + REJOIN_S
        try:
            self._joined = joining.take()
        except (KvdError, OSError, ValueError, RuntimeError) as error:
            is_unfit = isinstance(error, KvdError) and error.code == Code.LAYOUT_MISMATCH.value
            self.unfit = str(error) if is_unfit else ""
            self._log.changed(
                "join",
                logging.ERROR if is_unfit else logging.WARNING,
                f"nothing is copied: {error}",
            )
        else:
            self._log.changed("join", logging.INFO, "this rank has joined the session")


class WaitingLoad:
    """A load that was ordered and not made yet."""

    def __init__(self, copy: CopyOrder, since_s: float) -> None:
        self.copy = copy
        self.since_s = since_s


class WorkerHalf:
    """One rank of the engine.

    Args:
        options: what the user has set.
        block_size: tokens of a block.
        rank: of the ``ranks`` that each have a part of every page, this one.
        ranks: how many they are.
        open_session: joins the session with that token; for tests.
        now_s: a clock.
        start: has work done beside the step; for tests, which do it at once.
    """

    def __init__(
        self,
        options: VllmOptions,
        *,
        block_size: int,
        rank: int = 0,
        ranks: int = 1,
        open_session: Callable[[bytes], Worker] | None = None,
        now_s: Callable[[], float] = time.monotonic,
        start: Start = in_thread,
    ) -> None:
        self.counts = CopyCounts()
        self._options = options
        self._block = block_size
        self._rank = rank
        self._ranks = ranks
        self._tag = ""
        self._open = open_session or (lambda token: join(options.endpoint or None, token=token))
        self._now_s = now_s
        self._start = start
        self._log = ConnectorLog(now_s)
        self._join = PoolJoin(self._open_pool, self._log, now_s=now_s, start=start)
        self._layouts: list[BlockLayout] = []
        self._blocks: list[Rows] = []
        self._waiting: list[WaitingLoad] = []
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._freed: set[str] = set()
        self._report: StepReport | None = None

    # ---- the start ---------------------------------------------------------------------------

    def register(self, layers: Mapping[str, Any], *, tag: str = "") -> None:
        """These are the engine's blocks, and ``tag`` says who packs them.

        Raises:
            KvdError: ``layout-mismatch``: they are no pages of the pool. A daemon that is not there
                is no reason to raise, nor is one that hangs: the pool is looked at when it is.
        """
        self._tag = tag
        self._layouts = layout.block_layouts(layers)
        self._blocks = [layout.rows_of(one, layers) for one in self._layouts]
        check = BesideTask(self._check, start=self._start)
        if not check.ended(CHECK_WITHIN_S):
            return
        try:
            check.take()
        except KvdError as error:
            if error.code == Code.LAYOUT_MISMATCH.value:
                raise

    def _check(self) -> None:
        with connect_sync(self._options.endpoint or None, name=CHECK_NAME) as node:
            self._fit(node.pool(self._options.pool))

    def _fit(self, pool: Pool) -> None:
        layout.fitting(
            pool, self._layouts, block_size=self._block, ranks=self._ranks, tag=self._tag
        )

    def _open_pool(self, token: bytes) -> JoinedPool:
        session = self._open(token)
        try:
            pool = session.pool(self._options.pool)
            self._fit(pool)
            shard = self._rank if pool.shards else 0
            return JoinedPool(session, layout.pool_rows(pool, shard, self._blocks))
        except BaseException:
            session.close()
            raise

    def close(self) -> None:
        """Leave the session."""
        self._join.leave()

    # ---- a step ------------------------------------------------------------------------------

    def load(self, orders: StepOrders) -> None:
        """Fill blocks from pages; every request that waits for it is heard of, whatever comes."""
        self._failed.update(orders.failed)
        self._freed.update(orders.freed)
        if orders.loads or orders.saves:
            self._report = StepReport({}, set(), number=orders.number)
        now_s = self._now_s()
        self._waiting += [WaitingLoad(copy, now_s) for copy in orders.loads]
        try:
            self._load(orders, now_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the engine
            self._log.bug("a load", error)
            self._failed.update(load.copy.request for load in self._waiting)
            self._waiting = []

    def _load(self, orders: StepOrders, now_s: float) -> None:
        self._join.follow(orders.token)
        if self._join.unfit:
            self._report = StepReport({}, set(), number=orders.number, unfit=self._join.unfit)
        if not self._waiting:
            return
        began_s = time.perf_counter()
        left = []
        for load in self._waiting:
            copy, pool = load.copy, self._join.of(load.copy.key)
            if pool is not None:
                is_loaded = self._copied(pool, copy, to_pages=False)
                (self._loaded if is_loaded else self._failed).add(copy.request)
            elif not orders.are_of(copy.key) or now_s - load.since_s >= JOIN_WITHIN_S:
                self._failed.add(copy.request)
            else:
                left.append(load)
        self._waiting = left
        self.counts.load_seconds += time.perf_counter() - began_s

    def save(self, orders: StepOrders) -> None:
        """Fill pages from blocks, which the forward pass has written."""
        report = self._report
        if not orders.saves or report is None:
            return
        began_s = time.perf_counter()
        try:
            self._save(orders, report)
        except Exception as error:  # noqa: BLE001 - as above
            self._log.bug("a save", error)
            report.saved.clear()
            report.lost.update(copy.request for copy in orders.saves)
        self.counts.save_seconds += time.perf_counter() - began_s

    def _save(self, orders: StepOrders, report: StepReport) -> None:
        for copy in orders.saves:
            pool = self._join.of(copy.key)
            if pool is None:
                is_over = self._join.waits_longer_than(SAVE_WITHIN_S)
                (report.lost if is_over else report.again).add(copy.request)
            elif self._copied(pool, copy, to_pages=True):
                report.saved[copy.request] = copy.upto_tokens
            else:
                report.lost.add(copy.request)

    def _copied(self, pool: JoinedPool, copy: CopyOrder, *, to_pages: bool) -> bool:
        """Whether the bytes were copied, all of them while that session lived."""
        if len(copy.pages) != len(copy.blocks):
            return False
        try:
            if to_pages:
                n_bytes = layout.copy_rows(pool.pages, self._blocks, copy.pages, copy.blocks)
                self.counts.saved_bytes += n_bytes
            else:
                n_bytes = layout.copy_rows(self._blocks, pool.pages, copy.blocks, copy.pages)
                self.counts.loaded_bytes += n_bytes
        except (ValueError, IndexError) as error:
            self._log.bug("a copy", error)
            return False
        return pool.session.owns(copy.key)

    def take_results(self) -> tuple[set[str], set[str]]:
        """Requests that were loaded, failed ones among them; and those that failed. Once each."""
        loaded, failed = self._loaded | self._failed, self._failed
        self._loaded, self._failed = set(), set()
        return loaded, failed

    def take_freed(self) -> set[str]:
        """Requests that are over, whose blocks are needed no more. Once each."""
        freed, self._freed = self._freed, set()
        return freed

    def take_report(self) -> StepReport | None:
        """What has become of the orders of this step; None where there were none."""
        report, self._report = self._report, None
        return report
