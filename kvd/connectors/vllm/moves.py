"""What is copied for a request in a step: which pages of its lease, and which of vLLM's blocks.

Only of tokens that are known: what is speculated on may be taken back. A lease has pages for its
prompt, and is promised those for a part of its answer: they are taken a few at a time, when the
last is reached, so that what is cached stays while answers are short. Those of a prompt of which
another node had a part only are asked for too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd.client import KvdError
from kvd.connectors.vllm.tracked import RequestStage
from kvd.connectors.vllm.windows import WindowBlocks

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from kvd.client import ArrivingPages, SyncLease
    from kvd.connectors.vllm.options import VllmOptions
    from kvd.connectors.vllm.orders import CopyOrder
    from kvd.connectors.vllm.requests import Requests
    from kvd.connectors.vllm.sessions import NodeLink
    from kvd.connectors.vllm.tracked import CopyUnderWay, Tracked
    from kvd.connectors.vllm.under_way import OrdersUnderWay


UNLOADED: Final = "the workers could not load it"

BLOCKS_AT_ONCE: Final = 4
"""Pages that a growing answer takes: fewer are a message more often, more may never be written."""


class Moves:
    """Makes the orders of one engine.

    Args:
        options: what the user has set.
        requests: where one goes on alone whose lease has no pages any more.
        copies: where what is ordered goes.
        block_size: tokens of a block, and of a page.
        now_s: a clock.
    """

    def __init__(
        self,
        options: VllmOptions,
        requests: Requests,
        copies: OrdersUnderWay,
        *,
        block_size: int,
        now_s: Callable[[], float],
    ) -> None:
        self._save = options.save
        self._requests = requests
        self._copies = copies
        reserve = options.reserve_tokens if options.save == "all" else 0
        self._more_tokens = min(reserve, BLOCKS_AT_ONCE * block_size)
        self._block = block_size
        self._saves_plainly = options.save != "none" and not copies.has_windows
        """It does, whatever comes; else it is asked each time."""
        self.windows = WindowBlocks(requests, copies, block_size=block_size, now_s=now_s)

    @property
    def saves_anything(self) -> bool:
        """Whether anything is saved at all."""
        return self._save != "none" and (not self._copies.has_windows or self._copies.can_save)

    def will_send(self, tracked: Tracked) -> bool:
        """Whether it will be handed over: of one token there is nothing that could be loaded."""
        return tracked.transfer.sends and self.saves_anything and tracked.prompt_tokens > 1

    def loads(self, tracked: Tracked) -> list[CopyOrder]:
        """Fill the blocks that wait, from its pages."""
        assert tracked.lease is not None
        try:
            order = self._copies.begin(
                tracked,
                tracked.lease,
                tracked.lease.pages,
                is_load=True,
                rows=self._rows(tracked.started_tokens, tracked.loads_to),
                upto_tokens=tracked.loads_to,
            )
        except KvdError as error:
            self._requests.alone_after(tracked, error)
            return []
        del self._requests.loading[tracked.id]
        return [order]

    @property
    def can_load_in_parts(self) -> bool:
        """Whether ``loads_part`` may be asked for."""
        return self._copies.can_load_in_parts

    def loads_part(self, tracked: Tracked, come: ArrivingPages) -> list[CopyOrder]:
        """Fill the blocks whose pages are here, but for the last of all: that says that it is."""
        size = self._block
        last = (tracked.loads_to - 1) // size
        upto = min(come.n_tokens // size, last) * size
        if upto <= tracked.started_tokens:
            return []
        order = self._copies.begin(
            tracked,
            come,
            come.pages,
            is_load=True,
            rows=self._rows(tracked.started_tokens, upto),
            upto_tokens=upto,
            is_last=False,
        )
        tracked.started_tokens = upto
        return [order]

    def saves(self, tracked: Tracked, computed_tokens: int) -> list[CopyOrder]:
        """Whole blocks that this step completes, and the last one of a sent prompt."""
        if (
            tracked.link is None
            or tracked.is_broken
            or not (self._saves_plainly or self.saves_anything)
        ):
            return []
        upto = min(computed_tokens, tracked.request.num_tokens)
        if self._save == "prompt":
            upto = min(upto, tracked.prompt_tokens)
        saves: list[CopyOrder] = []
        if tracked.lease is not None:
            try:
                saves = self._ordered(tracked.link, tracked, tracked.lease, upto)
            except KvdError as error:
                self._requests.alone_after(tracked, error)
                return []
        if self._copies.has_windows:
            self.windows.keep(tracked, upto)
        return saves

    def tokens_left(self, tracked: Tracked, computed_tokens: int) -> int | None:
        """So many it computes at least before there is more of it to be saved; None: there is none.

        Nothing of an answer is where prompts alone are saved, nor behind pages that were refused.
        """
        if tracked.is_broken or not (self._saves_plainly or self.saves_anything):
            return None
        # Blocks that are kept for it wait for pages, and no longer than a moment.
        if tracked.claim is not None or tracked.extension is not None or tracked.kept:
            return 1
        lease = tracked.lease
        if lease is None:
            return None
        ordered, prompt_tokens = tracked.ordered_tokens, tracked.request.num_prompt_tokens
        if tracked.is_full and len(lease.pages) * self._block <= ordered:
            return None
        following = (ordered // self._block + 1) * self._block
        if tracked.transfer.sends and ordered < prompt_tokens < following:
            following = prompt_tokens
        if self._save == "prompt" and following > prompt_tokens:
            return None
        return max(1, following - computed_tokens)

    def _ordered(
        self, link: NodeLink, tracked: Tracked, lease: SyncLease, upto: int
    ) -> list[CopyOrder]:
        prompt_tokens = tracked.request.num_prompt_tokens
        pages = self._pages_of(link, tracked, lease, max(upto, prompt_tokens), upto)
        n_pages = len(pages)
        whole = min(upto // self._block, n_pages) * self._block
        if tracked.transfer.sends and whole <= prompt_tokens <= min(upto, n_pages * self._block):
            whole = prompt_tokens
        if whole <= tracked.ordered_tokens:
            return []
        if tracked.saving and tracked.ordered_tokens % self._block:
            return []  # its last page is being written, and would be written twice at once
        rows = self._rows(tracked.ordered_tokens, whole)
        if self._copies.has_windows and not self._copies.has_all(tracked, rows):
            # vLLM has found what it began with in its own cache, beyond what kvd has: of layers
            # with windows it has the last blocks of that, and a page is a block of each.
            tracked.is_broken = True
            return []
        order = self._copies.begin(
            tracked, lease, pages, is_load=False, rows=rows, upto_tokens=whole
        )
        tracked.ordered_tokens = whole
        tracked.saving.append(tracked.copies[order.number])
        return [order]

    # ---- what has become of them -------------------------------------------------------------

    def over(self, copy: CopyUnderWay) -> None:
        """All ranks have answered that order."""
        if copy.is_load:
            self._load_over(copy)
        else:
            self._save_over(copy)

    def _load_over(self, copy: CopyUnderWay) -> None:
        tracked = copy.tracked
        if copy.is_done and tracked.naming.adapter is not None:
            self._requests.due.soon(tracked)  # its first step is to be seen, whatever comes between
        if not copy.order.is_last:
            # Of one whose last order is out the workers say that it has failed.
            if not copy.is_done and tracked.id in self._requests.arriving:
                self._requests.alone(tracked, UNLOADED)
        elif tracked.stage is RequestStage.LOADING and copy.is_done:
            tracked.stage = RequestStage.COMPUTING
            self._requests.due.soon(tracked)
        elif tracked.stage is RequestStage.LOADING:
            self._requests.alone(tracked, UNLOADED)

    def _save_over(self, copy: CopyUnderWay) -> None:
        """What is saved up to the first copy that is not done, or not yet, is in the pages."""
        tracked = copy.tracked
        before, saving = tracked.saved_tokens, tracked.saving
        while saving and saving[0].is_over and saving[0].is_done:
            tracked.saved_tokens = saving.popleft().order.upto_tokens
        if not copy.is_done and not tracked.is_broken:
            # What lies before it is as good as it was: that is shared, and can be loaded again.
            tracked.is_broken = True
            if tracked.lease is not None:
                self._requests.count_alone("the workers could not save a part of it")
        elif tracked.saved_tokens > before and tracked.lease is not None:
            self._share(tracked)

    def _share(self, tracked: Tracked) -> None:
        """Its chunks are there for others while it goes on."""
        link, lease, upto = tracked.link, tracked.lease, tracked.saved_tokens
        if lease is None or link is None or upto > tracked.prompt_tokens:
            return
        if tracked.id in self._requests.here:
            more = tracked.unknown_tokens(upto)
            tracked.known_tokens = max(tracked.known_tokens, upto)
            link.say(lease.share, more, upto)

    # ---- pages -------------------------------------------------------------------------------

    def _rows(self, first_token: int, upto_tokens: int) -> slice:
        return slice(first_token // self._block, -(-upto_tokens // self._block))

    def has_pages_for_prompt(self, tracked: Tracked) -> bool:
        """Whether its lease can have all of its prompt."""
        try:
            lease = tracked.lease
            return lease is not None and len(lease.pages) * self._block >= tracked.prompt_tokens
        except KvdError:
            return False

    def sends_all(self, tracked: Tracked) -> bool:
        """Whether it will be handed over, and its lease can have all of it."""
        return self.will_send(tracked) and self.has_pages_for_prompt(tracked)

    def _pages_of(
        self, link: NodeLink, tracked: Tracked, lease: SyncLease, wanted: int, upto: int
    ) -> NDArray[np.int32]:
        """The pages of its lease; more are asked for when the last is reached.

        ``wanted``: there are to be pages for so many tokens. ``upto``: so many are computed.
        """
        if tracked.extension is not None:
            try:
                if link.poll(tracked.extension) is not None:
                    tracked.extension = None
            except KvdError:
                # A full pool: what comes behind is not saved. It is asked for once.
                tracked.extension, tracked.is_full = None, True
        pages = lease.pages
        if upto // self._block >= len(pages) and tracked.extension is None and not tracked.is_full:
            lacking = max(0, wanted - len(pages) * self._block) + self._more_tokens
            if lacking > 0:
                tracked.extension = link.ask(lease.begin_extend, lacking)
        return pages
