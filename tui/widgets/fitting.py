"""Which columns of a table a terminal has room for, and how wide each of them is. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tui.draw.spans import columns as width_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.wire.console import Column

GAP = 2
"""Blanks between two columns."""

MOVING = frozenset({"since", "until", "holders"})
"""Kinds whose text changes as time goes by."""

CAPS = {"text": 28, "state": 14, "ref": 20, "holders": 44}
"""How wide a column is at most before all have what they need; others are as wide as they are."""

TIGHT = 12
"""The same for all of these where as many columns as possible are wanted."""


class Fit(msgspec.Struct, frozen=True):
    """``at`` are the columns shown, by their place in the sheet; ``hidden``: how many are not."""

    at: tuple[int, ...]
    widths: tuple[int, ...]
    hidden: int

    def column_under(self, x: int) -> int | None:
        """The column at this place of a line; None for none."""
        edge = 0
        for at, width in zip(self.at, self.widths, strict=True):
            if edge <= x < edge + width + GAP:
                return at
            edge += width + GAP
        return None


class Rules(msgspec.Struct, frozen=True):
    """What a page says of a table's columns: ``first`` stay longest, ``never`` are not shown.

    ``narrow`` may be cut so that others have room. ``is_tight``: that is so of all of them.
    """

    first: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()
    is_tight: bool = False


def natural(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    """How wide each column would like to be: its widest text, and its name."""
    widths = [width_of(column.name) for column in columns]
    for row in rows:
        for at, text in enumerate(row):
            if len(text) > widths[at]:
                widths[at] = width_of(text)
    return widths


def fit(
    columns: Sequence[Column], wishes: Sequence[int], width: int, rules: Rules, shift: int = 0
) -> Fit:
    """The columns that go into ``width``, in the sheet's order.

    Those of ``rules.first`` are taken before others; the rest in the sheet's order. ``shift``
    leaves out so many after the first one, to look at those further right.
    """
    names = [column.name for column in columns]
    usable = [
        at
        for at, column in enumerate(columns)
        if column.kind != "depth" and column.name not in rules.never
    ]
    if shift and usable:
        usable = [usable[0], *usable[1 + min(shift, len(usable) - 2) :]]
    ranked = sorted(
        usable,
        key=lambda at: rules.first.index(names[at]) if names[at] in rules.first else len(names),
    )
    least = {at: _least(columns[at], wishes[at], rules) for at in usable}
    taken: list[int] = []
    room = width + GAP
    for at in ranked:
        need = least[at] + GAP
        if need <= room:
            taken.append(at)
            room -= need
        elif not taken:
            least[at] = max(1, width)
            taken.append(at)
            room = 0
    shown = tuple(sorted(taken))
    kinds = [column.kind for column in columns]
    caps = [min(wish, CAPS.get(kind, wish)) for kind, wish in zip(kinds, wishes, strict=True)]
    room = _widen(shown, least, caps, room)
    _widen(shown, least, wishes, room)
    return Fit(shown, tuple(least[at] for at in shown), len(usable) - len(taken))


def _least(column: Column, wish: int, rules: Rules) -> int:
    """What a column must have to be shown at all."""
    cap = CAPS.get(column.kind, wish)
    is_tight = column.name in rules.narrow or (rules.is_tight and column.kind in CAPS)
    return max(1, min(wish, cap, TIGHT if is_tight else cap))


def _widen(taken: Sequence[int], widths: dict[int, int], wishes: Sequence[int], room: int) -> int:
    """Room that is left goes to those that have less than they wish, from the left; the rest."""
    for at in taken:
        more = min(room, wishes[at] - widths[at])
        if more > 0:
            widths[at] += more
            room -= more
    return room
