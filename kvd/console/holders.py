"""Who holds something, as consoles show it."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from kvd.core.inspect.schema import session_name
from kvd.core.inspect.words import lease_word
from kvd.core.leases.owners import owner_of
from kvd.text import counted
from kvd.wire.console import Holder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.inspect.view import NodeView
    from kvd.core.leases.owners import Kept

OWNERS_NAMED = 3
"""Of those that hold the most pages: enough to act on, few enough for a sentence."""


def lease_holder(node: NodeView, lease: LeaseRecord) -> Holder:
    """A lease as a holder of something."""
    session = node.sessions.by_id.get(lease.session)
    who = (
        session_name(node, lease.session) or "kvd"
        if session is None
        else f"{session.name} {session.pids[0]}"
    )
    room = f" room {lease.room}" if lease.room else ""
    what = f"{who}: {lease.reason}{room}"
    return Holder(
        who=what, since_s=lease.since_s, ref=f"lease:{lease.id}", state=state_of(node, lease)
    )


def state_of(node: NodeView, lease: LeaseRecord) -> str:
    """Empty for one that runs; ``gone`` where its owner is, else its state: see ``Holder``."""
    word = lease_word(lease)
    if word != "held":
        return word
    return "" if lease.session in node.sessions.by_id else "gone"


def biggest_owners(node: NodeView, budget: str, is_alive: Callable[[int], bool]) -> list[Holder]:
    """Who holds the most pages of a component, living or not: an owner each, with all its leases.

    By what it holds and is promised; what is locked is shared, and only says who comes next.
    """
    owned: dict[int, list[Kept]] = {}
    for kept in node.owners.kept(budget):
        if any(kept[:3]):
            owned.setdefault(kept.lease.session, []).append(kept)
    found = heapq.nlargest(OWNERS_NAMED, owned.values(), key=_weight)
    return [_owner_holder(node, several, is_alive) for several in found]


def _weight(several: Collection[Kept]) -> tuple[int, int]:
    own = sum([kept.pages + kept.promised for kept in several])
    return own, max([kept.locked for kept in several])


def _owner_holder(
    node: NodeView, several: Sequence[Kept], is_alive: Callable[[int], bool]
) -> Holder:
    """``hoarder 2432: 1498 pages by 1 lease``, since its oldest lease."""
    first = several[0].lease
    name, pid = owner_of(node, first.session)
    session = node.sessions.by_id.get(first.session)
    own, locked = sum([kept.pages for kept in several]), max([kept.locked for kept in several])
    promised = sum([kept.promised for kept in several])
    words = [f"{counted(own, 'page')} by {counted(len(several), 'lease')}"]
    words += [f"{promised} promised"] if promised else []
    words += [f"locks {locked} cached"] if locked and not own else []
    is_dead = session is not None and (session.is_outlived or not any(map(is_alive, session.pids)))
    return Holder(
        who=f"{name}{f' {pid}' if pid else ''}: {', '.join(words)}",
        since_s=min([kept.lease.since_s for kept in several]),
        ref=f"lease:{first.id}" if len(several) == 1 else f"client:{first.session}",
        state="gone" if is_dead else state_of(node, first),
    )
