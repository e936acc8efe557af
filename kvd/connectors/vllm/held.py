"""Prompts that are over and will be decoded elsewhere: vLLM keeps their blocks until then.

A prompt may end before its lease has come, or before its last block was copied to it. Then its
blocks are held, ``HELD_S`` at most, and its lease ends behind the last copy.
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

HELD_S: Final = 1.0
"""So long vLLM keeps the blocks of a prompt that is over, until they are copied for who decodes."""


class HeldBlocks:
    """Those of one engine."""

    def __init__(
        self, requests: Requests, moves: Moves, ending: Endings, now_s: Callable[[], float]
    ) -> None:
        self.freed: list[str] = []
        """Requests to be reported as copied, with the next step."""
        self.workers_copy = False
        """Whether workers have copied anything in this life of the session."""
        self._requests = requests
        self._moves = moves
        self._ending = ending
        self._now_s = now_s

    def can_be_handed_over(self, tracked: Tracked) -> bool:
        """Whether who decodes it can be told that its KV is here, or is about to be."""
        if not self._moves.will_send(tracked):
            return False
        if tracked.request.num_computed_tokens < tracked.prompt_tokens:
            return False  # aborted
        if tracked.lease is not None:
            return self._moves.has_pages_for_prompt(tracked)
        return tracked.claim is not None and not tracked.is_unsure

    def over(self, tracked: Tracked) -> None:
        """It is: its blocks are held where not all of a prompt that is handed over is ordered.

        And where the first order of a session is not answered yet: workers that have not joined it
        copy nothing in that step, and vLLM asks whether the blocks are free before it tells us.
        """
        upto = tracked.ordered_tokens if self.workers_copy else tracked.saved_tokens
        if tracked.room and upto < tracked.prompt_tokens:
            tracked.asked_s = self._now_s()
            self._requests.held[tracked.id] = tracked
        else:
            self._end(tracked)

    def saves(self, held: Tracked, number: int) -> list[CopyOrder]:
        """Have the blocks of a prompt copied that is over, and is to be decoded elsewhere."""
        if held.stage is not RequestStage.ALONE and held.lease is not None:
            saves = self._moves.saves(held, held.request.num_computed_tokens, number)
            is_saved = held.saved_tokens >= held.prompt_tokens
            if saves or (not is_saved and self._now_s() - held.asked_s < HELD_S):
                return saves
        elif held.claim is not None and self._now_s() - held.asked_s < HELD_S:
            return []
        del self._requests.held[held.id]
        self.freed.append(held.id)
        if held.stage is RequestStage.ALONE:
            return []
        if held.saved_tokens < held.prompt_tokens:
            self._requests.count_alone("a prompt was not copied in time for who decodes it")
        self._end(held)
        return []

    def _end(self, tracked: Tracked) -> None:
        """Let go of its lease, once no copy to its pages is under way; what is saved is shared."""
        assert tracked.link is not None
        if tracked.lease is None:
            self._requests.let_go(tracked)
        else:
            self._requests.claiming.pop(tracked.id, None)
            self._ending.add(tracked, tracked.link, shares=True, now_s=self._now_s())
