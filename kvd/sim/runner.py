"""Runs seeds, one after the other, and says what became of each."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from kvd.core.node import NodeState
from kvd.sim.agenda import START_S
from kvd.sim.profile import DRAWN, MIXED, PROFILES
from kvd.sim.violation import Violated
from kvd.sim.world import World

if TYPE_CHECKING:
    from kvd.core.inputs import Input
    from kvd.sim.world import MakeNode

FEWEST_NODES, MOST_NODES = 2, 6
"""Of a seed that may choose."""

INPUT_CHARS = 220
"""Of each of the last inputs that are shown."""


class SimPlan(msgspec.Struct, frozen=True):
    """What is run with every seed; ``nodes`` 0 leaves their number to the seed."""

    steps: int = 2000
    """Of the storm; calm comes on top."""
    nodes: int = 0
    profile: str = MIXED
    audit_steps: int = 250
    """So often every invariant is checked, and the content of every cached page."""


class Ending(msgspec.Struct, frozen=True):
    """What became of one seed."""

    seed: int
    profile: str
    nodes: int
    steps: int
    simulated_s: float
    digest: str
    """Of every effect and event: the same for the same seed, on every machine."""
    outcomes: dict[str, int]
    """How the engines' jobs ended."""
    edges: tuple[str, ...]
    """Transitions that were taken."""
    messages: int
    lost_messages: int
    faults: int
    violation: str = ""
    last_inputs: tuple[str, ...] = ()
    """The last things that happened, of a seed that failed."""


def run_seed(seed: int, plan: SimPlan, make_node: MakeNode = NodeState) -> Ending:
    """One seed from its storm to its verdict; never raises for what the nodes do."""
    draw = random.Random(-1 - seed)
    profile = draw.choice(DRAWN) if plan.profile == MIXED else plan.profile
    nodes = plan.nodes or draw.randint(FEWEST_NODES, MOST_NODES)
    world = World(seed, PROFILES[profile], nodes, make_node)
    violation = ""
    try:
        world.run(plan.steps, plan.audit_steps)
    except Violated as violated:
        violation = str(violated)
    except Exception as error:  # noqa: BLE001 - a bug of the core is what is looked for
        violation = _where(error)
    return Ending(
        seed=seed,
        profile=profile,
        nodes=nodes,
        steps=world.steps,
        simulated_s=round(world.agenda.now_s - START_S, 3),
        digest=world.digest,
        outcomes=dict(sorted(world.outcomes.items())),
        edges=tuple(sorted(map(" ".join, world.edges))),
        messages=world.network.sent,
        lost_messages=world.network.lost,
        faults=world.faults.done,
        violation=f"after {world.steps} steps: {violation}" if violation else "",
        last_inputs=tuple(_told(*step) for step in world.recent) if violation else (),
    )


def again(ending: Ending, plan: SimPlan) -> str:
    """The command line that makes the same thing happen again."""
    return (
        f"kvd sim --seed {ending.seed} --nodes {ending.nodes} --steps {plan.steps} "
        f"--profile {ending.profile} --audit-steps {plan.audit_steps}"
    )


def _where(error: Exception) -> str:
    """An exception of the core, with the innermost place."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    place = ""
    if step is not None:
        code = step.tb_frame.f_code
        place = f" in {code.co_name} ({code.co_filename}:{step.tb_lineno})"
    return f"{type(error).__name__}: {error}{place}"


def _told(name: str, happened: Input) -> str:
    text = repr(happened)
    if len(text) > INPUT_CHARS:
        text = text[:INPUT_CHARS] + " ..."
    return f"{happened.at_s:10.4f}  {name}  {text}"
