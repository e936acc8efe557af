"""Engines that compute in blocks of their own, and copy between those and the pages of a lease.

They do what the others do, but for every page that these write or read at once they order copies:
several at a time, which end in any order, and which fail and are made again. Their sends go on by
what is saved. What they may not say while a save is under way they say now and then all the same,
and must be refused. They let go in the middle of copies too: then those alone hold the lease.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from typing_extensions import override

from kvd.core.cache.lease import ENGINE
from kvd.errors import Code
from kvd.sim.contents import PAGE_TOKENS
from kvd.sim.receiving import HOLD_S, ReceivingEngine
from kvd.sim.sending import SimSendingEngine
from kvd.sim.violation import Violated
from kvd.sim.worker import COPY_S, CopyOwner, SimCopy
from kvd.types import NO_TOKENS, page_ids
from kvd.wire import client

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.errors import Refusal
    from kvd.sim.engine import EngineJob, Request, SimSession
    from kvd.types import Tokens

LIES = 0.25
"""Share of stretches of which something is said to be written before it is saved."""

BESIDES = 0.25
"""Of those while which something else is done with the lease."""

LEAVES = 0.08
"""Of those in the middle of which an engine lets go."""

PARTIAL = 0.4
"""Of those that nobody is sent yet, which end somewhere on a page first."""

PIECES = 3
"""Most copies of one rank for one stretch."""

LIE_CODES = {Code.WRONG_STATE, Code.BAD_REQUEST}
"""What is heard then: it is being saved, or it is of tokens that have not even been named."""

Word = tuple[type[client.Request], tuple[object, ...]]
"""A request, but for its call."""


class CopiedBlocks:
    """The blocks of one request, and its copies to and from the pages of its lease."""

    def __init__(self, job: EngineJob) -> None:
        self.job = job
        self.rng = job.host.world.rng
        self.under_way: dict[SimCopy, None] = {}
        """Ordered, and not over."""
        self.is_over = False
        """The lease may end with the call that its engine has made."""

    @property
    def ranks(self) -> int:
        """Processes that each copy their part of every page."""
        return len(self.job.session.workers)

    @property
    def is_open(self) -> bool:
        """Whether the lease is still its engine's."""
        job = self.job
        if self.is_over or not job.session.is_alive:
            return False
        return bool(job.lease) and job in job.session.jobs

    def save(self, start_tokens: int, upto_tokens: int, then: Callable[[], None]) -> SavedStretch:
        """Save the KV of the prompt from one token up to another, then do the next thing."""
        stretch = SavedStretch(self, start_tokens, upto_tokens, then)
        stretch.begin()
        return stretch

    def load(self, n_tokens: int, *, is_wanted: bool) -> None:
        """Load what is in the pages of so many tokens; again where that fails, if it is wanted."""
        contents = self.job.prompt.upto(n_tokens)
        for rank in range(self.ranks):
            for first, end in self.cut(0, len(contents)):
                pages = self.job.rows.pages[first:end]
                copy = SimCopy(self.job.lease, first, pages, contents[first:end])
                self.order(rank, copy, Loading(self, is_wanted=is_wanted))

    def cut(self, first: int, end: int) -> list[tuple[int, int]]:
        """Some pages in a few pieces."""
        if first >= end:
            return []
        n_cuts = min(self.rng.randrange(PIECES), end - first - 1)
        edges = sorted({first, end, *self.rng.sample(range(first + 1, end), n_cuts)})
        return list(itertools.pairwise(edges))

    def order(self, rank: int, copy: SimCopy, owner: CopyOwner) -> None:
        """Have the process of that rank make it."""
        self.under_way[copy] = None
        self.job.session.workers[rank].order(copy, owner)

    def shared(self, reply: client.PageTable | client.Failed) -> None:
        """Whole pages have joined the tree while others are copied.

        Raises:
            Violated: They may not.
        """
        job = self.job
        if type(reply) is client.Failed:
            raise Violated(f"{job.host.name}: {job}: {reply.refusal.message}")
        assert type(reply) is client.PageTable
        job.rows.change(reply)

    # ---- what is refused ---------------------------------------------------------------------

    def known(self) -> list[SimCopy]:
        """Those that the daemon keeps pages for; none where it cannot be asked at once."""
        is_awake = self.job.host.asleep_until_s <= self.job.agenda.now_s
        return [copy for copy in self.under_way if copy.is_known and is_awake and self.is_open]

    def save_under_way(self) -> SimCopy | None:
        """The one of them that writes the first token; None: no save is."""
        saves = [copy for copy in self.known() if copy.upto_tokens]
        return min(saves, key=lambda copy: (copy.from_token, copy.rank), default=None)

    def try_retract(self) -> None:
        """Want to have the lease retracted under its copies.

        Raises:
            Violated: It is.
        """
        job = self.job
        if self.known():
            reply = job.session.ask(client.RetractLease, job.lease, "nothing")
            if not isinstance(reply, client.Failed):
                raise Violated(f"{job.host.name}: {job}: retracted under its copies")

    def lie(self, save: SimCopy, more: list[Word]) -> None:
        """Say that what a save still writes is written.

        Raises:
            Violated: It is believed.
        """
        job, upto, lease = self.job, save.upto_tokens, self.job.lease
        words: list[Word] = [
            (client.SayWritten, (lease, upto, save.rank, self.ranks)),
            (client.CommitUpTo, (lease, upto)),
            (client.CommitUpTo, (lease, save.from_token + 1, False)),
            (client.ReleaseUpTo, (lease, upto)),
        ]
        kind, fields = self.rng.choice(words + more)
        reply = job.session.ask(kind, *fields)
        is_refused = isinstance(reply, client.Failed) and reply.refusal.code in LIE_CODES
        if not is_refused:
            raise Violated(
                f"{job.host.name}: {job}: {kind.__name__}{fields} is believed while a save from "
                f"token {save.from_token} on is under way: {reply}"
            )

    def order_wrongly(self, save: SimCopy) -> None:
        """Order what is under way once more, or a copy of pages that are still received.

        Raises:
            Violated: It may be made.
        """
        job, decoder = self.job, self.job.host.node.decoder
        upto_tokens = save.upto_tokens if self.rng.random() < 0.5 else 0
        copy = SimCopy(
            save.lease, save.first_page, save.pages, save.contents, upto_tokens=upto_tokens
        )
        leases = [
            part.lease for part in decoder.open.parts.values() if part.id not in decoder.open.ready
        ]
        arriving = [one for one in leases if one is not None and ENGINE not in one.holders]
        if arriving and self.rng.random() < 0.5:
            lease = self.rng.choice(arriving)
            pages = page_ids(lease.page_table)[lease.owned :]
            upto_tokens = (lease.owned + len(pages)) * PAGE_TOKENS
            copy = SimCopy(lease.id, lease.owned, pages, [], upto_tokens=upto_tokens)
        if job.session.workers[save.rank].try_order(copy) is None:
            raise Violated(
                f"{job.host.name}: {job}: pages {copy.pages} of lease {copy.lease} may be copied"
            )


