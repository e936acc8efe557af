"""Blocks of layers with windows: vLLM takes them back while their request goes on.

What such a layer does not attend to any more is given to another request, some steps after it was
computed. A page is a block of each group of layers, so it is saved before that, or not at all, and
then nothing behind it: a prefix has no holes. A save that is ordered holds its blocks by reference.
Blocks that are computed before their request has pages are kept here meanwhile, in the same way,
``KEPT_S`` at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd.connectors.vllm.tracked import RequestStage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvd.connectors.vllm.requests import Requests
    from kvd.connectors.vllm.tracked import Tracked
    from kvd.connectors.vllm.under_way import OrdersUnderWay

KEPT_S: Final = 1.0
"""So long blocks wait for the pages that they are to be saved in."""


class WindowBlocks:
    """Those that are kept, of one engine.

    Args:
        requests: where it is counted that one is not saved further.
        copies: who holds blocks.
        block_size: tokens of a page.
        now_s: a clock.
    """

    def __init__(
        self,
        requests: Requests,
        copies: OrdersUnderWay,
        *,
        block_size: int,
        now_s: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._copies = copies
        self._block = block_size
        self._now_s = now_s
        self.keeping: dict[str, tuple[Tracked, float]] = {}
        """Those for whom blocks are kept, and since when the first of them are."""

    def __len__(self) -> int:
        """Of so many requests."""
        return len(self.keeping)

    def keep(self, tracked: Tracked, upto_tokens: int) -> None:
        """Have what is computed and cannot be ordered yet stay what it is, until it can be."""
        if not _waits_for_pages(tracked):
            self._drop(tracked)
            return
        kept, now_s = tracked.kept, self._now_s()
        _, since_s = self.keeping.get(tracked.id, (tracked, now_s))
        first = tracked.ordered_tokens // self._block
        ordered = [page for page in kept if page < first]
        for page in ordered:
            self._copies.free(kept.pop(page))
            since_s = now_s
        if kept and now_s - since_s >= KEPT_S:
            self._drop(tracked)
            tracked.is_broken = True
            self._requests.count_alone("its windows moved on before it had pages")
            return
        self._take(tracked, max(kept) + 1 if kept else first, upto_tokens // self._block)
        if kept:
            self.keeping[tracked.id] = tracked, since_s
        else:
            self.keeping.pop(tracked.id, None)

    def _take(self, tracked: Tracked, first_page: int, end_page: int) -> None:
        if tracked.blocks is not None or first_page >= end_page:
            return  # of one that is over all blocks are held
        for page, column in self._copies.whole_columns(tracked, range(first_page, end_page)):
            self._copies.hold(column)
            tracked.kept[page] = column

    def sweep(self, preempted: Iterable[Tracked] = ()) -> None:
        """Keep blocks for requests that are going to be saved, and for no other.

        Args:
            preempted: vLLM needs the blocks of these.
        """
        if not self.keeping:
            return
        for tracked in preempted:
            self._drop(tracked)
        for tracked, _ in list(self.keeping.values()):
            if not self._is_to_be_saved(tracked):
                self._drop(tracked)

    def _is_to_be_saved(self, tracked: Tracked) -> bool:
        requests = self._requests
        is_here = requests.here.get(tracked.id) is tracked
        if not is_here and requests.held.get(tracked.id) is not tracked:
            return False
        return tracked.stage is RequestStage.COMPUTING and _waits_for_pages(tracked)

    def _drop(self, tracked: Tracked) -> None:
        """Nothing of it waits any more."""
        for column in tracked.kept.values():
            self._copies.free(column)
        tracked.kept.clear()
        if self.keeping.get(tracked.id, (None, 0.0))[0] is tracked:
            del self.keeping[tracked.id]


def _waits_for_pages(tracked: Tracked) -> bool:
    if tracked.is_broken or tracked.is_full:
        return False
    return tracked.lease is not None or tracked.claim is not None
