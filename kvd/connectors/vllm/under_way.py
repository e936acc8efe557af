"""Copies that are under way, and vLLM's blocks that they read or write.

vLLM gives the blocks of a request to another one as soon as that is over or preempted, in the same
step. So every block that an order names is held by reference from the step that makes the order
until every rank has answered it; no time that has passed frees one. A version of vLLM whose blocks
cannot be held keeps those of a request that is over until it hears of it, and those of one that it
preempts are waited for by the workers, before the step that gives them away.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kvd.connectors.vllm.orders import CopyOrder
from kvd.connectors.vllm.tracked import CopyUnderWay

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from kvd.client import SyncLease
    from kvd.connectors.vllm.orders import StepReport
    from kvd.connectors.vllm.tracked import Tracked


class CountedBlocks(Protocol):
    """The blocks of vLLM's cache, as its scheduler counts who needs them."""

    @property
    def can_be_held(self) -> bool:
        """Whether ``hold`` and ``free`` can be said."""
        ...

    def of(self, request_id: str) -> Sequence[int]:
        """Those that a request has."""
        ...

    def hold(self, blocks: Sequence[int]) -> None:
        """One more needs these."""
        ...

    def free(self, blocks: Sequence[int]) -> None:
        """One less does."""
        ...


class OrdersUnderWay:
    """Those of one engine.

    Args:
        blocks: of the engine.
        ranks: how many answer each order.
    """

    def __init__(self, blocks: CountedBlocks, *, ranks: int) -> None:
        self._blocks = blocks
        self._ranks = ranks
        self._last = 0
        self._copies: dict[int, CopyUnderWay] = {}
        self._awaited: set[int] = set()
        """Of those whose blocks vLLM has taken back: the workers wait for them."""
        self._untold: list[int] = []
        """Of these, those that the workers have not heard of."""
        self._kept: dict[str, Tracked] = {}
        """Requests that are over, whose blocks vLLM keeps since they cannot be held."""

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def keeps(self) -> bool:
        """Whether vLLM keeps blocks until it hears of them."""
        return bool(self._kept)

    def begin(
        self,
        tracked: Tracked,
        lease: SyncLease,
        *,
        is_load: bool,
        rows: slice,
        upto_tokens: int,
    ) -> CopyOrder:
        """Order it: pages ``rows`` of the lease, and the request's blocks of the same tokens.

        Raises:
            KvdError: the lease has no pages any more.
        """
        pages = tuple(lease.pages[rows].tolist())
        blocks = tracked.blocks if tracked.blocks is not None else self._blocks.of(tracked.id)
        self._last += 1
        order = CopyOrder(
            number=self._last,
            request=tracked.id,
            key=lease.key,
            first_page=rows.start,
            pages=pages,
            blocks=tuple(blocks[rows]),
            upto_tokens=upto_tokens,
        )
        copy = CopyUnderWay(order, tracked, is_load=is_load, ranks=self._ranks)
        self.hold(order.blocks)
        self._copies[order.number] = copy
        tracked.copies[order.number] = copy
        return order

    def hold(self, blocks: Sequence[int]) -> None:
        """Have these stay what they are."""
        if self._blocks.can_be_held:
            self._blocks.hold(blocks)

    def free(self, blocks: Sequence[int]) -> None:
        """What was held is needed no more."""
        if self._blocks.can_be_held:
            self._blocks.free(blocks)

    def answered(self, report: StepReport) -> list[CopyUnderWay]:
        """What the ranks say; those that are over now, as they were ordered."""
        over = []
        for number in sorted({*report.done, *report.failed}):
            copy = self._copies.get(number)
            if copy is None:
                continue
            copy.is_done = copy.is_done and number not in report.failed
            copy.ranks_left -= report.done.get(number, 0) + report.failed.get(number, 0)
            if copy.ranks_left <= 0:
                copy.is_over = True
                self._end(copy)
                over.append(copy)
        return over

    def _end(self, copy: CopyUnderWay) -> None:
        del self._copies[copy.order.number]
        del copy.tracked.copies[copy.order.number]
        self._awaited.discard(copy.order.number)
        self.free(copy.order.blocks)

    # ---- where blocks cannot be held ---------------------------------------------------------

    def keep(self, tracked: Tracked, *, is_needed: bool) -> bool:
        """Whether vLLM must keep the blocks of this request, which is over, until it hears of it.

        Args:
            tracked: the request.
            is_needed: something of it is to be ordered yet.
        """
        if self._blocks.can_be_held:
            return False
        # Those that are filled vLLM keeps by itself, and those of before a preemption are gone.
        mine = (copy for copy in tracked.copies.values() if not copy.is_load)
        if is_needed or any(copy.order.number not in self._awaited for copy in mine):
            self._kept[tracked.id] = tracked
        return tracked.id in self._kept

    def take_freed(self, needed: Collection[str]) -> tuple[str, ...]:
        """Requests that are over, whose blocks are needed no more; once each.

        Args:
            needed: of these something is to be ordered yet.
        """
        freed = [
            request
            for request, tracked in self._kept.items()
            if request not in needed and not any(not c.is_load for c in tracked.copies.values())
        ]
        for request in freed:
            del self._kept[request]
        return tuple(freed)

    def preempted(self, tracked: Iterable[Tracked]) -> None:
        """VLLM has taken back the blocks of these."""
        if self._blocks.can_be_held:
            return
        for request in tracked:
            numbers = request.copies.keys() - self._awaited
            self._awaited |= numbers
            self._untold += sorted(numbers)

    def take_awaited(self) -> tuple[int, ...]:
        """Orders that the workers must have ended before the next step; once each."""
        untold, self._untold = self._untold, []
        return tuple(number for number in untold if number in self._copies)


