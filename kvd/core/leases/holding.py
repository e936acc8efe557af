"""The lease that a request names: whether the session has it, and whether it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.cache.lease import ARRIVAL, ENGINE
from kvd.core.cache.lease_state import Standing
from kvd.errors import Code, Refusal

if TYPE_CHECKING:
    from kvd.core.cache.lease import Lease
    from kvd.core.node import Node


def lease_of(node: Node, session: int, lease_id: int) -> Lease | Refusal:
    """The session's lease, whatever its standing."""
    lease = node.leases.leases.get(lease_id)
    if lease is None or lease.session != session or ENGINE not in lease.holders:
        return Refusal(
            Code.UNKNOWN_LEASE,
            f"session {session} holds no lease {lease_id}: it was released, or never its own",
            side=node.settings.name,
            numbers={"lease": lease_id},
        )
    return lease


def running_lease_of(node: Node, session: int, lease_id: int) -> Lease | Refusal:
    """The session's lease, which has its pages and may use them."""
    lease = lease_of(node, session, lease_id)
    if isinstance(lease, Refusal):
        return lease
    if lease.lost is not None:
        return lease.lost
    if lease.standing is Standing.RUNNING:
        return lease
    if lease.standing is Standing.FORMER:
        return before_restart(node, lease)
    todo = {
        Standing.RETRACTED: "resume it first",
        Standing.SAVING: "wait until it is retracted, then resume it",
    }.get(lease.standing, "wait until it runs again")
    return Refusal(
        Code.WRONG_STATE,
        f"lease {lease_id} is {lease.standing.value}: {todo}",
        side=node.settings.name,
    )


def before_restart(node: Node, lease: Lease) -> Refusal:
    """What the engine of a former lease is told when it wants more of it than to be rid of it."""
    return Refusal(
        Code.BEFORE_RESTART,
        f"lease {lease.id} is from before this daemon was restarted: its pages stay as they are, "
        "and it can only be released; release it and open a new one, which finds what is cached",
        side=node.settings.name,
        numbers={"lease": lease.id},
    )


def former_lease_of(node: Node, session: int, lease_id: int) -> Lease | None:
    """The session's lease, if it is one of before the restart."""
    lease = node.former.leases.get(lease_id)
    return lease if lease is not None and lease.session == session else None


def arriving(node: Node, session: int, lease_id: int) -> Refusal | None:
    """Why the session's lease is not its own yet; None where that is not so (scenario A36)."""
    lease = node.leases.leases.get(lease_id)
    if lease is None or lease.session != session or ARRIVAL not in lease.holders:
        return None
    return Refusal(
        Code.WRONG_STATE,
        f"lease {lease_id} is still being received: only one that runs can be retracted; cancel "
        "the receive instead",
        side=node.settings.name,
    )
