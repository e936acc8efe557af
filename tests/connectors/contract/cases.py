"""Each row of the contract's table: the state that it is of, and what is done to an engine there.

``docs/concepts/contract.md`` has the same rows with what they ask for and give;
``test_page`` compares them. ``HANDOFFS`` are those of connectors between two nodes.
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


class HandoffStep(enum.StrEnum):
    """Where in a handoff something can happen."""

    UNMET = "known to one engine"
    OFFERED = "room offered"
    WRITING = "pages being written"
    LOADING = "pages being loaded"


class Case(NamedTuple):
    """One row. ``deed``: a test of ``test_contract``; ``at``: where in a request it is done."""

    state: str
    deed: str
    at: tuple[Step, ...] = ()


class HandoffCase(NamedTuple):
    """One row of handoffs; ``deed`` is a test of ``test_handoffs``."""

    state: str
    deed: str
    at: tuple[HandoffStep, ...] = ()


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


ALL_THE_WAY = tuple(HandoffStep)

HANDOFFS = (
    *(HandoffCase(step.value, "crowded", (step,)) for step in HandoffStep),
    HandoffCase("handoff aborted, on either side", "aborted", ALL_THE_WAY),
    HandoffCase("daemon of either side killed", "daemon_killed", ALL_THE_WAY),
    HandoffCase("daemon of either side restarted", "daemon_restarted", ALL_THE_WAY),
    HandoffCase("daemon of either side hung", "daemon_hung", ALL_THE_WAY),
    HandoffCase("engine of either side killed", "engine_killed", ALL_THE_WAY),
    HandoffCase("engines with unlike pools", "unlike"),
    HandoffCase("engines of unlike models or weights", "other_model"),
)


def steps_of(deed: str) -> tuple[Step, ...]:
    """Where that is done, in all rows."""
    return tuple(step for case in CASES if case.deed == deed for step in case.at)