class SavedStretch(CopyOwner):
    """Tokens on their way from an engine's blocks to the pages of its lease."""

    def __init__(
        self, blocks: CopiedBlocks, start_tokens: int, upto_tokens: int, then: Callable[[], None]
    ) -> None:
        self._blocks = blocks
        self._first = start_tokens // PAGE_TOKENS
        self._contents = blocks.job.prompt.upto(upto_tokens)
        self._upto_tokens = upto_tokens
        self._then = then
        self._left = 0
        self._saved: dict[int, set[int]] = {}
        """By page of the row: the ranks that have saved their part of it."""

    def begin(self) -> None:
        """Every rank saves all of it, each in pieces of its own."""
        blocks = self._blocks
        pieces = [
            (rank, first, end)
            for rank in range(blocks.ranks)
            for first, end in blocks.cut(self._first, len(self._contents))
        ]
        self._left = len(pieces)
        blocks.rng.shuffle(pieces)
        for rank, first, end in pieces:
            self._order(rank, first, end)

    def _order(self, rank: int, first: int, end: int) -> None:
        job = self._blocks.job
        copy = SimCopy(
            job.lease,
            first,
            job.rows.pages[first:end],
            self._contents[first:end],
            upto_tokens=min(end * PAGE_TOKENS, self._upto_tokens),
        )
        self._blocks.order(rank, copy, self)

    @override
    def begun(self, copy: SimCopy) -> None:
        for page in range(copy.first_page, copy.end_page):
            self._saved.setdefault(page, set()).discard(copy.rank)

    @override
    def refused(self, copy: SimCopy, refusal: Refusal) -> None:
        blocks = self._blocks
        blocks.under_way.pop(copy, None)
        if blocks.is_open:
            raise Violated(f"{blocks.job}: a save is refused: {refusal.message}")

    @override
    def landed(self, copy: SimCopy) -> None:
        memory, ranks = self._blocks.job.host.memory.first, self._blocks.ranks
        for k, page in enumerate(copy.pages, copy.first_page):
            self._saved[k].add(copy.rank)
            if len(self._saved[k]) == ranks:
                memory[page] = self._contents[k]

    @override
    def over(self, copy: SimCopy, *, is_done: bool) -> None:
        blocks = self._blocks
        blocks.under_way.pop(copy, None)
        if not blocks.is_open:
            return
        self._left -= is_done
        if not is_done:
            self._order(copy.rank, copy.first_page, copy.end_page)
        elif not self._left:
            self._then()


