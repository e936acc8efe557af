"""The table of a lease's standings: complete, connected, and loud about what it does not know."""

from __future__ import annotations

import pytest

from kvd.core.cache.lease_state import (
    LEASE_STAGES,
    IllegalLeaseTransition,
    LeaseStage,
    LeaseTransition,
    next_stage,
)


@pytest.mark.parametrize(
    "standing", [one for one in LeaseStage if one is not LeaseStage.FORMER], ids=str
)
def test_standing_leads_on_and_back_to_running(standing: LeaseStage) -> None:
    reached = {standing}
    for _ in LEASE_STAGES:
        reached |= {after for (here, _), after in LEASE_STAGES.items() if here in reached}

    assert reached == set(LeaseStage) - {LeaseStage.FORMER}


def test_a_former_lease_has_no_way_but_its_end() -> None:
    rows = {*LEASE_STAGES.values(), *(here for here, _ in LEASE_STAGES)}
    assert LeaseStage.FORMER not in rows


@pytest.mark.parametrize("turn", LeaseTransition, ids=str)
def test_turn_appears_in_a_row(turn: LeaseTransition) -> None:
    assert turn in {fires for _, fires in LEASE_STAGES}


def test_a_turn_without_a_row_is_a_bug_that_says_which() -> None:
    with pytest.raises(IllegalLeaseTransition, match="lease: no row for saved in running"):
        next_stage(LeaseStage.RUNNING, LeaseTransition.SAVED)
