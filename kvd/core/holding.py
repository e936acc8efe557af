"""The lease that a request names: whether the session has it, and whether it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.lease import ARRIVAL, ENGINE
from kvd.core.standing import Standing
from kvd.errors import Code, Refusal

if TYPE_CHECKING:
    from kvd.core.lease import Lease
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
    if isinstance(lease, Refusal) or lease.standing is Standing.RUNNING:
        return lease
    todo = {
        Standing.RETRACTED: "resume it first",
        Standing.SAVING: "wait until it is retracted, then resume it",
    }.get(lease.standing, "wait until it runs again")
    return Refusal(
        Code.WRONG_STATE,
        f"lease {lease_id} is {lease.standing.value}: {todo}",
        side=node.settings.name,
    )


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
