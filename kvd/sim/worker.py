"""Processes of simulated engines that keep their KV in blocks of their own, and what they copy.

A process says that a copy begins, moves no byte before the answer, and says when it is over. From
the answer on the pages of a save hold garbage, until it is over: whoever reads them meanwhile is
found out by what they hold. Every byte that moves looks whose pages they are at that moment.

A process that has lost its connection, or was hung up on, goes on copying until it is dead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvd.core import inputs
from kvd.sim.contents import PAGE_TOKENS, TORN
from kvd.sim.violation import Violated, require
from kvd.types import pack_ids, page_ids
from kvd.wire.attach import CopyBegins, CopyEnds, CopyPart, CopyWaits, KeepsBlocks, pages_sum

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.effects import AnswerWorker
    from kvd.errors import Refusal
    from kvd.sim.engine import SimSession

WORD_S: Final = 0.0002
"""What a word is under way to the daemon: as long as a request of its engine."""

LAGS, LAG_S = 0.5, 0.01
"""Share of orders that reach their process later than what its scheduler does next, and by how
much at most: what is ordered may be over by then, or its pages may be others."""

LATE_MARKS, LATE_S = 0.1, 0.3
"""Share of orders whose mark is late, so that the daemon is told, and by how much at most."""

COPY_S, SLOW_COPY_S, SLOW_COPIES = 0.03, 0.6, 0.25
"""Longest time of a copy, of one that is slow, and the share of those."""

PAGE_BYTES = 4096
"""Of a page that is moved, for whoever counts them."""


class SimCopy:
    """Pages between a lease and the blocks of its engine, from the order until it is over.

    ``contents``: what is in those pages of a load, and is to be in those of a save.
    """

    def __init__(
        self,
        lease: int,
        first_page: int,
        pages: list[int],
        contents: list[int],
        *,
        upto_tokens: int = 0,
    ) -> None:
        self.lease = lease
        self.first_page = first_page
        self.pages = pages
        self.contents = contents
        self.upto_tokens = upto_tokens
        """Of a save; 0: it is a load."""
        self.rank = self.call = self.waited = 0
        self.is_known = False
        """The daemon keeps its pages."""

    @property
    def from_token(self) -> int:
        """The first one whose KV is in these pages."""
        return self.first_page * PAGE_TOKENS

    @property
    def end_page(self) -> int:
        """The page of the row behind them."""
        return self.first_page + len(self.pages)

    def order(self, call: int) -> CopyBegins:
        """What is said before a byte moves."""
        part = CopyPart(
            component="kv",
            first_page=self.first_page,
            n_pages=len(self.pages),
            pages_sum=pages_sum(pack_ids(self.pages)),
        )
        return CopyBegins(
            call=call,
            lease=self.lease,
            to_pages=self.upto_tokens > 0,
            parts=(part,),
            upto_tokens=self.upto_tokens,
            waited=self.waited,
        )

    def waits(self, call: int) -> CopyWaits:
        """What is said where its mark is late."""
        to_pages = self.upto_tokens > 0
        return CopyWaits(call, self.lease, to_pages, len(self.pages), left_us=int(LATE_S * 1e6))


class CopyOwner:
    """Who has ordered copies, and what it hears of them."""

    def begun(self, copy: SimCopy) -> None:
        """Its bytes move from now on."""
        raise NotImplementedError

    def refused(self, copy: SimCopy, refusal: Refusal) -> None:
        """No byte of it moves."""
        raise NotImplementedError

    def landed(self, copy: SimCopy) -> None:
        """All its bytes are where they belong."""
        raise NotImplementedError

    def over(self, copy: SimCopy, *, is_done: bool) -> None:
        """The daemon knows that it is over, or its process is dead."""
        raise NotImplementedError


class SimWorker:
    """One process of an engine, from its connection until it is dead."""

    def __init__(self, session: SimSession, number: int, rank: int, ranks: int) -> None:
        self.session = session
        self.host = session.host
        self.number = number
        self.rank, self.ranks = rank, ranks
        self.is_alive = True
        self.is_connected = True
        self.owners: dict[SimCopy, CopyOwner] = {}
        """Who has ordered each copy that is not over."""
        self.late: set[int] = set()
        """Calls by which the daemon knows of orders that wait for their marks."""
        # Any: each waits for its own answer.
        self._calls: dict[int, Callable[[Any], None]] = {}
        self._n_calls = 0
        self._agenda = self.host.world.agenda
        self._random = self.host.world.rng.random

    def keep_blocks(self) -> None:
        """Its engine's KV is in blocks first: what was not said to be written is not."""
        self._say(KeepsBlocks(call=self._call(lambda refusal: require(not refusal, str(refusal)))))

    def order(self, copy: SimCopy, owner: CopyOwner) -> None:
        """Ask for it, and make it."""
        self.owners[copy] = owner
        copy.rank = self.rank
        copy.call = self._call(lambda refusal: self._answered(copy, refusal))
        lag_s = LAG_S * self._random() if self._random() < LAGS else 0.0
        if self._random() < LATE_MARKS:
            lag_s += LATE_S * self._random()
            copy.waited = self._call(lambda refusal: self._is_late(copy, refusal))
            self._agenda.after(WORD_S, self._say, copy.waits(copy.waited))
        self._agenda.after(WORD_S + lag_s, self._say, copy.order(copy.call))

    def _is_late(self, copy: SimCopy, refusal: Refusal | None) -> None:
        if refusal is None:
            self.late.add(copy.waited)

    def try_order(self, copy: SimCopy) -> Refusal | None:
        """Ask at once for a copy that is never made where it is refused; or None."""
        answers: list[Refusal | None] = []
        self._say(copy.order(self._call(answers.append)))
        require(len(answers) == 1, f"{self.host.name}: a copy is not answered at once")
        return answers[0]

    def _call(self, heard: Callable[[Any], None]) -> int:
        self._n_calls += 1
        self._calls[self._n_calls] = heard
        return self._n_calls

    def _say(self, message: KeepsBlocks | CopyWaits | CopyBegins | CopyEnds) -> None:
        host, agenda = self.host, self._agenda
        if not self.is_alive or not self.is_connected:
            return
        if host.asleep_until_s > agenda.now_s:
            agenda.at(host.asleep_until_s, self._say, message)
            return
        host.feed(
            inputs.WorkerCopies(
                at_s=agenda.now_s,
                session=self.session.id,
                worker=self.number,
                message=message,
                rank=self.rank,
                ranks=self.ranks,
            )
        )

    def heard(self, effect: AnswerWorker) -> None:
        """The daemon answers something.

        Raises:
            Violated: It was not asked, or was answered before.
        """
        waits = self._calls.pop(effect.call, None)
        if waits is None:
            raise Violated(f"{self.host.name}: nobody waits for {effect}: answered twice?")
        waits(effect.refusal)

    # ---- bytes -------------------------------------------------------------------------------

    def _answered(self, copy: SimCopy, refusal: Refusal | None) -> None:
        if self.session.is_alive:
            self.late.discard(copy.waited)
        if refusal is not None:
            self.owners.pop(copy).refused(copy, refusal)
            return
        copy.is_known = True
        self.owners[copy].begun(copy)
        self._move(copy)
        longest_s = SLOW_COPY_S if self._random() < SLOW_COPIES else COPY_S
        lasts_s = longest_s * self._random()
        self._agenda.after(lasts_s * self._random(), self._move, copy)
        self._agenda.after(lasts_s, self._land, copy)

    def _move(self, copy: SimCopy) -> None:
        """Some bytes of it: what lies under a save is nothing that anybody may read."""
        if not self.is_alive:
            return
        self.check(copy)
        if copy.upto_tokens:
            first = self.host.memory.first
            for page in copy.pages:
                first[page] = TORN
        else:
            self._check_read(copy)

    def _land(self, copy: SimCopy) -> None:
        """The last of its bytes; or it has failed."""
        if not self.is_alive:
            return
        world = self.host.world
        is_done = not world.is_stormy or self._random() >= world.profile.failing_posts
        self._move(copy)
        if is_done:
            self.owners[copy].landed(copy)
        call = self._call(lambda refusal: self._over(copy, refusal, is_done=is_done))
        said = CopyEnds(
            call=call,
            copy=copy.call,
            is_done=is_done,
            n_bytes=PAGE_BYTES * len(copy.pages),
            why="" if is_done else "injected",
        )
        self._agenda.after(WORD_S, self._say, said)

    def _over(self, copy: SimCopy, refusal: Refusal | None, *, is_done: bool) -> None:
        if refusal is None:
            copy.is_known = False
            self.owners.pop(copy).over(copy, is_done=is_done)
        elif self.session.is_alive:
            raise Violated(f"{self.host.name}: the end of a copy is refused: {refusal.message}")

    # ---- its end -----------------------------------------------------------------------------

    def die(self) -> None:
        """It is gone; what its copies had not moved never will be."""
        self.is_alive = self.is_connected = False
        self._calls.clear()

    def gone(self) -> None:
        """The daemon has been told that it is: whoever waits for its copies knows."""
        owners, self.owners = self.owners, {}
        for copy, owner in owners.items():
            copy.is_known = False
            owner.over(copy, is_done=False)

    # ---- checks ------------------------------------------------------------------------------

    def check(self, copy: SimCopy) -> None:
        """The pages of a copy under way are its lease's, or cached and locked by that.

        Raises:
            Violated: They are somebody else's, or nobody's.
        """
        table = self.host.node.leases
        lease = table.leases.get(copy.lease)
        what = f"{self.host.name}: {copy.pages} under a copy of lease {copy.lease}"
        if lease is None:
            raise Violated(f"{what}, which has ended")
        pages = set(page_ids(lease.held))
        if not copy.upto_tokens and lease.anchor is not None:
            pages.update(page_ids(table.tree.path_pages(lease.anchor)))
        require(pages.issuperset(copy.pages), f"{what} are not its own: it has {sorted(pages)}")

    def _check_read(self, copy: SimCopy) -> None:
        self.host.check(
            copy.pages,
            copy.contents,
            len(copy.contents) * PAGE_TOKENS,
            f"pages from {copy.first_page} on of lease {copy.lease} that are loaded",
        )
