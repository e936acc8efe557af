"""One request, as the scheduler's half knows it.

It goes through::

    NAMING --its adapter is known--> PROBING or MEETING; at once, where it has none
    PROBING --answered--> FOUND --blocks, of which kvd fills some--> CLAIMING --lease--> LOADING
    MEETING --delivered----^ '---blocks, of which it fills none--> COMPUTING <---copied-----'
    whatever fails: ALONE, it is computed as if kvd were not there

Where a tier has more of it than the cache, its claim is made anew, and it goes on PROBING until
those pages are here.

A request is of the session in which it was looked up. When that is over, or the daemon begins
another life, the request is ALONE: the numbers of its pages mean nothing any more.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from kvd.connectors.vllm.sessions import NO_LIFE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvd.client import PendingCall, Prompt, SyncLease, SyncNode, SyncReceive, SyncSend
    from kvd.connectors.vllm.identity import RequestNamespace
    from kvd.connectors.vllm.orders import CopyOrder
    from kvd.connectors.vllm.params import Transfer
    from kvd.connectors.vllm.sessions import NodeLink


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


class RequestStage(enum.Enum):
    """What a request waits for, or does."""

    NAMING = "naming"
    PROBING = "probing"
    MEETING = "meeting"
    FOUND = "found"
    CLAIMING = "claiming"
    LOADING = "loading"
    COMPUTING = "computing"
    ALONE = "alone"


class CopyUnderWay:
    """An order that not all ranks have answered."""

    __slots__ = ("blocks", "is_done", "is_load", "is_over", "order", "ranks_left", "tracked")

    def __init__(self, order: CopyOrder, tracked: Tracked, *, is_load: bool, ranks: int) -> None:
        self.order = order
        self.blocks = order.used
        """That are held for it."""
        self.tracked = tracked
        self.is_load = is_load
        self.ranks_left = ranks
        self.is_done = True
        """All ranks that have answered have copied it."""
        self.is_over = False


class Tracked:
    """One request.

    What is not set yet is of the class: of most of it no request ever has another value, and each
    of them pays for what it is given at its start.
    """

    stage = RequestStage.NAMING
    link: NodeLink | None = None
    life = NO_LIFE
    """The session, and the life of its daemon, that all handles here are of."""
    extra: Mapping[int, bytes] | None = None
    """By page of its prompt, what that is found by beside its tokens."""
    prompt: Prompt | None = None
    """With a number, once it was asked about again."""
    call: PendingCall[Any] | None = None
    """The look-up, or the request for a meeting."""
    probe: PendingCall[Any] | None = None
    """Asked behind the request for a meeting: answered before it, that one waits for room."""
    receive: SyncReceive | None = None
    is_arriving = False
    """Its blocks are filled while it is received, or will be: see ``arrivals``."""
    claim: PendingCall[SyncLease] | None = None
    claims_all = False
    """Whether it claims pages for all of its prompt, or those that are cached alone."""
    asked_s = 0.0
    """When what it waits for was asked."""
    was_missed = False
    """It was looked for once, and not answered yet."""
    is_unsure = False
    """The daemon did not answer in time when it was looked up."""
    lease: SyncLease | None = None
    known_tokens = 0
    """So many tokens the lease knows; a commit of more has to say them."""
    extension: PendingCall[SyncLease] | None = None
    is_full = False
    """The pool had no more pages for it."""
    local_tokens = 0
    """vLLM had so many itself when it last asked."""
    allocations = 0
    """And has said so often since that it has blocks."""
    found_tokens = 0
    """The KV of so many is in the cache, or in the pages of its own lease."""
    tier_wait_s: float | None = None
    """So long it waits for what a tier has of it; None: it was not seen that one has anything."""
    from_tier = range(0)
    """Tokens of its prompt that were read from a tier for it."""
    sent_from: int | None = None
    """From here on another node has sent it; None: nothing of it."""
    started_tokens = 0
    """vLLM has those below itself, or they are ordered, and loads from there up to ``loads_to``."""
    loads_to = 0
    has_run = False
    """A step has computed of it since it was given blocks: before that another connector may be
    filling these, and vLLM counts their tokens as computed already."""
    is_broken = False
    """Something of it could not be saved: nothing behind that is."""
    blocks: tuple[tuple[int, ...], ...] | None = None
    """Those that it had when it was over; None: it is here, and vLLM knows them."""
    ordered_tokens = 0
    """The pages of its lease have the KV up to here, once what was ordered is done."""
    saved_tokens = 0
    """The workers have done it up to here."""
    opening: PendingCall[SyncSend] | None = None
    """Of its room, which is open while it is computed."""
    send: SyncSend | None = None
    """That room, once that is known."""
    room = 0
    """Where the prompt will be handed over; 0: nowhere."""
    takes_room = 0
    """Where it is kept for this request, on its own node; 0: nowhere."""

    def __init__(self, request: RequestView, transfer: Transfer, naming: RequestNamespace) -> None:
        self.id = request.request_id
        """The number that vLLM gave it."""
        self.request = request
        self.transfer = transfer
        self.naming = naming
        self.copies: dict[int, CopyUnderWay] = {}
        """What was ordered for it and not answered, by number, as it was ordered."""
        self.saving: deque[CopyUnderWay] = deque()
        """What is saved and not counted by ``saved_tokens`` yet: an earlier copy may be slower."""
        # Where layers have windows: by page, blocks that are computed and wait to be ordered.
        self.kept: dict[int, tuple[int, ...]] = {}

    def numbered(self, node: SyncNode) -> Prompt:
        """Its prompt, to be asked about again: what the daemon has seen of it is not sent anew.

        Raises:
            KvdError: it has no tokens that can be told.
        """
        if self.prompt is None:
            tokens = self.request.prompt_token_ids or ()
            self.prompt = node.prompt(tokens[: self.known_tokens], extra_keys=self.extra)
        return self.prompt

    @property
    def namespace(self) -> str:
        """Of those that share its KV, once it is looked up."""
        return self.naming.known

    @property
    def prompt_tokens(self) -> int:
        """Of the prompt."""
        return self.request.num_prompt_tokens

    @property
    def waits_for_load(self) -> bool:
        """Whether vLLM keeps blocks for it until it hears that they are filled."""
        return self.stage is RequestStage.CLAIMING or self.stage is RequestStage.LOADING

    def sent_tokens(self, external_tokens: int) -> int:
        """Of the tokens that it loads, those that another node has sent."""
        if self.sent_from is None:
            return 0
        return max(0, self.loads_to - max(self.sent_from, self.loads_to - external_tokens))

    def tier_tokens(self, external_tokens: int) -> int:
        """Of the tokens that it loads, those that were read from a tier for it."""
        first, read = self.loads_to - external_tokens, self.from_tier
        return max(0, min(self.loads_to, read.stop) - max(first, read.start))

    def loadable(self, n_tokens: int, n_more: int) -> int:
        """Of ``n_more`` tokens behind the first ``n_tokens``, those that may be loaded."""
        most = self.transfer.most_loaded
        return n_more if most is None else max(0, min(n_more, self.local_tokens + most - n_tokens))

    def unknown_tokens(self, upto_tokens: int) -> list[int]:
        """Those below ``upto_tokens`` that its lease does not know."""
        if upto_tokens <= self.known_tokens:
            return []
        return list(self.request.all_token_ids[self.known_tokens : upto_tokens])

    def took(self, lease: SyncLease, *, known_tokens: int, filled_tokens: int) -> None:
        """It has a lease, whose pages have the KV of its first tokens."""
        self.lease = lease
        self.known_tokens = known_tokens
        self.ordered_tokens = self.saved_tokens = filled_tokens
