"""How a prompt is looked up: in the cache of the node, or where another node keeps it.

What lives here: NAMING, PROBING and MEETING, until the request is FOUND. What must not: its blocks,
and the lease that it takes for them. Nothing here waits longer than a step's budget. A request
waits for what its own daemon can say at once ``ANSWER_WITHIN_S`` at most, and for bytes of another
node as long as the user has said, unless its own daemon does not answer meanwhile.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING, Final, TypeVar

from kvd.client import Code, KvdError
from kvd.connectors.identity import UnknownWeights, digest_of
from kvd.connectors.refusals import refused_here
from kvd.connectors.vllm.tracked import RequestStage, Tracked

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.client import PendingCall, SyncLease, SyncReceive
    from kvd.connectors.vllm.options import VllmOptions
    from kvd.connectors.vllm.params import Meeting, Transfer
    from kvd.connectors.vllm.sessions import NodeLink, StepBudget
    from kvd.wire.snapshot import Snapshot

T = TypeVar("T")

ANSWER_WITHIN_S: Final = 0.05
"""A look-up or a lease that was looked for twice, and is not here by then, is not waited for."""

NAMED_WITHIN_S: Final = 0.25
"""So long for the files of an adapter to be read, at its first request; reading goes on then."""

PULL_WITHIN_S: Final = 0.5
"""So long for the word of another node, what of a prompt it has cached."""

MEET_WITHIN_S: Final = 2.0
"""By then the node that is to send has opened the room: it says so a step behind its prompt."""

SILENT_WITHIN_S: Final = 1.0
"""So long a daemon may say nothing to one who waits for bytes of another node, and loses more by
computing all of them than by a daemon that has no processor for a moment."""

OPENED_S: Final = 3.0
"""A room that was told of so long ago is open by now, or over: nobody waits ``MEET_WITHIN_S``. The
clocks of two hosts may differ by less; where they differ by more, a room that is opened late is
given up early, or one that is over late."""

MOST_ID_CHARS: Final = 128

LATE: Final = "no answer of the daemon in time"
SILENT: Final = "the daemon does not answer"
LATE_ADAPTER: Final = "the files of its adapter were not read in time"
STOOD_UP: Final = "its room is not open there"
NO_PAGES_HERE: Final = "no pages are free here"
UNLIKE: Final = (
    "prompt-mismatch: what its room has is of another prompt, or of an engine of other weights or "
    "options: compare the lines 'kvd namespace' in the logs of both"
)
UNKNOWN_ADAPTER: Final = "nobody knows the weights of its adapter"

LOOKED_UP: Final = (RequestStage.NAMING, RequestStage.PROBING, RequestStage.MEETING)
"""Of a request that is being looked up. A tuple: to look into a set costs a call for each member of
an enumeration.
"""

BEFORE_BLOCKS: Final = (*LOOKED_UP, RequestStage.FOUND)

UNACCEPTED: Final = "offered"
"""The state of a receive whose source has not said that it sends."""


class LookUps:
    """Those of all requests of one engine.

    Args:
        options: what the user has set.
        budget: what a step may wait.
        now_s: a clock.
        wall_s: the clock that hosts have in common.
    """

    def __init__(
        self,
        options: VllmOptions,
        budget: StepBudget,
        now_s: Callable[[], float],
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.received_tokens = 0
        """Sent by other nodes, since somebody asked."""
        self.claim_ahead: Callable[[NodeLink, Tracked], bool] = lambda *_: False
        """Claims the pages of a request with its look-up, where that is all right; else False."""
        self.wait_for_tier: Callable[[NodeLink, Tracked, int, float], bool] = lambda *_: False
        """Claims a request with the pages of it that lie in a tier, where these come soon enough:
        how many tokens they have, and how many ms they take; else False."""
        self.has_begun: Callable[[NodeLink, Tracked], bool] = lambda *_: False
        """Whether enough of a request has come from another node that it may have blocks."""
        self.as_it_comes: Callable[[], bool] = lambda: False
        """Whether that is asked."""
        self.unmet: list[str] = []
        """Why what another node was to send does not come, of each such prompt since then."""
        self.promise_tokens = options.reserve_tokens if options.save == "all" else 0
        """For so many tokens behind a prompt its lease is sure of pages."""
        self._options = options
        self._budget = budget
        self._now_s = now_s
        self._wall_s = wall_s
        self._look: PendingCall[Snapshot] | None = None
        self._looked_by: NodeLink | None = None
        self._look_s = self._unmet_s = -math.inf
        self._unmet: frozenset[int] = frozenset()
        """Receives that nobody had accepted when the daemon was last asked, at ``_unmet_s``."""

    def begin(self, link: NodeLink, tracked: Tracked) -> None:
        """Look it up, now or when its adapter is known.

        Raises:
            KvdError: nobody can be asked, or nobody knows its adapter.
        """
        tracked.asked_s = self._now_s()  # it is NAMING
        if tracked.naming.known or self._is_named(tracked, tracked.naming.poll):
            self._ask(link, tracked)

    def _is_named(self, tracked: Tracked, poll: Callable[[], str | None]) -> bool:
        """Whether it is known who shares its KV."""
        try:
            if poll() is not None:
                return True
        except UnknownWeights:
            raise _given_up(UNKNOWN_ADAPTER) from None
        if self._now_s() - tracked.asked_s >= NAMED_WITHIN_S:
            raise _given_up(LATE_ADAPTER)
        return False

    def _ask(self, link: NodeLink, tracked: Tracked) -> None:
        """Ask for it; ``asked_s`` is now."""
        transfer = tracked.transfer
        meeting = transfer.meeting
        # Of one token nothing can be loaded: the last one is computed in any case.
        loads_none = tracked.prompt_tokens < 2 or transfer.most_loaded == 0
        if meeting is None or meeting.peer == link.name or loads_none:
            if meeting is not None and meeting.peer == link.name:
                tracked.takes_room = meeting.number
            tracked.stage, tracked.was_missed = RequestStage.PROBING, False
            if not self.claim_ahead(link, tracked):
                self.probe(link, tracked)
            return
        try:
            self._meet(link, tracked, meeting)
        except KvdError as error:
            # No name of a node, or nobody can be asked: that is said once more then.
            self.unmet.append(why_unmet(error))
            self.probe(link, tracked)

    def _meet(self, link: NodeLink, tracked: Tracked, meeting: Meeting) -> None:
        # Where there is a room somebody keeps the prompt for us; without, what is cached there.
        tracked.stage = RequestStage.MEETING
        tracked.call = link.ask(
            link.node.begin_receive,
            meeting.number or None,
            tracked.numbered(link.node),
            meeting.peer,
            namespace=tracked.namespace,
            promise_tokens=self.promise_tokens,
            deadline_s=self._options.deadline_s,
            request_id=_as_name(tracked.id) if meeting.number else "",
            is_open=meeting.open,
            as_it_comes=self._fills_as_it_comes(tracked.transfer),
            tiers="now",  # what its own node has below the pool comes from the other one as soon
        )
        if meeting.number:
            tracked.probe = link.ask(
                link.node.begin_match, tracked.numbered(link.node), namespace=tracked.namespace
            )

    def _fills_as_it_comes(self, transfer: Transfer) -> bool:
        """Whether its blocks may be filled while the rest of it is computed."""
        is_kept = transfer.meeting is not None and transfer.meeting.number > 0
        return (
            is_kept and not transfer.sends and transfer.most_loaded is None and self.as_it_comes()
        )

    def probe(self, link: NodeLink, tracked: Tracked) -> None:
        """Ask how much of it is cached; nothing of that is kept for it.

        Raises:
            KvdError: nobody can be asked.
        """
        tracked.stage, tracked.asked_s = RequestStage.PROBING, self._now_s()
        tracked.was_missed = False
        tracked.call = link.ask(
            link.node.begin_match, tracked.numbered(link.node), namespace=tracked.namespace
        )

    def is_over(self, link: NodeLink, tracked: Tracked, *, is_idle: bool) -> bool:
        """Whether it is FOUND, were it with 0 tokens; ``Claims`` says it of what it claims ahead.

        Args:
            link: of its session.
            tracked: it is one of ``LOOKED_UP``.
            is_idle: the engine has nothing else to do, so it may wait for another node too.

        Raises:
            KvdError: it cannot be looked up.
        """
        if tracked.stage is RequestStage.NAMING:
            poll = tracked.naming.poll
            if not self._is_named(tracked, lambda: self._budget.heard(poll)):
                return False
            tracked.asked_s = self._now_s()
            self._ask(link, tracked)
        if tracked.stage is RequestStage.MEETING and not self._is_met(link, tracked, is_idle):
            return False
        return tracked.stage is not RequestStage.PROBING or self.is_probed(link, tracked)

    def drop(self, link: NodeLink, tracked: Tracked) -> None:
        """It is not wanted any more; what it has got goes back."""
        for call in (tracked.call, tracked.probe):
            if call is not None:
                link.cancel(call)
        receive, tracked.call, tracked.probe, tracked.receive = tracked.receive, None, None, None
        tracked.is_arriving = False
        if receive is None or tracked.lease is not None:
            return

        def release() -> None:
            """It was delivered before that, to nobody: then there is a lease to be given back."""
            with contextlib.suppress(KvdError):
                link.say(receive.lease.leave)

        link.quietly(receive.begin_cancel, otherwise=release)

    # ---- in the cache of the node ------------------------------------------------------------

    def is_probed(self, link: NodeLink, tracked: Tracked) -> bool:
        """``is_over``, of one that is PROBING.

        Raises:
            KvdError: it cannot be looked up.
        """
        if tracked.call is None:
            return False
        found = self._budget.answered(link, tracked.call)
        if found is None and self.is_late(link, tracked, ANSWER_WITHIN_S):
            found = link.poll(tracked.call)
            if found is None:
                link.cancel(tracked.call)
                self.unsure(tracked)
                return True
        if found is None:
            return False
        n_more, ms = tracked.loadable(found.tokens, found.tier_tokens), found.tier_ms
        if n_more and self.wait_for_tier(link, tracked, n_more, ms):
            return False
        self.found(tracked, found.tokens)
        return True

    def unsure(self, tracked: Tracked) -> None:
        """The daemon has not said in time how much of it is cached.

        What it computes may be saved all the same, once the daemon is well.
        """
        self.found(tracked, 0)
        tracked.is_unsure = True

    def is_late(self, link: NodeLink, tracked: Tracked, within_s: float) -> bool:
        """Whether an answer is overdue, after all that has come was read; it was not here just now.

        It is looked for in two steps at least: one of them may take longer than that, and leave the
        daemon no processor meanwhile.
        """
        was_missed, tracked.was_missed = tracked.was_missed, True
        now_s = self._now_s()
        if now_s - tracked.asked_s < within_s or not was_missed:
            return False
        link.look(now_s)
        link.doubt(now_s)
        return True

    def found(self, tracked: Tracked, n_tokens: int) -> None:
        """So much of it is cached."""
        tracked.call = tracked.probe = None
        tracked.found_tokens = n_tokens
        tracked.stage = RequestStage.FOUND

    # ---- where another node keeps it ---------------------------------------------------------

    def _is_met(self, link: NodeLink, tracked: Tracked, is_idle: bool) -> bool:  # noqa: FBT001
        """Whether it is delivered; or is probed from now on, since it is not going to be."""
        assert tracked.call is not None
        try:
            if tracked.receive is None and not self._is_admitted(
                link, tracked, self._heard(link, tracked.call, is_idle)
            ):
                return self._is_admitted_late(link, tracked)
            lease = self._heard(link, tracked.call, is_idle)
        except KvdError as error:
            # What was to come does not: what is cached here may be enough.
            self.look_again(link, tracked, why_unmet(error))
            return True
        if lease is not None:
            self.delivered(link, tracked, lease)
            return True
        if self.has_begun(link, tracked):
            return True
        if link.is_silent and link.silent_s(self._now_s()) >= SILENT_WITHIN_S:
            raise _given_up(SILENT)
        if self._is_stood_up(link, tracked):
            self.look_again(link, tracked, STOOD_UP)
            return True
        if self._now_s() - tracked.asked_s >= ANSWER_WITHIN_S:
            link.doubt(self._now_s())
        return False

    def _heard(self, link: NodeLink, call: PendingCall[T], is_idle: bool) -> T | None:  # noqa: FBT001
        return self._budget.answered(link, call, is_idle=True) if is_idle else link.poll(call)

    def _is_admitted(self, link: NodeLink, tracked: Tracked, receive: SyncReceive | None) -> bool:
        """Whether its own daemon has pages for it, and has asked the other one."""
        if receive is None:
            return False
        tracked.receive = receive
        tracked.call = link.ask(receive.begin_done)
        return True

    def _is_admitted_late(self, link: NodeLink, tracked: Tracked) -> bool:
        """Whether the meeting is given up, since the daemon has no pages for it now.

        It answers in the order in which it was asked, and a receive that has its pages at once.
        So one behind which a look-up is answered waits for room, or for its peer.
        """
        assert tracked.call is not None
        if tracked.probe is not None:
            found = link.poll(tracked.probe)
            if found is not None:
                if self._is_admitted(link, tracked, link.poll(tracked.call)):
                    return False  # both have come with one read
                link.cancel(tracked.call)
                self.unmet.append(NO_PAGES_HERE)
                self.found(tracked, found.tokens)
                return True
        within_s = PULL_WITHIN_S if tracked.probe is None else ANSWER_WITHIN_S
        if not self.is_late(link, tracked, within_s):
            return False
        if self._is_admitted(link, tracked, link.poll(tracked.call)):
            return False
        self.drop(link, tracked)
        self.unsure(tracked)
        return True

    def _is_stood_up(self, link: NodeLink, tracked: Tracked) -> bool:
        """Whether nobody has opened its room over there, though it is time.

        It was over, or of before a restart; the daemons wait until the deadline, since an engine
        may come. Which of a receive's states it is in is seen in a snapshot: one for all that wait.
        """
        late_s = tracked.asked_s + self._opened_within_s(tracked)
        if tracked.receive is None or self._now_s() < late_s:
            return False
        if self._looked_by is not link:
            self._look, self._looked_by, self._unmet_s = None, link, -math.inf
        if self._unmet_s < late_s and self._look is None:
            self._look, self._look_s = link.ask(link.node.begin_snapshot), self._now_s()
        if self._look is not None:
            try:
                seen = link.poll(self._look)
            except KvdError:
                self._look = None
                raise
            if seen is not None:
                self._look, self._unmet_s = None, self._look_s
                self._unmet = frozenset(
                    room.part for room in seen.rooms if room.state == UNACCEPTED
                )
        return self._unmet_s >= late_s and tracked.receive.id in self._unmet

    def _opened_within_s(self, tracked: Tracked) -> float:
        """How long it is given for its room to be opened over there."""
        meeting = tracked.transfer.meeting
        if meeting is not None and meeting.soon:
            return self._options.deadline_s
        told_at = meeting.at if meeting is not None else 0.0
        # What no clock says is told by a router, at best: such a room is as good as an old one.
        is_old = told_at != 0 and not told_at >= self._wall_s() - OPENED_S
        return ANSWER_WITHIN_S if is_old else MEET_WITHIN_S

    def delivered(self, link: NodeLink, tracked: Tracked, lease: SyncLease) -> None:
        """All of it has come from another node, and is in the pages of that lease."""
        tracked.is_arriving = False
        receive = tracked.receive
        assert receive is not None
        if tracked.probe is not None:
            link.cancel(tracked.probe)
        self.received_tokens += receive.n_tokens - receive.prefix_len
        tracked.sent_from = receive.prefix_len
        # All of it, its last partial page too; that page is written again when it is full.
        self.found(tracked, receive.n_tokens)
        tracked.took(lease, known_tokens=receive.n_tokens, filled_tokens=receive.n_tokens)

    def look_again(self, link: NodeLink, tracked: Tracked, why: str) -> None:
        """It does not come: what is cached here may be enough.

        Raises:
            KvdError: nobody can be asked.
        """
        self.unmet.append(why)
        self.drop(link, tracked)
        self.probe(link, tracked)


def _as_name(request_id: str) -> str:
    """A request's number as daemons take it; vLLM makes it of a header that its users send."""
    if len(request_id) <= MOST_ID_CHARS and request_id.isprintable():
        return request_id
    return digest_of(request_id)


def why_unmet(error: KvdError) -> str:
    """In a word; where nodes or engines differ, in words that are the same for each prompt."""
    if error.code == Code.PROMPT_MISMATCH.value and "peer_epoch" not in error.refusal.numbers:
        return UNLIKE
    is_of_nodes = error.code in {Code.LAYOUT_MISMATCH.value, Code.PROMPT_MISMATCH.value}
    return f"{error.code}: {error.refusal.message}" if is_of_nodes else error.code


def _given_up(why: str) -> KvdError:
    return refused_here(Code.DEADLINE, why)