class Loading(CopyOwner):
    """Pages on their way to an engine's blocks."""

    def __init__(self, blocks: CopiedBlocks, *, is_wanted: bool) -> None:
        self._blocks = blocks
        self._is_wanted = is_wanted

    @override
    def begun(self, copy: SimCopy) -> None:
        """They are read as they are."""

    @override
    def refused(self, copy: SimCopy, refusal: Refusal) -> None:
        blocks = self._blocks
        blocks.under_way.pop(copy, None)
        if not blocks.is_open:
            return
        lease = blocks.job.host.node.leases.leases[copy.lease]
        if copy.pages != self._pages(copy):
            self._again(copy)  # a commit has swapped some of them meanwhile
        elif lease.unswapped_from is None:
            raise Violated(f"{blocks.job}: a load is refused: {refusal.message}")

    @override
    def landed(self, copy: SimCopy) -> None:
        """They are still what they were."""

    @override
    def over(self, copy: SimCopy, *, is_done: bool) -> None:
        self._blocks.under_way.pop(copy, None)
        if not is_done and self._is_wanted and self._blocks.is_open:
            self._again(copy)

    def _pages(self, copy: SimCopy) -> list[int]:
        return self._blocks.job.rows.pages[copy.first_page : copy.end_page]

    def _again(self, copy: SimCopy) -> None:
        again = SimCopy(copy.lease, copy.first_page, self._pages(copy), copy.contents)
        self._blocks.order(copy.rank, again, self)


class CopyingSender(SimSendingEngine):
    """A prompt at a prefill engine that computes it in blocks of its own."""

    def __init__(self, session: SimSession, request: Request) -> None:
        super().__init__(session, request)
        self.blocks = CopiedBlocks(self)

    @override
    def leased(self, reply: client.Leased | client.Failed) -> None:
        super().leased(reply)
        if self.written:
            self.blocks.load(self.written, is_wanted=False)

    @override
    def _compute(self, upto_tokens: int, then: Callable[[], None]) -> None:
        stop = upto_tokens
        if self.send and stop < self.prompt.n_tokens:
            stop -= stop % PAGE_TOKENS  # of what is sent, a page that is not full only once
        elif not self.send and stop > self.written + 1 and self.random() < PARTIAL:
            stop = self.host.world.rng.randrange(self.written + 1, stop)
        if stop <= self.written:
            then()
            return

        def saved() -> None:
            self.written = stop
            self._check_sent()
            if self.random() < BESIDES:
                self._load_again(stop - stop % PAGE_TOKENS)
            if self.is_failed and self.send:
                self._abort("it failed")
            elif stop < upto_tokens and not self.send:
                self._compute(upto_tokens, then)
            else:
                then()

        self.blocks.save(self.written, stop, saved)
        self.agenda.after(COPY_S * self.random(), self._do_beside)

    def _load_again(self, n_tokens: int) -> None:
        """It was preempted and is back; a commit may swap what is ordered and not begun yet."""
        self.blocks.load(n_tokens, is_wanted=False)
        if n_tokens:
            self.session.call(self.blocks.shared, client.CommitUpTo, self.lease, n_tokens)

    def _check_sent(self) -> None:
        """A send goes on by what is saved, without a word of its engine."""
        part = self.host.node.prefiller.by_send.get(self.send)
        if part is not None and part.cursor_tokens < self.written:
            raise Violated(
                f"{self.host.name}: {self}: {self.written} tokens are saved, its send knows of "
                f"{part.cursor_tokens}"
            )

    @override
    def _advance(self) -> None:
        if self.random() < 0.3:
            super()._advance()
        else:
            self.agenda.after(self._pace_s * self.random(), self.go_on)

    @override
    def _say(self) -> None:
        self.agenda.after(self._pace_s * self.random(), self.go_on)

    @override
    def _hand_over(self) -> None:
        super()._hand_over()
        self.blocks.is_over = self._ends_lease

    @override
    def _finish(self) -> None:
        super()._finish()
        self.blocks.is_over = self._ends_lease

    # ---- in the middle of copies -------------------------------------------------------------

    def _do_beside(self) -> None:
        save = self.blocks.save_under_way()
        if save is None:
            return
        dice = self.random()
        if dice < LEAVES:
            self._leave_in_the_middle()
        elif dice < LEAVES + LIES:
            self.blocks.lie(save, self._lies(save))
        elif dice < LEAVES + 2 * LIES:
            self.blocks.order_wrongly(save)
        elif dice < LEAVES + 2 * LIES + BESIDES and self.written:
            # Of a page that is saved anew nothing is written.
            whole = self.written - self.written % PAGE_TOKENS
            swaps = self.random() < 0.5
            self.session.call(self.blocks.shared, client.CommitUpTo, self.lease, whole, swaps)

    def _lies(self, save: SimCopy) -> list[Word]:
        if self.send in self.host.node.prefiller.by_send:
            return [
                (client.Advance, (self.send, save.upto_tokens)),
                (client.Finish, (self.send, b"a lie")),
                (client.FinishAndRelease, (self.send, b"a lie")),
            ]
        request = self.request
        if self.send or not request.room:
            return []
        fields = (request.room, self.lease, self.prompt.namespace, 1.0, None, b"a lie")
        return [(client.HandOver, fields)]

    def _leave_in_the_middle(self) -> None:
        if self.send:
            self.session.call(self.either, client.AbortSend, self.send, "it lets go")
        self.let_go(commits=self.random() < 0.6)
        self.end("left")


