"""Copies that engines make themselves, between blocks of their own and pages of a lease.

An engine that keeps its KV in memory of its own, a GPU's for the most part, saves blocks to pages
and loads them from pages. Its own process moves the bytes, so this node cannot see when. What it
can do is to keep the pages: a process says that a copy begins, and moves no byte before the answer;
and says when it is over. Between the two the lease is held by the copy and counts it among its
readers, so that neither a release, nor its engine's end, nor a commit that swaps pages gives away
what the copy reads or writes::

    process  CopyBegins --> is it this session's lease, are these its pages?  --> go
             (bytes move)   the lease is held for ``copy``
             CopyEnds   --> a save: written, as far as nothing before it is lacking

What a save has put there is written when it is over, for the rank that made it. Copies end in any
order, and only what goes on from there without a gap counts; until then no word of its engine
counts it, and nobody is sent it. One that failed or was given up raises nothing.

A load may be of a lease that is still received, as far as its pages are known to be good. If the
receive fails, nobody uses what was loaded: where a remote may still write the pages, the copy is
forgotten, and may read what it likes.

A process that dies is past writing only when it is gone: its copies end with ``WorkerGone``, which
the shell says when it is, and no earlier.

Invariants: a lease is held by ``COPY`` exactly while it has copies under way; no two of one rank
touch a page that one of them writes; nothing is written that a save under way writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace
from mypy_extensions import mypyc_attr

from kvd.core.cache.engine_copy import EngineCopy, LeaseCopying, Way, overlap, told_part
from kvd.core.cache.lease import ARRIVAL, COPY
from kvd.core.components.device_buffer import Buffers
from kvd.core.components.state import StatePages
from kvd.core.layout.spec import companion_factor, companion_pages, shards_of
from kvd.core.leases.mark_waits import MarkWaits
from kvd.core.leases.written import say_written, tokens_of_ranks
from kvd.errors import Code, Refusal
from kvd.types import NULL_PAGE, Pages, count, page_ids, slice_pages
from kvd.wire import events
from kvd.wire.attach import CopyBegins, CopyEnds, CopyPart, pages_sum
from kvd.wire.client import SayWritten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.inputs import WorkerCopies, WorkerGone
    from kvd.core.layout.spec import PoolSpec
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.leases.owners import Owners
    from kvd.core.outbox import Outbox

MOST_OF_ONE: Final = 1024
"""Copies that one process may have under way: an engine's step orders one or two a request."""

MOST_PARTS: Final = 16
"""Components of one copy."""

PROCESS_GONE: Final = "the process that made it is gone"

COPIES_NAMED: Final = 4
"""Of a lease, when somebody asks why."""


