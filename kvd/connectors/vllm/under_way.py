"""Copies that are under way, and vLLM's blocks that they read or write.

vLLM gives the blocks of a request to another one as soon as that is over or preempted, in the same
step. So every block that an order names is held by reference from the step that makes the order
until every rank has answered it; no time that has passed frees one. A version of vLLM whose blocks
cannot be held keeps those of a request that is over until it hears of it, and those of one that it
preempts are waited for by the workers, before the step that gives them away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from kvd.client.mover.pieces import NO_BLOCK
from kvd.connectors.vllm.orders import CopyOrder
from kvd.connectors.vllm.tracked import CopyUnderWay

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvd.client import ArrivingPages, SyncLease
    from kvd.connectors.vllm.layout import LayerGroup
    from kvd.connectors.vllm.orders import StepReport
    from kvd.connectors.vllm.tracked import RequestView, Tracked


class CountedBlocks(Protocol):
    """The blocks of vLLM's cache, as its scheduler counts who needs them."""

    @property
    def can_be_held(self) -> bool:
        """Whether ``hold`` and ``free`` can be said."""
        ...

    @property
    def null_block(self) -> int:
        """What stands in a row where the request has none any more."""
        ...

    @property
    def groups(self) -> Sequence[LayerGroup]:
        """Of layers, each with a row of blocks; none: all are in one, whose blocks stay."""
        ...

    def of(self, request_id: str) -> Sequence[Sequence[int]]:
        """Those that a request has, a row for each group of layers."""
        ...

    def hold(self, blocks: Sequence[int]) -> None:
        """One more needs these."""
        ...

    def free(self, blocks: Sequence[int]) -> None:
        """One less does."""
        ...

    def take_back(self, request_id: str) -> bool:
        """VLLM is to go on from nothing that is loaded for it; whether anything is, and unused."""
        ...


