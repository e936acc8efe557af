"""The state of a lease, from running to retracted and back, as data.

    RUNNING --retract--> SAVING --saved--> RETRACTED --resume--> RESUMING --admitted--> RESTORING
       ^  '--drop-------------------------^      ^--given-up-----'   |                     |
       '-----------------------------------------------complete------'------restored-------'

A retracted lease keeps its number, its owner and its saved bytes, and nothing of the pool: no page,
no lock. FORMER is outside of all that: a lease of before a restart, which only its end leads away
from (``former_leases``). What happens on the edges is ``retraction``; pages and locks move in
``leases.retracted``.

Theory of operation. While a copy runs the lease has a holder of its own (``SAVE``, ``RESTORE``), so
that neither its pages nor its saved bytes are given to anybody, whatever its engine does. The end
of the transfer process cuts every copy: a cut save changes nothing, a cut restore is done again.
"""

from __future__ import annotations

import enum


class LeaseStage(enum.Enum):
    """Who has the sequence: the pool, the saved area, or both while bytes are copied."""

    RUNNING = "running"
    SAVING = "saving"
    RETRACTED = "retracted"
    RESUMING = "resuming"
    """In the admission queue."""
    RESTORING = "restoring"
    FORMER = "former"
    """Of before the restart: it keeps what it kept, and can only be released."""


class LeaseTransition(enum.Enum):
    """What can happen to a lease on the way out and back."""

    RETRACT = "retract"
    DROP = "drop"
    """Retracted with nothing to keep: there is nothing to copy."""
    SAVED = "saved"
    CUT = "cut"
    """The transfer process ended under the copy, or refused it."""
    RESUME = "resume"
    GIVEN_UP = "given-up"
    """Deadline, cancelled, the queue is full, or its pages and what is saved do not fit."""
    ADMITTED = "admitted"
    """Prefix locked, pages held, and some of them to be restored."""
    COMPLETE = "complete"
    """The same, and nothing to be restored."""
    RESTORED = "restored"
    REFUSED = "refused"
    """The transfer process refused to restore, or was cut and nobody wants the lease any more: the
    pages go back, the saved bytes stay."""


S, T = LeaseStage, LeaseTransition

LEASE_STAGES: dict[tuple[LeaseStage, LeaseTransition], LeaseStage] = {
    (S.RUNNING, T.RETRACT): S.SAVING,
    (S.RUNNING, T.DROP): S.RETRACTED,
    (S.SAVING, T.SAVED): S.RETRACTED,
    (S.SAVING, T.CUT): S.RUNNING,
    (S.RETRACTED, T.RESUME): S.RESUMING,
    (S.RESUMING, T.GIVEN_UP): S.RETRACTED,
    (S.RESUMING, T.ADMITTED): S.RESTORING,
    (S.RESUMING, T.COMPLETE): S.RUNNING,
    (S.RESTORING, T.RESTORED): S.RUNNING,
    (S.RESTORING, T.CUT): S.RESTORING,
    (S.RESTORING, T.REFUSED): S.RETRACTED,
}
"""A pair without a row is a bug."""


class IllegalLeaseTransition(Exception):
    """A transition without a row: a bug in the daemon."""


def next_stage(stage: LeaseStage, turn: LeaseTransition) -> LeaseStage:
    """The stage after ``turn``; raises ``IllegalLeaseTransition`` where the table has no row."""
    try:
        return LEASE_STAGES[stage, turn]
    except KeyError:
        raise IllegalLeaseTransition(f"lease: no row for {turn.value} in {stage.value}") from None
