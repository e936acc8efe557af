"""The life of the handoff under the cursor: both ends over one axis of time, and what was told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.text import clean, counted
from tui.draw import phases, spans
from tui.draw.spans import Line, Span, said
from tui.model import cells, handoffs, lives
from tui.widgets.canvas import Canvas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.wire.admin import OtherEnd
    from tui.draw.phases import End
    from tui.model.dress import Facts
    from tui.model.lives import Life

AGO_COLUMNS = 9
BAR_FROM_COLUMNS = 100
"""Where there is room for a second bar; the table has one already."""
RULE = Span("─", "border")


def life_lines(life: Life, row: Facts, node: str, now_s: float, width: int) -> list[Line]:
    """Its head, the chart, what is wrong, the figures, then its story; in the order of weight."""
    ends = lives.ends(life, row, node, now_s)
    until_s = row.number("until")
    deadline_in_s = None if until_s is None else until_s - now_s
    made = [_head(row, width), *phases.draw(ends, width, deadline_in_s)]
    made += _trouble(row, width)
    made += _figures(life, row, node, now_s, width)
    return [*made, *_story(ends, width)]


def _head(row: Facts, width: int) -> Line:
    state, style = handoffs.state(row)
    room = row.number("room")
    at_left = (
        Span("─ ", "border"),
        said(row.row.key, "head"),
        Span("" if room is None else f"  room {room:.0f}  "),
        Span(handoffs.peer(row)[0]),
        Span("  "),
        Span(state, style),
    )
    words = f"{handoffs.done(row)[0]}  {handoffs.rate(row)[0]}  {handoffs.eta(row)[0]}"
    if width >= BAR_FROM_COLUMNS and row.number("progress") is not None:
        words = f"{handoffs.progress(row, 10)[0]} {words}"
    return spans.spread(at_left, (Span(words.strip(), "dim"), Span(" ─", "border")), width, RULE)


def _trouble(row: Facts, width: int) -> list[Line]:
    """Why it failed."""
    if row.text("state") == "failed":
        why = row.text("waiting_for") or "nobody said why"
        return [spans.fit((Span("failed: ", "bad"), said(why, "bad")), width)]
    return []


def _figures(life: Life, row: Facts, node: str, now_s: float, width: int) -> list[Line]:
    """What each end says of its bytes, ours first."""
    made = [_of_end(node, _ours(row), width)]
    if life.there is not None and isinstance(life.there.answer, tuple):
        by_s = now_s - life.there.at_s
        told = [one for one in life.there.answer if not one.why_none]
        made += [_of_end(one.peer, _told(one, by_s), width) for one in told]
    return made


def _of_end(name: str, words: list[str], width: int) -> Line:
    text = ", ".join(word for word in words if word)
    return spans.fit((said(f"{name}: ", "head"), Span(text)), width)


def _ours(row: Facts) -> list[str]:
    """The figures of our own end, as they are now."""
    posts, pages, of = row.number("posts"), row.number("done_pages"), row.number("total_pages")
    return [
        f"{handoffs.done(row)[0]} {'here' if row.text('side') == 'decode' else 'sent'}",
        f"{pages:.0f} of {of:.0f} pages posted" if pages is not None and of is not None else "",
        f"{counted(posts, 'post')} under way" if posts is not None else "",
        _prompt(row.number("prompt_tokens"), row.number("decode_prefix_len")),
    ]


def _told(one: OtherEnd, by_s: float) -> list[str]:
    """The figures of the other end, and how far away it is; its deadline is by its own clock."""
    deadline_in_s = one.deadline_in_s - by_s
    return [
        f"{cells.size(one.moved_bytes)}/{cells.size(one.total_bytes)} there",
        f"{counted(one.outstanding_posts, 'post')} under way" if one.side == "prefill" else "",
        _prompt(one.prompt_tokens, one.decode_prefix_len),
        f"its deadline in {phases.lasting(deadline_in_s)}" if one.deadline_in_s else "",
        f"round trip {phases.lasting(one.round_trip_s)}",
    ]


def _prompt(tokens: float | None, cached: float | None) -> str:
    return "" if tokens is None else f"prompt {tokens:.0f} tokens, {cached or 0:.0f} cached before"


def _story(ends: Sequence[End], width: int) -> list[Line]:
    """What happened at both ends in one order, the newest first: it is what one looks for."""
    found = lives.story(ends)
    if not found:
        return []
    made = [spans.headed((Span("story of both ends", "dim"),), width)]
    names = min(24, max(spans.columns(clean(name)) for _, name, _ in found))
    for ago_s, name, what in reversed(found):
        ago = spans.right(f"-{phases.lasting(max(0.0, ago_s))}", AGO_COLUMNS)
        who = spans.left(clean(name), names)
        before = Span(f"{ago}  {who}  ", "dim")
        made.append(spans.fit((before, said(what)), width))
    return made


def nothing_lines(width: int) -> list[Line]:
    """Where no handoff is chosen."""
    head = spans.headed((Span("life of a handoff", "head"),), width)
    return [head, (Span("  no handoff is under way", "dim"),)]


class LifePanel(Canvas):
    """Shows ``life_lines``; what does not fit is the oldest of the story."""

    def show(self, life: Life, row: Facts | None, node: str, now_s: float) -> None:
        """Show this handoff as of ``now_s``; ``row`` None: nothing is chosen."""
        width, height = self.size.width, self.size.height
        if not width or not height:
            return
        lines = nothing_lines(width) if row is None else life_lines(life, row, node, now_s, width)
        self.paint(lines[:height])