class OrdersUnderWay:
    """Those of one engine.

    Args:
        blocks: of the engine.
        ranks: how many answer each order.
    """

    def __init__(self, blocks: CountedBlocks, *, ranks: int) -> None:
        self._blocks = blocks
        self.has_windows = any(group.is_windowed for group in blocks.groups)
        """Whether vLLM takes blocks back while their request goes on."""
        self._has_states = any(group.has_states for group in blocks.groups)
        self._is_plain = len(blocks.groups) <= 1 and not self.has_windows
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
        lease: SyncLease | ArrivingPages,
        pages: NDArray[np.int32],
        *,
        is_load: bool,
        rows: slice,
        upto_tokens: int,
        is_last: bool = True,
    ) -> CopyOrder:
        """Order it: pages ``rows`` of the lease, and the request's blocks of the same tokens.

        ``pages``: all that the lease has, as it said just now.

        Raises:
            KvdError: the lease has no pages any more.
        """
        ordered, key = tuple(pages[rows].tolist()), lease.key
        self._last = number = self._last + 1
        blocks = self.blocks_of(tracked, rows)
        order = CopyOrder(
            number=number,
            request=tracked.id,
            key=key,
            first_page=rows.start,
            pages=ordered,
            blocks=blocks,
            upto_tokens=upto_tokens,
            is_last=is_last,
            adapter=tracked.naming.adapter,
        )
        copy = CopyUnderWay(order, tracked, is_load=is_load, ranks=self._ranks)
        self.hold(copy.blocks)
        self._copies[number] = tracked.copies[number] = copy
        return order

    def blocks_of(self, tracked: Tracked, rows: slice) -> tuple[tuple[int, ...], ...]:
        """Its blocks of these pages, also those of layers with windows that were kept for it."""
        table = tracked.blocks if tracked.blocks is not None else self._blocks.of(tracked.id)
        if len(table) == 1 and self._is_plain:
            return (tuple(table[0][rows]),)
        if self._is_plain:
            return tuple(tuple(row[rows]) for row in table)
        null, kept = self._blocks.null_block, tracked.kept
        columns = (
            kept.get(page) or [NO_BLOCK if block == null else block for block in column]
            for page, column in self._columns(table, range(rows.start, rows.stop))
        )
        return tuple(zip(*columns, strict=True))

    def _columns(
        self, table: Sequence[Sequence[int]], pages: Iterable[int]
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """By page, what the groups have of it, as ``EngineLayers`` gives them to the mover.

        Of a page that is not full some may have no block yet.
        """
        groups = self._blocks.groups
        for page in pages:
            yield (
                page,
                tuple(
                    row[number] if number < len(row) else NO_BLOCK
                    for row, group in zip(table, groups, strict=True)
                    for number in group.numbers_of(page)
                ),
            )

    def whole_columns(
        self, tracked: Tracked, pages: Iterable[int]
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Of these pages, those of which no block was taken back."""
        null = self._blocks.null_block
        for page, column in self._columns(self._blocks.of(tracked.id), pages):
            if null not in column:
                yield page, column

    def has_all(self, tracked: Tracked, rows: slice) -> bool:
        """Whether no block of these pages was taken back; asked where there are windows."""
        table = tracked.blocks if tracked.blocks is not None else self._blocks.of(tracked.id)
        null = self._blocks.null_block
        pages = (page for page in range(rows.start, rows.stop) if page not in tracked.kept)
        return not any(null in column for _, column in self._columns(table, pages))

    @property
    def has_states(self) -> bool:
        """Whether a request can go on behind whole pages alone."""
        return self._has_states

    @property
    def can_load_in_parts(self) -> bool:
        """Whether some blocks may be filled before others, and stay the request's meanwhile."""
        return self._is_plain and not self.has_states and self._blocks.can_be_held

    @property
    def can_save(self) -> bool:
        """Whether what a save reads stays what it is."""
        return self._blocks.can_be_held or not self.has_windows

    def take(self, tracked: Tracked) -> None:
        """It is over, and something of it is to be ordered: its blocks stay what they are."""
        tracked.blocks = tuple(map(tuple, self._blocks.of(tracked.id)))
        self.hold(self._used(tracked.blocks))

    def give(self, tracked: Tracked) -> None:
        """What was taken is needed no more."""
        if tracked.blocks is not None:
            self.free(self._used(tracked.blocks))

    def _used(self, rows: Sequence[Sequence[int]]) -> list[int]:
        null = self._blocks.null_block
        return [block for row in rows for block in row if block != null]

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

    def has_any(self, tracked: Tracked, blocks: Collection[int]) -> bool:
        """Whether any of these is one of its own."""
        return any(block in blocks for row in self._blocks.of(tracked.id) for block in row)

    def spoil(self, tracked: Tracked) -> None:
        """What is being saved of it is nobody's KV: none of that counts, and nothing behind it."""
        tracked.is_broken = True
        for copy in tracked.saving:
            copy.is_done = False

    def _end(self, copy: CopyUnderWay) -> None:
        number = copy.order.number
        del self._copies[number]
        del copy.tracked.copies[number]
        self._awaited.discard(number)
        self.free(copy.blocks)

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

    def take_words(self, needed: Collection[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """What the workers hear of blocks that cannot be held: ``take_freed``, ``take_awaited``."""
        if not self._kept and not self._untold:
            return (), ()
        return self.take_freed(needed), self.take_awaited()

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


class LoadedRequest(NamedTuple):
    """One for which so many tokens are loaded, behind those that vLLM has itself."""

    request: RequestView
    n_tokens: int


class SchedulerBlocks:
    """Those of one engine, from ``bind`` on, as vLLM's scheduler counts them."""

    def __init__(self, groups: Sequence[LayerGroup] = ()) -> None:
        self.can_be_held = False
        self.on_reset: Callable[[Collection[str]], None] = _nobody_asks
        """Is told of requests whose blocks are being filled with KV of before a reset."""
        self.on_tried: Callable[[bool], object] = bool
        """Is told before that, of each reset, whether vLLM has done it."""
        self.groups = groups
        self.null_block = 0
        self._manager: Any = None
        self._held: dict[tuple[int, ...], int] = {}
        """As they were said, since there are many, and what is held together is freed together."""
        self._filling: dict[str, LoadedRequest] = {}
        """By its number, each request that waits for its blocks to be filled, were it over."""
        self._over: set[str] = set()
        """Of these, those that are."""
        self._stale: set[str] = set()
        """And those that are to go on from nothing of it."""
        self._filled: dict[str, LoadedRequest] = {}
        """Those of which vLLM was told so, and of which no step has computed since."""

    def bind(self, manager: Any) -> None:
        """This is vLLM's ``KVCacheManager``."""
        self._manager = manager
        self.can_be_held = isinstance(manager.block_pool, CountingPool)
        if any(group.is_windowed for group in self.groups):
            self.null_block = manager.block_pool.null_block.block_id
        if self.can_be_held:
            reset = manager.reset_prefix_cache
            manager.reset_prefix_cache = lambda: self._reset(reset)

    def of(self, request_id: str) -> Sequence[Sequence[int]]:
        """Those that a request has, a row for each group of layers."""
        blocks: tuple[list[int], ...] = self._manager.get_block_ids(request_id)
        return blocks

    def hold(self, blocks: Sequence[int]) -> None:
        """One more needs these."""
        held = tuple(blocks)
        self._held[held] = self._held.get(held, 0) + 1
        self._touch(blocks)

    def free(self, blocks: Sequence[int]) -> None:
        """One less does."""
        held = tuple(blocks)
        n_holds = self._held.pop(held)
        if n_holds > 1:
            self._held[held] = n_holds - 1
        self._free(blocks)

    def fills(self, request: RequestView, n_tokens: int) -> None:
        """VLLM keeps the blocks of this request until it hears that so many tokens are loaded."""
        self._filling[request.request_id] = LoadedRequest(request, n_tokens)

    def filled(self, request_id: str) -> None:
        """It hears so now, and goes on with them in a later step, if the request is not over."""
        loaded = self._filling.pop(request_id, None)
        if loaded is not None and request_id not in self._over:
            self._filled[request_id] = loaded
            if request_id in self._stale:
                self.take_back(request_id)
        self._over.discard(request_id)
        self._stale.discard(request_id)

    def settled(self, request_id: str, *, is_over: bool = False) -> None:
        """It has gone on with them, or has none; or the request is over."""
        loaded = self._filled.pop(request_id, None)
        if is_over and loaded is not None:
            # Without kvd nobody had computed it, and nobody says from now on whose it is.
            self._lose(loaded)
        if is_over and request_id in self._filling:
            self._over.add(request_id)

    def take_back(self, request_id: str) -> bool:
        """VLLM is to go on from none of what is loaded for it: it begins anew.

        As vLLM does it where a load has failed: its scheduler does these two things with such a
        request before it looks it up again. While its blocks are being filled, that is done once
        they are. Nobody else may find them either, as where its turn came and it was not in a step.

        Returns:
            Whether anything is, of which no step has computed.
        """
        loaded = self._filled.pop(request_id, None)
        if loaded is not None:
            self._lose(loaded)
            loaded.request.num_computed_tokens = 0
            self._manager.free(loaded.request)
        elif request_id in self._filling:
            self._stale.add(request_id)
        return loaded is not None or request_id in self._filling

    def _lose(self, loaded: LoadedRequest) -> None:
        """What was loaded for it is found in vLLM's own cache no more."""
        request = loaded.request
        own_tokens = max(0, request.num_computed_tokens - loaded.n_tokens)
        rows = zip(self.of(request.request_id), self.groups, strict=True)
        blocks = {block for row, group in rows for block in row[own_tokens // group.block_size :]}
        self._manager.block_pool.evict_blocks(blocks)

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
        after the reset, and nothing is given away before it is held again. So are blocks of a
        request that waits for a load: that is to fail, and its prompt is computed from its first
        token, as vLLM does with all that it preempts.
        """
        aside = [block for held, n in self._held.items() for block in held * n]
        for request_id in (*self._filling, *self._filled):
            for blocks in self._manager.get_block_ids(request_id):
                aside += blocks
        self._free(aside)
        is_done = False
        try:
            is_done = reset()
        finally:
            self._touch(aside)
        self.on_tried(bool(is_done))
        if is_done:
            filling = list(self._filling)
            for request_id in (*filling, *self._filled):
                self.take_back(request_id)
            self.on_reset(filling)
        return is_done


def _nobody_asks(_requests: Collection[str]) -> None:
    """Nothing is filled."""
