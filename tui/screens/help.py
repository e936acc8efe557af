"""The page of keys, made from the table of keys, and of commands, made from theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from tui.draw import spans
from tui.draw.spans import Line, Span
from tui.keys import TABLE
from tui.model.commands import RULES
from tui.widgets.popup import Popup

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tui.keys import Key

GROUPS = {
    "pages": "pages",
    "move": "moving",
    "open": "what is open",
    "view": "what the page shows",
    "time": "time",
    "change": "changes something: shows first what it would do",
    "console": "the console",
}
"""Groups of the table, and how they are headed; a page's own keys come before them."""
KEY_COLUMNS = 12
COMMAND_COLUMNS = 30


def help_lines(page: str, has: Collection[str], width: int) -> list[Line]:
    """The keys of this page, then those of all, then commands; what means nothing now is dim."""
    own = [key for key in TABLE if page in key.pages]
    made: list[Line] = []
    if own:
        made += _group(f"on the page {page}", own, page, has)
    for group, heading in GROUPS.items():
        keys = [key for key in TABLE if key.group == group and not key.pages]
        made += _group(heading, [key for key in keys if key not in own], page, has)
    made += [(Span("commands", "head"),)]
    for rule in RULES:
        if rule.needs and rule.needs not in has:
            continue
        usage = spans.left(f":{rule.usage}", COMMAND_COLUMNS)
        made.append((Span(f"  {usage} ", "key"), Span(rule.help)))
    return [spans.fit(line, width) if spans.width_of(line) > width else line for line in made]


def _group(heading: str, keys: Sequence[Key], page: str, has: Collection[str]) -> list[Line]:
    """Keys that change something are left out where nothing may be changed."""
    shown = [key for key in keys if "write" not in key.needs or "write" in has]
    if not shown:
        return []
    made: list[Line] = [(Span(heading, "head"),)]
    for key in shown:
        style: spans.Style = "plain" if key.means(page, has) else "dim"
        label = spans.left(key.label, KEY_COLUMNS)
        made.append((Span(f"  {label} ", "key"), Span(key.help, style)))
    return [*made, ()]


class Help(Popup[None]):
    """Every key, by what it is about."""

    def __init__(self, page: str, has: Collection[str]) -> None:
        super().__init__("keys and commands", 92)
        self._page = page
        self._has = frozenset(has)

    @override
    def body(self, width: int) -> Sequence[Line]:
        return help_lines(self._page, self._has, width)
