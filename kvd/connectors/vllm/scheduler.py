"""The scheduler's half: which tokens the cache has, whose pages they are, and what is copied when.

One request goes through::

    PROBING --answered--> FOUND --blocks, of which kvd fills some--> CLAIMING --lease--> LOADING
    MEETING --delivered----^ '---blocks, of which it fills none--> COMPUTING <---copied-----'
    whatever fails: ALONE, it is computed as if kvd were not there

A probe owns nothing: ``match`` is asked when the request comes, and its answer is most often here
when the scheduler wants it. Pages are locked once vLLM has given the request blocks. While
it computes, whole blocks are copied to the pages of its lease, and said to be written; at its end
the lease is released, with what was generated. KV is never said to be written before the workers
have said that it is.

Nothing here waits for the daemon but ``_glance``: a millisecond at most, and not while others run.
Whatever fails ends in computing; no error leaves this module.
"""

from __future__ import annotations

import contextlib
import enum
import time
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from kvd.client import Code, KvdError
from kvd.connectors.vllm.options import namespace_of
from kvd.connectors.vllm.orders import CopyOrder, StepOrders
from kvd.connectors.vllm.params import cached_at, draw_room, kept_for_decode, transfer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kvd.client import PendingCall, Prompt, SyncLease, SyncNode, SyncReceive
    from kvd.connectors.vllm.options import VllmOptions
    from kvd.connectors.vllm.orders import StepReport
    from kvd.connectors.vllm.params import Transfer

T = TypeVar("T")

Extra = dict[int, bytes]
"""By page of a prompt, what it is found by beside its tokens."""

OVER: Final = frozenset({Code.POOL_CHANGED.value, Code.UNKNOWN_SESSION.value})
"""Of these the session is over; another one may be opened."""

AWAY: Final = frozenset({Code.UNREACHABLE.value, *OVER})
"""Nobody answers now."""

SENT_WITHIN_S: Final = 0.1
"""So long a step waits at most for the pages of a prompt that another node will decode."""

RETRY_S: Final = 1.0
"""A daemon that is not there is looked for so often."""


