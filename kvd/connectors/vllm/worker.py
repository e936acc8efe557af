"""The workers' half: it has pages of the pool and vLLM's blocks copied, and sees the copies end.

A copy is ordered in the step that says so, behind a mark on the stream of this rank's computation.
The client's mover, a thread of this process, makes it beside the steps. A step waits for none; only
one that has nothing to compute looks a moment longer. What has become of a copy is said once, when
no byte of it moves any more.

An order is obeyed only by a worker that is of its session, in its life (``Worker.check``): looked
at when it is begun, by the daemon when it is told of it, and again behind it. A session is joined
and left beside the step. Until it is joined orders wait: loads ``JOIN_WITHIN_S`` at most, saves
``SAVE_WITHIN_S``.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from kvd.client import Code, KvdError, connect_sync, join
from kvd.client.mover.pending_copy import CopyState
from kvd.connectors.refusals import is_users_to_mend
from kvd.connectors.vllm import layout
from kvd.connectors.vllm.beside import BesideTask, in_thread
from kvd.connectors.vllm.joined import JoinedPool, PoolJoin
from kvd.connectors.vllm.log import ConnectorLog, logger
from kvd.connectors.vllm.orders import StepReport
from kvd.connectors.vllm.sessions import IDLE_WAIT_S
from kvd.connectors.vllm.weights import ReadAdapters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvd.client import PendingCopy, Pool, Worker
    from kvd.connectors.vllm.beside import Start
    from kvd.connectors.vllm.layout import EngineLayers, LayerGroup
    from kvd.connectors.vllm.options import VllmOptions
    from kvd.connectors.vllm.orders import CopyOrder, StepOrders

CHECK_NAME = "vllm-check"
"""Of the session that only looks whether the pool fits."""

CHECK_WITHIN_S: Final = 1.0
"""An engine that starts waits so long at most for a look at the pool."""

JOIN_WITHIN_S: Final = 0.05
"""So long a load waits for the session to be joined; then its prompt is computed."""

SAVE_WITHIN_S: Final = 1.0
"""So long a save does, and as long for each answer of the daemon; then it is lost."""

ANSWER_WITHIN_S: Final = 0.25
"""So long the daemon has to answer that a load begins, or is over; then it is given up. A save has
``SAVE_WITHIN_S``."""

ANSWERED: Final = frozenset({CopyState.ASKING, CopyState.ENDING})
"""In these states nothing moves, and the daemon is to say something."""

PREEMPTED_WITHIN_S: Final = 0.01
"""So long a step that takes blocks back waits for copies that do not move yet."""

PREEMPTED_SAID_S: Final = 10.0
"""Between two lines about a step that waits for those that do."""


class CopyCounts:
    """What was copied since somebody asked."""

    def __init__(self) -> None:
        self.loaded_bytes = self.saved_bytes = 0
        self.load_seconds = self.save_seconds = 0.0


class RankCopy:
    """A copy that was ordered of this rank. ``pending``: it is begun; until then it waits."""

    __slots__ = ("asked_in", "asked_s", "is_load", "joined", "order", "pending", "since_s")

    def __init__(self, order: CopyOrder, *, is_load: bool, since_s: float) -> None:
        self.order = order
        self.is_load = is_load
        self.since_s = since_s
        self.asked_s: float | None = None
        self.asked_in: CopyState | None = None
        """Since when the daemon is known to be asked about it, and in which state that was."""
        self.joined: JoinedPool | None = None
        self.pending: PendingCopy | None = None

    def begin(self, joined: JoinedPool, mark: object) -> None:
        """Have it made.

        Raises:
            KvdError: it is refused, and nothing is begun.
        """
        order, part, blocks = self.order, joined.component, joined.blocks
        pages = {part: order.pages}
        rows = order.blocks if joined.has_rows else order.blocks[0]
        if self.is_load:
            self.pending = blocks.begin_load(
                order.key,
                {part: rows},
                pages=pages,
                first_page=order.first_page,
                after=mark,
            )
        else:
            self.pending = blocks.begin_save(
                order.key,
                {part: rows},
                pages=pages,
                first_page=order.first_page,
                upto_tokens=order.upto_tokens,
                after=mark,
            )
        self.joined = joined

    def is_over(self) -> bool:
        """Whether no byte of it moves any more, and the daemon knows, or is not waited for."""
        pending = self.pending
        if pending is None or not (pending.is_over or pending.is_cancelled):
            return False
        return pending.safe()

    def look(self, now_s: float) -> None:
        """Give it up, if the daemon does not answer: its request, or its blocks, would wait.

        What the engine computes before it, and what moves, takes the time that it takes.
        """
        pending = self.pending
        if pending is None or pending.state not in ANSWERED:
            self.asked_s = None
        elif self.asked_s is None or self.asked_in is not pending.state:
            self.asked_s, self.asked_in = now_s, pending.state
        elif now_s - self.asked_s >= (ANSWER_WITHIN_S if self.is_load else SAVE_WITHIN_S):
            pending.cancel()

    def is_done(self) -> bool:
        """Of one that is over: whether it was made, all of it while its session lived."""
        pending, joined = self.pending, self.joined
        assert pending is not None
        assert joined is not None
        is_made = pending.is_over and pending.refusal is None
        return is_made and joined.session.owns(self.order.key)


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
        self.adapters = ReadAdapters()
        """What vLLM has read, for whoever hears of it."""
        self._options = options
        self._block = block_size
        self._ranks = ranks
        self._tag = ""
        # One alone has no rank to say: what it saves is all of a page.
        n_said = ranks if ranks > 1 else 0
        self._open = open_session or (
            lambda token: join(options.endpoint or None, token=token, rank=rank, ranks=n_said)
        )
        self._now_s = now_s
        self._start = start
        self._log = ConnectorLog(now_s)
        self._join = PoolJoin(self._open_pool, self._log, now_s=now_s, start=start)
        self._layers: EngineLayers | None = None
        self._has_blocks = True
        self._copies: dict[int, RankCopy] = {}
        """All that is not answered, by the number of the order."""
        self._orders: StepOrders | None = None
        """Of the step that is under way."""
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._failing: set[str] = set()
        """Those that have failed, of which a part may still move."""
        self._broken: set[str] = set()
        """Those of which a part was not made: nor is the last one then."""
        self._freed: set[str] = set()
        self._report: StepReport | None = None

    # ---- the start ---------------------------------------------------------------------------

    def register(
        self,
        layers: Mapping[str, Any],
        groups: Sequence[LayerGroup] = (),
        *,
        n_blocks: int = 0,
        tag: str = "",
    ) -> None:
        """These are the engine's blocks.

        Args:
            layers: by name, the tensor of each.
            groups: which of them have their blocks in common; none: all.
            n_blocks: how many blocks the scheduler counts; 0: as many as the tensors have.
            tag: who packs them.

        Raises:
            KvdError: ``layout-mismatch``: they are no pages of the pool; ``bad-request``: there is
                no such pool. A daemon that is not there is no reason to raise, nor is one that
                hangs: the pool is looked at when it is.
        """
        self._tag = tag
        self._layers = layout.EngineLayers(layers, groups, n_blocks)
        check = BesideTask(self._check, start=self._start)
        if not check.ended(CHECK_WITHIN_S):
            return
        try:
            check.take()
        except KvdError as error:
            if is_users_to_mend(error):
                raise

    def _check(self) -> None:
        with connect_sync(self._options.endpoint or None, name=CHECK_NAME) as node:
            self._fit(node.pool(self._options.pool))

    def _fit(self, pool: Pool) -> EngineLayers:
        layers = self._layers
        assert layers is not None
        layout.fitting(pool, layers, block_size=self._block, ranks=self._ranks, tag=self._tag)
        return layers

    def _open_pool(self, token: bytes) -> JoinedPool:
        session = self._open(token)
        try:
            pool = session.pool(self._options.pool)
            layers = self._fit(pool)
            blocks = session.blocks(
                layers.caches(),
                block_size=self._block,
                pool=self._options.pool,
                threads=self._options.copy_threads,
            )
            part = pool.memory.components[0].name
            return JoinedPool(session, blocks, part, has_rows=layers.has_rows)
        except BaseException:
            session.close()
            raise

    def close(self) -> None:
        """Leave the session; what has begun is waited for, since the blocks are freed behind it."""
        self._join.leave()

    def take_back(self) -> None:
        """The memory of the blocks is given away, and comes back by ``give_again``.

        What moves is waited for, and all else ends: it is answered in the next step. Until then
        this rank is of no session.
        """
        self._has_blocks = False
        self.close()

    def give_again(self) -> None:
        """The memory of the blocks is there again, where it was."""
        self._has_blocks = True

    # ---- a step ------------------------------------------------------------------------------

    def give_back(self, orders: StepOrders) -> None:
        """Wait for copies whose blocks are another one's from this step on, however long it takes.

        Only where vLLM's blocks cannot be held by reference.
        """
        if not orders.awaited:
            return
        awaited = [
            copy for number in orders.awaited if (copy := self._copies.get(number)) is not None
        ]
        for copy in awaited:
            if copy.pending is None:
                self._answer(copy, is_done=False)
        pending = [copy.pending for copy in awaited if copy.pending is not None]
        within_s = PREEMPTED_WITHIN_S
        while left := [one for one in pending if not one.safe()]:
            _wait(left[0], within_s)
            if not left[0].safe():
                for one in left:
                    one.cancel()  # what has begun to move goes on, and all else ends
                if within_s == PREEMPTED_SAID_S:
                    logger.warning("a step waits for %d copies of preempted requests", len(left))
                within_s = PREEMPTED_SAID_S

    def load(self, orders: StepOrders) -> None:
        """Have blocks filled from pages; every request that waits for it is heard of in the end."""
        # Most steps copy nothing, and a call behind a forward pass finds nothing of it in the
        # processor's caches: so each is made where there is something to do.
        self._orders = orders
        if orders.failed:
            self._failing.update(orders.failed)
        if orders.freed:
            self._freed.update(orders.freed)
        try:
            self._join.follow(orders.token if self._has_blocks else b"")
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the engine
            self._log.bug("a session", error)
        if self._join.unfit:
            self._told().unfit = self._join.unfit
        if orders.loads:
            self._take(orders.loads, is_load=True)
        if self._failing:
            self._end_failing()
        if self._copies:
            self._begin()

    def save(self, orders: StepOrders) -> None:
        """Have pages filled from blocks, behind the forward pass that writes them."""
        if orders.saves:
            self._take(orders.saves, is_load=False)
        if self._copies:
            self._begin()

    def _take(self, orders: Iterable[CopyOrder], *, is_load: bool) -> None:
        now_s = self._now_s()
        for order in orders:
            copy = RankCopy(order, is_load=is_load, since_s=now_s)
            self._copies[order.number] = copy
            # Now, as later another one may be read, of which this order is not.
            if order.adapter is not None and not self.adapters.has(order.adapter):
                self._answer(copy, is_done=False)

    def _begin(self) -> None:
        """Begin what waits, as far as its session is joined; answer what waits too long."""
        marks: dict[int, object] = {}
        for copy in [copy for copy in self._copies.values() if copy.pending is None]:
            try:
                self._begin_one(copy, marks)
            except KvdError as error:
                if error.code != Code.WRONG_STATE.value or self._is_late(copy):
                    self._refused(error)
                    self._answer(copy, is_done=False)
                # Else a copy of these blocks is about to end.
            except Exception as error:  # noqa: BLE001 - as above
                self._log.bug("a copy", error)
                self._answer(copy, is_done=False)

    def _begin_one(self, copy: RankCopy, marks: dict[int, object]) -> None:
        joined = self._join.of(copy.order.key)
        if joined is not None:
            # One mark for all: what was computed before it is done, whoever reads or writes it.
            if id(joined) not in marks:
                marks[id(joined)] = joined.blocks.mark()
            copy.begin(joined, marks[id(joined)])
            return
        is_of_now = self._orders is not None and self._orders.are_of(copy.order.key)
        is_hopeless = bool(self._join.unfit) or not is_of_now
        if is_hopeless or self._is_late(copy):
            self._answer(copy, is_done=False)

    def _is_late(self, copy: RankCopy) -> bool:
        within_s = JOIN_WITHIN_S if copy.is_load else SAVE_WITHIN_S
        return self._now_s() - copy.since_s >= within_s

    # ---- what has become of it ---------------------------------------------------------------

    def _look(self) -> None:
        now_s = self._now_s()
        for copy in self._copies.values():
            copy.look(now_s)
        for copy in [copy for copy in self._copies.values() if copy.is_over()]:
            if self._waits_for_parts(copy):
                continue
            try:
                is_done = copy.is_done()
                self._count(copy)
            except Exception as error:  # noqa: BLE001 - as above
                self._log.bug("the end of a copy", error)
                is_done = False
            self._answer(copy, is_done=is_done)
        self._end_failing()

    def _parts_of(self, request: str) -> list[RankCopy]:
        """Loads of that request that are not answered, but for the last of all."""
        return [
            copy
            for copy in self._copies.values()
            if copy.is_load and not copy.order.is_last and copy.order.request == request
        ]

    def _waits_for_parts(self, copy: RankCopy) -> bool:
        """Whether it is the last load of a request of which another one is not answered yet."""
        is_last = copy.is_load and copy.order.is_last and len(self._copies) > 1
        return is_last and bool(self._parts_of(copy.order.request))

    def _end_failing(self) -> None:
        """Say of a request that it has failed once no part of it moves any more."""
        for request in list(self._failing):
            parts = self._parts_of(request)
            for copy in parts:
                if copy.pending is None:
                    self._answer(copy, is_done=False)
                else:
                    copy.pending.cancel()
            if not self._parts_of(request):
                self._failing.discard(request)
                self._broken.discard(request)
                self._failed.add(request)

    def _count(self, copy: RankCopy) -> None:
        pending, counts = copy.pending, self.counts
        assert pending is not None
        seconds = pending.waited_s + pending.moved_s
        if pending.refusal is not None:
            self._refused(KvdError(pending.refusal))
        if copy.is_load:
            counts.loaded_bytes += pending.n_bytes
            counts.load_seconds += seconds
        else:
            counts.saved_bytes += pending.n_bytes
            counts.save_seconds += seconds

    def _refused(self, error: KvdError) -> None:
        self._log.changed("copies", logging.WARNING, f"a copy was not made: {error}")

    def _answer(self, copy: RankCopy, *, is_done: bool) -> None:
        """It is over, or was never begun: nobody reads or writes its blocks any more."""
        number, report, request = copy.order.number, self._told(), copy.order.request
        del self._copies[number]
        is_done = is_done and not (copy.is_load and request in self._broken)
        (report.done if is_done else report.failed)[number] = 1
        if not copy.is_load:
            return
        if not copy.order.is_last:
            if not is_done:
                self._broken.add(request)
        elif is_done:
            self._loaded.add(request)
        else:
            self._failing.add(request)

    def _told(self) -> StepReport:
        if self._report is None:
            self._report = StepReport()
        return self._report

    def take_results(self) -> tuple[set[str], set[str]]:
        """Requests that were loaded, failed ones among them; and those that failed. Once each."""
        if self._copies or self._failing:
            self._look()
            if self._orders is not None and self._orders.is_idle:
                self._await_load()
        loaded, failed = self._loaded | self._failed, self._failed
        self._loaded, self._failed = set(), set()
        return loaded, failed

    def _await_load(self) -> None:
        """Nothing is computed: a load that ends now is heard of now, and not a step later.

        One whose session is being joined waits for that here: a step behind the other would leave
        no processor to the thread that joins it.
        """
        end_s = time.perf_counter() + IDLE_WAIT_S
        while not self._loaded and (left_s := end_s - time.perf_counter()) > 0:
            loads = [copy.pending for copy in self._copies.values() if copy.is_load]
            pending = next((one for one in loads if one is not None), None)
            if pending is not None:
                _wait(pending, left_s)
                self._look()
            elif loads and self._join.comes(left_s):
                self._begin()
            else:
                return

    def take_freed(self) -> set[str]:
        """Requests that are over, whose blocks are needed no more. Once each."""
        freed, self._freed = self._freed, set()
        return freed

    def take_report(self) -> StepReport | None:
        """What was answered, or read, since the last time; None where nothing was."""
        if self.adapters.untold:
            self._told().adapters = self.adapters.take()
        report, self._report = self._report, None
        if report is not None and self._orders is not None:
            report.number = self._orders.number
        return report


def _wait(pending: PendingCopy, within_s: float) -> None:
    """Until it is over, or the time is; what has become of it is asked elsewhere."""
    with contextlib.suppress(KvdError):
        pending.result(within_s)
