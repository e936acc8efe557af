"""A whole and its parts: the pages of a pool by state, tokens by source, pages by owner.

Every part that there is shows, however small it is, and begins with its letter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvd.text import clean, percent, thousands
from tui.draw.chart import bar
from tui.draw.page_map import letter_of, styles
from tui.draw.spans import Line, Style, Styled, fit, left, line, merged, right, wrapped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.wire.console import PageMap, Sources

FIGURE_COLUMNS = 12
MOST_NAME_COLUMNS = 24
LEAST_BAR_COLUMNS = 8


class BarPart(NamedTuple):
    """So many of a whole; ``letter`` is one column wide."""

    letter: str
    name: str
    size: int
    style: Style


class PoolPages(NamedTuple):
    """Pages of a pool by state. ``locked`` ones are cached, and cannot be evicted."""

    free: int
    held: int
    cached: int
    quarantined: int
    locked: int = 0


def pool(pages: PoolPages) -> tuple[BarPart, ...]:
    """A pool's pages, the free ones last."""
    locked = min(pages.locked, pages.cached)
    return (
        BarPart("H", "held", pages.held, "held"),
        BarPart("L", "locked", locked, "locked"),
        BarPart("c", "cached", pages.cached - locked, "cached"),
        BarPart("Q", "quarantined", pages.quarantined, "quarantined"),
        BarPart(".", "free", pages.free, "free"),
    )


def sources(tokens: Sources) -> tuple[BarPart, ...]:
    """Where tokens came from; what had to be computed is one part."""
    missed = sum(part.size for part in misses(tokens))
    return (
        BarPart("c", "cached", tokens.cached, "cached"),
        BarPart("p", "from a peer", tokens.received, "arriving"),
        BarPart("s", "saved", tokens.restored, "saved"),
        BarPart("x", "computed", missed, "bad"),
    )


def misses(tokens: Sources) -> tuple[BarPart, ...]:
    """Why tokens had to be computed."""
    return (
        BarPart("n", "never seen", tokens.new, "dim"),
        BarPart("e", "evicted", tokens.evicted, "warn"),
        BarPart("l", "lost on its way", tokens.lost, "bad"),
        BarPart("u", "fills no page", tokens.unaligned, "hue-0"),
    )


def levels(shown: PageMap) -> tuple[BarPart, ...]:
    """The levels of a page map: of the lens ``owner``, whose the pages are."""
    return tuple(
        BarPart(letter_of(level), level.name, level.pages, style)
        for level, style in zip(shown.levels, styles(shown), strict=True)
    )


def allotted(counts: Sequence[int], width: int) -> list[int]:
    """``width`` columns among parts by their counts; one at least for what is not nothing.

    Where there are more parts than columns, the first ones have them. Nothing has none.
    """
    total = sum(counts)
    given = [min(1, count) for count in counts]
    while sum(given) > max(width, 0):
        given[len(given) - 1 - given[::-1].index(1)] = 0
    spare = width - sum(given)
    if total <= 0 or spare <= 0:
        return given
    wanted = [
        max(0.0, width * count / total - has) for count, has in zip(counts, given, strict=True)
    ]
    scale = spare / (sum(wanted) or 1.0)
    exact = [want * scale for want in wanted]
    given = [has + int(more) for has, more in zip(given, exact, strict=True)]
    by_rest = sorted(range(len(exact)), key=lambda at: int(exact[at]) - exact[at])
    for at in by_rest[: width - sum(given)]:
        given[at] += 1
    return given


def stacked(parts: Sequence[BarPart], width: int) -> Line:
    """All parts in one bar: each begins with its letter; a whole of nothing is blank."""
    spans: list[Styled] = []
    for part, columns in zip(parts, allotted([p.size for p in parts], width), strict=True):
        if columns:
            spans.append(Styled(part.letter, "label", part.style))
            fill = "░" if part.style == "free" else "█"
            spans.append(Styled(fill * (columns - 1), part.style))
    return fit(spans, width)


def key(parts: Sequence[BarPart], width: int) -> list[Line]:
    """Letter, name, count and share of every part, on as few lines as that takes."""
    total = sum(part.size for part in parts)
    items: list[Line] = [
        (
            Styled(part.letter, "label", part.style),
            Styled(
                f" {clean(part.name)} {thousands(part.size)} {percent(part.size, total)}",
                "plain" if part.size else "dim",
            ),
        )
        for part in parts
    ]
    return wrapped(items, width)


def histogram(parts: Sequence[BarPart], width: int, height: int) -> list[Line]:
    """A line for each part, the largest first: letter, name, bar with its share, count.

    Where there is not room for all, the last line says what the others have.
    """
    total = sum(part.size for part in parts)
    found = sorted([part for part in parts if part.size], key=lambda part: -part.size)
    if len(found) > height > 0:
        others = found[height - 1 :]
        rest = sum(part.size for part in others)
        found = [*found[: height - 1], BarPart("+", f"{len(others)} others", rest, "dim")]
    name_columns = min(max((len(clean(p.name)) for p in found), default=0), MOST_NAME_COLUMNS)
    room = width - 2 - name_columns - 1 - FIGURE_COLUMNS
    return [_counted(part, total, name_columns, room, width) for part in found[: max(height, 0)]]


def _counted(part: BarPart, total: int, name_columns: int, room: int, width: int) -> Line:
    head = (
        Styled(part.letter, "label", part.style),
        Styled(" " + left(clean(part.name), name_columns)),
    )
    figure = Styled(right(thousands(part.size), FIGURE_COLUMNS))
    share = (
        bar(part.size, total, room, part.style)
        if room >= LEAST_BAR_COLUMNS
        else line(percent(part.size, total))
    )
    return fit(merged((*head, Styled(" "), *share, figure)), width)
