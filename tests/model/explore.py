"""Breadth-first exploration of a world: every state within a budget of faults, each once.

States are visited in the order of (faults, steps), and a state keeps only the fewest faults that
reach it: whatever more faults can do from it, fewer can do too. So the number of faults is no part
of the state, and the first violation met has a trace with the fewest faults, then the fewest steps.

A state is stuck if no steps of ``Cause.PROGRESS`` lead from it to the end: that is, without another
fault, and without a clock giving up on the way (only a rendezvous may time out).
"""

from __future__ import annotations

import time
from array import array
from typing import NamedTuple, Protocol

from typing_extensions import override

from kvd.core.handoff.protocol import IllegalTransition
from tests.model.protocol import Cause, Rules
from tests.model.world import Edge, Scope, World


class Found(NamedTuple):
    """What an exploration came to; ``violation`` None: every state is safe and none is stuck."""

    states: int
    seconds: float
    violation: str | None = None
    trace: tuple[str, ...] = ()

    @override
    def __str__(self) -> str:
        head = f"{self.states:,} states in {self.seconds:.1f} s: "
        if self.violation is None:
            return head + "none unsafe, none stuck"
        lines = [f"{i:3}. {words}" for i, words in enumerate(self.trace, 1)]
        return "\n".join([head + self.violation, *lines])


class Explored(Protocol):
    """A world: its states are integers, of which a part stands for the sides alone."""

    @property
    def scope(self) -> Bounded: ...

    def start(self) -> int: ...

    def free_steps(self, world: int) -> list[tuple[Edge, int]]: ...

    def fault_steps(self, world: int) -> list[tuple[Edge, int]]: ...

    def canonical(self, world: int) -> int: ...

    def sides_of(self, world: int) -> int: ...

    def wrong(self, sides: int) -> str | None: ...

    def is_over(self, sides: int) -> bool: ...


class Bounded(Protocol):
    """How much is explored."""

    @property
    def budget(self) -> int: ...


class Graph:
    """The states found so far, numbered in the order of discovery."""

    def __init__(self, world: Explored) -> None:
        self.world = world
        self.states = [self.world.start()]
        self.numbers = {self.states[0]: 0}
        self.parents = array("q", [-1])
        self.sources = array("q")
        self.targets = array("q")
        """Edges of progress, by number."""
        self.safe_pairs: set[int] = set()

    def run(self) -> tuple[str, int] | None:
        """Explore everything; the first violation and the state it is in, or None."""
        frontier = 0
        later: dict[int, int] = {}
        budget = self.world.scope.budget
        for faults in range(budget + 1):
            for state, parent in later.items():
                self.add(state, parent)
            later = {}
            while frontier < len(self.states):
                wrong = self.expand(frontier, later if faults < budget else None)
                if wrong is not None:
                    return wrong, frontier
                frontier += 1
        stuck = self.stuck()
        return None if stuck is None else ("stuck: no steps lead to the end", stuck)

    def expand(self, number: int, later: dict[int, int] | None) -> str | None:
        """Follow every step out of one state; what is wrong with the state, if anything is."""
        state, world = self.states[number], self.world
        pair = world.sides_of(state)
        if pair not in self.safe_pairs:
            wrong = world.wrong(pair)
            if wrong is not None:
                return wrong
            self.safe_pairs.add(pair)
        try:
            for edge, after in world.free_steps(state):
                target = self.add(world.canonical(after), number)
                if edge.cause is Cause.PROGRESS and target != number:
                    self.sources.append(number)
                    self.targets.append(target)
            if later is not None:
                for _, after in world.fault_steps(state):
                    target = world.canonical(after)
                    if target not in self.numbers:
                        later.setdefault(target, number)
        except IllegalTransition as missing:
            return f"hole: {missing}"
        return None

    def add(self, state: int, parent: int) -> int:
        number = self.numbers.get(state)
        if number is None:
            number = self.numbers[state] = len(self.states)
            self.states.append(state)
            self.parents.append(parent)
        return number

    def stuck(self) -> int | None:
        """The first state from which the end cannot be reached."""
        ends = bytearray(len(self.states))
        over = {pair: self.world.is_over(pair) for pair in self.safe_pairs}
        for number, state in enumerate(self.states):
            ends[number] = over[self.world.sides_of(state)]
        grew = True
        while grew:  # edges mostly point forward, so a backward sweep settles nearly all of them
            grew = False
            for i in range(len(self.sources) - 1, -1, -1):
                if ends[self.targets[i]] and not ends[self.sources[i]]:
                    ends[self.sources[i]] = grew = True
        stuck = ends.find(0)
        return None if stuck < 0 else stuck

    def trace(self, number: int) -> tuple[str, ...]:
        """How to get to a state, in words, with the incarnations counted from the start."""
        path = []
        while number >= 0:
            path.append(self.states[number])
            number = self.parents[number]
        here, words = path.pop(), []
        while path:
            step, here = self.step_to(here, path.pop())
            words.append(step)
        return tuple(words)

    def step_to(self, here: int, target: int) -> tuple[str, int]:
        """The step out of ``here`` to what is ``target`` but for the names."""
        world = self.world
        for edge, after in world.free_steps(here):
            if world.canonical(after) == target:
                return edge.words, after
        for edge, after in world.fault_steps(here):
            if world.canonical(after) == target:
                return f"[{edge.cause.name.lower()}] {edge.words}", after
        raise AssertionError("a state was reached by no step")


def explore(scope: Scope, rules: Rules | None = None) -> Found:
    """Explore ``scope`` under ``rules`` (the protocol's own if None)."""
    return explored(World(scope, Rules() if rules is None else rules))


def explored(world: Explored) -> Found:
    """Explore every state of ``world``."""
    began = time.perf_counter()
    graph = Graph(world)
    wrong = graph.run()
    seconds = time.perf_counter() - began
    if wrong is None:
        return Found(len(graph.states), seconds)
    return Found(len(graph.states), seconds, wrong[0], graph.trace(wrong[1]))
