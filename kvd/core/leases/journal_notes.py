"""What is noted of pages and leases for the process after this one, where the pool outlives it.

One note per move, whatever its size; the journal performs them in order with the other effects. So
whoever may write a page, an engine, a peer or a copy, hears of it after it was noted as nobody's.

What is noted is what an engine may touch once this process is gone: every cached page, and the
leases that an engine holds. Transfers and copies end with the transfer process, so what only they
hold is free for the next process: leases that are still being received, and those that a send
outlives. A retracted lease has no page, and its saved bytes are not kept.

Notes may repeat each other: pages are noted as free whenever they go back to the free list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import ENGINE
from kvd.core.effects import NoteCached, NoteEnded, NoteFreed, NoteHeld
from kvd.types import ID_BYTES, NO_PAGES, NO_TOKENS, count

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.pages import PagePool
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.cache.tree_changes import Extension
    from kvd.core.outbox import Outbox
    from kvd.types import Pages


@mypyc_attr(allow_interpreted_subclasses=True)
class JournalNotes:
    """The notes about the first component of one pool."""

    __slots__ = ("_out", "_pool")

    def __init__(self, pool: PagePool, out: Outbox) -> None:
        self._pool = pool
        self._out = out

    def note_held(self, lease: LeaseRecord, pages: Pages) -> None:
        """``pages`` are new to the lease; nothing is noted while only a remote may touch them."""
        # What only a transfer or a copy writes ends with this process: noted, it would stay out of
        # use over a restart, with nobody to give it back.
        if ENGINE in lease.holders:
            self._out.effects.append(
                NoteHeld(
                    lease=lease.id,
                    session=lease.session,
                    anchor=last_page(lease.anchor),
                    pages=pages,
                )
            )

    def note_cached(self, lease: LeaseRecord, extension: Extension) -> None:
        """Pages of the lease joined the tree, and its lock is behind them."""
        node, joined = extension.node, extension.joined
        is_noted = ENGINE in lease.holders
        before, first, tokens = 0, 0, NO_TOKENS
        if joined:
            n_pages = count(joined)
            n_tokens = count(node.edge)
            before = last_page(node.parent)
            # By the node's own pages: how many tokens they have is not known here.
            first = (node.end_tokens - n_tokens) * n_pages // n_tokens
            tokens = node.edge
        elif not is_noted:
            return
        self._out.effects.append(
            NoteCached(
                lease=lease.id if is_noted else 0,
                anchor=last_page(node) if is_noted else 0,
                namespace=lease.namespace,
                before=before,
                first=first,
                pages=joined,
                tokens=tokens,
            )
        )

    def return_pages(self, pages: Pages, giver: object = None) -> None:
        """Put them back on the free list, as nobody's."""
        self._pool.return_pages(pages, giver)
        self.note_freed(pages)

    def note_freed(self, pages: Pages) -> None:
        """No engine may touch them any more."""
        if pages:
            self._out.effects.append(NoteFreed(pages))

    def note_ended(self, lease: LeaseRecord) -> None:
        """Its engine has let go, or keeps nothing of it but its number.

        Call it before its lock goes: a lease that was retracted has none, and was noted then.
        """
        if lease.anchor is not None:
            self._out.effects.append(NoteEnded(lease.id))


def last_page(node: RadixNode | None) -> int:
    """The page at which the path to ``node`` ends; 0 for a root, which has none."""
    return int.from_bytes(node.pages[-ID_BYTES:] if node is not None else NO_PAGES, "little")
