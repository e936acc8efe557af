"""The widgets of the console: a table that keeps its place, and the page that holds it all.

Only the visible page is repainted. Texts are shown as they are, never as markup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from textual.widgets import DataTable

if TYPE_CHECKING:
    from tui.old_model import Row, Sheet


class SheetTable(DataTable[Text]):
    """A table of the model; the cursor stays on its row while others come and go."""

    def __init__(self, name: str) -> None:
        super().__init__(id=name, cursor_type="row", zebra_stripes=True)
        self._sheet: Sheet | None = None

    def show(self, sheet: Sheet) -> None:
        """Show ``sheet``; does nothing if it is what is shown."""
        if sheet == self._sheet:
            return
        chosen = self.chosen()
        self._sheet = sheet
        self.clear(columns=True)
        for column in sheet.columns:
            self.add_column(column)
        for row in sheet.rows:
            self.add_row(*(Text(cell) for cell in row.cells), key=row.key)
        keys = [row.key for row in sheet.rows]
        if chosen is not None and chosen.key in keys:
            self.move_cursor(row=keys.index(chosen.key))
        self.border_subtitle = f"{sheet.left_out} more are not shown" if sheet.left_out else ""

    def chosen(self) -> Row | None:
        """The row under the cursor."""
        rows = self._sheet.rows if self._sheet is not None else ()
        return rows[self.cursor_row] if 0 <= self.cursor_row < len(rows) else None
