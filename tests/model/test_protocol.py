"""Every order of events within a bound is safe and ends; every negated sentence is caught.

By default the bound is small. ``KVD_MODEL=full pytest -m slow tests/model`` explores the whole
budget: four faults of every kind for one handoff, and two handoffs in one room with each kind of
fault by itself. scenario A26, scenario A28, scenario B11, scenario E13.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

import pytest
from typing_extensions import override

from kvd.core.handoff import protocol as tables
from kvd.core.handoff.protocol import Decode, DecodeTrigger
from tests.model.explore import explore, explored
from tests.model.mutations import COURTESIES, MUTATIONS, Mutation
from tests.model.parts_world import PartsScope, PartsWorld
from tests.model.prefill_side import Phase
from tests.model.protocol import FAULTS, Rules
from tests.model.world import Scope

if TYPE_CHECKING:
    from collections.abc import Mapping

SMALL = (
    Scope(faults=FAULTS, budget=2),
    Scope(posts=1, faults=FAULTS, budget=1),
    Scope(posts=0, faults=FAULTS, budget=1),
    Scope(handoffs=2, posts=1),
)
FULL = (
    Scope(faults=FAULTS, budget=4),
    *(
        Scope(handoffs=2, posts=1, calls=2, faults=frozenset([fault]), budget=1)
        for fault in sorted(FAULTS)
    ),
)


def differing(rules: Rules) -> str:
    return ", ".join(
        name
        for name, mine, usual in zip(Rules._fields, rules, Rules(), strict=True)
        if mine != usual
    )


full = pytest.mark.skipif(
    os.environ.get("KVD_MODEL") != "full", reason="minutes: set KVD_MODEL=full"
)


@pytest.mark.parametrize("scope", SMALL, ids=str)
def test_protocol_is_safe_and_ends_within_a_small_budget(scope: Scope) -> None:
    found = explore(scope)

    assert found.violation is None, str(found)


@full
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("scope", FULL, ids=str)
def test_protocol_is_safe_and_ends_within_the_full_budget(scope: Scope) -> None:
    found = explore(scope)

    assert found.violation is None, str(found)
    print(found)  # noqa: T201 - the number of states is the result; shown with -s


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.sentence)
def test_protocol_without_one_sentence_is_caught(mutation: Mutation) -> None:
    found = explore(mutation.scope(), mutation.rules())

    assert found.violation is not None
    assert mutation.found in found.violation, str(found)
    assert found.trace


@pytest.mark.parametrize("rules", COURTESIES, ids=differing)
def test_protocol_without_a_courtesy_is_still_safe_and_ends(rules: Rules) -> None:
    found = explore(Scope(faults=FAULTS, budget=1), rules)

    assert found.violation is None, str(found)


def test_protocol_uses_every_row_of_both_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    decode, prefill = Recorder(tables.DECODE), Recorder(tables.PREFILL)
    monkeypatch.setattr(tables, "DECODE", decode)
    monkeypatch.setattr(tables, "PREFILL", prefill)

    explore(Scope(faults=FAULTS, budget=1))
    explored(PartsWorld(PartsScope(posts=(0, 0), phases=(Phase.FINISHING,) * 2)))

    assert decode.keys() - decode.used == set()
    assert prefill.keys() - prefill.used == set()


def test_model_reports_a_hole_when_a_row_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(tables.DECODE, (Decode.DRAINING, DecodeTrigger.DELIVERED))

    found = explore(Scope())

    assert found.violation == "hole: decode side: no row for delivered in draining"


Row = TypeVar("Row")
After = TypeVar("After")


class Recorder(dict[Row, After]):
    """A table that remembers which of its rows were asked for."""

    def __init__(self, rows: Mapping[Row, After]) -> None:
        super().__init__(rows)
        self.used: set[Row] = set()

    @override
    def __getitem__(self, key: Row) -> After:
        after = super().__getitem__(key)
        self.used.add(key)
        return after
