"""What ticks do for a node at rest: nothing, until something is due."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvd.core.inputs import Tick
from kvd.core.node import NodeState
from kvd.core.rest import is_still, tick_dues
from kvd.sim.profile import PROFILES
from kvd.sim.runner import SimPlan, again, run_seed

if TYPE_CHECKING:
    from collections.abc import Sequence


class Resting(NodeState):
    """Fails where a tick that is said to be in vain is not."""

    left_out = 0
    _is_stirred = _was_stirred = True
    _dues: Sequence[float] = ()

    def step(self, got):
        is_vain = (
            type(got) is Tick
            and not (self._is_stirred or self._was_stirred)
            and bool(self._dues)
            and got.at_s < min(self._dues)
        )
        step = super().step(got)
        if is_vain:
            type(self).left_out += 1
            if step.effects or step.events:
                raise AssertionError(f"nothing was due: {step.effects} {step.events}")
        if type(got) is Tick:
            self._was_stirred, self._is_stirred = self._is_stirred, False
            self._dues = tick_dues(self)
        elif not is_still(got):
            self._is_stirred = True
        return step


@pytest.mark.parametrize("profile", PROFILES)
def test_a_tick_at_rest_for_which_nothing_is_due_says_and_orders_nothing(profile):
    Resting.left_out = 0
    plan = SimPlan(steps=1500, profile=profile, audit_steps=5000)
    endings = [run_seed(seed, plan, Resting) for seed in range(3)]

    assert not [again(ending, plan) + ending.violation for ending in endings if ending.violation]
    # Where daemons rest there are none.
    assert (Resting.left_out > 10) is not PROFILES[profile].rests