@mypyc_attr(allow_interpreted_subclasses=True)
class EngineCopies:
    """The copies of all engines, by the process that makes them and the number it gave them."""

    def __init__(
        self, name: str, spec: PoolSpec, leases: LeaseTable, owners: Owners, out: Outbox
    ) -> None:
        self.by_worker: dict[int, dict[int, EngineCopy]] = {}
        self.marks = MarkWaits(name, out)
        """What is ordered and has not begun, as the mark before it is late."""
        self._name = name
        self._leases = leases
        beside = [keeper.component.name for keeper in leases.components.each]
        self._factors = {
            component.name: companion_factor(spec, component)
            for component in spec.components
            if component.name not in beside
        }
        """Of the first component and those in lockstep: pages for each page of the first one."""
        self._states = {
            keeper.component.name
            for keeper in leases.components.each
            if isinstance(keeper, StatePages)
        }
        self._n_shards = len(shards_of(spec))
        self._owners = owners
        self._out = out

    def __iter__(self) -> Iterator[EngineCopy]:
        """Each of them."""
        for copies in self.by_worker.values():
            yield from copies.values()

    # ---- what a process says -----------------------------------------------------------------

    def begin(self, got: WorkerCopies, message: CopyBegins) -> Refusal | None:
        """Keep the pages for it; or why no byte may move."""
        self.marks.over(got.worker, message.waited)
        owned = self._owners
        lease_of = owned.running_lease_of if message.to_pages else owned.readable_lease_of
        lease = lease_of(got.session, message.lease)
        if isinstance(lease, Refusal):
            return lease
        own = self.by_worker.get(got.worker, {})
        refusal = self._bad_order(own, message)
        if refusal is not None:
            return refusal
        copy = EngineCopy(got, message, self._from_token(message), self._out.at_s)
        refusal = self._bad_pages(lease, copy) or self._beside_others(lease, copy)
        if refusal is not None:
            return refusal
        if copy.from_token >= 0:
            self._say_no_more(lease, copy)
        if lease.copying is None:
            lease.copying = LeaseCopying()
        lease.copying.begin(copy)
        self.by_worker.setdefault(got.worker, {})[message.call] = copy
        lease.holders.add(COPY)
        self._leases.holders.begin_read(lease)
        return None

    def end(self, got: WorkerCopies, message: CopyEnds) -> LeaseRecord | Refusal | None:
        """It is over, one way or the other; the lease, if more of it is written now."""
        if self.marks.given_up(got, message):
            return None
        copy = self.by_worker.get(got.worker, {}).pop(message.copy, None)
        if copy is None:
            why = f"this process has no copy {message.copy} under way"
            return self._refuse(Code.BAD_REQUEST, why)
        lease = self._leases.leases[copy.lease]
        before = lease.written_tokens
        self._over(
            copy,
            n_bytes=max(0, message.n_bytes) if message.is_done else 0,
            waited_us=max(0, message.waited_us),
            moved_us=max(0, message.moved_us),
            mark_us=max(0, message.mark_us),
            why="" if message.is_done else message.why or "it says no reason",
        )
        return lease if lease.written_tokens > before else None

    def is_whole(self, lease: LeaseRecord) -> bool:
        """Whether a state of it is of the tokens that are committed.

        It stands for all that was computed: so no more may be known, and none be unwritten.
        """
        n_tokens = count(lease.tokens)
        return lease.written_tokens == n_tokens and self._states_stand_for(lease, n_tokens)

    def _states_stand_for(self, lease: LeaseRecord, n_tokens: int) -> bool:
        """Whether its states were saved behind so many tokens, by each rank that writes them.

        Where an engine writes pages itself, it has said so with its commit.
        """
        if not self._states or lease.session not in self._leases.commits.by_word:
            return True
        copying, ranks = lease.copying, max(1, len(lease.said))
        if copying is None or not copying.has_saved:
            # Where nobody has said anything either, all that is written was received.
            return not lease.said
        return all(
            copying.states.get((name, rank)) == n_tokens
            for name in self._states
            for rank in range(ranks)
        )

    def gone(self, got: WorkerGone) -> None:
        """A process is gone, and with it whatever its copies might have written."""
        self.marks.gone(got.worker)
        self._cut(list(self.by_worker.get(got.worker, {}).values()))

    def session_gone(self, session: int) -> None:
        """The last process of an engine is gone."""
        self.marks.session_gone(session)
        self._cut([copy for copy in self if copy.session == session])

    def receive_failed(self, lease: LeaseRecord) -> None:
        """A remote may still write its pages: what is loaded from them is nobody's KV.

        It may go on, as nobody uses what it brings; when it is over it is not known any more.
        """
        if lease.copying is not None:
            self._cut(list(lease.copying.under_way), "the receive that it loads from has failed")

    def _cut(self, copies: list[EngineCopy], why: str = PROCESS_GONE) -> None:
        for copy in copies:
            del self.by_worker[copy.worker][copy.call]
            self._over(copy, why=why)

    # ---- what is refused ---------------------------------------------------------------------

    def _bad_order(self, own: dict[int, EngineCopy], message: CopyBegins) -> Refusal | None:
        """Why it is none, whatever lease it is of."""
        if len(own) >= MOST_OF_ONE:
            why = f"{len(own)} copies of this process are under way, the limit: wait for some"
            return self._refuse(Code.NO_ROOM, why, copies=len(own))
        if message.call in own:
            return self._refuse(Code.BAD_REQUEST, f"copy {message.call} is under way already")
        if not 0 < len(message.parts) <= MOST_PARTS:
            why = f"a copy has 1 to {MOST_PARTS} parts, this one {len(message.parts)}"
            return self._refuse(Code.BAD_REQUEST, why)
        if message.device and not message.device.isprintable():
            return self._refuse(Code.BAD_REQUEST, "the name of its device is not printable")
        for number, part in enumerate(message.parts):
            if any(overlap(part, other) for other in message.parts[:number]):
                why = f"two parts of one copy have the same pages of {part.component}"
                return self._refuse(Code.BAD_PAGES, why)
        return None

    def _beside_others(self, lease: LeaseRecord, copy: EngineCopy) -> Refusal | None:
        """Why it cannot be made beside what is under way, and beside what others have said."""
        at_s = self._out.at_s
        # One that was not full and was read as far as it was, maybe by ranks that write none of it.
        is_anew = 0 <= copy.from_token < lease.written_tokens
        for other in lease.copying.under_way if lease.copying is not None else ():
            is_read = is_anew and other.way is Way.LOAD and copy.meets(other)
            if copy.collides_with(other) or is_read:
                return self._refuse(
                    Code.WRONG_STATE,
                    f"a copy of the same pages of lease {lease.id} is under way, "
                    f"{other.told(at_s)}: order one when the other is over",
                )
        if copy.way is Way.SAVE and copy.ranks < self._n_shards:
            why = f"this pool has {self._n_shards} shards, and each is saved by a rank of its own"
            return self._refuse(Code.BAD_REQUEST, f"{why}: join as one of {self._n_shards} ranks")
        if copy.way is Way.SAVE and len(lease.said) not in {0, 1, copy.ranks}:
            why = f"lease {lease.id} is written by {len(lease.said)} ranks, not by {copy.ranks}"
            return self._refuse(Code.BAD_REQUEST, why, ranks=copy.ranks)
        return None

    def _bad_pages(self, lease: LeaseRecord, copy: EngineCopy) -> Refusal | None:
        """Why these are no pages that it may copy from, or to."""
        for part in copy.parts:
            row = self._row(lease, part.component)
            if row is None:
                why = f"this pool has no component {part.component!r} with pages of leases"
                return self._refuse(Code.BAD_REQUEST, why)
            refusal = self._not_in_row(lease, part, row)
            if refusal is not None:
                return refusal
            if copy.way is Way.SAVE:
                refusal = self._unwritable(lease, copy.rank, part, row)
            else:
                refusal = self._unreadable(lease, part)
            if refusal is not None:
                return refusal
        if copy.from_token < 0:
            return None  # nothing is written by it
        return self._lacking(copy) or self._lacking_beside(lease, copy) or self._bad_end(copy)

    def _lacking_beside(self, lease: LeaseRecord, copy: EngineCopy) -> Refusal | None:
        """The same of windows: where its tokens are in one, they are written there too."""
        for keeper in self._leases.components.each:
            span = keeper.pages_beside(lease, copy.from_token, copy.upto_tokens)
            if isinstance(span, Refusal):
                return replace(span, side=self._name)
            first, end, name = span.first, span.first + count(span.pages), keeper.component.name
            if first == end:
                continue
            named = [
                part
                for part in copy.parts
                if part.component == name
                and part.first_page <= first
                and part.first_page + part.n_pages >= end
            ]
            if not named:
                return self._refuse(
                    Code.BAD_REQUEST,
                    f"a save of tokens {copy.from_token} to {copy.upto_tokens - 1} of "
                    f"{copy.parts[0].component} without pages {first} to {end - 1} of {name}, "
                    "which are of the same tokens: name the pages of each",
                    first_page=first,
                    n_pages=end - first,
                )
        return None

    def _lacking(self, copy: EngineCopy) -> Refusal | None:
        """Why nothing of the first component counts as written: what goes with it is left out."""
        lacking = self._factors.keys() - {part.component for part in copy.parts}
        if not lacking:
            return None
        what = ", ".join(sorted(lacking))
        why = f"a save of {copy.parts[0].component} without {what}, which goes with it"
        return self._refuse(Code.BAD_REQUEST, f"{why}: name the pages of each")

    def _not_in_row(self, lease: LeaseRecord, part: CopyPart, row: Pages) -> Refusal | None:
        first, n_pages = part.first_page, part.n_pages
        if first < 0 or n_pages < 1 or first + n_pages > count(row):
            return self._refuse(
                Code.BAD_PAGES,
                f"{told_part(part)} of lease {lease.id}, whose row of {part.component} has "
                f"{count(row)} pages",
                first_page=first,
                n_pages=n_pages,
                pages=count(row),
            )
        named = slice_pages(row, first, first + n_pages)
        # The numbers travel from a scheduler to its workers, and a commit may have swapped some of
        # them on the way: those may be somebody else's by now.
        if pages_sum(named) != part.pages_sum:
            return self._refuse(
                Code.BAD_PAGES,
                f"{told_part(part)} of lease {lease.id} are others than this order names: they "
                "were swapped since, order it anew with those that the lease has now",
                first_page=first,
                n_pages=n_pages,
            )
        if NULL_PAGE in page_ids(named):
            return self._refuse(
                Code.BAD_PAGES,
                f"lease {lease.id} lacks some of {told_part(part)}: its row has no page",
            )
        return None

    def _unwritable(
        self, lease: LeaseRecord, rank: int, part: CopyPart, row: Pages
    ) -> Refusal | None:
        """Why a save may not write them: others may read what is cached, or said to be written."""
        keeper = self._leases.components.named(part.component)
        if keeper is None:
            factor = self._factors[part.component]
            first = max(lease.owned, self._first_unwritten(lease, rank)) * factor
            if part.first_page >= first:
                return self._saved_ahead(lease, rank, part)
            return self._refuse(
                Code.BAD_PAGES,
                f"page {part.first_page} of lease {lease.id} is written already and others may "
                f"read it: save from page {first} on",
                first_page=part.first_page,
                written_pages=first,
            )
        written = self._first_unwritten(lease, rank)
        if part.component not in self._states and part.first_page < written:
            return self._refuse(
                Code.BAD_PAGES,
                f"{told_part(part)} of lease {lease.id} are of tokens that are written already: "
                f"save from page {written} on",
                first_page=part.first_page,
                written_pages=written,
            )
        named = page_ids(slice_pages(row, part.first_page, part.first_page + part.n_pages))
        own = set(page_ids(keeper.own_pages(lease)))
        foreign = [page for page in named if page not in own]
        if not foreign:
            return None
        return self._refuse(
            Code.BAD_PAGES,
            f"page {foreign[0]} of {part.component} is not lease {lease.id}'s own: it is cached "
            "and others read it",
            page=foreign[0],
        )

    def _first_unwritten(self, lease: LeaseRecord, rank: int) -> int:
        """The first page that a save of that rank may write."""
        # An event that was named for some of it may come at any moment.
        ranks = tokens_of_ranks(lease) if lease.said else (lease.written_tokens,)
        written = _of_rank(ranks, rank)
        # A page that is not full may be saved anew with more tokens, where nobody is sent it.
        if lease.sends is None and not lease.awaited:
            return written // self._leases.page_size
        return self._leases.pages_for(written)

    def _saved_ahead(self, lease: LeaseRecord, rank: int, part: CopyPart) -> Refusal | None:
        """Why it may not write what has been saved behind a gap, and counts when that is closed."""
        copying, size = lease.copying, self._leases.page_size // self._factors[part.component]
        begin, end = part.first_page * size, (part.first_page + part.n_pages) * size
        for first, last in copying.ahead.get(rank, ()) if copying is not None else ():
            if first < end and begin < last:
                return self._refuse(
                    Code.BAD_PAGES,
                    f"tokens {first} to {last - 1} of lease {lease.id} are saved already: a page "
                    "is saved once",
                    first_token=first,
                    end_token=last,
                )
        return None

    def _bad_end(self, copy: EngineCopy) -> Refusal | None:
        """Why a save cannot end with that token."""
        part, size = copy.parts[0], self._leases.page_size
        low = (part.first_page + part.n_pages - 1) * size
        if low < copy.upto_tokens <= low + size:
            return None
        return self._refuse(
            Code.BAD_REQUEST,
            f"a save of {told_part(part)} of lease {copy.lease} ends with one of the tokens "
            f"{low + 1} to {low + size}, not with {copy.upto_tokens}",
            upto_tokens=copy.upto_tokens,
        )

    def _unreadable(self, lease: LeaseRecord, part: CopyPart) -> Refusal | None:
        """Why a load may not read them: there is no KV in them yet."""
        keeper = self._leases.components.named(part.component)
        if keeper is None:
            size = self._leases.page_size // self._factors[part.component]
            written = -(-lease.written_tokens // size)
        else:
            written = keeper.written_pages(lease)
        if part.first_page + part.n_pages <= written:
            return None
        return self._refuse(
            Code.BAD_PAGES,
            f"{told_part(part)} of lease {lease.id} are not all written: KV of "
            f"{lease.written_tokens} tokens is, which takes {written}",
            first_page=part.first_page,
            n_pages=part.n_pages,
            written_pages=written,
        )

    def _row(self, lease: LeaseRecord, component: str) -> Pages | None:
        keeper = self._leases.components.named(component)
        if keeper is not None:
            # Slots of a device buffer hold copies that this node makes.
            return None if isinstance(keeper, Buffers) else keeper.page_table(lease)
        factor = self._factors.get(component)
        return None if factor is None else companion_pages(lease.page_table, factor)

    def _from_token(self, message: CopyBegins) -> int:
        part = message.parts[0]
        if not message.to_pages or part.component != self._leases.pool.name:
            return -1
        return part.first_page * self._leases.page_size

    # ---- what is written by it ---------------------------------------------------------------

    def _say_no_more(self, lease: LeaseRecord, copy: EngineCopy) -> None:
        """Nothing of what the save writes is written until it is over."""
        # Said from now on, however little: a commit without a number must not mean all that is
        # known while the first of it is still to be copied.
        said = lease.said or (lease.written_tokens,)
        said = said if len(said) > 1 else said * copy.ranks
        # Of a page that was not full, the tokens before: a save that fails has damaged them.
        kept = min(said[copy.rank], copy.from_token)
        lease.said = (*said[: copy.rank], kept, *said[copy.rank + 1 :])
        lease.written_tokens = min(lease.written_tokens, max(kept, lease.prefix_tokens))

    def _saved(self, copy: EngineCopy, lease: LeaseRecord, copying: LeaseCopying) -> None:
        """Count a save that is over, as far as nothing before it is lacking."""
        size = self._leases.page_size
        upto = _of_rank(lease.said, copy.rank)
        ahead = copying.ahead.setdefault(copy.rank, [])
        ahead.append((copy.from_token, copy.upto_tokens))
        ahead.sort()
        while ahead and ahead[0][0] <= upto:
            upto = max(upto, ahead.pop(0)[1])
        if not ahead:
            del copying.ahead[copy.rank]
        word = SayWritten(
            call=0, lease=lease.id, upto_tokens=upto, rank=copy.rank, ranks=copy.ranks
        )
        say_written(lease, word, count(lease.page_table) * size)

    def _over(
        self,
        copy: EngineCopy,
        *,
        why: str,
        n_bytes: int = 0,
        waited_us: int = 0,
        moved_us: int = 0,
        mark_us: int = 0,
    ) -> None:
        """No byte of it moves: count it, tell of it, let go of its lease; its number is gone."""
        if not self.by_worker[copy.worker]:
            del self.by_worker[copy.worker]
        lease = self._leases.leases[copy.lease]  # which the copy holds
        copying = lease.copying
        assert copying is not None  # it is under way there
        copying.under_way.remove(copy)
        if not why and copy.way is Way.SAVE:
            copying.save_states(copy, self._states)
            if copy.from_token >= 0:
                self._saved(copy, lease, copying)
        self._out.emit(
            events.EngineCopied(
                session=copy.session,
                lease=lease.id,
                way=copy.way.value,
                device=copy.device,
                rank=copy.rank,
                pages=copy.n_pages,
                n_bytes=n_bytes,
                waited_us=waited_us,
                moved_us=moved_us,
                why=why,
                mark_us=mark_us,
            )
        )
        # The read first, as at the end of a fetch.
        self._leases.holders.end_read(lease)
        if copying.under_way:
            return
        if ARRIVAL in lease.holders:
            lease.holders.discard(COPY)  # nothing of it ends: more of it comes
        else:
            self._leases.holders.release(lease, COPY, "copied")

    def _refuse(self, code: Code, message: str, **numbers: int) -> Refusal:
        return Refusal(code, message, side=self._name, numbers=dict(numbers))


def _of_rank(tokens: tuple[int, ...], rank: int) -> int:
    """What one process has said for all of them holds for each."""
    return tokens[rank] if len(tokens) > 1 else tokens[0]
