"""Fetches: pages of a lease's host KV are copied into its device buffer when its engine asks.

What is in which slot is ``residency``; this file orders the copies, tells the engine when its pages
are there, and keeps both sides' pages from everybody until a copy is over::

    fetch(wanted, ahead) -> hits, and slots for the misses -> one Copy -> Copied -> FetchReply
                         '> what is left of the slots for ``ahead`` -> one Copy, nobody waits

One lease is one sequence, so its fetches have their turns one after the other: the next one is
looked at when the one before is answered. A retraction takes its turn among them, because it gives
away pages that a copy may still read or write.

While a copy runs the lease is held by it (``FETCH``) and counts it among its readers, so neither
its release, nor its engine's death, nor a commit that swaps pages of its table gives away what the
copy reads or writes. A quarantined lease has none: it was never delivered, and only what has been
delivered is copied. The end of the transfer process cuts every copy: the slots are free, and who
waits is served by the next one.

Why the last page is right though it is still being written: see ``residency``. What a fetch copies
is what is in host memory then, at least all that had been committed when it was asked for.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

import numpy as np
from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import FETCH
from kvd.core.cache.lease_state import LeaseStage
from kvd.core.components.device_buffer import Buffers
from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, Pages, Tokens, count, page_ids
from kvd.wire import client

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.inputs import Copied, CopyFailed
    from kvd.core.leases.copies import Copies, OwnTransfer
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.leases.owners import Owners
    from kvd.core.leases.retraction import Retractor
    from kvd.core.outbox import Outbox
    from kvd.core.settings import Settings


class PagesAsker(Protocol):
    """Who wants pages in the buffer."""

    def fetched(self, fetch: Fetch, pages: Pages) -> None:
        """They are there: the device page of each wanted page."""

    def refused(self, refusal: Refusal) -> None:
        """They are not."""


@mypyc_attr(allow_interpreted_subclasses=True)
class FetchAsker:
    """The engine that called ``fetch``."""

    __slots__ = ("_call", "_out", "_session")

    def __init__(self, session: int, call: int, out: Outbox) -> None:
        self._session = session
        self._call = call
        self._out = out

    def fetched(self, fetch: Fetch, pages: Pages) -> None:
        """Answer with the pages."""
        self._out.answer(
            self._session,
            client.FetchReply(
                call=self._call,
                pages=pages,
                hits=fetch.hits,
                misses=fetch.misses,
                copied_bytes=fetch.copied_bytes,
            ),
        )

    def refused(self, refusal: Refusal) -> None:
        """Answer with the reason."""
        self._out.answer(self._session, client.Failed(self._call, refusal))


@mypyc_attr(allow_interpreted_subclasses=True)
class Fetch:
    """Wanted pages, on their turn or before it."""

    __slots__ = ("ahead", "asker", "copied_bytes", "is_placed", "missed", "needed", "wanted")

    def __init__(self, asker: PagesAsker, wanted: list[int], ahead: list[int]) -> None:
        self.asker = asker
        self.wanted = wanted
        """As asked: in this order, and perhaps one of them twice."""
        self.needed = list(dict.fromkeys(wanted))
        self.ahead = ahead
        self.is_placed = False
        """Every needed page has a slot, and is there or under a copy."""
        self.missed: set[int] = set()
        """Those that were copied for this call."""
        self.copied_bytes = 0

    @property
    def misses(self) -> int:
        """Pages that were copied for it."""
        return len(self.missed)

    @property
    def hits(self) -> int:
        """Pages that were there, or on their way already."""
        return len(self.wanted) - len(self.missed)


@mypyc_attr(allow_interpreted_subclasses=True)
class Retreat:
    """A retraction that waits for the copies of its lease to be over.

    Its ``tokens`` follow those ``known`` when it was asked for.
    """

    __slots__ = ("known", "message", "session", "tokens")

    def __init__(
        self, session: int, message: client.RetractLease, known: Tokens, tokens: Tokens
    ) -> None:
        self.known = known
        self.session = session
        self.message = message
        self.tokens = tokens


@mypyc_attr(allow_interpreted_subclasses=True)
class Filling:
    """One copy into a buffer; ``fetch`` waits for it, None where nobody does."""

    __slots__ = ("fetch", "lease")

    def __init__(self, lease: LeaseRecord, fetch: Fetch | None) -> None:
        self.lease = lease
        self.fetch = fetch


@mypyc_attr(allow_interpreted_subclasses=True)
class Fetcher:
    """The turns of each lease, and the copies that they ordered."""

    def __init__(
        self,
        settings: Settings,
        leases: LeaseTable,
        owners: Owners,
        retractor: Retractor,
        transfer: OwnTransfer,
        copies: Copies,
        out: Outbox,
    ) -> None:
        self.copies: dict[int, Filling] = {}
        """By ticket: under way in the transfer process."""
        self.turns: dict[int, deque[Fetch | Retreat]] = {}
        """By lease id; the first one has its turn. No entry where there is none."""
        self._table = leases
        self._owners = owners
        self._retractor = retractor
        self._transfer = transfer
        self._copies = copies
        self._out = out
        self._name = settings.name
        self._family = settings.spec.family
        self._region = settings.spec.components[0].name
        self._buffers = next(
            (keeper for keeper in leases.components.each if isinstance(keeper, Buffers)), None
        )

    # ---- the verbs ---------------------------------------------------------------------------

    def fetch(self, session: int, message: client.FetchPages, _: Tokens) -> Refusal | None:
        """Answer when the wanted pages are in the buffer, or say why that cannot be."""
        lease = self._owners.running_lease_of(session, message.lease)
        if isinstance(lease, Refusal):
            return lease
        if self._buffers is None:
            return self._refusal(
                Code.NOT_SUPPORTED,
                f"a pool of family {self._family} has no device buffer to fetch "
                "into: its KV is where the engine reads it; fetch is for family hisparse",
            )
        refusal = self._unfit(self._buffers, lease, message)
        if refusal is None:
            asker = FetchAsker(session, message.call, self._out)
            wanted, ahead = page_ids(Pages(message.pages)), page_ids(Pages(message.ahead))
            self._take_turn(lease, Fetch(asker, wanted, ahead))
        return refusal

    def _unfit(
        self, buffers: Buffers, lease: LeaseRecord, message: client.FetchPages
    ) -> Refusal | None:
        """Why these pages of the lease cannot be had."""
        n_slots = buffers.resident[lease.id].n_slots
        n_wanted = count(message.pages)
        if n_wanted > n_slots:
            return self._refusal(
                Code.TOO_LARGE,
                f"{n_wanted} pages are wanted at once, lease {lease.id} has {n_slots} pages of "
                f"{buffers.component.name}: fetch fewer, or raise pool.buffer_tokens",
                {"wanted_pages": n_wanted, "buffer_pages": n_slots},
            )
        # First: what is no page of its row cannot be compared with how far it is written.
        refusal = self._bad_numbers(lease, message.pages) or self._bad_numbers(lease, message.ahead)
        if refusal is not None:
            return refusal
        written = self._table.pages_for(lease.written_tokens)
        last = max(page_ids(Pages(message.pages)), default=-1)
        if last >= written:
            return self._refusal(
                Code.BAD_PAGES,
                f"page {last} of lease {lease.id} is not written: KV of {lease.written_tokens} "
                f"tokens is, which takes {written} pages; commit it first",
                {"page": last, "written_pages": written},
            )
        return None

    def _bad_numbers(self, lease: LeaseRecord, frame: bytes) -> Refusal | None:
        """Why these are no logical pages of the lease. The cost is bounded by how many it has."""
        n_pages = count(lease.page_table)
        if len(frame) % ID_BYTES or len(frame) > len(lease.page_table):
            return self._refusal(
                Code.BAD_PAGES,
                f"{len(frame)} bytes are no page numbers of lease {lease.id}: they are {ID_BYTES} "
                f"bytes each, at most as many as its {n_pages} pages",
            )
        numbers = page_ids(Pages(frame))  # few: a list is looked through faster than an array
        if not numbers or (min(numbers) >= 0 and max(numbers) < n_pages):
            return None
        wrong = next(number for number in numbers if not 0 <= number < n_pages)
        return self._refusal(
            Code.BAD_PAGES,
            f"page {wrong} is none of lease {lease.id}, which has the pages 0 to {n_pages - 1}",
            {"page": wrong, "pages": n_pages},
        )

    def preload(self, lease: LeaseRecord, n_tokens: int, asker: PagesAsker) -> None:
        """All of a prompt that has just arrived, and fits: page ``n`` goes to slot ``n``."""
        # A remote has written them, of which no engine has said a word: without this they would
        # count as unfinished, and the first fetch would copy all of them again.
        lease.written_tokens = n_tokens
        self._take_turn(lease, Fetch(asker, list(range(self._table.pages_for(n_tokens))), []))

    def retract(self, session: int, message: client.RetractLease, tokens: Tokens) -> Refusal | None:
        """As ``Retractor.retract``, once no copy reads or writes pages of the lease."""
        lease = self._owners.running_lease_of(session, message.lease)
        if isinstance(lease, Refusal) or not self._is_busy(lease):
            return self._retractor.retract(session, message, tokens)
        # With the tokens of now: if the engine commits more before its turn comes, the pages that
        # the call spoke of are not all of the lease's any more.
        self._take_turn(lease, Retreat(session, message, lease.tokens, tokens))
        return None

    # ---- turns -------------------------------------------------------------------------------

    def _is_busy(self, lease: LeaseRecord) -> bool:
        return lease.id in self.turns or FETCH in lease.holders

    def _take_turn(self, lease: LeaseRecord, turn: Fetch | Retreat) -> None:
        self.turns.setdefault(lease.id, deque()).append(turn)
        self._go_on(lease)

    def _go_on(self, lease: LeaseRecord) -> None:
        """End the turns that can end now, in their order."""
        # None where the lease has ended under a copy: its turns were answered then.
        turns = self.turns.get(lease.id)
        while turns and self._is_over(lease, turns[0]):
            turns.popleft()
        if not turns:
            self.turns.pop(lease.id, None)

    def _is_over(self, lease: LeaseRecord, turn: Fetch | Retreat) -> bool:
        """Do what can be done now; whether nothing is left to do."""
        if isinstance(turn, Retreat):
            return self._retreated(lease, turn)
        if lease.state is not LeaseStage.RUNNING or self._buffers is None:
            turn.asker.refused(
                self._refusal(
                    Code.WRONG_STATE,
                    f"lease {lease.id} is {lease.state.value} since it was asked to fetch: "
                    "resume it first",
                )
            )
            return True
        # Placed once. Asking again would count an unfinished page as stale, and copy it for ever.
        turn.is_placed = turn.is_placed or self._place(self._buffers, lease, turn)
        if not turn.is_placed or not self._buffers.resident[lease.id].is_there(turn.needed):
            return False
        self._buffers.count_use(lease, turn.hits, turn.misses)
        turn.asker.fetched(turn, self._buffers.device_pages(lease, turn.wanted))
        return True

    def _retreated(self, lease: LeaseRecord, turn: Retreat) -> bool:
        if FETCH in lease.holders:
            return False
        refusal: Refusal | None = self._refusal(
            Code.WRONG_STATE,
            f"lease {lease.id} has committed more tokens since it was asked to retract: retract "
            "it again, and name those behind them",
        )
        if turn.known == lease.tokens:
            refusal = self._retractor.retract(turn.session, turn.message, turn.tokens)
        if refusal is not None:
            self._out.answer(turn.session, client.Failed(turn.message.call, refusal))
        return True

    def _place(self, buffers: Buffers, lease: LeaseRecord, fetch: Fetch) -> bool:
        """Slots and copies for what is needed, then for what may be; False: not now."""
        resident = buffers.resident[lease.id]
        is_serving = self._transfer.generation > 0
        # Nothing is changed: ``transfer_ready`` asks again, and then the pages get their slots.
        if not is_serving and not resident.needs_no_copy(fetch.needed):
            return False
        # A page that is not written to its end yet is copied for this fetch alone: see residency.
        whole_pages = lease.written_tokens // self._table.page_size
        missing = resident.want(fetch.needed, whole_pages)
        if missing is None:
            return False
        if missing:
            fetch.missed.update(missing)
            self._fill(buffers, lease, missing, fetch)
        # Taken off the fetch: a lost copy has it placed again, and what was only hoped for is not
        # repeated.
        ahead, fetch.ahead = fetch.ahead, []
        if ahead and is_serving:
            early = resident.want_ahead(ahead, whole_pages, fetch.needed)
            if early:
                self._fill(buffers, lease, early, None)
        return True

    # ---- copies ------------------------------------------------------------------------------

    def _fill(
        self, buffers: Buffers, lease: LeaseRecord, missing: list[int], fetch: Fetch | None
    ) -> None:
        """Order the copy of these pages into their slots, and keep the lease until it is over."""
        host = Pages(np.frombuffer(lease.page_table, dtype="<i4")[missing].tobytes())
        device = buffers.device_pages(lease, missing)
        ticket = self._copies.order(self, self._region, host, buffers.component.name, device)
        self.copies[ticket] = Filling(lease, fetch)
        buffers.begin_copy(lease, missing, ticket)

    def copied(self, got: Copied) -> None:
        """The pages of one copy are there."""
        filling = self.copies.pop(got.ticket)
        buffers, lease = self._filled(), filling.lease
        if filling.fetch is not None:
            filling.fetch.copied_bytes += got.n_bytes
        buffers.copied_bytes += got.n_bytes
        # Before the hold goes: by what is still being copied it is known whether this was the last.
        buffers.resident[lease.id].copied(got.ticket)
        self._let_go(buffers, lease)
        self._go_on(lease)

    def copy_failed(self, got: CopyFailed) -> None:
        """A copy was refused: its fetch fails; one that hoped for a copy ahead orders its own."""
        filling = self.copies.pop(got.ticket)
        lease, fetch = filling.lease, filling.fetch
        # For all turns of the lease: the ones behind may count on the same pages.
        self._lose(lease, got.ticket)
        if fetch is not None and fetch in self.turns.get(lease.id, ()):
            self.turns[lease.id].remove(fetch)
            why = f"the transfer process refused to copy pages of lease {lease.id}: {got.why}"
            fetch.asker.refused(self._refusal(Code.INTERNAL, why))
        self._go_on(lease)

    def transfer_gone(self) -> None:
        """The process is reaped: no copy writes any more, and what it wrote is anything."""
        # All are lost before the first goes on: a turn that goes on looks which pages are there.
        cut, self.copies = self.copies, {}
        for ticket, filling in cut.items():
            self._lose(filling.lease, ticket)
        for filling in cut.values():
            self._go_on(filling.lease)

    def transfer_ready(self) -> None:
        """The next generation serves: copy what waited for it."""
        # A copy of the keys: a lease whose last turn ends here loses its entry.
        for lease_id in list(self.turns):
            self._go_on(self._table.leases[lease_id])

    def _lose(self, lease: LeaseRecord, ticket: int) -> None:
        """What one copy wrote is not to be used: who counted on it must have it placed again."""
        buffers = self._filled()
        buffers.resident[lease.id].not_copied(ticket)
        for turn in self.turns.get(lease.id, ()):
            if isinstance(turn, Fetch):
                turn.is_placed = False
        self._let_go(buffers, lease)

    def _let_go(self, buffers: Buffers, lease: LeaseRecord) -> None:
        """One copy is over; with the last one a lease that nobody else wants ends."""
        # The read first: the last holder frees all that is held, and would free what is deferred
        # a second time if the read ended after it.
        self._table.holders.end_read(lease)
        if not buffers.resident[lease.id].n_copying:
            self._table.holders.release(lease, FETCH, "copied")

    def _filled(self) -> Buffers:
        """The buffers that a copy was ordered into."""
        assert self._buffers is not None
        return self._buffers

    # ---- the engine lets go ------------------------------------------------------------------

    def lease_ends(self, lease: LeaseRecord) -> None:
        """Its engine releases it or is dead: who waits is told, copies under way go on."""
        for turn in self.turns.pop(lease.id, ()):
            why = self._refusal(Code.CANCELLED, f"lease {lease.id} was released meanwhile")
            if isinstance(turn, Fetch):
                turn.asker.refused(why)
            else:
                self._out.answer(turn.session, client.Failed(turn.message.call, why))

    def _refusal(
        self, code: Code, message: str, numbers: dict[str, int | float | str] | None = None
    ) -> Refusal:
        return Refusal(code=code, message=message, side=self._name, numbers=numbers or {})