class CopyingReceiver(ReceivingEngine):
    """A prompt at a decode engine that loads it, and saves what it generates."""

    def __init__(self, session: SimSession, request: Request) -> None:
        super().__init__(session, request)
        self.blocks = CopiedBlocks(self)
        self._unnamed = NO_TOKENS
        """Tokens that it has generated, and has not told the daemon."""

    @override
    def received(self, reply: client.Received) -> None:
        super().received(reply)
        self.blocks.load(self.prompt.n_tokens, is_wanted=True)
        if self.random() < BESIDES:
            self.session.call(self.blocks.shared, client.CommitLease, self.lease)

    @override
    def go_on(self) -> None:
        if not self.blocks.under_way or not self.session.is_alive:
            super().go_on()
            return
        # It is loaded: nothing is generated before that.
        if not self._do_beside():
            self.agenda.after(HOLD_S * self.random(), self.go_on)

    @override
    def _generate(self, n_tokens: int) -> None:
        def saved() -> None:
            new = self._named()
            self.session.call(self.committed, client.CommitLease, self.lease, tokens=new)

        self._save_more(n_tokens, saved)

    def _save_more(self, n_tokens: int, then: Callable[[], None]) -> None:
        start, self._unnamed = self.prompt.n_tokens, self.host.world.some_tokens(n_tokens)
        self.prompt = self.prompt.followed_by(self._unnamed)
        self.blocks.save(start, self.prompt.n_tokens, then)
        if self.random() < LEAVES:
            self._leave_beside()  # at once: of the save nobody at the daemon has heard yet
        else:
            self.agenda.after(COPY_S * self.random(), self._while_saving)

    def _named(self) -> Tokens:
        """What is named with the next call."""
        new, self._unnamed = self._unnamed, NO_TOKENS
        return new

    @override
    def _compute_again(self, start_tokens: int) -> None:
        if start_tokens < self.prompt.n_tokens:
            self.blocks.save(start_tokens, self.prompt.n_tokens, self._pause)
        else:
            self._pause()

    @override
    def _leave(self, room_tokens: int) -> None:
        if room_tokens <= 0 or self.random() > 0.3:
            self.let_go(commits=self.random() < 0.9)
            self._left()
            return

        def saved() -> None:
            self.let_go(self._named(), commits=True)
            self._left()

        self._save_more(1, saved)

    def _left(self) -> None:
        self.host.world.heard_of(self.prompt)
        self.end(self.outcome)

    # ---- in the middle of copies -------------------------------------------------------------

    def _while_saving(self) -> None:
        save = self.blocks.save_under_way()
        if save is None or self._do_beside():
            return
        dice = self.random()
        if dice < LIES:
            self.blocks.lie(save, [])
        elif dice < 2 * LIES:
            self.blocks.order_wrongly(save)

    def _do_beside(self) -> bool:
        """Do something else with the lease under its copies; whether it let go of it."""
        dice = self.random()
        if dice < LEAVES:
            self._leave_beside()
            return True
        if dice < LEAVES + BESIDES / 2:
            self.session.call(self.blocks.shared, client.CommitLease, self.lease)
        elif dice < LEAVES + BESIDES:
            self.blocks.try_retract()
        return False

    def _leave_beside(self) -> None:
        """Let go under its copies: what is not saved is not shared, although it is named."""
        self.let_go(self._named(), commits=self.random() < 0.6)
        self.end("left")


COPYING: dict[type[EngineJob], type[CopyingSender | CopyingReceiver]] = {
    SimSendingEngine: CopyingSender,
    ReceivingEngine: CopyingReceiver,
}
"""What each of the others is where it has blocks of its own."""
