"""Commits: whole pages of a lease move from held to cached.

Its anchor moves down and ``owned`` grows. Where the tree had the same tokens already the page table
takes the tree's pages, and the duplicates are given back: after the last post that reads them, and
not before their engine was told of the swap.

What must not live here: how far an engine says that it has written (``written``), and what lies
beside the first component, which joins at the end of the lease (``components``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.cache.lease_state import LeaseStage
from kvd.core.leases.lease_events import tell_committed
from kvd.core.leases.written import tokens_to_commit
from kvd.errors import Code, Refusal
from kvd.types import NO_PAGES, Pages, Tokens, count, slice_pages

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.leases.leased_pool import LeasedPool


@mypyc_attr(allow_interpreted_subclasses=True)
class Commits:
    """What leases share of what they have written."""

    def __init__(self, leased: LeasedPool) -> None:
        self.by_word: set[int] = set()
        """Sessions of whose leases only what was said is written, whatever a commit knows: their KV
        is in blocks of their own first (``SessionTable`` says which they are)."""
        self._leased = leased

    def counts_by_word(self, lease: LeaseRecord) -> bool:
        """Whether only what was said of it is written, whatever a commit knows."""
        return bool(lease.said) or lease.session in self.by_word

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
        page_size = self._leased.page_size
        n_tokens = count(lease.tokens) + count(new_tokens)
        n_pages = count(lease.page_table)
        if n_tokens > n_pages * page_size:
            return _beyond_pages(lease, n_tokens, n_pages * page_size)
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
        last = written // page_size
        # Before the pages join: ``give_back`` must know by then that the engine goes on with its
        # own.
        if not swaps and lease.unswapped_from is None:
            lease.unswapped_from = first
        if lease.cache and lease.anchor is not None and last > first:
            self._cache(lease, lease.anchor, last)
        if lease.unswapped_from is None:
            return first
        return self._swap(lease, first) if swaps else _stay(lease)

    def refusal(
        self, lease: LeaseRecord, n_tokens: int, n_pages: int, upto_tokens: int | None
    ) -> Refusal | None:
        """Why a commit that comes to so many tokens would not be taken, had it so many pages."""
        page_size = self._leased.page_size
        if n_tokens > n_pages * page_size:
            return _beyond_pages(lease, n_tokens, n_pages * page_size)
        if upto_tokens is None and not self.counts_by_word(lease):
            return None
        # A number that is taken is a word: it is said when the commit is made.
        said = lease.said
        written = tokens_to_commit(lease, n_tokens, upto_tokens)
        lease.said = said
        return written if isinstance(written, Refusal) else None

    def keep_written(self, lease: LeaseRecord) -> None:
        """Whole pages of what its engine has said to be written join the tree."""
        # An engine may say that it has written further than the tokens which it has named so far.
        last = min(lease.written_tokens, count(lease.tokens)) // self._leased.page_size
        is_running = lease.state is LeaseStage.RUNNING  # others have no pages, or a copy reads them
        if is_running and lease.cache and lease.anchor is not None and last > lease.owned:
            self._cache(lease, lease.anchor, last)

    def give_back(self, lease: LeaseRecord, duplicates: Pages) -> None:
        """Free replaced pages, but not under a post that reads them or an engine that uses them."""
        if lease.reads or lease.unswapped_from is not None:
            lease.deferred = Pages(lease.deferred + duplicates)
        else:
            self._leased.return_pages(duplicates, lease)
            self._leased.releases += 1

    def _swap(self, lease: LeaseRecord, first: int) -> int:
        """Its engine is told of the cached pages that it did not use so far: from where on."""
        assert lease.unswapped_from is not None
        # Both cleared before anything is given back: ``give_back`` would defer it to the engine
        # again.
        first, lease.unswapped_from = min(first, lease.unswapped_from), None
        duplicates, lease.deferred = lease.deferred, NO_PAGES
        self.give_back(lease, duplicates)
        return first

    def _cache(self, lease: LeaseRecord, anchor: RadixNode, last: int) -> None:
        """Move the pages ``[owned, last)`` into the tree; the lock follows them."""
        leased = self._leased
        if leased.promises.n_pages and self._would_break_promise(lease, last):
            return  # its next commit, or its end, shares them
        first, pages = lease.owned, lease.page_table
        mine = slice_pages(pages, first, last)
        # All of them, also those that do not join: a sweep of the audit that saw them in the lease
        # must not judge them by where they are now.
        leased.moved.log.append(mine)
        extension = leased.tree.extend(
            anchor,
            lease.tokens,
            mine,
            start_tokens=anchor.end_tokens,
            priority=lease.priority,
            writer=lease.session,
        )
        leased.growth += 1
        # Before anything is given back: what joined is unlocked until here, and could be evicted.
        leased.tree.relock(anchor, extension.node)
        lease.anchor = extension.node
        lease.owned = last
        if leased.journal is not None:
            leased.journal.note_cached(lease, extension)
        if extension.duplicates:
            # The duplicates may be under a post that reads them; from here on nobody begins one.
            known, rest = slice_pages(pages, 0, first), slice_pages(pages, last)
            lease.page_table = Pages(known + extension.tree_pages + rest)
            self.give_back(lease, extension.duplicates)
        lease.touched_s = leased.out.at_s
        duplicate_pages = count(extension.duplicates)
        tell_committed(leased.out, lease, extension.node, duplicate_pages)

    def _would_break_promise(self, lease: LeaseRecord, last: int) -> bool:
        """Whether pages that others are promised would be locked, and none come back for them."""
        if not lease.reads and lease.unswapped_from is None:
            return False  # an equal page of its own comes back for each
        leased = self._leased
        upto_tokens = last * leased.page_size
        known = leased.tree.probe(lease.tokens, lease.namespace, upto_tokens) // leased.page_size
        return known - lease.owned > max(0, leased.headroom_pages)


def _stay(lease: LeaseRecord) -> int:
    """Its engine goes on with the pages of its own that it had: nothing changes in its row."""
    # It has the pages of the tree in its row already, so there is nothing to tell it of later.
    if not lease.deferred:
        lease.unswapped_from = None
    return count(lease.page_table)


def _beyond_pages(lease: LeaseRecord, n_tokens: int, room_tokens: int) -> Refusal:
    n_pages = count(lease.page_table)
    return Refusal(
        Code.BAD_REQUEST,
        f"commit of {n_tokens} tokens on lease {lease.id}, which holds pages for {room_tokens}: "
        "extend it before writing",
        numbers={"tokens": n_tokens, "pages": n_pages},
    )
