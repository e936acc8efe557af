"""The events of leases and their pages, as the lease table tells them. Nothing is decided here.

Those of every lease write ``seq`` and ``events`` of the outbox themselves: a call costs what their
newest fields do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.types import ID_BYTES, count
from kvd.wire import events

if TYPE_CHECKING:
    from kvd.core.cache.lease import Lease
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.effects import Outbox


def tell_opened(out: Outbox, lease: Lease, anchor: RadixNode, missed: int, why: str) -> None:
    """A prefix is locked and pages are held."""
    out.seq = seq = out.seq + 1
    out.events.append(
        events.LeaseOpened(
            seq,
            out.at_s,
            lease.id,
            lease.session,
            lease.reason,
            lease.room,
            lease.prefix_tokens,
            len(lease.row) // ID_BYTES - lease.owned,
            len(lease.tokens) // ID_BYTES,
            missed,
            why,
            anchor.id if anchor.parent is not None else 0,
        )
    )


def tell_extended(out: Outbox, lease: Lease) -> None:
    """More pages are held, or a retracted lease has pages and a lock again."""
    anchor = lease.anchor
    locked = anchor.id if anchor is not None and anchor.parent is not None else 0
    out.emit(events.LeaseExtended(out.next_seq(), out.at_s, lease.id, lease.held_pages, locked))


def tell_committed(out: Outbox, lease: Lease, node: RadixNode, duplicate_pages: int) -> None:
    """Whole pages are in the tree, and the lock is behind them, at ``node``."""
    out.seq = seq = out.seq + 1
    out.events.append(
        events.LeaseCommitted(seq, out.at_s, lease.id, node.end_tokens, duplicate_pages, node.id)
    )


def tell_released(out: Outbox, lease: Lease, cause: str, freed_pages: int, was_locked: int) -> None:
    """It is gone; ``was_locked`` is the node that it locked until now."""
    at_s = out.at_s
    out.seq = seq = out.seq + 1
    out.events.append(
        events.LeaseReleased(
            seq,
            at_s,
            lease.id,
            lease.reason,
            cause,
            freed_pages,
            at_s - lease.since_s,
            was_locked,
        )
    )


def tell_quarantined(out: Outbox, lease: Lease, was_locked: int) -> None:
    """Its pages may still be written by a remote; ``was_locked`` as for a release."""
    held = lease.quarantine
    assert held is not None
    out.emit(
        events.Quarantined(
            out.next_seq(),
            out.at_s,
            lease.id,
            count(lease.row),
            held.peers,
            held.writers[0].incarnation,
            held.why,
            was_locked,
        )
    )


def tell_quarantine_ended(out: Outbox, lease: Lease, n_pages: int, proof: str) -> None:
    """They may not any more."""
    since_s = lease.quarantine.since_s if lease.quarantine else out.at_s
    out.emit(
        events.QuarantineEnded(
            out.next_seq(), out.at_s, lease.id, n_pages, proof, out.at_s - since_s
        )
    )
