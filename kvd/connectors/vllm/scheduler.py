"""The scheduler's half: which tokens the cache has, whose pages they are, and what is copied when.

A request is looked up when it comes, and the answer is most often here when the scheduler wants it.
Where few wait before it, that is a lease at once, see ``claims``; else nothing is owned before vLLM
has given it blocks. While it computes, whole blocks are copied to the pages of its lease, and said
to be written; at its end the lease is released, with what was generated. KV is never said to be
written before all ranks have said that it is, each by the number of the order, and all that was
ordered before it too.

A step, in order: of each request that vLLM may schedule it asks ``matched``; of one that it does it
says ``given_blocks``, and its lease is asked for, unless it has one. ``step`` takes the leases that
have come, and orders loads, then saves of what is computed with it, of those that complete a block.
The workers copy beside the steps, as long as it takes, and ``reported`` hears of what is over;
vLLM's blocks are held by each order until then. ``arrived`` and ``finished`` are said in between.

A step waits for the daemon ``kvd.probe_wait_s`` in all, and a request no longer than
``ANSWER_WITHIN_S`` for what the daemon of its own node can say at once. Whatever fails ends in
computing; no error leaves this module.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from kvd.client import KvdError
from kvd.connectors.vllm.arrivals import ArrivingRequests
from kvd.connectors.vllm.beside import RegularLook, in_thread
from kvd.connectors.vllm.claims import Claims
from kvd.connectors.vllm.endings import Endings
from kvd.connectors.vllm.held import HeldRequests
from kvd.connectors.vllm.identity import RequestNamespace
from kvd.connectors.vllm.log import ConnectorLog
from kvd.connectors.vllm.lookup import (
    ANSWER_WITHIN_S,
    BEFORE_BLOCKS,
    LATE,
    LATE_ADAPTER,
    LOOKED_UP,
    SILENT,
    LookUps,
)
from kvd.connectors.vllm.media import NO_TOKENS
from kvd.connectors.vllm.moves import Moves
from kvd.connectors.vllm.opened import OpenedRooms, end_room
from kvd.connectors.vllm.orders import StepOrders
from kvd.connectors.vllm.params import NO_TRANSFER, cached_at, kept_for_decode, transfer_of
from kvd.connectors.vllm.requests import Requests
from kvd.connectors.vllm.resets import OTHER_WEIGHTS, ReplacedWeights, Resets
from kvd.connectors.vllm.sessions import (
    NO_LIFE,
    RETRY_S,
    UNFIT_RETRY_S,
    SessionLife,
    StepBudget,
)
from kvd.connectors.vllm.tracked import RequestStage, Tracked
from kvd.connectors.vllm.under_way import OrdersUnderWay

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from kvd.client import SyncNode
    from kvd.connectors.vllm.beside import Start
    from kvd.connectors.vllm.identity import PendingName
    from kvd.connectors.vllm.options import VllmOptions
    from kvd.connectors.vllm.orders import AdapterWeights, CopyOrder, StepReport
    from kvd.connectors.vllm.sessions import NodeLink
    from kvd.connectors.vllm.tracked import RequestView
    from kvd.connectors.vllm.under_way import CountedBlocks

P = ParamSpec("P")
T = TypeVar("T")

Extra = dict[int, bytes]
"""By page of a prompt, what it is found by beside its tokens."""

AFTER_A_MISTAKE: Final = "after a mistake"
"""Where nothing more can be done about one."""

WATCH_EVERY_S: Final = 0.1
"""So often it is looked at what has become of the session, where nothing fails and no request waits
for it: whoever asks for something reads what there is, and each copy is held against the session
where it is made. A thread beside the steps does it, of which no request has to bear the time."""

LOOK_EVERY_S: Final = 0.2
"""A step or a request that comes does the same where nobody has for so long, as without a thread
for it."""

NOBODY: Final = "no session with a daemon"
UNFILLED: Final = "another connector may not have filled its blocks: it is not saved further"
MOST_IN_FLIGHT: Final = 8
"""So many steps may be under way when it is heard what has become of the first."""
RESET: Final = "the cache was reset"
OTHER_ADAPTER: Final = "its adapter was loaded anew, with other weights"
READ_ANEW: Final = "its adapter may be read anew before its first step"
UNDONE: Final = "the cache was reset, and the daemon has not done it yet"
BESIDE_ADAPTERS: Final = (
    "it has no adapter, and this vLLM may compute it by one that is in the same step"
)
RESTARTED: Final = "the daemon was restarted, or its session ended"


class SchedulerHalf:
    """All requests of one engine.

    Args:
        options: what the user has set.
        base_namespace: of the engine: see ``identity``. ``name`` says it later, where it is not
            known yet; no request is to be found before.
        block_size: tokens of a block, and of a page.
        connect: opens a session, or raises ``KvdError``; it is called in a thread of its own.
        blocks: those of vLLM's cache.
        ranks: how many workers answer each order.
        now_s: a clock.
        start: has work done beside the step; for tests, which do it at once.

    Raises:
        KvdError: ``layout-mismatch``: the pool of the daemon that is there does not fit.
    """

    wants_word = False
    """Whether the workers have something to say, and a step is needed for it, were it an empty one.
    """
    look_every_s = LOOK_EVERY_S
    mixes_adapters = False
    """Whether vLLM computes a request without an adapter by one that is in the same step."""
    _has_mixed = False
    """Whether there was such a step: vLLM's own cache has that KV from then on."""
    _number = 0
    """Of the last step."""

    def __init__(
        self,
        options: VllmOptions,
        *,
        base_namespace: str = "",
        block_size: int,
        connect: Callable[[], SyncNode],
        blocks: CountedBlocks,
        ranks: int = 1,
        now_s: Callable[[], float] = time.monotonic,
        start: Start = in_thread,
    ) -> None:
        self._options = options
        self._base = base_namespace
        self._naming = RequestNamespace(base_namespace, None, None)
        """Of requests without adapter and salt."""
        self.block_size = block_size
        self._now_s = now_s
        self._log = ConnectorLog(now_s)
        self._sessions = SessionLife(connect, self._log, now_s=now_s, start=start)
        self._life = NO_LIFE
        """Of the session in which requests are looked up."""
        self._life_since = 0
        """Steps up to this one were of another."""
        self._token = b""
        """What opens it, as far as was looked."""
        self._budget = StepBudget(options.probe_wait_s)
        self._look_ups = LookUps(options, self._budget, now_s)
        self._ending = Endings(options)
        self._blocks = blocks
        self._copies = OrdersUnderWay(blocks, ranks=ranks)
        self._requests = Requests(self._sessions, self._look_ups, self._ending, self._log)
        self.counts = self._requests.counts
        self._claims = Claims(options, self._requests, self._look_ups, self._budget, now_s)
        self._moves = Moves(
            options, self._requests, self._copies, block_size=block_size, now_s=now_s
        )
        self.arrivals = ArrivingRequests(
            self._requests, self._look_ups, self._moves, self._budget, now_s
        )
        self._opened = OpenedRooms(options, self._moves.sends_all)
        self._held = HeldRequests(self._requests, self._moves, self._ending, self._copies, now_s)
        self._resets = Resets(self._log, now_s)
        self.adapter_stays: Callable[[AdapterWeights], bool] = lambda _: False
        """Whether vLLM has these weights of an adapter, until ``doubt_adapters`` says otherwise."""
        self.changes = ReplacedWeights(self._log)
        self._doubted = -1
        """In steps up to this one, another connector may not have filled what it has promised."""
        self._looked_s = -math.inf
        self._is_idle = True
        """Whether the last step had nothing to compute."""
        self._lock = threading.RLock()
        """Of who is in here: the steps, or a look beside them."""
        self._watch: RegularLook | None = None
        self._sessions.open_first()
        self._look()

    # ---- the daemon --------------------------------------------------------------------------

    def _glance(self) -> NodeLink | None:
        """``_look``, where it is not done beside the steps, and where something has changed."""
        link = self._sessions.link
        if (
            link is None
            or link.failures
            or self._now_s() - self._looked_s >= self.look_every_s
            or self._resets.due
            or link.node.life != self._life
        ):
            return self._look()
        return link

    def _look(self) -> NodeLink | None:
        """See what has become of the session; the one that can be asked now, if there is one."""
        sessions, self._looked_s = self._sessions, self._now_s()
        self._log.tell()
        sessions.look()
        self.counts.failures, sessions.failures = self.counts.failures + sessions.failures, 0
        if sessions.life != self._life:
            self._life_is_over()
        sessions.close_left(self._requests.take_handles())
        self._token = sessions.token
        link = sessions.link if self._life != NO_LIFE else None
        if link is not None:
            self._resets.look(link, self._life)
        return link

    def _life_is_over(self) -> None:
        """What requests hold is of a session that ended, or of a life of before a restart."""
        self._life, self._life_since = self._sessions.life, self._number
        self._ending.life_is_over(self._sessions.link)
        for tracked in self._requests.all_of_them():
            if tracked.life != self._life:
                self._requests.alone(tracked, RESTARTED)

    def _give_up(self, why: str, *, retry_s: float = 0.0) -> None:
        """The session is of no use any more, whatever is under way in it."""
        self._sessions.give_up(why, retry_s=retry_s)
        self._token = self._sessions.token
        self._life_is_over()

    def watch(self) -> None:
        """From now on the session is looked at beside the steps too: an idle engine has none."""
        self._watch = RegularLook(self._look_beside, WATCH_EVERY_S)

    def _look_beside(self) -> None:
        self.kept_in("a look beside the steps", None, self._look_if_due)

    def _look_if_due(self) -> None:
        if self._now_s() - self._looked_s >= WATCH_EVERY_S:
            self._look()

    def kept_in(
        self, where: str, otherwise: T, hook: Callable[P, T], *args: P.args, **more: P.kwargs
    ) -> T:
        """What ``hook`` returns, one thread at a time; ``otherwise`` after a mistake in it.

        That is told, and nothing is done with the session any more; vLLM goes on. What vLLM says of
        each request does the same in its own place, as every call between costs it.
        """
        with self._lock:
            try:
                return hook(*args, **more)
            except Exception as error:  # noqa: BLE001 - no error leaves this module
                self._mistaken(where, error)
                return otherwise

    def _gather(self) -> NodeLink | None:
        """Have what is said for several leave together: by ``send_gathered`` of the link."""
        link = self._sessions.link
        if link is not None:
            link.node.gather()
        return link

    def _mistaken(self, where: str, error: Exception) -> None:
        self.counts.failures += 1
        self._log.bug(where, error)
        if where != AFTER_A_MISTAKE:
            what = f"a bug of the connector's ({type(error).__name__})"
            self.kept_in(AFTER_A_MISTAKE, None, self._give_up, what, retry_s=RETRY_S)

    def close(self) -> None:
        """Leave; whatever is held goes back."""
        if self._watch is not None:
            self._watch.close()
        with self._lock:
            self._log.tell(is_last=True)
            self._sessions.close()
            self._life, self._looked_s = NO_LIFE, math.inf

    def name(self, base_namespace: str) -> None:
        """What the engine's KV is of is known now, before any request is found."""
        with self._lock:
            self._base = base_namespace
            self._naming = RequestNamespace(base_namespace, None, None)
            self._resets.name(base_namespace)

    def weights_change(self, by: str) -> bool:
        """The weights are about to be other ones, by what is called so.

        Requests that are here go on without kvd. So does every later one, until the caches are
        reset; but not where nothing was computed since they were.

        Returns:
            Whether a reset is to come.
        """
        return self.kept_in("new weights", True, self._weights_change, by)  # noqa: FBT003

    def _weights_change(self, by: str) -> bool:
        self._go_on_alone()
        return self.changes.changed(by)

    def weights_go(self, by: str) -> None:
        """There are about to be no weights, by what is called so, until they change."""
        self.kept_in("no weights", None, self._weights_go, by)

    def _weights_go(self, by: str) -> None:
        self._go_on_alone()
        self.changes.given_away(by)

    def _go_on_alone(self) -> None:
        """Requests that are here have other weights from now on, or none."""
        for tracked in self._requests.all_of_them():
            self._not_of_before(tracked, OTHER_WEIGHTS)
        self._ending.share_nothing()

    def flush(self) -> bool:
        """New weights: nothing of this model that was cached until now is found again.

        With every salt and adapter. Requests that are here go on without kvd: what they have saved
        is of the epoch that they began in, and what they have not loaded they compute. So does
        every later one until the daemon has done it, however long that takes.

        Returns:
            Whether it is remembered: it is, but for a mistake.
        """
        return self.kept_in("a reset of the cache", False, self._flush)  # noqa: FBT003

    def _flush(self) -> bool:
        self._resets.add(self._base)
        self.changes.reset()
        for tracked in self._requests.all_of_them():
            self._not_of_before(tracked)
        # vLLM may preempt all that run before it resets its own cache.
        self._copies.preempted(self._requests.here.values())
        self._ending.share_nothing()
        self._resets.wait(self._look)
        return True

    def fill_no_more(self, requests: Collection[str]) -> None:
        """VLLM has reset its own cache: these compute what they are about to load, and all else."""
        self.kept_in("a reset of vLLM's cache", None, self._fill_no_more, requests)

    def _fill_no_more(self, requests: Collection[str]) -> None:
        for request_id in requests:
            tracked = self._requests.here.get(request_id)
            if tracked is not None:
                self._not_of_before(tracked)

    def forget_adapter(self, number: int) -> None:
        """VLLM loads other weights under that number: its requests go on with these.

        What they have saved is of the former ones, and shared as far as it was by now.
        """
        self.kept_in("an adapter is loaded anew", None, self._forget_adapter, number)

    def _forget_adapter(self, number: int) -> None:
        for tracked in self._requests.all_of_them():
            if tracked.naming.number == number:
                self._not_of_before(tracked, OTHER_ADAPTER)
        self._ending.forget_adapter(number)

    def doubt_adapters(self, numbers: Collection[int]) -> None:
        """VLLM may read these anew from now on, in the step that uses them next.

        What was loaded for a request is of what vLLM had read by then. So one that no step has
        computed of yet is computed from its first token, by whatever vLLM reads.
        """
        self.kept_in("an adapter may be read anew", None, self._doubt_adapters, numbers)

    def _doubt_adapters(self, numbers: Collection[int]) -> None:
        for tracked in self._requests.here.values():
            adapter = tracked.naming.adapter
            if adapter is None or adapter.number not in numbers:
                continue
            if self._blocks.take_back(tracked.id):
                self._requests.alone(tracked, READ_ANEW)

    def adapters_here(self) -> set[int]:
        """The numbers of those that have requests."""
        found = {tracked.naming.number for tracked in self._requests.here.values()}
        return {number for number in found if number is not None}

    def _not_of_before(self, tracked: Tracked, why: str = RESET) -> None:
        """It has other weights from now on: nothing of it is loaded, saved or shared any more.

        What was loaded, and has not run, is of the former ones too.
        """
        self._blocks.take_back(tracked.id)
        self._requests.alone(tracked, why)

    # ---- a request comes ---------------------------------------------------------------------

    def arrived(
        self, request: RequestView, *, lora: PendingName | None, extra: Extra | str
    ) -> None:
        """A request is new: look it up.

        Args:
            request: vLLM's.
            lora: what its adapter is known by, if it has one.
            extra: by page, what it is found by beside its tokens; or why it cannot be found.
        """
        with self._lock:
            try:
                self._arrived(request, lora, extra)
            except Exception as error:  # noqa: BLE001 - no error leaves this module
                self._mistaken("a request comes", error)

    def _arrived(self, request: RequestView, lora: PendingName | None, extra: Extra | str) -> None:
        link = self._glance()
        former = self._requests.here.pop(request.request_id, None)
        if former is not None:
            self._requests.due.never(former)
            self._requests.let_go(former)
        transfer, params = NO_TRANSFER, request.kv_transfer_params
        if params:
            transfer = transfer_of(params, hands_over=self._options.handoffs)
            self.counts.odd_params += transfer.is_odd
        naming = self._naming
        if lora is not None or request.cache_salt:
            naming = RequestNamespace(self._base, lora, request.cache_salt)
        tracked = Tracked(request, transfer, naming)
        self._requests.here[request.request_id] = tracked
        tokens = request.prompt_token_ids
        if link is None:
            self._requests.alone(tracked, NOBODY)
        elif link.is_silent:
            self._requests.alone(tracked, SILENT)
        elif why := self._why_alone(lora):
            self._requests.alone(tracked, why)
        elif self._base in self._resets.due:
            self._requests.alone(tracked, UNDONE)
        elif isinstance(extra, str) or not tokens:
            self._requests.alone(tracked, extra if isinstance(extra, str) else NO_TOKENS)
        else:
            tracked.link, tracked.life, tracked.known_tokens = link, self._life, len(tokens)
            tracked.extra = extra or None
            try:
                self._look_ups.begin(link, tracked)
            except KvdError as error:
                self._requests.alone_after(tracked, error)

    def _why_alone(self, lora: PendingName | None) -> str:
        """Why KV of the engine's own cache, that this one may go on from, is not as named."""
        mixed = BESIDE_ADAPTERS if self._has_mixed and lora is None else ""
        return self.changes.why_alone or mixed

    def matched(self, request: RequestView, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens behind those that vLLM has itself can be loaded; None: not known yet.

        Owns nothing and changes nothing that a later call would miss; vLLM may ask every step. At
        least one token is left to be computed: for a request that has none vLLM would ask for ever.
        """
        with self._lock:
            try:
                return self._matched(request, local_tokens)
            except Exception as error:  # noqa: BLE001 - no error leaves this module
                self._mistaken("a request is to be scheduled", error)
                return 0, False

    def _matched(self, request: RequestView, local_tokens: int) -> tuple[int | None, bool]:
        tracked = self._requests.here.get(request.request_id)
        if tracked is None or tracked.link is None:
            return 0, False
        if not self._is_looked_up(tracked.link, tracked):
            return None, False
        is_sent = tracked.transfer.sends and tracked.stage is RequestStage.FOUND
        if is_sent and not self._has_pages_to_send(tracked):
            return None, False
        if tracked.stage is RequestStage.ALONE:
            return 0, False
        if tracked.lease is not None:
            # Preempted, or received: what lies in its own pages, and no more. What was found once
            # may have been evicted before it had them.
            tracked.found_tokens = tracked.saved_tokens
        tracked.local_tokens, tracked.allocations = local_tokens, 0
        n_tokens = min(tracked.found_tokens, request.num_tokens - 1)
        most = tracked.transfer.most_loaded
        if most is not None and n_tokens > local_tokens + most:
            n_tokens = (local_tokens + most) // self.block_size * self.block_size
        adapter = tracked.naming.adapter
        if adapter is not None and not self.adapter_stays(adapter):
            # It may be read anew in the step that goes on from them.
            return 0, False
        if self._copies.has_states:
            # The state of a page is that behind its last token, and no other one is kept.
            n_tokens -= n_tokens % self.block_size
        n_tokens -= local_tokens
        return (n_tokens, True) if n_tokens > 0 else (0, False)

    def _is_looked_up(self, link: NodeLink, tracked: Tracked) -> bool:
        """Whether nobody waits for its look-up any more."""
        if tracked.stage not in LOOKED_UP and not tracked.is_arriving:
            return True
        try:
            if tracked.is_arriving:
                self.arrivals.look(link, tracked)
            is_over = tracked.claim is None and self._look_ups.is_over(
                link, tracked, is_idle=self._is_idle
            )
            if tracked.stage is RequestStage.PROBING and tracked.call is None:
                is_over = self._claims.is_found(link, tracked)
        except KvdError as error:
            self._requests.alone_after(tracked, error)
            return True
        if self._look_ups.received_tokens or self._look_ups.unmet:
            self._count_met()
        if is_over and tracked.is_unsure:
            self._requests.count_alone(LATE)
        return is_over

    def _count_met(self) -> None:
        received, self._look_ups.received_tokens = self._look_ups.received_tokens, 0
        self.counts.received_tokens += received
        unmet, self._look_ups.unmet = self._look_ups.unmet, []
        for why in unmet:
            self.counts.unmet += 1
            self._log.unmet(why)

    def _has_pages_to_send(self, tracked: Tracked) -> bool:
        """Whether a prompt that another node will decode need not wait for its lease any more.

        It is over after its only step, and where its pages came after that, its blocks would have
        to be held. So its lease comes before its blocks.
        """
        if not self._moves.will_send(tracked) or tracked.is_unsure or tracked.lease is not None:
            return True
        if tracked.claim is None:
            tracked.asked_s = self._now_s()
            assert tracked.link is not None
            self._claims.begin(tracked.link, tracked, is_whole=True)
        if tracked.claim is not None:
            self._claims.take(tracked)
        if tracked.claim is None:
            return True
        return self._now_s() - tracked.asked_s >= ANSWER_WITHIN_S

    # ---- it gets blocks ----------------------------------------------------------------------

    def given_blocks(self, request: RequestView, external_tokens: int) -> None:
        """It has blocks; vLLM waits until those of ``external_tokens`` are filled, if any.

        This is said again, with 0, when they are. It is said with 0 whatever was found where vLLM
        computes all of a prompt, as for its logprobs.
        """
        with self._lock:
            # Whoever fills them, this step or a load of any connector's, does so with the weights
            # of now or of others, and vLLM's own cache has that from then on.
            self.changes.has_computed = True
            try:
                self._given_blocks(request, external_tokens)
            except Exception as error:  # noqa: BLE001 - no error leaves this module
                self._mistaken("a request gets blocks", error)
                unfilled = self._requests.unfilled
                if external_tokens and request.request_id not in unfilled:
                    unfilled.append(request.request_id)

    def _given_blocks(self, request: RequestView, external_tokens: int) -> None:
        tracked = self._requests.here.get(request.request_id)
        if tracked is None or tracked.link is None or tracked.stage is RequestStage.ALONE:
            if external_tokens:
                self._requests.unfilled.append(request.request_id)
            return
        tracked.has_run = False
        tracked.allocations += 1
        self._requests.due.soon(tracked)
        self._requests.ahead.pop(tracked.id, None)
        if external_tokens:
            tracked.started_tokens = tracked.local_tokens
            tracked.loads_to = tracked.local_tokens + external_tokens
            tracked.stage, tracked.asked_s = RequestStage.CLAIMING, self._now_s()
            self.counts.hit_tokens += external_tokens
            if tracked.from_tier:
                self.counts.tier_tokens += tracked.tier_tokens(external_tokens)
        elif tracked.stage is RequestStage.NAMING:
            self._requests.alone(tracked, LATE_ADAPTER)
            return
        else:
            if tracked.stage in LOOKED_UP or tracked.is_arriving:
                self._look_ups.drop(tracked.link, tracked)
            if tracked.stage in BEFORE_BLOCKS:
                tracked.stage = RequestStage.COMPUTING
        self._fill(tracked.link, tracked, external_tokens)

    def _fill(self, link: NodeLink, tracked: Tracked, external_tokens: int) -> None:
        """Have its blocks filled, as far as they are to be, and pages taken for it."""
        if tracked.is_arriving:
            self._requests.arriving[tracked.id] = tracked
        elif tracked.lease is not None:
            if external_tokens:
                self._requests.load(tracked)
        elif tracked.claim is None and (external_tokens or self._options.save != "none"):
            self._claims.begin(link, tracked, is_whole=self._options.save != "none")

    def sent_tokens(self, request_id: str, external_tokens: int) -> int:
        """Of the tokens that this one loads, those that another node has sent for it."""
        tracked = self._requests.here.get(request_id)
        return 0 if tracked is None else tracked.sent_tokens(external_tokens)

    def tier_tokens(self, request_id: str, external_tokens: int) -> int:
        """Of the same, those that were read from a tier for it."""
        tracked = self._requests.here.get(request_id)
        return 0 if tracked is None else tracked.tier_tokens(external_tokens)

    # ---- a step ------------------------------------------------------------------------------

    def step(self, scheduled: Mapping[str, int], preempted: Collection[str] = ()) -> StepOrders:
        """What the workers copy from this step on.

        Args:
            scheduled: how many tokens it computes of each request that is in it.
            preempted: requests whose blocks vLLM has taken back in it.
        """
        with self._lock:
            self._number += 1
            self.wants_word = False
            # What was ordered before a mistake goes out all the same: of a session that was given
            # up the workers copy nothing, and say so.
            loads: list[CopyOrder] = []
            saves: list[CopyOrder] = []
            try:
                if self.mixes_adapters and not self._has_mixed:
                    self._see_mixed(scheduled)
                self._step(scheduled, preempted, loads, saves)
            except Exception as error:  # noqa: BLE001 - no error leaves this module
                self._mistaken("a step", error)
            failed, self._requests.unfilled = tuple(self._requests.unfilled), []
            self._budget.renew(is_idle=not scheduled)
            freed, awaited = self._copies.take_words(self._requests.held)
            return StepOrders(
                number=self._number,
                token=self._token,
                session=self._life.session,
                incarnation=self._life.incarnation,
                is_idle=not scheduled,
                loads=tuple(loads),
                saves=tuple(saves),
                failed=failed,
                freed=freed,
                awaited=awaited,
            )

    def _step(
        self,
        scheduled: Mapping[str, int],
        preempted: Collection[str],
        loads: list[CopyOrder],
        saves: list[CopyOrder],
    ) -> None:
        if preempted or self._moves.windows.keeping:
            here = self._requests.here
            taken = [here[request] for request in preempted if request in here]
            self._copies.preempted(taken)
            self._moves.windows.sweep(taken)
        self._is_idle = not scheduled
        if scheduled:
            self.changes.has_computed = True
        self._glance()
        requests = self._requests
        if requests.claiming:
            self._claims.take_all()
        if requests.arriving:
            loads += self.arrivals.loads(is_idle=self._is_idle)
            self._count_met()
        for tracked in list(requests.loading.values()):
            loads += self._moves.loads(tracked)
        for tracked in list(requests.held.values()):
            saves += self._held.saves(tracked)
        due = requests.due.take(scheduled) if scheduled else []
        gathering = self._gather() if len(due) > 1 else None
        if due:
            self._computed(due, scheduled, saves)
        if self._ending.leases:
            self._ending.settle()
        if gathering is not None:
            gathering.send_gathered()

    def _see_mixed(self, scheduled: Collection[str]) -> None:
        """Whether this step has requests with adapters and without: the latter go on alone."""
        here = self._requests.here
        have = {here[request].naming.number is not None for request in scheduled if request in here}
        if len(have) > 1:
            self._has_mixed = True
            for tracked in self._requests.all_of_them():
                if tracked.naming.number is None:
                    self._requests.alone(tracked, BESIDE_ADAPTERS)

    def _computed(
        self, due: list[Tracked], scheduled: Mapping[str, int], saves: list[CopyOrder]
    ) -> None:
        """Save what this step completes of these."""
        computing: list[Tracked] = []
        begun: list[Tracked] = []
        for tracked in due:
            if tracked.stage is RequestStage.COMPUTING:
                computing.append(tracked)
                if not tracked.has_run:
                    begun.append(tracked)
        if begun:
            self._doubt(begun)
        for running in computing:
            upto = running.request.num_computed_tokens + scheduled[running.id]
            if running.transfer.sends:
                self._opened.open(running)
            saves += self._moves.saves(running, upto)
            left = self._moves.tokens_left(running, upto)
            if left is not None:
                self._requests.due.after(running, left)

    def _doubt(self, begun: Collection[Tracked]) -> None:
        """Save nothing of what another connector fills within this step, nor of who has that too.

        Whether it could is said behind the step, and a save cannot be taken back. kvd's own loads,
        and those of others beside the steps, are over when it is told of blocks a second time.
        """
        for tracked in begun:
            filled = tracked.request.num_computed_tokens - tracked.local_tokens
            if tracked.allocations == 1 and filled >= self.block_size:
                self._doubted = self._number + MOST_IN_FLIGHT
        for tracked in begun:
            tracked.has_run = True
            if self._number <= self._doubted and tracked.request.num_computed_tokens:
                self._copies.spoil(tracked)
                self._requests.count_alone(UNFILLED)

    # ---- what the workers say ----------------------------------------------------------------

    def reported(self, report: StepReport | None) -> None:
        """What the workers have done; None: nothing."""
        if report is None:
            return
        with self._lock:
            try:
                self._reported(report)
            except Exception as error:  # noqa: BLE001 - no error leaves this module
                self._mistaken("what the workers say", error)

    def _reported(self, report: StepReport) -> None:
        gathering = self._gather() if len(report.done) > 1 else None
        for copy in self._copies.answered(report):
            self._moves.over(copy)
        number = self._number if report.number is None else report.number
        if report.unfit and number > self._life_since:
            self._give_up(report.unfit, retry_s=UNFIT_RETRY_S)
        if self._ending.leases:
            self._ending.settle()
        if gathering is not None:
            gathering.send_gathered()

    def spoiled(self, blocks: Collection[int]) -> None:
        """Another connector did not fill these, and vLLM has computed with them: it does so again.

        Said before ``reported``, which may have that what was computed is saved.
        """
        self.kept_in("blocks that were not filled", None, self._spoiled, blocks)

    def _spoiled(self, blocks: Collection[int]) -> None:
        for tracked in self._requests.here.values():
            is_computed = tracked.stage is RequestStage.COMPUTING
            if is_computed and self._copies.has_any(tracked, blocks):
                self._copies.spoil(tracked)
                self._requests.count_alone(UNFILLED)

    # ---- it is over --------------------------------------------------------------------------

    def finished(
        self, request: RequestView, *, is_heard: bool = True, is_sound: bool = True
    ) -> tuple[bool, dict[str, object] | None]:
        """It is done, or was aborted.

        Args:
            request: vLLM's.
            is_heard: false: nobody is told of its KV, so nothing is kept for who decodes it; what
                was saved is cached all the same.
            is_sound: false: what its last steps have computed may be wrong.

        Returns:
            Whether vLLM must keep its blocks until it hears of them: only where they cannot be
            held. And what its client, or the next node, is told of its KV.
        """
        with self._lock:
            tracked = self._requests.here.pop(request.request_id, None)
            if tracked is None:
                return False, None
            self._requests.due.never(tracked)
            told = None
            try:
                told = self._finished(tracked, is_heard=is_heard, is_sound=is_sound)
            except Exception as error:  # noqa: BLE001 - no error leaves this module
                self._mistaken("a request is over", error)
            return self._copies.keep(tracked, is_needed=tracked.id in self._requests.held), told

    def _finished(
        self, tracked: Tracked, *, is_heard: bool, is_sound: bool
    ) -> dict[str, object] | None:
        link = tracked.link
        if not is_sound:
            self._copies.spoil(tracked)
        if link is None or tracked.stage is not RequestStage.COMPUTING:
            self._requests.give_up(tracked)
            return None
        told: dict[str, object] | None = None
        if is_heard and self._held.can_be_handed_over(tracked):
            is_open = self._opened.told(tracked)
            told = kept_for_decode(link.name, tracked.room, time.time(), is_open=is_open)
        else:
            if tracked.opening is not None or tracked.send is not None:
                end_room(tracked, link)
            if tracked.transfer.meeting is not None and tracked.lease is not None:
                told = cached_at(link.name)
        self._held.over(tracked)
        return told

    @property
    def has_work(self) -> bool:
        """Whether vLLM must go on stepping: blocks wait for a word, or pages for a copy."""
        requests, copies = self._requests, self._copies
        return bool(
            self.wants_word
            or requests.unfilled
            or requests.held
            or len(self._ending)
            or len(copies)
            or copies.keeps
            or len(self._moves.windows)
        )
