"""Arenas: pages of the pool that an engine keeps its own KV in, and places itself.

An arena is a lease of pages that follow each other, without tokens: nothing of it is looked up,
cached or committed, and what its engine keeps in which page is not known here. A send reads pages
of it where they are. A receive writes pages of it: these are lent to a lease of the receive's own,
so that whoever looks finds them held for that handoff, or in quarantine, and they come back to the
arena when no remote can write them any more; to the pool where the arena is gone by then::

    pool  --open-->  arena  --receive-->  lent  --delivered, settled, quiet, fenced-->  arena
      ^---close--------'                    '------the same, but the arena is closed--> pool

What must not live here: what moves (``grants`` opens one, ``lent_pages`` lends of it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, Pages, count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.leases.lease_table import LeaseTable

REASON: Final = "arena"
"""What the lease of an arena is for, as tables show it."""


def unfit_pool(leases: LeaseTable, side: str) -> Refusal | None:
    """Why this pool has no arenas."""
    beside = [keeper.component.name for keeper in leases.components.each]
    if not beside:
        return None
    return Refusal(
        Code.NOT_SUPPORTED,
        f"pool {leases.pool.name} of {side} has {', '.join(beside)} beside its first component, "
        "whose pages kvd places: an engine cannot place those of one component alone; use leases",
        side=side,
    )


def no_run(leases: LeaseTable, n_pages: int, side: str) -> Refusal:
    """Why no arena of that size is there now."""
    longest, capacity = leases.pool.longest_run(), leases.capacity_pages
    is_too_large = n_pages > capacity
    todo = "enlarge pool.pages" if is_too_large else "open arenas before leases, or a smaller one"
    n_promised = leases.promises.n_pages
    promised = f"{n_promised} promised to leases, " if n_promised else ""
    return Refusal(
        Code.TOO_LARGE if is_too_large else Code.NO_ROOM,
        f"an arena of {n_pages} pages: pool {leases.pool.name} has {capacity}, "
        f"{leases.pool.free_pages} of them free, {promised}the longest run of free ones is "
        f"{longest}: {todo}",
        side=side,
        numbers={
            "pages": n_pages,
            "pool_pages": capacity,
            "free_pages": leases.pool.free_pages,
            "longest_run": longest,
        },
    )


def bad_pages(arena: LeaseRecord, pages: Pages, n_pages: int, leases: LeaseTable) -> Refusal | None:
    """Why these are not ``n_pages`` pages of the arena that are its engine's now."""
    if len(pages) % ID_BYTES or count(pages) != n_pages:
        return Refusal(
            Code.BAD_REQUEST,
            f"{len(pages) / ID_BYTES:g} pages of arena {arena.id} for what takes {n_pages}: name "
            "one page for each page of the tokens, in their order",
            numbers={"pages": len(pages) // ID_BYTES, "needed_pages": n_pages},
        )
    ids = np.frombuffer(pages, "<u4")
    named, times = np.unique(ids, return_counts=True)
    if named.size != ids.size:
        twice = int(named[times > 1][0])
        what = f"page {twice} of arena {arena.id} is named twice: it holds one page of the tokens"
        return Refusal(Code.BAD_REQUEST, what, numbers={"page": twice})
    foreign = named[~np.isin(named, np.frombuffer(arena.page_table, "<u4"))]
    return _not_there(arena, int(foreign[0]), leases) if foreign.size else None


def _not_there(arena: LeaseRecord, page: int, leases: LeaseTable) -> Refusal:
    """Where a page is that the arena has not."""
    for lease in leases.leases.values():
        lent = lease.lent
        if lent is None or lent.arena != arena.id:
            continue
        if page in np.frombuffer(lease.page_table, "<u4"):
            held = lease.quarantine
            how = "is received into by" if held is None else "may still be written by what was"
            return Refusal(
                Code.WRONG_STATE,
                f"page {page} of arena {arena.id} {how} receive {lent.receive} (lease {lease.id}): "
                "wait until it is done, or safe",
                numbers={"page": page, "receive": lent.receive},
            )
    return Refusal(
        Code.BAD_REQUEST,
        f"page {page} is not in arena {arena.id}: name pages that the arena was opened with",
        numbers={"page": page},
    )


def in_use(arena: int, pages: Pages, uses: Iterable[tuple[str, Pages]]) -> Refusal | None:
    """The first of ``uses`` (what it is, and its pages) that has one of these pages."""
    ids = np.frombuffer(pages, "<u4")
    for what, used in uses:
        both = ids[np.isin(ids, np.frombuffer(used, "<u4"))]
        if both.size:
            page = int(both[0])
            return Refusal(
                Code.WRONG_STATE,
                f"page {page} of arena {arena} is in use by {what}: wait until that has ended",
                numbers={"page": page},
            )
    return None