@runtime_checkable
class CountingPool(Protocol):
    """VLLM's ``BlockPool`` counts up and down, for its own connectors too."""

    blocks: Sequence[object]

    def touch(self, blocks: Sequence[object]) -> None:
        """One more needs these."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[object]) -> None:
        """One less does; the first of them are given away first."""
        ...


class SchedulerBlocks:
    """Those of one engine, from ``bind`` on, as vLLM's scheduler counts them."""

    def __init__(self) -> None:
        self.can_be_held = False
        self._manager: Any = None
        self._held: Counter[tuple[int, ...]] = Counter()
        """As they were said, since there are many, and what is held together is freed together."""

    def bind(self, manager: Any) -> None:
        """This is vLLM's ``KVCacheManager``."""
        self._manager = manager
        self.can_be_held = isinstance(manager.block_pool, CountingPool)
        if self.can_be_held:
            reset = manager.reset_prefix_cache
            manager.reset_prefix_cache = lambda: self._reset(reset)

    def of(self, request_id: str) -> Sequence[int]:
        """Those that a request has."""
        blocks: list[int] = self._manager.get_block_ids(request_id)[0]
        return blocks

    def hold(self, blocks: Sequence[int]) -> None:
        """One more needs these."""
        self._held[tuple(blocks)] += 1
        self._touch(blocks)

    def free(self, blocks: Sequence[int]) -> None:
        """One less does."""
        held = tuple(blocks)
        self._held[held] -= 1
        if not self._held[held]:
            del self._held[held]
        self._free(blocks)

    def _touch(self, blocks: Sequence[int]) -> None:
        pool = self._manager.block_pool
        pool.touch(list(map(pool.blocks.__getitem__, blocks)))

    def _free(self, blocks: Sequence[int]) -> None:
        pool = self._manager.block_pool
        # The last ones first: vLLM gives them away in that order, and prefixes are found longer.
        pool.free_blocks(list(map(pool.blocks.__getitem__, reversed(blocks))))

    def _reset(self, reset: Any) -> Any:
        """VLLM's reset of its own cache, beside copies.

        It resets nothing while anybody needs a block, and ends in an error where it has preempted
        all requests before. What is read by a copy is in nobody's way: it is found by no prompt
        after the reset, and nothing is given away before it is held again.
        """
        held = list(itertools.chain.from_iterable(self._held.elements()))
        self._free(held)
        try:
            return reset()
        finally:
            self._touch(held)
