"""Requests whose blocks are filled while their prompt still comes from another node.

The node that computes a prompt sends it as it goes, and the daemon of this one says how far it has
come and is what was sent. Once some of it has, the request is FOUND with all of it: vLLM gives it
blocks, and they are filled in parts, each ordered when its pages are here. What is left for the end
is the last chunk. Before that nothing of a vLLM block is held for who waits.

No token is computed from a part. vLLM hears that the blocks are filled when the last order is over,
which is made with the lease of the whole prompt alone; the workers see to it that all others are
over by then, and that it fails where one of them has. If the rest does not come, the request is
told to have failed, once no part of it moves any more, and is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd.client import KvdError
from kvd.connectors.vllm.lookup import ANSWER_WITHIN_S, SILENT, SILENT_WITHIN_S, why_unmet
from kvd.connectors.vllm.tracked import RequestStage

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.connectors.vllm.lookup import LookUps
    from kvd.connectors.vllm.moves import Moves
    from kvd.connectors.vllm.orders import CopyOrder
    from kvd.connectors.vllm.requests import Requests
    from kvd.connectors.vllm.sessions import NodeLink, StepBudget
    from kvd.connectors.vllm.tracked import Tracked

CUT_SHORT: Final = "what another node was sending did not come to its end"


class ArrivingRequests:
    """Those of one engine.

    Args:
        requests: where they are.
        look_ups: who waits for them until something has come.
        moves: makes their orders.
        budget: what a step may wait.
        now_s: a clock.
    """

    def __init__(
        self,
        requests: Requests,
        look_ups: LookUps,
        moves: Moves,
        budget: StepBudget,
        now_s: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._look_ups = look_ups
        look_ups.has_begun = self.has_begun
        look_ups.as_it_comes = lambda: self.is_on and moves.can_load_in_parts
        self.is_on = True
        """Whether the engine can be told that a request has failed of which a part was loaded."""
        self._moves = moves
        self._budget = budget
        self._now_s = now_s

    def has_begun(self, link: NodeLink, tracked: Tracked) -> bool:
        """Whether so much has come that its blocks may be filled; then it is FOUND."""
        receive = tracked.receive
        if receive is None or receive.arriving is None:
            return False
        if tracked.probe is not None:
            link.cancel(tracked.probe)
            tracked.probe = None
        tracked.is_arriving = True
        tracked.found_tokens = receive.n_tokens
        tracked.stage = RequestStage.FOUND
        return True

    def look(self, link: NodeLink, tracked: Tracked) -> None:
        """If it is one, and has no blocks yet: see whether all of it has come, or will not.

        Raises:
            KvdError: it cannot be looked up anew.
        """
        if not tracked.is_arriving or tracked.call is None:
            return
        try:
            lease = link.poll(tracked.call)
        except KvdError as error:
            self._look_ups.look_again(link, tracked, why_unmet(error))
            return
        if lease is not None:
            self._look_ups.delivered(link, tracked, lease)

    def loads(self, *, is_idle: bool) -> list[CopyOrder]:
        """Fill the blocks whose pages have come; all that are left, once all of it has.

        ``is_idle``: the engine computes nothing, and waits a moment for what comes.
        """
        loads: list[CopyOrder] = []
        for tracked in list(self._requests.arriving.values()):
            loads += self._loads_of(tracked, is_idle=is_idle)
        return loads

    def _loads_of(self, tracked: Tracked, *, is_idle: bool) -> list[CopyOrder]:
        link, call, receive = tracked.link, tracked.call, tracked.receive
        assert link is not None
        assert call is not None
        assert receive is not None
        try:
            lease = self._budget.answered(link, call, is_idle=is_idle)
        except KvdError as error:
            self._look_ups.unmet.append(why_unmet(error))
            self._requests.alone(tracked, CUT_SHORT)
            return []
        if lease is not None:
            del self._requests.arriving[tracked.id]
            self._look_ups.delivered(link, tracked, lease)
            self._requests.load(tracked)
            return []
        if link.is_silent and link.silent_s(self._now_s()) >= SILENT_WITHIN_S:
            self._requests.alone(tracked, SILENT)
            return []
        if self._now_s() - tracked.asked_s >= ANSWER_WITHIN_S:
            link.doubt(self._now_s())
        come = receive.arriving
        return [] if come is None else self._moves.loads_part(tracked, come)
