"""Storms in which operators rehearse each verb before they carry it out.

The rehearsal leaves the node as it is, to the last bit; the verb then reports the same; and what
it reports is what the events of that step say has happened.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from kvd.core import inputs
from kvd.core.operators import rehearse
from kvd.core.replay.freeze import state_hash
from kvd.errors import Refusal
from kvd.wire import admin, events
from tests.property.drawn import FAMILIES
from tests.property.handoffs import hand_off
from tests.property.storms import Storm
from tests.property.test_family_storm import step, use
from tests.property.trouble import calm
from tests.support.seeds import repeatable, seed_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.wire.events import Event
    from tests.core.side import Side

FIRST, LAST = seed_range("0:3")
STEPS = 30

Verb = admin.Flush | admin.Evict | admin.AbortRoom | admin.Fence

happened: Counter[str] = Counter()
"""Figures that were not zero, over all seeds."""


def drawn_verb(storm: Storm, side: Side) -> Verb:
    """One verb; a room is one that is open, if any is."""
    rng, node = storm.rng, side.node
    receives = {part.room for part in node.decoder.open.parts.values()}
    rooms = sorted(receives | {*node.prefiller.rooms.by_room})
    draining = any(one.quarantine is not None for one in node.leases.leases.values())
    if rng.random() < (0.6 if draining else 0.1):
        return admin.Fence(1)
    verbs: list[Verb] = [
        admin.Flush(1, rng.choice(("unlocked", "strict", "all"))),
        admin.Evict(1, rng.randint(0, 20)),
        admin.AbortRoom(1, rng.choice([*rooms, 999_999]), "a storm"),
    ]
    return rng.choice(verbs)


def of_the_events(verb: Verb, seen: Sequence[Event]) -> dict[str, int]:
    """The figures that events tell of too."""
    match verb:
        case admin.Flush():
            (one,) = [event for event in seen if isinstance(event, events.Flushed)]
            return {"freed_pages": one.freed_pages, "locked_pages": one.kept_pages}
        case admin.Evict():
            of_operator = [
                event
                for event in seen
                if isinstance(event, events.Evicted) and event.reason == "operator"
            ]
            return {"evicted_pages": of_operator[0].pages}
        case admin.AbortRoom():
            released = [event for event in seen if isinstance(event, events.LeaseReleased)]
            quarantined = [event for event in seen if isinstance(event, events.Quarantined)]
            return {
                "freed_pages": sum(event.freed_pages for event in released),
                "quarantined_pages": sum(event.pages for event in quarantined),
            }
        case admin.Fence():
            freed = [event.pages for event in seen if isinstance(event, events.QuarantineEnded)]
            return {"quarantined_leases": len(freed), "quarantined_pages": sum(freed)}


def of_a_quarantine(event: Event, leases: set[int]) -> bool:
    """Whether it is the end of one of them."""
    return isinstance(event, events.QuarantineEnded) and event.lease in leases


def rehearse_and_do(storm: Storm, side: Side) -> None:
    """The three promises, of one verb."""
    verb, node = drawn_verb(storm, side), side.node
    before = state_hash(node)

    told = rehearse(node, admin.Rehearse(1, verb))

    assert state_hash(node) == before
    n_events, n_reports = len(side.events), len(side.reports)
    draining = {one.id for one in node.leases.leases.values() if one.quarantine is not None}
    side.feed(inputs.FromOperator(storm.world.now_s, b"op", verb))
    seen = side.events[n_events:]
    done = side.reports[n_reports]
    storm.world.run()
    storm.hear()
    if isinstance(verb, admin.Fence):  # which another process carries out, after the step
        seen = [one for one in side.events[n_events:] if of_a_quarantine(one, draining)]
    if isinstance(told, Refusal):
        assert done == admin.AdminFailed(1, told)
        return
    assert done == told
    is_carried_out = not (isinstance(verb, admin.Flush) and verb.mode == "strict" and told.refused)
    if is_carried_out:
        figures = of_the_events(verb, seen)
        assert {name: told.changed[name] for name in figures} == figures
    happened.update(f"{type(verb).__name__} {name}" for name, n in told.changed.items() if n)


def a_send_goes_on(storm: Storm) -> None:
    """One that is open, if any is: its engine has computed more."""
    use(storm, "advance")


def rehearsed(seed: int, family: str) -> None:
    """One storm with its rehearsals; a failure says how to repeat it."""
    with repeatable(seed, __file__, family):
        storm = Storm(seed, family)
        for _ in range(STEPS):
            step(storm)
            storm.world.hold_posts = True  # or hardly anything is ever under way
            for act in storm.rng.choices((hand_off, a_send_goes_on), k=2):
                act(storm)
            if storm.rng.random() < 0.5:
                rehearse_and_do(storm, storm.rng.choice(storm.sides))
        calm(storm)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_verb_does_what_its_rehearsal_says(family: str):
    for seed in range(FIRST, LAST):
        rehearsed(seed, family)


def test_all_figures_were_met():
    """What no storm does is not tested by them."""
    if (FIRST, LAST) != (0, 3) or not happened:
        pytest.skip("only the whole default run covers everything")
    wanted = {
        "Flush freed_pages", "Flush locked_pages", "Evict evicted_pages", "AbortRoom receives",
        "AbortRoom sends", "AbortRoom quarantined_pages", "Fence quarantined_pages",
        "Fence receives_cut", "Fence sends_cut",
    }  # fmt: skip
    assert wanted - happened.keys() == set()
