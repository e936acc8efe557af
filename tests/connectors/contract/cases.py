"""Each row of the contract's table: the state that it is of, and what is done to an engine there.

``docs/concepts/contract.md`` has the same rows with what they ask for and give;
``test_page`` compares them.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Step(enum.StrEnum):
    """Where in a request something can happen."""

    LOOKING_UP = "looking up"
    HELD = "held"
    LOADING = "loading"
    COMPUTING = "computing"
    SAVING = "saving"
    PREEMPTED = "preempted"
    RELEASED = "released"


class Case(NamedTuple):
    """One row. ``deed``: a test of ``test_contract``; ``at``: where in a request it is done."""

    state: str
    deed: str
    at: tuple[Step, ...] = ()


EVERY = tuple(Step)

CASES = (
    *(Case(step.value, "crowded", (step,)) for step in Step),
    Case("pool full", "full"),
    Case("prompt in a tier", "tiered"),
    Case("aborted", "aborted", EVERY),
    Case("reset", "reset", EVERY),
    Case("daemon killed", "killed", EVERY),
    Case("daemon restarted, other memory", "restarted", EVERY),
    Case("daemon restarted, same memory", "returned", EVERY),
    Case("daemon hung", "hung", EVERY),
    Case("no daemon", "absent"),
    Case("engine killed, engine restarted", "ended", EVERY),
    Case("pool of another kind", "unlike"),
    Case("another model or weights", "other_model"),
    Case("version outside the range", "other_version"),
)


def steps_of(deed: str) -> tuple[Step, ...]:
    """Where that is done, in all rows."""
    return tuple(step for case in CASES if case.deed == deed for step in case.at)
