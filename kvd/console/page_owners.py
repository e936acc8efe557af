"""The pages of one component as one survey saw them: which thing has each page.

A thing is a node of the tree, a lease, or nobody. What is true of a page is true of all pages of
its thing, so a page costs four bytes and is looked at once; what a lens shows of a million pages
is worked out for the things, and looked up for the pages on somebody's screen.

    things   | not seen | free | null | nobody | node | node | ... | lease | ... | kept | ... |

``kept`` are pages that this survey has not seen: they changed their place while it went on, and are
shown as the survey before saw them. That nobody has a page is the audit's to say.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvd.core.components.device_buffer import Buffers
from kvd.core.inspect.page_states import pools_of, saved_pools_of
from kvd.core.layout.spec import has_bytes, kind, node_page_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from kvd.core.inspect.page_states import PoolPlaces
    from kvd.core.inspect.view import NodeView
    from kvd.core.layout.spec import Component
    from kvd.wire.console import Level

    Ints = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float64]


UNSEEN, FREE, NULL, LOST = range(4)
"""Things that are neither nodes nor leases."""
FIRST_NODE = 4

PUT_PAGES = 32_768
"""Pages that are written down at once: in less than half a millisecond, as they are counted."""
COUNTED_PAGES = 131_072


class Is(enum.IntEnum):
    """What a page is, from harmless to worth a look."""

    FREE = 0
    UNSEEN = 1
    """Changed its place while it was looked for, for the first time."""
    CACHED = 2
    HELD = 3
    SENDING = 4
    """Held, and read by posts or copies under way."""
    ARRIVING = 5
    """Held, and written by a remote or a copy."""
    LOCKED = 6
    """Cached, and kept by a lease."""
    SAVED = 7
    """Of the saved area: the bytes of a retracted lease."""
    LINGERING = 8
    """Held, and its engine has let go."""
    QUARANTINED = 9
    NOBODY = 10


class Things(NamedTuple):
    """What is true of each thing, by its number."""

    what: npt.NDArray[np.uint8]
    """``Is``."""
    session: Ints
    """0 for none: free, or kvd's own cache."""
    since_s: Floats
    """Last used; of a lease, since when it has its pages."""
    hits: Ints
    locks: Ints
    is_saved: npt.NDArray[np.bool_]
    """Whether there is a copy in the saved area."""

    @staticmethod
    def of(
        what: Sequence[int],
        session: Sequence[int],
        since_s: Sequence[float],
        *,
        is_saved: Sequence[bool] = (),
    ) -> Things:
        """Things without hits and locks."""
        n = len(what)
        return Things(
            what=np.array(what, np.uint8),
            session=np.array(session, np.int64),
            since_s=np.array(since_s, np.float64),
            hits=np.zeros(n, np.int64),
            locks=np.zeros(n, np.int64),
            is_saved=np.array(is_saved, np.bool_) if is_saved else np.zeros(n, np.bool_),
        )

    def and_also(self, *others: Things) -> Things:
        """These, then those."""
        columns: list[Any] = [np.concatenate(pieces) for pieces in zip(self, *others, strict=True)]
        return Things(*columns)

    def some(self, numbers: npt.NDArray[np.intp]) -> Things:
        """A copy of those."""
        columns: list[Any] = [column[numbers] for column in self]
        return Things(*columns)


class MapValues(NamedTuple):
    """A value for each thing of a plane, and what the values mean."""

    values: npt.NDArray[np.uint8]
    levels: tuple[Level, ...]