class RequestView(Protocol):
    """What is read of a request of vLLM's."""

    request_id: str
    prompt_token_ids: Sequence[int] | None
    kv_transfer_params: Mapping[str, object] | None
    cache_salt: str | None
    num_tokens: int
    num_computed_tokens: int
    num_prompt_tokens: int

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The prompt and what was generated."""
        ...


class Counts:
    """What has come of it, for metrics."""

    def __init__(self) -> None:
        self.hit_tokens = 0
        """Loaded, or about to be."""
        self.received_tokens = 0
        """Of these, sent by another node."""
        self.failed_loads = 0
        """Requests that were computed after all."""
        self.failures = 0
        """Calls that ended in an error."""
        self.odd_params = 0
        """Requests with ``kv_transfer_params`` that made no sense."""


class RequestStage(enum.Enum):
    """What a request waits for, or does."""

    PROBING = "probing"
    MEETING = "meeting"
    FOUND = "found"
    CLAIMING = "claiming"
    LOADING = "loading"
    COMPUTING = "computing"
    ALONE = "alone"


class Tracked:
    """One request."""

    __slots__ = (
        "call",
        "claim",
        "extension",
        "found_tokens",
        "is_received",
        "lease",
        "loads_to",
        "namespace",
        "ordered_tokens",
        "prompt",
        "receive",
        "request",
        "room",
        "saved_tokens",
        "stage",
        "started_tokens",
        "transfer",
        "why_alone",
    )

    def __init__(self, request: RequestView, transfer: Transfer, namespace: str) -> None:
        self.request = request
        self.transfer = transfer
        self.namespace = namespace
        self.stage = RequestStage.PROBING
        self.prompt: Prompt | None = None
        self.call: PendingCall[Any] | None = None
        """The look-up, or the request for a meeting."""
        self.receive: SyncReceive | None = None
        self.claim: PendingCall[SyncLease] | None = None
        self.lease: SyncLease | None = None
        self.extension: PendingCall[SyncLease] | None = None
        self.found_tokens = 0
        """The KV of so many is in the cache, or in the pages of its own lease."""
        self.started_tokens = 0
        """vLLM has those below itself, and loads from here up to ``loads_to``."""
        self.loads_to = 0
        self.ordered_tokens = 0
        """The pages of its lease have the KV up to here, once what was ordered is done."""
        self.saved_tokens = 0
        """The workers have done it up to here."""
        self.room = 0
        """Where the prompt will be handed over; 0: nowhere."""
        self.is_received = False
        self.why_alone = ""

    @property
    def id(self) -> str:
        """The number that vLLM gave it."""
        return self.request.request_id

    @property
    def prompt_tokens(self) -> int:
        """Of the prompt."""
        return self.request.num_prompt_tokens

    @property
    def waits_for_load(self) -> bool:
        """Whether vLLM keeps blocks for it until it hears that they are filled."""
        return self.stage in {RequestStage.CLAIMING, RequestStage.LOADING}


class SchedulerHalf:
    """All requests of one engine.

    Args:
        options: what the user has set.
        base_namespace: of the model, where the user has named none.
        block_size: tokens of a block, and of a page.
        connect: opens a session, or raises ``KvdError``.
        block_ids: the blocks that vLLM has given a request.
        now_s: a clock.
    """

    def __init__(
        self,
        options: VllmOptions,
        *,
        base_namespace: str,
        block_size: int,
        connect: Callable[[], SyncNode],
        block_ids: Callable[[str], Sequence[int]],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = Counts()
        self._options = options
        self._base = options.namespace or base_namespace
        self.block_size = self._block = block_size
        self._connect = connect
        self._block_ids = block_ids
        self._now_s = now_s
        self._node: SyncNode | None = None
        self._next_try_s = 0.0
        self._tracked: dict[str, Tracked] = {}
        self._claiming: dict[str, Tracked] = {}
        """Those whose lease has not come yet."""
        self._loading: dict[str, Tracked] = {}
        """Those whose lease is here, and whose blocks are to be filled with the next step."""
        self._ending: dict[str, Tracked] = {}
        """Those that are over, while copies to their pages are under way."""
        self._failed: list[str] = []
        """To be reported as not loaded, with the next step."""
        self._quiet: list[PendingCall[Any]] = []
        """Calls whose outcome nobody waits for."""
        self._is_idle = True
        """Whether the last step had nothing to compute."""
        self._reconnect()

    # ---- the daemon --------------------------------------------------------------------------

    def _reconnect(self) -> None:
        """Open a session, if there is none and it is time to try.

        A pool that does not fit raises at the first try, which is when the engine starts.
        """
        if self._node is not None or self._now_s() < self._next_try_s:
            return
        is_first = not self._next_try_s
        self._next_try_s = self._now_s() + RETRY_S
        try:
            self._node = self._connect()
        except KvdError as error:
            if is_first and error.code == Code.LAYOUT_MISMATCH.value:
                raise

    def _lost(self, error: KvdError) -> None:
        """A call has failed: of some failures the session is over, and another one is opened."""
        self.counts.failures += 1
        if error.code in OVER and self._node is not None:
            node, self._node = self._node, None
            with contextlib.suppress(KvdError):
                node.close()

    def close(self) -> None:
        """Leave; whatever is held goes back."""
        node, self._node = self._node, None
        if node is not None:
            node.close()

    def flush(self) -> bool:
        """New weights: nothing of this model that was cached until now is found again.

        With every salt and adapter. Requests that run go on in the epoch that they began in.
        """
        if self._node is None:
            return False
        return self._begin(lambda node: self._quiet.append(node.begin_new_epoch(self._base)))

    def _begin(self, verb: Callable[[SyncNode], object]) -> bool:
        """Ask the daemon for something; whether it could be asked."""
        node = self._node
        if node is None:
            return False
        try:
            verb(node)
        except KvdError as error:
            self._lost(error)
            return False
        return True

    def _came(self, call: PendingCall[T], *, waits: bool, within_s: float = 0.0) -> T | None:
        """The outcome of a call, if it is here, or comes within a moment.

        Raises:
            KvdError: it ended in it.
        """
        found = call.poll()
        if found is not None or not waits:
            return found
        with contextlib.suppress(KvdError):
            call.result(max(within_s, self._options.probe_wait_s))
        return call.poll() if call.is_done else None

    # ---- a request comes ---------------------------------------------------------------------

    def arrived(self, request: RequestView, *, lora: str | None, extra: Extra | None) -> None:
        """A request is new: look it up.

        Args:
            request: vLLM's.
            lora: the name of its adapter.
            extra: by page, what it is found by beside its tokens; None: it cannot be found.
        """
        self._reconnect()
        transfer = transfer_of(request.kv_transfer_params)
        self.counts.odd_params += transfer.is_odd
        namespace = namespace_of(self._base, lora, request.cache_salt)
        tracked = self._tracked[request.request_id] = Tracked(request, transfer, namespace)
        node, tokens = self._node, request.prompt_token_ids
        if node is None or tokens is None or extra is None:
            self._alone(tracked, "nobody to ask" if node is None else "nothing to find it by")
            return
        try:
            tracked.prompt = node.prompt(tokens, extra_keys=extra or None)
            self._look_up(node, tracked)
        except KvdError as error:
            self._lost(error)
            self._alone(tracked, str(error))

    def _look_up(self, node: SyncNode, tracked: Tracked) -> None:
        meeting = tracked.transfer.meeting
        if meeting is None or meeting.peer == node.name:
            tracked.stage = RequestStage.PROBING
            tracked.call = node.begin_match(tracked.prompt, namespace=tracked.namespace)
            return
        # Where there is a room somebody keeps the prompt for us; without, what is cached there.
        tracked.stage = RequestStage.MEETING
        tracked.call = node.begin_receive(
            meeting.number or None,
            tracked.prompt,
            meeting.peer,
            namespace=tracked.namespace,
            reserve_tokens=self._reserve,
            deadline_s=self._options.deadline_s,
            request_id=tracked.id if meeting.number else "",
        )

    @property
    def _reserve(self) -> int:
        return self._options.reserve_tokens if self._options.save == "all" else 0

    def matched(self, request: RequestView, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens behind those that vLLM has itself can be loaded; None: not known yet.

        Owns nothing and changes nothing that a later call would miss; vLLM may ask every step.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.stage is RequestStage.ALONE:
            return 0, False
        try:
            if tracked.stage is RequestStage.PROBING and not self._probed(tracked):
                return None, False
            if tracked.stage is RequestStage.MEETING and not self._met(tracked):
                return None, False
        except KvdError as error:
            self._lost(error)
            self._look_again(tracked, error)
            return (None, False) if tracked.stage is RequestStage.PROBING else (0, False)
        if tracked.lease is not None:
            # Preempted, or received: what lies in its own pages needs no look-up.
            whole = tracked.saved_tokens // self._block * self._block
            tracked.found_tokens = max(tracked.found_tokens, whole)
        n_tokens = min(tracked.found_tokens, request.num_tokens) - local_tokens
        return (n_tokens, True) if n_tokens > 0 else (0, False)

    def _probed(self, tracked: Tracked) -> bool:
        assert tracked.call is not None
        found = self._came(tracked.call, waits=True)
        if found is None:
            return False
        tracked.call = None
        tracked.found_tokens = found.tokens
        tracked.stage = RequestStage.FOUND
        return True

    def _met(self, tracked: Tracked) -> bool:
        """Whether the prompt is here."""
        if tracked.receive is None:
            assert tracked.call is not None
            tracked.receive = self._came(tracked.call, waits=self._is_idle)
            if tracked.receive is None:
                return False
            tracked.call = tracked.receive.begin_done()
        assert tracked.call is not None
        lease = self._came(tracked.call, waits=self._is_idle)
        if lease is None:
            return False
        tracked.call, tracked.lease, tracked.is_received = None, lease, True
        self.counts.received_tokens += tracked.receive.n_tokens - tracked.receive.prefix_len
        # All of it, its last partial page too; that page is written again when it is full.
        tracked.found_tokens = tracked.receive.n_tokens
        tracked.ordered_tokens = tracked.saved_tokens = tracked.found_tokens
        tracked.stage = RequestStage.FOUND
        return True

    def _look_again(self, tracked: Tracked, error: KvdError) -> None:
        """What was to come from another node does not: what is cached here may be enough."""
        was_meeting = tracked.stage is RequestStage.MEETING
        tracked.call = tracked.receive = None
        node = self._node
        if not was_meeting or node is None or error.code in AWAY:
            self._alone(tracked, str(error))
            return
        try:
            tracked.stage = RequestStage.PROBING
            tracked.call = node.begin_match(tracked.prompt, namespace=tracked.namespace)
        except KvdError as again:
            self._lost(again)
            self._alone(tracked, str(again))

    # ---- it gets blocks ----------------------------------------------------------------------

    def given_blocks(self, request: RequestView, external_tokens: int) -> None:
        """It has blocks; vLLM waits until those of ``external_tokens`` are filled, if any.

        This is said again, with 0, when they are.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.stage is RequestStage.ALONE:
            if external_tokens:
                self._failed.append(request.request_id)
            return
        if external_tokens:
            tracked.loads_to = min(tracked.found_tokens, request.num_tokens)
            tracked.started_tokens = tracked.loads_to - external_tokens
            tracked.stage = RequestStage.CLAIMING
            self.counts.hit_tokens += external_tokens
        elif tracked.stage is RequestStage.FOUND:
            tracked.stage = RequestStage.COMPUTING
        if tracked.lease is not None:
            if external_tokens:
                self._load(tracked)
        elif tracked.claim is None and (external_tokens or self._options.save != "none"):
            self._claim(tracked)

    def _claim(self, tracked: Tracked) -> None:
        """Lock what is cached, and take pages for the rest; never waits for room."""
        saves = self._options.save != "none"

        def begin(node: SyncNode) -> None:
            tracked.claim = node.begin_lease(
                tracked.prompt,
                hold="all" if saves else "prefix",
                namespace=tracked.namespace,
                reserve_tokens=self._reserve if saves else 0,
                deadline_s=0.0,
            )

        if self._begin(begin):
            self._claiming[tracked.id] = tracked
        else:
            self._unclaimed(tracked, "nobody to ask")

    def _take_claim(self, tracked: Tracked) -> bool:
        """Whether its lease has come, or will not."""
        assert tracked.claim is not None
        try:
            # Waited for: a short request has no later step in which it could be saved.
            # Longer where another node is to have it: the prompt would be computed for nothing.
            within_s = SENT_WITHIN_S if tracked.transfer.sends else 0.0
            lease = self._came(tracked.claim, waits=True, within_s=within_s)
        except KvdError as error:
            tracked.claim = None
            if error.code == Code.DEADLINE.value and tracked.waits_for_load:
                # A full pool serves what is in it: without pages of its own nothing is saved.
                if self._begin(lambda node: self._hold(node, tracked)):
                    return False
            else:
                self._lost(error)
            self._unclaimed(tracked, str(error))
            return True
        if lease is None:
            return False
        tracked.claim, tracked.lease = None, lease
        tracked.ordered_tokens = tracked.saved_tokens = lease.prefix_len
        if tracked.stage is RequestStage.CLAIMING:
            if lease.prefix_len < tracked.loads_to:  # evicted since it was looked up
                self._unclaimed(tracked, "evicted meanwhile")
            else:
                self._load(tracked)
        return True

    def _hold(self, node: SyncNode, tracked: Tracked) -> None:
        tracked.claim = node.begin_lease(
            tracked.prompt, hold="prefix", namespace=tracked.namespace, deadline_s=0.0
        )

    def _load(self, tracked: Tracked) -> None:
        tracked.stage = RequestStage.LOADING
        self._loading[tracked.id] = tracked

    def _unclaimed(self, tracked: Tracked, why: str) -> None:
        """There is no lease, or it has not what was promised: its blocks are not filled."""
        if tracked.waits_for_load:
            self._failed.append(tracked.id)
            self.counts.failed_loads += 1
        self._alone(tracked, why)

    def _alone(self, tracked: Tracked, why: str) -> None:
        """It is computed as if kvd were not there."""
        tracked.stage, tracked.why_alone = RequestStage.ALONE, why
        self._claiming.pop(tracked.id, None)
        self._loading.pop(tracked.id, None)
        self._let_go(tracked)

    def _let_go(self, tracked: Tracked) -> None:
        """Nothing is held for it any more; nothing of it is shared that was not before."""
        lease, tracked.lease = tracked.lease, None
        for call in (tracked.call, tracked.claim):
            if call is not None:
                call.cancel()
        tracked.call = tracked.claim = None
        if tracked.receive is not None and lease is None:
            self._quietly(tracked.receive.begin_cancel)
        if lease is not None:
            self._quietly(lease.begin_release)

    def _quietly(self, begin: Callable[..., PendingCall[Any]], *args: Any, **more: Any) -> None:
        """Begin a call whose outcome nobody waits for."""
        try:
            self._quiet.append(begin(*args, **more))
        except KvdError as error:
            self._lost(error)

    # ---- a step ------------------------------------------------------------------------------

    def step(self, computed: Mapping[str, int]) -> StepOrders:
        """What the workers copy in this step; ``computed``: how far each request is behind it."""
        self._is_idle = not computed
        self._reconnect()
        node = self._node
        if node is not None:
            try:
                node.pump()
            except KvdError as error:
                self._lost(error)
        self._sweep()
        for tracked in list(self._claiming.values()):
            if self._take_claim(tracked):
                self._claiming.pop(tracked.id, None)
        loads = [self._load_order(one) for one in self._loading.values()]
        self._loading.clear()
        saves = [self._save_order(request, upto) for request, upto in computed.items()]
        failed, self._failed = tuple(self._failed), []
        return StepOrders(
            token=self._node.token if self._node is not None else b"",
            loads=tuple(loads),
            saves=tuple([one for one in saves if one is not None]),
            failed=failed,
        )

    def _sweep(self) -> None:
        """Take note of calls that nobody waits for."""
        left = []
        for call in self._quiet:
            try:
                if call.poll() is None:
                    left.append(call)
            except KvdError as error:
                self._lost(error)
        self._quiet = left

    def _load_order(self, tracked: Tracked) -> CopyOrder:
        assert tracked.lease is not None
        first = tracked.started_tokens // self._block
        return self._copy(tracked, tracked.lease, first, tracked.loads_to)

    def _copy(self, tracked: Tracked, lease: SyncLease, first: int, upto: int) -> CopyOrder:
        last = -(-upto // self._block)
        return CopyOrder(
            request=tracked.id,
            lease=lease.id,
            pages=tuple(lease.pages[first:last].tolist()),
            blocks=tuple(self._block_ids(tracked.id)[first:last]),
            upto_tokens=upto,
        )

    def _save_order(self, request_id: str, computed_tokens: int) -> CopyOrder | None:
        """Whole blocks that this step completes, and the last, partial one of a prompt to be sent.

        Only of tokens that are known: what is speculated on may be taken back.
        """
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.stage is not RequestStage.COMPUTING or tracked.lease is None:
            return None
        lease, prompt_tokens = tracked.lease, tracked.prompt_tokens
        upto = min(computed_tokens, tracked.request.num_tokens)
        if self._options.save == "none":
            return None
        if self._options.save == "prompt":
            upto = min(upto, prompt_tokens)
        n_pages = self._pages_of(tracked, lease, upto)
        whole = min(upto // self._block, n_pages) * self._block
        if tracked.transfer.sends and whole <= prompt_tokens <= min(upto, n_pages * self._block):
            whole = prompt_tokens
        if whole <= tracked.ordered_tokens:
            return None
        first, tracked.ordered_tokens = tracked.ordered_tokens // self._block, whole
        return self._copy(tracked, lease, first, whole)

    def _pages_of(self, tracked: Tracked, lease: SyncLease, upto: int) -> int:
        """How many pages its lease has; more are asked for when the last is reached."""
        if tracked.extension is not None:
            try:
                if tracked.extension.poll() is not None:
                    tracked.extension = None
            except KvdError as error:
                # A full pool: what is generated further is not saved. It is asked for once.
                self._lost(error)
        n_pages = len(lease.pages)
        if tracked.extension is None and upto // self._block >= n_pages and self._reserve:
            tracked.extension = lease.begin_extend(max(self._reserve, self._block))
        return n_pages

    # ---- what the workers say ----------------------------------------------------------------

    def reported(
        self, report: StepReport | None, *, loaded: Collection[str], failed: Collection[str]
    ) -> None:
        """What the workers have done: ``loaded`` and ``failed`` are vLLM's words of the same."""
        for request_id in loaded:
            tracked = self._tracked.get(request_id)
            if tracked is not None and request_id in failed:
                self.counts.failed_loads += tracked.stage is RequestStage.LOADING
                self._alone(tracked, "the workers could not copy it")
            elif tracked is not None and tracked.stage is RequestStage.LOADING:
                tracked.stage = RequestStage.COMPUTING
        for request_id, upto in report.saved.items() if report is not None else ():
            self._saved(request_id, upto)
        for request_id in report.lost if report is not None else ():
            tracked = self._tracked.get(request_id) or self._ending.pop(request_id, None)
            if tracked is not None:
                self._alone(tracked, "the workers could not save it")

    def _saved(self, request_id: str, upto_tokens: int) -> None:
        tracked = self._tracked.get(request_id) or self._ending.get(request_id)
        if tracked is None or tracked.lease is None or upto_tokens <= tracked.saved_tokens:
            return
        tracked.saved_tokens = upto_tokens
        if request_id in self._ending:
            self._end_if_done(tracked)
        elif upto_tokens <= tracked.prompt_tokens:
            # Its chunks are there for others while it goes on.
            self._quietly(tracked.lease.begin_commit, (), upto_tokens, swap=False)

    # ---- it is over --------------------------------------------------------------------------

    def finished(self, request: RequestView) -> dict[str, object] | None:
        """It is done, or was aborted; what its client, or the next node, is told of its KV."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return None
        if tracked.stage is RequestStage.CLAIMING:
            # vLLM keeps its blocks until it hears of them, and nobody fills them any more.
            self._failed.append(tracked.id)
        lease, node = tracked.lease, self._node
        if lease is None or node is None or tracked.stage is not RequestStage.COMPUTING:
            self._alone(tracked, "it is over")
            return None
        told: dict[str, object] | None = None
        is_whole = tracked.ordered_tokens >= tracked.prompt_tokens
        if tracked.transfer.sends and is_whole:
            tracked.room = draw_room()
            told = kept_for_decode(node.name, tracked.room)
        elif tracked.transfer.meeting is not None:
            told = cached_at(node.name)
        self._ending[tracked.id] = tracked
        self._end_if_done(tracked)
        return told

    def _end_if_done(self, tracked: Tracked) -> None:
        """Let go of its lease, if no copy to its pages is under way; what is saved is shared."""
        lease = tracked.lease
        if lease is None or tracked.saved_tokens < tracked.ordered_tokens:
            return
        del self._ending[tracked.id]
        upto, prompt_tokens = tracked.saved_tokens, tracked.prompt_tokens
        if tracked.room and self._node is not None:
            self._quietly(lease.begin_commit, (), prompt_tokens, swap=False)
            self._quietly(
                self._node.begin_hand_over,
                tracked.room,
                lease=lease,
                namespace=tracked.namespace,
                deadline_s=self._options.deadline_s,
                ttl_s=self._options.keep_s,
                release=True,
            )
            return
        # Only whole pages of what was saved, whatever was generated behind it.
        generated = tracked.request.all_token_ids[prompt_tokens:upto]
        self._quietly(lease.begin_release, list(generated), upto)

    @property
    def has_work(self) -> bool:
        """Whether vLLM must go on stepping: blocks wait for a word, or pages for a copy."""
        return bool(self._failed or self._ending)
