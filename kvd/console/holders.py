"""Who holds something, as consoles show it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.inspect.schema import session_name
from kvd.core.inspect.words import lease_word
from kvd.wire.console import Holder

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.inspect.view import NodeView
    from kvd.core.leases.owners import Kept


def lease_holder(node: NodeView, lease: LeaseRecord, pages: str = "") -> Holder:
    """A lease as a holder of something; ``pages`` says how much it has of it."""
    session = node.sessions.by_id.get(lease.session)
    who = (
        session_name(node, lease.session) or "kvd"
        if session is None
        else f"{session.name} {session.pids[0]}"
    )
    room = f" room {lease.room}" if lease.room else ""
    what = f"{who}: {lease.reason}{room}{pages}"
    return Holder(
        who=what, since_s=lease.since_s, ref=f"lease:{lease.id}", state=state_of(node, lease)
    )


def state_of(node: NodeView, lease: LeaseRecord) -> str:
    """Empty for one that runs; ``gone`` where its owner is, else its state: see ``Holder``."""
    word = lease_word(lease)
    if word != "held":
        return word
    return "" if lease.session in node.sessions.by_id else "gone"


def kept_holder(node: NodeView, kept: Kept) -> Holder:
    """A lease as one of those that keep the most pages from others."""
    locked = f", locks {kept.locked} cached" if kept.locked else ""
    promised = f", {kept.promised} promised" if kept.promised else ""
    return lease_holder(node, kept.lease, f", {kept.pages} pages{locked}{promised}")
