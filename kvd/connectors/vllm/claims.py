"""Leases that requests have asked for: until they come, are refused, or come too late.

A claim locks what is cached of the prompt, and takes pages for the rest of it. Its answer says how
much is cached, so it stands for a look-up too: one message in the place of two, and what was found
is not evicted before it is loaded. A request claims so as it comes while few others wait before it,
as it has blocks a step later then. Those behind them are looked up alone: an engine with a long
queue keeps no pages for it. They claim once vLLM has given them blocks, and before that for a
prompt which another node will decode.

Where the daemon says that a tier below the pool has more of the prompt, that is asked for: by
another claim, which is answered when those pages are in the pool. It waits no longer than the
engine would compute them, as the user has said, and other requests go on meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd.client import Code, KvdError
from kvd.connectors.refusals import is_short, was_said_here
from kvd.connectors.vllm.lookup import ANSWER_WITHIN_S, LATE
from kvd.connectors.vllm.tracked import RequestStage

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.client import SyncLease
    from kvd.connectors.vllm.lookup import LookUps
    from kvd.connectors.vllm.options import VllmOptions
    from kvd.connectors.vllm.requests import Requests
    from kvd.connectors.vllm.sessions import NodeLink, StepBudget
    from kvd.connectors.vllm.tracked import Tracked

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
        self._computes_per_s = options.computes_per_s
        self.most_ahead = MOST_AHEAD
        self._requests = requests
        self._look_ups = look_ups
        look_ups.claim_ahead = self.ahead
        look_ups.wait_for_tier = self.wait_for_tier
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
            within_s = ANSWER_WITHIN_S + (tracked.tier_wait_s or 0.0)
            if self._look_ups.is_late(link, tracked, within_s):
                self.take(tracked)
                if tracked.claim is not None:
                    self._is_late(link, tracked)
        elif tracked.stage is RequestStage.PROBING and tracked.call is None:
            self._look_ups.unsure(tracked)
        if tracked.stage is RequestStage.PROBING:
            return self._look_ups.is_probed(link, tracked)
        return True

    def _is_late(self, link: NodeLink, tracked: Tracked) -> None:
        """Its claim is not answered: it is computed, unless it has waited for a tier alone."""
        claim = tracked.claim
        if tracked.tier_wait_s is None or claim is None or link.is_silent:
            self._look_ups.unsure(tracked)
            return
        tracked.claim = None
        del self._requests.claiming[tracked.id]
        link.cancel(claim)
        self._look_up(link, tracked)

    def wait_for_tier(self, link: NodeLink, tracked: Tracked, n_tokens: int, ms: float) -> bool:
        """Claim it with what a tier has of it, once; false: that is computed as soon.

        Args:
            link: of its session.
            tracked: it has no claim, and no lease.
            n_tokens: so many of them lie there.
            ms: and take about so long; 0: nobody knows.
        """
        if not self._is_soon(tracked, n_tokens, ms):
            return False
        tracked.tier_wait_s = wait_s = n_tokens / self._computes_per_s
        tracked.stage, tracked.call = RequestStage.PROBING, None
        tracked.asked_s, tracked.was_missed = self._now_s(), False
        self.begin(link, tracked, is_whole=True, tier_wait_s=wait_s)
        return True

    def _is_soon(self, tracked: Tracked, n_tokens: int, ms: float) -> bool:
        """Whether a tier has more of it, and that comes before it would be computed."""
        rate = self._computes_per_s
        if not n_tokens or rate <= 0 or tracked.tier_wait_s is not None:
            return False
        return ms * rate < n_tokens * 1e3

    def begin(
        self,
        link: NodeLink,
        tracked: Tracked,
        *,
        is_whole: bool,
        is_first: bool = False,
        tier_wait_s: float = 0.0,
    ) -> None:
        """Lock what is cached, and take pages for the rest; never waits for room.

        ``is_first``: nothing was asked about it before, and most often nothing will be again: then
        the daemon need not keep its tokens. ``tier_wait_s``: pages that lie in a tier are waited
        for so long.
        """
        try:
            tracked.claim = link.ask(
                link.node.begin_lease,
                tracked.request.prompt_token_ids if is_first else tracked.numbered(link.node),
                extra_keys=tracked.extra if is_first else None,
                hold="all" if is_whole else "prefix",
                namespace=tracked.naming.known,
                promise_tokens=self._look_ups.promise_tokens if is_whole else 0,
                # A tier is waited for until half of it is over.
                deadline_s=2 * tier_wait_s,
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
            is_waited_for = tracked.tier_wait_s is None or tracked.stage is not RequestStage.PROBING
            lease = self._budget.answered(link, claim) if is_waited_for else link.poll(claim)
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
        tiers = lease.tiers
        if (tiers.tokens or tiers.promoted_tokens) and self._goes_on_in_tier(link, tracked, lease):
            return
        self._took(link, tracked, lease)

    def _goes_on_in_tier(self, link: NodeLink, tracked: Tracked, lease: SyncLease) -> bool:
        """Whether its claim is made anew, since a tier has more of it."""
        upto, tiers = lease.prefix_len, lease.tiers
        tracked.from_tier = range(upto - tiers.promoted_tokens, upto)
        if tracked.stage is not RequestStage.PROBING:
            return False
        n_more = tracked.loadable(upto, tiers.tokens)
        if not self._is_soon(tracked, n_more, tiers.ms):
            return False
        link.say(lease.leave)
        return self.wait_for_tier(link, tracked, n_more, tiers.ms)

    def _took(self, link: NodeLink, tracked: Tracked, lease: SyncLease) -> None:
        """Its lease is here."""
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
        is_full = is_short(error)
        if is_full and tracked.stage is RequestStage.PROBING:
            self._look_up(link, tracked)
            return
        if error.code == Code.DEADLINE.value and tracked.stage is RequestStage.PROBING:
            # The daemon has said nothing: who asks next hears that it is not known. Of a process
            # that is stopped a call ends before anybody finds it late.
            if was_said_here(error):
                link.doubt(self._now_s())
            return
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
