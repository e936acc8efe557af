"""Concerns as an operator reads them. Pure; the rows are those of the view ``concerns``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.text import clean

if TYPE_CHECKING:
    from tui.draw.spans import Style
    from tui.model.columns import NamedRow

LETTERS: dict[str, tuple[str, Style]] = {
    "high": ("!", "bad"),
    "medium": ("▲", "warn"),
    "low": ("·", "dim"),
}
"""How grave, for eyes without colours."""


def severity(row: NamedRow) -> tuple[str, Style]:
    """How grave it is: a letter, a colour and the word."""
    word = row.text("severity")
    letter, style = LETTERS.get(word, ("?", "warn"))
    return f"{letter} {clean(word)}", style
