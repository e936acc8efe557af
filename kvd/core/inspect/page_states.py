"""Where every page is: the free list, a lease, a node of the tree. I1 over all of them at once.

The cost grows with the pool: the standing audit asks this only when it has missed a page, or has
seen one twice, and then the answer names the places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from kvd.core.audit.fault import Fault
from kvd.types import ID_BYTES, Pages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvd.core.cache.pages import PagePool
    from kvd.core.node import Node

MAX_PLACES = 8
"""Different sets of places named in one answer; a broken free list would name thousands."""


class Place(msgspec.Struct, frozen=True):
    """Something that has pages; at most one of ``lease`` and ``node`` is not 0."""

    name: str
    pages: Pages
    lease: int = 0
    node: int = 0


def places(node: Node) -> Iterator[Place]:
    """All of them: what they have tiles the pool."""
    table = node.leases
    yield Place("the free list", table.pool.free_ids())
    for edge in table.tree.nodes():
        yield Place(f"node {edge.id}", edge.pages, node=edge.id)
    for lease in table.leases.values():
        yield Place(f"lease {lease.id}", lease.held, lease=lease.id)


def page_faults(node: Node) -> list[Fault]:
    """I1: null + free + held + cached + quarantined = total; each page in exactly one."""
    return tile_faults(list(places(node)), node.leases.pool)


def tile_faults(everything: list[Place], pool: PagePool, component: str = "") -> list[Fault]:
    """I1 of any pool: which of its pages are in no place, in two, or none of its own.

    A condemned page is in its own place and in no other, whoever still names it.
    """
    total = pool.total_pages
    if pool.condemned_pages:
        everything = _apart_from(everything, pool.condemned_ids())
    ids = np.frombuffer(b"".join([place.pages for place in everything]), dtype="<i4")
    if ids.size == total - 1 and np.array_equal(np.sort(ids), np.arange(1, total)):
        return []
    return [
        *_strays(everything, total, component),
        *_doubles(everything, ids, total, component),
        *_missing(ids, total, component),
    ]


def count_faults(node: Node) -> list[Fault]:
    """I1 by the numbers alone: cheap, and blind to a page that is lost while another is double."""
    table = node.leases
    held = sum([lease.held_pages for lease in table.leases.values()])
    free, cached = table.pool.free_pages, table.tree.cached_pages
    if 1 + free + cached + held == table.pool.total_pages or table.pool.condemned_pages:
        return []  # how many of those condemned are still named is not counted
    what = (
        f"null 1 + free {free} + cached {cached} + held and quarantined {held} is not "
        f"{table.pool.total_pages}"
    )
    return [Fault("I1", "page-count", what)]


def _apart_from(everything: list[Place], condemned: Pages) -> list[Place]:
    gone = np.frombuffer(condemned, "<i4")
    found = [Place("condemned", condemned)]
    for place in everything:
        ids = np.frombuffer(place.pages, "<i4")
        left = ids[~np.isin(ids, gone)]
        is_same = left.size == ids.size
        found.append(place if is_same else replace(place, pages=Pages(left.tobytes())))
    return found


def nobodys(everything: Iterable[Place], pool: PagePool) -> int:
    """How many condemned pages nobody names any more."""
    if not pool.condemned_pages:
        return 0
    named = np.frombuffer(b"".join([place.pages for place in everything]), "<i4")
    return int(np.setdiff1d(np.frombuffer(pool.condemned_ids(), "<i4"), named).size)


def has_any(pages: bytes, ids: np.ndarray) -> bool:
    """Whether one of ``ids`` is among the pages."""
    return bool(np.isin(np.frombuffer(pages, "<u4"), ids).any())


def _strays(everything: list[Place], total: int, component: str) -> Iterator[Fault]:
    """Ids that are no page of this pool, the null page included."""
    for place in everything:
        ids = np.frombuffer(place.pages, dtype="<i4")
        wrong = ids[(ids < 1) | (ids >= total)]
        if wrong.size:
            what = (
                f"{place.name} has page {wrong[0]}{_of(component)}; "
                f"this pool hands out 1 to {total - 1}"
            )
            yield Fault(
                rule="I1",
                check="page-stray",
                what=what,
                lease=place.lease,
                node=place.node,
                pages=Pages(wrong.tobytes()),
                component=component,
            )


def _doubles(
    everything: list[Place], ids: np.ndarray, total: int, component: str
) -> Iterator[Fault]:
    """Pages in two places, or twice in one, by where they are."""
    known = (ids >= 1) & (ids < total)
    times = np.bincount(ids[known], minlength=total)
    at = np.flatnonzero(known)
    at = at[times[ids[at]] > 1]
    ends = np.cumsum([len(place.pages) // ID_BYTES for place in everything])
    in_which = np.searchsorted(ends, at, "right")
    where: dict[int, list[int]] = {}
    for page, index in zip(ids[at].tolist(), in_which.tolist(), strict=True):
        where.setdefault(page, []).append(index)
    groups: dict[tuple[int, ...], list[int]] = {}
    for page, found in where.items():
        groups.setdefault(tuple(found), []).append(page)
    for indexes, pages in list(groups.items())[:MAX_PLACES]:
        named = [everything[index] for index in indexes]
        yield Fault(
            "I1",
            "page-double",
            f"{_these(pages, component)} in {' and in '.join(place.name for place in named)}",
            lease=max(place.lease for place in named),
            node=max(place.node for place in named),
            pages=Pages(np.asarray(pages, dtype="<i4").tobytes()),
            component=component,
        )


def _missing(ids: np.ndarray, total: int, component: str) -> Iterator[Fault]:
    """Pages in no place at all: nobody will ever have them again."""
    is_there = np.zeros(total, dtype=bool)
    is_there[ids[(ids >= 1) & (ids < total)]] = True
    lost = np.flatnonzero(~is_there[1:]) + 1
    if lost.size:
        pages = Pages(lost.astype("<i4").tobytes())
        what = f"{_these(lost.tolist(), component)} nowhere"
        yield Fault("I1", "page-lost", what, pages=pages, component=component)


def _these(pages: list[int], component: str) -> str:
    """``page 7 is``, or how many they are and the first."""
    of = _of(component)
    if len(pages) == 1:
        return f"page {pages[0]}{of} is"
    return f"{len(pages)} pages{of}, the first is {pages[0]}, are"


def _of(component: str) -> str:
    return f" of {component}" if component else ""
