"""The card of what is open: who holds it, why, since when, and where to go from there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static
from typing_extensions import override

from kvd.errors import Refusal
from kvd.text import clean, duration
from kvd.wire.admin import Because, Why
from kvd.wire.console import Column, TableRow
from tui.draw.spans import EMPTY, Line, Styled, cleaned, left, line
from tui.model import cells
from tui.model.columns import heading
from tui.widgets.canvas import palette_of, rich_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from textual.app import ComposeResult

ASKED = frozenset({"page", "node", "room", "lease", "receive", "send", "client"})
"""Kinds that the daemon is asked about by number; ``peer`` by name. Others are their row."""
WITH_PAGES = frozenset({"lease", "node", "client"})
"""Kinds whose pages the page map can light up."""
WITH_EVENTS = frozenset({"room", "lease", "client", "peer", "node"})
"""Kinds that events name."""
PAGES_OF, EVENTS_OF = "pages:", "events:"
"""Before one of these: to be opened on the page map, or among the events that name it."""
ELSEWHERE = {PAGES_OF: "pools", EVENTS_OF: "events"}
"""The pages that they are opened on."""
MOST_NAME_COLUMNS = 18


def question(ref: str) -> Why | None:
    """What to ask about ``lease:7``, ``page:swa:17`` or ``peer:NAME``; None: nothing to ask."""
    kind, _, rest = ref.partition(":")
    if kind == "peer" and rest:
        return Why(0, kind, 0, name=rest)
    component, _, number = rest.rpartition(":")
    if kind not in ASKED or not number.isdecimal():
        return None
    return Why(0, kind, int(number), component=component)


class CardContent(msgspec.Struct, frozen=True):
    """What is known of what is open; ``heard_s`` on our clock, when the answer came."""

    ref: str
    answer: Because | Refusal | None = None
    row: TableRow | None = None
    columns: tuple[Column, ...] = ()
    now_s: float = 0.0


def card_lines(content: CardContent) -> list[Line]:
    """The whole card: its answer, then what its row says."""
    made: list[Line] = []
    match content.answer:
        case Because() as because:
            made += _because(because)
        case Refusal() as refusal:
            made.append((cleaned(refusal.message, "warn"),))
        case None if question(content.ref) is not None:
            made.append(line("asking", "dim"))
    if content.row is not None:
        made += [EMPTY, line("row", "dim"), *_facts(content)]
    return made


def _because(because: Because) -> list[Line]:
    made: list[Line] = [(cleaned(because.sentence, "selected"),)]
    marked = tuple(mark.what for mark in because.marks)
    facts = [fact for fact in because.facts if not marked or not fact.endswith(marked)]
    if facts:
        made += [EMPTY, line("facts", "dim"), *((cleaned(fact),) for fact in facts)]
    if because.marks:
        made += [EMPTY, line("story", "dim")]
        for mark in because.marks:
            ago = f"{f'-{duration(max(0.0, mark.ago_s))}':>8} "
            made.append((Styled(ago, "dim"), cleaned(mark.what)))
    if because.links:
        links = [span for ref in because.links for span in (cleaned(ref, "key"), Styled("  "))]
        made += [EMPTY, line("related (r)", "dim"), tuple(links[:-1])]
    return made


def _facts(content: CardContent) -> list[Line]:
    """Each cell of the row by its column's name."""
    assert content.row is not None
    names = [heading(column) for column in content.columns]
    pad = min(max(map(len, names), default=0), MOST_NAME_COLUMNS)
    made: list[Line] = []
    for name, column, cell in zip(names, content.columns, content.row.cells, strict=True):
        if column.kind == "depth" or cell is None or cell == "":
            continue
        text, style = cells.show(cell, column.kind, content.now_s, 400)
        made.append((Styled(left(clean(name), pad) + "  ", "dim"), Styled(text, style)))
    return made


def links_of(content: CardContent) -> tuple[str, ...]:
    """What there is to go to: what the answer names, then what the row does, then its pages."""
    found = list(content.answer.links) if isinstance(content.answer, Because) else []
    if content.row is not None:
        for column, cell in zip(content.columns, content.row.cells, strict=True):
            if isinstance(cell, tuple):
                found += [holder.ref for holder in cell]
            elif column.kind == "ref" and isinstance(cell, str):
                found.append(cell)
    if content.ref.partition(":")[0] in WITH_PAGES:
        found.append(PAGES_OF + content.ref)
    if about := about_of((content.ref, *found)):
        found.append(EVENTS_OF + about)
    return tuple(dict.fromkeys(ref for ref in found if ref and ref != content.ref))


def about_of(refs: Iterable[str]) -> str:
    """What events are to be about: the first of a kind that they name, of a handoff its room."""
    first, *rest = refs
    is_event = first.startswith("event:")
    near = (first, *(ref for ref in rest if is_event or ref.startswith("room:")))
    return next((ref for ref in near if ref.partition(":")[0] in WITH_EVENTS), "")


class Card(VerticalScroll, can_focus=False):
    """Beside the page, or over it where there is no room; ``say`` shows what is known now."""

    DEFAULT_CSS = "Card { display: none; } Card > Static { width: 1fr; }"

    def __init__(self) -> None:
        super().__init__(id="card")
        self.content: CardContent | None = None
        self._lines: list[Line] = []

    @override
    def compose(self) -> ComposeResult:
        yield Static()

    @property
    def ref(self) -> str:
        """What is open; empty for nothing."""
        return self.content.ref if self.content is not None else ""

    @property
    def links(self) -> Sequence[str]:
        """What the answer names, then what the row does: to go to."""
        return links_of(self.content) if self.content is not None else ()

    def open(self, ref: str, crumbs: Sequence[str]) -> None:
        """Show this from now on; ``crumbs``: the way that led here."""
        self.border_title = Content(clean(" > ".join((*crumbs[:-1], ref))))
        self.border_subtitle = "Esc"
        if ref != self.ref:
            self.scroll_home(animate=False)
            self.say(CardContent(ref))
        self.display = True

    def close(self) -> None:
        """Show nothing."""
        self.content = None
        self.display = False

    def say(self, content: CardContent) -> None:
        """Show what is known now."""
        self.content = content
        lines = card_lines(content)
        if lines != self._lines:
            self._lines = lines
            self.query_one(Static).update(rich_lines(lines, palette_of(self.app), self.links))
