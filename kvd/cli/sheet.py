"""Tables for people: rows below headings, prose below rows, and texts that are safe to show."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from kvd.text import clean

_STYLES = {
    "serving": "green",
    "ready": "green",
    "up": "green",
    "suspect": "yellow",
    "lingering": "yellow",
    "draining": "yellow",
    "drained": "yellow",
    "stopping": "yellow",
    "quarantined": "yellow",
    "saving": "yellow",
    "retracted": "yellow",
    "resuming": "yellow",
    "restoring": "yellow",
    "lost": "bold red",
    "refused": "bold red",
}


def said(text: str, style: str = "") -> Text:
    """A text of the daemon, made safe."""
    return Text(clean(text), style=style)


def state(name: str) -> Text:
    """A state, coloured where it deserves attention."""
    return said(name, _STYLES.get(name, ""))


class TextTable:
    """Rows below headings, each with lines of prose under it where there is more to say.

    A column is as wide as its widest cell, so nothing is folded or cut into an ellipsis; what does
    not fit 80 columns belongs into the prose. Headings that end in ``>`` stand over figures.
    """

    def __init__(self, *headings: str) -> None:
        self._is_figure = [heading.endswith(">") for heading in headings]
        self._rows = [[Text(heading.rstrip(">"), "bold") for heading in headings]]
        self._prose: list[list[str]] = [[]]

    def row(self, *cells: str | Text, prose: str = "") -> None:
        """Add a row; texts are made safe here."""
        self._rows.append([cell if isinstance(cell, Text) else said(cell) for cell in cells])
        self._prose.append([clean(line) for line in prose.split("\n") if line])

    def __rich__(self) -> Group:
        """The lines."""
        widths = [max(cell.cell_len for cell in column) for column in zip(*self._rows, strict=True)]
        lines: list[Text] = []
        for row, prose in zip(self._rows, self._prose, strict=True):
            line = Text()
            for cell, width, is_figure in zip(row, widths, self._is_figure, strict=True):
                blank = " " * (width - cell.cell_len)
                line.append_text(Text(blank) + cell if is_figure else cell + Text(blank))
                line.append("  ")
            line.rstrip()
            lines.append(line)
            lines += [Text(f"    {more}", "dim") for more in prose]
        return Group(*lines)


def nothing(what: str) -> Text:
    """The line that stands where a table would be empty."""
    return Text(f"no {what}", style="dim")
