"""Spans and lines, and how to cut, pad and join them by the columns that a terminal gives them.

Strings that came from a daemon enter through ``said``: names are chosen by others, and may hold
what would steer a terminal. ``Styled`` itself is for text of our own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from rich.cells import cell_len, set_cell_size

from kvd.text import clean

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Style = Literal[
    # text
    "plain", "dim", "head", "key", "border", "ok", "warn", "bad",
    # what is chosen, and what is pointed at
    "selected", "cursor", "lit", "label",
    # pages by state
    "unseen", "free", "cached", "saved", "held", "arriving", "sending", "locked", "quarantined",
    "nobody",
    # charts by load
    "graph-low", "graph-mid", "graph-high",
    # more and more of something: age, hits, locks
    "ramp-0", "ramp-1", "ramp-2", "ramp-3", "ramp-4", "ramp-5", "ramp-6", "ramp-7",
    # one of several of a kind: owners, tiers
    "hue-0", "hue-1", "hue-2", "hue-3", "hue-4", "hue-5", "hue-6", "hue-7",
]  # fmt: skip

STYLES: tuple[Style, ...] = get_args(Style)
"""Every style there is, for whoever gives them colours."""

RAMPS: tuple[Style, ...] = tuple(name for name in STYLES if name.startswith("ramp-"))
HUES: tuple[Style, ...] = tuple(name for name in STYLES if name.startswith("hue-"))

CUT = "…"
"""Stands where text went on."""


class Styled(NamedTuple):
    """Text in one style. ``under``: the style whose colour is the background; empty for none.

    The style ``label`` is for letters on such a ground, readable on any of them.
    """

    text: str
    style: Style = "plain"
    under: Style | Literal[""] = ""


Line = tuple[Styled, ...]
"""What stands on one row of a terminal, from the left."""

EMPTY: Line = ()


def cleaned(text: str, style: Style = "plain") -> Styled:
    """Text that a daemon sent, with everything that could steer a terminal written out."""
    return Styled(clean(text), style)


def line(text: str, style: Style = "plain") -> Line:
    """A line of one span, of text of our own."""
    return (Styled(text, style),)


def columns(text: str) -> int:
    """Columns that a terminal gives this text."""
    return len(text) if text.isascii() else cell_len(text)


def width_of(line: Iterable[Styled]) -> int:
    """Columns of a line."""
    return sum(columns(span.text) for span in line)


def text_of(line: Iterable[Styled]) -> str:
    """A line without its styles."""
    return "".join(span.text for span in line)


def cut(text: str, width: int) -> str:
    """``text`` in at most ``width`` columns; where it went on stands an ellipsis."""
    if columns(text) <= width:
        return text
    if width <= 0:
        return ""
    return set_cell_size(text, width - 1) + CUT


def left(text: str, width: int) -> str:
    """``text`` in exactly ``width`` columns, at the left."""
    if text.isascii() and len(text) <= width:
        return text.ljust(width)
    short = cut(text, width)
    return short + " " * (width - columns(short))


def right(text: str, width: int) -> str:
    """``text`` in exactly ``width`` columns, at the right: for figures."""
    if text.isascii() and len(text) <= width:
        return text.rjust(width)
    short = cut(text, width)
    return " " * (width - columns(short)) + short


def fit(line: Iterable[Styled], width: int, style: Style = "plain") -> Line:
    """A line in exactly ``width`` columns: cut with an ellipsis, or padded in ``style``."""
    parts = list(line)
    room = width - width_of(parts)
    if room >= 0:
        return merged((*parts, Styled(" " * room, style)))
    made: list[Styled] = []
    room = width
    for span in parts:
        need = columns(span.text)
        if need >= room:
            text = set_cell_size(span.text, room - 1) + CUT if room > 0 else ""
            made.append(span._replace(text=text))
            break
        made.append(span)
        room -= need
    return merged(made)


def pointed_at(line: Line) -> Line:
    """The line with the cursor on it."""
    return tuple([span._replace(under="cursor") for span in line])


def merged(spans: Iterable[Styled]) -> Line:
    """The same line with equal neighbours made one, and without empty spans."""
    made: list[Styled] = []
    text, look = "", None
    for more, style, under in spans:
        if (style, under) == look:
            text += more
        elif more:
            if look is not None:
                made.append(Styled(text, *look))
            text, look = more, (style, under)
    if look is not None:
        made.append(Styled(text, *look))
    return tuple(made)


class TextBlock(NamedTuple):
    """Lines that take ``width`` columns side by side with others."""

    lines: Sequence[Line]
    width: int


def side_by_side(blocks: Sequence[TextBlock], gap: int = 1) -> list[Line]:
    """Blocks next to each other, ``gap`` columns between them; the shorter ones end in blanks."""
    made: list[Line] = []
    for row in range(max((len(block.lines) for block in blocks), default=0)):
        parts: list[Styled] = []
        for at, block in enumerate(blocks):
            if at:
                parts.append(Styled(" " * gap))
            own = block.lines[row] if row < len(block.lines) else EMPTY
            parts += fit(own, block.width)
        made.append(merged(parts))
    return made


def spread(at_left: Line, at_right: Line, width: int, fill: Styled | None = None) -> Line:
    """One line with something at either end; the left one is cut where there is no room.

    ``fill`` has one character, which stands between them, a blank at either side of it.
    """
    room = width - width_of(at_right)
    if room <= 0:
        return fit(at_right, width)
    free = room - width_of(at_left)
    if free < 1:
        return merged((*fit(at_left, room - 1), Styled(" "), *at_right))
    if fill is None or free < 3:
        return merged((*at_left, Styled(" " * free), *at_right))
    ruler = fill._replace(text=fill.text * (free - 2))
    return merged((*at_left, Styled(" "), ruler, Styled(" "), *at_right))


def ruled(at_left: Line, at_right: Line, width: int, *, is_lit: bool = False) -> Line:
    """A rule over something, with words at either end of it; ``is_lit``: keys are about this."""
    rule = Styled("━", "key") if is_lit else Styled("─", "border")
    first, last = rule._replace(text=f"{rule.text} "), rule._replace(text=f" {rule.text}")
    return spread((first, *at_left), (*at_right, last), width, rule)


def headed(title: Line, width: int) -> Line:
    """A rule over something, with its title in it."""
    parts = (Styled("─ ", "border"), *title, Styled(" "))
    return fit((*parts, Styled("─" * max(0, width - width_of(parts)), "border")), width)


def wrapped(items: Iterable[Line], width: int, gap: int = 2) -> list[Line]:
    """Things next to each other, ``gap`` columns apart, on as few lines as that takes."""
    lines: list[list[Styled]] = []
    room = 0
    for item in items:
        need = width_of(item)
        if lines and gap + need <= room:
            lines[-1].append(Styled(" " * gap))
            room -= gap
        else:
            lines.append([])
            room = width
        lines[-1] += item
        room -= need
    return [fit(line, width) for line in lines]
