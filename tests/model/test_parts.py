"""Every order of events of one receive from two writers is safe and ends; a negation is caught.

By default without faults, and with a message that is lost; each kind of fault is explored by
``KVD_MODEL=full python -m pytest -s -m slow tests/model``. scenario A32, scenario G13.
"""

from __future__ import annotations

import pytest

from tests.model.explore import explored
from tests.model.parts_world import PartsScope, PartsWorld
from tests.model.prefill_side import Phase
from tests.model.protocol import FAULTS, Cause
from tests.model.reception import Joint
from tests.model.test_protocol import full

DONE = (Phase.FINISHING, Phase.FINISHING)
BUSY = (Phase.PREFILLING, Phase.PREFILLING)
TINY = PartsScope(posts=(0, 0), phases=DONE)
SMALL = (PartsScope(), TINY._replace(faults=frozenset([Cause.LOSS]), budget=1))
FULL = (
    PartsScope(phases=BUSY),
    PartsScope(posts=(1, 0), phases=DONE, faults=FAULTS, budget=1),
    *(PartsScope(faults=frozenset([fault]), budget=1) for fault in sorted(FAULTS)),
)
FREE = "may land in pages that are FREE"
STUCK = "stuck: no steps lead to the end"
MUTATIONS = (
    ("commits_when_all_are_verified", "committed while part 0 is offered"),
    ("frees_with_the_last_writer", FREE),
    ("gives_up_the_others", STUCK),
    ("drops_what_is_delivered", STUCK),
    ("takes_aux_from_one", "the aux is delivered 2 times"),
)


@pytest.mark.parametrize("scope", SMALL, ids=str)
def test_a_receive_from_two_writers_is_safe_and_ends(scope: PartsScope) -> None:
    found = explored(PartsWorld(scope))

    assert found.violation is None, str(found)


@full
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("scope", FULL, ids=str)
def test_a_receive_from_two_writers_is_safe_and_ends_with_faults(scope: PartsScope) -> None:
    found = explored(PartsWorld(scope))

    assert found.violation is None, str(found)
    print(found)  # noqa: T201 - the number of states is the result; shown with -s


@pytest.mark.parametrize(("sentence", "violation"), MUTATIONS)
def test_parts_without_one_sentence_are_caught(sentence: str, violation: str) -> None:
    scope = TINY if violation == STUCK else PartsScope()
    found = explored(PartsWorld(scope, Joint(**{sentence: False})))

    assert found.violation is not None
    assert violation in found.violation, str(found)
    assert found.trace
