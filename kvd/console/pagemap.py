"""The page map: the pages of one component as cells, through a lens, for whoever asks alike.

Made anew when there is a new survey; the cells have a revision that changes when they do. What is
asked for with the same window, lens and mark is made and encoded once.

What must not live here: where pages are (``survey``), what a value means (``lenses``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvd.console.lenses import LENSES
from kvd.console.plane import FIRST_NODE
from kvd.core.beside_rules import needed_nodes
from kvd.core.spec import companion_factor, is_companion
from kvd.wire.console import PageMap

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from kvd.console.plane import Plane
    from kvd.console.scene import Scene
    from kvd.console.survey import Survey
    from kvd.core.lease import Lease
    from kvd.core.node import Node
    from kvd.wire.console import MapQuery

_ENCODE = msgspec.msgpack.Encoder().encode

FEW = 16
"""So many pages a cell are compared column by column, more of them cell by cell: by what is faster.
"""


class MapFeed:
    """What a query was last answered with. ``update`` now and then, ``answer`` anybody."""

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

    def update(self, scene: Scene) -> None:
        """The pages as they were seen last."""
        self.at_s = scene.now_s
        survey = scene.surveyor.ask(scene.now_s)
        if survey is None or survey is self._survey:
            return
        self._survey = survey
        self._answers.clear()
        made = page_map(self._query, survey, scene.node)
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


def page_map(query: MapQuery, survey: Survey, node: Node) -> PageMap:
    """What a survey says of a query; ``revision`` is not set."""
    plane = survey.plane(query.component)
    lens = LENSES.get(query.lens)
    if plane is None:
        return _nothing(query, _no_plane(query.component, survey, node))
    if lens is None:
        return _nothing(query, f"there is no lens {query.lens!r}: it is {', '.join(LENSES)}")
    values, levels = lens(plane, node, survey.at_s)
    window = plane.thing[query.first_page : query.first_page + query.cells * query.pages_each]
    lit: tuple[int, ...] = ()
    if query.mark:
        is_marked = np.zeros(values.size, np.uint8)
        is_marked[list(_marked(query.mark, plane, survey, node))] = 1
        cells = _highest(is_marked[window], query.pages_each)
        lit = tuple(np.flatnonzero(cells).tolist())
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
        cells=_highest(values[window], query.pages_each).tobytes(),
        lit=lit,
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


def _marked(mark: str, plane: Plane, survey: Survey, node: Node) -> Iterator[int]:
    """The things that ``lease:7``, ``node:3`` or ``client:2`` is, or needs."""
    what, _, number = mark.partition(":")
    if not number.isdecimal():
        return
    leases = node.leases.leases
    match what:
        case "node" if int(number) in survey.index:
            yield FIRST_NODE + survey.index[int(number)]
        case "lease" if int(number) in leases:
            yield from _of_leases([leases[int(number)]], plane, survey)
        case "client":
            session = int(number)
            its = [one for one in leases.values() if one.session == session]
            yield from _of_leases(its, plane, survey)
        case _:
            pass


def _of_leases(leases: Iterable[Lease], plane: Plane, survey: Survey) -> Iterator[int]:
    """The leases, and the nodes whose part of this component they need."""
    needed: set[int] = set()
    for lease in leases:
        if lease.id in survey.leases:
            yield survey.leases[lease.id]
        if plane.keeper is not None:
            needed.update(one.id for one in needed_nodes(plane.keeper, lease))
            continue
        step = lease.anchor
        while step is not None and not plane.saves and step.id not in needed:
            needed.add(step.id)
            step = step.parent
    yield from [FIRST_NODE + survey.index[one] for one in needed if one in survey.index]


# ---- what there is not ---------------------------------------------------------------------------


def _no_plane(component: str, survey: Survey, node: Node) -> str:
    spec = node.settings.spec
    for one in spec.components:
        if one.name == component and is_companion(spec, one):
            first, each = spec.components[0].name, companion_factor(spec, one)
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
