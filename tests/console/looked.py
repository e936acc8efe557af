"""Surveys and maps of real nodes, made at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvd.console.page_map import map_in_steps
from kvd.console.survey import Survey
from kvd.wire.console import MapQuery

if TYPE_CHECKING:
    from collections.abc import Generator

    from kvd.core.node import NodeState
    from kvd.wire.console import PageMap

T = TypeVar("T")


def surveyed(node: NodeState, before: Survey | None = None, at_s: float = 200.0) -> Survey:
    """A whole survey, with nothing happening meanwhile."""
    survey = Survey(node, before, at_s)
    for _ in survey.steps:
        pass
    return survey


def in_one(steps: Generator[None, None, T]) -> T:
    """What comes of the steps, one after the other."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found


def map_of(node: NodeState, survey: Survey | None = None, **query: object) -> PageMap:
    """A map of one page a cell; ``query`` says otherwise."""
    asked = MapQuery(**{"component": "", "lens": "state", **query})  # type: ignore[arg-type]
    return in_one(map_in_steps(asked, survey or surveyed(node), node))


def pages_by_level(shown: PageMap) -> dict[str, int]:
    """Levels that some page is on."""
    return {level.name: level.pages for level in shown.levels if level.pages}


def cells_by_level(shown: PageMap) -> dict[str, int]:
    """Cells of each level, the null page's left out; of a map from page 0 on, one page a cell."""
    assert shown.cells is not None
    counts = np.bincount(np.frombuffer(shown.cells, np.uint8)[1:], minlength=len(shown.levels))
    named = zip(shown.levels, counts.tolist(), strict=True)
    return {level.name: count for level, count in named if count}
