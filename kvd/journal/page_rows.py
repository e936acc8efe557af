"""Rows as a forest: which pages hang together, down to the beginning of a sequence.

Whole arrays at a time: a page's ancestor is found by doubling, so a sequence of n pages takes
log2(n) rounds. A chain cannot run in a circle, because the index of each page is one above that of
the page before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvd.core.inputs import Branch
from kvd.journal.layout import (
    BEFORE,
    BEFORE_SERIAL_8,
    INDEX,
    ROW_HEAD,
    SERIAL_8,
    SPACE,
    STAMP_8,
    page_bytes_of,
)
from kvd.types import Pages, Tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvd.journal.layout import Journal

    Ids = NDArray[np.intp]
    Mask = NDArray[np.bool_]

_CHUNK_ROWS = 16_384


class Columns:
    """What the rows say of where pages belong, each (pages,)."""

    def __init__(self, journal: Journal) -> None:
        rows4, rows8 = journal.rows4, journal.rows8
        self.before: Ids = rows4[:, BEFORE].astype(np.intp)
        self.index = rows4[:, INDEX].copy()
        self.space = rows4[:, SPACE].copy()
        self.serial = rows8[:, SERIAL_8].copy()
        self.before_serial = rows8[:, BEFORE_SERIAL_8].copy()
        stamp = rows8[:, STAMP_8]
        self.stamp = np.where(stamp != 0, stamp, self.serial)

    def follows(self, ids: Ids, before: Ids) -> Mask:
        """Whether each of ``ids`` was cached behind that page, as that was cached."""
        out: Mask = (
            (self.index[before] + np.uint32(1) == self.index[ids])
            & (self.index[ids] != 0)
            & (self.space[before] == self.space[ids])
            & (self.serial[before] == self.before_serial[ids])
        )
        return out


def reachable(columns: Columns, good: Mask) -> Mask:
    """Those of ``good`` from which good pages lead to the beginning of a sequence; (pages,)."""
    ids = np.flatnonzero(good)
    before = columns.before[ids]
    begins = (before == 0) & (columns.index[ids] == 0) & (columns.before_serial[ids] == 0)
    inside = (before > 0) & (before < good.size)
    # A damaged row may name any page: it must not be looked up outside of the arrays.
    before = np.where(inside, before, 0)
    linked = inside & good[before] & columns.follows(ids, before)
    up: Ids = np.arange(good.size)
    up[ids] = np.where(linked, before, ids)
    # The null page stands for the beginning: it follows nothing, so whoever comes to it is whole.
    up[ids[begins]] = 0
    ends = _ends(up, ids)
    out: Mask = np.zeros(good.size, bool)
    out[ids[ends == 0]] = True
    return out


def _ends(up: Ids, ids: Ids) -> Ids:
    """Where each of ``ids`` comes to when it goes up until that changes nothing; writes ``up``."""
    at: Ids = up[ids]
    while True:
        further: Ids = up[at]
        if np.array_equal(further, at):
            return at
        at = further
        # Shortened for the next round, which goes twice as far.
        up[ids] = at


class RowForest:
    """The pages that are kept, cut into branches.

    A branch ends where the tree forks, and where a caching ended: what was cached in one piece is
    one piece again. Eviction goes by pieces, so other ones would be other hits.

    Attributes:
        ids: the kept pages.
        is_first, is_last: of the longest stretches in which none forks; (pages,).
    """

    def __init__(self, columns: Columns, kept: Mask) -> None:
        self._columns = columns
        self.ids: Ids = np.flatnonzero(kept)
        inner = self.ids[columns.index[self.ids] > 0]
        children = np.bincount(columns.before[inner], minlength=kept.size)
        self.is_first: Mask = np.zeros(kept.size, bool)
        self.is_first[self.ids] = True
        self.is_first[inner[children[columns.before[inner]] == 1]] = False
        self.is_last: Mask = kept & (children != 1)
        self._begins: Mask = self.is_first.copy()
        # One caching counts on without a gap; the writer leaves one behind each.
        follows = columns.serial[inner] == columns.serial[columns.before[inner]] + np.uint64(1)
        self._begins[inner[~follows]] = True

    def branches(self, journal: Journal, names: dict[int, str]) -> GrownRows:
        """All of it as values."""
        columns, ids = self._columns, self.ids
        up = columns.before.copy()
        firsts = ids[self._begins[ids]]
        up[firsts] = firsts
        head = _ends(up, ids)
        in_order = ids[np.lexsort((columns.index[ids], head))]
        starts = np.flatnonzero(self._begins[in_order])
        bounds = [*starts.tolist(), in_order.size]
        number: Ids = np.full(columns.before.size, -1, np.intp)
        number[in_order] = np.cumsum(self._begins[in_order]) - 1
        heads = in_order[starts]
        parents = np.where(columns.index[heads] > 0, number[columns.before[heads]], -1)
        lasts = in_order[np.array(bounds[1:], np.intp) - 1]
        order = _leaves_by_use(parents.tolist(), columns.stamp[lasts])
        return GrownRows(journal, names, _Cut(in_order, bounds, parents.tolist(), order, number))


class _Cut:
    """Stretches of ``in_order`` between ``bounds``, and the order in which they are named."""

    def __init__(
        self, in_order: Ids, bounds: list[int], parents: list[int], order: list[int], number: Ids
    ) -> None:
        self.in_order = in_order
        self.bounds = bounds
        self.parents = parents
        self.order = order
        self.number = number


def _leaves_by_use(parents: list[int], stamps: NDArray[np.uint64]) -> list[int]:
    """Parents first; those without children in the order of their stamps."""
    has_child = [False] * len(parents)
    for parent in parents:
        if parent >= 0:
            has_child[parent] = True
    named = [False] * len(parents)
    order: list[int] = []
    # By the leaves: a parent is named with its first child, and used again with each other.
    for leaf in np.argsort(stamps, kind="stable").tolist():
        if has_child[leaf]:
            continue
        path = []
        at = leaf
        while at >= 0 and not named[at]:
            named[at] = True
            path.append(at)
            at = parents[at]
        order.extend(reversed(path))
    return order


class GrownRows:
    """The branches, and which tokens lead to a page of them."""

    def __init__(self, journal: Journal, names: dict[int, str], cut: _Cut) -> None:
        self._cut = cut
        place = [0] * len(cut.order)
        tokens = _tokens(journal, cut.in_order)
        found: list[Branch] = []
        for at, which in enumerate(cut.order):
            place[which] = at
            start, stop = cut.bounds[which], cut.bounds[which + 1]
            parent = cut.parents[which]
            space = int(journal.rows4[cut.in_order[start], SPACE])
            found.append(
                Branch(
                    parent=place[parent] if parent >= 0 else -1,
                    namespace=names[space],
                    tokens=Tokens(tokens[start:stop].tobytes()),
                    pages=Pages(page_bytes_of(cut.in_order[start:stop])),
                )
            )
        self._place = place
        self.branches = tuple(found)

    def path_to(self, page: int) -> tuple[str, Tokens]:
        """Namespace and tokens of the path that ends at a kept page."""
        at = self._place[int(self._cut.number[page])]
        last = self.branches[at]
        ids = np.frombuffer(last.pages, "<i4")
        n_pages = int(np.flatnonzero(ids == page)[0]) + 1
        parts = [last.tokens[: len(last.tokens) // ids.size * n_pages]]
        at = last.parent
        while at >= 0:
            parts.append(self.branches[at].tokens)
            at = self.branches[at].parent
        return last.namespace, Tokens(b"".join(reversed(parts)))


def _tokens(journal: Journal, ids: Ids) -> NDArray[np.uint32]:
    """The tokens of each page, (n, page_size)."""
    size = journal.sizes.page_size
    out: NDArray[np.uint32] = np.empty((ids.size, size), np.uint32)
    for start in range(0, ids.size, _CHUNK_ROWS):
        some = ids[start : start + _CHUNK_ROWS]
        out[start : start + some.size] = journal.rows4[some][:, ROW_HEAD : ROW_HEAD + size]
    return out
