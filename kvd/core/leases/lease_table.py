"""The lease table: everything that moves a page or a lock.

A commit moves whole pages of a lease from *held* to *cached*: its anchor moves down, ``owned``
grows, and where the tree had the same tokens already the page table takes the tree's pages and the
duplicates are given back (after the last post that reads them). A quarantined lease keeps its held
pages and nothing else: a remote may still write them, so they are neither free nor anyone's.

What a pool has beside its first component is in ``components``, which are asked at the same
moments: all of them have room or none is touched, and all of them end together. There is a budget
for each component that has pages of its own: a request is admitted when every one has what it
takes. The order of a ``Demand`` is theirs: the first component, then each of ``components``.

A retracted lease has given back pages and lock; its bytes are in the saved area (``saved``).

A lease may be held for nobody's sake who would miss it at once: a prompt that a peer has asked for
and not come for yet, a room that has been received. Such a lease **gives way**: where a claim finds
no room, those leases go, oldest first, until there is. Who held them is told in the same step
(``gave_way``), before anything could read their pages.

What is promised to leases (``promises``) is no headroom of anybody else.

Invariants: null + free + held + cached + quarantined = total (I1); no page in two leases.
"""

from __future__ import annotations

from operator import add, neg
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import numpy as np
from mypy_extensions import mypyc_attr

from kvd.core.cache.eviction import eviction_order
from kvd.core.cache.evictions import FLUSH, MOST_FRESH, OPERATOR, SOON_S, Evictions
from kvd.core.cache.lease import COPIES, COPY, ENGINE, OUTLIVING, PIN, Claimed, Shortage
from kvd.core.cache.lease_record import LeaseRecord, LeaseSends
from kvd.core.cache.lease_state import LeaseStage
from kvd.core.cache.moved_pages import MovedPages
from kvd.core.cache.pages import PagePool
from kvd.core.cache.quota_order import QuotaOrder
from kvd.core.cache.radix import RadixTree
from kvd.core.components.all_components import AllComponentPages
from kvd.core.components.component_pages import tell_evicted
from kvd.core.layout.spec import lockstep_bytes
from kvd.core.leases import lease_events
from kvd.core.leases.budgets import Budgets
from kvd.core.leases.journal_notes import JournalNotes
from kvd.core.leases.promises import Promises
from kvd.core.leases.saved_area import SavedArea
from kvd.core.leases.written import tokens_to_commit
from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, NO_PAGES, NO_TOKENS, Pages, Tokens, count, slice_pages
from kvd.wire import client, events

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvd.core.cache.eviction import Policy
    from kvd.core.cache.lease import Claim, Demand, Lent, Quarantine, Writer
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.layout.quota import Quota
    from kvd.core.layout.spec import PoolSpec
    from kvd.core.outbox import Outbox


RECEIVED: Final = "received"
"""Why lent pages came back of whose end the engine hears anyway."""


class MissedBelow(Protocol):
    """What lies below the pool."""

    def missed(self, claim: Claim, anchor: RadixNode) -> None:
        """Nothing behind ``anchor`` of an engine's prompt is in the pool."""


