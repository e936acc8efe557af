"""Grants: how a lease gets its lock and its pages, all that it asks for or nothing.

A claim locks the cached prefix of its tokens and takes pages for the rest. There is a budget for
each component that has pages of its own: a claim is granted when every one has what it takes. The
order of a ``Demand`` is theirs: the first component, then each of ``components``. Pages that lie
behind its window a running lease gives back as it slides on.

What must not live here: who waits in which order (``admission``), where pages come from
(``page_supply``), what is promised and not taken (``promises``).
"""

from __future__ import annotations

from operator import add, neg
from typing import TYPE_CHECKING, Protocol

import msgspec
from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import COPY, Claimed, Shortage
from kvd.core.leases.lease_events import tell_extended, tell_opened
from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, NO_TOKENS, Pages, Tokens, count

if TYPE_CHECKING:
    from kvd.core.cache.lease import Claim, Demand
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.leases.commits import Commits
    from kvd.core.leases.evictor import Evictor
    from kvd.core.leases.leased_pool import LeasedPool
    from kvd.core.leases.lent_pages import LentPages
    from kvd.core.leases.page_supply import PageSupply
    from kvd.core.leases.retracted import RetractedLeases


class MissedBelow(Protocol):
    """What lies below the pool."""

    def missed(self, claim: Claim, anchor: RadixNode) -> None:
        """Nothing behind ``anchor`` of an engine's prompt is in the pool."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Grants:
    """Locks and pages for claims, and more of both for leases that go on."""

    def __init__(
        self,
        leased: LeasedPool,
        supply: PageSupply,
        evictor: Evictor,
        commits: Commits,
        lent: LentPages,
        retracted: RetractedLeases,
    ) -> None:
        self.below: MissedBelow | None = None
        """Who asks what a prompt misses whether it lay in a tier."""
        self._leased = leased
        self._supply = supply
        self._evictor = evictor
        self._commits = commits
        self._lent = lent
        self._retracted = retracted

    # ---- a new lease -------------------------------------------------------------------------

    def open_lease(self, claim: Claim) -> LeaseRecord | Shortage:
        """Lock the cached prefix, then hold pages for the rest; all of it or nothing."""
        leased = self._leased
        if not leased.has_short_path or claim.lent is not None or claim.promise_tokens:
            return self._open_any(claim)
        # The short path: the same in one function, where nothing lies beside.
        pool, tree = leased.pool, leased.tree
        n_tokens = len(claim.tokens) // ID_BYTES + claim.reserve_tokens
        n_pages = -(-n_tokens // leased.page_size)
        if n_pages > leased.capacity_pages:
            return Shortage(n_pages, leased.headroom_pages, pool.name)
        anchor = tree.hold(claim.tokens, claim.namespace, claim.match_tokens)
        needed = n_pages - anchor.end_tokens // leased.page_size
        short = pool.short_of(needed)
        # Of pages that do not come back, and of those that others are sure of, the general way
        # knows more. The lock alone may have taken some of these.
        others = leased.promises.n_pages or pool.doomed_pages
        if short > 0 and not others and short * ID_BYTES <= tree.evictable_bytes:
            self._evictor.evict(short, "room", claim.session, claim.reason)
        elif short > 0 or others:
            obtainable = self._supply.obtain(needed)
            if needed > obtainable:
                tree.unlock(anchor)
                return Shortage(needed, obtainable, pool.name)
            self._supply.make_room(needed, claim.session, claim.reason)
        return self._begin(claim, anchor, needed)

    def open_prefix(self, claim: Claim) -> LeaseRecord | Shortage:
        """Lock what is cached of the claim's tokens: they are all the tokens of the lease.

        It takes pages where a component has some of its own for every lease, as a state has. What
        is not cached is not counted as missed.
        """
        leased = self._leased
        if not leased.components.each:
            return self.open_lease(_cut(claim, leased.tree.probe(claim.tokens, claim.namespace)))
        n_tokens = self._usable_tokens(claim)
        # Again where a component can use less of what is cut; each round is a page shorter.
        while count(claim.tokens) != n_tokens:
            claim = _cut(claim, n_tokens)
            n_tokens = self._usable_tokens(claim)
        return self.open_lease(claim)

    def _usable_tokens(self, claim: Claim) -> int:
        """How far every component can go on, which only locking it tells."""
        components = self._leased.components
        anchor = components.lock_prefix(claim)
        components.unlock(anchor, claim)
        self._leased.tree.unlock(anchor)
        return anchor.end_tokens

    def _open_any(self, claim: Claim) -> LeaseRecord | Shortage:
        claimed = self.claim(claim, self._leased.budgets.nothing)
        if isinstance(claimed, Shortage):
            return claimed
        self._supply.have_room(claimed.demand, claim.session, claim.reason)
        return self._grant(claimed)

    def claim(self, claim: Claim, kept: Demand) -> Claimed | Shortage:
        """Lock the cached prefix, if the rest fits after what is kept; nothing else changes.

        The headroom is read after the lock, because locking turns evictable pages into protected
        ones: the number from before would admit too much (scenario A11). What others are promised
        is no headroom, so a prefix is not locked either where only that is left of it.
        """
        leased = self._leased
        tree, components, page_size = leased.tree, leased.components, leased.page_size
        if claim.lent is not None:
            nothing = leased.budgets.nothing
            root = tree.hold(NO_TOKENS, claim.namespace)
            return Claimed(claim, root, nothing, nothing)
        whole = claim.whole
        total = -(-whole.room_tokens // page_size)
        promised = total - -(-claim.room_tokens // page_size)
        # The cached pages count too: they are of this pool, so no eviction makes room for more than
        # it has.
        if total > leased.capacity_pages:
            return Shortage(total, leased.headroom_pages, leased.pool.name)
        if not components.each:
            # Nothing beside can shorten the match here, so it is locked as it is walked.
            anchor = tree.hold(claim.tokens, claim.namespace, claim.match_tokens)
            needed = total - anchor.end_tokens // page_size
            obtainable = self._supply.obtain(needed + kept[0]) - kept[0]
            if needed <= obtainable:
                return Claimed(claim, anchor, (needed - promised,), (needed,))
            tree.unlock(anchor)
            return Shortage(needed, obtainable, leased.pool.name)
        anchor = components.lock_prefix(whole)
        needed = total - anchor.end_tokens // page_size
        demand = (needed, *components.demand(whole, anchor.end_tokens))
        shortage = self._supply.shortage(demand, kept)
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
        demand = self._leased.budgets.nothing
        for claim in claimed:
            demand = tuple(map(add, demand, claim.demand))
        if claimed:
            # In one go, so it is told of the first of them.
            first = claimed[0].claim
            self._supply.have_room(demand, first.session, first.reason)
        return [self._grant(claim) for claim in claimed]

    def _grant(self, claimed: Claimed) -> LeaseRecord:
        """Take the pages that are there for it: it begins, or a retracted one has pages again."""
        leased, claim, anchor = self._leased, claimed.claim, claimed.anchor
        if claim.lent is not None:
            lease = self._lent.borrow(claim, claim.lent, anchor)
        else:
            lease = self._begin(claim, anchor, claimed.demand[0])
        if leased.components.each:
            leased.components.grant(lease, claimed)
        if claim.promise_tokens:
            leased.promises.promise(lease, lease.room_tokens + claim.promise_tokens)
        return lease

    def _begin(self, claim: Claim, anchor: RadixNode, n_pages: int) -> LeaseRecord:
        """The same of the first component: so many pages, and what is cached up to ``anchor``."""
        leased = self._leased
        # Locked since the claim was made: the eviction between the two could not take it.
        own = leased.pool.take_pages(n_pages)
        pages = own
        if anchor.end_tokens:
            pages = leased.tree.path_pages(anchor) + own  # type: ignore[assignment]  # see RadixNode
        if claim.resumes:
            lease = self._retracted.come_back(leased.leases[claim.resumes], anchor, pages)
        else:
            lease = self.add_lease(claim, anchor, pages, n_pages)
        if leased.journal is not None:
            # In this step, so before the answer that names the pages: an engine that writes one
            # must find it noted as its own, or the next process would give it away.
            leased.journal.note_held(lease, own)
        return lease

    def add_lease(self, claim: Claim, anchor: RadixNode, pages: Pages, n_own: int) -> LeaseRecord:
        """A new lease, with so many pages of its own."""
        leased = self._leased
        lease = leased.enter(claim, anchor, pages)
        prefix_tokens = anchor.end_tokens
        lease.owned = prefix_tokens // leased.page_size
        tree, missed, why = leased.tree, 0, ""
        size, n_prompt = tree.match_page_tokens, len(claim.tokens) // ID_BYTES
        if n_prompt - prefix_tokens >= size:
            # A last partial page is never cached, so it is not missed either.
            missed = n_prompt // size * size - prefix_tokens
            root = tree.roots[claim.namespace]
            evictions = self._evictor.evictions
            why, mark = evictions.why_missed(claim.tokens, root, anchor, size)
            if mark and claim.session:
                evictions.hurt(mark, anchor, claim.session, leased.out.at_s)
            if self.below is not None and claim.session and claim.cache:
                self.below.missed(claim, anchor)
        tell_opened(leased.out, lease, n_own, n_prompt, missed, why)
        return lease

    def open_arena(self, claim: Claim, n_pages: int) -> LeaseRecord | None:
        """So many pages that follow each other; None: no run of free ones is so long."""
        leased = self._leased
        if n_pages > self._supply.obtain(n_pages) and leased.promises.n_pages:
            return None
        self._supply.make_room(n_pages, claim.session, claim.reason)
        run = leased.pool.take_run(n_pages)
        if run is None:
            return None
        lease = self.add_lease(claim, leased.tree.hold(NO_TOKENS, claim.namespace), run, n_pages)
        lease.is_arena = True
        if leased.journal is not None:
            leased.journal.note_held(lease, run)
        return lease

    # ---- a lease that goes on ----------------------------------------------------------------

    def extend(self, lease: LeaseRecord, n_tokens: int) -> Shortage | None:
        """Hold pages for ``n_tokens`` more, now or not at all; what is promised is there."""
        leased = self._leased
        room_tokens = lease.room_tokens + n_tokens
        needed = leased.pages_for(room_tokens) - count(lease.page_table)
        if needed > 0:
            # Every budget before the first page: what was taken of one could not be given back
            # without a gap in the row when another one is short.
            demand = (needed, *leased.components.growth(lease, room_tokens))
            promise, kept = lease.promise, leased.budgets.nothing
            if promise is not None and promise.pages:
                # Headroom is without what is promised, and of that so much is its own.
                kept = tuple(map(neg, promise.pages))
            shortage = self._supply.shortage(demand, kept)
            if shortage is not None:
                return shortage
            self._supply.have_room(demand, lease.session, lease.reason)
            taken = leased.pool.take_pages(needed)
            lease.page_table = Pages(lease.page_table + taken)
            if leased.journal is not None:
                leased.journal.note_held(lease, taken)
            leased.components.extend(lease, room_tokens)
            if promise is not None:
                leased.promises.count_again(lease)
            tell_extended(leased.out, lease)
        lease.room_tokens = room_tokens
        lease.touched_s = leased.out.at_s
        return None

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
        room_pages = max(n_pages, self._leased.pages_for(lease.room_tokens + extend_tokens))
        refusal = self._commits.refusal(lease, n_tokens, room_pages, upto_tokens)
        if refusal is not None:
            return refusal
        shortage = self.extend(lease, extend_tokens)
        if shortage is not None:
            return shortage
        first = self._commits.commit(lease, new_tokens, upto_tokens, swaps=swaps)
        return first if isinstance(first, Refusal) else min(first, n_pages)

    def slide(self, lease: LeaseRecord, upto_tokens: int) -> Refusal | None:
        """The engine computes from ``upto_tokens`` on: windows behind it go back."""
        if COPY in lease.holders:
            why = f"lease {lease.id} has copies under way, and a slide gives pages back: wait"
            return Refusal(Code.WRONG_STATE, why)
        leased = self._leased
        refusal = leased.components.slide(lease, upto_tokens)
        if lease.promise is not None:
            # What it gave back for good it needs again where it was promised more.
            leased.promises.count_again(lease)
        # What fell behind the window may be what somebody waits for.
        leased.releases += refusal is None
        return refusal


def _cut(claim: Claim, n_tokens: int) -> Claim:
    """The claim of its first tokens, which others will follow."""
    tokens = Tokens(claim.tokens[: n_tokens * ID_BYTES])
    return msgspec.structs.replace(claim, tokens=tokens, goes_on=True)
