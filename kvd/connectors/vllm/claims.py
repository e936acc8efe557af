"""Leases that requests have asked for: until they come, are refused, or come too late.

A claim locks what is cached of the prompt, and takes pages for the rest of it. Its answer says how
much is cached, so it stands for a look-up too: one message in the place of two, and what was found
is not evicted before it is loaded. A request claims so as it comes while few others wait before it,
as it has blocks a step later then. Those behind them are looked up alone: an engine with a long
queue keeps no pages for it. They claim once vLLM has given them blocks, and before that for a
prompt which another node will decode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd.client import Code, KvdError
from kvd.connectors.vllm.lookup import ANSWER_WITHIN_S, LATE, was_said_here
from kvd.connectors.vllm.tracked import RequestStage

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.connectors.vllm.lookup import LookUps
    from kvd.connectors.vllm.options import VllmOptions
    from kvd.connectors.vllm.requests import Requests
    from kvd.connectors.vllm.sessions import NodeLink, StepBudget
    from kvd.connectors.vllm.tracked import Tracked

FULL: Final = frozenset({Code.DEADLINE.value, Code.NO_ROOM.value, Code.TOO_LARGE.value})
"""With these the daemon refuses a lease whose pages are not free now."""

MOST_AHEAD: Final = 8
MOST_AHEAD_TOKENS: Final = 32_768
"""So many requests have pages before they have blocks, and of so many tokens all together."""


class Claims:
    """Those of one engine."""

    def __init__(
        self,
        options: VllmOptions,
        requests: Requests,
        look_ups: LookUps,
        budget: StepBudget,
        now_s: Callable[[], float],
    ) -> None:
        self._saves = options.save != "none"
        self.most_ahead = MOST_AHEAD
        self._requests = requests
        self._look_ups = look_ups
        look_ups.claim_ahead = self.ahead
        self._budget = budget
        self._now_s = now_s

    def ahead(self, link: NodeLink, tracked: Tracked) -> bool:
        """Claim its pages with its look-up; whether that is so, and needs no other."""
        waiting = self._requests.ahead
        n_tokens = tracked.request.num_prompt_tokens
        for other in waiting.values():
            n_tokens += other.request.num_prompt_tokens
        if not self._saves or len(waiting) >= self.most_ahead or n_tokens > MOST_AHEAD_TOKENS:
            return False
        waiting[tracked.id] = tracked
        self.begin(link, tracked, is_whole=True, is_first=True)
        return True

    def is_found(self, link: NodeLink, tracked: Tracked) -> bool:
        """Whether it is FOUND, by its claim, were it with 0 tokens; or is ALONE.

        Raises:
            KvdError: there are no pages for it, and it cannot be looked up.
        """
        if tracked.claim is not None:
            self.take(tracked)
        if tracked.claim is not None:
            if self._look_ups.is_late(link, tracked, ANSWER_WITHIN_S):
                self.take(tracked)
                if tracked.claim is not None:
                    self._look_ups.unsure(tracked)
        elif tracked.stage is RequestStage.PROBING and tracked.call is None:
            self._look_ups.unsure(tracked)
        if tracked.stage is RequestStage.PROBING:
            return self._look_ups.is_probed(link, tracked)
        return True

    def begin(
        self, link: NodeLink, tracked: Tracked, *, is_whole: bool, is_first: bool = False
    ) -> None:
        """Lock what is cached, and take pages for the rest; never waits for room.

        ``is_first``: nothing was asked about it before, and most often nothing will be again: then
        the daemon need not keep its tokens.
        """
        try:
            tracked.claim = link.ask(
                link.node.begin_lease,
                tracked.request.prompt_token_ids if is_first else tracked.numbered(link.node),
                extra_keys=tracked.extra if is_first else None,
                hold="all" if is_whole else "prefix",
                namespace=tracked.naming.known,
                promise_tokens=self._look_ups.promise_tokens if is_whole else 0,
                deadline_s=0.0,
            )
        except KvdError as error:
            self._requests.alone_after(tracked, error)
            return
        tracked.claims_all = is_whole
        self._requests.claiming[tracked.id] = tracked

    def take_all(self) -> None:
        """``take`` each that waits for its lease."""
        for tracked in list(self._requests.claiming.values()):
            self.take(tracked)

    def take(self, tracked: Tracked) -> None:
        """Take its lease, if it has come; give it up, if it will not, or not in time."""
        link, claim = tracked.link, tracked.claim
        assert link is not None
        assert claim is not None
        try:
            # Waited for: a short request has no later step in which it could be saved.
            lease = self._budget.answered(link, claim)
        except KvdError as error:
            self._refused(link, tracked, error)
            return
        if lease is None:
            if tracked.waits_for_load and self._now_s() - tracked.asked_s >= ANSWER_WITHIN_S:
                link.doubt(self._now_s())
                self._requests.alone(tracked, LATE)
            return
        tracked.claim = None
        del self._requests.claiming[tracked.id]
        found_tokens = lease.prefix_len
        known_tokens = tracked.known_tokens if tracked.claims_all else found_tokens
        tracked.took(lease, known_tokens=known_tokens, filled_tokens=found_tokens)
        if tracked.takes_room:
            self._requests.end_room(link, tracked)
        if tracked.stage is RequestStage.PROBING or tracked.stage is RequestStage.FOUND:
            self._look_ups.found(tracked, found_tokens)
            return  # whoever gives it blocks has it looked at
        self._requests.due.soon(tracked)
        if tracked.stage is RequestStage.CLAIMING:
            if found_tokens < tracked.loads_to:
                self._requests.alone(tracked, "evicted between look-up and lease")
            else:
                self._requests.load(tracked)

    def _refused(self, link: NodeLink, tracked: Tracked, error: KvdError) -> None:
        """Its claim has ended in that error."""
        tracked.claim = None
        del self._requests.claiming[tracked.id]
        is_full = error.code in FULL and not was_said_here(error)
        if is_full and tracked.stage is RequestStage.PROBING:
            self._look_up(link, tracked)
            return
        if error.code == Code.DEADLINE.value and tracked.stage is RequestStage.PROBING:
            return  # the daemon has said nothing: who asks next hears that it is not known
        is_hit = tracked.waits_for_load or (
            tracked.stage is RequestStage.FOUND and tracked.found_tokens > 0
        )
        if is_full and tracked.claims_all and is_hit:
            # A full pool serves what is in it: without pages of its own nothing is saved.
            self.begin(link, tracked, is_whole=False)
        elif tracked.is_unsure and was_said_here(error):
            self._requests.give_up(tracked)  # that was counted when it was looked up
        else:
            self._requests.alone_after(tracked, error)

    def _look_up(self, link: NodeLink, tracked: Tracked) -> None:
        """There are no pages for it now: what is cached is asked for alone."""
        self._requests.ahead.pop(tracked.id, None)
        try:
            self._look_ups.probe(link, tracked)
        except KvdError as error:
            self._requests.alone_after(tracked, error)
