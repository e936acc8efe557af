"""A table with columns that are made here, and cells that look otherwise than their kind does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from typing_extensions import override

from tui.model.dress import Facts, places
from tui.model.sheets import slot_of
from tui.widgets.linetable import LineTable
from tui.widgets.reach import console

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvd.wire.console import Column, TableRow
    from tui.draw.spans import Style
    from tui.model.dress import Wardrobe
    from tui.model.moments import Moment
    from tui.model.rates import RowRates
    from tui.model.sheets import Sheet
    from tui.widgets.fitting import Rules

    Shown = tuple[str, Style]
    Painter = Callable[[Facts], Shown]


class DressedTable(LineTable):
    """``painters`` make text of cells by the name of their column; others look as their kind does.

    ``wardrobe`` adds columns, by which the daemon cannot sort: ``stands_for`` says by which of its
    own it shall do so instead. ``rates`` hear every new sheet, also while the screen stands still.
    """

    def __init__(
        self,
        view: str,
        wardrobe: Wardrobe,
        painters: Mapping[str, Painter],
        *,
        title: str = "",
        sort: str = "",
        rules: Rules | None = None,
        stands_for: Mapping[str, str] | None = None,
        rates: Sequence[RowRates] = (),
    ) -> None:
        super().__init__(view, title=title, sort=sort, rules=rules)
        self._wardrobe = wardrobe
        self._painters = painters
        self._stands_for = stands_for if stands_for is not None else {}
        self._rates = tuple(rates)
        self._taken: Sheet | None = None
        self._source: Sheet | None = None
        self._dressed: Sheet | None = None
        self._at: Mapping[str, int] = {}
        self._at_for: tuple[Column, ...] = ()

    @override
    def show(self, moment: Moment) -> None:
        self._take()
        slot = slot_of(self.asks())
        sheet = moment.sheet(self.asks())
        if sheet is None:
            super().show(moment)
            return
        if sheet is not self._source or self._dressed is None:
            self._source, self._dressed = sheet, self._wardrobe.dress(sheet)
        super().show(msgspec.structs.replace(moment, sheets={slot: self._dressed}))

    def _take(self) -> None:
        newest = console(self).mirror.moments.newest.sheet(self.asks())
        if newest is not None and newest is not self._taken:
            self._taken = newest
            for rates in self._rates:
                rates.take(newest)

    @property
    def source(self) -> Sheet | None:
        """What is shown, as the daemon sent it."""
        return self._source

    def facts(self) -> Facts | None:
        """The row under the cursor, by the names of its columns."""
        row = self.row()
        return Facts(row, places(self.columns), self._now_s) if row is not None else None

    @override
    def sort_next(self) -> None:
        names = ["", *(column.name for column in self._source.columns)] if self._source else [""]
        now = self.sort.removeprefix("-")
        at = names.index(now) if now in names else 0
        self.sort_by(names[(at + 1) % len(names)])

    @override
    def sort_by(self, name: str) -> None:
        super().sort_by(self._stands_for.get(name, name))

    @override
    def _cell(self, row: TableRow, at: int) -> tuple[str, Style]:
        paint = self._painters.get(self.columns[at].name)
        if paint is None:
            return super()._cell(row, at)
        if self._at_for is not self.columns:
            self._at_for, self._at = self.columns, places(self.columns)
        return paint(Facts(row, self._at, self._now_s))

    def on_resize(self) -> None:
        """Cells may be made for the room that there is."""
        self._known.clear()
        self.redraw()