class PageOwners:
    """One component, or one saved area, during a survey and after it.

    ``page_bytes`` are of all its shards.
    """

    def __init__(self, where: PoolPlaces, component: Component, page_bytes: int) -> None:
        pool = where.pool
        self.where = where
        self.name = pool.name
        self.total_pages = pool.total_pages
        self.page_bytes = page_bytes
        self.tier = "host" if where.saves else kind(component.tier)
        self.has_nodes = not where.saves and not isinstance(where.keeper, Buffers)
        self.thing = np.zeros(pool.total_pages, np.int32)
        """By page."""
        self.thing[0] = NULL
        self.things = Things.of([Is.UNSEEN, Is.FREE, Is.FREE, Is.NOBODY], [0] * 4, [0.0] * 4)
        self.pages: Ints = np.zeros(0, np.int64)
        """By thing; the null page is not counted."""
        self.runs = (0, 0)
        """Pages of the median and of the largest run of free pages."""
        self._shown: dict[str, MapValues] = {}

    def through(self, lens: str, look: Callable[[], MapValues]) -> MapValues:
        """What the lens of that name shows, once the survey is over: looked at once."""
        found = self._shown.get(lens)
        if found is None:
            found = self._shown[lens] = look()
        return found

    # ---- writing down ------------------------------------------------------------------------

    def see(self, pieces: Sequence[bytes], first_thing: int) -> Iterator[None]:
        """These pages have these things: one piece each. A step for each so many pages."""
        ids = np.frombuffer(b"".join(pieces), dtype="<i4")
        if not ids.size:
            return
        counts = np.array([len(piece) for piece in pieces]) >> 2
        things = np.repeat(np.arange(first_thing, first_thing + len(pieces), dtype="<i4"), counts)
        for start in range(0, ids.size, PUT_PAGES):
            self.put(ids[start : start + PUT_PAGES], things[start : start + PUT_PAGES])
            yield

    def put(self, ids: npt.NDArray[np.int32], things: npt.NDArray[np.int32] | int) -> None:
        """The same of pages; what is no page of this pool is the audit's affair."""
        if ids.size and (ids.min() <= 0 or ids.max() >= self.total_pages):
            is_page = (ids > 0) & (ids < self.total_pages)
            if not isinstance(things, int):
                things = things[is_page]
            ids = ids[is_page]
        self.thing[ids] = things

    # ---- the end -----------------------------------------------------------------------------

    def keep(self, before: PageOwners | None, nobodys: npt.NDArray[np.int32]) -> None:
        """Pages that were not seen are nobody's, if these are; or as they were ``before``."""
        self.put(nobodys[self.thing[nobodys] == UNSEEN], LOST)
        unseen = np.flatnonzero(self.thing == UNSEEN)
        if before is None or not unseen.size or before.total_pages != self.total_pages:
            return
        old = before.thing[unseen]
        kept = np.flatnonzero(np.bincount(old))
        place = np.zeros(before.things.what.size, np.int32)
        place[kept] = np.arange(kept.size) + self.things.what.size
        self.thing[unseen] = place[old]
        self.things = self.things.and_also(before.things.some(kept))

    def count(self) -> Iterator[None]:
        """Pages by thing. A step for each so many pages."""
        n_things = self.things.what.size
        total = np.zeros(n_things, np.int64)
        for start in range(0, self.total_pages, COUNTED_PAGES):
            total += np.bincount(self.thing[start : start + COUNTED_PAGES], minlength=n_things)
            yield
        total[NULL] = 0
        self.pages = total

    def find_runs(self) -> None:
        """Runs of free pages."""
        is_free = self.thing == FREE  # the null page is not: every run has a start behind a page
        ends = np.flatnonzero(is_free[1:] != is_free[:-1]) + 1
        if ends.size % 2:
            ends = np.append(ends, self.total_pages)
        lengths = ends[1::2] - ends[::2]
        if lengths.size:
            by_length = np.cumsum(np.bincount(lengths))
            median = int(np.searchsorted(by_length, (lengths.size + 1) // 2))
            self.runs = (median, int(lengths.max()))


def page_owners_of(node: NodeView) -> list[PageOwners]:
    """One for each component with pages of its own, the first one first; then the saved areas."""
    table, spec = node.leases, node.settings.spec
    by_name = {component.name: component for component in spec.components}
    saved = [area for area in saved_pools_of(table) if area.pool.total_pages > 1]
    found = []
    for where in (*pools_of(table), *saved):
        component = by_name[where.saves or where.pool.name]
        n_bytes = node_page_bytes(spec, component) if has_bytes(component) else 0
        found.append(PageOwners(where, component, n_bytes))
    return found
