"""The requests of one engine that are here, by what they wait for, and how one goes on without kvd.

Whatever fails ends in ``alone``: what is held for the request goes back, whoever waits for its
blocks hears that nobody fills them, and vLLM computes it. What must not live here: what is asked of
the daemon (``lookup``, ``claims``), what is copied (``moves``).
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Any, Final

from kvd.client import Code, KvdError
from kvd.connectors.refusals import was_said_here
from kvd.connectors.vllm.lookup import (
    LATE,
    LATE_ADAPTER,
    SILENT,
    UNKNOWN_ADAPTER,
)
from kvd.connectors.vllm.tracked import RequestStage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvd.client import PendingCall
    from kvd.connectors.vllm.endings import Endings
    from kvd.connectors.vllm.log import ConnectorLog
    from kvd.connectors.vllm.lookup import LookUps
    from kvd.connectors.vllm.sessions import NodeLink, SessionLife
    from kvd.connectors.vllm.tracked import Tracked


class Counts:
    """What has come of it, for metrics."""

    def __init__(self) -> None:
        self.hit_tokens = 0
        """Loaded, or about to be."""
        self.received_tokens = 0
        """Of these, sent by another node."""
        self.tier_tokens = 0
        """Of those that are loaded, read from a tier below the pool."""
        self.unmet = 0
        """Prompts of which another node was to send KV, and did not."""
        self.failed_loads = 0
        """Requests that were computed after all."""
        self.went_alone = 0
        """Requests that were computed without kvd, or went on without it, for whatever reason."""
        self.failures = 0
        """Calls that ended in an error."""
        self.odd_params = 0
        """Requests with ``kv_transfer_params`` that made no sense."""


class DueRequests:
    """Which of those that vLLM runs a step has to look at: those that may have completed a block.

    A request completes one in as many decode steps as a block has tokens, so a look at each would
    be for nothing most often. What is known of it is how many tokens it has to compute before more
    of it can be saved. No request computes more in a step than the one that computes most in it.
    These are added up, step by step, and it is looked at once that sum has grown by its tokens:
    never too late, and too early where others compute more.

    That holds for as long as it runs. Whoever gives it blocks anew, or pages, says ``soon``.
    """

    def __init__(self) -> None:
        self._passed = 0
        """So many tokens may have been computed of one request, in all steps together."""
        self._soon: dict[str, Tracked] = {}
        """Those that the next step has to look at which they are in."""
        self._at: dict[str, int] = {}
        """When a step has to look at each of the others, as that is counted."""
        self._looks: list[tuple[int, int, Tracked]] = []
        """The same, the next one first; what was said of one before is there too."""
        self._numbers = itertools.count()

    def soon(self, tracked: Tracked) -> None:
        """Look at it in the next step that it is in."""
        self._soon[tracked.id] = tracked

    def after(self, tracked: Tracked, n_tokens: int) -> None:
        """Look at it in the step that may have computed so many tokens more of it."""
        at, before = self._passed + max(1, n_tokens), self._at.get(tracked.id)
        if before is None or at < before:
            self._at[tracked.id] = at
            heapq.heappush(self._looks, (at, next(self._numbers), tracked))

    def never(self, tracked: Tracked) -> None:
        """Nobody need look at it."""
        self._soon.pop(tracked.id, None)
        self._at.pop(tracked.id, None)

    def take(self, scheduled: Mapping[str, int]) -> list[Tracked]:
        """Those that this step has to look at; it is said anew when to look at them again.

        Args:
            scheduled: how many tokens the step computes of each request that is in it.
        """
        if not scheduled:
            return []
        self._passed += max(scheduled.values()) or 1
        soon, at, looks = self._soon, self._at, self._looks
        while looks and looks[0][0] <= self._passed:
            due, _, tracked = heapq.heappop(looks)
            if at.get(tracked.id) == due:
                soon[tracked.id] = tracked
        found: list[Tracked] = []
        for request_id, tracked in list(soon.items()):
            if request_id in scheduled:
                found.append(tracked)
                del soon[request_id]
                at.pop(request_id, None)
        return found


class Requests:
    """All of them.

    Args:
        sessions: the session that there is now.
        look_ups: what of a request that is given up is taken back.
        ending: where its lease goes.
        log: where it is told that a request goes on without kvd.
    """

    def __init__(
        self,
        sessions: SessionLife,
        look_ups: LookUps,
        ending: Endings,
        log: ConnectorLog,
    ) -> None:
        self.counts = Counts()
        self.here: dict[str, Tracked] = {}
        """Those that vLLM has."""
        self.claiming: dict[str, Tracked] = {}
        """Those whose lease has not come yet."""
        self.arriving: dict[str, Tracked] = {}
        """Those that have blocks, and are still received."""
        self.ahead: dict[str, Tracked] = {}
        """Those that have claimed pages, and have no blocks yet."""
        self.loading: dict[str, Tracked] = {}
        """Those whose lease is here, and whose blocks are to be filled with the next step."""
        self.held: dict[str, Tracked] = {}
        """Those that are over, and of which not all is ordered yet."""
        self.due = DueRequests()
        """When to look at each of those that vLLM runs."""
        self.unfilled: list[str] = []
        """To be reported as not loaded, with the next step."""
        self._sessions = sessions
        self._look_ups = look_ups
        self._ending = ending
        self._log = log
        self._handles: list[PendingCall[Any]] = []
        """Calls of a session that was given up."""

    def all_of_them(self) -> list[Tracked]:
        """Those that are over too, as long as something of them is to be ordered."""
        return [*self.here.values(), *self.held.values()]

    def load(self, tracked: Tracked) -> None:
        """Its lease is here: its blocks are filled with the next step."""
        tracked.stage = RequestStage.LOADING
        self.loading[tracked.id] = tracked

    def alone(self, tracked: Tracked, why: str) -> None:
        """It is computed as if kvd were not there."""
        if tracked.stage is RequestStage.ALONE:
            return
        if tracked.waits_for_load:
            self.counts.failed_loads += 1
        self.give_up(tracked)
        self.count_alone(why)

    def give_up(self, tracked: Tracked) -> None:
        """Nothing comes of it here any more, and nobody counts it."""
        if tracked.stage is RequestStage.ALONE:
            return
        self._not_loaded(tracked)
        tracked.stage = RequestStage.ALONE
        self.let_go(tracked)

    def count_alone(self, why: str) -> None:
        """A request goes on without kvd, or a part of it does."""
        self.counts.went_alone += 1
        self._log.alone(why)

    def _not_loaded(self, tracked: Tracked) -> None:
        """Whoever waits for its blocks hears that nobody fills them; the workers say it of others.

        ``loading`` has those of which the workers have not been told.
        """
        is_untold = self.loading.pop(tracked.id, None) is not None
        if is_untold or tracked.stage is RequestStage.CLAIMING:
            self.unfilled.append(tracked.id)

    def let_go(self, tracked: Tracked) -> None:
        """Nothing is held for it any more; nothing of it is shared that was not before."""
        self.claiming.pop(tracked.id, None)
        self.arriving.pop(tracked.id, None)
        self.ahead.pop(tracked.id, None)
        link, claim, tracked.claim = tracked.link, tracked.claim, None
        if link is None:
            return
        if link is not self._sessions.link:
            # Its session is being closed, in a thread that cancels these first.
            calls = (tracked.call, tracked.probe, claim, tracked.extension, tracked.opening)
            self._handles += [call for call in calls if call is not None]
            tracked.call = tracked.probe = tracked.extension = tracked.receive = None
            tracked.lease = tracked.opening = tracked.send = None
            return
        self._look_ups.drop(link, tracked)
        self.end_room(link, tracked)
        if claim is not None:
            link.cancel(claim)
        self._ending.add(tracked, link, shares=False)

    def end_room(self, link: NodeLink, tracked: Tracked) -> None:
        """What this node keeps for it needs to be kept no more."""
        room, tracked.takes_room = tracked.takes_room, 0
        if room:
            link.quietly(link.node.begin_keep_room, room, 0.0)

    def alone_after(self, tracked: Tracked, error: KvdError) -> None:
        """A call for it ended in that error: it is computed as if kvd were not there."""
        self.alone(tracked, _told(error))

    def take_handles(self) -> list[PendingCall[Any]]:
        """Calls of sessions that were given up; once each."""
        handles, self._handles = self._handles, []
        return handles


def _told(error: KvdError) -> str:
    """Why a request goes on alone, in the words that are counted."""
    if error.refusal.message in {SILENT, LATE_ADAPTER, UNKNOWN_ADAPTER}:
        return error.refusal.message
    if error.code == Code.DEADLINE.value and was_said_here(error):
        return LATE  # whether pages are free nobody has said
    if error.code == Code.TOO_LARGE.value and was_said_here(error):
        return f"{error.code}: its tokens are more than the daemon reads at once"
    return f"{error.code}: {_WHY[error.code]}" if error.code in _WHY else error.code


_WHY: Final = {
    Code.DEADLINE.value: "no pages are free",
    Code.NO_ROOM.value: "no pages are free",
    Code.TOO_LARGE.value: "the pool is smaller than the prompt",
    Code.UNREACHABLE.value: "the daemon has ended",
    Code.POOL_CHANGED.value: "the daemon was restarted with other memory",
}
