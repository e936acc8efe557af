"""Requests that are over before all of them is ordered: their blocks stay what they are meanwhile.

A request may end before its lease has come, or before that has pages for its last block. Then its
blocks are held until they are ordered, ``HELD_S`` at most: nothing reads them yet. From then on the
order holds them. Its lease ends behind the last copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd.connectors.vllm.tracked import RequestStage

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.connectors.vllm.endings import Endings
    from kvd.connectors.vllm.moves import Moves
    from kvd.connectors.vllm.orders import CopyOrder
    from kvd.connectors.vllm.requests import Requests
    from kvd.connectors.vllm.tracked import Tracked
    from kvd.connectors.vllm.under_way import OrdersUnderWay

HELD_S: Final = 1.0
"""So long a request that is over waits for the pages that it is to be saved in."""


class HeldRequests:
    """Those of one engine."""

    def __init__(
        self,
        requests: Requests,
        moves: Moves,
        ending: Endings,
        copies: OrdersUnderWay,
        now_s: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._moves = moves
        self._ending = ending
        self._copies = copies
        self._now_s = now_s

    def can_be_handed_over(self, tracked: Tracked) -> bool:
        """Whether who decodes it can be told that its KV is here, or is about to be."""
        if not tracked.transfer.sends or tracked.is_broken or not self._moves.will_send(tracked):
            return False
        if tracked.request.num_computed_tokens < tracked.prompt_tokens:
            return False  # aborted
        if tracked.lease is not None:
            return self._moves.has_pages_for_prompt(tracked)
        return tracked.claim is not None and not tracked.is_unsure

    def over(self, tracked: Tracked) -> None:
        """It is: it is held where not all of it is ordered that can be."""
        if self._is_to_be_ordered(tracked):
            tracked.asked_s = self._now_s()
            self._copies.take(tracked)
            self._requests.held[tracked.id] = tracked
        else:
            self._end(tracked)

    def _is_to_be_ordered(self, tracked: Tracked) -> bool:
        if tracked.lease is None:
            is_claimed = tracked.claim is not None and tracked.has_run
            return is_claimed and self._moves.saves_anything
        if not tracked.room:
            return False
        return tracked.ordered_tokens < tracked.prompt_tokens and not tracked.is_broken

    def saves(self, held: Tracked) -> list[CopyOrder]:
        """Have its blocks copied, or give up that they are."""
        saves: list[CopyOrder] = []
        if held.stage is not RequestStage.ALONE and held.lease is not None:
            saves = self._moves.saves(held, held.request.num_computed_tokens)
        is_late = self._now_s() - held.asked_s >= HELD_S
        is_alone = held.stage is RequestStage.ALONE
        if not is_late and not is_alone and self._is_to_be_ordered(held):
            return saves
        del self._requests.held[held.id]
        self._copies.give(held)
        if not is_alone:
            if held.room and held.ordered_tokens < held.prompt_tokens:
                self._requests.count_alone("a prompt was not copied in time for who decodes it")
            self._end(held)
        return saves

    def _end(self, tracked: Tracked) -> None:
        """Let go of its lease, once no copy to its pages is under way; what is saved is shared."""
        assert tracked.link is not None
        if tracked.lease is None:
            self._requests.let_go(tracked)
        else:
            self._requests.claiming.pop(tracked.id, None)
            self._ending.add(tracked, tracked.link, shares=True)
