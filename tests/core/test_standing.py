"""The table of a lease's standings: complete, connected, and loud about what it does not know."""

from __future__ import annotations

import pytest

from kvd.core.cache.lease_state import (
    STANDINGS,
    IllegalTurn,
    LeaseTransition,
    Standing,
    standing_next,
)


@pytest.mark.parametrize(
    "standing", [one for one in Standing if one is not Standing.FORMER], ids=str
)
def test_standing_leads_on_and_back_to_running(standing: Standing) -> None:
    reached = {standing}
    for _ in STANDINGS:
        reached |= {after for (here, _), after in STANDINGS.items() if here in reached}

    assert reached == set(Standing) - {Standing.FORMER}


def test_a_former_lease_has_no_way_but_its_end() -> None:
    rows = {*STANDINGS.values(), *(here for here, _ in STANDINGS)}
    assert Standing.FORMER not in rows


@pytest.mark.parametrize("turn", LeaseTransition, ids=str)
def test_turn_appears_in_a_row(turn: LeaseTransition) -> None:
    assert turn in {fires for _, fires in STANDINGS}


def test_a_turn_without_a_row_is_a_bug_that_says_which() -> None:
    with pytest.raises(IllegalTurn, match="lease: no row for saved in running"):
        standing_next(Standing.RUNNING, LeaseTransition.SAVED)
