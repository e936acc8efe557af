"""The page map: the pages of one component as cells, through a lens, for whoever asks alike.

Made anew when there is a new survey, a step at a time; the cells have a revision that changes when
they do. What is asked for with the same window, lens and mark is made and encoded once, what a lens
says of a survey once for all.

What must not live here: where pages are (``survey``), what a value means (``page_map_modes``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvd.console.page_map_modes import MODES
from kvd.console.page_owners import FIRST_NODE
from kvd.core.inspect.page_states import needed_nodes
from kvd.core.layout.spec import companion_factor, is_companion
from kvd.wire.console import PageMap

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    import numpy.typing as npt

    from kvd.console.context import Context
    from kvd.console.page_owners import PageOwners
    from kvd.console.survey import Survey
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.inspect.view import NodeView
    from kvd.wire.console import MapQuery


PAGES_AT_ONCE = 262_144
LEASES_AT_ONCE = 256
"""In one step."""

_ENCODE = msgspec.msgpack.Encoder().encode

FEW = 16
"""So many pages a cell are compared column by column, more of them cell by cell: by what is faster.
"""


class MapFeed:
    """What a query was last answered with. ``look`` now and then, ``answer`` anybody."""

    def __init__(self, query: MapQuery, revisions: Iterator[int]) -> None:
        self.asked_s = self.at_s = float("-inf")
        """``at_s``: when it was last brought up to date."""
        self._query = query
        self._revisions = revisions
        self._revision = 0
        self._shown = _nothing(query, "the first look at all pages is not over yet")
        self._cells = b""
        self._survey: Survey | None = None
        self._answers: dict[bool, bytes] = {}

    @property
    def revision(self) -> int:
        """Of what ``answer`` says; 0 where it says why there is nothing."""
        return self._shown.revision

    def look(self, context: Context) -> Iterator[None]:
        """The pages as they were seen last, a step at a time."""
        survey = context.surveyor.ask(context.now_s)
        yield
        if survey is None or survey is self._survey:
            self.at_s = context.now_s
            return
        made = yield from map_in_steps(self._query, survey, context.node)
        self.at_s = context.now_s
        self._survey = survey
        self._answers.clear()
        cells = made.cells or b""
        if not self._revision or cells != self._cells:
            self._revision = next(self._revisions)
        self._cells = cells
        self._shown = msgspec.structs.replace(
            made, revision=0 if made.trouble else self._revision, cells=None
        )

    def answer(self, have: int) -> bytes:
        """A ``PageMap``, without cells for one that has this revision."""
        lacks = have != self._shown.revision
        found = self._answers.get(lacks)
        if found is None:
            shown = self._shown
            if lacks and shown.revision:
                shown = msgspec.structs.replace(shown, cells=self._cells)
            found = self._answers[lacks] = _ENCODE(shown)
        return found


def map_in_steps(query: MapQuery, survey: Survey, node: NodeView) -> Generator[None, None, PageMap]:
    """What a survey says of a query; ``revision`` is not set. Each step some 2 ms at most."""
    plane = survey.plane(query.component)
    if plane is None:
        return _nothing(query, _no_plane(query.component, survey, node))
    if query.lens not in MODES:
        return _nothing(query, f"there is no lens {query.lens!r}: it is {', '.join(MODES)}")
    values, levels = plane.through(query.lens, lambda: MODES[query.lens](plane, node, survey.at_s))
    yield
    marked = np.zeros(values.size, np.uint8)
    if query.mark:
        yield from _mark(marked, query.mark, plane, survey, node)
    last = query.first_page + query.cells * query.pages_each
    window = plane.thing[query.first_page : last]
    cells, lit = [], []
    at_once = max(1, PAGES_AT_ONCE // query.pages_each) * query.pages_each
    for start in range(0, window.size, at_once):
        things = window[start : start + at_once]
        cells.append(_highest(values[things], query.pages_each).tobytes())
        if query.mark:
            lit.append(_highest(marked[things], query.pages_each).tobytes())
        yield
    return PageMap(
        component=plane.name,
        lens=query.lens,
        revision=0,
        at_s=survey.at_s,
        took_s=survey.at_s - survey.began_s,
        total_pages=plane.total_pages,
        page_bytes=plane.page_bytes,
        first_page=query.first_page,
        pages_each=query.pages_each,
        levels=levels,
        cells=b"".join(cells),
        lit=tuple(np.flatnonzero(np.frombuffer(b"".join(lit), np.uint8)).tolist()),
        runs=plane.runs,
    )


def _highest(values: npt.NDArray[np.uint8], each: int) -> npt.NDArray[np.uint8]:
    """The highest of each so many, the last of which may be fewer."""
    if each == 1 or not values.size:
        return values
    if each >= values.size:
        return np.array([values.max()], np.uint8)
    if values.size % each:
        values = np.append(values, np.zeros(-values.size % each, np.uint8))
    cells = values.reshape(-1, each)
    highest = cells[:, 0].copy()
    if each > FEW:
        np.max(cells, axis=1, out=highest)
        return highest
    for column in range(1, each):
        np.maximum(highest, cells[:, column], out=highest)
    return highest


# ---- marks ---------------------------------------------------------------------------------------


def _mark(
    marked: npt.NDArray[np.uint8], mark: str, plane: PageOwners, survey: Survey, node: NodeView
) -> Iterator[None]:
    """Write 1 at the things that ``lease:7``, ``node:3`` or ``client:2`` is, or needs."""
    what, _, number = mark.partition(":")
    if not number.isdecimal():
        return
    leases = node.leases.leases
    match what:
        case "node" if int(number) in survey.index:
            marked[FIRST_NODE + survey.index[int(number)]] = 1
        case "lease" if int(number) in leases:
            marked[_things([leases[int(number)]], plane, survey, set())] = 1
        case "client":
            its = [lease for lease in leases.values() if lease.session == int(number)]
            seen: set[int] = set()
            for start in range(0, len(its), LEASES_AT_ONCE):
                some = its[start : start + LEASES_AT_ONCE]
                marked[_things(some, plane, survey, seen)] = 1
                yield
        case _:
            pass


def _things(
    leases: Iterable[LeaseRecord], plane: PageOwners, survey: Survey, seen: set[int]
) -> list[int]:
    """The leases, and the nodes whose part of this component they need, but for those ``seen``."""
    found = []
    needed: list[int] = []
    for lease in leases:
        if lease.id in survey.leases:
            found.append(survey.leases[lease.id])
        if plane.where.keeper is not None:
            needed += [tree_node.id for tree_node in needed_nodes(plane.where.keeper, lease)]
            continue
        step = lease.anchor
        while step is not None and not plane.where.saves and step.id not in seen:
            seen.add(step.id)
            needed.append(step.id)
            step = step.parent
    return found + [
        FIRST_NODE + survey.index[node_id] for node_id in needed if node_id in survey.index
    ]


# ---- what there is not ---------------------------------------------------------------------------


def _no_plane(component: str, survey: Survey, node: NodeView) -> str:
    spec = node.settings.spec
    for part in spec.components:
        if part.name == component and is_companion(spec, part):
            first, each = spec.components[0].name, companion_factor(spec, part)
            return f"pages of {component} go in lockstep, {each} with each of {first}: look there"
    known = ", ".join(plane.name for plane in survey.planes)
    return f"there is no component {component!r} with pages of its own: it is {known}"


def _nothing(query: MapQuery, why: str) -> PageMap:
    return PageMap(
        component=query.component,
        lens=query.lens,
        revision=0,
        at_s=0.0,
        took_s=0.0,
        total_pages=0,
        page_bytes=0,
        first_page=query.first_page,
        pages_each=query.pages_each,
        levels=(),
        cells=None,
        trouble=why,
    )
