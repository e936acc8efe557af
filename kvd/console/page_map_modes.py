"""The modes of the page map: what one value of each thing is shown, and what the values mean.

Levels go from harmless to worth a look, because a cell shows the highest among its pages. The first
one is always what is free, the last one what nobody has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvd.console.page_owners import Is, MapValues
from kvd.core.leases.owners import owner_of
from kvd.wire.console import Level

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from kvd.console.page_owners import PageOwners
    from kvd.core.inspect.view import NodeView

    Values = npt.NDArray[np.uint8]


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
OWNERS_NAMED = 12
"""Sessions with a level of their own, those with the most pages."""

_STATES = (
    (".", "free"),
    ("-", "unseen"),
    ("c", "cached"),
    ("h", "held"),
    ("s", "sending"),
    ("a", "arriving"),
    ("L", "locked"),
    ("S", "saved"),
    ("l", "lingering"),
    ("Q", "quarantined"),
    ("?", "nobody"),
)
_FREE, _HELD, _NOBODY = _STATES[Is.FREE], ("h", "held"), _STATES[Is.NOBODY]

_AGES = ((1.0, "s", "< 1 s"), (10.0, "t", "< 10 s"), (60.0, "m", "< 1 min"),
         (600.0, "n", "< 10 min"), (3600.0, "H", "< 1 h"))  # fmt: skip
_OLDEST = ("O", "1 h or more")
_HITS = ((1, "0", "0"), (2, "1", "1"), (4, "2", "2 to 3"), (8, "4", "4 to 7"),
         (64, "8", "8 to 63"))  # fmt: skip
_MOST_HITS = ("X", "64 or more")
_LOCKS = ((1, "0", "0"), (2, "1", "1"), (3, "2", "2"), (8, "3", "3 to 7"))
_MOST_LOCKS = ("8", "8 or more")
_TIERS = (("d", "device"), ("h", "host"), ("n", "nowhere"))

_CACHED = (Is.CACHED, Is.LOCKED)


def state(plane: PageOwners, _: NodeView, __: float) -> MapValues:
    """Free, cached, held, and what is under way."""
    return _shown(plane, plane.things.what, _STATES)


def owner(plane: PageOwners, node: NodeView, _: float) -> MapValues:
    """Whose they are: kvd's own cache, the sessions with the most pages, the others."""
    things = plane.things
    owned = np.flatnonzero(things.session)  # nodes are nobody's, and there are many of them
    sessions, place = np.unique(things.session[owned], return_inverse=True)
    pages = np.bincount(place, weights=plane.pages[owned])
    biggest = np.argsort(-pages, kind="stable")
    named = sorted(int(sessions[at]) for at in biggest[:OWNERS_NAMED] if pages[at])
    words = [_FREE, ("c", "cache"), ("o", "others")]
    letters = _letters(named)
    words += [(letters[session], owner_of(node, session)[0]) for session in named]
    value_of = np.full(sessions.size, 2)
    for k, session in enumerate(named):
        value_of[sessions == session] = 3 + k
    values = np.ones(things.session.size, np.intp)
    values[owned] = value_of[place]
    return _shown(plane, _apart(things.what, values, len(words)), (*words, _NOBODY))


def _letters(sessions: Sequence[int]) -> dict[int, str]:
    """A letter each, by its number: the same whoever else comes and goes, where that can be."""
    given: dict[int, str] = {}
    for session in sessions:
        letter = next(
            letter
            for step in range(len(LETTERS))
            if (letter := LETTERS[(session - 1 + step) % len(LETTERS)]) not in given.values()
        )
        given[session] = letter
    return given


def age(plane: PageOwners, _: NodeView, at_s: float) -> MapValues:
    """Since their last use; of what a lease holds, since it has it."""
    bounds = [bound for bound, _, _ in _AGES]
    values = 1 + np.searchsorted(bounds, at_s - plane.things.since_s, side="right")
    words = [_FREE, *[(letter, name) for _, letter, name in _AGES], _OLDEST]
    return _shown(plane, _apart(plane.things.what, values, len(words)), (*words, _NOBODY))


def hits(plane: PageOwners, _: NodeView, __: float) -> MapValues:
    """How many leases have used what is cached there."""
    return _counted(plane, plane.things.hits, _HITS, _MOST_HITS)


def locks(plane: PageOwners, _: NodeView, __: float) -> MapValues:
    """How many leases keep what is cached there."""
    return _counted(plane, plane.things.locks, _LOCKS, _MOST_LOCKS)


def tier(plane: PageOwners, _: NodeView, __: float) -> MapValues:
    """In which memory they are, and of which there is a copy in the saved area."""
    names = [name for _, name in _TIERS]
    values = np.full(plane.things.what.size, 1 + names.index(plane.tier))
    if not plane.where.saves:
        values[plane.things.is_saved] = 1 + len(_TIERS)
    words = (_FREE, *_TIERS, ("S", "saved too"))
    return _shown(plane, _apart(plane.things.what, values, len(words)), (*words, _NOBODY))


MODES: dict[str, Callable[[PageOwners, NodeView, float], MapValues]] = {
    "state": state,
    "owner": owner,
    "age": age,
    "hits": hits,
    "locks": locks,
    "tier": tier,
}


def _counted(
    plane: PageOwners,
    counts: npt.NDArray[np.int64],
    buckets: Sequence[tuple[int, str, str]],
    most: tuple[str, str],
) -> MapValues:
    """By how many; what is held and not cached is a level of its own."""
    bounds = [bound for bound, _, _ in buckets]
    values = 2 + np.searchsorted(bounds, counts, side="right")
    what = plane.things.what
    values[~np.isin(what, _CACHED)] = 1
    words = [_FREE, _HELD, *[(letter, name) for _, letter, name in buckets], most]
    return _shown(plane, _apart(what, values, len(words)), (*words, _NOBODY))


def _apart(what: Values, values: npt.NDArray[np.intp], nobody: int) -> Values:
    """The same, with what is free as 0 and what nobody has as ``nobody``."""
    out = values.astype(np.uint8)
    out[what <= Is.UNSEEN] = 0
    out[what == Is.NOBODY] = nobody
    return out


def _shown(plane: PageOwners, values: Values, words: Sequence[tuple[str, str]]) -> MapValues:
    pages = np.bincount(values, weights=plane.pages, minlength=len(words))
    return MapValues(
        values,
        tuple(
            Level(letter, name, int(count))
            for (letter, name), count in zip(words, pages.tolist(), strict=True)
        ),
    )
