"""The card of what is open: who holds it, why, since when, and where to go from there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rich.cells import cell_len
from typing_extensions import override

from kvd.errors import Refusal
from kvd.text import clean, duration
from kvd.wire.admin import Because, Why
from kvd.wire.console import Column, TableRow
from tui.draw import spans
from tui.draw.spans import Line, Styled, cleaned
from tui.model import cells
from tui.widgets.canvas import Canvas
from tui.widgets.dialogs import wrap_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


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


def card_lines(content: CardContent, width: int) -> list[Line]:
    """The whole card: its answer, then what its row says."""
    made: list[Line] = [
        spans.ruled((cleaned(content.ref, "head"),), (Styled("Esc", "key"),), width)
    ]
    match content.answer:
        case Because() as because:
            made += _because(because, width)
        case Refusal() as refusal:
            made += _wrapped(refusal.message, width, "warn")
        case None if question(content.ref) is not None:
            made.append(spans.line("asking", "dim"))
    if content.row is not None:
        made += [*_heading("row", width), *_facts(content, width)]
    return made


def _because(because: Because, width: int) -> list[Line]:
    made = list(_wrapped(because.sentence, width, "selected"))
    marked = tuple(mark.what for mark in because.marks)
    facts = [fact for fact in because.facts if not marked or not fact.endswith(marked)]
    if facts:
        made += [*_heading("facts", width)]
        for fact in facts:
            made += _wrapped(fact, width)
    if because.marks:
        made += _heading("story", width)
        for mark in because.marks:
            made += _hanging(f"-{duration(max(0.0, mark.ago_s))}", mark.what, width)
    if because.links:
        made += _heading("has to do with (g)", width)
        made += _wrapped("  ".join(because.links), width, "key")
    return made


def _heading(text: str, width: int) -> list[Line]:
    return [(), spans.spread((Styled(text, "dim"),), (), width, None)]


def _facts(content: CardContent, width: int) -> list[Line]:
    """Each cell of the row by its column's name."""
    assert content.row is not None
    names = [column.name for column in content.columns]
    pad = min(max((cell_len(name) for name in names), default=0), width // 2)
    made: list[Line] = []
    for column, cell in zip(content.columns, content.row.cells, strict=True):
        if column.kind == "depth" or cell is None or cell == "":
            continue
        text, style = cells.show(cell, column.kind, content.now_s, 400)
        name = Styled(spans.left(clean(column.name), pad) + "  ", "dim")
        first, *rest = wrap_words(text, max(8, width - pad - 2)) or [""]
        made.append((name, Styled(first, style)))
        made += [(Styled(" " * (pad + 2)), Styled(more, style)) for more in rest]
    return made


def _hanging(first: str, text: str, width: int) -> list[Line]:
    """``first`` in a column of its own, the text beside it."""
    pad = 9
    parts = wrap_words(clean(text), max(8, width - pad)) or [""]
    return [
        (Styled(spans.right(first, pad - 1) + " ", "dim"), Styled(parts[0])),
        *((Styled(" " * pad), Styled(part)) for part in parts[1:]),
    ]


def _wrapped(text: str, width: int, style: spans.Style = "plain") -> list[Line]:
    return [(Styled(part, style),) for part in wrap_words(clean(text), width)]


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
    near = (first, *(ref for ref in rest if ref.startswith("room:")))
    return next((ref for ref in near if ref.partition(":")[0] in WITH_EVENTS), "")


class Card(Canvas):
    """Beside the page, or over it where there is no room; ``say`` shows what is known now."""

    DEFAULT_CSS = "Card { display: none; }"

    def __init__(self) -> None:
        super().__init__(id="card")
        self.content: CardContent | None = None
        self._top = 0

    @property
    def ref(self) -> str:
        """What is open; empty for nothing."""
        return self.content.ref if self.content is not None else ""

    @property
    def links(self) -> Sequence[str]:
        """What the answer names, then what the row does: to go to."""
        return links_of(self.content) if self.content is not None else ()

    def open(self, ref: str) -> None:
        """Show this from now on."""
        if ref != self.ref:
            self._top = 0
            self.say(CardContent(ref))
        self.display = True

    def close(self) -> None:
        """Show nothing."""
        self.content = None
        self.display = False

    def say(self, content: CardContent) -> None:
        """Show what is known now."""
        self.content = content
        self.redraw()

    def scroll_by(self, lines: int) -> None:
        """Show what is further down, or up again."""
        self._top = max(0, self._top + lines)
        self.redraw()

    @override
    def make_lines(self, width: int, height: int) -> Sequence[Line]:
        if self.content is None:
            return ()
        lines = card_lines(self.content, width)
        self._top = max(0, min(self._top, len(lines) - height))
        return [lines[0], *lines[1 + self._top :]]

    @override
    def wheel(self, lines: int) -> None:
        self.scroll_by(lines)
