"""Every order of a few steps from a case, each state once, and long walks at random beside it."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, NamedTuple

from tests.explore.case import Case, Choice, choices, start

if TYPE_CHECKING:
    from collections.abc import Iterable


class Violated(AssertionError):
    """Something does not hold; the message has the way there."""


class Found(NamedTuple):
    """What was looked at. ``is_whole``: all of it, the time was enough."""

    steps: int
    states: int
    ends: int
    is_whole: bool

    def __str__(self) -> str:
        cut = "" if self.is_whole else ", cut by the time"
        return f"{self.steps} steps, {self.states} states, {self.ends} followed by calm{cut}"


def explore(name: str, *, depth: int, faults: int, until_s: float = float("inf")) -> Found:
    """All sequences of ``depth`` steps from that start, with at most so many faults.

    Each state is gone on from once for each number of faults left, and each last one is followed
    by calm: shorter sequences are followed by calm within longer ones.

    Raises:
        Violated: with the sequence.
    """
    here = {b"": start(name)}
    steps = states = ends = 0
    for level in range(1, depth + 1):
        there: dict[bytes, Case] = {}
        for case in here.values():
            for choice in choices(case, faults):
                if time.monotonic() > until_s:
                    return Found(steps, states, ends, is_whole=False)
                steps += 1
                reached = checked(name, case, choice)
                digest = reached.digest()
                if digest in there:
                    continue
                there[digest] = reached
                if level == depth:
                    ends += 1
                    calm(name, reached)
                    there[digest] = case  # only its digest counts any more
        states += len(there)
        here = there
    return Found(steps, states, ends, is_whole=True)


def checked(name: str, case: Case, choice: Choice) -> Case:
    """The next case, or what is wrong there."""
    try:
        return case.after(choice)
    except Exception as error:
        raise Violated(_told(name, (*case.path, choice.name), error)) from error


def calm(name: str, case: Case) -> None:
    """Nothing more goes wrong: all must end."""
    path = (*case.path, "calm")
    try:
        case.calm()
    except Exception as error:
        raise Violated(_told(name, path, error)) from error


def walk(name: str, seed: int, *, steps: int = 25, faults: int = 6) -> None:
    """So many steps at random, then calm.

    Raises:
        Violated: with the steps and the seed.
    """
    rng, case = random.Random(seed), start(name)
    label = f"{name}, seed {seed}"
    for _ in range(steps):
        moves = list(choices(case, faults, max_ticks=4))
        likely = [one for one in moves if not one.is_fault]
        choice = rng.choice(likely if likely and rng.random() < 0.7 else moves or [None])
        if choice is None:
            break
        case.path = (*case.path, choice.name)
        case.faults += choice.is_fault
        case.is_promised &= not choice.is_fault or choice.keeps_promise
        try:
            choice.do(case)
            case.world.replace_processes()
        except Exception as error:
            raise Violated(_told(label, case.path, error)) from error
    calm(label, case)


def walks(name: str, seeds: Iterable[int]) -> None:
    for seed in seeds:
        walk(name, seed)


def _told(name: str, path: tuple[str, ...], error: Exception) -> str:
    return f"from {name}: {' > '.join(path)}: {type(error).__name__}: {error}"
