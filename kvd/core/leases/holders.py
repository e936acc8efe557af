"""Who holds a lease and who reads its pages: the last one that lets go ends it.

Its engine is one holder, each send of it another, and so are a copy, a move and a pin. A post that
reads pages holds nothing, but what a commit has replaced waits for it.

What must not live here: what goes with the last holder (``lease_ends``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import COPIES, COPY, ENGINE, OUTLIVING
from kvd.core.cache.lease_record import LeaseSends
from kvd.core.leases.lease_events import tell_committed, tell_extended
from kvd.types import ID_BYTES, NO_PAGES, Pages, slice_pages

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.leases.commits import Commits
    from kvd.core.leases.giving_way import GivingWay
    from kvd.core.leases.lease_ends import LeaseEnds
    from kvd.core.leases.leased_pool import LeasedPool
    from kvd.core.leases.lent_pages import LentPages
    from kvd.types import Tokens


@mypyc_attr(allow_interpreted_subclasses=True)
class Holders:
    """Holders come and let go, posts begin to read and are over."""

    def __init__(
        self,
        leased: LeasedPool,
        commits: Commits,
        giving_way: GivingWay,
        lent: LentPages,
        ends: LeaseEnds,
    ) -> None:
        self._leased = leased
        self._commits = commits
        self._giving_way = giving_way
        self._lent = lent
        self._ends = ends

    def hold_for_send(self, lease: LeaseRecord, holder: str, prompt_tokens: int) -> None:
        """One more holder, which lets go when the prompt is sent; the last one ends the lease."""
        lease.holders.add(holder)
        sends = lease.sends
        if sends is None:
            sends = lease.sends = LeaseSends()
        sends.upto_tokens = max(sends.upto_tokens, prompt_tokens)
        needs = self._leased.components.fresh_tokens(prompt_tokens, cached=True)
        if needs is not None:
            # Sends of one lease may begin their windows at different tokens: the earliest keeps
            # them for all.
            known = sends.window_from
            sends.window_from = needs if known is None else min(known, needs)

    def hand_over(self, lease: LeaseRecord, reason: str) -> None:
        """The prompt is here: from now on the lease is the engine's."""
        # In the place of the arrival, in one assignment: a lease without a holder would be nobody's
        # to end.
        lease.holders = {ENGINE, *(lease.holders & {COPY})}
        lease.reason = reason
        if self._leased.journal is not None:
            # Only now: as long as a remote wrote them they were free to the process after this one,
            # which has no transfer that would go on.
            self._leased.journal.note_held(lease, lease.held)

    def begin_read(self, lease: LeaseRecord) -> None:
        """A post reads its pages from now on."""
        lease.reads += 1

    def end_read(self, lease: LeaseRecord) -> None:
        """That post is over."""
        lease.reads -= 1
        # An engine that was not told of the swap still reads its own pages, when no post does any
        # more.
        if not lease.reads and lease.deferred and lease.unswapped_from is None:
            self._leased.return_pages(lease.deferred, lease)
            lease.deferred = NO_PAGES
            self._leased.releases += 1

    def release(self, lease: LeaseRecord, holder: str, cause: str) -> None:
        """``holder`` lets go; the last one unlocks the prefix and frees the held pages.

        What its engine has said to be written stays cached, whatever ended it.
        """
        leased = self._leased
        # It gave way earlier in this step: who held it is told at its end, and may let go before.
        if lease.id not in leased.leases:
            return
        # First of all: what joins the tree needs the lock, and is noted as of a lease that has an
        # engine.
        if lease.said and holder == ENGINE:
            self._commits.keep_written(lease)
        lease.holders.discard(holder)
        if self._giving_way.leases:
            self._giving_way.keep_for(lease, holder)
        # Noted before its lock goes: by its anchor the journal knows whether it kept anything.
        if leased.journal is not None and holder == ENGINE:
            leased.journal.note_ended(lease)
            leased.journal.note_freed(self._lent.lent_by(lease))
        if lease.holders:
            self._go_on(lease, holder)
            return
        self._ends.end_lease(lease, cause)

    def _go_on(self, lease: LeaseRecord, gone: str) -> None:
        """``gone`` has let go, and others hold it still."""
        leased = self._leased
        # Only its engine goes on into it; and nothing is promised to what ends below either.
        if ENGINE not in lease.holders:
            leased.releases += leased.promises.end(lease)
        if lease.holders == {ENGINE}:
            # The last send is over: the next slide may give back what was kept for it.
            lease.sends = None
        elif (
            leased.journal is not None and gone in OUTLIVING and lease.holders.isdisjoint(OUTLIVING)
        ):
            # Only a transfer or a copy of ours is left, and those end with this process.
            leased.journal.note_freed(lease.held)
        if ENGINE not in lease.holders:
            self._cut_reserve(lease)
            self._giving_way.note_idle(lease)

    def _cut_reserve(self, lease: LeaseRecord) -> None:
        """No engine writes it any more: only the prompts that are sent of it are read."""
        # A copy reads or writes what it was begun with; of an arena the engine names pages.
        if lease.sends is None or lease.is_arena or lease.holders & COPIES:
            return
        leased = self._leased
        kept = max(lease.owned, leased.pages_for(lease.sends.upto_tokens))
        rest = slice_pages(lease.page_table, kept)
        # Its own where the tree has equal ones: who went on with them is gone, and what a post
        # reads of them goes with that (``end_read``).
        lease.unswapped_from = None
        if not lease.reads:
            rest, lease.deferred = Pages(rest + lease.deferred), NO_PAGES
        if not rest:
            return
        lease.page_table = slice_pages(lease.page_table, 0, kept)
        lease.room_tokens = min(lease.room_tokens, kept * leased.page_size)
        # A send reads below its prompt's end, so no post is under way to these.
        leased.return_pages(rest, lease)
        leased.components.shorten(lease, kept * leased.page_size)
        leased.releases += 1
        tell_extended(leased.out, lease)

    def commit_and_release(self, lease: LeaseRecord, new_tokens: Tokens) -> bool:
        """Does a commit without a number, then ``release`` by its engine, in one.

        False: nothing was done, and the two are to be called. So it is for what few leases have:
        anything beside the first component, a word of how far it is written, another holder, pages
        that a commit has replaced, saved ones, and a commit of more than it has pages for.
        """
        anchor, leased = lease.anchor, self._leased
        if (
            anchor is None
            or len(lease.holders) != 1
            or lease.said
            or lease.reads
            or lease.deferred
            or lease.unswapped_from is not None
            or lease.saved is not None
            or not leased.has_short_path
        ):
            return False
        tokens, table = lease.tokens, lease.page_table
        if new_tokens:
            tokens += new_tokens  # type: ignore[assignment]  # see RadixNode
        n_tokens, page_size = len(tokens) // ID_BYTES, leased.page_size
        if n_tokens > len(table) // ID_BYTES * page_size:
            return False
        first, last = lease.owned, n_tokens // page_size
        if last > first and lease.session in self._commits.by_word:
            return False
        node, journal, tree = anchor, leased.journal, leased.tree
        if lease.cache and last > first:
            mine: Pages = table[first * ID_BYTES : last * ID_BYTES]  # type: ignore[assignment]
            leased.moved.log.append(mine)
            extension = tree.extend(
                anchor,
                tokens,
                mine,
                start_tokens=anchor.end_tokens,
                priority=lease.priority,
                writer=lease.session,
            )
            node = extension.node
            leased.growth += 1
            if journal is not None:
                journal.note_cached(lease, extension)
            if duplicates := extension.duplicates:
                self._commits.give_back(lease, duplicates)
            tell_committed(leased.out, lease, node, len(duplicates) // ID_BYTES)
            first = last
        if journal is not None:
            journal.note_ended(lease)
        # What joined could be evicted until here, and nobody was given a page meanwhile.
        tree.unlock_from(anchor, node)
        lease.anchor = None
        lease.holders.clear()
        freed: Pages = table[first * ID_BYTES :]  # type: ignore[assignment]
        if freed:
            leased.return_pages(freed, lease)
        was_locked = node.id if node.parent is not None else 0
        self._ends.forget(lease, "normal", len(freed) // ID_BYTES, was_locked)
        return True
