"""The events of leases and their pages, as the lease table tells them. Nothing is decided here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.types import count
from kvd.wire import events

if TYPE_CHECKING:
    from kvd.core.cache.lease import LeaseRecord
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.effects import Outbox


def tell_opened(out: Outbox, lease: LeaseRecord, anchor: RadixNode, missed: int, why: str) -> None:
    """A prefix is locked and pages are held."""
    out.emit(
        events.LeaseOpened(
            lease=lease.id,
            session=lease.session,
            reason=lease.reason,
            room=lease.room,
            prefix_tokens=lease.prefix_tokens,
            held_pages=lease.held_pages,
            prompt_tokens=count(lease.tokens),
            missed_tokens=missed,
            why_missed=why,
            locked_node=anchor.id if anchor.parent is not None else 0,
        )
    )


def tell_extended(out: Outbox, lease: LeaseRecord) -> None:
    """More pages are held, or a retracted lease has pages and a lock again."""
    anchor = lease.anchor
    locked = anchor.id if anchor is not None and anchor.parent is not None else 0
    out.emit(events.LeaseExtended(lease=lease.id, held_pages=lease.held_pages, locked_node=locked))


def tell_written(out: Outbox, lease: LeaseRecord) -> None:
    """The last of those who write it has come further."""
    out.emit(events.LeaseWritten(lease=lease.id, written_tokens=lease.written_tokens))


def tell_committed(out: Outbox, lease: LeaseRecord, node: RadixNode, duplicate_pages: int) -> None:
    """Whole pages are in the tree, and the lock is behind them, at ``node``."""
    out.emit(
        events.LeaseCommitted(
            lease=lease.id,
            cached_tokens=node.end_tokens,
            duplicate_pages=duplicate_pages,
            locked_node=node.id,
        )
    )


def tell_released(
    out: Outbox, lease: LeaseRecord, cause: str, freed_pages: int, was_locked: int
) -> None:
    """It is gone; ``was_locked`` is the node that it locked until now."""
    out.emit(
        events.LeaseReleased(
            lease=lease.id,
            reason=lease.reason,
            cause=cause,
            freed_pages=freed_pages,
            age_s=out.at_s - lease.since_s,
            locked_node=was_locked,
        )
    )


def tell_quarantined(out: Outbox, lease: LeaseRecord, was_locked: int) -> None:
    """Its pages may still be written by a remote; ``was_locked`` as for a release."""
    held = lease.quarantine
    assert held is not None
    out.emit(
        events.Quarantined(
            lease=lease.id,
            pages=count(lease.page_table),
            peer=held.peers,
            incarnation=held.writers[0].incarnation,
            why=held.why,
            locked_node=was_locked,
        )
    )


def tell_quarantine_ended(out: Outbox, lease: LeaseRecord, n_pages: int, proof: str) -> None:
    """They may not any more."""
    since_s = lease.quarantine.since_s if lease.quarantine else out.at_s
    out.emit(
        events.QuarantineEnded(lease=lease.id, pages=n_pages, proof=proof, age_s=out.at_s - since_s)
    )