@mypyc_attr(allow_interpreted_subclasses=True)
class LeaseTable:
    """Pages, tree and leases of one pool, moved together or not at all."""

    def __init__(
        self,
        spec: PoolSpec,
        policy: Policy,
        out: Outbox,
        *,
        is_journaled: bool = False,
        quotas: tuple[Quota, ...] = (),
    ) -> None:
        component = spec.components[0]
        self.moved = MovedPages()
        self.pool: PagePool = PagePool(component.name, spec.pages[0], self.moved)
        self.quotas: QuotaOrder | None = QuotaOrder(policy, quotas) if quotas else None
        """The order of eviction, where namespaces have quotas."""
        order = eviction_order(policy) if self.quotas is None else self.quotas
        self.tree = RadixTree(spec.match_page_tokens, order, self.moved)
        self.components = AllComponentPages(spec, self.tree, out)
        self.evictions = Evictions(is_single=not self.components.each)
        self.below: MissedBelow | None = None
        """Who asks what a prompt misses whether it lay in a tier."""
        self.saved: SavedArea = SavedArea(spec, self, out)
        self.page_size = component.page_size
        self.promises = Promises(self.pool, self.tree, self.components, self.page_size)
        self.budgets = Budgets(self.pool, self.tree, self.components, self.promises, self.page_size)
        self.capacity_pages = spec.pages[0] - 1
        """Pages that exist, the null page not counted."""
        self.page_bytes = lockstep_bytes(spec)
        self.leases: dict[int, LeaseRecord] = {}
        self.by_word: set[int] = set()
        """Sessions of whose leases only what was said is written, whatever a commit knows: their KV
        is in blocks of their own first (``SessionTable`` says which they are)."""
        self.giving_way: dict[int, LeaseRecord] = {}
        """Those with a holder that gives way, in the order in which they go."""
        self.gave_way: list[LeaseRecord] = []
        """Those that went in this step; whoever ends what held them clears it."""
        self.releases = 0
        """Grows whenever headroom may have grown: a blocked request need not look before.

        Eviction is no reason: it makes free pages of evictable ones, and both are headroom.
        """
        self.growth = 0
        """Grows whenever more may be cached of a prompt than before."""
        self.opened = 0
        self.number_above = 0
        """What a lease's number is above its place among those opened here: the numbers of before
        the restart are not used again."""
        self.released = 0
        self.evicted_pages = 0
        self._is_short = not self.components.each
        """Whether a lease may be opened and ended on the short path: the same in fewer calls."""
        self._out = out
        self._journal = JournalNotes(self.pool, out) if is_journaled else None
        self.return_pages = (
            self.pool.return_pages if self._journal is None else self._journal.return_pages
        )

    @property
    def headroom_pages(self) -> int:
        """Pages obtainable now by whom none are promised."""
        return self.promises.headroom_pages

    def pages_for(self, n_tokens: int) -> int:
        """Pages that ``n_tokens`` take."""
        return -(-n_tokens // self.page_size)

    def bytes_of(self, n_tokens: int) -> int:
        """Bytes of the pages that ``n_tokens`` take."""
        return self.pages_for(n_tokens) * self.page_bytes

    def counts_by_word(self, lease: LeaseRecord) -> bool:
        """Whether only what was said of it is written, whatever a commit knows."""
        return bool(lease.said) or lease.session in self.by_word

    # ---- one claim ---------------------------------------------------------------------------

    def open_lease(self, claim: Claim) -> LeaseRecord | Shortage:
        """Lock the cached prefix, then hold pages for the rest; all of it or nothing."""
        if not self._is_short or claim.lent is not None or claim.promise_tokens:
            return self._open_any(claim)
        # The short path: the same in one function, where nothing lies beside.
        pool, tree = self.pool, self.tree
        n_tokens = len(claim.tokens) // ID_BYTES + claim.reserve_tokens
        n_pages = -(-n_tokens // self.page_size)
        if n_pages > self.capacity_pages:
            return Shortage(n_pages, self.headroom_pages, pool.name)
        anchor = tree.hold(claim.tokens, claim.namespace, claim.match_tokens)
        needed = n_pages - anchor.end_tokens // self.page_size
        short = pool.short_of(needed)
        # Of pages that do not come back, and of those that others are sure of, the general way
        # knows more. The lock alone may have taken some of these.
        others = self.promises.n_pages or pool.doomed_pages
        if short > 0 and not others and short * ID_BYTES <= tree.evictable_bytes:
            self.evict(short, "room", claim.session, claim.reason)
        elif short > 0 or others:
            obtainable = self._obtain(needed)
            if needed > obtainable:
                tree.unlock(anchor)
                return Shortage(needed, obtainable, pool.name)
            self._make_room(needed, claim.session, claim.reason)
        return self._begin(claim, anchor, needed)

    def open_prefix(self, claim: Claim) -> LeaseRecord | Shortage:
        """Lock what is cached of the claim's tokens: they are all the tokens of the lease.

        It takes pages where a component has some of its own for every lease, as a state has. What
        is not cached is not counted as missed.
        """
        if not self.components.each:
            return self.open_lease(_cut(claim, self.tree.probe(claim.tokens, claim.namespace)))
        n_tokens = self._usable_tokens(claim)
        # Again where a component can use less of what is cut; each round is a page shorter.
        while count(claim.tokens) != n_tokens:
            claim = _cut(claim, n_tokens)
            n_tokens = self._usable_tokens(claim)
        return self.open_lease(claim)

    def _usable_tokens(self, claim: Claim) -> int:
        """How far every component can go on, which only locking it tells."""
        anchor = self.components.lock_prefix(claim)
        self.components.unlock(anchor, claim)
        self.tree.unlock(anchor)
        return anchor.end_tokens

    def _open_any(self, claim: Claim) -> LeaseRecord | Shortage:
        claimed = self.claim(claim, self.budgets.nothing)
        if isinstance(claimed, Shortage):
            return claimed
        self._have_room(claimed.demand, claim.session, claim.reason)
        return self._grant(claimed)

    def claim(self, claim: Claim, kept: Demand) -> Claimed | Shortage:
        """Lock the cached prefix, if the rest fits after what is kept; nothing else changes.

        The headroom is read after the lock, because locking turns evictable pages into protected
        ones: the number from before would admit too much (scenario A11). What others are promised
        is no headroom, so a prefix is not locked either where only that is left of it.
        """
        nothing = self.budgets.nothing
        if claim.lent is not None:
            root = self.tree.hold(NO_TOKENS, claim.namespace)
            return Claimed(claim, root, nothing, nothing)
        whole = claim.whole
        total = -(-whole.room_tokens // self.page_size)
        promised = total - -(-claim.room_tokens // self.page_size)
        # The cached pages count too: they are of this pool, so no eviction makes room for more than
        # it has.
        if total > self.capacity_pages:
            return Shortage(total, self.headroom_pages, self.pool.name)
        tree, components = self.tree, self.components
        if not components.each:
            # Nothing beside can shorten the match here, so it is locked as it is walked.
            anchor = tree.hold(claim.tokens, claim.namespace, claim.match_tokens)
            needed = total - anchor.end_tokens // self.page_size
            obtainable = self._obtain(needed + kept[0]) - kept[0]
            if needed <= obtainable:
                return Claimed(claim, anchor, (needed - promised,), (needed,))
            tree.unlock(anchor)
            return Shortage(needed, obtainable, self.pool.name)
        anchor = components.lock_prefix(whole)
        needed = total - anchor.end_tokens // self.page_size
        demand = (needed, *components.demand(whole, anchor.end_tokens))
        shortage = self._shortage(demand, kept)
        if shortage is None:
            beside = demand[1:]
            if claim is not whole:
                beside = components.demand(claim, anchor.end_tokens)
            return Claimed(claim, anchor, (needed - promised, *beside), demand)
        # Under the tree's lock still: without it the node could be evicted with what lies at it.
        components.unlock(anchor, claim)
        tree.unlock(anchor)
        return shortage

    def open_leases(self, claimed: list[Claimed]) -> list[LeaseRecord]:
        """The pages of claims that fit side by side, with one eviction for all of them."""
        demand = self.budgets.nothing
        for claim in claimed:
            demand = tuple(map(add, demand, claim.demand))
        if claimed:
            # In one go, so it is told of the first of them.
            first = claimed[0].claim
            self._have_room(demand, first.session, first.reason)
        return [self._grant(claim) for claim in claimed]

    def _have_room(self, demand: Demand, session: int, need: str) -> None:
        """Free pages for all of it, for which there is headroom."""
        self._make_room(demand[0], session, need)
        if self.components.each:
            self.components.make_room(demand[1:])

    def _grant(self, claimed: Claimed) -> LeaseRecord:
        """Take the pages that are there for it: it begins, or a retracted one has pages again."""
        lease = self._begin(claimed.claim, claimed.anchor, claimed.demand[0])
        if self.components.each:
            self.components.grant(lease, claimed)
        if claimed.claim.promise_tokens:
            self.promises.promise(lease, lease.room_tokens + claimed.claim.promise_tokens)
        return lease

    def _begin(self, claim: Claim, anchor: RadixNode, n_pages: int) -> LeaseRecord:
        """The same of the first component: so many pages, and what is cached up to ``anchor``."""
        if claim.lent is not None:
            return self._borrow(claim, claim.lent, anchor)
        # Locked since the claim was made: the eviction between the two could not take it.
        own = self.pool.take_pages(n_pages)
        pages = own
        if anchor.end_tokens:
            pages = self.tree.path_pages(anchor) + own  # type: ignore[assignment]  # see RadixNode
        if claim.resumes:
            lease = self._again(self.leases[claim.resumes], anchor, pages)
        else:
            lease = self.add_lease(claim, anchor, pages, n_pages)
        if self._journal is not None:
            # In this step, so before the answer that names the pages: an engine that writes one
            # must find it noted as its own, or the next process would give it away.
            self._journal.note_held(lease, own)
        return lease

    def add_lease(self, claim: Claim, anchor: RadixNode, pages: Pages, n_own: int) -> LeaseRecord:
        """A new lease, with so many pages of its own."""
        self.opened = opened = self.opened + 1
        at_s, prefix_tokens = self._out.at_s, anchor.end_tokens
        lease = LeaseRecord(opened + self.number_above, claim, anchor, pages)
        lease.owned = prefix_tokens // self.page_size
        lease.since_s = lease.touched_s = at_s
        self.leases[lease.id] = lease
        tree, missed, why = self.tree, 0, ""
        size, n_prompt = tree.match_page_tokens, len(claim.tokens) // ID_BYTES
        if n_prompt - prefix_tokens >= size:
            # A last partial page is never cached, so it is not missed either.
            missed = n_prompt // size * size - prefix_tokens
            root = tree.roots[claim.namespace]
            why, mark = self.evictions.why_missed(claim.tokens, root, anchor, size)
            if mark and claim.session:
                self.evictions.hurt(mark, anchor, claim.session, at_s)
            if self.below is not None and claim.session and claim.cache:
                self.below.missed(claim, anchor)
        lease_events.tell_opened(self._out, lease, n_own, n_prompt, missed, why)
        return lease

    def settle_evictions(self) -> None:
        """Enter what was evicted and missed; who begins to thrash is told."""
        for began in self.evictions.settle():
            lease_events.tell_thrashing(self._out, began)

    def extend(self, lease: LeaseRecord, n_tokens: int) -> Shortage | None:
        """Hold pages for ``n_tokens`` more, now or not at all; what is promised is there."""
        room_tokens = lease.room_tokens + n_tokens
        needed = self.pages_for(room_tokens) - count(lease.page_table)
        if needed > 0:
            # Every budget before the first page: what was taken of one could not be given back
            # without a gap in the row when another one is short.
            demand = (needed, *self.components.growth(lease, room_tokens))
            promise = lease.promise
            promised = promise.pages if promise is not None else ()
            # Headroom is without what is promised, and of that so much is its own.
            kept = tuple(map(neg, promised)) or self.budgets.nothing
            shortage = self._shortage(demand, kept)
            if shortage is not None:
                return shortage
            self._have_room(demand, lease.session, lease.reason)
            taken = self.pool.take_pages(needed)
            lease.page_table = Pages(lease.page_table + taken)
            if self._journal is not None:
                self._journal.note_held(lease, taken)
            self.components.extend(lease, room_tokens)
            if promise is not None:
                self.promises.count_again(lease)
            lease_events.tell_extended(self._out, lease)
        lease.room_tokens = room_tokens
        lease.touched_s = self._out.at_s
        return None

    def commit(
        self,
        lease: LeaseRecord,
        new_tokens: Tokens,
        upto_tokens: int | None = None,
        *,
        swaps: bool = True,
    ) -> int | Refusal:
        """The lease knows the new tokens too; whole pages of what is written join the tree.

        That is below ``upto_tokens``, or as far as was said before, or all of it where nothing was.
        What lies beside the first component joins at the end of the lease: windows those below its
        last commit, a state if it stands for exactly what is committed. Until then whoever computes
        goes on from a partial commit only where neither is needed. Without ``swaps`` the engine
        goes on with its own pages where the tree has equal ones.

        Returns:
            The first index at which the page table may have changed, or why nothing was.
        """
        n_tokens = count(lease.tokens) + count(new_tokens)
        n_pages = count(lease.page_table)
        if n_tokens > n_pages * self.page_size:
            return _beyond_pages(lease, n_tokens, n_pages * self.page_size)
        if upto_tokens is not None or self.counts_by_word(lease):
            written = tokens_to_commit(lease, n_tokens, upto_tokens)
            if isinstance(written, Refusal):
                return written
            # Never back: a commit of less shares less, and unsays nothing that a send may read
            # already.
            lease.written_tokens = max(lease.written_tokens, written)
        else:
            written = lease.written_tokens = n_tokens
        # Said again with each last commit: a state stands for all that was computed, and may join
        # the tree only where that is what is committed.
        lease.is_whole = False
        if new_tokens:
            lease.tokens = Tokens(lease.tokens + new_tokens)
            lease.room_tokens = max(lease.room_tokens, n_tokens)
        first = lease.owned
        last = written // self.page_size
        # Before the pages join: ``_give_back`` must know by then that the engine goes on with its
        # own.
        if not swaps and lease.unswapped_from is None:
            lease.unswapped_from = first
        if lease.cache and lease.anchor is not None and last > first:
            self._cache(lease, lease.anchor, last)
        if lease.unswapped_from is None:
            return first
        return self._swap(lease, first) if swaps else self._stay(lease)

    def _stay(self, lease: LeaseRecord) -> int:
        """Its engine goes on with the pages of its own that it had: nothing changes in its row."""
        # It has the pages of the tree in its row already, so there is nothing to tell it of later.
        if not lease.deferred:
            lease.unswapped_from = None
        return count(lease.page_table)

    def _swap(self, lease: LeaseRecord, first: int) -> int:
        """Its engine is told of the cached pages that it did not use so far: from where on."""
        assert lease.unswapped_from is not None
        # Both cleared before anything is given back: ``_give_back`` would defer it to the engine
        # again.
        first, lease.unswapped_from = min(first, lease.unswapped_from), None
        duplicates, lease.deferred = lease.deferred, NO_PAGES
        self._give_back(lease, duplicates)
        return first

    def _cache(self, lease: LeaseRecord, anchor: RadixNode, last: int) -> None:
        """Move the pages ``[owned, last)`` into the tree; the lock follows them."""
        if self.promises.n_pages and self._would_break_promise(lease, last):
            return  # its next commit, or its end, shares them
        first, pages = lease.owned, lease.page_table
        mine = slice_pages(pages, first, last)
        # All of them, also those that do not join: a sweep of the audit that saw them in the lease
        # must not judge them by where they are now.
        self.moved.log.append(mine)
        extension = self.tree.extend(
            anchor,
            lease.tokens,
            mine,
            start_tokens=anchor.end_tokens,
            priority=lease.priority,
            writer=lease.session,
        )
        self.growth += 1
        # Before anything is given back: what joined is unlocked until here, and could be evicted.
        self.tree.relock(anchor, extension.node)
        lease.anchor = extension.node
        lease.owned = last
        if self._journal is not None:
            self._journal.note_cached(lease, extension)
        if extension.duplicates:
            # The duplicates may be under a post that reads them; from here on nobody begins one.
            known, rest = slice_pages(pages, 0, first), slice_pages(pages, last)
            lease.page_table = Pages(known + extension.tree_pages + rest)
            self._give_back(lease, extension.duplicates)
        lease.touched_s = self._out.at_s
        duplicate_pages = count(extension.duplicates)
        lease_events.tell_committed(self._out, lease, extension.node, duplicate_pages)

    def _would_break_promise(self, lease: LeaseRecord, last: int) -> bool:
        """Whether pages that others are promised would be locked, and none come back for them."""
        if not lease.reads and lease.unswapped_from is None:
            return False  # an equal page of its own comes back for each
        upto_tokens = last * self.page_size
        known = self.tree.probe(lease.tokens, lease.namespace, upto_tokens) // self.page_size
        return known - lease.owned > max(0, self.headroom_pages)

    def _give_back(self, lease: LeaseRecord, duplicates: Pages) -> None:
        """Free replaced pages, but not under a post that reads them or an engine that uses them."""
        if lease.reads or lease.unswapped_from is not None:
            lease.deferred = Pages(lease.deferred + duplicates)
        else:
            self.return_pages(duplicates, lease)
            self.releases += 1

    def commit_and_extend(
        self,
        lease: LeaseRecord,
        new_tokens: Tokens,
        extend_tokens: int,
        upto_tokens: int | None,
        *,
        swaps: bool,
    ) -> int | Refusal | Shortage:
        """``extend``, then ``commit``, which the new pages count for: both, or none of them."""
        n_tokens, n_pages = count(lease.tokens) + count(new_tokens), count(lease.page_table)
        room_pages = max(n_pages, self.pages_for(lease.room_tokens + extend_tokens))
        if n_tokens > room_pages * self.page_size:
            return _beyond_pages(lease, n_tokens, room_pages * self.page_size)
        if upto_tokens is not None or self.counts_by_word(lease):
            # Asked before the first change: a number that is taken is a word, and is said below.
            said = lease.said
            written = tokens_to_commit(lease, n_tokens, upto_tokens)
            lease.said = said
            if isinstance(written, Refusal):
                return written
        shortage = self.extend(lease, extend_tokens)
        if shortage is not None:
            return shortage
        first = self.commit(lease, new_tokens, upto_tokens, swaps=swaps)
        return first if isinstance(first, Refusal) else min(first, n_pages)

    def commit_and_release(self, lease: LeaseRecord, new_tokens: Tokens) -> bool:
        """Does ``commit`` without a number, then ``release`` by its engine, in one.

        False: nothing was done, and the two are to be called. So it is for what few leases have:
        anything beside the first component, a word of how far it is written, another holder, pages
        that a commit has replaced, saved ones, and a commit of more than it has pages for.
        """
        anchor = lease.anchor
        if (
            anchor is None
            or len(lease.holders) != 1
            or lease.said
            or lease.reads
            or lease.deferred
            or lease.unswapped_from is not None
            or lease.saved is not None
            or not self._is_short
        ):
            return False
        tokens, table = lease.tokens, lease.page_table
        if new_tokens:
            tokens += new_tokens  # type: ignore[assignment]  # see RadixNode
        n_tokens = len(tokens) // ID_BYTES
        if n_tokens > len(table) // ID_BYTES * self.page_size:
            return False
        first, last = lease.owned, n_tokens // self.page_size
        if last > first and lease.session in self.by_word:
            return False
        node, journal = anchor, self._journal
        if lease.cache and last > first:
            mine: Pages = table[first * ID_BYTES : last * ID_BYTES]  # type: ignore[assignment]
            self.moved.log.append(mine)
            extension = self.tree.extend(
                anchor,
                tokens,
                mine,
                start_tokens=anchor.end_tokens,
                priority=lease.priority,
                writer=lease.session,
            )
            node = extension.node
            self.growth += 1
            if journal is not None:
                journal.note_cached(lease, extension)
            if duplicates := extension.duplicates:
                self._give_back(lease, duplicates)
            lease_events.tell_committed(self._out, lease, node, len(duplicates) // ID_BYTES)
            first = last
        if journal is not None:
            journal.note_ended(lease)
        # What joined could be evicted until here, and nobody was given a page meanwhile.
        self.tree.unlock_from(anchor, node)
        lease.anchor = None
        lease.holders.clear()
        freed: Pages = table[first * ID_BYTES :]  # type: ignore[assignment]
        if freed:
            self.return_pages(freed, lease)
        was_locked = node.id if node.parent is not None else 0
        self.forget(lease, "normal", len(freed) // ID_BYTES, was_locked)
        return True

    # ---- arenas ------------------------------------------------------------------------------

    def open_arena(self, claim: Claim, n_pages: int) -> LeaseRecord | None:
        """So many pages that follow each other; None: no run of free ones is so long."""
        if n_pages > self._obtain(n_pages) and self.promises.n_pages:
            return None
        self._make_room(n_pages, claim.session, claim.reason)
        run = self.pool.take_run(n_pages)
        if run is None:
            return None
        lease = self.add_lease(claim, self.tree.hold(NO_TOKENS, claim.namespace), run, n_pages)
        lease.is_arena = True
        if self._journal is not None:
            self._journal.note_held(lease, run)
        return lease

    def _borrow(self, claim: Claim, lent: Lent, root: RadixNode) -> LeaseRecord:
        """Pages of an arena for one receive; who asked has made sure that the arena has them."""
        arena = self.leases[lent.arena]
        self.moved.log.append(claim.pages)
        arena.page_table = _without(arena.page_table, claim.pages)
        n_pages = count(claim.pages)
        self.opened += 1
        lease = LeaseRecord(self.opened + self.number_above, claim, root, claim.pages)
        lease.lent = lent
        lease.prefix_tokens = lease.written_tokens = lent.first_page * self.page_size
        lease.since_s = lease.touched_s = self._out.at_s
        self.leases[lease.id] = lease
        # In this order: a reader that adds up what is held never sees a page twice.
        lease_events.tell_extended(self._out, arena)
        lease_events.tell_opened(self._out, lease, n_pages, count(claim.tokens), 0, "")
        return lease

    def _lent_by(self, arena: LeaseRecord) -> Pages:
        """Pages that it has lent: as long as it has an engine they are noted as that one's."""
        if not arena.is_arena:
            return NO_PAGES
        lent = [
            lease for lease in self.leases.values() if lease.lent and lease.lent.arena == arena.id
        ]
        return Pages(b"".join([lease.page_table for lease in lent]))

    def _give_up(self, lease: LeaseRecord, pages: Pages, cause: str) -> int:
        """Its own pages go back where it has them from; how many of them are free now."""
        lent = lease.lent
        arena = self.leases.get(lent.arena) if lent is not None else None
        if lent is not None and cause != RECEIVED:
            self._out.answer(lease.session, client.PagesBack(lent.receive))
        if arena is None:
            if pages:
                self.return_pages(pages, lease)
            return count(pages)
        self.moved.log.append(pages)
        arena.page_table = Pages(arena.page_table + pages)
        lease_events.tell_extended(self._out, arena)
        return 0

    # ---- retraction --------------------------------------------------------------------------

    def vacate(self, lease: LeaseRecord, tokens: Tokens) -> None:
        """Unlock the prefix and free the pages; the lease stays, and knows ``tokens``."""
        self.promises.end(lease)
        if self._journal is not None and ENGINE in lease.holders:
            # While it has its lock: of one without, nothing is noted.
            self._journal.note_ended(lease)
        # Components first: what they give to the tree joins it at nodes that the lock still keeps.
        self.components.end_lease(lease)
        self.growth += 1  # windows may have joined the tree
        self._unlock(lease)
        # Read before ``owned`` is cleared: after that the tree's pages would count as its own.
        freed = lease.held
        if freed:
            self.return_pages(freed, lease)
        lease.page_table = lease.deferred = NO_PAGES
        lease.copying = None  # what was saved behind a gap was in these
        lease.unswapped_from = None
        lease.owned = 0
        lease.tokens = tokens
        lease.room_tokens = max(lease.room_tokens, count(tokens))
        self.releases += 1

    def _again(self, lease: LeaseRecord, anchor: RadixNode, pages: Pages) -> LeaseRecord:
        """A retracted lease has a lock and pages again."""
        lease.anchor = anchor
        lease.page_table = pages
        lease.owned = anchor.end_tokens // self.page_size
        lease.prefix_tokens = anchor.end_tokens
        # Also what is still to be copied back: its engine is refused until that is over.
        lease.written_tokens = max(anchor.end_tokens, lease.saved_tokens)
        lease.awaited = lease.events = ()  # its pages are others now
        if lease.said:
            # The pages that each rank spoke of are gone; what was saved of them is the same for all
            # ranks.
            lease.said = (lease.written_tokens,) * len(lease.said)
        lease.touched_s = self._out.at_s
        lease_events.tell_extended(self._out, lease)
        return lease

    # ---- holders and readers -----------------------------------------------------------------

    def hold_for_send(self, lease: LeaseRecord, holder: str, prompt_tokens: int) -> None:
        """One more holder, which lets go when the prompt is sent; the last one ends the lease."""
        lease.holders.add(holder)
        sends = lease.sends
        if sends is None:
            sends = lease.sends = LeaseSends()
        sends.upto_tokens = max(sends.upto_tokens, prompt_tokens)
        needs = self.components.fresh_tokens(prompt_tokens, cached=True)
        if needs is not None:
            # Sends of one lease may begin their windows at different tokens: the earliest keeps
            # them for all.
            known = sends.window_from
            sends.window_from = needs if known is None else min(known, needs)

    def slide(self, lease: LeaseRecord, upto_tokens: int) -> Refusal | None:
        """The engine computes from ``upto_tokens`` on: windows behind it go back."""
        if COPY in lease.holders:
            why = f"lease {lease.id} has copies under way, and a slide gives pages back: wait"
            return Refusal(Code.WRONG_STATE, why)
        refusal = self.components.slide(lease, upto_tokens)
        if lease.promise is not None:
            # What it gave back for good it needs again where it was promised more.
            self.promises.count_again(lease)
        # What fell behind the window may be what somebody waits for.
        self.releases += refusal is None
        return refusal

    def hand_over(self, lease: LeaseRecord, reason: str) -> None:
        """The prompt is here: from now on the lease is the engine's."""
        # In the place of the arrival, in one assignment: a lease without a holder would be nobody's
        # to end.
        lease.holders = {ENGINE, *(lease.holders & {COPY})}
        lease.reason = reason
        if self._journal is not None:
            # Only now: as long as a remote wrote them they were free to the process after this one,
            # which has no transfer that would go on.
            self._journal.note_held(lease, lease.held)

    def begin_read(self, lease: LeaseRecord) -> None:
        """A post reads its pages from now on."""
        lease.reads += 1

    def end_read(self, lease: LeaseRecord) -> None:
        """That post is over."""
        lease.reads -= 1
        # An engine that was not told of the swap still reads its own pages, when no post does any
        # more.
        if not lease.reads and lease.deferred and lease.unswapped_from is None:
            self.return_pages(lease.deferred, lease)
            lease.deferred = NO_PAGES
            self.releases += 1

    def release(self, lease: LeaseRecord, holder: str, cause: str) -> None:
        """``holder`` lets go; the last one unlocks the prefix and frees the held pages.

        What its engine has said to be written stays cached, whatever ended it.
        """
        # It gave way earlier in this step: who held it is told at its end, and may let go before.
        if lease.id not in self.leases:
            return
        # First of all: what joins the tree needs the lock, and is noted as of a lease that has an
        # engine.
        if lease.said and holder == ENGINE:
            self._keep_written(lease)
        lease.holders.discard(holder)
        if self.giving_way:
            self.keep_for(lease, holder)
        # Noted before its lock goes: by its anchor the journal knows whether it kept anything.
        if self._journal is not None and holder == ENGINE:
            self._journal.note_ended(lease)
            self._journal.note_freed(self._lent_by(lease))
        if lease.holders:
            self._go_on(lease, holder)
            return
        if self.components.each:
            # Under the lock, as in ``vacate``.
            self.components.end_lease(lease)
            self.growth += 1
        was_locked = self._unlock(lease)
        self.saved.drop(lease)
        self.forget(lease, cause, self._give_up(lease, lease.held, cause), was_locked)

    def _go_on(self, lease: LeaseRecord, gone: str) -> None:
        """``gone`` has let go, and others hold it still."""
        # Only its engine goes on into it; and nothing is promised to what ends below either.
        if ENGINE not in lease.holders:
            self.releases += self.promises.end(lease)
        if lease.holders == {ENGINE}:
            # The last send is over: the next slide may give back what was kept for it.
            lease.sends = None
        elif (
            self._journal is not None and gone in OUTLIVING and lease.holders.isdisjoint(OUTLIVING)
        ):
            # Only a transfer or a copy of ours is left, and those end with this process.
            self._journal.note_freed(lease.held)
        if ENGINE not in lease.holders:
            self._cut_reserve(lease)
            self._may_go(lease)

    def _cut_reserve(self, lease: LeaseRecord) -> None:
        """No engine writes it any more: only the prompts that are sent of it are read."""
        # A copy reads or writes what it was begun with; of an arena the engine names pages.
        if lease.sends is None or lease.is_arena or lease.holders & COPIES:
            return
        kept = max(lease.owned, self.pages_for(lease.sends.upto_tokens))
        rest = slice_pages(lease.page_table, kept)
        # Its own where the tree has equal ones: who went on with them is gone, and what a post
        # reads of them goes with that (``end_read``).
        lease.unswapped_from = None
        if not lease.reads:
            rest, lease.deferred = Pages(rest + lease.deferred), NO_PAGES
        if not rest:
            return
        lease.page_table = slice_pages(lease.page_table, 0, kept)
        lease.room_tokens = min(lease.room_tokens, kept * self.page_size)
        # A send reads below its prompt's end, so no post is under way to these.
        self.return_pages(rest, lease)
        self.components.shorten(lease, kept * self.page_size)
        self.releases += 1
        lease_events.tell_extended(self._out, lease)

    # ---- leases that give way ----------------------------------------------------------------

    def let_give_way(self, lease: LeaseRecord, holder: str) -> None:
        """From now on the lease is not in the way for that holder's sake."""
        assert lease.sends is not None  # the holder is one of them
        lease.sends.gives_way = (*lease.sends.gives_way, holder)
        self.giving_way[lease.id] = lease
        self._may_go(lease)

    def let_pin_give_way(self, lease: LeaseRecord) -> None:
        """It is held by a pin, and by nobody else."""
        lease.sends = LeaseSends()
        self.let_give_way(lease, PIN)

    def _idle(self) -> list[LeaseRecord]:
        """Those that could go now, in the order in which they go: pins are the last."""
        idle = [lease for lease in self.giving_way.values() if self._is_idle(lease)]
        return sorted(idle, key=_is_pinned)

    def keep_for(self, lease: LeaseRecord, holder: str) -> None:
        """That holder needs it after all: its pages are going to be read."""
        sends = lease.sends
        if sends is None or holder not in sends.gives_way:
            return
        sends.gives_way = tuple([one for one in sends.gives_way if one != holder])
        if not sends.gives_way:
            del self.giving_way[lease.id]

    def _may_go(self, lease: LeaseRecord) -> None:
        """Somebody may have waited for pages that can be had from now on."""
        self.releases += self._is_idle(lease)

    def _is_idle(self, lease: LeaseRecord) -> bool:
        """Whether all who hold it give way, and nothing reads its pages."""
        sends = lease.sends
        if sends is None or not sends.gives_way or lease.reads:
            return False
        return lease.holders.issubset(sends.gives_way)

    def _obtain(self, n_pages: int) -> int:
        """Pages obtainable of the first component, after leases have given way for so many."""
        obtainable = self.headroom_pages
        if n_pages <= obtainable or not self.giving_way:
            return obtainable
        idle = self._idle()
        # Not in vain: of leases that lie on one path this counts more than there is to gain.
        if sum([count(lease.page_table) for lease in idle]) < n_pages - obtainable:
            return obtainable
        for lease in idle:
            self._go(lease)
            obtainable = self.headroom_pages
            if n_pages <= obtainable:
                break
        return obtainable

    def _shortage(self, demand: Demand, promised: Demand) -> Shortage | None:
        """What is short of a demand when all that can has given way for it."""
        shortage = self.budgets.shortage(demand, promised)
        if shortage is None or not self.giving_way:
            return shortage
        for lease in self._idle():
            self._go(lease)
            shortage = self.budgets.shortage(demand, promised)
            if shortage is None:
                break
        return shortage

    def _go(self, lease: LeaseRecord) -> None:
        lease.holders = set()
        self.gave_way.append(lease)
        if self.components.each:
            self.components.end_lease(lease)
            self.growth += 1
        was_locked = self._unlock(lease)
        self.forget(lease, "gave-way", self._give_up(lease, lease.held, "gave-way"), was_locked)
        # They are others' from here on.
        lease.page_table, lease.owned = NO_PAGES, 0

    def _keep_written(self, lease: LeaseRecord) -> None:
        """Whole pages of what its engine has said to be written join the tree."""
        # An engine may say that it has written further than the tokens which it has named so far.
        last = min(lease.written_tokens, count(lease.tokens)) // self.page_size
        is_running = lease.state is LeaseStage.RUNNING  # others have no pages, or a copy reads them
        if is_running and lease.cache and lease.anchor is not None and last > lease.owned:
            self._cache(lease, lease.anchor, last)

    # ---- quarantine --------------------------------------------------------------------------

    def quarantine(self, lease: LeaseRecord, quarantine: Quarantine) -> None:
        """A remote may still write the held pages: keep them from everybody, unlock the rest."""
        self.promises.end(lease)
        # Cached pages are never written by a remote, so they are unlocked; only its own are kept.
        self.components.quarantine_lease(lease)
        was_locked = self._unlock(lease)
        # Before ``owned`` and ``deferred`` are cleared, which say what is its own.
        lease.page_table = lease.held
        lease.deferred = NO_PAGES
        lease.unswapped_from = None
        lease.owned = 0
        lease.tokens = NO_TOKENS
        lease.holders = set()
        lease.quarantine = quarantine
        self.releases += 1
        lease_events.tell_quarantined(self._out, lease, was_locked)

    def narrow_quarantine(self, lease: LeaseRecord, writers: tuple[Writer, ...]) -> None:
        """Some of the writers are over; these may still write."""
        if lease.quarantine is not None:
            lease.quarantine = msgspec.structs.replace(lease.quarantine, writers=writers)

    def end_quarantine(self, lease: LeaseRecord, proof: str) -> None:
        """The writer has settled, is proven gone, or was fenced: the pages are free."""
        n_pages = count(lease.page_table)
        n_freed = self._give_up(lease, lease.page_table, proof)
        self.components.end_lease(lease)
        lease_events.tell_quarantine_ended(self._out, lease, n_pages, proof)
        self.forget(lease, proof, n_freed, 0)

    # ---- pages -------------------------------------------------------------------------------

    def evict(self, n_pages: int, reason: str, session: int = 0, need: str = OPERATOR) -> int:
        """Take at least ``n_pages`` cached pages out of the tree, if so many are evictable.

        ``session`` needs them, for ``need``.
        """
        evicted = self.tree.evict(n_pages)
        if self.quotas is not None:
            self._note_quotas(self.quotas, session, need)
        n_freed = len(evicted.pages) // ID_BYTES
        # Noted as nobody's before anybody is given them: the journal hears in this order.
        self.return_pages(evicted.pages)
        self.evicted_pages += n_freed
        self.evictions.left(evicted.victims, evicted.pages, session, need, self._out.at_s)
        if len(self.evictions.fresh) >= MOST_FRESH:
            self.settle_evictions()
        tell_evicted(self._out, n_freed, len(evicted.victims), reason)
        return n_freed

    def set_quotas(self, policy: Policy, quotas: tuple[Quota, ...]) -> None:
        """These hold from now on. A table that never had any goes on without what they take."""
        if self.quotas is not None:
            self.quotas.share_out(quotas)
        elif quotas:
            self.quotas = QuotaOrder(policy, quotas)
            self.quotas.take_over(self.tree.order)
            self.tree.reorder(self.quotas)

    def _note_quotas(self, order: QuotaOrder, session: int, need: str) -> None:
        """What went out of its turn; of a floor that went it is told, and for whom."""
        if not order.went:
            return
        self.evictions.by_quota.update(order.went)
        taken: dict[str, int] = {}
        for reason in order.went.values():
            if reason.beyond_pages < 0:
                taken[reason.namespace] = taken.get(reason.namespace, 0) - reason.beyond_pages
        order.went = {}
        for namespace, n_pages in taken.items():
            share, at_s = order.share_named(namespace), self._out.at_s
            # Once where it goes on: under load every request would tell of it.
            if share.taken_pages == n_pages or at_s - share.taken_at_s > SOON_S:
                lease_events.tell_floor_broken(self._out, share, n_pages, session, need)
            share.taken_at_s = at_s

    def flush(
        self, keys: Collection[str] | None = None, namespace: str | None = None
    ) -> tuple[int, int]:
        """Drop every unlocked cached page, of these keys of the tree or of all.

        Args:
            keys: None: all of them.
            namespace: what these are called for whoever watches.

        Returns:
            Pages freed, and pages kept by a lock.
        """
        flushed = self.tree.flush(keys)
        # Of a key alone an epoch is over: nothing of it is ever asked for.
        if keys is None or namespace is not None:
            self.evictions.note_flush(namespace, self._out.at_s)
        self.evictions.left(flushed.nodes, NO_PAGES, 0, FLUSH, self._out.at_s)
        n_freed = count(flushed.pages)
        self.return_pages(flushed.pages)
        self._out.emit(
            events.Flushed(freed_pages=n_freed, kept_pages=flushed.kept_pages, namespace=namespace)
        )
        return n_freed, flushed.kept_pages

    def _make_room(self, n_pages: int, session: int, need: str) -> None:
        """Have ``n_pages`` free pages, evicting if that is enough; otherwise change nothing.

        What is claimed is locked before this is called, so nothing of it is evicted here.
        """
        while (short := n_pages - self.pool.free_pages) > 0:  # twice only where some are condemned
            if short > self.tree.evictable_pages:
                return
            self.evict(short, "room", session, need)

    def _unlock(self, lease: LeaseRecord) -> int:
        """Take its lock off the tree; the node at whose end it was, 0 where nothing was locked."""
        anchor = lease.anchor
        if anchor is None:
            return 0
        self.tree.unlock(anchor)
        lease.anchor = None
        return anchor.id if anchor.parent is not None else 0

    def forget(self, lease: LeaseRecord, cause: str, freed_pages: int, was_locked: int) -> None:
        """It has neither lock nor page any more."""
        del self.leases[lease.id]
        if lease.promise is not None:
            self.promises.end(lease)
        if lease.sends is not None and lease.sends.gives_way:
            del self.giving_way[lease.id]
        self.releases += 1
        self.released += 1
        lease_events.tell_released(self._out, lease, cause, freed_pages, was_locked)


def _cut(claim: Claim, n_tokens: int) -> Claim:
    """The claim of its first tokens, which others will follow."""
    tokens = Tokens(claim.tokens[: n_tokens * ID_BYTES])
    return msgspec.structs.replace(claim, tokens=tokens, goes_on=True)


def _is_pinned(lease: LeaseRecord) -> bool:
    return PIN in lease.holders


def _without(pages: Pages, gone: Pages) -> Pages:
    """Those of ``pages`` that are not in ``gone``, in their order."""
    ids = np.frombuffer(pages, "<u4")
    return Pages(ids[~np.isin(ids, np.frombuffer(gone, "<u4"))].tobytes())


def _beyond_pages(lease: LeaseRecord, n_tokens: int, room_tokens: int) -> Refusal:
    n_pages = count(lease.page_table)
    return Refusal(
        Code.BAD_REQUEST,
        f"commit of {n_tokens} tokens on lease {lease.id}, which holds pages for {room_tokens}: "
        "extend it before writing",
        numbers={"tokens": n_tokens, "pages": n_pages},
    )
