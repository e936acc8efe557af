"""Leases of before a restart: a pool that outlived its process is taken over as it was left.

The cached pages that were proven are the tree again. A lease of before the restart keeps its number
and what it kept, because its engine may be reading those pages now; it can be released and nothing
else (``LeaseStage.FORMER``). Its session waits for its engine: for ``ClientCameBack``, which says
what of it is still used, or ``ClientHungUp``. Pages that were somebody's and were not proven are
nobody's cache, and nobody's to write either: one lease of the node itself has them until the last
former lease has ended and no session is waited for, because an engine may read pages under a lease
that nobody here knows of.

All of it or nothing: ``why_not`` looks at what came before anything is changed.

Nothing is noted again for the process after this one, it is in the journal already; only pages that
were not proven are noted as free where nobody can read them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import UNPROVEN, Claim
from kvd.core.cache.lease_record import LeaseRecord
from kvd.core.cache.lease_state import LeaseStage
from kvd.core.effects import NoteFreed
from kvd.types import ID_BYTES, NO_TOKENS, Pages, Tokens, count
from kvd.wire import events

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.inputs import Branch, FormerLease, FormerSession, PoolAdopted
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.leases.session_table import SessionTable
    from kvd.core.outbox import Outbox
    from kvd.core.settings import Settings

REASON = "before the restart"
"""What such a lease was opened for is not known any more."""


class NotAdopted(Exception):
    """This cannot be what the pool held; the message says why. Nothing was changed."""


@mypyc_attr(allow_interpreted_subclasses=True)
class FormerLeases:
    """The leases of before the restart, and the one that keeps what their engines may still read.

    Invariant: ``leases`` are those with an engine that are FORMER; ``unproven`` is there only
    while somebody ``may_read`` it.
    """

    def __init__(
        self, settings: Settings, table: LeaseTable, sessions: SessionTable, out: Outbox
    ) -> None:
        self.leases: dict[int, LeaseRecord] = {}
        """By number, oldest first."""
        self.unproven: LeaseRecord | None = None
        self._is_journaled = settings.is_journaled
        self._table = table
        self._sessions = sessions
        self._out = out

    def of_session(self, session: int) -> list[LeaseRecord]:
        """Those of one engine."""
        return [lease for lease in self.leases.values() if lease.session == session]

    def take_over(self, got: PoolAdopted) -> None:
        """Take all of it in.

        Raises:
            NotAdopted: it is not whole, or this node is not new; nothing was changed.
        """
        # All of it before the first change: half a pool taken over would be pages of an engine
        # given away.
        wrong = self.why_not(got)
        if wrong:
            raise NotAdopted(wrong)
        table = self._table
        table.pool.take_these(_pages_of(got))
        # Before the leases, each of which locks the path of its tokens.
        self._grow(got.branches)
        former = [(of_session, lease) for of_session in got.sessions for lease in of_session.leases]
        for session in got.sessions:
            self._sessions.awaits(session)
        for session, lease in former:
            self._take_in(session, lease)
        # Before the unproven pages get a lease: its number is the next one after all of before, and
        # an engine must never be told of a lease that another one had.
        table.opened = len(former)
        table.number_above = got.last_lease - len(former)
        if got.sessions and got.unproven:
            self._keep_unproven(got.unproven)
        # Nobody is left who could read them, so they were not taken: they are free here, and must
        # be in the journal before somebody is given them.
        elif got.unproven and self._is_journaled:
            self._out.effects.append(NoteFreed(got.unproven))
        self._out.emit(
            events.Adopted(
                generation=got.generation,
                pages=table.tree.cached_pages,
                nodes=len(table.tree.order),
                sessions=len(got.sessions),
                leases=len(former),
                held_pages=sum(count(lease.held) for _, lease in former),
                unproven_pages=self.unproven.held_pages if self.unproven is not None else 0,
            )
        )

    def why_not(self, got: PoolAdopted) -> str:
        """Why it cannot be taken in, the first reason found; empty when it can."""
        page_bytes = self._table.page_size * ID_BYTES
        for reasons in (
            self._not_new(),
            _bad_pages(got, self._table.pool.total_pages),
            _bad_branches(got.branches, page_bytes),
            _bad_sessions(got),
            _bad_prefixes(got, page_bytes),
        ):
            wrong = next(reasons, "")
            if wrong:
                return wrong
        return ""

    def _not_new(self) -> Iterator[str]:
        table, n_sessions = self._table, len(self._sessions.by_id)
        if table.components.each:
            names = ", ".join(keeper.component.name for keeper in table.components.each)
            yield f"this pool has pages of {names} beside {table.pool.name}, which are not kept"
        if table.pool.free_pages != table.capacity_pages or table.leases or n_sessions:
            yield (
                f"this node is not new: {table.pool.free_pages} of {table.capacity_pages} pages "
                f"are free, {n_sessions} sessions are open; adopt before anything else"
            )

    def lease_ended(self, lease: LeaseRecord) -> None:
        """One of them was released."""
        del self.leases[lease.id]
        self.free_unproven()

    def may_read(self) -> bool:
        """Whether an engine may still read what it had before the restart."""
        return bool(self.leases) or any(
            session.is_former or not session.is_whole for session in self._sessions.by_id.values()
        )

    def free_unproven(self) -> None:
        """Free what was not proven, once nobody may read it."""
        unproven = self.unproven
        if unproven is not None and not self.may_read():
            self.unproven = None
            self._table.holders.release(unproven, UNPROVEN, "nobody reads them any more")

    def _grow(self, branches: tuple[Branch, ...]) -> None:
        """The tree; each branch is used later than those before it, and uses its parent."""
        tree = self._table.tree
        ends: list[RadixNode] = []
        for branch in branches:
            at_root = branch.parent < 0
            above = tree.match(NO_TOKENS, branch.namespace) if at_root else ends[branch.parent]
            ends.append(tree.extend(above, branch.tokens, branch.pages).node)

    def _take_in(self, session: FormerSession, one: FormerLease) -> None:
        claim = Claim(
            session=session.id,
            call=0,
            reason=REASON,
            room=0,
            namespace=one.namespace,
            tokens=one.prefix,
            reserve_tokens=count(one.held) * self._table.page_size,
            priority=0,
            cache=False,
        )
        self.leases[one.id] = self._lease(one.id, claim, one.held)

    def _keep_unproven(self, pages: Pages) -> None:
        table = self._table
        table.opened += 1
        reserve = count(pages) * table.page_size
        claim = Claim(
            session=0,
            call=0,
            reason=REASON,
            room=0,
            namespace="",
            tokens=NO_TOKENS,
            reserve_tokens=reserve,
            priority=0,
            cache=False,
            holder=UNPROVEN,
        )
        self.unproven = self._lease(table.opened + table.number_above, claim, pages)

    def _lease(self, number: int, claim: Claim, held: Pages) -> LeaseRecord:
        """A lease that locks the path of its tokens, and has ``held`` beside it."""
        table = self._table
        # The whole prefix is in the tree: ``why_not`` has refused a lease whose path is not.
        anchor = table.tree.hold(claim.tokens, claim.namespace)
        lease = LeaseRecord(number, claim, anchor, Pages(table.tree.path_pages(anchor) + held))
        lease.owned = anchor.end_tokens // table.page_size
        lease.state = LeaseStage.FORMER
        lease.since_s = lease.touched_s = self._out.at_s
        table.leases[number] = lease
        return lease


# ---- what came ---------------------------------------------------------------------------------


def _pages_of(got: PoolAdopted) -> Pages:
    """All that leave the free list."""
    held = [lease.held for session in got.sessions for lease in session.leases]
    kept = [got.unproven] if got.sessions else []
    return Pages(b"".join([*(branch.pages for branch in got.branches), *held, *kept]))


def _bad_pages(got: PoolAdopted, total: int) -> Iterator[str]:
    ids = np.frombuffer(_pages_of(got), dtype="<i4")
    strays = ids[(ids < 1) | (ids >= total)]
    if strays.size:
        yield f"page {strays[0]} is none of this pool, which has pages 1 to {total - 1}"
        return
    times = np.bincount(ids, minlength=1)
    if times.max() > 1:
        yield f"page {times.argmax()} is named {times.max()} times: it can have one place only"


def _bad_branches(branches: tuple[Branch, ...], page_bytes: int) -> Iterator[str]:
    begun: set[tuple[int, str, bytes]] = set()
    for number, branch in enumerate(branches):
        if not branch.pages or len(branch.tokens) != count(branch.pages) * page_bytes:
            yield (
                f"branch {number} has {count(branch.tokens)} tokens on {count(branch.pages)} pages "
                f"of {page_bytes // ID_BYTES}"
            )
        if not -1 <= branch.parent < number:
            yield f"branch {number} is behind branch {branch.parent}, which is not before it"
        elif branch.parent >= 0 and branches[branch.parent].namespace != branch.namespace:
            yield f"branch {number} is of another namespace than branch {branch.parent} above it"
        key = _key(branch, page_bytes)
        if key in begun:
            yield f"branch {number} begins with the same page of tokens as one beside it"
        begun.add(key)


def _key(branch: Branch, page_bytes: int) -> tuple[int, str, bytes]:
    return branch.parent, branch.namespace, branch.tokens[:page_bytes]


def _bad_sessions(got: PoolAdopted) -> Iterator[str]:
    sessions = [session.id for session in got.sessions]
    leases = [lease.id for session in got.sessions for lease in session.leases]
    for what, numbers in (("session", sessions), ("lease", leases)):
        if len(set(numbers)) != len(numbers) or min(numbers, default=1) < 1:
            yield f"{what} numbers are {_some(numbers)}: each must be its own, from 1 on"
    if max(leases, default=0) > got.last_lease:
        yield f"lease {max(leases)} is above {got.last_lease}, which is said to be the highest"


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, sorted(numbers)[:8]))


def _bad_prefixes(got: PoolAdopted, page_bytes: int) -> Iterator[str]:
    """A lease whose path is not cached would have its pages given to others."""
    by_key = {_key(branch, page_bytes): number for number, branch in enumerate(got.branches)}
    for session in got.sessions:
        for lease in session.leases:
            found = _matched(got.branches, by_key, lease, page_bytes)
            if found != len(lease.prefix) or found % page_bytes:
                yield (
                    f"lease {lease.id} keeps {count(lease.prefix)} tokens, the branches have "
                    f"{found // ID_BYTES} of them"
                )


def _matched(
    branches: tuple[Branch, ...],
    by_key: dict[tuple[int, str, bytes], int],
    lease: FormerLease,
    page_bytes: int,
) -> int:
    """How many bytes of its prefix the branches have."""
    prefix, at, pos = lease.prefix, -1, 0
    while pos < len(prefix):
        found = by_key.get((at, lease.namespace, prefix[pos : pos + page_bytes]))
        if found is None:
            break
        edge = branches[found].tokens
        rest = Tokens(prefix[pos : pos + len(edge)])
        if not edge.startswith(rest):
            break
        at, pos = found, pos + len(rest)
    return pos
